-- Fast path of the leaky bucket: a state with the same rate, and no request that waits for another
-- limit. It decides as the engine does. state.lua stands before this text.
local full = burst * new_unit

-- Reads the state. Returns its bytes, and one more if reservations follow it, and the instant at
-- which the key expires; none if the engine must decide.
local function read(key)
  local head = redis.pcall('GETRANGE', key, '0', size_text)
  if head == '' then
    at, debt, excess, unit, tick = now, 0, 0, new_unit, new_tick
    return head, 0
  elseif type(head) == 'table' or #head < size or string.byte(head) ~= 76 then
    return
  end
  local _, exponent
  _, at, debt, unit, tick, excess, exponent = struct.unpack(STATE, head)
  if unit == new_unit and tick == new_tick and excess == 0 and now >= at then
    return head, expiry_of(at + math.ceil(debt / tick), 2 ^ exponent)
  end
end

-- Returns the instant of the newest reservation; none if no request waits.
local function newest_reservation(key)
  local instant = struct.unpack('<d', call('GETRANGE', key, '-16', '-9'))
  return instant > now and instant
end

-- Grants the requests of a run for which there is room. Adds those that wait to `entries`.
local function grant(run, entries)
  local each = run.cost * unit
  local room = math.min(full - each, run.max_wait * tick) - debt
  local granted = room >= 0 and math.min(math.floor(room / each) + 1, run.count) or 0
  for _ = 1, granted do
    local instant, newest = now + math.ceil(debt / tick), entries[#entries]
    if newest and newest[1] == instant then
      newest[2] = newest[2] + run.cost
    elseif debt > 0 then
      entries.before = entries.before or encode()
      entries[#entries + 1] = {instant, run.cost}
    end
    debt = debt + each
  end
end

local function fast(key, _, runs)
  local head, expires = read(key)
  if not head then
    return
  end
  local newest = #head > size and newest_reservation(key)
  local before, entries = math.max(debt - (now - at) * tick, 0), {}
  at, debt = now, before
  for _, run in ipairs(runs) do
    grant(run, entries)
  end
  local first = entries[1]
  if debt == before then
    return head
  elseif newest and not (first and first[1] >= newest) then
    return
  elseif first then
    engine().reserve_all(entries.before, entries)
  elseif #head == size and now + debt / tick <= expires then
    call('SETRANGE', key, '1', struct.pack('<I7I7', now, debt))
  else
    local expires = expiry_of(now + math.ceil(debt / tick), grain)
    call('SET', key, encode(), 'PXAT', expire_at(expires))
  end
  return head
end
