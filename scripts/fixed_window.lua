-- Fixed window: at most `limit` in a window that opens at its first admitted request.
-- key   {start, ahead, count, length}, doubles: the current window's start, how many windows ahead the
--       newest booked one is, that one's count, the window that this was counted with
-- list  the turns that are booked: see turns.lua
-- ARGV  cost, max_wait, limit, window
local function fixed_window(key, list, arg)
  local cost, max_wait = tonumber(ARGV[arg + 1]), tonumber(ARGV[arg + 2])
  local needed = asks and cost or -math.huge
  local limit, window = tonumber(ARGV[arg + 3]), tonumber(ARGV[arg + 4])

  local start, ahead, count, length, stale = now, 0, 0, window, false

  local function read(state)
    start, ahead, count, length = struct.unpack('<dddd', state)
  end

  local function packed()
    return struct.pack('<dddd', start, ahead, count, length)
  end

  local function commit(instant, units)
    local index = math.floor((instant - start) / length)
    if index > ahead then
      ahead, count = index, 0
    end
    count = count + units
  end

  local function refund(units)
    if turn == 0 or math.floor((turn - start) / length) == ahead then -- else it counts no more
      count = math.max(count - units, 0)
    end
  end

  local function advance()
    local windows = math.floor((now - start) / length)
    start = start + windows * length
    if windows > ahead then
      start, ahead, count = now, 0, 0
    else
      ahead = ahead - windows
    end
  end

  local state = redis.call('GET', key)
  if state then
    read(state)
    if action == 'refund' then
      give_back(list, cost, read, refund, commit, packed)
    end
    if now < start then -- the clock stepped back
      start, stale = now, true
    end
    advance()
    if length ~= window then -- the quota was changed
      length, stale = window, true
      advance()
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
    reset = start + (ahead + 1) * window - now
  end

  if action == 'refund' or commits and (admitted or stale) then
    write(key, list, stale, now + wait, cost, before, packed(), reset)
  end
  return {admitted and 1 or 0, wait, remaining, replenish, reset, now + wait}
end

