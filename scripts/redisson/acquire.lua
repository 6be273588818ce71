-- Takes permits if enough are left.
-- KEYS     all keys, or those of a rate that is not per client: 1, 2, 4 and 6
-- ARGV     the entry to add, template, tally
-- Returns  seven doubles (status, wait, remaining, replenish, reset, rate, interval) and the tally:
--          interval in milliseconds, other times in microseconds
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
  if time > now + interval and tally.mark then -- dropped one interval after it was first seen
    time = time <= tally.mark and tally.seen or now
  end
  return (time + interval) * 1000 - now_us
end

-- Returns the time, in microseconds, until `wanted` permits have expired; or less, if these are in
-- more entries than one call may read.
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
  -- Rounded up, so that it counts for a full interval. No earlier than the newest entry, so that a
  -- host whose clock is ahead does not drop it too early.
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
