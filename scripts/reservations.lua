-- Reservations: the requests that wait, so that a request that is dropped can release what it
-- reserved. Loads and stores the states that are a string.
-- key  the state, which counts all reservations (the head). While requests wait, the state before
--      the first of them (the base) follows, then in the order of their instants {instant, cost},
--      doubles
-- A check reads the head alone, and one byte that shows whether anything stands behind it. `size`
-- is that of a head and a base that stand before entries; a state alone can be shorter. `size_text`
-- is the same as text, which needs no printing. A model whose states have several sizes sets `size`
-- to that of the state that it has found.
local first_found -- the state before the first request

local ENTRY = 16
local read_size = tonumber(size_text)

-- Forgets what requests to another key have found.
function forget()
  first_found, held = nil, nil
end

-- Reads what is held, behind the state or without one. The cost of a reservation, which can stand
-- there, too, never ends with that letter.
local function find_holds()
  local own = size_of and size_of(found) or size
  local is_longer = #found > own or own > read_size and state_length() > own
  if string.byte(found) ~= 72 and not is_longer then
    return
  end
  local tail, first = get('-151', '-1'), string.sub(found, 1, 1)
  local last = string.byte(tail, -1)
  if last == 72 then
    make_holding()
    local state = open_holds(tail, first)
    found = state and string.sub(state, 1, read_size + 1) or get('0', size_text)
  elseif last < 63 or last > 67 or math.max(state_length() - 2 * own, 1) % ENTRY > 0 then
    fail(key, first .. string.sub(tail, -1)) -- not the cost of a reservation
  end
end

