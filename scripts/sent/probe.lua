-- Finds out whether a server decides: changes nothing, and needs all commands.
-- Written by a test: edit the files that it consists of, whose comments are not sent:
-- probe.lua
-- EVALSHA names the text below this line 702d847096ad01f0ff850f356a39f385314430b5
local is_ping = ARGV[1] == 'ping'

local function call(command, ...)
  local reply = redis.pcall(command, ...)
  if type(reply) == 'table' and reply.err then
    local text = string.match(reply.err, '^@user_script: %d+: (.*)$') or reply.err
    if string.find(text, 'user', 1, true) then
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
