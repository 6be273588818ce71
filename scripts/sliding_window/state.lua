-- Sliding window: estimates the sliding log from the counts of `buckets` sub-windows and of the one
-- before them, which is weighted by its overlap with the window.
-- state   'W', then integers of 1, 7, 7, 7, 7 and 5 bytes: {parts, length, start, at, last, sum},
--         then the counts of `parts + 1` sub-windows, of four bytes, newest first: the first one
--         contains `last`, the instant of the newest admitted request; `sum` is that of all but the
--         last one
-- params  'W', then doubles: {limit, window, buckets, grain}
-- Inside, one microsecond is `buckets` parts, so that a sub-window is `window` parts; overlaps are
-- rounded up to `grain` parts.
local limit, window, buckets, grain = struct.unpack('<dddd', params, 2)
local STATE, STATE_SIZE = '<BBI7i7I7i7I5', 35
local size = STATE_SIZE + 4 * buckets + 4
local size_text = string.format('%d', size)
local at, start, length, last -- `length` is that of a sub-window, in parts
local index, parts, counts -- the number of the sub-window of `last`; parts of a microsecond

local function slot_of(instant)
  return math.floor((instant - start) * parts / length)
end

local function opening(slot)
  return start + math.ceil(slot * length / parts)
end

-- Checks the numbers: those of another program could keep the loops from ending.
local function is_sound()
  local max = 2 ^ 53
  return parts > 0 and length >= 1 and length < max
    and start > -max and start <= last and last < max
    and (last - start) * parts / length < max
end
