-- Probe: shows that Redis can decide, as it runs scripts and accepts writes. Nothing is written.
-- KEYS     a key that does not exist
-- ARGV     'all' to use every command of a decision; 'ping' to do so, and to name the key in errors
local is_ping = ARGV[1] == 'ping'

local function call(command, ...)
  local reply = redis.pcall(command, ...)
  if type(reply) == 'table' and reply.err then
    -- Redis 6.2 puts a position before the error.
    local text = string.match(reply.err, '^@user_script: %d+: (.*)$') or reply.err
    if string.find(text, 'user', 1, true) then -- the error does not name the command
      local key = is_ping and ' on ' .. KEYS[1] or ''
      return redis.error_reply('NOPERM ' .. command .. key .. ': ' .. text)
    end
    return reply
  end
end

local function call_others(key)
  return call('MGET', key) or call('GETRANGE', key, '0', '-1') or call('STRLEN', key)
    or call('SETRANGE', key, '0', '') or call('PEXPIREAT', key, '1') or call('DEL', key)
end

return call('TIME') or call('SET', KEYS[1], '', 'XX', 'PX', '1')
  or ARGV[1] and call_others(KEYS[1]) or 1
