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
  return time_of(0, units, new_unit, new_period, new_lump)
end

local function size_of()
  return size
end

local function is_foreign()
  return unit ~= new_unit or period ~= new_period or lump ~= new_lump
end

local function set_debt(parts, units)
  debt, beyond = parts, units
  if debt == 0 then
    excess = 0
  end
end

local function lower(parts)
  set_debt(math.max(debt - parts, 0), 0)
end

-- The same with units beyond the parts.
local function lower_all(units, parts)
  set_debt(lower_beyond(debt, beyond, units, parts, unit, most_debt(period, lump)))
end

-- Returns the time in which `parts`, and the units beyond, are refilled.
local function refill_time(parts)
  if beyond > 0 then
    return time_of(parts, beyond, unit, period, lump)
  end
  return math.ceil(parts / lump) * period
end

-- Caps the queueing delay at the time in which the debt is refilled.
local function bound_last()
  last = math.min(last, at + refill_time(debt))
end

local function time_until(parts)
  return math.max(refill_time(parts) - (now - at), 0)
end

local function initial()
  at, debt, beyond, excess, last = now, 0, 0, 0, 0
  unit, period, lump = new_unit, new_period, new_lump
end

local function decode(state)
  local form = string.byte(state)
  beyond = 0
  if form == 84 and #state == 26 then
    form, at, debt, unit, lump = struct.unpack(SHORT, state)
    period, last, excess = 1, 0, 0
  elseif form == 85 and #state >= size then
    form, at, debt, unit, period, lump, last, excess = struct.unpack(LONG, state)
  elseif form == 86 and #state >= size then
    form, at, beyond, period, lump, last, excess = struct.unpack(LARGE, state)
    debt, unit = 0, 1
  elseif form == 88 and #state >= size then
    form, at, beyond, debt, unit, lump, last, excess = struct.unpack(BEYOND, state)
    period = 1
  else
    fail(key)
  end
  if beyond > 0 then
    debt, beyond = settle(debt, beyond, unit, most_debt(period, lump))
  end
  return state
end

local function is_short()
  return period == 1 and last == 0 and excess == 0 and beyond == 0
end

-- `waits`: whether requests wait, whose reservations follow.
local function encode(waits)
  if lump > 2 ^ 32 - 1 or beyond > 0 and unit == 1 then -- only lumps are: rates have four bytes
    return struct.pack(LARGE, 86, at, debt + beyond, period, lump, last, excess)
  elseif beyond > 0 then
    local units = math.floor(debt / unit)
    local rest = debt - units * unit
    return struct.pack(BEYOND, 88, at, units + beyond, rest, unit, lump, last, excess)
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
  if beyond > 0 then
    lower_all(divide(periods, lump, unit))
  else
    lower(periods * lump)
  end
end

-- Begins to refill at another rate, now or when the last request that waits proceeds: what flows in
-- before that is added to the debt.
local function restart_refill()
  if last > now then
    local periods = math.ceil((last - now) / period)
    at = last - periods * period
    local units, parts = divide(periods, lump, unit)
    debt, beyond = raise(debt, beyond, units, parts, unit, max_debt)
    bound_last()
  elseif now - at >= period then
    at = now + 1 - period -- the next lump comes after what is spent now
  end
end

local function adopt()
  local changed = is_foreign()
  if changed then
    advance(math.max(last, now))
    debt, beyond, excess = convert(debt, beyond, excess, unit, new_unit, max_debt)
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
  local periods = math.floor((instant - at) / period)
  if beyond > 0 then
    local whole, parts = divide(periods, lump, unit)
    if is_within(debt, beyond, 0, whole, parts, unit) then
      debt, beyond, excess = parts, whole, 0
    end
  elseif periods * lump >= debt then
    debt, excess = periods * lump, 0
  end
  local most = is_foreign() and most_debt(period, lump) or max_debt
  if beyond == 0 and debt + units * unit <= most then
    debt = debt + units * unit
  else
    debt, beyond = settle(debt, beyond + units, unit, most)
  end
  last = instant > at and instant or 0
end

local refund
if returns then
  -- Returns whole units, while there are units beyond the parts.
  local function refund_beyond(instant, back)
    if instant then
      local refilled = units_of(math.ceil(math.max(at - instant, 0) / period), lump, unit)
      if is_foreign() then
        local lumps = math.floor((now - instant) / new_period) + 1
        refilled = math.max(refilled, units_of(lumps, new_lump, new_unit))
      end
      back = math.max(back - refilled, 0)
    end
    if back > 0 then
      lower_all(back, 0)
      bound_last()
    end
  end

  function refund(instant, units)
    if instant and last > now then
      return -- later reservations, by another quota, may count on what came in since
    end
    if beyond > 0 then
      return refund_beyond(instant, units)
    end
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
  return round_up(now + known(reset), grain)
end

