-- Debt: what a bucket lacks to be full. Stands before the models of the buckets. The twin is
-- src/algorithm/debt.rs.
-- A debt is counted in parts of a unit, as far as these fit: up to `max_debt`. Whole units `beyond`
-- that are counted as units, so that a debt which fits at one rate is not forgotten at another one.
-- While there are units beyond, the parts are those that fit, so they are more than a full bucket.
local LONGEST_REFILL, LONGEST_WINDOW = 3155760000000000, 31622400000000

-- Returns the quotient and the rest of `a * b / c`, with `a` up to 2^53, and `b` and `c` up to
-- 2^46. If the product is not exact, by a long division with digits of base 64: the numbers in it
-- are up to 127 x 2^46. A quotient above 2^53 is not exact.
local function divide(a, b, c)
  local product = a * b
  if product < 2 ^ 53 then
    local quotient = math.floor(product / c)
    return quotient, product - quotient * c
  end
  local quotient, rest, unit = 0.0, 0.0, 2 ^ 48 -- floats in Lua 5.4, too: integers would wrap
  while unit >= 1 do
    local digit = math.floor(a / unit)
    a = a - digit * unit
    local part = rest * 64 + digit * b
    local whole = math.floor(part / c)
    quotient, rest = quotient * 64 + whole, part - whole * c
    unit = unit / 64
  end
  return quotient, rest
end

-- Returns the most parts of a debt: they are exact, and a full bucket has no more.
local function most_debt(period, lump)
  return math.min(math.ceil(LONGEST_REFILL / period) * lump, 2 ^ 53)
end

-- Counts as many units as fit in parts. All units together are at most 2^53.
local function settle(debt, beyond, unit, max_debt)
  local units = math.min(beyond, math.floor((max_debt - debt) / unit))
  debt = debt + units * unit
  return debt, math.min(beyond - units, 2 ^ 53 - math.floor(debt / unit))
end

-- Adds units, and fewer parts than a unit has.
local function raise(debt, beyond, units, parts, unit, max_debt)
  if parts > max_debt - debt then
    return settle(debt + (parts - unit), beyond + units + 1, unit, max_debt)
  end
  return settle(debt + parts, beyond + units, unit, max_debt)
end

-- Subtracts units, and fewer parts than a unit has, down to 0.
local function lower_beyond(debt, beyond, units, parts, unit, max_debt)
  debt, beyond = debt - parts, beyond - units
  if beyond < 0 then
    return math.max(debt + beyond * unit, 0), 0
  end
  debt, beyond = settle(debt, beyond, unit, max_debt)
  return math.max(debt, 0), beyond
end

-- Returns whether the debt, and `more` parts, are at most these units and parts.
local function is_within(debt, beyond, more, units, parts, unit)
  return (beyond - units) * unit + debt + more <= parts
end

-- Returns the units that flow in within these periods, rounded up.
local function units_of(periods, lump, unit)
  local units, parts = divide(periods, lump, unit)
  return parts > 0 and units + 1 or units
end

-- Returns the time in which `parts` and the units beyond flow in. In place of one that is longer
-- than all that can be reserved, a time that is.
local function time_of(parts, beyond, unit, period, lump)
  local whole, rest = divide(beyond, unit, lump)
  local periods = math.floor(parts / lump)
  local more = parts - periods * lump + rest
  return math.min((whole + periods + math.ceil(more / lump)) * period,
    LONGEST_REFILL + LONGEST_WINDOW)
end

-- Returns the time after which a key may expire: later, if `time_of` has returned a shorter time.
local function known(reset)
  return reset < LONGEST_REFILL and reset or 2 * reset
end

-- Converts a debt with its excess, in 2^-24 parts, to another rate, as a whole number of parts and
-- what it was rounded up by. So quotas that alternate on one key do not raise the debt with each
-- conversion.
local function convert(debt, beyond, excess, unit, new_unit, new_max_debt)
  local units = math.floor(debt / unit)
  local exact = (debt - units * unit - excess / 2 ^ 24) / unit * new_unit
  local parts = math.ceil(exact)
  excess = math.min(math.floor((parts - exact) * 2 ^ 24), 2 ^ 24 - 1) -- three bytes
  debt, beyond = settle(parts, beyond + units, new_unit, new_max_debt)
  return debt, beyond, excess
end

