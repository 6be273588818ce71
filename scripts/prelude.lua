-- Prelude: the arguments of a call, and the clock. This text stands in front of every script.
-- Behind it stands each.lua or, for several limits, a function for each algorithm (see
-- algorithm.lua) and combine.lua.
-- KEYS     for each limit: the key of its state
-- ARGV     action (check, hold, peek, spend, refund, release, block, unblock, holds); parameters,
--          for several limits those of each; items
--          parameters: the letter of the algorithm, then doubles
--          items: see each.lua; for several limits, for each key {cost, max_wait}, doubles; to
--          release, for each request of the one key {instant, units}, doubles; to block, for how
--          long, a double; to hold for several limits, for each {cost, max_wait, lifetime, grid},
--          with a lifetime of 0 to spend; to end and renew holds, see each.lua
-- Returns  {now}, then for each key the state that was found, from which the reply is computed; for
--          a refund or a block the state that it has left, and none to release; see each.lua for
--          an error in place of a state
-- Times are in microseconds; all numbers are integers below 2^53.
local action, items = ARGV[1], ARGV[#ARGV]
local can_be_denied = action == 'check' or action == 'peek' or action == 'hold'
local commits = action == 'check' or action == 'spend' or action == 'hold'
local blocks = action == 'block' or action == 'unblock'
local returns = action == 'refund' or action == 'release' or blocks -- a block returns nothing

local fast_action = 'check' -- of the fast paths; see state.lua
local call = redis.call
local unpack = table.unpack or unpack -- in Lua 5.4, or 5.1
local time = call('TIME')
local now = time[1] * 1000000 + time[2]

local forms -- the letters of the states of an algorithm; see state.lua
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

-- Rounds an expiry up to a multiple of a power of two, so that a key needs a new one less often.
local function round_up(time, grain)
  return math.ceil(time / grain) * grain
end

local function expire_at(time)
  if not (time > 0 and time < 2 ^ 63) then -- the server would reject it, and name no key
    error('it expires at ' .. time, 0)
  end
  -- A number would be written with more digits, which takes longer.
  return string.format('%.0f', math.ceil(time / 1000))
end
