-- Finish: ends a decision of the engine, whose text stands before this one. Takes whether the
-- request is `admitted`, and its `wait`; leaves the state that was found.
if not returns then
  local before
  if commits and admitted then
    before = wait > 0 and encode and encode(true)
    commit(now + wait, cost)
  end
  state = condense and condense() or found or ''
  if commits and (admitted or stale) then
    store(before, now + wait)
  end
elseif found then
  local releases = {{nil, cost, 0}} -- units of any request
  if action == 'release' then
    releases = {}
    for position = 1, #items, 24 do
      releases[#releases + 1] = {struct.unpack('<ddd', items, position)}
    end
  end
  release(step_back(), releases)
end
