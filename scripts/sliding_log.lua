-- Sliding log: at most `limit` in any interval of length `window`, open at its old end.
-- key   a list of entries, oldest first: {time, before}, what was admitted and the sum of all costs before
--       it, modulo 2^48; its last element is {at, skew, window, total} instead
-- ARGV  cost, max_wait, limit, window
-- When the clock steps back, `skew` keeps the times of the log from following it.
local function sliding_log(key, _, arg)
  local cost, max_wait = tonumber(ARGV[arg + 1]), tonumber(ARGV[arg + 2])
  local needed = asks and cost or -math.huge
  local limit, window = tonumber(ARGV[arg + 3]), tonumber(ARGV[arg + 4])
  local clock = now

  local now, skew, stale = clock, 0, false
  local entries, length, last, total = {}, 0, 0, 0
  local tail = redis.call('LRANGE', key, -2, -1)
  if tail[2] then
    local at, old_window
    last = struct.unpack('<I7', tail[1])
    at, skew, old_window, total = struct.unpack('<I7I7I6I6', tail[2])
    now = clock + skew
    if now < at then -- the clock stepped back
      now, skew, stale = at, at - clock, true
    end
    if now < last + old_window then
      length = redis.call('LLEN', key) - 1
      stale = stale or old_window ~= window -- the quota was changed
    else
      now, skew, stale, last, total = clock, 0, false, 0, 0
    end
  end

  local function entry(i)
    if not entries[i] then
      entries[i] = {struct.unpack('<I7I6', redis.call('LINDEX', key, i))}
    end
    return entries[i][1], entries[i][2]
  end

  local function packed(i)
    return struct.pack('<I7I6', entry(i))
  end

  -- The number of leading entries for which `test` holds, by steps that double and then halve.
  local function leading(test)
    local low, high, step = 0, 0, 1
    while high < length and test(entry(high)) do
      low, high, step = high + 1, high + step, step * 2
    end
    high = math.min(high, length)
    while low < high do
      local middle = math.floor((low + high) / 2)
      if test(entry(middle)) then
        low = middle + 1
      else
        high = middle
      end
    end
    return low
  end

  local function sum_from(i)
    if i == length then
      return 0
    end
    local _, before = entry(i)
    return (total - before) % 2 ^ 48
  end

  -- The entries that do not count any more.
  local expired = leading(function(instant)
    return instant <= now - window
  end)

  local function earliest(units)
    local leaving = leading(function(_, before)
      return (total - before) % 2 ^ 48 + units > limit
    end)
    local instant = math.max(now, last)
    if leaving > expired then
      instant = math.max(instant, entry(leaving - 1) + window)
    end
    return instant
  end

  -- The place of what was spent at the instant `turn`, if it still counts.
  local function spent()
    local i = leading(function(instant)
      return instant < turn + skew
    end)
    while i >= expired and i < length and entry(i) == turn + skew do
      local _, before = entry(i)
      local after = total
      if i + 1 < length then
        _, after = entry(i + 1)
      end
      if (after - before) % 2 ^ 48 == cost then
        return i
      end
      i = i + 1
    end
  end

  local wait = earliest(needed) - now
  local admitted, wait = settle(wait, math.max(wait - max_wait, 0))

  local place = action == 'refund' and turn > 0 and spent()
  if place then
    length, total = length - 1, (total - cost) % 2 ^ 48
    for i, behind in ipairs(redis.call('LRANGE', key, place + 1, length)) do
      local instant, before = struct.unpack('<I7I6', behind)
      entries[place + i - 1] = {instant, (before - cost) % 2 ^ 48}
    end
    last = length > 0 and entry(length - 1) or 0
  elseif action == 'refund' and turn == 0 then
    -- The oldest first: what is left then stays for as long as any of it could. Not those that wait.
    local rest = math.max(sum_from(expired) - cost, sum_from(leading(function(instant)
      return instant <= now
    end)))
    local back = leading(function(_, before)
      return (total - before) % 2 ^ 48 > rest
    end)
    if sum_from(back) < rest and back > expired then
      back = back - 1
      entries[back] = {entry(back), (total - rest) % 2 ^ 48}
    end
    expired = math.max(expired, back)
  elseif commits and admitted then
    local units = math.min(cost, 2 ^ 48 - 1 - sum_from(expired)) -- what is spent may be above the quota
    entries[length] = {now + wait, total}
    total, last, length = (total + units) % 2 ^ 48, now + wait, length + 1
  end

  local remaining, replenish, reset = limit, 0, 0
  if length > expired then
    remaining = last <= now and math.max(limit - sum_from(expired), 0) or 0
    replenish = earliest(remaining + 1) - now
    reset = last + window - now
  end

  if reset == 0 then
    if action == 'refund' then
      redis.call('DEL', key)
    end
  elseif action == 'refund' or commits and (admitted or stale) then
    local summary = struct.pack('<I7I7I6I6', now, skew, window, total)
    if place then
      if place > expired then
        redis.call('LTRIM', key, expired, place - 1)
      else
        redis.call('DEL', key)
      end
      local behind = {}
      for i = place, length - 1 do
        behind[#behind + 1] = packed(i)
      end
      behind[#behind + 1] = summary
      for i = 1, #behind, 100 do
        redis.call('RPUSH', key, unpack(behind, i, math.min(i + 99, #behind)))
      end
    elseif action == 'refund' then
      redis.call('LTRIM', key, expired, -1)
      redis.call('LSET', key, 0, packed(expired))
      redis.call('LSET', key, -1, summary)
    elseif not admitted then
      redis.call('LSET', key, -1, summary)
    else
      if length == 1 then
        redis.call('DEL', key)
        redis.call('RPUSH', key, packed(0), summary)
      else
        if expired > 0 then
          redis.call('LTRIM', key, expired, -1)
        end
        redis.call('LSET', key, -1, packed(length - 1))
        redis.call('RPUSH', key, summary)
      end
    end
    redis.call('PEXPIREAT', key, math.ceil((clock + reset) / 1000))
  end
  return {admitted and 1 or 0, wait, remaining, replenish, reset, clock + wait}
end

