-- Hold: units that are taken now, and whose use is known later. What is held of a key stands behind
-- its state, and is changed in its place: a log is not rewritten for it. Stands before block.lua.
-- Decisions beside holds are in holding.lua. The twin is src/algorithm/hold.rs.
-- held  'H', then integers of 1, 7, 7 and 7 bytes: {count + 16 * joined, epoch, at, skew}: the
--       number of slots up to the last one that another one has joined; the instant at which the
--       first units were held; and the time of the slots at their last change, which is that of the
--       clock and `skew`. Then `count` slots {ends, units}, of 7 and 7 bytes, in the order of their
--       ends; a slot of no units is unused. Then the count, of a byte, and 'H'
-- `held` is nil for a key without holds; else these, the `slots`, the `length` of the state before
-- them, and whether they are `changed`, and not stored yet.
local held
local HEAD, SLOT, MAX_SLOTS = '<BBI7I7I7', '<I7I7', 9
local HELD_SIZE, SLOT_SIZE = 25, 14
local MOST_SIZE, most_text = 151, '-151' -- with all slots
local get, state_length -- see block.lua
local whole -- see reservations.lua and log.lua
local is_fresh -- whether nothing was stored since the state was loaded
local first_held -- before the first request
local clock = now -- `now` is earlier while expired units are spent
-- A model decides by a `limit` that is smaller by the units that are held. The fast path, outside
-- of this function, decides about other keys by the whole one.
local capacity, limit = limit, limit
-- Functions of the model. A key expires at `expiry`, or without that when its state is over.
local drain, expiry, refund

-- The size of a state, if a model has only one; or the largest one.
local function size_of()
  return size
end

-- Returns whether an empty key admits this cost.
local function fits_beside(units)
  return units <= limit
end

local function held_total()
  local sum = 0
  for _, slot in ipairs(held.slots) do
    sum = sum + slot.units
  end
  return math.min(sum, 2 ^ 53)
end

-- Packs what is held, with unused slots if it was stored with more of them.
local function packed_holds(count)
  local slots = held.slots
  local parts, joined = {}, 0
  for i = 1, count do
    local slot = slots[i]
    joined = slot and slot.ends <= held.joined and i or joined
    parts[i + 1] = struct.pack(SLOT, slot and slot.ends or 0, slot and slot.units or 0)
  end
  parts[1] = struct.pack(HEAD, 72, count + 16 * joined, held.epoch, held.at, held.skew)
  return table.concat(parts) .. struct.pack('<BB', count, 72)
end

-- Reads what is held, from the end of the value. Returns the state, if all of it has been read.
-- `first` is the letter of the state, if that begins with it.
local function open_holds(tail, first)
  local count = string.byte(tail, -2) or 0
  local size = HELD_SIZE + SLOT_SIZE * count
  local position, _, counts, epoch, at, skew = math.max(#tail - size + 1, 0)
  if count < 1 or position == 0 or string.byte(tail, position) ~= 72
    or string.byte(tail, position + 1) % 16 ~= count then
    fail(key, first .. string.sub(tail, position, position))
  end
  _, counts, epoch, at, skew, position = struct.unpack(HEAD, tail, position)
  local slots = {}
  for _ = 1, count do
    local ends, units
    ends, units, position = struct.unpack(SLOT, tail, position)
    if units > 0 then
      slots[#slots + 1] = {ends = ends, units = units}
    end
  end
  local is_all = #tail < MOST_SIZE
  local before = (is_all and #tail or state_length()) - size
  held = {slots = slots, epoch = epoch, at = at, skew = skew, count = count, length = before}
  local last = slots[(counts - count) / 16]
  held.joined = last and last.ends or 0 -- the end of that slot
  return is_all and string.sub(tail, 1, before)
end

-- Converts a range of the state into one of the value that has holds behind it.
local function inside(from, to)
  from, to = tonumber(from), tonumber(to)
  from = from < 0 and math.max(from + held.length, 0) or from
  return from, math.min(to < 0 and to + held.length or to, held.length - 1)
end

local function skew_at()
  return clock + held.skew < held.at and held.at - clock or held.skew
end

-- Follows the clock, before a change.
local function touch()
  held.skew = skew_at()
  held.at, held.changed = clock + held.skew, true
end

-- Adds units to a slot. With more slots than are stored, the one whose neighbour ends soonest after
-- it joins that neighbour: so no hold ends too early.
local function add_slot(ends, units)
  local slots, i = held.slots, 1
  while slots[i] and slots[i].ends < ends do
    i = i + 1
  end
  if slots[i] and slots[i].ends == ends then
    slots[i].units = slots[i].units + units
  else
    table.insert(slots, i, {ends = ends, units = units})
  end
  if #slots > MAX_SLOTS then
    local nearest = 1
    for j = 2, MAX_SLOTS do
      if slots[j + 1].ends - slots[j].ends < slots[nearest + 1].ends - slots[nearest].ends then
        nearest = j
      end
    end
    local joined = table.remove(slots, nearest)
    slots[nearest].units = slots[nearest].units + joined.units
    held.joined = math.max(held.joined, slots[nearest].ends)
  end
end

-- Holds units for a lifetime: of the same epoch, if they were held before. Returns the end of their
-- slot.
local function hold(units, lifetime, grid, is_known)
  if not held then
    local state = whole()
    held = {slots = {}, count = 0, length = state and #state or state_length()}
  end
  if #held.slots == 0 and not is_known then
    held.epoch, held.at, held.skew, held.joined = clock, clock, 0, 0
  end
  touch()
  local ends = math.ceil((held.at + lifetime) / grid) * grid
  add_slot(ends, units)
  return ends
end

-- Removes units, from the slot of this end, or the later ones that it may have joined. If they are
-- not there, the units of other holds stay: after a failover, the state can be older than the hold,
-- although its epoch is the same.
local function take(ends, units)
  touch()
  local left, last, joined = {}, math.max(ends, held.joined), 0
  for _, slot in ipairs(held.slots) do
    if slot.ends >= ends and slot.ends <= last then
      local taken = math.min(slot.units, units)
      slot.units, units = slot.units - taken, units - taken
    end
    if slot.units > 0 then
      left[#left + 1] = slot
      joined = slot.ends <= held.joined and slot.ends or joined
    end
  end
  held.slots, held.joined = left, joined
end

-- The instant at which a key with holds may expire, if its state may at `expires`: when its last
-- slot has ended, and what was held does not count any more.
local function held_until(expires)
  local slots = held.slots
  local last = slots[1] and slots[#slots].ends - skew_at() or 0
  return math.max(expires or clock, last) + drain(held_total())
end

