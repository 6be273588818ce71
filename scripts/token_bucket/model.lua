-- Model of the token bucket: the functions of the engine that bucket.lua does not have. That and
-- state.lua stand before this text.

-- With an overdraft, what is held may exceed the quota, and then nothing is admitted.
local function fits_beside(units)
  return units <= limit + overdraft and limit + (overdraft > 0 and 1 or 0) >= 1
end

function drain(units)
  return time_of(0, units, new_unit, new_period, new_lump)
end

local function size_of()
  return size
end

local function decode(state)
  form, beyond, stored_grain = string.byte(state), 0, 1
  if form == 84 and #state == 26 then
    local other
    form, at, debt, unit, lump, other = struct.unpack(SHORT, state)
    period, last, excess, stored_grain = 1, 0, 0, 2 ^ other
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
  if unit * lump * period == 0 then
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
  stored_grain = grain
  return struct.pack(SHORT, 84, at, debt, unit, lump, exponent)
end

local function earliest(needed)
  local wait = math.max(last - now, 0)
  if needed > 0 then
    local covered = math.max(needed - overdraft, 0)
    wait = math.max(time_until(covered * unit - (limit * unit - debt)), wait)
  end
  return wait
end

-- The instant at which the key may expire. A state that stays as it is tells the fast path its own
-- grain, by another burst a coarser one.
function expiry(reset)
  local grain = is_short() and math.max(grain, stored_grain) or 1
  return round_up(now + known(reset), grain)
end

