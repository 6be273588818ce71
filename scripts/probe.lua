-- Probe: shows that Redis can decide, as it runs scripts and accepts writes. Nothing is written.
-- KEYS     a key that does not exist
local function call(command, ...)
  local reply = redis.pcall(command, ...)
  if type(reply) == 'table' and reply.err then
    if string.find(reply.err, 'user', 1, true) then -- the error does not name the command
      return redis.error_reply('NOPERM ' .. command .. ' on ' .. KEYS[1] .. ': ' .. reply.err)
    end
    return reply
  end
end

return call('TIME') or call('SET', KEYS[1], '', 'XX', 'PX', '1') or 1
