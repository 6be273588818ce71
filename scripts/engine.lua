-- Engine: decides about one limit with the functions of a model, whose text stands before this one. `load`,
-- `store` and `release` are those of reservations.lua, or of the model itself. The whole is a function of
-- {key, params, cost, max_wait}.
-- Returns  how long the request has to wait, by how much that is too long, and a function that ends the decision:
--          it is told whether the request is admitted, and its wait, and returns the state that was found
local found, stale = load(), false
if returns then
  local releases = {{nil, cost, 0}} -- units of any request
  if action == 'release' then
    releases = {}
    for position = 1, #ARGV[2], 24 do
      releases[#releases + 1] = {struct.unpack('<ddd', ARGV[2], position)}
    end
  end
  if found then
    release(step_back(), releases)
  end
  return
end
if found then
  stale = step_back()
  advance(now)
  stale = adopt() or stale
else
  initial()
end

local wait, blocked = earliest(can_be_denied and cost or -math.huge)
return wait, math.max(wait - max_wait, blocked or 0), function(admitted, wait)
  local before
  if commits and admitted then
    before = wait > 0 and encode and encode()
    commit(now + wait, cost)
  end
  local state = report(found)
  if commits and (admitted or stale) then
    store(found, stale, before, now + wait)
  end
  return state
end
