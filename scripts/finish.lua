-- Finish: ends a decision of the engine, whose text stands before this one.

-- Returns the units of the request or, to release, those of the requests that the items name.
local function releases()
  if action == 'refund' then
    return {{nil, cost, 0}} -- units of any request
  end
  local all = {}
  for position = 1, #items, 24 do
    all[#all + 1] = {struct.unpack('<ddd', items, position)}
  end
  return all
end

-- Returns the state that a refund has left.
local function observe()
  forget()
  returns = false
  plan()
  returns = true
  return found_state()
end

-- Takes whether the request is admitted, and its wait. Returns the state from which the replies to
-- it, and to requests before it, are computed; for a refund, the state that it has left.
local function finish(admitted, wait)
  if returns then
    if found then
      release(step_back(), releases())
    end
    return action == 'refund' and observe()
  end
  local before
  if commits and admitted then
    before = wait > 0 and encode(true)
    commit(now + wait, cost)
  end
  local state = found_state()
  if commits and (admitted or stale) then
    store(before, now + wait)
  end
  return state
end
