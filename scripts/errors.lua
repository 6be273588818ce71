-- Errors: what a key without a decision gets. A call that the fast path decides makes none of this.
local UNDECIDED = ' cannot be decided about; delete it: ' -- another error of this script

-- Reports a value that cannot be read. `letters` are the bytes where letters of forms stand: if not
-- given, the first byte of the state. An upper-case letter that no form has stands for another
-- version, whose counts must stay. Any other value is damaged, or another program has written it.
local function fail(key, letters)
  if not letters then
    local head = call('GETRANGE', key, '0', '8')
    letters = string.match(head, '^B.......(.)') or string.sub(head, 1, 1)
  end
  if string.find(letters, '[^%UBH' .. forms .. ']') then
    error('VERSION the key ' .. key .. ' cannot be read: its state was written by a newer version '
      .. 'of this crate, or by an older one, and was not changed; finish the deployment, or wait '
      .. 'until an older state expires', 0)
  end
  error('ERR the key ' .. key .. ' holds no state of this limiter: delete it', 0)
end

-- Returns the reply for a key. This error of Lua, or of a command, has ended the decision about it.
-- Redis 6.2 reports the error of a command as text behind a position, with `-` before the code if
-- it has one; the position of an error of Lua has no blank.
local function failure(key, err)
  local text = type(err) == 'table' and err.err or err
  local of_command = string.match(text, '^@user_script: %d+: (.*)$')
  if string.find(text, '^%u+ the key ') then -- as `fail` has written it
    return {err = text}
  elseif string.find(text, 'WRONGTYPE', 1, true) then
    text = 'WRONGTYPE the key ' .. key .. ' holds another type of value: delete it'
  elseif of_command then
    text = string.match(of_command, '^%-(.*)$') or 'ERR ' .. of_command
  elseif not string.find(text, '^%u+ ') then
    text = 'ERR the key ' .. key .. UNDECIDED .. text
  end
  return {err = text}
end
