-- Fast path of the token bucket: a bucket that refills continuously and has no overdraft, checks
-- that do not wait, and a state in the short form at the same rate. It decides as the engine does.
-- state.lua stands before this text.
local unit, lump, full = new_unit, new_lump, limit * new_unit

-- Returns the instant at which the key expires: when the debt has flowed in, rounded up.
local function expiry_of(at, debt, grain)
  return round_up(at + math.ceil(debt / lump), grain)
end

-- Returns the debt, and the instant at which the key expires; none if the engine must decide.
local function read(found)
  if found == '' then
    return 0, 0
  elseif #found ~= 26 or string.byte(found) ~= 84 then
    return
  end
  local _, at, debt, other_unit, other_lump, exponent = struct.unpack(SHORT, found)
  if other_unit == unit and other_lump == lump and now >= at then
    return math.max(debt - (now - at) * lump, 0), expiry_of(at, debt, 2 ^ exponent)
  end
end

local function write(key, found, debt, expires)
  if now + debt / lump <= expires then
    return call('SETRANGE', key, '1', struct.pack('<I7I7', now, debt))
  end
  local state = struct.pack(SHORT, 84, now, debt, unit, lump, exponent)
  return replace(key, found, state, expiry_of(now, debt, grain))
end

local states = read_all()
local function fast(_, i, runs)
  local found = states[i] or ''
  local before, expires = read(found)
  local debt = before and use(before, full, unit, runs)
  if debt then
    return found, debt > before and debt, expires
  end
end

if new_period ~= 1 or overdraft > 0 then
  fast = nil
end
