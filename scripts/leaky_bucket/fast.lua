-- Fast path of the leaky bucket: a state in the long form with the same rate, and no request that
-- waits for another limit. It decides as the engine does. state.lua stands before this text.
local SIZE, unit, lump, full = 44, new_unit, new_lump, limit * new_unit
local at, debt, last -- of the key at work; the debt in parts
local PAGE, page_end = 256, '255' -- the bytes that are read: the state, and up to 10 reservations

-- Reads the state. Returns its bytes, with reservations if they follow it, and the exponent of its
-- expiry; none if the engine must decide.
local function read(key)
  local value = try('GETRANGE', key, '0', page_end)
  if value == '' then
    at, debt, last = now, 0, 0
    return value, exponent
  elseif type(value) == 'table' or #value < SIZE or string.byte(value) ~= 81 then
    return
  end
  local _, lumps, parts, other_unit, other_lump, excess, found
  _, at, lumps, parts, last, other_unit, other_lump, excess, found = struct.unpack(LONG, value)
  debt = lumps * lump + parts
  if other_unit == unit and other_lump == lump and excess == 0 and now >= at and debt < 2 ^ 53 then
    return value, found
  end
end

local function encode(exponent)
  local lumps = math.floor(debt / lump)
  local parts = debt - lumps * lump
  return struct.pack(LONG, 81, at, lumps, parts, last, unit, lump, 0, exponent)
end

-- Returns the instant of the newest reservation; none if no request waits. Returns, too, whether
-- something else stands behind the state.
local function newest_reservation(key, value)
  local is_other = #value < PAGE and math.max(#value - 2 * SIZE, 1) % 16 > 0
  if #value == PAGE then
    value = call('GETRANGE', key, '-16', '-1')
  end
  if #value >= 16 and #value ~= SIZE then
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
      entries.before = entries.before or encode(exponent)
      entries[#entries + 1] = {instant, run.cost}
    end
    last, debt = instant > now and instant or 0, debt + each
  end
  run.admitted, is_denied = granted, is_denied or granted < run.count
end

-- Returns what stands behind the new state and before its new reservations, if all of that was read
-- and stays.
local function behind(value, newest, entries)
  if #value == SIZE then
    return entries.before
  elseif newest and #value < PAGE and entries[1][1] > newest then
    local middle = 2 * SIZE + math.floor((#value - 2 * SIZE) / 32) * 16
    return struct.unpack('<d', value, middle + 1) > now and string.sub(value, SIZE + 1)
  end
end

-- Stores the state, and what stands behind it, if that changes.
local function store(key, tail, value, entries, expires, old)
  local empty_at = now + math.ceil(debt / lump)
  if not tail and #value ~= SIZE then
    call('SET', key, encode(exponent), 'PXAT', expire_at(round_up(empty_at, grain)))
    return
  end
  local packed = {encode(old), tail}
  for _, entry in ipairs(entries) do
    packed[#packed + 1] = struct.pack('<dd', entry[1], entry[2])
  end
  call('SETRANGE', key, '0', table.concat(packed))
  if empty_at > expires then
    call('PEXPIREAT', key, expire_at(round_up(empty_at, 2 ^ old)))
  end
end

function write(key, _, _, value, newest, entries, expires, old)
  local tail = entries[1] and behind(value, newest, entries)
  if entries[1] and not tail then -- the engine stores them
    return false, nil, {encode(exponent), entries.before, entries}
  end
  return pcall(store, key, tail, value, entries, expires, old)
end

function fast(key, _, runs)
  local value, old = read(key)
  if not value then
    return
  end
  local expires = round_up(at + math.ceil(debt / lump), 2 ^ old)
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
    return string.sub(value, 1, SIZE), debt > before, value, newest, entries, expires, old
  end
end
