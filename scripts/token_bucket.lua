-- Token bucket: starts full, gains `lump` every `period`. With a period of 1 us this is GCRA, whose
-- theoretical arrival time is `at` plus the time in which `debt` flows in.
-- A request is admitted when the balance covers what of its cost may not be overdrawn.
-- key   'T', excess, an integer of three bytes, then doubles: {at, debt, unit, period, lump, last}: what the bucket
--       lacks at `at` to be full, and by how many 2^-24 parts that was rounded up, the rate that this was counted
--       at, the instant of the newest admitted request; see also reservations.lua
-- ARGV  cost, max_wait, burst, overdraft, unit, period, lump, most_debt
-- `debt` and `lump` are in parts of a token, `unit` parts to a token.
local function token_bucket(key, arg)
  local cost, max_wait = tonumber(ARGV[arg + 1]), tonumber(ARGV[arg + 2])
  local needed = asks and cost or -math.huge
  local burst, overdraft = tonumber(ARGV[arg + 3]), tonumber(ARGV[arg + 4])
  local new_unit, new_period = tonumber(ARGV[arg + 5]), tonumber(ARGV[arg + 6])
  local new_lump, most_debt = tonumber(ARGV[arg + 7]), tonumber(ARGV[arg + 8])

  local at, debt, excess, last, stale = now, 0, 0, 0, false
  local unit, period, lump = new_unit, new_period, new_lump

  local function read(state)
    local form
    if #state == 52 then
      form, excess, at, debt, unit, period, lump, last = struct.unpack('<BI3dddddd', state)
    end
    if form ~= 84 then
      fail(key)
    end
  end

  local function packed()
    return struct.pack('<BI3dddddd', 84, excess, at, debt, unit, period, lump, last)
  end

  local function advance(time)
    local periods = math.floor((time - at) / period)
    at, debt = at + periods * period, math.max(debt - periods * lump, 0)
    if debt == 0 then
      excess = 0
    end
  end

  local function commit(instant, units)
    local refilled = math.floor((instant - at) / period) * lump
    if refilled > debt then
      debt, excess = refilled, 0
    end
    debt = debt + units * unit
    last = instant
  end

  local function model()
    local function refund(instant, units, kept)
      local back = units * unit
      if instant then
        -- What has been refilled since, up to `at`, is back already. It has repaid what is kept first.
        local refilled = math.ceil(math.max(at - instant, 0) / period) * lump
        if unit ~= new_unit or period ~= new_period or lump ~= new_lump then
          local lumps = math.floor((now - instant) / new_period) + 1
          refilled = math.max(refilled, math.ceil(lumps * new_lump / new_unit * unit))
        end
        back = math.max(back - math.max(refilled - kept * unit, 0), 0)
      end
      debt = math.max(debt - back, 0)
      if debt == 0 then
        excess = 0
      end
      last = math.min(last, at + math.ceil(debt / lump) * period)
    end

    local function reset_after()
      return debt > 0 and math.max(math.ceil(debt / lump) * period - (now - at), 0) or 0
    end

    return {read = read, packed = packed, advance = advance, commit = commit, refund = refund, reset = reset_after}
  end

  local state = redis.call('GETRANGE', key, '0', '51')
  local known = state ~= ''
  if known then
    read(state)
    if now < at then -- the clock stepped back
      at, last, stale = now, last - (at - now), true
    end
  end
  if known and not asks and not commits then
    reservations().give_back(key, 52, stale, cost, model)
  end
  if action == 'release' then
    return {}
  end
  if known then
    advance(now)
    if unit ~= new_unit or period ~= new_period or lump ~= new_lump then -- the quota was changed
      debt, excess = convert(debt, excess, unit, new_unit, most_debt)
      unit, period, lump, stale = new_unit, new_period, new_lump, true
      -- Caps the delay behind earlier requests at the time in which their debt is refilled.
      last = math.min(last, at + math.ceil(debt / lump) * period)
      advance(now)
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

  if commits and (admitted or stale) then
    write(key, packed(), stale, before, now + wait, cost, reset, model)
  end
  return {admitted and 1 or 0, wait, remaining, replenish, reset, now + wait}
end

