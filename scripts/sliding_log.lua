-- Sliding log: at most `limit` in any interval of length `window`, open at its old end.
-- state   a list of entries, oldest first: {instant, cost} of what was admitted, integers of seven and four bytes;
--         its last element is 'S', then integers of seven bytes: {at, skew, window, sum, dead}: `sum` of all costs,
--         and how many entries have a cost of 0, as they were released
-- params  'S', then doubles: {limit, window}
-- found   'S', then doubles: {at, skew, window}, then {instant, cost} of few entries, which stand for all that count:
--         the reply to this request is the same
-- When the clock steps back, `skew` keeps the times of the log from following it: `at` is the time of the log.
local limit, new_window = struct.unpack('<dd', params, 2)
local MAX_SUM, MAX_COST = 2 ^ 52, 2 ^ 32 - 1
local at, skew, window, sum, dead
local length, last, last_cost = 0, 0, 0
local first, live, live_dead = 0, 0, 0 -- the leading entries that do not count any more; the sum of the others
local instants, costs = {}, {}
local found_live, found_last, marks
local committed, merges = false, false
local encode -- none: a log contains its reservations

local function unpacked(entry)
  return struct.unpack('<I7I4', entry)
end

local function packed(instant, units)
  return struct.pack('<I7I4', instant, units)
end

local function instant_of(i)
  if not instants[i] then
    instants[i], costs[i] = unpacked(redis.call('LINDEX', key, i))
  end
  return instants[i]
end

-- The number of leading entries whose instant is at most `time`, by steps that double and then halve.
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

-- Reads the entries from `i` on towards `last` that are in one page, of those that are not known yet.
local function read_page(i, last, page)
  local other = i <= last and math.min(i + page - 1, last) or math.max(i - page + 1, last)
  local low = math.min(i, other)
  for j, entry in ipairs(redis.call('LRANGE', key, low, math.max(i, other))) do
    if not costs[low + j - 1] then -- which is not in the list yet
      instants[low + j - 1], costs[low + j - 1] = unpacked(entry)
    end
  end
end

-- Calls `visit` with the index of each entry from `first` to `last`, forwards or backwards, until it returns true;
-- reads them in pages that double.
local function scan(first, last, visit)
  local page = 1
  for i = first, last, first <= last and 1 or -1 do
    if not costs[i] then
      read_page(i, last, page)
      page = math.min(page * 2, 512)
    end
    if visit(i) then
      return i
    end
  end
end

-- Finds the entries that count, and adds up their costs from the nearer end.
local function find_live()
  first, live, live_dead = leading(at - window), 0, 0
  local function add(i)
    live = live + costs[i]
    live_dead = live_dead + (costs[i] == 0 and 1 or 0)
  end
  if first <= length / 2 then
    if first > 0 then
      scan(0, first - 1, add)
    end
    live, live_dead = sum - live, dead - live_dead
  elseif first < length then
    scan(length - 1, first, add)
  end
end

-- The instant of the entry with which `units` of the live ones have left, found from the nearer end. Marks it.
local function leaving(units)
  local total, found = 0
  if units <= live / 2 then
    found = scan(first, length - 1, function(i)
      total = total + costs[i]
      return total >= units
    end)
  else
    found = scan(length - 1, first, function(i)
      total = total + costs[i]
      return total > live - units
    end)
    total = found and live - total + costs[found]
  end
  if found then
    marks[#marks + 1] = {instants[found], total}
  end
  return found and instants[found] or last
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
    length = redis.call('LLEN', key) - 1
    find_live()
  else -- it is over
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

local function first_instant(needed)
  if first == length then
    return at
  end
  local excess, instant = live + needed - limit, math.max(at, last)
  return excess > 0 and math.max(instant, leaving(excess) + window) or instant
end

local function earliest(needed)
  found_live, found_last, marks = live, last, {}
  return first_instant(needed) - at
end

local function commit(instant, units)
  committed, instant = true, instant + skew
  units = math.min(units, MAX_SUM - live) -- what is spent may be above the quota
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

