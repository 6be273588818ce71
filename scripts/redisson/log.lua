-- Redisson's rate limiter: at most `rate` permits in any interval. This text stands in front of the scripts
-- of this folder.
-- KEYS[1]    a hash: rate, interval, type (0 overall, 1 per client), keepAliveTime (0 for none); and, ours
--            alone, template: the first three as a template lent them
-- KEYS[2]    the permits that are left, an integer as text, which may be negative;
-- KEYS[3]    the same of this client
-- KEYS[4]    the log: a sorted set of {length, id, permits}, a byte, so many bytes and four, scored by the
--            time of the acquire;
-- KEYS[5]    the same of this client
-- KEYS[6]    ours alone: the tally of a log that is long, or has entries of a clock that is far ahead;
-- KEYS[7]    the same of this client
-- ARGV       the last but one is what a template lends, those four numbers, or empty;
--            the last one is the tally that the call before had come to, or empty
-- Times are in milliseconds; all numbers are integers below 2^53.
-- Redisson's scripts may have run since. They add to the log, and drop its oldest entries; what is left
-- they change by what they add and drop, so that it must be, with all that is in the log, the rate.
local SHORT, HEAD, MOST = 32, 128, 1000
local LARGEST = 2147483647
local EXACT, CENTURY = 2 ^ 53, 36525 * 86400000
local DENIED, DONE, ABOVE_RATE, NO_RATE, AGAIN = 0, 1, 2, 3, 4

local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
local now, now_ceil = math.floor(now_us / 1000), math.ceil(now_us / 1000)

local rate, interval, keep_alive, per_client
local left_key, log, tally_key
-- Whether the hash has no rate, and whether it is of something else.
local is_new, is_foreign
-- What the template lends, if the hash is still to get it.
local lent

local function whole(text, most)
  return text and string.find(text, '^%d+$') and math.min(tonumber(text), most) or nil
end

-- Returns whether it is a rate: it and the interval are whole numbers, whoever wrote them.
local function use(config)
  rate, interval = whole(config[1], EXACT), whole(config[2], CENTURY)
  keep_alive = whole(config[4], CENTURY) or 0
  per_client = config[3] == '1'
  local i = per_client and 1 or 0
  left_key, log, tally_key = KEYS[2 + i], KEYS[4 + i], KEYS[6 + i]
  return rate and interval and interval > 0 and (per_client or config[3] == '0')
end

local function as_rate(config)
  return table.concat(config, ' ', 1, 3)
end

