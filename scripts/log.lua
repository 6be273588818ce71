-- Log: loads and stores the state that is a list, and releases reservations, which are entries of
-- it. Stands between sliding_log.lua and engine.lua, as reservations.lua does for the other models.
local found, stale

local function load()
  forget()
  found, stale = false, false
  local tail = call('LRANGE', key, '-2', '-1')
  if tail[1] then
    local last_element = tail[2] or ''
    if #last_element ~= 36 or string.byte(last_element) ~= 83 then
      fail(key)
    end
    last, last_cost = struct.unpack(ENTRY, tail[1])
    at, skew, window, sum, dead = struct.unpack('<I7I7I7I7I7', last_element, 2)
    found, found_at, found_skew, found_window = true, at, skew, window
  end
end

-- The entries that must leave for this request, and for the next one after it, and the sums up to
-- them, in this order. The newest entry if there is none.
local function marks()
  local remaining = last <= at and math.max(limit - live, 0) or 0
  local _, other, other_total = nil, mark, mark_total
  if committed or asked ~= remaining + 1 then
    _, other, other_total = first_instant(remaining + 1)
  end
  mark, other = mark or found_last, other or found_last
  if other < mark then
    return other, other_total, mark, mark_total
  end
  return mark, mark_total, other, other_total
end

-- The log as it was found, with a few entries that represent all that count: the reply to this
-- request is the same. 'S', then doubles: {at, skew, window}, then for each entry {instant, cost}.
local function condense()
  if not found then
    return ''
  elseif found_live == 0 then
    return struct.pack('<Bddd', 83, found_at, found_skew, found_window)
  end
  local early, early_total, late, late_total = marks()
  if early >= found_last then
    return struct.pack('<Bddddd', 83, found_at, found_skew, found_window, found_last, found_live)
  elseif late >= found_last or late_total <= early_total then
    return struct.pack('<Bddddddd', 83, found_at, found_skew, found_window, early, early_total,
      found_last, found_live - early_total)
  end
  return struct.pack('<Bddddddddd', 83, found_at, found_skew, found_window, early, early_total,
    late, late_total - early_total, found_last, found_live - late_total)
end

-- Stores the state after a decision.
local function store()
  local reset = reset_after()
  if reset == 0 then
    call('DEL', key)
    return
  end
  if not committed then
    call('LSET', key, '-1', summary())
  else
    sum, dead = live, live_dead
    local newest = struct.pack(ENTRY, last, costs[length - 1])
    if length == 1 and not merges then
      if found then -- Redis refuses an RPUSH that is the first write if its memory is full
        call('DEL', key)
      end
      call('RPUSH', key, newest)
    else
      if first > 0 then
        call('LTRIM', key, first, '-1')
      end
      if merges then
        call('LSET', key, '-2', newest)
        call('RPOP', key)
      else
        call('LSET', key, '-1', newest) -- replaces the summary
      end
    end
    call('RPUSH', key, summary())
  end
  call('PEXPIREAT', key, expire_at(now + reset))
end

local release
if returns then
  local function lower(i, units)
    local back = math.min(units, costs[i])
    if back > 0 then
      costs[i], sum = costs[i] - back, sum - back
      dead = dead + (costs[i] == 0 and 1 or 0)
      call('LSET', key, i, struct.pack(ENTRY, instants[i], costs[i]))
    end
    return back
  end

  -- Returns units that were spent at an instant, or are reserved for it, if they are still in the
  -- log.
  local function refund_at(instant, units)
    local i = leading(instant - 1)
    while units > 0 and i < length and instant_of(i) == instant do
      units, i = units - lower(i, units), i + 1
    end
  end

  -- Returns units of any requests, the oldest first: the units that stay are those that count
  -- longest. Requests that wait keep theirs.
  local function refund_any(units)
    scan(0, length - 1, function(i)
      if instants[i] > at then
        return true
      end
      units = units - lower(i, units)
      return units == 0
    end)
  end

  -- Drops the newest entries while they are dead, so that later requests need not come after
  -- them. Drops all dead entries once they are more than 64, and more than half as many as the
  -- others.
  local function drop_dead()
    while length > 0 do
      local _, units = struct.unpack(ENTRY, call('LINDEX', key, -1))
      if units > 0 then
        break
      end
      call('RPOP', key)
      length, dead = length - 1, dead - 1
    end
    if dead <= 64 or dead <= length / 3 then
      return
    end
    local kept = {}
    for _, entry in ipairs(call('LRANGE', key, 0, -1)) do
      local _, units = struct.unpack(ENTRY, entry)
      if units > 0 then
        kept[#kept + 1] = entry
      end
    end
    call('DEL', key)
    for i = 1, #kept, 100 do
      call('RPUSH', key, unpack(kept, i, math.min(i + 99, #kept)))
    end
    length, dead = #kept, 0
  end

  -- Returns units to the log.
  function release(_, releases)
    advance(now)
    if length == 0 then
      call('DEL', key) -- no entry counts any more
      return
    end
    call('RPOP', key)
    call('LTRIM', key, first, '-1')
    length, instants, costs = length - first, {}, {}
    first, sum, dead = 0, live, live_dead
    for _, release in ipairs(releases) do
      if release[1] then
        refund_at(release[1] + skew, release[2])
      else
        refund_any(release[2])
      end
    end
    drop_dead()
    instants, costs, last = {}, {}, 0
    if length > 0 then
      last = instant_of(length - 1)
      call('RPUSH', key, summary())
      call('PEXPIREAT', key, expire_at(now + last + window - at))
    else
      call('DEL', key)
    end
  end
end
