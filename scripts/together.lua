-- Together: a request is admitted by all of its limits or by none, and goes on when the last of them lets
-- it: what one admits now it admits later, too. The limit that binds is that which denies longest; or has least
-- remaining, and of several such the one that makes the request wait longest.
-- ARGV     for each limit, before its arguments: its algorithm, and how many arguments there are
-- Returns  what the algorithm of the limit that binds does, and its number
local algorithms
local limit, next_arg = 0, 1
local waits, wait, late, binding, verdict = {}, 0, 0, 1

local function decide()
  limit = limit + 1
  local own, arg = limit, next_arg + 2
  next_arg = arg + ARGV[arg]
  local answer = algorithms[ARGV[arg - 1]](KEYS[own], arg)
  local binds = own == binding
  if late == 0 then
    binds = not verdict or answer[3] < verdict[3]
      or answer[3] == verdict[3] and waits[own] >= waits[binding]
  end
  if binds then
    binding, verdict = own, answer
  end
end

local function settle(own_wait, own_late)
  waits[limit] = asks and own_wait or 0
  if asks then
    if own_late > late then
      binding = limit
    end
    wait, late = math.max(wait, own_wait), math.max(late, own_late)
  end
  if limit < #KEYS then -- the others are asked before this one ends
    decide()
  end
  if not asks then -- what is spent for one limit is not to wait for another
    return true, own_wait
  end
  return late == 0, late == 0 and wait or late
end

