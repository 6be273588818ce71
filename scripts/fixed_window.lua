-- Fixed window: at most `limit` in a window that opens at its first admitted request.
-- KEYS[1]  {start, ahead, count, length}, doubles: the current window's start, how many windows ahead
--          the newest booked one is, that one's count, the window that this was counted with
-- KEYS[2]  the turns that are booked: see turns.lua
-- ARGV     action (check, peek, refund), cost, max_wait, turn, limit, window
-- Returns  {admitted, wait, remaining, replenish, reset, turn}
-- Times are in microseconds; all numbers are integers below 2^53.
local action, cost, max_wait = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local turn, limit, window = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

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

local state = redis.call('GET', KEYS[1])
if state then
  read(state)
  if action == 'refund' then
    give_back(now, turn, cost, read, refund, commit, packed)
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

local index = count + cost > limit and ahead + 1 or ahead
local instant = math.max(start + index * window, now)
local wait = instant - now
local late = math.max(wait - max_wait, 0)
local admitted = late == 0

local before
if action == 'check' and admitted then
  before = wait > 0 and packed()
  commit(instant, cost)
end

local remaining, replenish, reset = limit, 0, 0
if ahead > 0 or count > 0 then
  remaining = ahead == 0 and math.max(limit - count, 0) or 0
  local opening = (ahead > 0 and count < limit) and ahead or ahead + 1
  replenish = start + opening * window - now
  reset = start + (ahead + 1) * window - now
end

if action == 'refund' or action == 'check' and (admitted or stale) then
  write(now, stale, instant, cost, before, packed(), reset)
end
return {admitted and 1 or 0, admitted and wait or late, remaining, replenish, reset, instant}
