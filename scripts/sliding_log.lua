-- Sliding log: at most `limit` in any interval of length `window`, open at its old end.
-- state   a list of entries, oldest first: {instant, cost} of each admitted request, integers of
--         seven and four bytes; its last element is 'S', then integers of seven bytes: {at, skew,
--         window, sum, dead}: `sum` of all costs, `dead` the number of entries whose cost is 0, as
--         they were released
-- params  'S', then doubles: {limit, window}
-- `at` is the time of the log: that of the clock, and `skew`, which keeps it from following a clock
-- that stepped back.
local limit, new_window = struct.unpack('<dd', params, 2)
local MAX_SUM, MAX_COST, ENTRY = 2 ^ 52, 2 ^ 32 - 1, '<I7I4'
local at, skew, window, sum, dead
local length, last, last_cost
-- `first`: the number of leading entries that do not count any more; `live`: the sum of the others.
local first, live, live_dead
local instants, costs
local found_at, found_skew, found_window, found_live, found_last, asked, mark, mark_total
local committed, merges

-- Returns nothing: a log contains its reservations.
local function encode() end

-- Forgets the log of another request.
local function forget()
  length, last, last_cost = 0, 0, 0
  first, live, live_dead = 0, 0, 0
  instants, costs = {}, {}
  mark, mark_total = nil, nil
  committed, merges = false, false
end

local function instant_of(i)
  if not instants[i] then
    -- Printing a number takes longer than the rest.
    instants[i], costs[i] = struct.unpack(ENTRY, call('LINDEX', key, i == 0 and '0' or i))
  end
  return instants[i]
end

-- The number of leading entries whose instant is at most `time`, by steps that double and then
-- halve.
local function leading(time)
  local low, high, step = 0, 0, 1
  while high < length and instant_of(high) <= time do
    low, high, step = high + 1, high + step, step * 2
  end
  high = math.min(high, length)
  while low < high do
    local middle = math.floor((low + high) / 2)
    if instant_of(middle) <= time then
      low = middle + 1
    else
      high = middle
    end
  end
  return low
end

-- Calls `visit` with the index of each entry from `from` to `to`, forwards or backwards, until it
-- returns true. Reads the entries in pages that double.
local function scan(from, to, visit)
  local step, page = from <= to and 1 or -1, 1
  local function read(i)
    local other = i + step * (page - 1)
    other = step > 0 and math.min(other, to) or math.max(other, to)
    local low = math.min(i, other)
    for j, entry in ipairs(call('LRANGE', key, low, math.max(i, other))) do
      if not costs[low + j - 1] then -- an entry that was added is not in the list yet
        instants[low + j - 1], costs[low + j - 1] = struct.unpack(ENTRY, entry)
      end
    end
    page = math.min(page * 2, 512)
  end
  for i = from, to, step do
    if not costs[i] then
      read(i)
    end
    if visit(i) then
      return i
    end
  end
end

-- Finds the entries that count, and adds up their costs from the nearer end.
local function find_live()
  first, live, live_dead = 0, sum, dead
  if instant_of(0) > at - window then
    return
  end
  first = leading(at - window)
  local units, zeros = 0, 0
  local function add(i)
    units = units + costs[i]
    zeros = zeros + (costs[i] == 0 and 1 or 0)
  end
  if first <= length / 2 then
    scan(0, first - 1, add)
    live, live_dead = sum - units, dead - zeros
    return
  end
  if first < length then
    scan(length - 1, first, add)
  end
  live, live_dead = units, zeros
end

-- The instant of the entry with which `units` of the live ones have left, found from the nearer
-- end, and the sum of the entries up to it.
local function leaving(units)
  local total, i = 0, first
  instant_of(first) -- reads its cost
  if costs[first] >= units then
    return instants[first], costs[first]
  elseif units <= live / 2 then
    i = scan(first, length - 1, function(i)
      total = total + costs[i]
      return total >= units
    end)
    return instants[i], total
  end
  i = scan(length - 1, first, function(i)
    total = total + costs[i]
    return total > live - units
  end)
  if i then
    return instants[i], live - total + costs[i]
  end
  return last, live
end

-- The first instant, by the time of the log, at which `needed` units are left; and the entry that
-- must leave for it, if one must.
local function first_instant(needed)
  if first == length then
    return at
  end
  local excess, instant = live + needed - limit, math.max(at, last)
  if excess <= 0 then
    return instant
  end
  local left, total = leaving(excess)
  return math.max(instant, left + window), left, total
end

local function summary()
  return struct.pack('<c1I7I7I7I7I7', 'S', at, skew, window, sum, dead)
end

local function initial()
  at, skew, window, sum, dead = now, 0, new_window, 0, 0
end

local function step_back()
  local back = now + skew < at
  if back then
    skew = at - now
  end
  return back
end

local function advance(time)
  at = time + skew
  if at < last + window then
    length = call('LLEN', key) - 1
    find_live()
  else -- no entry counts any more
    at, skew, last, sum, dead = time, 0, 0, 0, 0
  end
end

local function adopt()
  local changed = window ~= new_window
  window = new_window
  if changed and length > 0 then
    find_live()
  end
  return changed and length > 0
end

local function earliest(needed)
  local instant
  found_live, found_last, asked = live, last, needed
  instant, mark, mark_total = first_instant(needed)
  return instant - at
end

local function commit(instant, units)
  units = math.min(units, MAX_SUM - live) -- units spent may exceed the quota
  if units == 0 then
    return
  end
  committed, instant = true, instant + skew
  merges = length > 0 and last == instant and last_cost + units <= MAX_COST
  if merges then
    instants[length - 1], costs[length - 1] = last, last_cost + units
  else
    instants[length], costs[length] = instant, units
    last, length = instant, length + 1
  end
  live = live + units
end

local function reset_after()
  return first < length and last + window - at or 0
end

