-- Prelude: the arguments of a call, and the clock. This text stands in front of every script.
-- Behind it stands each.lua or, for several limits, a function for each algorithm (see
-- algorithm.lua) and combine.lua.
-- KEYS     for each limit: the key of its state
-- ARGV     action (check, hold, peek, spend, refund, release, block, unblock, holds); parameters,
--          for several limits those of each; items
--          parameters: the letter of the algorithm, then doubles
--          items: see each.lua; for several limits, for each key {cost, max_wait}, doubles; to
--          release, for each request of the one key {instant, units}, doubles, with negative units
--          to release them only for others (see reservations.lua); to block, for how long, a
--          double; to hold for several limits, for each {cost, max_wait, lifetime, grid}, with a
--          lifetime of 0 to spend; to end and renew holds, see each.lua
-- Returns  {now}, then for each key the state that was found, from which the reply is computed; for
--          a refund or a block the state that it has left; to release none, and '' if the
--          reservations are kept. If a request is denied, {state, verdict}: how many of each run
--          are admitted, integers of two bytes; for several limits, the index of one that denies
--          stands behind the states. See each.lua for an error in place of a state
-- Times are in microseconds; all numbers are integers below 2^53.
local action, items = ARGV[1], ARGV[#ARGV]
local can_be_denied = action == 'check' or action == 'peek' or action == 'hold'
local commits = action == 'check' or action == 'spend' or action == 'hold'
local blocks = action == 'block' or action == 'unblock'
local returns = action == 'refund' or action == 'release' or blocks -- a block returns nothing

local call, try = redis.call, redis.pcall
local unpack = table.unpack or unpack -- in Lua 5.4, or 5.1
local time = call('TIME')
local now = time[1] * 1000000 + time[2]

local forms -- the letters of the states of an algorithm; see state.lua
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
