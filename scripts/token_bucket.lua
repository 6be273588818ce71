-- Token bucket: starts full, gains `lump` every `period`. With a period of 1 us this is GCRA, whose
-- theoretical arrival time is `at` plus the time in which `debt` flows in.
-- A request is admitted when the balance covers what of its cost may not be overdrawn.
-- key   {at, debt, unit, period, lump, last}, doubles: what the bucket lacks at `at` to be full, the
--       rate that this was counted at, the instant of the newest admitted request
-- list  the turns that are booked: see turns.lua
-- ARGV  cost, max_wait, burst, overdraft, unit, period, lump, most_debt
-- `debt` and `lump` are in parts of a token, `unit` parts to a token.
local function token_bucket(key, list, arg)
  local cost, max_wait = tonumber(ARGV[arg + 1]), tonumber(ARGV[arg + 2])
  local needed = asks and cost or -math.huge
  local burst, overdraft = tonumber(ARGV[arg + 3]), tonumber(ARGV[arg + 4])
  local new_unit, new_period = tonumber(ARGV[arg + 5]), tonumber(ARGV[arg + 6])
  local new_lump, most_debt = tonumber(ARGV[arg + 7]), tonumber(ARGV[arg + 8])

  local at, debt, last, stale = now, 0, 0, false
  local unit, period, lump = new_unit, new_period, new_lump

  local function read(state)
    at, debt, unit, period, lump, last = struct.unpack('<dddddd', state)
  end

  local function packed()
    return struct.pack('<dddddd', at, debt, unit, period, lump, last)
  end

  local function commit(instant, units)
    debt = math.max(debt, math.floor((instant - at) / period) * lump) + units * unit
    last = instant
  end

  -- Nobody waits longer for those before him than for what they spent.
  local function bound_last()
    last = math.min(last, at + math.ceil(debt / lump) * period)
  end

  local function refund(units)
    local back = units * unit
    if turn > 0 then -- what has flowed in since is back already
      back = math.max(back - math.max(math.ceil((now - turn) / period), 0) * lump, 0)
    end
    debt = math.max(debt - back, 0)
    bound_last()
  end

  local function refill()
    local periods = math.floor((now - at) / period)
    at = at + periods * period
    debt = math.max(debt - periods * lump, 0)
  end

  local state = redis.call('GET', key)
  if state then
    read(state)
    if action == 'refund' then
      give_back(list, cost, read, refund, commit, packed)
      debt = math.min(debt, most_debt)
    end
    if now < at then -- the clock stepped back
      at, last, stale = now, last - (at - now), true
    end
    refill()
    if unit ~= new_unit or period ~= new_period or lump ~= new_lump then -- the quota was changed
      debt = math.min(math.ceil(debt / unit * new_unit), most_debt)
      unit, period, lump, stale = new_unit, new_period, new_lump, true
      bound_last()
      refill()
    end
    if debt == 0 then
      at = now
    end
  end

  local function time_until(parts)
    return math.max(math.ceil(parts / lump) * period - (now - at), 0)
  end

  local full = burst * unit
  local wait = math.max(last - now, 0)
  if needed > 0 then
    local covered = math.max(needed - overdraft, 0)
    wait = math.max(time_until(covered * unit - (full - debt)), wait)
  end
  local admitted, wait = settle(wait, math.max(wait - max_wait, 0))

  local before
  if commits and admitted then
    before = wait > 0 and packed()
    commit(now + wait, cost)
    debt = math.min(debt, most_debt) -- what is spent may be above the quota
  end

  local overdrawn = overdraft > 0 and 1 or 0
  local remaining, replenish, reset = burst + overdrawn, 0, 0
  if debt > 0 then
    remaining = 0
    if last <= now then
      remaining = math.max(math.floor((full - debt) / unit) + overdrawn, 0)
    end
    replenish = math.max(time_until((remaining + 1 - overdrawn) * unit - (full - debt)), last - now)
    reset = time_until(debt)
  end

  if action == 'refund' or commits and (admitted or stale) then
    write(key, list, stale, now + wait, cost, before, packed(), reset)
  end
  return {admitted and 1 or 0, wait, remaining, replenish, reset, now + wait}
end

