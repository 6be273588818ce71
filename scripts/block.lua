-- Block: a key that is blocked has its state between 'B', the end of the block (an integer of 7
-- bytes), and another 'B'. States begin or end with another letter, so that a fast path, which
-- looks at that end, leaves a blocked key to the engine.
-- Stands between a model and reservations.lua or log.lua. These read and write the state by `call`,
-- which is led to the state inside of the block.
local block -- of the key, if it has one: {ends, state, expires, changed}

-- Leads the commands for the key to the state that it holds.
local function redirect(held)
  local own, outer = key, call
  local function put(state, expires)
    held.state, held.expires, held.changed = state, expires, true
  end
  local commands = {
    GETRANGE = function(from, to)
      from, to = tonumber(from), tonumber(to)
      return string.sub(held.state, from < 0 and from or from + 1, to < 0 and to or to + 1)
    end,
    STRLEN = function()
      return #held.state
    end,
    SETRANGE = function(from, bytes)
      local state = held.state
      put(string.sub(state, 1, from) .. bytes .. string.sub(state, from + #bytes + 1), held.expires)
    end,
    SET = function(state, _, expires)
      put(state, expires)
    end,
    PEXPIREAT = function(expires)
      put(held.state, expires)
    end,
    DEL = function()
      put('', nil)
    end,
  }
  function call(command, name, ...)
    if name ~= own then
      return outer(command, name, ...)
    end
    return commands[command](...)
  end
end

-- Opens the block of a key whose value begins or ends with `letter`, or begins one, if the action
-- requires that. Returns true if the state has to be read again.
local function open_block(letter)
  if block or letter ~= 66 and not blocks then
    return false
  end
  local value = call('GETRANGE', key, '0', '-1')
  block = {ends = 0, state = value, changed = blocks}
  if letter == 66 then
    if #value < 9 or string.byte(value) ~= 66 or string.byte(value, -1) ~= 66 then
      fail(key)
    end
    block.ends, block.state = struct.unpack('<I7', value, 2), string.sub(value, 9, -2)
  end
  redirect(block)
  return true
end

local function in_block(state)
  return block and struct.pack('<BI7', 66, block.ends) .. state or state
end

-- Stores the state that `call` was led to, if that has changed.
local function close_block()
  if not (block and block.changed) then
    return
  end
  local is_over, value = block.ends <= now, block.state
  if is_over and value == '' then
    redis.call('DEL', key)
    return
  elseif not is_over then
    value = in_block(value) .. 'B'
  end
  if block.expires or block.state == '' then
    local ends = is_over and 0 or block.ends
    local expires = math.max((block.expires or 0) * 1000, ends)
    redis.call('SET', key, value, 'PXAT', expire_at(expires))
  else
    redis.call('SET', key, value, 'KEEPTTL')
  end
end
