-- Leaky bucket: a queue with a constant outflow. A request leaves when those before it have left;
-- one that would not fit into the bucket is denied.
-- KEYS[1]  {at, debt, unit, tick}, doubles: what is in the bucket at `at`, and the rate that this was
--          counted at
-- ARGV     action (check, peek, refund), cost, max_wait, burst, unit, tick, most_debt
-- Returns  {admitted, wait, remaining, replenish, reset}
-- Times are in microseconds, `debt` is in parts of a request: `unit` parts to one of cost 1, of which
-- `tick` flow out in a microsecond; all numbers are integers below 2^53.
local action, cost, max_wait = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local burst, unit, tick = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local most_debt = tonumber(ARGV[7])

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

local debt, stale = 0, false
local state = redis.call('GET', KEYS[1])
if state then
  local at, old_unit, old_tick
  at, debt, old_unit, old_tick = struct.unpack('<dddd', state)
  if now < at then -- the clock stepped back
    at, stale = now, true
  end
  debt = math.max(debt - (now - at) * old_tick, 0)
  if old_unit ~= unit or old_tick ~= tick then -- the quota was changed
    debt = math.min(math.ceil(debt / old_unit * unit), most_debt)
    stale = true
  end
end

local function time_until(parts)
  return math.max(math.ceil(parts / tick), 0)
end

local full = burst * unit
local wait = time_until(debt)
local late = math.max(time_until(debt - (full - cost * unit)), wait - max_wait)
local admitted = late == 0

if action == 'refund' then
  debt = math.max(debt - cost * unit, 0)
elseif action == 'check' and admitted then
  debt = debt + cost * unit
end

local remaining = math.max(math.floor((full - debt) / unit), 0)
local replenish, reset = 0, 0
if debt > 0 then
  replenish = time_until((remaining + 1) * unit - (full - debt))
  reset = time_until(debt)
end

if action == 'refund' or action == 'check' and (admitted or stale) then
  if reset > 0 then
    redis.call('SET', KEYS[1], struct.pack('<dddd', now, debt, unit, tick),
      'PXAT', math.ceil((now + reset) / 1000))
  else
    redis.call('DEL', KEYS[1])
  end
end
return {admitted and 1 or 0, admitted and wait or late, remaining, replenish, reset}
