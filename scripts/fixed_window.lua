-- Fixed window: at most `limit` in a window that opens at its first admitted request.
-- key   'F', then doubles: {start, ahead, count, length}: the current window's start, how many windows ahead the
--       newest reserved one is, that one's count, the window that this was counted with; see also reservations.lua
-- ARGV  cost, max_wait, limit, window
local function fixed_window(key, arg)
  local cost, max_wait = tonumber(ARGV[arg + 1]), tonumber(ARGV[arg + 2])
  local needed = asks and cost or -math.huge
  local limit, window = tonumber(ARGV[arg + 3]), tonumber(ARGV[arg + 4])

  local start, ahead, count, length, stale = now, 0, 0, window, false
  local function read(state)
    local form
    if #state >= 33 then
      form, start, ahead, count, length = struct.unpack('<Bdddd', state)
    end
    if form ~= 70 then
      fail(key)
    end
  end

  local function packed()
    return struct.pack('<Bdddd', 70, start, ahead, count, length)
  end

  local function advance(time)
    local windows = math.floor((time - start) / length)
    start = start + windows * length
    if windows > ahead then
      ahead, count = 0, 0
    else
      ahead = ahead - windows
    end
  end

  local function commit(instant, units)
    local index = math.floor((instant - start) / length)
    if index > ahead then
      ahead, count = index, 0
    end
    count = count + units
  end

  local function model()
    local function refund(instant, units)
      if not instant or math.floor((instant - start) / length) == ahead then -- else it counts no more
        count = math.max(count - units, 0)
      end
    end

    local function reset_after()
      return (ahead > 0 or count > 0) and start + (ahead + 1) * length - now or 0
    end

    return {read = read, packed = packed, advance = advance, commit = commit, refund = refund, reset = reset_after}
  end

  local state = redis.call('GETRANGE', key, '0', '33') -- and whether anything is behind it
  local known = state ~= ''
  if known then
    read(state)
    if now < start then -- the clock stepped back
      start, stale = now, true
    end
  end
  if known and not asks and not commits then
    reservations().give_back(key, 33, stale, cost, model)
  end
  if action == 'release' then
    return {}
  end
  if known then
    advance(now)
    if length ~= window then -- the quota was changed
      length, stale = window, true
      advance(now)
    end
    if ahead == 0 and count == 0 then
      start = now
    end
  end

  local index = count + needed > limit and ahead + 1 or ahead
  local wait = math.max(start + index * window - now, 0)
  local admitted, wait = settle(wait, math.max(wait - max_wait, 0))

  local before
  if commits and admitted then
    before = wait > 0 and packed()
    commit(now + wait, cost)
  end

  local remaining, replenish, reset = limit, 0, 0
  if ahead > 0 or count > 0 then
    remaining = ahead == 0 and math.max(limit - count, 0) or 0
    local opening = (ahead > 0 and count < limit) and ahead or ahead + 1
    replenish = start + opening * window - now
    reset = start + (ahead + 1) * length - now
  end

  if commits and (admitted or stale) then
    if #state > 33 and not before and not stale then
      reservations().write_before(key, packed(), cost, reset, model)
    else
      write(key, packed(), stale, before, now + wait, cost, reset, model)
    end
  end
  return {admitted and 1 or 0, wait, remaining, replenish, reset, now + wait}
end

