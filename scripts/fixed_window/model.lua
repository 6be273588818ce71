-- Model of the fixed window: the functions of the engine. state.lua stands before this text.
local start, last, count, length

-- The windows between the current one and the newest one that a request has reserved.
local function ahead()
  return math.max(math.floor((last - start) / length), 0)
end

-- Counts with another length of a window. If requests wait, a window opens when the last of them
-- proceeds, so that they count in it; else the window of the count stays open.
local function set_length()
  if last > now then
    start = last - math.ceil((last - now) / window) * window
  else
    start = start + ahead() * length
    last = start
  end
  length = window
end

function drain()
  return window
end

function initial()
  start, last, count, length = now, now, 0, window
end

function decode(state)
  local form
  if #state >= size then
    form, start, last, count, length = struct.unpack(STATE, state)
  end
  if form ~= 70 or length == 0 then
    fail(key)
  end
  return state
end

function encode()
  return struct.pack(STATE, 70, start, last, count, length)
end

function step_back()
  local back = start - now
  if back > 0 then
    start, last = now, math.max(last - back, 0)
  end
  return back > 0
end

function advance(time)
  local windows = math.floor((time - start) / length)
  if windows > ahead() then
    count = 0
  end
  start = start + windows * length
end

function adopt()
  local changed = length ~= window
  if changed and reset_after() > 0 then
    set_length()
  elseif changed then
    initial()
  end
  advance(now)
  if count == 0 and ahead() == 0 then
    start = now
  end
  return changed
end

function earliest(needed)
  local index = count + needed > limit and ahead() + 1 or ahead()
  return math.max(start + index * length - now, 0)
end

function commit(instant, units)
  if math.floor((instant - start) / length) > ahead() then
    count = 0
  end
  count = math.min(count + units, 2 ^ 53) -- units spent may exceed the quota
  last = math.max(last, instant)
end

if returns then
  function refund(instant, units)
    -- An older window does not count any more.
    if not instant or math.floor((instant - start) / length) == ahead() then
      count = math.max(count - units, 0)
    end
  end
end

function reset_after()
  local ahead = ahead()
  return (ahead > 0 or count > 0) and start + (ahead + 1) * length - now or 0
end
