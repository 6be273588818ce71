-- Model of the token bucket: the functions of the engine. state.lua stands before this text.

local capacity = burst

-- Decides by a quota that is smaller by the units that are held.
local function hold_back(units)
  burst = capacity - units
end

local function fits_beside(units)
  return units <= burst + overdraft and burst + (overdraft > 0 and 1 or 0) >= 1
end

function drain(units)
  return math.ceil(math.min(units * new_unit, max_debt) / new_lump) * new_period
end

local function size_of()
  return size
end

local function is_foreign()
  return unit ~= new_unit or period ~= new_period or lump ~= new_lump
end

local function lower(parts)
  debt = math.max(debt - parts, 0)
  if debt == 0 then
    excess = 0
  end
end

-- Caps the queueing delay at the time in which the debt is refilled.
local function bound_last()
  last = math.min(last, at + math.ceil(debt / lump) * period)
end

local function time_until(parts)
  return math.max(math.ceil(parts / lump) * period - (now - at), 0)
end

local function initial()
  at, debt, excess, last = now, 0, 0, 0
  unit, period, lump = new_unit, new_period, new_lump
end

local function decode(state)
  local form = string.byte(state)
  if form == 84 and #state == 26 then
    form, at, debt, unit, lump = struct.unpack(SHORT, state)
    period, last, excess = 1, 0, 0
  elseif form == 85 and #state >= size then
    form, at, debt, unit, period, lump, last, excess = struct.unpack(LONG, state)
  elseif form == 86 and #state >= size then
    form, at, debt, period, lump, last, excess = struct.unpack(LARGE, state)
    unit = 1
  else
    fail(key)
  end
  return state
end

local function is_short()
  return period == 1 and last == 0 and excess == 0
end

-- `waits`: whether requests wait, whose reservations follow.
local function encode(waits)
  if lump > 2 ^ 32 - 1 then -- only lumps are: rates have at most four bytes
    return struct.pack(LARGE, 86, at, debt, period, lump, last, excess)
  elseif waits or not is_short() then
    return struct.pack(LONG, 85, at, debt, unit, period, lump, last, excess)
  end
  return struct.pack(SHORT, 84, at, debt, unit, lump, exponent)
end

local function step_back()
  local back = at - now
  if back > 0 then
    at, last = now, math.max(last - back, 0)
  end
  return back > 0
end

local function advance(time)
  local periods = math.floor((time - at) / period)
  at = at + periods * period
  lower(periods * lump)
end

-- Begins to refill at another rate, now or when the last request that waits proceeds: what flows in
-- before that is added to the debt.
local function restart_refill()
  if last > now then
    local periods = math.ceil((last - now) / period)
    at, debt = last - periods * period, math.min(debt + periods * lump, max_debt)
    bound_last()
  elseif now - at >= period then
    at = now + 1 - period -- the next lump comes after what is spent now
  end
end

local function adopt()
  local changed = is_foreign()
  if changed then
    advance(math.max(last, now))
    debt, excess = convert(debt, excess, unit, new_unit, max_debt)
    unit, period, lump = new_unit, new_period, new_lump
    restart_refill()
  end
  if debt == 0 then
    at = now
  end
  return changed
end

local function earliest(needed)
  local wait = math.max(last - now, 0)
  if needed > 0 then
    local covered = math.max(needed - overdraft, 0)
    wait = math.max(time_until(covered * unit - (burst * unit - debt)), wait)
  end
  return wait
end

local function commit(instant, units)
  local refilled = math.floor((instant - at) / period) * lump
  if refilled >= debt then
    debt, excess = refilled, 0
  end
  -- Units spent may exceed the quota.
  debt = math.min(debt + units * unit, is_foreign() and 2 ^ 53 or max_debt)
  last = instant > at and instant or 0
end

local refund
if returns then
  function refund(instant, units)
    local back = units * unit
    if instant then
      -- Units that were refilled since, up to `at`, are back already.
      local refilled = math.ceil(math.max(at - instant, 0) / period) * lump
      if is_foreign() then
        local lumps = math.floor((now - instant) / new_period) + 1
        refilled = math.max(refilled, math.ceil(lumps * new_lump / new_unit * unit))
      end
      back = math.max(back - refilled, 0)
    end
    if back > 0 then
      lower(back)
      bound_last()
    end
  end
end

local function reset_after()
  return debt > 0 and time_until(debt) or 0
end

-- The instant at which the key may expire.
local function expiry(reset)
  local grain = is_short() and grain or 1
  return round_up(now + reset, grain)
end

