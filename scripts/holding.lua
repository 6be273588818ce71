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
-- SLOTS

  function held_total()
    return total_of(held.slots)
  end

  -- Packs what is held, with unused slots if it was stored with more of them.
  function packed_holds(count)
    return pack_slots(held.slots, held.epoch, held.at, held.skew, held.joined, count)
  end

  -- Reads what is held, from the end of the value. Returns the state, if all of it has been read.
  -- `first` is the letter of the state, if that begins with it.
  function open_holds(tail, first)
    local position, slots, epoch, at, skew, joined = read_slots(tail)
    if not slots then
      fail(key, first .. string.sub(tail, position, position))
    end
    local is_all = #tail < 151
    local length = (is_all and 0 or state_length() - #tail) + position - 1
    held = {slots = slots, epoch = epoch, at = at, skew = skew, joined = joined,
      count = string.byte(tail, -2), length = length}
    return is_all and string.sub(tail, 1, length)
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

  -- Returns what is held, or what a key without holds begins with.
  local function held_or_none()
    local state = not held and whole()
    return held or {slots = {}, epoch = 0, at = 0, skew = 0, joined = 0, count = 0,
      length = state and #state or state_length()}
  end

  -- Holds units for a lifetime: of the same epoch, if they were held before.
  function hold(units, lifetime, grid)
    held = held_or_none()
    if not held.slots[1] then
      held.epoch, held.at, held.skew, held.joined = clock, clock, 0, 0
    end
    touch()
    local ends = math.ceil((held.at + lifetime) / grid) * grid
    held.joined = add_units(held.slots, ends, units, held.joined)
  end

  -- The instant at which a key with holds may expire, if its state may at `expires`: when its last
  -- slot has ended, and what was held does not count any more.
  function held_until(expires)
    local slots = held.slots
    local last = slots[1] and slots[#slots - 1] - skew_at() or 0
    return math.max(expires or clock, last) + drain(held_total())
  end

  -- Spends units at an instant, whatever is left.
  local function spend_at(instant, units)
    local saved = {now, cost, max_wait, can_be_denied, returns}
    now, cost, max_wait, can_be_denied, returns = instant, units, 0, false, false
    load()
    plan_loaded()
    commit(now + wait, cost)
    store()
    now, cost, max_wait, can_be_denied, returns = unpack(saved, 1, 5)
  end

  -- Spends the units of the slots that have ended, at their ends. Works on a copy of the value,
  -- which is stored only if the request changes the key. Returns false if there are none.
  function expire_holds()
    local time = clock + skew_at()
    local function next_end()
      local first = held and held.slots[1]
      return first and first <= time and table.remove(held.slots, 1)
    end
    local ends = next_end()
    if not ends then
      return false
    end
    block = block or {ends = 0, state = call('GETRANGE', key, '0', '-1')}
    touch()
    while ends do
      local units = table.remove(held.slots, 1)
      held.changed, held.joined = true, ends < held.joined and held.joined or 0
      spend_at(ends - held.skew, units)
      ends = next_end()
    end
    if held and held.changed then
      local state = get('0', '-1')
      held.count, held.changed = #held.slots / 2, false
      block.state = state .. (held.slots[1] and packed_holds() or '')
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
    held.count, held.changed = math.max(held.count, #slots / 2), false
    local bytes = packed_holds(held.count)
    expires = held_until(expires)
    if block then
      block.state = string.sub(block.state, 1, held.length) .. bytes
      block.expires, block.changed = expires, true
      return
    end
    call('SETRANGE', key, held.length, bytes)
    call('PEXPIREAT', key, expire_at(expires))
  end

  -- Ends and renews holds of the key. Returns the results; see `change_slots` in slots.lua.
  function change_holds(changes)
    local skew = open_key()
    local changed, results, is_changed, spent = held_or_none(), nil, nil, nil
    results, is_changed, spent, changed.slots, changed.epoch, changed.skew, changed.joined =
      change_slots(changes, changed.slots, changed.epoch, skew, changed.joined)
    if is_changed then
      held = changed
      held.at, held.changed = clock + held.skew, true
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
    return results
  end
end
