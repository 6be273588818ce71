-- Turns: the requests that wait, so that one that gives up can give its turn back, for the algorithms whose
-- state is a string.
-- list  oldest first: {instant, cost}, doubles, and the state before this turn was booked

local function instant_of(entry)
  return entry and struct.unpack('<d', entry)
end

local function expire_at(list, instant)
  redis.call('PEXPIREAT', list, math.ceil(instant / 1000))
end

local function book(list, instant, cost, before)
  local newest = instant_of(redis.call('LINDEX', list, -1))
  if newest and (newest <= now or newest > instant) then -- nobody waits, or the state was lost
    redis.call('DEL', list)
  end
  for _ = 1, 2 do -- drops more than it adds
    local oldest = instant_of(redis.call('LINDEX', list, 0))
    if oldest and oldest <= now then
      redis.call('LPOP', list)
    end
  end
  redis.call('RPUSH', list, struct.pack('<dd', instant, cost) .. before)
  expire_at(list, instant)
end

-- Gives back the turn at the instant `turn`, or, if that is not waiting, what was spent before the first
-- one that is. The turns behind stay where they are and are counted again.
local function give_back(list, cost, read, refund, commit, packed)
  local kept, length = 0, redis.call('LLEN', list)
  local high = length
  while kept < high do -- those whose turn has come
    local middle = math.floor((kept + high) / 2)
    if instant_of(redis.call('LINDEX', list, middle)) <= now then
      kept = middle + 1
    else
      high = middle
    end
  end
  local turns = kept < length and redis.call('LRANGE', list, kept, -1) or {}
  local place = 0
  for i, entry in ipairs(turns) do
    local instant, units = struct.unpack('<dd', entry)
    if instant == turn and units == cost then
      place = i
    end
    if place > 0 or instant > turn then
      break
    end
  end

  if turns[1] then
    read(string.sub(turns[math.max(place, 1)], 17))
  end
  if place > 0 then
    kept = kept + place - 1
  else
    refund(cost)
  end
  if kept == 0 then
    redis.call('DEL', list)
  elseif kept < length then
    redis.call('LTRIM', list, 0, kept - 1)
  end
  local behind = {}
  for i = place + 1, #turns do
    behind[#behind + 1] = string.sub(turns[i], 1, 16) .. packed()
    commit(struct.unpack('<dd', turns[i]))
  end
  for i = 1, #behind, 100 do
    redis.call('RPUSH', list, unpack(behind, i, math.min(i + 99, #behind)))
  end
  local newest = instant_of(redis.call('LINDEX', list, -1))
  if newest then
    expire_at(list, newest)
  end
end

-- Stores what a check or a refund left; `before` is the state before a turn was booked.
local function write(key, list, stale, instant, cost, before, state, reset)
  if stale then -- turns that were booked by another clock or quota are forgotten
    redis.call('DEL', list)
  end
  if before then
    book(list, instant, cost, before)
  end
  if reset > 0 then
    redis.call('SET', key, state, 'PXAT', math.ceil((now + reset) / 1000))
  else
    redis.call('DEL', key, list)
  end
end

