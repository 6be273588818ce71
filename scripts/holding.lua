-- Holding: units that are taken now, and whose use is known later. What is held of a key stands
-- behind its state, and is changed in its place: a log is not rewritten for it. The twins are
-- crates/engine/src/algorithm/hold.rs and holding.rs.
-- held  'H', then integers of 1, 7, 7 and 7 bytes: {count + 16 * joined, epoch, at, skew}: the
--       number of slots up to the last one that another one has joined; the instant at which the
--       first units were held; and the time of the slots at their last change, which is that of the
--       clock and `skew`. Then `count` slots {ends, units}, of 7 and 7 bytes, in the order of their
--       ends; a slot of no units is unused. Then the count, of a byte, and 'H'
-- `held` is nil for a key without holds; else these, the `slots`, the `length` of the state before
-- them, and whether they are `changed`, and not stored yet.

-- Makes the functions of this file, which few keys need.
function make_holding()
  if hold then
    return
  end
  local HEAD, SLOT, MAX_SLOTS = '<BBI7I7I7', '<I7I7', 9
  local HELD_SIZE, SLOT_SIZE = 25, 14

  function held_total()
    local sum = 0
    for _, slot in ipairs(held.slots) do
      sum = sum + slot.units
    end
    return math.min(sum, 2 ^ 53)
  end

  -- Packs what is held, with unused slots if it was stored with more of them.
  function packed_holds(count)
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
  function open_holds(tail, first)
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
    local is_all = #tail < 151
    local before = (is_all and #tail or state_length()) - size
    held = {slots = slots, epoch = epoch, at = at, skew = skew, count = count, length = before}
    local last = slots[(counts - count) / 16]
    held.joined = last and last.ends or 0 -- the end of that slot
    return is_all and string.sub(tail, 1, before)
  end

  -- Converts a range of the state into one of the value that has holds behind it.
  function inside(from, to)
    from, to = tonumber(from), tonumber(to)
    from = from < 0 and math.max(from + held.length, 0) or from
    return from, math.min(to < 0 and to + held.length or to, held.length - 1)
  end

  function skew_at()
    return clock + held.skew < held.at and held.at - clock or held.skew
  end

  -- Follows the clock, before a change.
  function touch()
    held.skew = skew_at()
    held.at, held.changed = clock + held.skew, true
  end

  -- Adds units to a slot. With more slots than are stored, the one whose neighbour ends soonest
  -- after it joins that neighbour: so no hold ends too early.
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

  -- Holds units for a lifetime: of the same epoch, if they were held before. Returns the end of
  -- their slot.
  function hold(units, lifetime, grid, is_known)
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

  -- Removes units, from the slot of this end, or the later ones that it may have joined. If they
  -- are not there, the units of other holds stay: after a failover, the state can be older than the
  -- hold, although its epoch is the same.
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
  function held_until(expires)
    local slots = held.slots
    local last = slots[1] and slots[#slots].ends - skew_at() or 0
    return math.max(expires or clock, last) + drain(held_total())
  end

  -- Spends units at an instant, whatever is left.
  local function spend_at(instant, units)
    local saved = {now, cost, max_wait, can_be_denied, returns}
    now, cost, max_wait, can_be_denied, returns = instant, units, 0, false, false
    load()
    plan_loaded()
    local before = wait > 0 and encode(true, cost)
    commit(now + wait, cost)
    store(before, now + wait)
    now, cost, max_wait, can_be_denied, returns = unpack(saved, 1, 5)
  end

  -- Spends the units of the slots that have ended, at their ends. Works on a copy of the value,
  -- which is stored only if the request changes the key. Returns false if there are none.
  function expire_holds()
    local time = clock + skew_at()
    local first = held.slots[1]
    if not first or first.ends > time then
      return false
    end
    block = block or {ends = 0, state = call('GETRANGE', key, '0', '-1')}
    touch()
    while first and first.ends <= time do
      table.remove(held.slots, 1)
      held.changed, held.joined = true, first.ends < held.joined and held.joined or 0
      spend_at(first.ends - held.skew, first.units)
      first = held and held.slots[1]
    end
    if held and held.changed then
      local state = get('0', '-1')
      held.count, held.changed = #held.slots, false
      block.state = state .. (#held.slots > 0 and packed_holds(#held.slots) or '')
    end
    forget()
    return true
  end

  -- Stores what is held, unless that was done together with the state.
  function store_slots()
    local expires, slots, state = expiry_now(), held.slots, whole()
    if state or #slots == 0 and held.length <= 1024 or held.length == 0 then
      put(state or get('0', '-1'), expires)
      return
    end
    local count = math.max(held.count, #slots)
    local bytes = packed_holds(count)
    held.count, held.changed = count, false
    expires = held_until(expires)
    if block then
      block.state = string.sub(block.state, 1, held.length) .. bytes
      block.expires, block.changed = expires, true
      return
    end
    call('SETRANGE', key, held.length, bytes)
    call('PEXPIREAT', key, expire_at(expires))
  end

  local ENDED, LOST, EXPIRED, RENEWED = 1, 2, 3, 4

  -- Changes one hold. Returns the result, its new end if there is one, and the units to spend.
  local function change_hold(time, epoch, ends, units, used, lifetime, grid)
    local has_expired = ends <= time
    local is_known = held and #held.slots > 0 and held.epoch == epoch
    if is_known and not has_expired then
      take(ends, units)
    end
    if has_expired then -- its units were spent then
      return EXPIRED, 0, lifetime > 0 and 0 or math.max(used - units, 0)
    elseif lifetime > 0 then
      -- Not for less than is left of it: the holder may not get this reply.
      lifetime = is_known and math.max(lifetime, ends - time) or lifetime
      return RENEWED, hold(units, lifetime, grid, is_known), 0
    end
    return is_known and ENDED or LOST, 0, used
  end

  -- Ends and renews holds of the key. Returns the results: {result, epoch, ends} of each, doubles.
  function change_holds(changes)
    local time = open_key()
    local results, spent = {}, 0
    for i, change in ipairs(changes) do
      local result, ends, units = change_hold(time, unpack(change, 1, 6))
      results[i] = struct.pack('<ddd', result, held and held.epoch or 0, ends)
      spent = spent + units
    end
    if spent > 0 then
      spend_at(now, spent)
    end
    if held and held.changed then
      load()
      if found then
        advance(now) -- how long the state counts, by the quota that has counted it
      else
        initial()
      end
      store_slots()
    end
    if block then
      close_block()
    end
    return table.concat(results)
  end
end
