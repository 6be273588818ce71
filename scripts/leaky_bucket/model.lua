-- Model of the leaky bucket: the functions of the engine. state.lua stands before this text.

-- No units of a leaky bucket can be held.
local function hold_back() end
local fits_beside

local function size_of(state)
  return string.byte(state) == 77 and BEYOND_SIZE or 36
end

local function is_foreign()
  return unit ~= new_unit or tick ~= new_tick
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
  set_debt(lower_beyond(debt, beyond, units, parts, unit, most_debt(1, tick)))
end

-- Returns the time in which `parts`, and the units beyond, flow out.
local function drain_time(parts)
  if beyond > 0 then
    return time_of(parts, beyond, unit, 1, tick)
  end
  return math.ceil(parts / tick)
end

-- Caps the instant of the newest request at that at which the bucket is empty.
local function bound_last()
  last = math.min(last, at + drain_time(debt))
end

local function time_until(parts)
  return math.max(drain_time(parts) - (now - at), 0)
end

local function initial()
  at, debt, beyond, last, excess, unit, tick = now, 0, 0, 0, 0, new_unit, new_tick
  form = 76
end

-- `is_head`: whether the state was read as the head of the value.
local function decode(state, is_head)
  local letter, _ = string.byte(state)
  if is_head then
    size, form = size_of(state), letter
    if form == 77 then
      state = get('0', size)
    end
  end
  beyond = 0
  if letter == 76 and #state >= 36 then
    _, at, debt, last, unit, tick, excess = struct.unpack(STATE, state)
  elseif letter == 77 and #state >= BEYOND_SIZE then
    _, at, debt, last, unit, tick, excess, beyond = struct.unpack(BEYOND, state)
  else
    fail(key)
  end
  return state
end

local function step_back()
  local back = at - now
  if back > 0 then
    at, last = now, math.max(last - back, 0)
  end
  return back > 0
end

local function advance(time)
  if beyond > 0 then
    lower_all(divide(time - at, tick, unit))
  else
    lower((time - at) * tick)
  end
  at = time
end

-- Lets later requests leave at the new rate when the last request that waits has left. Those that
-- wait take the room of that time, whatever their units: so quotas that alternate on one key do not
-- raise the debt with each conversion.
local function flow_from_last()
  local units, parts = divide(last - now, tick, unit)
  debt, beyond = raise(debt, beyond, units, parts, unit, max_debt)
  bound_last()
end

local function adopt()
  local changed = is_foreign()
  if changed then
    advance(math.max(last, now))
    debt, beyond, excess = convert(debt, beyond, excess, unit, new_unit, max_debt)
    unit, tick, at = new_unit, new_tick, now
    if last > now then
      flow_from_last()
    end
  end
  return changed
end

local function earliest(needed)
  local room = burst * unit - needed * unit
  return time_until(debt), time_until(debt - room)
end

local function commit(instant, units)
  -- The request may proceed later than it could.
  if beyond > 0 then
    local whole, parts = divide(instant - at, tick, unit)
    if is_within(debt, beyond, tick, whole, parts, unit) then
      debt, beyond, excess = parts, whole, 0
    end
  else
    local idle = (instant - at) * tick
    if debt <= idle - tick then
      debt, excess = idle, 0
    end
  end
  local most = is_foreign() and most_debt(1, tick) or max_debt
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
      local flowed_out = units_of(now - instant, tick, unit)
      if is_foreign() then
        flowed_out = math.max(flowed_out, units_of(now - instant, new_tick, new_unit))
      end
      back = math.max(back - flowed_out, 0)
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
      -- Units that have flowed out since are back already.
      local flowed_out = (now - instant) * tick
      if is_foreign() then
        local other = (now - instant) * new_tick / new_unit * unit
        flowed_out = math.max(flowed_out, math.ceil(other))
      end
      back = math.max(back - flowed_out, 0)
    end
    if back > 0 then
      lower(back)
      bound_last()
    end
  end
end

local function reset_after()
  return time_until(debt)
end

local function expiry(reset)
  return round_up(now + known(reset), grain)
end

