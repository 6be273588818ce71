-- set_rate of a limiter in Redisson's format.
-- Written by a test: edit the files that it consists of, whose comments are not sent:
-- ARGS, redisson/limits.lua, redisson/rate.lua, redisson/log.lua, redisson/set_rate.lua
-- EVALSHA names the text below this line 18ad4d97f9fa07ac7a7f9e1b555969f198d04183
local ARGS = 5
local SHORT, HEAD, MAX_ENTRIES = 8, 128, 1000
local MAX_PERMITS, MAX_EXACT, CENTURY = 2147483647, 2 ^ 53, 36525 * 86400000
local DENIED, DONE, ABOVE_RATE, NO_RATE, AGAIN, PER_CLIENT = 0, 1, 2, 3, 4, 5
local NEWEST, OLDEST, IS_USUAL, USUAL_LENGTH = '<Bdddc21', 'dc21ddd', 1, 99
local template_text, previous_tally = ARGV[ARGS + 1] or '', ARGV[ARGS + 2] or ''

local rate, interval, keep_alive, per_client
local left_key, log, tally_key
local is_new, is_foreign
local inherited

local function integer(text, max)
  return text and string.find(text, '^%d+$') and math.min(tonumber(text), max) or nil
end

local function use(config)
  rate, interval = integer(config[1], MAX_EXACT), integer(config[2], CENTURY)
  keep_alive = integer(config[4], CENTURY) or 0
  per_client = config[3] == '1'
  local i = per_client and 1 or 0
  left_key, log, tally_key = KEYS[2 + i], KEYS[4 + i], KEYS[6 + i]
  if #KEYS == 4 then
    left_key, log, tally_key = KEYS[2], KEYS[3], KEYS[4]
  end
  return rate and interval and interval > 0 and (per_client or config[3] == '0')
end

local function as_template(config)
  return table.concat(config, ' ', 1, 3)
end

local function read_rate()
  local config = redis.call('HMGET', KEYS[1], 'rate', 'interval', 'type', 'keepAliveTime',
    'template')
  is_new = not use(config)
  is_foreign = is_new and not (config[1] or config[2]) and redis.call('EXISTS', KEYS[1]) == 1
  if template_text ~= '' then
    local template = {string.match(template_text, '^(%d+) (%d+) (%d) (%d+)$')}
    local follows = config[5] and not is_new and config[5] == as_template(config)
    if template[1] and (is_new or follows and config[5] ~= as_template(template)) then
      inherited = template
      return use(inherited)
    end
  end
  return not is_new
end

local function set(config, template)
  assert(not is_foreign, 'the key of the limiter holds something else; use another name')
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
  if is_new and redis.call('EXISTS', log) == 0 then
    redis.call('DEL', left_key)
  end
end
local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
local now, now_ceil = math.floor(now_us / 1000), math.ceil(now_us / 1000)

local size, expired, newest
local tally
local left, left_text
local changed = false
local budget = MAX_ENTRIES

local function permits_in(entry)
  local length, index = #entry, 2 + (string.byte(entry) or 255)
  if length == 8 or length == 20 then
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

local function without_sums()
  return {low = tally.low, mark = tally.mark, far = tally.far, seen = tally.seen}
end

local function forget_far_ahead()
  if tally.mark then
    tally.low, tally.mark, tally.far, tally.seen = nil, nil, nil, nil
  end
end

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

local function read_log(writes)
  left_text = redis.call('GET', left_key)
  left = left_text and tonumber(string.match(left_text, '^-?%d+$'))
  left = left and math.max(left, -MAX_EXACT)
  size = redis.call('ZCARD', log)
  if size == 0 and writes and left and left < rate then
    newest, size, changed = now_ceil, 1, true
    local permits = math.min(rate - left, MAX_PERMITS)
    redis.call('ZADD', log, newest, entry_of(string.rep('\0', 16), permits))
    redis.call('DEL', tally_key)
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

local function usual_part(ends_at)
  if tally.mark or not is_regular(tally.first) or not is_regular(tally.newest)
    or tally.ahead + tally.count ~= size then
    return ''
  end
  local newest_at, first_at, boundary_at = redis.call('ZSCORE', log, tally.newest),
    redis.call('ZSCORE', log, tally.first), redis.call('ZSCORE', log, tally.boundary)
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

local function saved_tally()
  save_tally()
  return cmsgpack.pack(tally)
end

local function store(sum, taken)
  if size == 0 then
    redis.call('DEL', left_key, log, tally_key)
    return
  end
  local rest = rate - sum
  if expired > 0 then
    rest = math.min(rest, (left or taken) - taken)
  end
  redis.call('SET', left_key, as_text(rest))
  extend()
  save_tally()
end
local mode = ARGV[1]

local had_rate = read_rate()
if previous_tally == '' then
  if mode == 'try' and had_rate or mode == 'update' and not had_rate then
    return {DONE, 0, ''}
  end
  local old_keep_alive = had_rate and keep_alive or 0
  if had_rate and mode ~= 'set' then
    read_log(true)
    if size == 0 then
      redis.call('DEL', left_key)
    end
    if per_client ~= (ARGV[4] == '1') then
      redis.call('PEXPIRE', left_key, interval + 1)
      redis.call('PEXPIRE', log, interval + 1)
    end
  end

  local default = mode == 'update' and as_text(old_keep_alive) or '0'
  set({ARGV[2], ARGV[3], ARGV[4], ARGV[5] ~= '' and ARGV[5] or default})
  if old_keep_alive > 0 and keep_alive == 0 then
    redis.call('PERSIST', KEYS[1])
  end
  if mode == 'set' then
    redis.call('UNLINK', KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7])
    return {DONE, 1, ''}
  end
elseif not had_rate then
  return {DONE, 1, ''}
end

read_log(true)
local sum = count_permits()
if not sum then
  return {AGAIN, 1, saved_tally()}
end
sweep()
store(sum, 0)
return {DONE, 1, ''}
