-- Finish: ends a decision of the engine, whose text stands before this one.

-- Returns the units of the request or, to release, those of the requests that the items name.
local function releases()
  if action == 'refund' then
    return {{nil, cost, 0}} -- units of any request
  elseif blocks then
    return {}
  end
  local all = {}
  for position = 1, #items, 24 do
    all[#all + 1] = {struct.unpack('<ddd', items, position)}
  end
  return all
end

-- Returns the state that a refund or a block has left.
local function observe()
  forget()
  returns = false
  plan()
  returns = true
  return in_block(found_state())
end

-- Takes whether the request is admitted, and its wait. Returns the state from which the replies to
-- it, and to requests before it, are computed; for a refund or a block, the state that it has left.
local function finish(admitted, wait)
  if returns then
    if found then
      release(step_back(), releases())
    end
    if action == 'block' then
      block.ends = math.max(block.ends, now + max_wait)
    elseif action == 'unblock' then
      block.ends = 0
    end
    close_block()
    return action ~= 'release' and observe()
  end
  local before
  if commits and admitted then
    before = wait > 0 and encode(true)
    commit(now + wait, cost)
  end
  local state = found_state()
  if commits and (admitted or stale) then
    store(before, now + wait)
    close_block()
  end
  return in_block(state)
end
