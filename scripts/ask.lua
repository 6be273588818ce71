-- Ask: what is asked of a limit, or of several at once. This text stands in front of the others: alone.lua
-- or together.lua, turns.lua, and the algorithms.
-- KEYS     for each limit: the key of its state, the key of the turns that are booked in it
-- ARGV     action (check, peek, refund, spend), turn, then for each limit: cost, max_wait, and the
--          algorithm's parameters; see also together.lua
-- Returns  {admitted, wait, remaining, replenish, reset, turn}
-- Times are in microseconds; all numbers are integers below 2^53.
--
-- An algorithm is a function of its two keys and of the place before its arguments in ARGV. It tells `settle`
-- how long the request has to wait, and how much that is too long, and is told whether the request is
-- admitted, and its wait, or when to retry.
local action, turn = ARGV[1], tonumber(ARGV[2])
local asks = action == 'check' or action == 'peek' -- the others need nothing that is left
local commits = action == 'check' or action == 'spend'

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

