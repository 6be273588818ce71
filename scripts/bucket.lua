-- Bucket: what the models of the token bucket and of the leaky bucket have in common. Stands
-- between debt.lua and the model; `shapes`: whether that is the leaky bucket. The twin is
-- src/algorithm/bucket.rs.

local function is_foreign()
  return unit ~= new_unit or period ~= new_period or lump ~= new_lump
end

-- Lowers the debt, if all of it is parts, by parts; else by units, and fewer parts than a unit has.
local function lower(units, parts)
  if beyond > 0 then
    debt, beyond = lower_beyond(debt, beyond, units, parts, unit, most_debt(period, lump))
  else
    debt = math.max(debt - parts, 0)
  end
  if debt == 0 then
    excess = 0
  end
end

-- Returns the time in which `parts`, and the units beyond, flow in.
local function refill_time(parts)
  if beyond > 0 then
    return time_of(parts, beyond, unit, period, lump)
  end
  return math.ceil(parts / lump) * period
end

-- Caps the instant of the newest request at that at which the debt has flowed in.
local function bound_last()
  last = math.min(last, at + refill_time(debt))
end

local function time_until(parts)
  return math.max(refill_time(parts) - (now - at), 0)
end

local function initial()
  at, debt, beyond, excess, last = now, 0, 0, 0, 0
  unit, period, lump = new_unit, new_period, new_lump
  form = nil
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
    lower(divide(periods, lump, unit))
  else
    lower(0, periods * lump)
  end
end

local function reset_after()
  return debt > 0 and time_until(debt) or 0
end

-- Begins to refill at another rate, when the last request has proceeded. If that is yet to come,
-- what flows in before is added to the debt, whatever units wait. So quotas that alternate on one
-- key do not raise the debt with each conversion.
local function restart_refill(last)
  if last - at >= period then
    at = last + 1 - period -- the next lump comes after what was spent then
  end
  if at > now then
    local periods = math.ceil((at - now) / period)
    at = at - periods * period
    local units, parts = divide(periods, lump, unit)
    debt, beyond = raise(debt, beyond, units, parts, unit, max_debt)
  end
  if last > now then
    bound_last()
  end
end

-- Counts at the rate of another quota.
local function convert_state()
  local last = math.max(last, at)
  advance(last)
  debt, beyond, excess = convert(debt, beyond, excess, unit, new_unit, max_debt)
  unit, period, lump = new_unit, new_period, new_lump
  restart_refill(last)
end

local function adopt()
  local changed = is_foreign()
  if changed and reset_after() > 0 then
    convert_state()
  elseif changed then
    initial()
  end
  advance(now)
  if debt == 0 then
    at = now
  end
  return changed
end

local function commit(instant, units)
  -- The request may proceed later than it could. The departures of a leaky bucket stay apart.
  local periods, apart = math.floor((instant - at) / period), shapes and lump or 0
  if beyond > 0 then
    local whole, parts = divide(periods, lump, unit)
    if is_within(debt, beyond, apart, whole, parts, unit) then
      debt, beyond, excess = parts, whole, 0
    end
  elseif debt <= periods * lump - apart then
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

if returns then
  function refund(instant, units)
    if instant and last > now then
      return -- later reservations, by another quota, may count on what came in since
    end
    local whole = beyond > 0 -- returns whole units
    local back = whole and units or units * unit
    if instant then
      -- Units that were refilled since, up to `at`, are back already.
      local periods = math.ceil(math.max(at - instant, 0) / period)
      local refilled = whole and units_of(periods, lump, unit) or periods * lump
      if is_foreign() then
        -- A request of a token bucket may have proceeded just before a lump.
        local lumps = math.floor((now - instant) / new_period) + (shapes and 0 or 1)
        local other = whole and units_of(lumps, new_lump, new_unit)
        refilled = math.max(refilled, other or math.ceil(lumps * new_lump / new_unit * unit))
      end
      back = math.max(back - refilled, 0)
    end
    if back > 0 then
      lower(whole and back or 0, whole and 0 or back)
      bound_last()
    end
  end
end

