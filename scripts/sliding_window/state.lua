-- Sliding window: estimates the sliding log from the counts of `buckets` sub-windows and of the one
-- before them, which is weighted by its overlap with the window.
-- state   'W', then integers of 1, 7, 7, 7, 7 and 5 bytes: {parts, length, start, at, last, sum},
--         then the counts of `parts + 1` sub-windows, of four bytes, newest first: the first one
--         contains `last`, the instant of the newest admitted request; `sum` is that of all but the
--         last one
--         'X': the same, with a sum and counts of 7 bytes, once a count does not fit in four bytes
-- params  'W', then doubles: {limit, window, buckets}
-- Inside, one microsecond is `buckets` parts, so that a sub-window is `window` parts.
forms = 'WX'
local limit, window, buckets = struct.unpack('<ddd', params, 2)
local MAX_COUNT, MAX_NARROW = 2 ^ 46, 2 ^ 32 - 1
local NARROW, WIDE = 87, 88
local form, STATE, STATE_SIZE, COUNT, COUNT_SIZE, ONE_COUNT, NEWEST
local size -- of the state that was found
local at, start, length, last -- `length` is that of a sub-window, in parts
local index, parts, counts -- the number of the sub-window of `last`; parts of a microsecond

local function use_form(letter)
  form = letter
  if letter == WIDE then
    STATE, STATE_SIZE, NEWEST = '<BBI7i7I7i7I7', 37, '<I7i7I7I7'
    COUNT, COUNT_SIZE, ONE_COUNT = 'I7', 7, '<I7'
  else
    STATE, STATE_SIZE, NEWEST = '<BBI7i7I7i7I5', 35, '<I7i7I5I4'
    COUNT, COUNT_SIZE, ONE_COUNT = 'I4', 4, '<I4'
  end
end

-- The form of new states, and the size that is read.
local usual_form = limit > MAX_NARROW and WIDE or NARROW
use_form(usual_form)
size = STATE_SIZE + COUNT_SIZE * (buckets + 1)
local usual_size, size_text = size, string.format('%d', size)

-- Returns `math.floor(a * b / c)`, with `a` below 2^48 and `b` up to `c`, which is at most 2^46. If
-- the product is not exact, by a long division with digits of base 64: the numbers in it are below
-- 127 x 2^46.
local function mul_div(a, b, c)
  if a * b < 2 ^ 53 then
    return math.floor(a * b / c)
  end
  local quotient, rest, unit = 0, 0, 2 ^ 42
  while unit >= 1 do
    local digit = math.floor(a / unit)
    a = a - digit * unit
    local part = rest * 64 + digit * b
    local whole = math.floor(part / c)
    quotient, rest = quotient * 64 + whole, part - whole * c
    unit = unit / 64
  end
  return quotient
end

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
