-- Reservations: the requests that wait, so that one that is dropped can release what it reserved, for the
-- algorithms whose state is a string.
-- key  the state, in which all reservations are counted (the head); while requests wait, behind it the state
--      before the first of them (the base), then in the order of their instants {instant, cost}, doubles
-- A check reads the head alone.
-- `model` returns what an algorithm does with the state that it has read.
local function expire_at(time)
  return string.format('%.0f', math.ceil(time / 1000)) -- a number is written with more digits, which takes longer
end

-- What few calls need.
local function reservations()
  local ENTRY = 16

  -- What is to be returned: {instant, units, kept}, without an instant if no request is named.
  local function releases(cost)
    if action == 'refund' then
      return {{nil, cost, 0}}
    end
    local all, packed = {}, ARGV[#ARGV]
    for place = 1, #packed, 24 do
      all[#all + 1] = {struct.unpack('<ddd', packed, place)}
    end
    return all
  end

  -- The base and what stands behind it, if a request waits.
  local function read_tail(key, size)
    local tail = redis.call('GETRANGE', key, size, -1)
    if #tail >= size + ENTRY and struct.unpack('<d', tail, #tail - ENTRY + 1) > now then
      return tail
    end
  end

  -- Reads the base, and makes the entries whose time has come part of it. Returns the place behind them.
  local function fold(tail, size, model)
    model.read(string.sub(tail, 1, size))
    local place = size + 1
    local instant, cost = struct.unpack('<dd', tail, place)
    while instant <= now do
      model.advance(instant)
      model.commit(instant, cost)
      place = place + ENTRY
      instant, cost = struct.unpack('<dd', tail, place)
    end
    model.advance(now)
    return place
  end

  -- Lowers the cost of the entry at `instant`, if it is there.
  local function lower(entries, instant, units)
    local low, high = 1, #entries + 1
    while low < high do
      local middle = math.floor((low + high) / 2)
      if entries[middle][1] < instant then
        low = middle + 1
      else
        high = middle
      end
    end
    local entry = entries[low]
    if entry and entry[1] == instant then
      entry[2] = entry[2] - math.min(units, entry[2])
    end
  end

  -- Returns units to the state that `model` has read. What has an instant to come is only returned if its
  -- reservation is found, as the state may have been lost and others may have spent since. Reservations that stay
  -- keep their instants.
  local function give_back(key, size, stale, cost, model)
    model = model()
    local tail = not stale and read_tail(key, size)
    local entries = {}
    if tail then
      for place = fold(tail, size, model), #tail, ENTRY do
        entries[#entries + 1] = {struct.unpack('<dd', tail, place)}
      end
    else
      model.advance(now)
    end
    for _, release in ipairs(releases(cost)) do
      local instant, units = release[1], release[2]
      if instant and instant > now then
        lower(entries, instant, units)
      else
        model.refund(instant, units, release[3])
      end
    end
    local base, packed = model.packed(), {}
    for _, entry in ipairs(entries) do
      if entry[2] > 0 then
        model.commit(entry[1], entry[2])
        packed[#packed + 1] = struct.pack('<dd', entry[1], entry[2])
      end
    end
    local reset = model.reset()
    if reset == 0 then
      redis.call('DEL', key)
    else
      local behind = packed[1] and base .. table.concat(packed) or ''
      redis.call('SET', key, model.packed() .. behind, 'PXAT', expire_at(now + reset))
    end
  end

  -- Stores the state behind a reservation; `before` is the state before it.
  local function reserve(key, head, before, instant, cost, reset, model)
    local size, entry = #head, struct.pack('<dd', instant, cost)
    local length = redis.call('STRLEN', key)
    local newest, newest_cost = 0, 0
    if length >= 2 * size + ENTRY then
      newest, newest_cost = struct.unpack('<dd', redis.call('GETRANGE', key, length - ENTRY, -1))
    end
    if newest <= now then -- none waits
      redis.call('SET', key, head .. before .. entry, 'PXAT', expire_at(now + reset))
      return
    end
    local middle = 2 * size + math.floor((length - 2 * size) / ENTRY / 2) * ENTRY
    local oldest = struct.unpack('<d', redis.call('GETRANGE', key, middle, middle + 7))
    if oldest <= now or instant < newest then -- half are over, or another limit was waited for longer
      model = model()
      local tail = redis.call('GETRANGE', key, size, -1)
      local place, behind = fold(tail, size, model), #tail + 1
      while behind > place and struct.unpack('<d', tail, behind - ENTRY) > instant do
        behind = behind - ENTRY
      end
      local ahead = behind
      if behind > place then
        local other, units = struct.unpack('<dd', tail, behind - ENTRY)
        if other == instant then
          ahead, cost = behind - ENTRY, cost + units
        end
      end
      entry = struct.pack('<dd', instant, cost)
      local rest = string.sub(tail, place, ahead - 1) .. entry .. string.sub(tail, behind)
      redis.call('SET', key, head .. model.packed() .. rest, 'PXAT', expire_at(now + reset))
      return
    end
    if newest == instant then
      redis.call('SETRANGE', key, length - ENTRY, struct.pack('<dd', instant, newest_cost + cost))
    else
      redis.call('APPEND', key, entry)
    end
    redis.call('SETRANGE', key, 0, head)
    redis.call('PEXPIREAT', key, expire_at(now + reset))
  end

  -- Stores what a check left that proceeds before those that wait for another limit.
  local function write_before(key, head, cost, reset, model)
    local size, behind = #head, ''
    local tail = read_tail(key, size)
    if tail then
      model = model()
      local place = fold(tail, size, model)
      model.commit(now, cost)
      behind = model.packed() .. string.sub(tail, place)
    end
    redis.call('SET', key, head .. behind, 'PXAT', expire_at(now + reset))
  end

  return {releases = releases, give_back = give_back, reserve = reserve, write_before = write_before}
end

-- Stores what a check left. Reservations by another clock or quota (`stale`) stay counted, and cannot be
-- released.
local function write(key, head, stale, before, instant, cost, reset, model)
  if before and not stale then
    reservations().reserve(key, head, before, instant, cost, reset, model)
  elseif before then
    local entry = struct.pack('<dd', instant, cost)
    redis.call('SET', key, head .. before .. entry, 'PXAT', expire_at(now + reset))
  elseif reset > 0 then
    redis.call('SET', key, head, 'PXAT', expire_at(now + reset))
  else
    redis.call('DEL', key)
  end
end

