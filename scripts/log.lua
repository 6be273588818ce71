-- Log: loads and stores the state that is a list, and releases what its entries contain. Stands between
-- sliding_log.lua and engine.lua, as reservations.lua does for the other models.
local function load()
  local tail = redis.call('LRANGE', key, '-2', '-1')
  if not tail[1] then
    return
  end
  local summary = tail[2] or ''
  if #summary ~= 36 or string.byte(summary) ~= 83 then
    fail(key)
  end
  last, last_cost = unpacked(tail[1])
  at, skew, window, sum, dead = struct.unpack('<I7I7I7I7I7', summary, 2)
  return struct.pack('<c1ddd', 'S', at, skew, window)
end

-- The log as it was found, in few entries.
local function report(found)
  if found_live == 0 then
    return found or ''
  end
  local remaining = last <= at and math.max(limit - live, 0) or 0
  first_instant(remaining + 1)
  table.sort(marks, function(a, b)
    return a[1] < b[1]
  end)
  local texts, total = {found}, 0
  for _, mark in ipairs(marks) do
    if mark[1] < found_last and mark[2] > total then
      texts[#texts + 1] = struct.pack('<dd', mark[1], mark[2] - total)
      total = mark[2]
    end
  end
  texts[#texts + 1] = struct.pack('<dd', found_last, found_live - total)
  return table.concat(texts)
end

-- Stores what a decision leaves.
local function store()
  local reset = reset_after()
  if reset == 0 then
    redis.call('DEL', key)
    return
  end
  if not committed then
    redis.call('LSET', key, '-1', summary())
  else
    sum, dead = live, live_dead
    local newest = packed(last, costs[length - 1])
    if length == 1 and not merges then
      redis.call('DEL', key)
      redis.call('RPUSH', key, newest)
    else
      if first > 0 then
        redis.call('LTRIM', key, first, '-1')
      end
      if merges then
        redis.call('LSET', key, '-2', newest)
        redis.call('RPOP', key)
      else
        redis.call('LSET', key, '-1', newest) -- replaces the summary
      end
    end
    redis.call('RPUSH', key, summary())
  end
  redis.call('PEXPIREAT', key, expire_at(now + reset))
end

-- What few calls need.
local function refunds()
  local function lower(i, units)
    local back = math.min(units, costs[i])
    if back > 0 then
      costs[i], sum = costs[i] - back, sum - back
      dead = dead + (costs[i] == 0 and 1 or 0)
      redis.call('LSET', key, i, packed(instants[i], costs[i]))
    end
    return back
  end

  -- Returns units that were spent at an instant, or are reserved for it, if they are still in the log.
  local function refund_at(instant, units)
    local i = leading(instant - 1)
    while units > 0 and i < length and instant_of(i) == instant do
      units, i = units - lower(i, units), i + 1
    end
  end

  -- Returns units of any requests, the oldest first: what is left then stays for as long as any of it could. Not
  -- those of requests that wait.
  local function refund_any(units)
    scan(0, length - 1, function(i)
      if instants[i] > at then
        return true
      end
      units = units - lower(i, units)
      return units == 0
    end)
  end

  -- Drops the newest entries that are dead, so that later requests need not come after them; and all, once they are
  -- more than half as many as the others.
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

  return {at = refund_at, any = refund_any, drop_dead = drop_dead}
end

-- Returns units to the log.
local function release(_, releases)
  advance(now)
  if length == 0 then
    redis.call('DEL', key) -- it is over
    return
  end
  redis.call('RPOP', key)
  redis.call('LTRIM', key, first, '-1')
  length, instants, costs = length - first, {}, {}
  first, sum, dead = 0, live, live_dead
  local refund = refunds()
  for _, release in ipairs(releases) do
    if release[1] then
      refund.at(release[1] + skew, release[2])
    else
      refund.any(release[2])
    end
  end
  refund.drop_dead()
  instants, costs, last = {}, {}, 0
  if length > 0 then
    last = instant_of(length - 1)
    redis.call('RPUSH', key, summary())
    redis.call('PEXPIREAT', key, expire_at(now + last + window - at))
  else
    redis.call('DEL', key)
  end
end