-- Returns whether there is a rate. If it was lent, or there is none, that of the template holds.
local function open()
  local config = redis.call('HMGET', KEYS[1], 'rate', 'interval', 'type', 'keepAliveTime', 'template')
  is_new = not use(config)
  is_foreign = is_new and not (config[1] or config[2]) and redis.call('EXISTS', KEYS[1]) == 1
  local template = {string.match(ARGV[#ARGV - 1], '^(%d+) (%d+) (%d) (%d+)$')}
  if template[1] and (is_new or config[5] == as_rate(config) and config[5] ~= as_rate(template)) then
    lent = template
    return use(lent)
  end
  return not is_new
end

local function set(config, template)
  assert(not is_foreign, 'the key of the limiter is of something else')
  redis.call('HSET', KEYS[1], 'rate', config[1], 'interval', config[2], 'type', config[3],
    'keepAliveTime', config[4])
  if template then
    redis.call('HSET', KEYS[1], 'template', template)
  else
    redis.call('HDEL', KEYS[1], 'template')
  end
  use(config)
  if keep_alive > 0 then
    redis.call('PEXPIRE', KEYS[1], math.max(keep_alive, interval))
  end
  if is_new and redis.call('EXISTS', log) == 0 then -- left behind by a limiter that is gone
    redis.call('DEL', left_key)
  end
end

local function permits_in(entry)
  local size, at = #entry, 2 + (string.byte(entry) or 255)
  if size == 8 or size == 20 then -- of older releases: a float, or the length in eight bytes
    at = size - 3
  end
  if at + 3 > size then
    return 0
  end
  local permits = struct.unpack('<I4', entry, at)
  return permits <= LARGEST and permits or 0, at
end

local function entry_of(id, permits)
  return struct.pack('<Bc0I4', #id, id, permits)
end

-- What is in the log: how many entries, how many of them have expired, the time of the newest.
local size, expired, newest
local tally
-- What is left, as the key says, if it is a whole number, and as text.
local left, left_text
-- Whether there is something to store.
local changed = false

local function at(rank)
  return redis.call('ZRANGE', log, rank, rank)[1]
end

-- What is known of clocks, without the sums.
local function clocks()
  return {low = tally.low, mark = tally.mark, far = tally.far, seen = tally.seen}
end

local function forget_far_ahead()
  tally.low, tally.mark, tally.far, tally.seen = nil, nil, nil, nil
end

-- The entries that are now ahead by more than two intervals, from `low` up to `mark`, `far` of them. Others leave
-- by themselves in time; and these are ahead by more than one still, when they may be dropped.
local function see_far_ahead()
  local near = redis.call('ZCOUNT', log, '-inf', now + 2 * interval)
  if near < size then
    tally.low, tally.mark, tally.far, tally.seen = at(near), newest, size - near, now_ceil
    changed = true
  elseif tally.mark then
    forget_far_ahead()
    redis.call('DEL', tally_key)
    changed = true
  end
end

-- They have expired when they were first seen an interval ago. As it is the oldest that Java drops, all are there
-- if `low` is; if there are more, others have come among them, and all are as new.
local function drop_far_ahead()
  local first = tally.low and redis.call('ZRANK', log, tally.low)
  local far = 0
  if first and redis.call('ZCOUNT', log, tally.mark, tally.mark) > 0 then
    far = redis.call('ZCOUNT', log, '-inf', tally.mark) - first
  end
  if far <= 0 or far > tally.far or now_ceil < tally.seen then
    see_far_ahead()
  elseif now >= tally.seen + interval then
    local last = first + far
    first = math.max(first, redis.call('ZCOUNT', log, '-inf', now + interval))
    local gone = math.min(math.max(last - first, 0), MOST)
    if gone > 0 then
      redis.call('ZREMRANGEBYRANK', log, first, first + gone - 1)
      size, changed = size - gone, true
      newest = tonumber(redis.call('ZRANGE', log, -1, -1, 'WITHSCORES')[2])
    end
    tally = clocks()
    if first + gone < last then
      tally.low, tally.far = at(first), last - first - gone
    else
      see_far_ahead()
    end
  end
end

local function look(writes)
  left_text = redis.call('GET', left_key)
  left = left_text and tonumber(string.match(left_text, '^-?%d+$'))
  left = left and math.max(left, -EXACT)
  size = redis.call('ZCARD', log)
  if size == 0 and writes and left and left < rate then -- the log was lost: all that is used counts from now
    newest, size, changed = now_ceil, 1, true
    local permits = math.min(rate - left, LARGEST)
    redis.call('ZADD', log, newest, entry_of(string.rep('\0', 16), permits))
  end
  expired, tally = 0, {}
  if size > 0 then
    newest = tonumber(redis.call('ZRANGE', log, -1, -1, 'WITHSCORES')[2])
    local ahead = newest - now > interval
    if size > SHORT or ahead then
      changed = changed or ARGV[#ARGV] ~= ''
      local stored = ARGV[#ARGV] ~= '' and ARGV[#ARGV] or redis.call('GET', tally_key)
      local is_read, read = pcall(cmsgpack.unpack, stored or '')
      tally = is_read and type(read) == 'table' and read or {}
    end
    if not ahead then
      forget_far_ahead()
    elseif writes then
      drop_far_ahead()
    end
    expired = redis.call('ZCOUNT', log, '-inf', now - interval)
  end
end

-- How many more entries this call may read.
local budget = MOST

local function sum_of(first, last)
  local sum = 0
  if first <= last then
    for _, entry in ipairs(redis.call('ZRANGE', log, first, last)) do
      sum = sum + permits_in(entry)
    end
    budget = budget - (last - first + 1)
  end
  return sum
end

-- The permits that count, or nil if it takes another call, with this one's tally, to know.
-- A long log is known as a tail, the entries from `boundary` to `newest`, `count` of them and of the sum
-- `sum`, and what is before it, `ahead` entries from `first` on, of the sum `head`. That holds for as long as
-- the ranks say that these are all there: then only what came since need be read.
local function count()
  local live = size - expired
  if live <= SHORT then
    tally = clocks()
    return sum_of(expired, size - 1)
  end
  local b = tally.boundary and redis.call('ZRANK', log, tally.boundary)
  local n = tally.newest and redis.call('ZRANK', log, tally.newest)
  if not (b and n and n - b + 1 == tally.count and expired - b <= HEAD) then
    tally = clocks()
    tally.count, tally.sum = 0, 0
    b, n, changed = size, size - 1, true
  end
  if n < size - 1 then
    changed = true
    local last = math.min(size - 1, n + budget)
    tally.sum, tally.count = tally.sum + sum_of(n + 1, last), tally.count + last - n
    tally.newest, n = at(last), last
    if n < size - 1 then
      return nil
    end
  end

  local wanted = math.min(HEAD, math.floor(live / 2))
  local to = b
  if b - expired >= 2 * wanted then
    to = math.max(expired + wanted, b - math.max(budget, 0))
    tally.sum, tally.count = tally.sum + sum_of(to, b - 1), tally.count + b - to
  elseif b - expired < wanted / 4 then
    to = math.min(expired + wanted, n)
    tally.sum, tally.count = tally.sum - sum_of(b, to - 1), tally.count + b - to
  end
  if to ~= b then
    tally.boundary, tally.newest, tally.first = at(to), tally.newest or at(n), nil
    b = to
  end
  if b - expired > 2 * wanted then
    return nil
  end

  local first = at(0)
  if tally.first == first and tally.ahead == b then
    tally.head = tally.head - sum_of(0, expired - 1)
  else
    tally.head = sum_of(expired, b - 1)
  end
  tally.first, tally.ahead = expired > 0 and at(expired) or first, b - expired
  return tally.head + tally.sum
end

local function add(time, entry, permits)
  redis.call('ZADD', log, time, entry)
  local last = not newest or time > newest
  size, newest, changed = size + 1, time, true
  if tally.boundary then
    if last then
      tally.sum, tally.count, tally.newest = tally.sum + permits, tally.count + 1, entry
    elseif redis.call('ZRANK', log, entry) > redis.call('ZRANK', log, tally.boundary) then
      tally.sum, tally.count = tally.sum + permits, tally.count + 1
      tally.newest = redis.call('ZRANGE', log, -1, -1)[1]
    else
      tally.first = nil
    end
  end
end

-- Drops what has expired, in a time that is bounded: a log of which little is left is made anew, and the
-- old one is freed in the background.
local function sweep()
  if expired == 0 then
    return
  end
  changed = true
  if expired == size then
    redis.call('UNLINK', log)
  elseif expired > MOST and size - expired <= MOST then
    local kept = redis.call('ZRANGE', log, expired, -1, 'WITHSCORES')
    redis.call('UNLINK', log)
    for i = 1, #kept, 2 do
      redis.call('ZADD', log, kept[i + 1], kept[i])
    end
  else
    local gone = math.min(expired, MOST)
    redis.call('ZREMRANGEBYRANK', log, 0, gone - 1)
    size, expired = size - gone, expired - gone
    return
  end
  size, expired = size - expired, 0
end

local function as_text(number)
  return string.format('%.0f', number)
end

local function expire_in(ms)
  for _, key in ipairs({left_key, log}) do
    redis.call('PEXPIRE', key, ms)
  end
end

-- The keys live as long as the limiter, and those of one client, which may be gone, only as long as they count.
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
    expire_in(ms)
  else
    redis.call('PERSIST', log)
  end
end

local function save_tally()
  if tally.boundary or tally.mark then
    local ahead = math.min(math.max((tally.mark or now) - now, 0), CENTURY)
    redis.call('SET', tally_key, cmsgpack.pack(tally), 'PX', ahead + interval + 1)
  elseif size > SHORT then
    redis.call('DEL', tally_key)
  end
end

-- Stores what is left, when `sum` counts and `taken` of it was taken just now.
local function store(sum, taken)
  if size == 0 then
    redis.call('DEL', left_key, log, tally_key)
    return
  end
  local rest = rate - sum
  if expired > 0 then -- Redisson will add what is still to be swept
    rest = math.min(rest, (left or taken) - taken)
  end
  redis.call('SET', left_key, as_text(rest))
  extend()
  save_tally()
end

local function leaves(time)
  if time > now + interval and tally.mark then -- dropped when it was seen for so long
    time = time <= tally.mark and tally.seen or now
  end
  return (time + interval) * 1000 - now_us
end

-- The time, in microseconds, until so many permits that count have expired; or sooner, if these are in more
-- entries than may be read.
local function time_until(permits)
  local rank, step, last = expired, 1, nil
  while permits > 0 and rank < size and rank - expired <= MOST do
    for _, entry in ipairs(redis.call('ZRANGE', log, rank, rank + step - 1)) do
      permits, last = permits - permits_in(entry), entry
      if permits <= 0 then
        break
      end
    end
    rank, step = rank + step, step * 4
  end
  return math.max(leaves(tonumber(redis.call('ZSCORE', log, last))), 1)
end

local function packed_tally()
  return cmsgpack.pack(tally)
end

-- Also stores it: if the caller's deadline passes before the log is known, the next caller goes on
-- from here.
local function stored_tally()
  save_tally()
  return packed_tally()
end

