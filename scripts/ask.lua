-- Ask: what is asked about a key, or about several limits at once. This text stands in front of the
-- algorithms, and verdict.lua behind them.
-- KEYS     for each limit: the key of its state, the key of the turns that are booked in it
-- ARGV     action (check, peek, refund, spend), turn, then for each limit: its algorithm, cost,
--          max_wait, the number of its parameters, and these
-- Returns  {admitted, wait, remaining, replenish, reset, turn, binding}
-- Times are in microseconds; all numbers are integers below 2^53.
--
-- An algorithm is a function of its two keys, the cost, what of it must be there (`needed`), max_wait and
-- the place before its parameters in ARGV. It returns how long the request has to wait, how much that is
-- too long, and the function that ends it once all limits are known: of whether the request is admitted,
-- and its wait; it returns remaining, replenish, reset.
local action, turn = ARGV[1], tonumber(ARGV[2])
local commits = action == 'check' or action == 'spend'

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

