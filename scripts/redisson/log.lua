-- The log: reads, sums, sweeps and stores it. KEYS and ARGV: see rate.lua.
--
-- Reading a long log takes long, so its sum is kept in a tally. The log then consists of:
--   the tail   `count` entries with `sum` permits, from the entry `boundary` to the entry `newest`
--   the head   `ahead` entries with `head` permits, before the tail, from the entry `first` on
-- As long as the ranks show that all of these are present, only newer entries must be read.
--
-- The tally also has the entries that are ahead of the clock by more than two intervals: `far`
-- entries from the entry `low` up to the time `mark`, first seen at `seen`.
local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
local now, now_ceil = math.floor(now_us / 1000), math.ceil(now_us / 1000)

-- How many entries the log has, how many of them have expired, and the time of the newest.
local size, expired, newest
local tally
-- The permits left according to the key, if these are an integer, and the text of the key.
local left, left_text
-- Something is to be stored.
local changed = false
-- How many more entries this call may read.
local budget = MAX_ENTRIES

-- Returns the permits of an entry, and their index in it. Counts 0 for an entry that cannot be
-- read.
local function permits_in(entry)
  local length, index = #entry, 2 + (string.byte(entry) or 255)
  if length == 8 or length == 20 then -- older releases: a float, or the length in eight bytes
    index = length - 3
  end
  if index + 3 > length then
    return 0
  end
  local permits = struct.unpack('<I4', entry, index)
  return permits <= MAX_PERMITS and permits or 0, index
end

