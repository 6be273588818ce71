-- Fast path of concurrency: holds of a key that is not blocked, and whose clock has not stepped
-- back. It decides as the engine does. hold.lua describes the value.

-- Returns what is held: {ends, units, ..}, of the slots that have not ended, the sum of their
-- units, the epoch, the skew, the end of the last slot that another one has joined, and whether a
-- slot has ended; none if the engine must decide.
local function read(found)
  if found == '' then
    return {}, 0, now, 0, 0
  end
  local letter, counts = string.byte(found, 1, 2)
  local count = (counts or 0) % 16
  if letter ~= 72 or #found ~= 25 + 14 * count or string.byte(found, -1) ~= 72 then
    return
  end
  local _, _, epoch, at, skew, position = struct.unpack('<BBI7I7I7', found)
  if now + skew < at then
    return
  end
  local slots, sum, joined, has_ended = {}, 0, 0, false
  for i = 1, count do
    local ends, units
    ends, units, position = struct.unpack('<I7I7', found, position)
    if units > 0 and ends > now + skew then
      slots[#slots + 1] = ends
      slots[#slots + 1] = units
      sum = sum + units
      joined = i == (counts - count) / 16 and ends or joined
    else
      has_ended = has_ended or units > 0
    end
  end
  if sum == 0 then
    return slots, 0, now, 0, 0, has_ended
  end
  return slots, sum, epoch, skew, joined, has_ended
end

local function write(key, found, _, slots, epoch, skew, joined)
  local count, last = #slots / 2, 0
  while last < count and slots[2 * last + 1] <= joined do
    last = last + 1
  end
  local form = '<BBI7I7I7' .. string.rep('I7', #slots) .. 'BB'
  slots[#slots + 1], slots[#slots + 2] = count, 72
  local value = struct.pack(form, 72, count + 16 * last, epoch, now + skew, skew, unpack(slots))
  return replace(key, found, value, slots[2 * count - 1] - skew)
end

local states = read_all()
local function fast(_, i, runs)
  local found = states[i] or ''
  local slots, sum, epoch, skew, joined = read(found)
  local used = slots and use(sum, limit, 1, runs)
  if not used or used == sum then
    return used and found
  end
  local ends = math.ceil((now + skew + lifetime) / grid) * grid
  local last = #slots
  if last > 0 and slots[last - 1] == ends then
    slots[last] = slots[last] + used - sum
  elseif last < 18 and (last == 0 or slots[last - 1] < ends) then
    slots[last + 1], slots[last + 2] = ends, used - sum
  else
    return -- a slot between others
  end
  return found, used, slots, epoch, skew, joined
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

local function add(slots, ends, units)
  local i = 1
  while slots[i] and slots[i] < ends do
    i = i + 2
  end
  if slots[i] == ends then
    slots[i + 1] = slots[i + 1] + units
  else
    table.insert(slots, i, units)
    table.insert(slots, i, ends)
  end
end

-- Does what change_holds does. Returns nothing if the engine must.
function change_fast(i, changes)
  local found, results, is_changed = states[i] or '', {}, false
  local slots, _, epoch, skew, joined, has_ended = read(found)
  if not slots or has_ended then
    return
  end
  local time = now + skew
  for j, change in ipairs(changes) do
    local of, ends, units, _, life, grid = unpack(change, 1, 6)
    local is_known, result, renewed = #slots > 0 and of == epoch, 3, 0
    if ends > time then
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
        add(slots, renewed, units)
        result, is_changed = 4, true
      else
        result = is_known and 1 or 2
      end
    end
    results[j] = struct.pack('<ddd', result, epoch, renewed)
  end
  if #slots > 18 then
    return
  elseif not is_changed then
    return table.concat(results)
  elseif #slots == 0 then
    call('DEL', key)
  elseif not write(key, found, nil, slots, epoch, skew, joined) then
    return
  end
  return table.concat(results)
end
