-- Block: a key that is blocked has its state between 'B', the end of the block (an integer of 7
-- bytes), and another 'B'. States begin or end with another letter, so that a fast path, which
-- looks at that end, leaves a blocked key to the engine.
-- Stands between a model and reservations.lua or log.lua. These read and write the state by `call`,
-- which is led to the state inside of the block.
-- A request that may not wait until the end of the block is denied without the state.
local block -- of the key, if it has one: {ends, denies, close}

local function in_block(state)
  return struct.pack('<BI7', 66, block.ends) .. state
end

-- Returns the wait of a request that proceeds after the block, and the time until there is room for
-- it to wait.
local function after_block(wait, full)
  local rest = block.ends - now
  return math.max(wait, rest), full > rest and full or 0
end

-- Holds the state of the key in a block, and leads `call` to it.
local function hold(state, ends)
  local held_key, outer, expires, changed = key, call, nil, blocks
  local function put(new, expiry)
    state, expires, changed = new, expiry, true
  end
  local commands = {
    GETRANGE = function(from, to)
      from, to = tonumber(from), tonumber(to)
      return string.sub(state, from < 0 and from or from + 1, to < 0 and to or to + 1)
    end,
    STRLEN = function()
      return #state
    end,
    SETRANGE = function(from, bytes)
      put(string.sub(state, 1, from) .. bytes .. string.sub(state, from + #bytes + 1), expires)
    end,
    SET = function(new, _, expiry)
      put(new, expiry)
    end,
    PEXPIREAT = function(expiry)
      put(state, expiry)
    end,
    DEL = function()
      put('', nil)
    end,
  }
  function call(command, name, ...)
    if name ~= held_key then
      return outer(command, name, ...)
    end
    return commands[command](...)
  end

  block = {ends = ends}

  -- Stores the state, if it has been changed.
  function block.close()
    local is_over = block.ends <= now
    local value = is_over and state or in_block(state) .. 'B'
    if not changed then
      return
    elseif value == '' then
      redis.call('DEL', held_key)
    elseif expires or state == '' then
      local time = math.max((expires or 0) * 1000, is_over and 0 or block.ends)
      redis.call('SET', held_key, value, 'PXAT', expire_at(time))
    else
      redis.call('SET', held_key, value, 'KEEPTTL')
    end
  end
end

-- Opens the block of a key whose value begins or ends with `letter`, or begins one, if the action
-- requires that. Returns true if the state has to be read again.
local function open_block(letter)
  if block and not block.denies or letter ~= 66 and not blocks then
    return false
  end
  local ends = 0
  if letter == 66 then
    local head, last = call('GETRANGE', key, '0', '7'), call('GETRANGE', key, '-1', '-1')
    if #head < 8 or string.byte(head) ~= 66 or last ~= 'B' then
      fail(key)
    end
    ends = struct.unpack('<I7', head, 2)
    if can_be_denied and ends - now > max_wait then
      block = {ends = ends, denies = true}
      return false
    end
  end
  local value = call('GETRANGE', key, '0', '-1')
  hold(letter == 66 and string.sub(value, 9, -2) or value, ends)
  return true
end
