-- Fast path of the sliding log: checks that do not wait, and a log with the same window, by the
-- same clock, and without reservations. It decides as the engine does, from the newest and the
-- oldest entries. state.lua stands before this text.

-- Reads the foot, and the newest entries. Returns the value from its first entry in it on; none if
-- the engine must decide.
local function read()
  local tail = try('GETRANGE', key, tail_text, '-1')
  if tail == '' then
    found_last, window, length, last = nil, new_window, 0, 0
    return tail
  elseif type(tail) == 'table' or not read_foot(tail) then
    return
  end
  last, last_cost = struct.unpack(ENTRY, tail, #tail - FOOT_SIZE - ENTRY_SIZE + 1)
  if window == new_window and skew == 0 and dead == 0 and now >= at and now >= last then
    found_last, found_at, found_skew, found_window = last, at, 0, window
    stored_last, stored_skew, stored_window = last, 0, window
    return tail
  end
end

-- The oldest entries that count, the position of the first of them, and the number of them; none if
-- they were not needed.
local page, position, entries

local function read_page(tail)
  entries = length - gone
  if entries <= PAGE then
    page, position = tail, #tail - FOOT_SIZE - ENTRY_SIZE * entries + 1
  else
    page, position, entries = packed_entries(gone, gone + PAGE - 1), 1, PAGE
  end
end

-- Finds the entries that count. Returns false if they are not on the oldest page.
local function find_oldest(tail)
  page, first, live, live_dead = nil, gone, sum, 0
  if tail == '' or last + window <= now then
    first, length, gone, live = 0, 0, 0, 0
    return true
  elseif oldest_at > now - window then
    return true
  end
  read_page(tail)
  while entries > 0 do
    oldest_at, oldest_cost = struct.unpack(ENTRY, page, position)
    if oldest_at > now - window then
      return true
    end
    first, live = first + 1, live - oldest_cost
    position, entries = position + ENTRY_SIZE, entries - 1
  end
end

-- Returns the log as it was found, with one entry for all behind those that must leave for these
-- units, as `condensed` does; none if those are not on the page.
local function found_until(units, tail)
  if not found_last then
    return ''
  elseif length == 0 then
    return struct.pack('<Bddd', 83, found_at, 0, window)
  elseif oldest_cost >= units and oldest_cost < live then -- most often
    return struct.pack('<Bddddddd', 83, found_at, 0, window, oldest_at, oldest_cost, last,
      live - oldest_cost)
  elseif not page then
    read_page(tail)
  end
  local total, i = 0, 0
  cuts = {}
  while total < units and i < entries do
    local instant, cost = struct.unpack(ENTRY, page, position + ENTRY_SIZE * i)
    total, i = total + cost, i + 1
    cuts[i] = {instant, total}
  end
  found_live = live
  return (total >= units or i == length - first) and condensed(cuts)
end

local function decide(runs)
  local tail = read()
  if not tail or not find_oldest(tail) then
    return
  end
  local used, missing = use(live, limit, 1, runs)
  -- The units that must leave for the next request, or for one that is denied.
  local state = used and found_until(math.max(live + 1 - limit, 1, missing), tail)
  if state then
    return state, used > live and used
  end
end

-- The engine reports a log whose entries cannot be read.
function fast(_, _, runs)
  local ok, state, used = pcall(decide, runs)
  if ok then
    return state, used
  end
end

local function store(used)
  local granted = used - live
  at, skew, live = now, 0, used
  if length == 0 or last < now or last_cost + granted > MAX_COST then
    last, last_cost, length = now, 0, length + 1
  end
  local start, bytes, expires = newest(last_cost + granted, false)
  if not start then
    call('SET', key, bytes, 'PXAT', expire_at(expires))
    return
  end
  call('SETRANGE', key, start, bytes)
  if expires then
    call('PEXPIREAT', key, expire_at(expires))
  end
end

function write(_, _, used)
  return pcall(store, used)
end
