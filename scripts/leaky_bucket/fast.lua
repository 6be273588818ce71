-- Fast path of the leaky bucket, and of requests to a token bucket of which some wait: a state at
-- the same rate, and no request that waits for another limit. It decides as the engine does.
-- state.lua stands before this text.
local SIZE, unit, lump, full = 44, new_unit, new_lump, limit * new_unit
local at, debt, last -- of the key at work; the debt in parts
local PAGE, page_end = 256, '255' -- the bytes that are read: the state, and up to 10 reservations

-- Reads the state, from the value if that was read. Returns its bytes, with reservations if they
-- follow it; none if the engine must decide.
local function read(key, value)
  value = reads and string.sub(value, 1, PAGE) or try('GETRANGE', key, '0', page_end)
  if type(value) == 'table' then
    return
  end
  local letter, _ = string.byte(value)
  local lumps, parts, excess, other_unit, other_lump, found = 0, 0, 0, unit, lump, exponent
  at, last = now, 0
  if letter == 81 and #value >= SIZE then
    _, at, lumps, parts, last, other_unit, other_lump, excess, found = struct.unpack(LONG, value)
  elseif letter == 84 and #value == 26 then
    _, at, parts, other_unit, other_lump, found = struct.unpack(SHORT, value)
  elseif value ~= '' then
    return
  end
  debt = lumps * lump + parts
  if other_unit == unit and other_lump == lump and excess == 0 and found == exponent
    and now >= at and debt < 2 ^ 53 then
    return value
  end
end

local function encode()
  local lumps = math.floor(debt / lump)
  local parts = debt - lumps * lump
  return struct.pack(LONG, 81, at, lumps, parts, last, unit, lump, 0, exponent)
end

-- Returns the instant of the newest reservation; none if no request waits. Returns, too, whether
-- something else stands behind the state.
local function newest_reservation(key, value)
  if #value <= SIZE then
    return
  end
  local is_other = #value < PAGE and math.max(#value - 2 * SIZE, 1) % 16 > 0
  if #value == PAGE then
    value = call('GETRANGE', key, '-16', '-1')
  end
  local instant, cost = struct.unpack('<dd', value, #value - 15)
  return instant > now and instant, is_other or not (cost >= 1 and cost <= 2 ^ 53)
end

-- Grants the requests of a run for which there is room. Adds those that wait to `entries`.
local function grant(run, entries)
  local each, granted = run.cost * unit, 0
  local rest = shapes and 0 or full - each -- of the debt, when a request proceeds
  while granted < run.count do
    local wait = math.max(math.ceil((debt - rest) / lump), not shapes and last - now or 0, 0)
    if wait > run.max_wait or shapes and debt + each > full then
      is_denied = true
      break
    end
    local instant, newest = now + wait, entries[#entries]
    if newest and newest[1] == instant then
      newest[2] = newest[2] + run.cost
    elseif wait > 0 then
      entries.before = entries.before or encode()
      entries[#entries + 1] = {instant, run.cost}
    end
    if not shapes then
      debt = math.max(debt, wait * lump)
    end
    last, debt, granted = wait > 0 and instant or 0, debt + each, granted + 1
  end
  run.admitted = granted
end

-- Returns the length of the value, if half of its reservations are not over.
local function length_of(key, value)
  local is_longer = #value == PAGE
  local length = is_longer and call('STRLEN', key) or #value
  local middle = 2 * SIZE + math.floor((length - 2 * SIZE) / 32) * 16
  local entry = is_longer and call('GETRANGE', key, middle, middle + 7)
    or string.sub(value, middle + 1, middle + 8)
  return struct.unpack('<d', entry) > now and length
end

-- Stores the state and the new reservations. Returns these if the engine must store them.
local function store(key, value, newest, entries, expires)
  local first, head, packed = entries[1], encode(), {}
  for i, entry in ipairs(entries) do
    packed[i] = struct.pack('<dd', entry[1], entry[2])
  end
  local new = table.concat(packed)
  if first and newest then
    local length = first[1] > newest and length_of(key, value)
    if not length then
      return {head, entries.before, entries}
    elseif length < PAGE then
      head = head .. string.sub(value, SIZE + 1) .. new
    else
      call('SETRANGE', key, length, new)
    end
  elseif first then
    head = head .. entries.before .. new
  end
  local empty_at = now + math.ceil(debt / lump)
  if value == '' or #value > SIZE and not newest then
    call('SET', key, head, 'PXAT', expire_at(round_up(empty_at, grain)))
    return
  end
  call('SETRANGE', key, '0', head)
  if empty_at > expires then
    call('PEXPIREAT', key, expire_at(round_up(empty_at, grain)))
  end
end

function write(key, _, _, value, newest, entries, expires)
  local ok, left = pcall(store, key, value, newest, entries, expires)
  if ok then
    return not left, nil, left
  end
  return false, left
end

function fast(key, value, runs)
  value = read(key, value)
  if not value then
    return
  end
  local newest, is_other = newest_reservation(key, value)
  if is_other then
    return
  end
  local expires = round_up(at + math.ceil(debt / lump), grain)
  local before, entries = math.max(debt - (now - at) * lump, 0), {}
  at, debt = now, before
  for _, run in ipairs(runs) do
    grant(run, entries)
  end
  local first, is_bounded = entries[1], debt < 2 ^ 53 and debt / lump < most
  if debt == before or is_bounded and (first and first[1] >= (newest or 0)
    or not first and not newest and shapes) then
    return string.sub(value, 1, SIZE), debt > before, value, newest, entries, expires
  end
end
