-- Token bucket: starts full, gains `lump` every `period`. With a period of 1 us this is GCRA, whose
-- theoretical arrival time is `at` plus the time in which `debt` flows in. A request is admitted
-- when the balance covers the part of its cost that may not be overdrawn.
-- state   'T', excess, an integer of three bytes, then doubles: {at, debt, unit, period, lump,
--         last}: what the bucket lacks at `at` to be full, by how many 2^-24 parts it was rounded
--         up when the quota was changed, the rate that this was counted at, the instant of the
--         newest admitted request
-- params  'T', then doubles: {burst, overdraft, unit, period, lump, max_debt}
-- `debt` and `lump` are in parts of a token, `unit` parts to a token. `max_debt` flows in within
-- the longest refill; a changed quota could make the debt larger.
local size = '52' -- of a state, as text, which needs no printing
local burst, overdraft, new_unit, new_period, new_lump, max_debt =
  struct.unpack('<dddddd', params, 2)
local at, debt, excess, unit, period, lump, last

local function is_foreign()
  return unit ~= new_unit or period ~= new_period or lump ~= new_lump
end

local function lower(parts)
  debt = math.max(debt - parts, 0)
  if debt == 0 then
    excess = 0
  end
end

local function time_until(parts)
  return math.max(math.ceil(parts / lump) * period - (now - at), 0)
end

local function initial()
  at, debt, excess, last = now, 0, 0, 0
  unit, period, lump = new_unit, new_period, new_lump
end

local function decode(state)
  local form
  if #state >= 52 then
    form, excess, at, debt, unit, period, lump, last = struct.unpack('<BI3dddddd', state)
  end
  if form ~= 84 then
    fail(key)
  end
  return state
end

local function encode()
  return struct.pack('<BI3dddddd', 84, excess, at, debt, unit, period, lump, last)
end

local function step_back()
  local back = at - now
  if back > 0 then
    at, last = now, last - back
  end
  return back > 0
end

local function advance(time)
  local periods = math.floor((time - at) / period)
  at = at + periods * period
  lower(periods * lump)
end

local function adopt()
  local changed = is_foreign()
  if changed then
    debt, excess = convert(debt, excess, unit, new_unit, max_debt)
    unit, period, lump = new_unit, new_period, new_lump
    -- Caps the queueing delay at the time in which the debt is refilled.
    last = math.min(last, at + math.ceil(debt / lump) * period)
    advance(now)
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
  if refilled > debt then
    debt, excess = refilled, 0
  end
  debt = debt + units * unit
  if not is_foreign() then
    debt = math.min(debt, max_debt) -- units spent may exceed the quota
  end
  last = instant
end

local refund
if returns then
  function refund(instant, units, kept)
    local back = units * unit
    if instant then
      -- Units that were refilled since, up to `at`, are back already. They repaid those kept first.
      local refilled = math.ceil(math.max(at - instant, 0) / period) * lump
      if is_foreign() then
        local lumps = math.floor((now - instant) / new_period) + 1
        refilled = math.max(refilled, math.ceil(lumps * new_lump / new_unit * unit))
      end
      back = math.max(back - math.max(refilled - kept * unit, 0), 0)
    end
    lower(back)
    last = math.min(last, at + math.ceil(debt / lump) * period)
  end
end

local function reset_after()
  return debt > 0 and time_until(debt) or 0
end

