-- Model of the sliding log: the functions of the engine. state.lua stands before this text.
--
-- The twin is crates/engine/src/algorithm/sliding_log.rs. It keeps the whole log; here, a page is
-- read at a time.
--
--   in Lua                                         | in Rust
--   first_instant, drain, initial, step_back,      | the same names
--     advance, adopt, earliest, commit,            |
--     reset_after; refund_at, refund_any           |
--   find_live, leaving                             | find_first, skip
--   release, with lower, move_dead and put_living  | refund, which removes entries of no units
--   scan, sum_of, read_entries, instant_of,        | the iterators of `VecDeque`
--     leading                                      |
--   read_foot, foot                                | decode, save, restore
--   merges, cuts, condensed, widened, newest       | none: they decide nothing, only how the value
--                                                  | is stored
local tail, first_read -- the end of the value, and the index of the first entry in it

local function read_entries(from, to)
  local bytes, before = tail, first_read
  if from < first_read then
    bytes, before = packed_entries(from, to), from
  end
  for i = from, to do
    if not costs[i] then -- an entry that was added is not stored yet
      instants[i], costs[i] = struct.unpack(ENTRY, bytes, ENTRY_SIZE * (i - before) + 1)
    end
  end
end

local function instant_of(i)
  if not instants[i] then
    read_entries(i, i)
  end
  return instants[i]
end

-- The number of leading entries whose instant is at most `time`, by steps that double and then
-- halve.
local function leading(time)
  local low, high, step = gone, gone, 1
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
  for i = from, to, step do
    if not costs[i] then
      local other = i + step * (page - 1)
      other = step > 0 and math.min(other, to) or math.max(other, to)
      read_entries(math.min(i, other), math.max(i, other))
      page = math.min(page * 2, 512)
    end
    if visit(i) then
      return i
    end
  end
end

-- Adds up the costs of the entries from one to another. Returns how many of them are 0, too.
local function sum_of(from, to)
  local cost_of = ENTRY_SIZE == 11 and '<I4' or '<I7'
  local units, zeros = 0, 0
  for start = from, to, 512 do
    local entries = packed_entries(start, math.min(start + 511, to))
    for position = 8, #entries, ENTRY_SIZE do
      local cost = struct.unpack(cost_of, entries, position)
      units = units + cost
      zeros = zeros + (cost == 0 and 1 or 0)
    end
  end
  return units, zeros
end

-- Finds the entries that count, and adds up their costs from the nearer end.
local function find_live()
  first, live, live_dead = gone, sum, dead
  if instant_of(gone) > at - window then
    return
  end
  first = leading(at - window)
  if first - gone <= length - first then
    local units, zeros = sum_of(gone, first - 1)
    live, live_dead = sum - units, dead - zeros
  else
    live, live_dead = sum_of(first, length - 1)
  end
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

-- The first instant, by the time of the log, at which `needed` units are left.
local function first_instant(needed)
  if first == length then
    return at
  end
  local excess, instant = live + needed - limit, math.max(at, last)
  if excess <= 0 then
    return instant
  end
  local left, total = leaving(excess)
  if found_last and left < found_last then
    cuts[#cuts + 1] = {left, total}
  end
  return math.max(instant, left + window)
end

function drain()
  return new_window
end

-- Returns nothing: a log contains its reservations.
function encode() end

function initial()
  at, skew, window, sum, dead, gone, length = now, 0, new_window, 0, 0, 0, 0
end

function step_back()
  local back = now + skew < at
  if back then
    skew = at - now
  end
  return back
end

function advance(time)
  at = time + skew
  if at < last + window then
    find_live()
  else -- no entry counts any more
    at, skew, last, sum, dead, gone, length = time, 0, 0, 0, 0, 0, 0
  end
end

function adopt()
  advance(now)
  local changed = window ~= new_window
  window = new_window
  if changed and length > 0 then
    find_live()
  end
  return changed and length > 0
end

function earliest(needed)
  found_live = found_live or live
  return first_instant(needed) - at
end

function commit(instant, units)
  units = math.min(units, MAX_SUM - live) -- units spent may exceed the quota
  if units == 0 then
    return
  end
  committed, instant = true, instant + skew
  merges = length > 0 and last == instant and last_cost + units <= MAX_COST
  if merges then
    live_dead = live_dead - (last_cost == 0 and 1 or 0)
    instants[length - 1], costs[length - 1] = last, last_cost + units
  else
    instants[length], costs[length] = instant, units
    last, length = instant, length + 1
  end
  live = live + units
end

function reset_after()
  return first < length and last + window - at or 0
end
