-- Leaky bucket: a queue with a constant outflow. A request leaves when those before it have left;
-- one that would not fit into the bucket is denied.
-- KEYS[1]  {at, debt, unit, tick}, doubles: what is in the bucket at `at`, and the rate that this was
--          counted at
-- KEYS[2]  the turns that are booked: see turns.lua
-- ARGV     action (check, peek, refund), cost, max_wait, turn, burst, unit, tick, most_debt
-- Returns  {admitted, wait, remaining, replenish, reset, turn}
-- Times are in microseconds, `debt` is in parts of a request: `unit` parts to one of cost 1, of which
-- `tick` flow out in a microsecond; all numbers are integers below 2^53.
local action, cost, max_wait = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local turn, burst = tonumber(ARGV[4]), tonumber(ARGV[5])
local new_unit, new_tick, most_debt = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

local at, debt, unit, tick, stale = now, 0, new_unit, new_tick, false

local function read(state)
  at, debt, unit, tick = struct.unpack('<dddd', state)
end

local function packed()
  return struct.pack('<dddd', at, debt, unit, tick)
end

local function commit(instant, units)
  local idle = (instant - at) * tick
  if debt <= idle - tick then -- a turn before this one was given back
    debt = idle
  end
  debt = debt + units * unit
end

local function refund(units)
  local back = units * unit
  if turn > 0 then -- what has flowed out since is back already
    back = math.max(back - math.max(now - turn, 0) * tick, 0)
  end
  debt = math.max(debt - back, 0)
end

local state = redis.call('GET', KEYS[1])
if state then
  read(state)
  if action == 'refund' then
    give_back(now, turn, cost, read, refund, commit, packed)
  end
  if now < at then -- the clock stepped back
    at, stale = now, true
  end
  at, debt = now, math.max(debt - (now - at) * tick, 0)
  if unit ~= new_unit or tick ~= new_tick then -- the quota was changed
    debt = math.min(math.ceil(debt / unit * new_unit), most_debt)
    unit, tick, stale = new_unit, new_tick, true
  end
end

local function time_until(parts)
  return math.max(math.ceil(parts / tick), 0)
end

local full = burst * unit
local wait = time_until(debt)
local instant = now + wait
local room = full - math.min(cost, burst) * unit -- a refund may be above the quota
local late = math.max(time_until(debt - room), wait - max_wait)
local admitted = late == 0

local before
if action == 'check' and admitted then
  before = wait > 0 and packed()
  commit(instant, cost)
end

local remaining = math.max(math.floor((full - debt) / unit), 0)
local replenish, reset = 0, 0
if debt > 0 then
  replenish = time_until((remaining + 1) * unit - (full - debt))
  reset = time_until(debt)
end

if action == 'refund' or action == 'check' and (admitted or stale) then
  write(now, stale, instant, cost, before, packed(), reset)
end
return {admitted and 1 or 0, admitted and wait or late, remaining, replenish, reset, instant}
