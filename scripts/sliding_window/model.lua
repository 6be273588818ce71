-- Model of the sliding window: the functions of the engine. state.lua stands before this text.

-- The size of a state, which has a count for each of its own buckets.
function size_of(state)
  local letter, own = string.byte(state, 1, 2)
  local head, each = 35, 4
  if letter == WIDE then
    head, each = 37, 7
  end
  return head + each * ((own or 0) + 1)
end

local function zeros(n)
  local all = {}
  for i = 1, n do
    all[i] = 0
  end
  return all
end

local function count(slot)
  return counts[index - slot + 1] or 0
end

local function count_inside(slot)
  local sum = 0
  for i = math.max(index - slot + 1, 1), math.min(index - slot + parts, parts + 1) do
    sum = sum + counts[i]
  end
  return sum
end

-- The instant from which the weight of the oldest sub-window is at most `free`.
local function light(slot, oldest, free)
  local overlap = mul_div(length, free, oldest)
  return start + math.ceil(((slot + 1) * length - overlap) / parts)
end

-- The newest sub-window with a count; none if it has left the window.
local function newest()
  for i = 1, parts + 1 do
    if counts[i] > 0 then
      local slot = index - i + 1
      return slot_of(now) <= slot + parts and slot or nil
    end
  end
end

local function first_instant(needed)
  local instant = math.max(now, last)
  local slot = slot_of(instant)
  local inside = count_inside(slot)
  for _ = 0, parts + 1 do -- after these steps, the newest sub-window has left the window
    local oldest = count(slot - parts)
    local free = limit - needed - inside
    if free >= oldest then
      return instant
    end
    if free >= 0 then
      local light = light(slot, oldest, free)
      if light < opening(slot + 1) then
        return math.max(instant, light)
      end
    end
    slot = slot + 1
    inside = inside - count(slot - parts)
    instant = opening(slot)
  end
  return instant
end

-- Counts each old sub-window where its middle is, or if requests waited in it when the state was
-- `counted`, at its end, and not after `last`. `start` stays, so that two alternating quotas do not
-- move the counts ahead of the time.
local function regrid(counted)
  local moved, newest = zeros(buckets + 1), math.floor((last - start) * buckets / window)
  for slot = index, index - parts, -1 do
    local opened, closes = opening(slot), opening(slot + 1)
    local ends = math.min(closes - 1, last)
    local instant = math.max(opened, math.min(math.floor((opened + closes) / 2), last))
    if ends > counted then
      instant = ends
    end
    local i = newest - math.floor((instant - start) * buckets / window) + 1
    if moved[i] then
      moved[i] = math.min(moved[i] + count(slot), MAX_COUNT)
    end
  end
  index, counts, length, parts = newest, moved, window, buckets
end

local function is_foreign()
  return length ~= window or parts ~= buckets
end

function drain()
  return math.ceil((buckets + 1) * window / buckets)
end

function initial()
  use_form(usual_form)
  at, start, length, last = now, now, window, now
  index, parts, counts = 0, buckets, zeros(buckets + 1)
end

-- `is_head`: whether the state was read as the head of the value, of another size if it was counted
-- with other buckets.
function decode(state, is_head)
  local letter, position, _
  letter, parts = string.byte(state, 1, 2)
  local stays_wide = not is_head and form == WIDE
  use_form(letter)
  if is_head then
    size = STATE_SIZE + COUNT_SIZE * ((parts or 0) + 1)
    if size ~= usual_size then
      state = get('0', size)
    end
  end
  if (letter == NARROW or letter == WIDE) and #state >= size then
    _, parts, length, start, at, last, _, position = struct.unpack(STATE, state)
  end
  if not position or not is_sound() then
    fail(key)
  end
  counts = {struct.unpack('<' .. string.rep(COUNT, parts + 1), state, position)}
  if stays_wide then
    use_form(WIDE)
  end
  counts[parts + 2] = nil -- the position behind them
  index = slot_of(last)
  return state
end

function encode()
  if form == NARROW and math.max(unpack(counts, 1, parts + 1)) > MAX_NARROW then
    use_form(WIDE)
  end
  local head = struct.pack(STATE, form, parts, length, start, at, last, count_inside(index))
  return head .. struct.pack('<' .. string.rep(COUNT, parts + 1), unpack(counts, 1, parts + 1))
end

function step_back()
  local back = at - now
  if back > 0 then
    at, start, last = now, start - back, last - back
  end
  return back > 0
end

function advance(time)
  at = time
end

function adopt()
  local counted = at
  advance(now)
  local changed = is_foreign()
  if changed and newest() then
    regrid(counted)
  end
  if not newest() then
    initial()
  end
  return changed
end

function earliest(needed)
  return first_instant(math.min(needed, limit)) - now
end

function commit(instant, units)
  local slot = slot_of(instant)
  local by = math.min(slot - index, parts + 1)
  for i = parts + 1, 1, -1 do
    counts[i] = i > by and counts[i - by] or 0
  end
  counts[1] = math.min(counts[1] + units, MAX_COUNT) -- units spent may exceed the quota
  local cycles = math.floor(slot / parts) -- `start` moves by whole windows
  start, last, index = start + cycles * length, instant, slot - cycles * parts
end

if returns then
  function refund(instant, units)
    if instant then
      if is_foreign() then
        return -- a changed quota has moved the counts
      end
      local i = index - slot_of(instant) + 1
      if counts[i] then -- an older sub-window does not count any more
        counts[i] = math.max(counts[i] - units, 0)
      end
      return
    end
    -- Requests that wait keep theirs: their sub-windows may have replaced some that count now.
    local ahead = index - slot_of(now)
    for i = math.min(ahead, 0) + parts + 1, math.max(ahead, 0) + 1, -1 do
      local back = math.min(counts[i], units)
      counts[i] = counts[i] - back
      units = units - back
    end
  end
end

function reset_after()
  local newest = newest()
  return newest and opening(newest + parts + 1) - now or 0
end
