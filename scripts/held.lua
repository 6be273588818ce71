-- Held: the fast path of holds, and of checks beside holds: slots that the clock has not passed, by
-- a clock that has not stepped back. holding.lua describes the bytes. `slots` are {ends, units,
-- ..}.
-- `fast` and `write` are those of fast.lua; the value is always read.
-- change  takes the key, its value, and ends and renewals of holds, and changes them. Returns the
--         results, nothing if the engine must change them; and what `write` returns.

-- Returns the state that stands before what is held, the slots, the sum of their units, the epoch,
-- the time of the slots, the skew, the end of the last slot that another one has joined, and
-- whether a slot has ended; none if the engine must decide.
local function open_held(value)
  if value == '' then
    return '', {}, 0, 0, 0, 0, 0
  end
  local count, mark = string.byte(value, -2, -1)
  local first = #value - 24 - 14 * (count or 0)
  local letter, counts = string.byte(value, math.max(first, 1), first + 1)
  if first < 1 or letter ~= 72 or mark ~= 72 or counts % 16 ~= count then
    return
  end
  local _, _, epoch, at, skew, position = struct.unpack('<BBI7I7I7', value, first)
  if now + skew < at then
    return
  end
  local slots, sum, joined, has_ended = {}, 0, 0, false
  for i = 1, count do
    local ends, units
    ends, units, position = struct.unpack('<I7I7', value, position)
    if units > 0 and ends > now + skew then
      if sum == 0 then
        slots = {ends, units}
      else
        slots[#slots + 1], slots[#slots + 2] = ends, units
      end
      sum = sum + units
      joined = i == (counts - count) / 16 and ends or joined
    else
      has_ended = has_ended or units > 0
    end
  end
  return string.sub(value, 1, first - 1), slots, sum, epoch, at, skew, joined, has_ended
end

-- Returns the value with these slots behind its state.
local function with_held(state, slots, epoch, at, skew, joined)
  local count, last = #slots / 2, 0
  if count == 1 then
    local ends, units = slots[1], slots[2]
    last = ends <= joined and 1 or 0
    return state .. struct.pack('<BBI7I7I7I7I7BB', 72, 1 + 16 * last, epoch, at, skew, ends, units,
      1, 72)
  end
  while last < count and slots[2 * last + 1] <= joined do
    last = last + 1
  end
  local form = '<BBI7I7I7' .. string.rep('I7', #slots) .. 'BB'
  slots[#slots + 1], slots[#slots + 2] = count, 72
  return state .. struct.pack(form, 72, count + 16 * last, epoch, at, skew, unpack(slots))
end

-- Adds units to the slot of this end. Returns false if there are too many slots then.
local function add(slots, ends, units)
  local i, last = 1, #slots
  if last == 0 or slots[last - 1] < ends then
    slots[last + 1], slots[last + 2] = ends, units
    return last < 18
  end
  while slots[i] and slots[i] < ends do
    i = i + 2
  end
  if slots[i] == ends then
    slots[i + 1] = slots[i + 1] + units
  else
    table.insert(slots, i, units)
    table.insert(slots, i, ends)
  end
  return #slots <= 18
end

-- Removes units, from the slot of this end, or those that it may have joined. Returns the slots
-- that are left, and the end of the last one of them that another one has joined.
local function take(slots, ends, units, joined)
  local left, last, still = {}, math.max(ends, joined), 0
  for i = 1, #slots, 2 do
    local of_slot = slots[i + 1]
    if slots[i] >= ends and slots[i] <= last then
      local taken = math.min(of_slot, units)
      of_slot, units = of_slot - taken, units - taken
    end
    if of_slot > 0 then
      left[#left + 1], left[#left + 2] = slots[i], of_slot
      still = slots[i] <= joined and slots[i] or still
    end
  end
  return left, still
end

-- Does what change_holds does, but stores nothing. Returns the results, whether the slots have
-- changed, the units to spend, and what is held; none if the engine must.
local function change_slots(changes, slots, epoch, skew, joined)
  local results, is_changed, spent, time = {}, false, 0, now + skew
  for j, change in ipairs(changes) do
    local of, ends, units, used, life, grid = unpack(change, 1, 6)
    local is_known, result, renewed, over = #slots > 0 and of == epoch, 3, 0, 0
    if ends <= time then
      over = life > 0 and 0 or math.max(used - units, 0)
    else
      if is_known then
        slots, joined = take(slots, ends, units, joined)
        is_changed = true
      end
      if life > 0 then
        if #slots == 0 and not is_known then
          epoch, skew, joined = now, 0, 0
        end
        life = is_known and math.max(life, ends - time) or life
        renewed = math.ceil((now + skew + life) / grid) * grid
        result, is_changed = 4, true
        if not add(slots, renewed, units) then
          return
        end
      else
        result, over = is_known and 1 or 2, used
      end
    end
    spent = spent + over
    results[j] = struct.pack('<ddd', result, epoch, renewed)
  end
  return table.concat(results), is_changed, spent, slots, epoch, skew, joined
end