-- Returns the state, if all of it has been read.
function whole()
  local own = found and (size_of and size_of(found) or size)
  return is_fresh and (not found and '' or #found <= own and found)
end

function load()
  found, stale, is_fresh = get('0', size_text), false, true
  if open_block(string.byte(found)) then
    found = get('0', size_text)
  elseif block and not block.state then
    found = nil
    return
  end
  if not held then
    find_holds()
  end
  found = found ~= '' and decode(found, true) or nil
  first_found = first_found or found or ''
end

function found_state()
  return first_found or ''
end

local function expiry_after(reset)
  return expiry and expiry(reset) or now + reset
end

function expiry_now()
  return expiry_after(reset_after())
end

-- Returns a state in the form of another one, which may have grown: both stand in the value, in one
-- form.
local function grown(state, other)
  if #state < #other then
    decode(state)
    state = encode(true)
  end
  return state
end

-- Few calls need the functions of this and of `reserving`, and each takes time to create.
local function tails()
  -- The base and the entries behind it, if a request waits.
  local function read_tail(size)
    local tail = get(size, -1)
    if #tail >= size + ENTRY and struct.unpack('<d', tail, #tail - ENTRY + 1) > now then
      return tail
    end
  end

  -- Makes the base the state, and the entries up to an instant, at most now, part of it. Returns
  -- the position behind them.
  local function fold(tail, size, last)
    decode(string.sub(tail, 1, size))
    local position = size + 1
    local instant, cost = struct.unpack('<dd', tail, position)
    while instant <= last do
      advance(instant)
      commit(instant, cost)
      position = position + ENTRY
      instant, cost = struct.unpack('<dd', tail, position)
    end
    advance(now)
    return position
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

  -- Counts the entries in the state again. Returns the base, and the entries that are left.
  local function recount(entries)
    local base, packed = encode(true), {}
    for _, entry in ipairs(entries) do
      if entry[2] > 0 then
        commit(entry[1], entry[2])
        packed[#packed + 1] = struct.pack('<dd', entry[1], entry[2])
      end
    end
    return base, table.concat(packed)
  end

  return {fold = fold, lower = lower, read = read_tail, recount = recount}
end

local function reserving()
  local tails = tails()

  -- Inserts a reservation, and `more` behind it, if some have to be folded, up to `last`, or if the
  -- head has grown.
  local function insert(head, instant, cost, more, reset, last)
    local tail = get(size, -1)
    local first, behind = tails.fold(tail, size, last), #tail + 1
    while behind > first and struct.unpack('<d', tail, behind - ENTRY) > instant do
      behind = behind - ENTRY
    end
    local ahead = behind
    if behind > first then
      local other, units = struct.unpack('<dd', tail, behind - ENTRY)
      if other == instant then
        ahead, cost = behind - ENTRY, cost + units
      end
    end
    local entry = struct.pack('<dd', instant, cost)
    local rest = string.sub(tail, first, ahead - 1) .. entry .. more .. string.sub(tail, behind)
    local base = encode(true)
    put(grown(head, base) .. base .. rest, expiry_after(reset))
  end

  -- Stores the state with a reservation, and with `more` entries behind it, if no request waits
  -- longer; `before` is the state without them. Folds the entries that are over if they are half
  -- of all, or if a request waits longer for another limit.
  local function reserve(head, before, instant, cost, more, reset)
    local entry = struct.pack('<dd', instant, cost)
    local length = state_length()
    local newest, newest_cost = 0, 0
    if length >= 2 * size + ENTRY then
      newest, newest_cost = struct.unpack('<dd', get(length - ENTRY, -1))
    end
    if newest <= now then -- no request waits
      put(head .. before .. entry .. more, expiry_after(reset))
      return
    end
    local middle = 2 * size + math.floor((length - 2 * size) / ENTRY / 2) * ENTRY
    local oldest = struct.unpack('<d', get(middle, middle + 7))
    local folds = oldest <= now or instant < newest
    if folds or #head ~= size then
      insert(head, instant, cost, more, reset, folds and now or 0)
      return
    end
    if newest == instant then
      entry = struct.pack('<dd', instant, newest_cost + cost)
      length = length - ENTRY
    end
    patch(length, entry .. more)
    patch(0, head, expiry_after(reset))
  end

  return reserve
end

-- Stores a state with reservations of requests that wait longer than all others: {instant, cost} of
-- each. `before` is the state without them.
function reserve_all(head, before, entries)
  local more = {}
  for i = 2, #entries do
    more[i - 1] = struct.pack('<dd', entries[i][1], entries[i][2])
  end
  local instant, cost = entries[1][1], entries[1][2]
  decode(head)
  reserving()(head, before, instant, cost, table.concat(more), reset_after())
end

if returns then
  -- Returns units to the state. Units of an instant to come are only returned if their reservation
  -- is found: the state may have been lost, and other requests may have spent since. Reservations
  -- that stay keep their instants, and it can be that later requests cannot use what is released
  -- before them. If all is for others, it is kept then, for its process. Returns whether it is.
  function release(stale, releases, are_for_others)
    local tails, entries, before = tails(), {}, nil
    local tail = not stale and tails.read(size)
    if tail then
      advance(now)
      before = are_for_others and encode(true)
      for position = tails.fold(tail, size, now), #tail, ENTRY do
        entries[#entries + 1] = {struct.unpack('<dd', tail, position)}
      end
    else
      advance(now)
    end
    for _, release in ipairs(releases) do
      local instant, units = release[1], release[2]
      if instant and instant > now then
        tails.lower(entries, instant, units)
      else
        refund(instant, units)
      end
    end
    local base, behind = tails.recount(entries)
    local reset, waits = reset_after(), behind ~= ''
    local head = reset > 0 and encode(waits) or ''
    if waits and head == before then
      return true
    end
    put(waits and head .. grown(base, head) .. behind or head, expiry_after(reset))
  end
end

-- Stores the state after a decision. Reservations by another clock or quota (`stale`) stay counted,
-- and cannot be released.
function store(before, instant)
  local reset = reset_after()
  local head = before and encode(true)
  before = before and grown(before, head)
  if before and not stale then
    reserving()(head, before, instant, cost, '', reset)
  elseif before then
    put(head .. before .. struct.pack('<dd', instant, cost), expiry_after(reset))
  elseif reset == 0 then
    put('')
  elseif found and #found > size and not stale then
    -- The request proceeds before requests that wait, but behind those that cannot be released.
    head = encode(true)
    local tails, value = tails(), nil
    local tail = tails.read(size)
    if tail then
      local position = tails.fold(tail, size, now)
      commit(now + earliest(-math.huge), cost)
      local base = encode(true)
      value = grown(head, base) .. base .. string.sub(tail, position)
    end
    put(value or encode(), expiry_after(reset))
  else
    put(encode(), expiry_after(reset))
  end
end
