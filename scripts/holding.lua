-- Holding: decides beside what is held, and changes holds. Stands between engine.lua and
-- finish.lua. The twin is src/algorithm/holding.rs.

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

-- Spends the units of the slots that have ended, at their ends. Works on a copy of the value, which
-- is stored only if the request changes the key. Returns false if there are none.
local function expire_holds()
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

-- Whether the clock has stepped back since the last change of the slots, or of the state. Unless
-- that is stored then, their time stands still until the clock has caught up.
local is_behind, has_stepped_back

-- Loads the state, and applies the slots that have ended.
local function open_key()
  load()
  is_behind = held and held.slots[1] and clock + held.skew < held.at
  has_stepped_back = commits and found and step_back()
  stale = has_stepped_back
  local time = clock + (held and held.slots[1] and skew_at() or 0) -- of the slots
  if held and not blocks and expire_holds() then
    load()
  end
  if is_behind and held then
    touch()
  end
  return time
end

-- Loads the state, and computes how long the request has to wait, and by how much that is too long.
local function plan()
  if block and not block.state then
    block = nil -- of a request before this one
  end
  open_key()
  if not first_held then
    local slots = held and #held.slots or 0
    first_held = slots > 0 and packed_holds(slots) or ''
  end
  plan_loaded()
end

-- Returns the state for a reply, with what was held and the block.
local function described(state)
  state = (first_held or '') .. state
  return block and block.ends > now and in_block(state) or state
end

-- Stores what is held, unless that was done together with the state.
local function store_holds()
  if not held or not held.changed then
    return
  end
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
local function change_holds(changes)
  block, first_held, cost, max_wait = nil, nil, 0, 0
  forget()
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
    store_holds()
  end
  if block then
    close_block()
  end
  return table.concat(results)
end

