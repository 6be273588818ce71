-- Ask: what is asked of a limit, or of several at once. This text stands in front of the others: alone.lua
-- or together.lua, reservations.lua, and the algorithms.
-- KEYS     for each limit: the key of its state
-- ARGV     action (check, peek, refund, spend, release), then for each limit: cost, max_wait, and the algorithm's
--          parameters; see also together.lua. For a release of one limit, last: {instant, units, kept}, doubles,
--          of each request that returns units of what it has spent, and keeps others
-- Returns  {admitted, wait, remaining, replenish, reset, instant}; nothing for a release
-- Times are in microseconds; all numbers are integers below 2^53.
--
-- An algorithm is a function of its key and of the place before its arguments in ARGV. It tells `settle`
-- how long the request has to wait, and how much that is too long, and is told whether the request is
-- admitted, and its wait, or when to retry.
local action = ARGV[1]
local asks = action == 'check' or action == 'peek' -- the others need nothing that is left
local commits = action == 'check' or action == 'spend'

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

-- Another program wrote to the key, or another form of the state.
local function fail(key)
  error('the key ' .. key .. ' holds no state of this limiter: delete it', 0)
end

-- Converts a debt with its excess, in 2^-24 parts, to another rate, as a whole number of parts and what it was
-- rounded up by. So quotas that alternate on one key do not raise the debt with each conversion.
local function convert(debt, excess, unit, new_unit, most_debt)
  local exact = math.min((debt - excess / 2 ^ 24) / unit * new_unit, most_debt)
  debt = math.ceil(exact)
  return debt, math.floor((debt - exact) * 2 ^ 24)
end

