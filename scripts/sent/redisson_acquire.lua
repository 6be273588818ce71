-- acquire of a limiter in Redisson's format.
-- Written by a test: edit the files that it consists of, whose comments are not sent:
-- ARGS, redisson/limits.lua, redisson/quick.lua, redisson/rate.lua, redisson/log.lua, redisson/acquire.lua
-- EVALSHA names the text below this line eadbe2a8e1a52cc958d3c38a3e5ab5fcdcce45ba
local ARGS = 1
local SHORT, HEAD, MAX_ENTRIES = 8, 128, 1000
local MAX_PERMITS, MAX_EXACT, CENTURY = 2147483647, 2 ^ 53, 36525 * 86400000
local DENIED, DONE, ABOVE_RATE, NO_RATE, AGAIN, PER_CLIENT = 0, 1, 2, 3, 4, 5
local NEWEST, OLDEST, IS_USUAL, USUAL_LENGTH = '<Bdddc21', 'dc21ddd', 1, 99
local call, pack, unpack, format = redis.call, struct.pack, struct.unpack, string.format
local config
if ARGV[2] then
  config = call('HMGET', KEYS[1], 'rate', 'interval', 'type', 'keepAliveTime', 'template')
else
  config = call('HMGET', KEYS[1], 'rate', 'interval', 'type', 'keepAliveTime')
