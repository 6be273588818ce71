-- Model of the leaky bucket: the functions of the engine. state.lua stands before this text.

-- No units of a leaky bucket can be held.
local function hold_back() end
local fits_beside

local function size_of()
  return size
end

local function is_foreign()
  return unit ~= new_unit or tick ~= new_tick
end

local function lower(parts)
  debt = math.max(debt - parts, 0)
  if debt == 0 then
    excess = 0
  end
end

-- Caps the instant of the newest request at that at which the bucket is empty.
local function bound_last()
  last = math.min(last, at + math.ceil(debt / tick))
end

local function time_until(parts)
  return math.max(math.ceil(parts / tick) - (now - at), 0)
end

local function initial()
  at, debt, last, excess, unit, tick = now, 0, 0, 0, new_unit, new_tick
end

local function decode(state)
  local form
  if #state >= size then
    form, at, debt, last, unit, tick, excess = struct.unpack(STATE, state)
  end
  if form ~= 76 then
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
  lower((time - at) * tick)
  at = time
end

-- Lets later requests leave at the new rate when the last request that waits has left. Those that
-- wait take the room of that time, whatever their units: so quotas that alternate on one key do not
-- raise the debt with each conversion.
local function flow_from_last()
  debt = math.min(debt + (last - now) * tick, max_debt)
  bound_last()
end

local function adopt()
  local changed = is_foreign()
  if changed then
    advance(math.max(last, now))
    debt, excess = convert(debt, excess, unit, new_unit, max_debt)
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
  local idle = (instant - at) * tick
  if debt <= idle - tick then -- the request proceeds later than it could
    debt, excess = idle, 0
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
  return round_up(now + reset, grain)
end

