-- Fast path of the leaky bucket: a state with the same rate, and no request that waits for another
-- limit. It decides as the engine does. state.lua stands before this text.
local full = limit * new_unit
local PAGE, page_end = 256, '255' -- the bytes that are read: the state, and up to 12 reservations

-- Reads the state. Returns its bytes, with reservations if they follow it, and the grain of its
-- expiry; none if the engine must decide.
local function read(key)
  local value = redis.pcall('GETRANGE', key, '0', page_end)
  form, beyond, size = 76, 0, 36 -- not those of the key before
  if value == '' then
    at, debt, last, excess, unit, lump = now, 0, 0, 0, new_unit, new_lump
    return value, grain
  elseif type(value) == 'table' or #value < size or string.byte(value) ~= 76 then
    return
  end
  local _, exponent
  _, at, debt, last, unit, lump, excess, exponent = struct.unpack(STATE, value)
  if unit == new_unit and lump == new_lump and excess == 0 and now >= at then
    return value, 2 ^ exponent
  end
end

-- Returns the instant of the newest reservation; none if no request waits. Returns, too, whether
-- something else stands behind the state.
local function newest_reservation(key, value)
  local is_other = #value < PAGE and math.max(#value - 2 * size, 1) % 16 > 0
  if #value == PAGE then
    value = call('GETRANGE', key, '-16', '-1')
  end
  if #value >= 16 and #value ~= size then
    local instant, cost = struct.unpack('<dd', value, #value - 15)
    return instant > now and instant, is_other or not (cost >= 1 and cost <= 2 ^ 53)
  end
end

-- Grants the requests of a run for which there is room. Adds those that wait to `entries`.
local function grant(run, entries)
  local each = run.cost * unit
  local room = math.min(full - each, run.max_wait * lump) - debt
  local granted = room >= 0 and math.min(math.floor(room / each) + 1, run.count) or 0
  for _ = 1, granted do
    local instant, newest = now + math.ceil(debt / lump), entries[#entries]
    if newest and newest[1] == instant then
      newest[2] = newest[2] + run.cost
    elseif debt > 0 then
      entries.before = entries.before or encode()
      entries[#entries + 1] = {instant, run.cost}
    end
    last, debt = instant > now and instant or 0, debt + each
  end
end

-- Returns what stands behind the new state and before its new reservations, if all of that was read
-- and stays.
local function behind(value, newest, entries)
  if #value == size then
    return entries.before
  elseif newest and #value < PAGE and entries[1][1] > newest then
    local middle = 2 * size + math.floor((#value - 2 * size) / 32) * 16
    return struct.unpack('<d', value, middle + 1) > now and string.sub(value, size + 1)
  end
end

-- Stores the content of the bucket, its newest request, and what stands behind the state, if that
-- changes. The rest of the state stays.
local function put(key, value, tail, expires, old_grain)
  local head = struct.pack('<I7I7I7', now, debt, last)
  if tail then
    head = head .. string.sub(value, 23, size) .. tail
  end
  call('SETRANGE', key, '1', head)
  local empty_at = now + math.ceil(debt / lump)
  if empty_at > expires then
    call('PEXPIREAT', key, expire_at(round_up(empty_at, old_grain)))
  end
end

local function write(key, _, _, value, newest, entries, expires, old_grain)
  local tail = entries[1] and behind(value, newest, entries)
  if tail then
    local packed = {tail}
    for i, entry in ipairs(entries) do
      packed[i + 1] = struct.pack('<dd', entry[1], entry[2])
    end
    put(key, value, table.concat(packed), expires, old_grain)
  elseif entries[1] then
    engine().reserve_all(entries.before, entries)
  elseif #value == size then
    put(key, value, nil, expires, old_grain)
  else
    local empty_at = now + math.ceil(debt / lump)
    call('SET', key, encode(), 'PXAT', expire_at(round_up(empty_at, grain)))
  end
  return true
end

local function fast(key, _, runs)
  local value, old_grain = read(key)
  if not value then
    return
  end
  local expires = round_up(at + math.ceil(debt / lump), old_grain)
  local newest, is_other = newest_reservation(key, value)
  if is_other then
    return
  end
  local before, entries = math.max(debt - (now - at) * lump, 0), {}
  at, debt = now, before
  for _, run in ipairs(runs) do
    grant(run, entries)
  end
  if debt == before or not newest or entries[1] and entries[1][1] >= newest then
    return string.sub(value, 1, size), debt > before, value, newest, entries, expires, old_grain
  end
end
