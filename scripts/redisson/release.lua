-- Gives permits back: of an acquire, by its id and the permits that it has taken, or without an id the oldest, so
-- that what was taken later stays for as long as any of it could.
-- ARGV     permits, id, taken, template (none), tally
-- Returns  {status, permits that are still to be given back, tally}
local permits, id, taken = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[3])

if not open() then
  return {NO_RATE, 0, ''}
end

look(true)
local sum = count()
if not sum then
  return {AGAIN, permits, stored_tally()}
end
sweep()

local function give_back()
  local entry = entry_of(id, taken)
  local rank = redis.call('ZRANK', log, entry)
  if not rank or rank < expired then
    return 0
  end
  local time = redis.call('ZSCORE', log, entry)
  local inside = tally.boundary and rank > redis.call('ZRANK', log, tally.boundary)
  local low = tally.mark and redis.call('ZRANK', log, tally.low)
  local far = low and rank >= low and tonumber(time) <= tally.mark
  local gone = taken > permits and 0 or 1
  redis.call('ZREM', log, entry)
  if gone == 0 then
    redis.call('ZADD', log, time, entry_of(id, taken - permits))
  end
  size, changed = size - gone, true
  if far then
    tally.low, tally.far = at(low), tally.far - gone
  elseif not tally.mark then -- what it counts may be wrong now, if it knows of clocks
    redis.call('DEL', tally_key)
  end
  if inside then
    tally.sum, tally.count = tally.sum - permits, tally.count - gone
    tally.newest = at(-1)
  else
    tally = clocks()
  end
  return permits
end

local function give_back_oldest()
  local back, gone, rest, time = 0, 0
  local page = redis.call('ZRANGE', log, expired, expired + math.min(permits, MOST) - 1, 'WITHSCORES')
  for i = 1, #page, 2 do
    local some, at = permits_in(page[i])
    if back + some > permits then
      rest = struct.pack('<I4', back + some - permits)
      rest = string.sub(page[i], 1, at - 1) .. rest .. string.sub(page[i], at + 4)
      time, some = page[i + 1], permits - back
    end
    back, gone = back + some, gone + 1
    if back == permits then
      break
    end
  end
  local low = tally.mark and redis.call('ZRANK', log, tally.low)
  if gone > 0 then
    redis.call('ZREMRANGEBYRANK', log, expired, expired + gone - 1)
    size, changed = size - gone, true
  end
  if rest then
    redis.call('ZADD', log, time, rest)
    size = size + 1
  end
  if low and low < expired + gone then
    tally.low = at(expired)
    tally.far = redis.call('ZCOUNT', log, '-inf', tally.mark) - expired
  end
  return back
end

local back
if id ~= '' then
  back = give_back()
else
  back = give_back_oldest()
end
sum = sum - back
if changed or (left or size > 0) and left_text ~= as_text(rate - sum) then
  store(sum, -back)
end
return {DONE, id == '' and size > expired and permits - back or 0, ''}
