-- Releases permits: those of an acquire, by its id and the permits that it has taken; without an
-- id, those of the oldest entries, so that later acquires still count for a full interval.
-- ARGV     permits, id, taken, template (none), tally
-- Returns  {status, permits that are still to be released, tally}
local permits, id, taken = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[3])

if not read_rate() then
  return {NO_RATE, 0, ''}
end

read_log(true)
local sum = count_permits()
if not sum then
  return {AGAIN, permits, saved_tally()}
end
sweep()

-- Removes the permits from an entry. Returns how many entries this drops.
local function shorten(entry, time)
  redis.call('ZREM', log, entry)
  if taken > permits then
    redis.call('ZADD', log, time, entry_of(id, taken - permits))
    return 0
  end
  return 1
end

local function release_by_id()
  local entry = entry_of(id, taken)
  local rank = redis.call('ZRANK', log, entry)
  if not rank or rank < expired then
    return 0
  end
  local time = redis.call('ZSCORE', log, entry)
  local in_tail = tally.boundary and rank > redis.call('ZRANK', log, tally.boundary)
  local low = tally.mark and redis.call('ZRANK', log, tally.low)
  local dropped = shorten(entry, time)
  size, changed = size - dropped, true
  if low and rank >= low and tonumber(time) <= tally.mark then
    tally.low, tally.far = entry_at(low), tally.far - dropped
  elseif not tally.mark then -- the stored tally may be wrong from now on
    redis.call('DEL', tally_key)
  end
  if in_tail then
    tally.sum, tally.count = tally.sum - permits, tally.count - dropped
    tally.newest = entry_at(-1)
  else
    tally = without_sums()
  end
  return permits
end

local function release_oldest()
  local released, dropped, rest, time = 0, 0, nil, nil
  local page = redis.call('ZRANGE', log, expired, expired + math.min(permits, MAX_ENTRIES) - 1,
    'WITHSCORES')
  for i = 1, #page, 2 do
    local count, index = permits_in(page[i])
    if released + count > permits then -- only a part of this entry: the rest is added again
      rest = struct.pack('<I4', released + count - permits)
      rest = string.sub(page[i], 1, index - 1) .. rest .. string.sub(page[i], index + 4)
      time, count = page[i + 1], permits - released
    end
    released, dropped = released + count, dropped + 1
    if released == permits then
      break
    end
  end
  local low = tally.mark and redis.call('ZRANK', log, tally.low)
  if dropped > 0 then
    redis.call('ZREMRANGEBYRANK', log, expired, expired + dropped - 1)
    size, changed = size - dropped, true
  end
  if rest then
    redis.call('ZADD', log, time, rest)
    size = size + 1
  end
  if low and low < expired + dropped then
    tally.low = entry_at(expired)
    tally.far = redis.call('ZCOUNT', log, '-inf', tally.mark) - expired
  end
  return released
end

local released
if id ~= '' then
  released = release_by_id()
else
  released = release_oldest()
end
sum = sum - released
if changed or (left or size > 0) and left_text ~= as_text(rate - sum) then
  store(sum, -released)
end
return {DONE, id == '' and size > expired and permits - released or 0, ''}
