-- Leaky bucket: a queue with a constant outflow. A request leaves when those before it have left;
-- one that would not fit into the bucket is denied.
-- key   'L', excess, an integer of three bytes, then doubles: {at, debt, unit, tick}: what is in the bucket at `at`,
--       and by how many 2^-24 parts that was rounded up, and the rate that this was counted at; see also
--       reservations.lua
-- ARGV  cost, max_wait, burst, unit, tick, most_debt
-- `debt` is in parts of a request: `unit` parts to one of cost 1, of which `tick` flow out in a
-- microsecond.
local function leaky_bucket(key, arg)
  local cost, max_wait = tonumber(ARGV[arg + 1]), tonumber(ARGV[arg + 2])
  local needed = asks and cost or -math.huge
  local burst, most_debt = tonumber(ARGV[arg + 3]), tonumber(ARGV[arg + 6])
  local new_unit, new_tick = tonumber(ARGV[arg + 4]), tonumber(ARGV[arg + 5])

  local at, debt, excess, unit, tick, stale = now, 0, 0, new_unit, new_tick, false

  local function read(state)
    local form
    if #state == 36 then
      form, excess, at, debt, unit, tick = struct.unpack('<BI3dddd', state)
    end
    if form ~= 76 then
      fail(key)
    end
  end

  local function packed()
    return struct.pack('<BI3dddd', 76, excess, at, debt, unit, tick)
  end

  local function advance(time)
    at, debt = time, math.max(debt - (time - at) * tick, 0)
    if debt == 0 then
      excess = 0
    end
  end

  local function commit(instant, units)
    local idle = (instant - at) * tick
    if debt <= idle - tick then -- it proceeds later than it could
      debt, excess = idle, 0
    end
    debt = debt + units * unit
  end

  local function model()
    local function refund(instant, units, kept)
      local back = units * unit
      if instant then
        -- What has flowed out since is back already. What is kept was the first to flow out.
        local flowed_out = (now - instant) * tick
        if unit ~= new_unit or tick ~= new_tick then
          local other = (now - instant) * new_tick / new_unit * unit
          flowed_out = math.max(flowed_out, math.ceil(other))
        end
        back = math.max(back - math.max(flowed_out - kept * unit, 0), 0)
      end
      debt = math.max(debt - back, 0)
      if debt == 0 then
        excess = 0
      end
    end

    local function reset_after()
      return math.max(math.ceil(debt / tick) - (now - at), 0)
    end

    return {read = read, packed = packed, advance = advance, commit = commit, refund = refund, reset = reset_after}
  end

  local state = redis.call('GETRANGE', key, '0', '35')
  local known = state ~= ''
  if known then
    read(state)
    if now < at then -- the clock stepped back
      at, stale = now, true
    end
  end
  if known and not asks and not commits then
    reservations().give_back(key, 36, stale, cost, model)
  end
  if action == 'release' then
    return {}
  end
  if known then
    advance(now)
    if unit ~= new_unit or tick ~= new_tick then -- the quota was changed
      debt, excess = convert(debt, excess, unit, new_unit, most_debt)
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

  if commits and (admitted or stale) then
    write(key, packed(), stale, before, now + wait, cost, reset, model)
  end
  return {admitted and 1 or 0, wait, remaining, replenish, reset, now + wait}
end

