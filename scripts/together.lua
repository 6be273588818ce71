-- Together: a request is admitted by all of its limits or by none, and goes on when the last of them lets
-- it. The one that binds is that, or the one that denies longest, or the one with least remaining.
-- ARGV     for each limit, before its arguments: its algorithm, and how many arguments there are
-- Returns  what the algorithm of the limit that binds does, and its number
local algorithms
local limit, next_arg = 0, 2
local wait, late, binding, verdict = 0, 0, 1

local function decide()
  limit = limit + 1
  local own, arg = limit, next_arg + 2
  next_arg = arg + ARGV[arg]
  local answer = algorithms[ARGV[arg - 1]](KEYS[2 * own - 1], KEYS[2 * own], arg)
  local waits = math.max(wait, late) > 0
  if waits and own == binding or not waits and (not verdict or answer[3] <= verdict[3]) then
    binding, verdict = own, answer
  end
end

local function settle(own_wait, own_late)
  if asks and (own_late > late or late == 0 and own_wait > wait) then
    binding = limit
  end
  if asks then
    wait, late = math.max(wait, own_wait), math.max(late, own_late)
  end
  if limit < #KEYS / 2 then -- the others are asked before this one ends
    decide()
  end
  if not asks then -- what is spent for one limit is not to wait for another
    return true, own_wait
  end
  return late == 0, late == 0 and wait or late
end

