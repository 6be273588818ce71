-- Model of the bucket: the functions of the engine. state.lua stands before this text.
local at, lumps, parts, last, unit, period, lump, excess
local grain = grain -- of the state that is stored

-- Counts units, and `more` parts, in lumps, and parts of another one. A product that is not exact
-- is rounded up.
local function debt_of(units, unit, more, lump)
  local parts = units * unit + more
  if parts >= 2 ^ 53 then
    return math.floor(parts / lump) + 1, 0
  end
  local lumps = math.floor(parts / lump)
  return lumps, parts - lumps * lump
end

local function lumps_until_paid(lumps, parts)
  return parts > 0 and lumps + 1 or lumps
end

-- Adds to the debt, up to `most` lumps.
local function raise(more_lumps, more_parts, most)
  lumps, parts = lumps + more_lumps, parts + more_parts
  if parts >= lump then
    lumps, parts = lumps + 1, parts - lump
  end
  if lumps >= most then
    lumps, parts = most, 0
  end
end

-- Subtracts a debt from another one, down to 0.
local function lowered(lumps, parts, less_lumps, less_parts)
  lumps, parts = lumps - less_lumps, parts - less_parts
  if parts < 0 then
    lumps, parts = lumps - 1, parts + lump
  end
  if lumps < 0 then
    return 0, 0
  end
  return lumps, parts
end

-- Returns the lumps of 100 years.
local function longest(period)
  return math.ceil(3155760000000000 / period)
end

local function is_full()
  return lumps == 0 and parts == 0
end

local function lower(less_lumps, less_parts)
  lumps, parts = lowered(lumps, parts, less_lumps, less_parts)
  if is_full() then
    excess = 0
  end
end

-- Returns the time until the debt is at most `rest` parts.
local function time_until(rest)
  local needed = lumps - math.floor((rest - parts) / lump)
  return math.max(needed * period - (now - at), 0)
end

-- Caps `last` at the instant at which the debt has flowed in.
local function bound_last()
  last = math.min(last, at + lumps_until_paid(lumps, parts) * period)
end

-- Begins to refill at another rate, when the last request has proceeded. If that is yet to come,
-- what flows in before is added to the debt, whatever units wait. So quotas that alternate on one
-- key do not raise the debt with each conversion.
local function restart_refill(last)
  if last - at >= period then
    at = last + 1 - period -- the next lump comes after what was spent then
  end
  if at > now then
    local before = math.ceil((at - now) / period)
    at = at - before * period
    raise(before, 0, most)
  end
  if last > now then
    bound_last()
  end
end

-- Counts at the rate of another quota. Parts of a unit are rounded up, and `excess` remembers by
-- how much, for the same reason.
local function convert()
  local last = math.max(last, at)
  advance(last)
  local debt = lumps * lump + parts
  local units = math.floor(debt / unit)
  local rest = debt - units * unit - excess / 2 ^ 24
  if debt >= 2 ^ 53 then
    units, rest = units + 1, 0
  end
  local exact = rest / unit * new_unit
  local more = math.ceil(exact)
  excess = math.min(math.floor((more - exact) * 2 ^ 24), 2 ^ 24 - 1) -- three bytes
  unit, period, lump = new_unit, new_period, new_lump
  lumps, parts = debt_of(units, unit, more, lump)
  raise(0, 0, most)
  restart_refill(last)
end

local function is_foreign()
  return unit ~= new_unit or period ~= new_period or lump ~= new_lump
end

function drain(units)
  local needed = lumps_until_paid(debt_of(units, new_unit, 0, new_lump))
  return math.min(needed, most) * new_period
end

-- With an overdraft, what is held may exceed the quota, and then nothing is admitted.
function fits_beside(units)
  return units <= limit + overdraft and limit + (overdraft > 0 and 1 or 0) >= 1
end

function initial()
  at, lumps, parts, excess, last, grain = now, 0, 0, 0, 0, 2 ^ exponent
  unit, period, lump = new_unit, new_period, new_lump
end

function decode(state)
  local letter, other = string.byte(state)
  if letter == 84 and #state == 26 then
    letter, at, parts, unit, lump, other = struct.unpack(SHORT, state)
    period, last, excess = 1, 0, 0
    lumps, parts = debt_of(0, unit, parts, lump)
  elseif letter == 81 and #state >= size then
    local per
    letter, at, lumps, parts, last, per, lump, excess, other = struct.unpack(LONG, state)
    unit, period = per < 0 and 1 or per, per < 0 and -per or 1
  else
    fail(key)
  end
  if unit * lump == 0 then
    fail(key)
  end
  grain = 2 ^ other
  return state
end

-- `waits`: requests wait, and their reservations follow.
function encode(waits)
  local debt = lumps * lump + parts
  grain = 2 ^ exponent
  if waits or shapes or period ~= 1 or last > 0 or excess > 0 or debt >= 2 ^ 53 then
    local per = period == 1 and unit or -period
    return struct.pack(LONG, 81, at, lumps, parts, last, per, lump, excess, exponent)
  end
  return struct.pack(SHORT, 84, at, debt, unit, lump, exponent)
end

function step_back()
  local back = at - now
  if back > 0 then
    at, last = now, math.max(last - back, 0)
  end
  return back > 0
end

function advance(time)
  local passed = math.floor((time - at) / period)
  at = at + passed * period
  lower(passed, 0)
end

function adopt()
  local changed = is_foreign()
  if changed and reset_after() > 0 then
    convert()
  elseif changed then
    initial()
  end
  advance(now)
  if is_full() then
    at = now
  end
  return changed
end

function earliest(needed)
  if shapes then
    return time_until(0), time_until(limit * unit - needed * unit)
  end
  local wait = math.max(last - now, 0)
  if needed > 0 then
    local covered = math.max(needed - overdraft, 0)
    wait = math.max(time_until(limit * unit - covered * unit), wait)
  end
  return wait
end

function commit(instant, units)
  -- The request may proceed later than it could. The departures of a leaky bucket stay apart.
  local refilled = math.floor((instant - at) / period)
  if lumps_until_paid(lumps, parts) + (shapes and 1 or 0) <= refilled then
    lumps, parts, excess = refilled, 0, 0
  end
  local more_lumps, more_parts = debt_of(units, unit, 0, lump)
  raise(more_lumps, more_parts, is_foreign() and longest(period) or most)
  last = instant > at and instant or 0
end

if returns then
  function refund(instant, units)
    if instant and last > now then
      return -- later reservations, by another quota, may count on what came in since
    end
    local back, rest = debt_of(units, unit, 0, lump)
    if instant then
      -- Units that were refilled since, up to `at`, are back already.
      local refilled, of_next = math.ceil(math.max(at - instant, 0) / period), 0
      if is_foreign() then
        -- A request of a token bucket may have proceeded just before a lump.
        local passed = math.floor((now - instant) / new_period) + (shapes and 0 or 1)
        local debt = math.ceil(passed * new_lump / new_unit * unit)
        local other, of_other = debt_of(0, unit, debt, lump)
        if other >= refilled then
          refilled, of_next = other, of_other
        end
      end
      back, rest = lowered(back, rest, refilled, of_next)
    end
    if back > 0 or rest > 0 then
      lower(back, rest)
      bound_last()
    end
  end
end

function reset_after()
  return is_full() and 0 or time_until(0)
end

-- By the grain in the stored state, which may be that of another burst: the fast path counts on it.
function expiry(reset)
  return round_up(now + reset, grain)
end
