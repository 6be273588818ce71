-- Fast path of the token bucket: a bucket that refills continuously and has no overdraft, requests
-- that do not wait, and a state in the short form at the same rate. It decides as the engine does.
function fast(_, found, runs)
  local before, expires = 0, 0
  if #found == 26 and string.byte(found) == 84 then
    local _, at, debt, unit, lump, stored = struct.unpack(SHORT, found)
    if unit ~= new_unit or lump ~= new_lump or now < at then
      return
    end
    before = math.max(debt - (now - at) * lump, 0)
    if stored == exponent then -- else the whole state is written
      expires = round_up(at + math.ceil(debt / lump), grain)
    end
  elseif found ~= '' then
    return
  end
  local debt = use(before, limit * new_unit, new_unit, runs)
  if debt then
    return found, debt > before and debt, expires
  end
end

function write(key, found, debt, expires)
  if now + debt / new_lump <= expires then
    return done(try('SETRANGE', key, '1', struct.pack('<I7I7', now, debt)))
  end
  local state = struct.pack(SHORT, 84, now, debt, new_unit, new_lump, exponent)
  return replace(key, found, state, round_up(now + math.ceil(debt / new_lump), grain))
end
-- HELD
-- Beside holds, the whole value is written.
local unit, lump = new_unit, new_lump
-- The state of the key at work, and what is held behind it.
local state, slots, sum, epoch, at, skew, joined

-- Reads a value. Returns the debt, and the grain of the expiry; none if the engine must decide.
local function read(found)
  local last, has_ended = string.byte(found, -1), nil
  if not last or last == 72 then
    state, slots, sum, epoch, at, skew, joined, has_ended = open_held(found)
  else
    state, slots, sum, epoch, at, skew, joined = found, {}, 0, 0, 0, 0, 0
  end
  if not state or has_ended or last == 72 and #found ~= #state + 25 + 7 * #slots then
    return
  elseif state == '' then
    return 0, grain
  elseif #state == 26 and string.byte(state) == 84 then
    local _, at, debt, other_unit, other_lump, exponent = struct.unpack(SHORT, state)
    if other_unit == unit and other_lump == lump and now >= at and exponent < 64 then
      return math.max(debt - (now - at) * lump, 0), 2 ^ exponent
    end
  end
end

-- Stores what is held behind the state, or behind a new one with this debt. The key may expire when
-- the last slot has ended, and what was held has flowed in.
local function store(key, found, before, grain, debt)
  local expires = round_up(now + math.ceil((debt or before) / lump), grain)
  state = debt and struct.pack(SHORT, 84, now, debt, unit, lump, exponent) or state
  if #slots == 0 then
    return replace(key, found, state, expires)
  end
  local held = 0
  for i = 2, #slots, 2 do
    held = held + slots[i] * unit
  end
  if held >= 2 ^ 53 then
    return false
  end
  expires = math.max(expires, slots[#slots - 1] - skew) + math.min(math.ceil(held / lump), most)
  return replace(key, found, with_held(state, slots, epoch, at, skew, joined), expires)
end

function fast(_, found, runs)
  local before, other = read(found)
  local used = before and use(before, limit * unit - sum * unit, unit, runs)
  if not used then
    return
  end
  found = string.sub(found, #state + 1) .. state
  if used > before and lifetime > 0 then
    if #slots == 0 then
      epoch, skew, joined = now, 0, 0
    end
    at = now + skew
    if not add(slots, math.ceil((at + lifetime) / grid) * grid, (used - before) / unit) then
      return
    end
  end
  return found, used > before and used, before, other
end

function write(key, found, used, before, other)
  if lifetime > 0 then
    return store(key, found, before, other)
  end
  return store(key, found, before, grain, used)
end

function change(key, found, changes)
  local before, other = read(found)
  if not before then
    return
  end
  local results, is_changed, spent
  results, is_changed, spent, slots, epoch, skew, joined =
    change_slots(changes, slots, epoch, skew, joined)
  local debt = before + (spent or 0) * unit
  if not results or debt >= 2 ^ 53 or debt / lump >= most then
    return
  elseif not is_changed and spent == 0 then
    return results, true
  end
  at = is_changed and now + skew or at
  if spent > 0 then
    return results, store(key, found, before, grain, debt)
  elseif state == '' and #slots == 0 then
    return results, done(try('DEL', key))
  end
  return results, store(key, found, before, other)
end
