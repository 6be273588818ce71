-- Engine: decides about one limit with the functions of a model, whose text stands before this one.
-- `found`, `store` and `release` are those of reservations.lua or log.lua, whose text stands
-- between them. Behind this text stands finish.lua, which ends the decision. Takes {key, params,
-- cost, max_wait}; leaves how long the request has to wait, and by how much that is too long.
local wait, excess = 0, 0
if returns then
  local releases = {{nil, cost, 0}} -- units of any request
  if action == 'release' then
    releases = {}
    for position = 1, #items, 24 do
      releases[#releases + 1] = {struct.unpack('<ddd', items, position)}
    end
  end
  if found then
    release(step_back(), releases)
  end
else
  if found then
    stale = step_back()
    advance(now)
    stale = adopt() or stale
  else
    initial()
  end
  local blocked
  wait, blocked = earliest(can_be_denied and cost or -math.huge)
  excess = math.max(wait - max_wait, blocked or 0)
end
