-- Leaky bucket: a queue with a constant outflow. A request leaves when those before it have left; a
-- request that would not fit into the bucket is denied.
-- state   'L', then integers of 7, 7, 7, 6, 4, 3 and 1 bytes: {at, debt, last, unit, tick, excess,
--         grain}: the content of the bucket at `at`, the instant of the newest admitted request if
--         that is after `at` (else 0), the rate that this was counted at, and by how many 2^-24
--         parts the content was rounded up when the quota was changed. The key expires when the
--         bucket is empty, rounded up to a multiple of 2^grain us.
-- params  'L', then doubles: {burst, unit, tick, max_debt, exponent}
-- `debt` is in parts: `unit` parts are one request of cost 1; `tick` parts flow out in a
-- microsecond. 2^exponent us is the power of two that is at most the time of a full drain.
local STATE, size, size_text = '<BI7I7I7I6I4I3B', 36, '36'
local burst, new_unit, new_tick, max_debt, exponent = struct.unpack('<ddddd', params, 2)
local grain = 2 ^ exponent
local at, debt, last, excess, unit, tick


local function encode()
  return struct.pack(STATE, 76, at, debt, last, unit, tick, excess, exponent)
end