local function entry_of(id, permits)
  return struct.pack('<Bc0I4', #id, id, permits)
end

local function entry_at(rank)
  return redis.call('ZRANGE', log, rank, rank)[1]
end

-- Returns a tally of the entries far ahead alone, without the sums.
local function without_sums()
  return {low = tally.low, mark = tally.mark, far = tally.far, seen = tally.seen}
end

local function forget_far_ahead()
  if tally.mark then
    tally.low, tally.mark, tally.far, tally.seen = nil, nil, nil, nil
  end
end

-- Finds the entries far ahead. Entries that are less far ahead expire in time without help; these
-- are dropped one interval after they were first seen, when they are still ahead by more than one
-- interval.
local function find_far_ahead()
  local near = redis.call('ZCOUNT', log, '-inf', now + 2 * interval)
  if near < size then
    tally.low, tally.mark, tally.far, tally.seen = entry_at(near), newest, size - near, now_ceil
    changed = true
  elseif tally.mark then
    forget_far_ahead()
    redis.call('DEL', tally_key)
    changed = true
  end
end

-- Drops the entries far ahead one interval after they were first seen. Java drops the oldest
-- entries first, so all of them are present if `low` is. If there are more, other entries were
-- added among them, and all count as first seen now.
local function drop_far_ahead()
  local first = tally.low and redis.call('ZRANK', log, tally.low)
  local far = 0
  if first and redis.call('ZCOUNT', log, tally.mark, tally.mark) > 0 then
    far = redis.call('ZCOUNT', log, '-inf', tally.mark) - first
  end
  if far <= 0 or far > tally.far or now_ceil < tally.seen then
    find_far_ahead()
  elseif now >= tally.seen + interval then
    local last = first + far
    first = math.max(first, redis.call('ZCOUNT', log, '-inf', now + interval))
    local dropped = math.min(math.max(last - first, 0), MAX_ENTRIES)
    if dropped > 0 then
      redis.call('ZREMRANGEBYRANK', log, first, first + dropped - 1)
      size, changed = size - dropped, true
      newest = tonumber(redis.call('ZRANGE', log, -1, -1, 'WITHSCORES')[2])
    end
    tally = without_sums()
    if first + dropped < last then
      tally.low, tally.far = entry_at(first), last - first - dropped
    else
      find_far_ahead()
    end
  end
end

-- Returns the tally of the previous call, else the stored one. One that cannot be read is empty.
local function load_tally()
  local packed = previous_tally
  if packed ~= '' then
    changed = true
  else
    packed = redis.call('GET', tally_key) or ''
  end
  local is_usual = string.byte(packed) == IS_USUAL and #packed > USUAL_LENGTH
  local rest = is_usual and string.sub(packed, USUAL_LENGTH + 1) or packed
  local valid, value = pcall(cmsgpack.unpack, rest)
  value = valid and type(value) == 'table' and value or {}
  if is_usual then
    local _, entries, sum
    _, entries, sum, _, value.newest, _, value.first, _, value.ahead, value.head =
      struct.unpack(NEWEST .. OLDEST, packed)
    value.count, value.sum = entries - value.ahead, sum - value.head
  end
  return value
end

-- Reads the state of the log. If `writes` is true, this also repairs a log that was lost, and
-- drops the entries far ahead.
local function read_log(writes)
  left_text = redis.call('GET', left_key)
  left = left_text and tonumber(string.match(left_text, '^-?%d+$'))
  left = left and math.max(left, -MAX_EXACT)
  size = redis.call('ZCARD', log)
  if size == 0 and writes and left and left < rate then -- lost: all used permits count from now
    newest, size, changed = now_ceil, 1, true
    local permits = math.min(rate - left, MAX_PERMITS)
    redis.call('ZADD', log, newest, entry_of(string.rep('\0', 16), permits))
    redis.call('DEL', tally_key) -- the same entry may have replaced the log that it describes
  end
  expired, tally = 0, {}
  if size > 0 then
    newest = tonumber(redis.call('ZRANGE', log, -1, -1, 'WITHSCORES')[2])
    local is_ahead = newest - now > interval
    if size > SHORT or is_ahead then
      tally = load_tally()
    end
    if not is_ahead then
      forget_far_ahead()
    elseif writes then
      drop_far_ahead()
    end
    expired = redis.call('ZCOUNT', log, '-inf', now - interval)
  end
end

local function sum_of(first, last)
  local sum = 0
  if first <= last then
    local entries = redis.call('ZRANGE', log, first, last)
    for i = 1, #entries do
      sum = sum + permits_in(entries[i])
    end
    budget = budget - (last - first + 1)
  end
  return sum
end

-- Returns the ranks of the boundary and of the newest entry of the tail. If the tail is not
-- complete, or its first entries expired long ago, a new one starts: empty, at the end of the log.
local function find_tail()
  local boundary = tally.boundary and redis.call('ZRANK', log, tally.boundary)
  local last = tally.newest and redis.call('ZRANK', log, tally.newest)
  if boundary and last and last - boundary + 1 == tally.count and expired - boundary <= HEAD then
    return boundary, last
  end
  tally = without_sums()
  tally.count, tally.sum = 0, 0
  changed = true
  return size, size - 1
end

-- Moves the boundary if the head is more than twice or less than a quarter as long as wanted, as
-- far as this call may read. Returns its rank.
local function move_boundary(boundary, last, wanted)
  local to = boundary
  if boundary - expired >= 2 * wanted then
    to = math.max(expired + wanted, boundary - math.max(budget, 0))
    tally.sum, tally.count = tally.sum + sum_of(to, boundary - 1), tally.count + boundary - to
  elseif boundary - expired < wanted / 4 then
    to = math.min(expired + wanted, last)
    tally.sum, tally.count = tally.sum - sum_of(boundary, to - 1), tally.count + boundary - to
  end
  if to ~= boundary then
    tally.boundary, tally.newest, tally.first = entry_at(to), tally.newest or entry_at(last), nil
  end
  return to
end

-- Returns the permits in the log that have not expired, or nil if another call with the tally of
-- this one must go on reading.
local function count_permits()
  local live = size - expired
  if live <= SHORT then
    if tally.count then
      tally = without_sums()
    end
    return sum_of(expired, size - 1)
  end
  local boundary, last = find_tail()
  if last < size - 1 then
    local read = last
    last, changed = math.min(size - 1, last + budget), true
    tally.sum, tally.count = tally.sum + sum_of(read + 1, last), tally.count + last - read
    tally.newest = entry_at(last)
    if last < size - 1 then
      return nil
    end
  end
  local wanted = math.min(HEAD, math.floor(live / 2))
  boundary = move_boundary(boundary, last, wanted)
  if boundary - expired > 2 * wanted then
    return nil
  end

  local first = entry_at(0)
  if tally.first == first and tally.ahead == boundary then
    tally.head = tally.head - sum_of(0, expired - 1)
  else
    tally.head, changed = sum_of(expired, boundary - 1), true
  end
  tally.first, tally.ahead = expired > 0 and entry_at(expired) or first, boundary - expired
  return tally.head + tally.sum
end

-- Drops expired entries in bounded time. A log with few live entries is rebuilt, because Redis
-- frees the old one in the background.
local function sweep()
  if expired == 0 then
    return
  end
  changed = true
  if expired == size then
    redis.call('UNLINK', log)
  elseif expired > MAX_ENTRIES and size - expired <= MAX_ENTRIES then
    local kept = redis.call('ZRANGE', log, expired, -1, 'WITHSCORES')
    redis.call('UNLINK', log)
    for i = 1, #kept, 2 do
      redis.call('ZADD', log, kept[i + 1], kept[i])
    end
  else
    local dropped = math.min(expired, MAX_ENTRIES)
    redis.call('ZREMRANGEBYRANK', log, 0, dropped - 1)
    size, expired = size - dropped, expired - dropped
    return
  end
  size, expired = size - expired, 0
end

local function as_text(number)
  return string.format('%.0f', number)
end

-- Sets when the keys expire: with the limiter, but those of a client, which may have ended, at the
-- latest when their permits do not count any more.
local function extend()
  local ms = redis.call('PTTL', KEYS[1])
  if keep_alive > 0 then
    ms = math.max(keep_alive, interval)
    redis.call('PEXPIRE', KEYS[1], ms)
  end
  if per_client then
    ms = math.min(ms > 0 and ms or CENTURY, interval + 1)
  end
  if ms > 0 then
    redis.call('PEXPIRE', left_key, ms)
    redis.call('PEXPIRE', log, ms)
  else
    redis.call('PERSIST', log)
  end
end

local function is_regular(entry)
  return entry and #entry == 21 and string.byte(entry) == 16 and permits_in(entry) > 0
end

-- Returns the first part of the tally; see limits.lua. It is empty if the log is not usual.
local function usual_part(ends_at)
  if tally.mark or not is_regular(tally.first) or not is_regular(tally.newest)
    or tally.ahead + tally.count ~= size then
    return ''
  end
  local newest_at, first_at, boundary_at = redis.call('ZSCORE', log, tally.newest),
    redis.call('ZSCORE', log, tally.first), redis.call('ZSCORE', log, tally.boundary)
  -- With the same time, a new entry could be before the boundary.
  if not newest_at or not first_at or newest_at == boundary_at then
    return ''
  end
  return struct.pack(NEWEST .. OLDEST, IS_USUAL, size, tally.sum + tally.head, newest_at,
    tally.newest, first_at, tally.first, ends_at, tally.ahead, tally.head)
end

local function save_tally()
  if tally.boundary or tally.mark then
    local ahead = math.min(math.max((tally.mark or now) - now, 0), CENTURY)
    local ms = ahead + 2 * interval
    redis.call('SET', tally_key, usual_part(now + ms) .. cmsgpack.pack(tally), 'PX', ms)
  end
end

-- Saves the tally and returns it. If the caller's deadline passes before the log has been read, the
-- next caller continues with the saved tally.
local function saved_tally()
  save_tally()
  return cmsgpack.pack(tally)
end

-- Stores the permits left, where `sum` permits count and `taken` of these were taken by this call.
local function store(sum, taken)
  if size == 0 then
    redis.call('DEL', left_key, log, tally_key)
    return
  end
  local rest = rate - sum
  if expired > 0 then -- Redisson will add the permits of entries that are still to be swept
    rest = math.min(rest, (left or taken) - taken)
  end
  redis.call('SET', left_key, as_text(rest))
  extend()
  save_tally()
end
