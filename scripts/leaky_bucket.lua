-- Leaky bucket: a queue with a constant outflow. A request leaves when those before it have left;
-- one that would not fit into the bucket is denied.
-- key   {at, debt, unit, tick}, doubles: what is in the bucket at `at`, and the rate that this was
--       counted at
-- list  the turns that are booked: see turns.lua
-- ARGV  cost, max_wait, burst, unit, tick, most_debt
-- `debt` is in parts of a request: `unit` parts to one of cost 1, of which `tick` flow out in a
-- microsecond.
local function leaky_bucket(key, list, arg)
  local cost, max_wait = tonumber(ARGV[arg + 1]), tonumber(ARGV[arg + 2])
  local needed = asks and cost or -math.huge
  local burst, most_debt = tonumber(ARGV[arg + 3]), tonumber(ARGV[arg + 6])
  local new_unit, new_tick = tonumber(ARGV[arg + 4]), tonumber(ARGV[arg + 5])

  local at, debt, unit, tick, stale = now, 0, new_unit, new_tick, false

  local function read(state)
    at, debt, unit, tick = struct.unpack('<dddd', state)
  end

  local function packed()
    return struct.pack('<dddd', at, debt, unit, tick)
  end

  local function commit(instant, units)
    local idle = (instant - at) * tick
    if debt <= idle - tick then -- it goes on later than it could
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

  local state = redis.call('GET', key)
  if state then
    read(state)
    if action == 'refund' then
      give_back(list, cost, read, refund, commit, packed)
      debt = math.min(debt, most_debt)
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
  local late = math.max(time_until(debt - (full - needed * unit)), wait - max_wait)
  local admitted, wait = settle(wait, late)

  local before
  if commits and admitted then
    before = wait > 0 and packed()
    commit(now + wait, cost)
    debt = math.min(debt, most_debt) -- what is spent may be above the quota
  end

  local remaining = math.max(math.floor((full - debt) / unit), 0)
  local replenish, reset = 0, 0
  if debt > 0 then
    replenish = time_until((remaining + 1) * unit - (full - debt))
    reset = time_until(debt)
  end

  if action == 'refund' or commits and (admitted or stale) then
    write(key, list, stale, now + wait, cost, before, packed(), reset)
  end
  return {admitted and 1 or 0, wait, remaining, replenish, reset, now + wait}
end