end
repeat
  local rate_text, interval, kind, keep_alive = config[1], config[2], config[3], config[4] or '0'
  if not (rate_text and interval) or rate_text == '' or interval == ''
    or #rate_text > 15 or #interval > 12 or not string.find(rate_text .. interval, '^%d+$')
    or keep_alive ~= '0' and (#keep_alive > 12 or not string.find(keep_alive, '^%d+$'))
    or config[5] and string.sub(ARGV[2], 1, #config[5] + 1) ~= config[5] .. ' ' then
    break
  end
  local entry, rate, interval, keep_alive = ARGV[1], rate_text + 0, interval + 0, keep_alive + 0
  local permits = unpack('<I4', entry, 18)
  if permits > rate or permits > MAX_PERMITS or interval == 0 then
    break
  end

  local left_key, log, tally_key, per_client = KEYS[2], KEYS[3], KEYS[4], kind == '1'
  if KEYS[5] then
    local i = per_client and 1 or 0
    left_key, log, tally_key = KEYS[2 + i], KEYS[4 + i], KEYS[6 + i]
  elseif per_client then
    break
  end
  if not per_client and kind ~= '0' then
    break
  end

  local time = call('TIME')
  local now_us = time[1] * 1000000 + time[2]
  local now = now_us / 1000
  now = now - now % 1
  local cutoff = now - interval

  local sum, gone, expired, first, first_at, newest_at = 0, 0, 0, nil, nil, 0
  local size = call('ZCARD', log)
  local is_long = size > SHORT
  local page, tally, newest, ends_at, ahead, head, _
  if size == 0 then
    local left = call('GET', left_key)
    if left and left ~= rate_text then
      break
    end
  elseif not is_long then
    page = call('ZRANGE', log, '0', '-1', 'WITHSCORES')
    for k = 1, 2 * size, 2 do
      local member, taken = page[k], 0
      if #member == 21 and string.byte(member) == 16 and member ~= entry then
        taken = unpack('<I4', member, 18)
      end
      newest_at = page[k + 1] + 0
      if newest_at <= cutoff then
        expired, gone = expired + 1, gone + taken
      elseif not first then
        first, first_at = k, newest_at
      end
      if taken == 0 or taken > MAX_PERMITS then
        newest_at = math.huge
        break
      end
      sum = sum + taken
    end
  else
    tally = call('GET', tally_key)
    if not tally or #tally < USUAL_LENGTH or string.byte(tally) ~= IS_USUAL then
      break
    end
    local count
    _, count, sum, newest_at, newest, first_at, first, ends_at =
      unpack('<Bdddc21dc21d', tally)
    if count ~= size then
      break
    end
    if first_at > cutoff then
      if call('ZRANK', log, first) ~= 0 then
        break
      end
    else
      page = call('ZRANGE', log, '0', '1', 'WITHSCORES')
      if page[1] ~= first then
        break
      end
      ahead, head = unpack('<dd', tally, 84)
      expired, gone = 1, unpack('<I4', first, 18)
      first, first_at = page[3], page[4] + 0
      if first_at <= cutoff then
        page = call('ZRANGE', log, '-inf', format('%d', cutoff), 'BYSCORE', 'LIMIT', '1', '64')
        for k = 1, #page do
          local member, taken = page[k], 0
          if #member == 21 and string.byte(member) == 16 then
            taken = unpack('<I4', member, 18)
          end
          if taken == 0 or taken > MAX_PERMITS then
            newest_at = math.huge
            break
          end
          gone = gone + taken
        end
        expired = 1 + #page
        local rank = format('%d', expired)
        page = call('ZRANGE', log, rank, rank, 'WITHSCORES')
        first, first_at = page[1] or '', (page[2] or 0) + 0
      end
      if expired > 64 or expired >= ahead or #first ~= 21 or string.byte(first) ~= 16
        or unpack('<I4', first, 18) == 0 then
        break
      end
    end
  end
  if newest_at > now + interval then
    break
  end

  if sum - gone + permits > rate then
    if expired > 0 or is_long and call('ZRANK', log, entry)
      or call('GET', left_key) ~= format('%d', rate - sum) then
      break
    end
    local wanted, more, wait, replenish = sum + permits - rate, 1, first_at, first_at
    if sum > rate then
      more = sum - rate + 1
    end
    if is_long then
      if unpack('<I4', first, 18) < wanted then
        break
      end
    else
      local k = 1
      wait, replenish = nil, nil
      while not wait do
        local taken = unpack('<I4', page[k], 18)
        wanted, more = wanted - taken, more - taken
        replenish = replenish or more <= 0 and page[k + 1]
        wait = wanted <= 0 and page[k + 1]
        k = k + 2
      end
    end
    if keep_alive > 0 then
      local ms = math.max(keep_alive, interval)
      call('PEXPIRE', KEYS[1], ms)
      ms = per_client and interval + 1 or ms
      call('PEXPIRE', left_key, ms)
      call('PEXPIRE', log, ms)
    end
    local shift = interval * 1000 - now_us
    return pack('<ddddddd', DENIED, math.max(wait * 1000 + shift, 1), math.max(rate - sum, 0),
      math.max(replenish * 1000 + shift, 1), newest_at * 1000 + shift, rate, interval)
  end

  local at = now
  if now_us % 1000 > 0 then
    at = now + 1
  end
  if newest_at < at then
    newest = entry
  else
    at = newest_at
    if is_long then
      local a, b = unpack('>I4', entry, 2), unpack('>I4', newest, 2)
      if a == b then
        break
      elseif a > b then
        newest = entry
      end
    end
  end

  if is_long and ends_at < now + interval or call('ZADD', log, 'NX', format('%d', at), entry) == 0
  then
    break
  end
  if expired > 0 then
    call('ZREMRANGEBYRANK', log, '0', format('%d', expired - 1))
  end
  sum = sum - gone + permits
  if is_long then
    local text = pack(NEWEST, IS_USUAL, size - expired + 1, sum, at, newest)
    if expired > 0 then
      text = text .. pack('<' .. OLDEST, first_at, first, ends_at, ahead - expired, head - gone)
    end
    call('SETRANGE', tally_key, '0', text)
  end

  local ms
  if keep_alive > 0 then
    ms = math.max(keep_alive, interval)
    call('PEXPIRE', KEYS[1], ms)
  else
    ms = call('PTTL', KEYS[1])
  end
  if per_client then
    ms = math.min(ms > 0 and ms or CENTURY, interval + 1)
  end
  if ms > 0 then
    ms = format('%d', ms)
    call('SET', left_key, format('%d', rate - sum), 'PX', ms)
    call('PEXPIRE', log, ms)
  else
    local change = permits - gone
    change = change == 1 and '1' or format('%d', change)
    if size == 0 or redis.pcall('DECRBY', left_key, change) ~= rate - sum
      or not is_long and call('PERSIST', log) == 1 then
      call('SET', left_key, format('%d', rate - sum))
    end
  end

  local shift = interval * 1000 - now_us
  local replenish = (first_at or at) * 1000 + shift
  return pack('<ddddddd', DONE, 0, rate - sum, replenish > 0 and replenish or 1, at * 1000 + shift,
    rate, interval)
until true
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
local entry = ARGV[1]
local permits = struct.unpack('<I4', entry, 18)

local function reply(status, wait, remaining, replenish, reset)
  return struct.pack('<ddddddd', status, wait, remaining, replenish, reset, rate, interval)
end

if not read_rate() then
  rate, interval = 0, 0
  return reply(NO_RATE, 0, 0, 0, 0)
end
if per_client and not KEYS[5] then
  return reply(PER_CLIENT, 0, 0, 0, 0)
end
if permits > math.min(rate, MAX_PERMITS) then
  return reply(ABOVE_RATE, 0, 0, 0, 0)
end

local function add(time, entry)
  redis.call('ZADD', log, time, entry)
  local is_last = not newest or time > newest
  size, newest, changed = size + 1, time, true
  if tally.boundary then
    if is_last then
      tally.sum, tally.count, tally.newest = tally.sum + permits, tally.count + 1, entry
    elseif redis.call('ZRANK', log, entry) > redis.call('ZRANK', log, tally.boundary) then
      tally.sum, tally.count = tally.sum + permits, tally.count + 1
      tally.newest = entry_at(-1)
    else
      tally.first = nil
    end
  end
end

local function expires_after(time)
  if time > now + interval and tally.mark then
    time = time <= tally.mark and tally.seen or now
  end
  return (time + interval) * 1000 - now_us
end

local function time_until(wanted)
  local rank, step, last = expired, 1, nil
  while wanted > 0 and rank < size and rank - expired <= MAX_ENTRIES do
    local page = redis.call('ZRANGE', log, rank, rank + step - 1)
    for i = 1, #page do
      wanted, last = wanted - permits_in(page[i]), page[i]
      if wanted <= 0 then
        break
      end
    end
    rank, step = rank + step, step * 4
  end
  return math.max(expires_after(tonumber(redis.call('ZSCORE', log, last))), 1)
end

if inherited then
  set(inherited, as_template(inherited))
end
read_log(true)
local sum = count_permits()
if not sum then
  return reply(AGAIN, 0, 0, 0, 0) .. saved_tally()
end

local taken = tonumber(redis.call('ZSCORE', log, entry))
local repeated = taken and taken > now - interval
local granted = repeated or sum + permits <= rate

sweep()
if granted and not repeated then
  local instant = now_ceil
  if newest and newest <= now + interval then
    instant = math.max(instant, newest)
  end
  add(instant, entry)
  sum = sum + permits
end
if changed or left_text ~= as_text(rate - sum) then
  store(sum, granted and not repeated and permits or 0)
elseif keep_alive > 0 then
  extend()
end

local wait, replenish = 0, 0
if not granted then
  wait = time_until(sum + permits - rate)
end
if not granted and permits == 1 then
  replenish = wait
elseif sum > 0 then
  replenish = time_until(math.max(sum - rate, 0) + 1)
end
local reset = size > expired and expires_after(newest) or 0
return reply(granted and DONE or DENIED, wait, math.max(rate - sum, 0), replenish, reset)
