-- Sliding log: at most `limit` in any interval of length `window`, open at its old end.
-- key   a list of entries, oldest first: {instant, cost} of what was admitted, integers of seven and four bytes;
--       its last element is 'S', then integers of seven bytes: {at, skew, window, sum, dead}: `sum` of all costs, and
--       how many entries have a cost of 0, as they were released
-- ARGV  cost, max_wait, limit, window
-- When the clock steps back, `skew` keeps the times of the log from following it.
local function sliding_log(key, arg)
  local cost, max_wait = tonumber(ARGV[arg + 1]), tonumber(ARGV[arg + 2])
  local needed = asks and cost or -math.huge
  local limit, window = tonumber(ARGV[arg + 3]), tonumber(ARGV[arg + 4])
  local clock, MAX_SUM, MAX_COST = now, 2 ^ 52, 2 ^ 32 - 1

  local now, skew, stale = clock, 0, false
  local length, last, last_cost, sum, dead = 0, 0, 0, 0, 0
  local instants, costs = {}, {}

  local function unpacked(entry)
    return struct.unpack('<I7I4', entry)
  end

  local function packed(instant, units)
    return struct.pack('<I7I4', instant, units)
  end

  local function summary(by)
    return struct.pack('<c1I7I7I7I7I7', 'S', now, skew, by, sum, dead)
  end

  local function expire(reset)
    redis.call('PEXPIREAT', key, string.format('%.0f', math.ceil((clock + reset) / 1000)))
  end

  local function instant_of(i)
    if not instants[i] then
      instants[i], costs[i] = unpacked(redis.call('LINDEX', key, i))
    end
    return instants[i]
  end

  -- The number of leading entries whose instant is at most `time`, by steps that double and then halve.
  local function leading(time)
    local low, high, step = 0, 0, 1
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

  -- Calls `visit` with the index of each entry from `first` to `last`, forwards or backwards, until it returns
  -- true; reads them in pages that double.
  local function scan(first, last, visit)
    local step, page = first <= last and 1 or -1, 1
    for i = first, last, step do
      if not costs[i] then
        local other = i + step * (page - 1)
        other = step > 0 and math.min(other, last) or math.max(other, last)
        local low = math.min(i, other)
        for j, entry in ipairs(redis.call('LRANGE', key, low, math.max(i, other))) do
          local at = low + j - 1
          if not costs[at] then -- which is not in the list yet
            instants[at], costs[at] = unpacked(entry)
          end
        end
        page = math.min(page * 2, 512)
      end
      if visit(i) then
        return i
      end
    end
  end

  -- The sum of the costs from `first` on, and how many of these are dead, added up from the nearer end.
  local function count_from(first)
    local units, zeros = 0, 0
    local function add(i)
      units = units + costs[i]
      zeros = zeros + (costs[i] == 0 and 1 or 0)
    end
    if first == 0 then
      return sum, dead
    elseif first <= length / 2 then
      scan(0, first - 1, add)
      return sum - units, dead - zeros
    elseif first < length then
      scan(length - 1, first, add)
    end
    return units, zeros
  end

  -- The instant of the entry with which `units` of the `live` ones from `first` on have left, found from the nearer
  -- end.
  local function leaving(first, live, units)
    local total, found = 0
    if units <= live / 2 then
      found = scan(first, length - 1, function(i)
        total = total + costs[i]
        return total >= units
      end)
    else
      found = scan(length - 1, first, function(i)
        total = total + costs[i]
        return total > live - units
      end)
    end
    return found and instants[found] or last
  end

  -- The first instant at which a request of `units` conforms, behind `live` ones from `first` on.
  local function earliest(first, live, units)
    local excess, instant = live + units - limit, math.max(now, last)
    if excess > 0 and first < length then
      instant = math.max(instant, leaving(first, live, excess) + window)
    end
    return instant
  end

  local tail = redis.call('LRANGE', key, '-2', '-1')
  local old_window, at = window, 0
  if tail[1] then
    local text = tail[2] or ''
    if #text ~= 36 or string.byte(text) ~= 83 then
      fail(key)
    end
    last, last_cost = unpacked(tail[1])
    at, skew, old_window, sum, dead = struct.unpack('<I7I7I7I7I7', text, 2)
    now = clock + skew
    if now < at then -- the clock stepped back
      now, skew, stale = at, at - clock, true
    end
    if now < last + old_window then
      length = redis.call('LLEN', key) - 1
    else
      now, skew, stale, last, sum, dead = clock, 0, false, 0, 0, 0
    end
  end

  local function release()
    local function lower(i, units)
      local back = math.min(units, costs[i])
      if back > 0 then
        costs[i], sum = costs[i] - back, sum - back
        dead = dead + (costs[i] == 0 and 1 or 0)
        redis.call('LSET', key, i, packed(instants[i], costs[i]))
      end
      return back
    end

    -- Returns what was spent at an instant, or is reserved for it, if that is still in the log; or without an
    -- instant units of any requests, the oldest first: what is left then stays for as long as any of it could. Not
    -- those of requests that wait.
    local function give_back(instant, units)
      if instant then
        local i = leading(instant + skew - 1)
        while units > 0 and i < length and instant_of(i) == instant + skew do
          units, i = units - lower(i, units), i + 1
        end
        return
      end
      scan(0, length - 1, function(i)
        if instants[i] > now then
          return true
        end
        units = units - lower(i, units)
        return units == 0
      end)
    end

    -- Drops the newest entries that are dead, so that later requests need not come after them; and all, once they
    -- are more than half as many as the others.
    local function drop_dead()
      while length > 0 do
        local _, units = unpacked(redis.call('LINDEX', key, -1))
        if units > 0 then
          break
        end
        redis.call('RPOP', key)
        length, dead = length - 1, dead - 1
      end
      if dead <= 64 or dead <= length / 3 then
        return
      end
      local kept = {}
      for _, entry in ipairs(redis.call('LRANGE', key, 0, -1)) do
        local _, units = unpacked(entry)
        if units > 0 then
          kept[#kept + 1] = entry
        end
      end
      redis.call('DEL', key)
      for i = 1, #kept, 100 do
        redis.call('RPUSH', key, unpack(kept, i, math.min(i + 99, #kept)))
      end
      length, dead = #kept, 0
    end

    local expired = leading(now - old_window)
    sum, dead = count_from(expired)
    redis.call('RPOP', key)
    redis.call('LTRIM', key, expired, '-1')
    length, instants, costs = length - expired, {}, {}
    for _, release in ipairs(reservations().releases(cost)) do
      give_back(release[1], release[2])
    end
    drop_dead()
    instants, costs, last = {}, {}, 0
    if length > 0 then
      last = instant_of(length - 1)
      redis.call('RPUSH', key, summary(old_window))
      expire(last + old_window - now)
    else
      redis.call('DEL', key)
    end
  end

  if not asks and not commits then
    if length > 0 then
      release()
    else
      redis.call('DEL', key) -- it is over
    end
  end
  if action == 'release' then
    return {}
  end
  stale = length > 0 and (stale or old_window ~= window) -- or the quota was changed

  -- The entries that do not count any more.
  local expired = leading(now - window)
  local live, live_dead = count_from(expired)
  local wait = earliest(expired, live, needed) - now
  local admitted, wait = settle(wait, math.max(wait - max_wait, 0))

  local merges = false
  if commits and admitted then
    local units = math.min(cost, MAX_SUM - live) -- what is spent may be above the quota
    merges = length > 0 and last == now + wait and last_cost + units <= MAX_COST
    if merges then
      instants[length - 1], costs[length - 1] = last, last_cost + units
    else
      instants[length], costs[length] = now + wait, units
      last, length = now + wait, length + 1
    end
    live = live + units
  end

  local remaining, replenish, reset = limit, 0, 0
  if length > expired then
    remaining = last <= now and math.max(limit - live, 0) or 0
    replenish = earliest(expired, live, remaining + 1) - now
    reset = last + window - now
  end

  if commits and admitted then
    sum, dead = live, live_dead
    local newest = packed(last, costs[length - 1])
    if length == 1 and not merges then
      redis.call('DEL', key)
      redis.call('RPUSH', key, newest)
    else
      if expired > 0 then
        redis.call('LTRIM', key, expired, '-1')
      end
      if merges then
        redis.call('LSET', key, '-2', newest)
        redis.call('RPOP', key)
      else
        redis.call('LSET', key, '-1', newest) -- replaces the summary
      end
    end
    redis.call('RPUSH', key, summary(window))
    expire(reset)
  elseif commits and stale then
    redis.call('LSET', key, '-1', summary(window))
    expire(reset)
  end
  return {admitted and 1 or 0, wait, remaining, replenish, reset, clock + wait}
end

