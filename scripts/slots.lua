-- Slots: what is held of a key, by the time at which the holds expire. holding.lua describes the
-- bytes. `slots` are {ends, units, ..}, in the order of their ends. This text stands in held.lua
-- and in holding.lua, in place of SLOTS: few calls need these functions, and each takes time to
-- create.
local add_units, change_slots

-- Reads what is held, from the end of a value. Returns where it begins; then the slots, the epoch,
-- the time of the slots, the skew, and the end of the last slot that another one has joined, if
-- these can be read.
local function read_slots(value)
  local count, mark = string.byte(value, -2, -1)
  local first = math.max(#value - 24 - 14 * (count or 0), 0)
  local letter, counts = string.byte(value, first, first + 1)
  if first == 0 or count == 0 or letter ~= 72 or mark ~= 72 or counts % 16 ~= count then
    return first
  end
  local _, _, epoch, at, skew, position = struct.unpack('<BBI7I7I7', value, first)
  local slots, joined = {nil, nil}, 0
  for i = 1, count do
    local ends, units
    ends, units, position = struct.unpack('<I7I7', value, position)
    if units > 0 then
      slots[#slots + 1], slots[#slots + 2] = ends, units
      joined = i == (counts - count) / 16 and ends or joined
    end
  end
  return first, slots, epoch, at, skew, joined
end

-- Packs what is held, with unused slots if there are fewer than `count`.
local function pack_slots(slots, epoch, at, skew, joined, count)
  local size, last = #slots, 0
  while last < size and slots[last + 1] <= joined do
    last = last + 2
  end
  count = math.max(count or 0, size / 2)
  for i = size + 1, 2 * count do
    slots[i] = 0
  end
  slots[2 * count + 1], slots[2 * count + 2] = count, 72
  local form = count == 1 and '<BBI7I7I7I7I7BB' -- most often
    or '<BBI7I7I7' .. string.rep('I7', 2 * count) .. 'BB'
  local bytes = struct.pack(form, 72, count + 8 * last, epoch, at, skew, unpack(slots))
  for i = #slots, size + 1, -1 do
    slots[i] = nil
  end
  return bytes
end

local function total_of(slots)
  local sum = 0
  for i = 2, #slots, 2 do
    sum = sum + slots[i]
  end
  return math.min(sum, 2 ^ 53)
end

if action == 'hold' or action == 'holds' then
  -- Adds units to the slot of this end. If there are more than nine slots then, the one whose
  -- neighbour ends soonest after it joins that neighbour: so no hold ends too early. Returns the
  -- end of the last slot that another one has joined.
  function add_units(slots, ends, units, joined)
    local i = #slots + 1
    while i > 1 and slots[i - 2] >= ends do
      i = i - 2
    end
    if slots[i] == ends then
      slots[i + 1] = slots[i + 1] + units
      return joined
    end
    table.insert(slots, i, units)
    table.insert(slots, i, ends)
    if #slots <= 18 then
      return joined
    end
    local nearest = 1
    for j = 3, 17, 2 do
      if slots[j + 2] - slots[j] < slots[nearest + 2] - slots[nearest] then
        nearest = j
      end
    end
    table.remove(slots, nearest)
    units = table.remove(slots, nearest)
    slots[nearest + 1] = slots[nearest + 1] + units
    return math.max(joined, slots[nearest])
  end
end

if action == 'holds' then
  -- Ends and renews holds. Returns the results, for each {result, epoch, ends}, doubles; whether
  -- the slots have changed; the units to spend; and what is held then.
  function change_slots(changes, slots, epoch, skew, joined)
    local ENDED, LOST, EXPIRED, RENEWED = 1, 2, 3, 4
    local results, is_changed, spent, time = {}, false, 0, now + skew
    for i, change in ipairs(changes) do
      local of, ends, units, used, lifetime, grid = unpack(change, 1, 6)
      local is_known, result, renewed = slots[1] and of == epoch, EXPIRED, 0
      if is_known and ends > time then
        -- Removes units, from the slot of this end, or the later ones that it may have joined. If
        -- they are not there, the units of other holds stay: after a failover, the state can be
        -- older than the hold, although its epoch is the same.
        local left, last, rest, still = {nil, nil}, math.max(ends, joined), units, 0
        for j = 1, #slots, 2 do
          local taken = slots[j] >= ends and slots[j] <= last and math.min(slots[j + 1], rest) or 0
          rest = rest - taken
          if slots[j + 1] > taken then
            left[#left + 1], left[#left + 2] = slots[j], slots[j + 1] - taken
            still = slots[j] <= joined and slots[j] or still
          end
        end
        slots, joined, is_changed = left, still, true
      end
      if ends <= time then -- its units were spent then
        spent = spent + (lifetime > 0 and 0 or math.max(used - units, 0))
      elseif lifetime > 0 then
        if not slots[1] and not is_known then
          epoch, skew, joined = now, 0, 0
        end
        -- Not for less than is left of it: the holder may not get this reply.
        lifetime = is_known and math.max(lifetime, ends - time) or lifetime
        renewed = math.ceil((now + skew + lifetime) / grid) * grid
        result, is_changed, joined = RENEWED, true, add_units(slots, renewed, units, joined)
      else
        result, spent = is_known and ENDED or LOST, spent + used
      end
      results[i] = struct.pack('<ddd', result, epoch, renewed)
    end
    return table.concat(results), is_changed, spent, slots, epoch, skew, joined
  end
end
