-- Fast path of the leaky bucket: a state with the same rate, and no request that waits for another
-- limit. It decides as the engine does. The model stands before this text.
local full = burst * new_unit

-- Reads the state. Returns its bytes, and one more if reservations follow it, and the instant at
-- which the key expires; none if the engine must decide.
local function read()
  local head = redis.pcall('GETRANGE', key, '0', size_text)
  if head == '' then
    initial()
    return head, 0
  elseif type(head) == 'table' or #head < size or string.byte(head) ~= 76 then
    return
  end
  local _, grain
  _, at, debt, unit, tick, excess, grain = struct.unpack(STATE, head)
  if not is_foreign() and excess == 0 and now >= at then
    return head, math.ceil((at + math.ceil(debt / tick)) / 2 ^ grain) * 2 ^ grain
  end
end

-- Returns the instant of the newest reservation, if a request waits.
local function newest_reservation()
  local instant = struct.unpack('<d', call('GETRANGE', key, '-16', '-9'))
  return instant > now and instant or nil
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
      entries.base = entries.base or debt
      entries[#entries + 1] = {instant, run.cost}
    end
    debt = debt + each
  end
end

-- Stores the state with these reservations, which stand behind those of requests that wait.
local function store_reservations(entries, newest)
  local head, reset, packed = encode(), reset_after(), {}
  debt = entries.base
  for i = 2, #entries do
    packed[i - 1] = struct.pack('<dd', entries[i][1], entries[i][2])
  end
  local first, more = entries[1], table.concat(packed)
  if newest then
    reserving()(head, encode(), first[1], first[2], more, reset)
  else
    put(head .. encode() .. struct.pack('<dd', first[1], first[2]) .. more, reset)
  end
end

local function fast(_, _, runs)
  local head, expires = read()
  if not head then
    return
  end
  local newest = #head > size and newest_reservation()
  advance(now)
  local entries, before = {}, debt
  for _, run in ipairs(runs) do
    grant(run, entries)
  end
  if debt == before then
    return head
  elseif newest and not (entries[1] and entries[1][1] >= newest) then
    return
  elseif entries[1] then
    store_reservations(entries, newest)
  elseif #head == size and now + debt / tick <= expires then
    call('SETRANGE', key, '1', struct.pack('<I7I7', now, debt))
  else
    put(encode(), reset_after())
  end
  return head
end
