-- Block: a key that is blocked has its state between 'B', the end of the block (an integer of 7
-- bytes), and another 'B'. States begin or end with another letter, so that a fast path, which
-- looks at that end, leaves a blocked key to the engine.
-- The engine reads and stores a state by `get`, `put` and `patch`, wherever the state is: what is
-- held (holding.lua) stands behind it. `block` is nil for a key without one, else {ends}, and
-- {state, expires, changed} if the state counts: a request that may not wait until the end of the
-- block is denied without it, unless it is a peek.

function in_block(state)
  return struct.pack('<BI7', 66, block.ends) .. state
end

-- Returns bytes of the state, by indices as GETRANGE takes them.
function get(from, to)
  if held then
    from, to = inside(from, to)
    if from > to then
      return ''
    end
  end
  if block then
    from, to = tonumber(from), tonumber(to)
    return string.sub(block.state, from < 0 and from or from + 1, to < 0 and to or to + 1)
  end
  return call('GETRANGE', key, from, to)
end

-- Returns the length of the state.
function state_length()
  return held and held.length or block and #block.state or call('STRLEN', key)
end

-- Stores a state, with what is held; if both are empty, deletes the key.
function put(state, expires)
  is_fresh = false
  if held then
    held.length = #state
    if held.slots[1] then
      state, expires = state .. packed_holds(), held_until(expires)
      held.count, held.changed = #held.slots / 2, false
    else
      held = nil
    end
  end
  if block then
    block.state, block.expires, block.changed = state, expires, true
  elseif state == '' then
    call('DEL', key)
  else
    call('SET', key, state, 'PXAT', expire_at(expires))
  end
end

-- Replaces bytes of the state from an index on, and its expiry if there is a new one.
function patch(from, bytes, expires)
  is_fresh = false
  if held then
    from, expires = tonumber(from), expires and held_until(expires)
    if from + #bytes > held.length then -- the state grows
      held.length, held.count = from + #bytes, math.max(held.count, #held.slots / 2)
      bytes, held.changed = bytes .. packed_holds(held.count), false
    end
  end
  if block then
    local state = block.state
    from = tonumber(from)
    local rest = string.sub(state, from + #bytes + 1)
    block.state, block.changed = string.sub(state, 1, from) .. bytes .. rest, true
    block.expires = expires or block.expires
    return
  end
  call('SETRANGE', key, from, bytes)
  if expires then
    call('PEXPIREAT', key, expire_at(expires))
  end
end

-- Opens the block of a key whose value begins or ends with `letter`, or begins one, if the action
-- requires that. Returns true if the state has to be read again.
function open_block(letter)
  if block or letter ~= 66 and not blocks then
    return false
  end
  local ends = 0
  if letter == 66 then
    local head, last = call('GETRANGE', key, '0', '8'), call('GETRANGE', key, '-1', '-1')
    local letters = string.sub(head, 1, 1) .. last
    if #head < 9 or letters ~= 'BB' then
      fail(key, letters)
    end
    ends = struct.unpack('<I7', head, 2)
    if can_be_denied and ends - now > max_wait and action ~= 'peek' then
      block = {ends = ends}
      return false
    end
  end
  local value = call('GETRANGE', key, '0', '-1')
  local state = letter == 66 and string.sub(value, 9, -2) or value
  block = {ends = ends, state = state, changed = blocks}
  return true
end

-- Stores the block with its state, if that has been changed.
local function close_block()
  local ends, state, expires = block.ends, block.state, block.expires
  local is_over = ends <= now
  if not block.changed then
    return
  elseif is_over and state == '' then
    call('DEL', key)
    return
  end
  local value = is_over and state or in_block(state) .. 'B'
  if expires or state == '' then
    call('SET', key, value, 'PXAT', expire_at(math.max(expires or 0, is_over and 0 or ends)))
  else
    call('SET', key, value, 'KEEPTTL')
  end
end
