-- Model of the fixed window: the functions of the engine. state.lua stands before this text.
local expiry -- none: a key expires at the end of its newest window

local function initial()
  start, ahead, count, length = now, 0, 0, window
end

local function decode(state)
  local form
  if #state >= size then
    form, start, count, length, ahead = struct.unpack(STATE, state)
  end
  if form ~= 70 then
    fail(key)
  end
  return state
end

local function encode()
  return struct.pack(STATE, 70, start, count, length, ahead)
end

local function step_back()
  local back = now < start
  if back then
    start = now
  end
  return back
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

local function adopt()
  local changed = length ~= window
  if changed then
    length = window
    advance(now)
  end
  if ahead == 0 and count == 0 then
    start = now
  end
  return changed
end

local function earliest(needed)
  local index = count + needed > limit and ahead + 1 or ahead
  return math.max(start + index * length - now, 0)
end

local function commit(instant, units)
  local index = math.floor((instant - start) / length)
  if index > ahead then
    ahead, count = index, 0
  end
  count = count + units
end

local refund
if returns then
  function refund(instant, units)
    -- An older window does not count any more.
    if not instant or math.floor((instant - start) / length) == ahead then
      count = math.max(count - units, 0)
    end
  end
end

local function reset_after()
  return (ahead > 0 or count > 0) and start + (ahead + 1) * length - now or 0
end

