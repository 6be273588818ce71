-- Fixed window: at most `limit` in a window that opens at its first admitted request.
-- KEYS[1]  {start, ahead, count, window}, doubles: the current window's start, how many windows
--          ahead the newest booked one is, that one's count, the window's length
-- ARGV     action (check, peek, refund), cost, max_wait, limit, window
-- Returns  {admitted, wait, remaining, replenish, reset}
-- Times are in microseconds; all numbers are integers below 2^53.
local action, cost, max_wait = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local limit, window = tonumber(ARGV[4]), tonumber(ARGV[5])

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

local start, ahead, count, stale = now, 0, 0, false

local function advance(length)
  local windows = math.floor((now - start) / length)
  start = start + windows * length
  if windows > ahead then
    start, ahead, count = now, 0, 0
  else
    ahead = ahead - windows
  end
end

local state = redis.call('GET', KEYS[1])
if state then
  local old_window
  start, ahead, count, old_window = struct.unpack('<dddd', state)
  if now < start then -- the clock stepped back
    start, stale = now, true
  end
  advance(old_window)
  if old_window ~= window then -- the quota was changed
    advance(window)
    stale = true
  end
end

local turn = ahead
if count + cost > limit then
  turn = ahead + 1
end
local wait = math.max(start + turn * window - now, 0)
local late = math.max(wait - max_wait, 0)
local admitted = late == 0

if action == 'refund' then
  count = math.max(count - cost, 0)
  if count == 0 and ahead > 0 then -- the window before it was too full for what it held
    ahead, count = ahead - 1, limit
  end
elseif action == 'check' and admitted then
  if turn > ahead then
    ahead, count = turn, 0
  end
  count = count + cost
end

local remaining, replenish, reset = limit, 0, 0
if ahead > 0 or count > 0 then
  remaining = ahead == 0 and math.max(limit - count, 0) or 0
  local opening = (ahead > 0 and count < limit) and ahead or ahead + 1
  replenish = start + opening * window - now
  reset = start + (ahead + 1) * window - now
end

if action == 'refund' or action == 'check' and (admitted or stale) then
  if reset > 0 then
    redis.call('SET', KEYS[1], struct.pack('<dddd', start, ahead, count, window),
      'PXAT', math.ceil((now + reset) / 1000))
  else
    redis.call('DEL', KEYS[1])
  end
end
return {admitted and 1 or 0, admitted and wait or late, remaining, replenish, reset}
