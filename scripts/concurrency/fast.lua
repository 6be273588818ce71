-- Fast path of concurrency: holds of a key that is not blocked, and whose clock has not stepped
-- back. It decides as the engine does. hold.lua describes the value.

-- Returns what is held: {ends, units, ..}, of the slots that have not ended, the sum of their
-- units, the epoch and the skew; none if the engine must decide.
local function read(found)
  if found == '' then
    return {}, 0, now, 0
  end
  local letter, count = string.byte(found, 1, 2)
  if letter ~= 72 or #found ~= 25 + 14 * count then
    return
  end
  local _, _, epoch, at, skew, position = struct.unpack('<BBI7I7I7', found)
  if now + skew < at then
    return
  end
  local slots, sum = {}, 0
  for _ = 1, count do
    local ends, units
    ends, units, position = struct.unpack('<I7I7', found, position)
    if units > 0 and ends > now + skew then
      slots[#slots + 1] = ends
      slots[#slots + 1] = units
      sum = sum + units
    end
  end
  if sum == 0 then
    return slots, 0, now, 0
  end
  return slots, sum, epoch, skew
end

local function write(key, found, _, slots, epoch, skew)
  local count = #slots / 2
  local form = '<BBI7I7I7' .. string.rep('I7', #slots) .. 'BB'
  slots[#slots + 1], slots[#slots + 2] = count, 72
  local value = struct.pack(form, 72, count, epoch, now + skew, skew, unpack(slots))
  return replace(key, found, value, slots[2 * count - 1] - skew)
end

local states = read_all()
local function fast(_, i, runs)
  local found = states[i] or ''
  local slots, sum, epoch, skew = read(found)
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
  return found, used, slots, epoch, skew
end
