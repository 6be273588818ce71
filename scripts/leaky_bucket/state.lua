-- Leaky bucket: a queue with a constant outflow. A request leaves when those before it have left; a
-- request that would not fit into the bucket is denied.
-- state   'L', then integers of 7, 7, 7, 6, 4, 3 and 1 bytes: {at, debt, last, unit, lump, excess,
--         grain}: the content of the bucket at `at`, the instant of the newest admitted request if
--         that is after `at` (else 0), the rate that this was counted at, and by how many 2^-24
--         parts the content was rounded up when the quota was changed. The key expires when the
--         bucket is empty, rounded up to a multiple of 2^grain us.
--         'M', then integers of 7, 7, 7, 6, 4, 3 and 7 bytes: {at, debt, last, unit, lump, excess,
--         beyond}, if the content is above `max_debt` or was: then `beyond` are whole units beyond
--         it (see debt.lua). So is the base of such a state.
-- params  'L', then doubles: {limit, unit, lump, max_debt, exponent}
-- `limit` is the burst. `debt` is in parts: `unit` parts are one request of cost 1; `lump` parts
-- flow out in a microsecond. 2^exponent us is the power of two that is at most the time of a full
-- drain.
forms = 'LM'
local STATE, size, size_text = '<BI7I7I7I6I4I3B', 36, '36'
local BEYOND, BEYOND_SIZE = '<BI7I7I7I6I4I3I7', 42
local form -- 76, or 77 for the second one; none for a new key
local limit, new_unit, new_lump, max_debt, exponent = struct.unpack('<ddddd', params, 2)
local grain = 2 ^ exponent
local at, debt, beyond, last, excess, unit, lump
local stored_grain = 1 -- of the state that is stored

-- `waits`: whether requests wait. The base and the head then have one form.
local function encode(waits)
  form = beyond > 0 and 77 or waits and form or 76
  stored_grain = form == 76 and grain or 1
  if form == 77 then
    return struct.pack(BEYOND, 77, at, debt, last, unit, lump, excess, beyond)
  end
  return struct.pack(STATE, 76, at, debt, last, unit, lump, excess, exponent)
end
-- ENGINE
local shapes, period, new_period = true, 1, 1
