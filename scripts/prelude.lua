-- Prelude: what a call asks for, and the clock. This text stands in front of every script; behind it stands each.lua, or
-- for several limits a function for each algorithm, see algorithm.lua, and combine.lua.
-- KEYS     for each limit: the key of its state
-- ARGV     action (check, peek, spend, refund, release); parameters, of several limits for each; items
--          parameters: the letter of the algorithm, then doubles
--          items: for each key {cost, max_wait}, doubles; to release, of one key, for each request that returns units
--          of what it has spent and keeps others: {instant, units, kept}, doubles
-- Returns  {now}, then for each key the state that was found, from which the reply is computed; none for refund and
--          release
-- Times are in microseconds; all numbers are integers below 2^53.
local action, items = ARGV[1], ARGV[#ARGV]
local can_be_denied = action == 'check' or action == 'peek'
local commits = action == 'check' or action == 'spend'
local returns = action == 'refund' or action == 'release'

local call = redis.call
local time = call('TIME')
local now = time[1] * 1000000 + time[2]

-- Another program wrote to the key, or another form of the state.
local function fail(key)
  error('the key ' .. key .. ' holds no state of this limiter: delete it', 0)
end

-- Converts a debt with its excess, in 2^-24 parts, to another rate, as a whole number of parts and what it was
-- rounded up by. So quotas that alternate on one key do not raise the debt with each conversion.
local function convert(debt, excess, unit, new_unit, max_debt)
  local exact = math.min((debt - excess / 2 ^ 24) / unit * new_unit, max_debt)
  debt = math.ceil(exact)
  return debt, math.floor((debt - exact) * 2 ^ 24)
end

local function expire_at(time)
  return string.format('%.0f', math.ceil(time / 1000)) -- a number is written with more digits, which takes longer
end
