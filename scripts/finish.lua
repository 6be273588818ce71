-- Finish: ends a decision of the engine, whose text stands before this one.
-- `finish` takes whether the request is admitted, and its wait. It returns the state from which the
-- replies to it, and to requests before it, are computed; for a refund or a block, the state that
-- it has left.
local finish

if returns then
  -- Returns the units of the request or, to release, those of the requests that the items name.
  local function releases()
    if action == 'refund' then
      return {{nil, cost}} -- units of any request
    elseif blocks then
      return {}
    end
    local all = {}
    for position = 1, #items, 16 do
      all[#all + 1] = {struct.unpack('<dd', items, position)}
    end
    return all
  end

  -- Returns the state that a refund or a block has left.
  local function observe()
    forget()
    returns = false
    plan()
    returns = true
    return described(found_state())
  end

  function finish()
    if found then
      release(step_back(), releases())
      store_holds()
    elseif held and (blocks or is_behind) then
      put('') -- what is held stays as long as a block, and follows the clock
    end
    if blocks then
      block.ends = action == 'block' and math.max(block.ends, now + struct.unpack('<d', items)) or 0
    end
    if block then
      close_block()
    end
    return action ~= 'release' and observe()
  end
else
  function finish(admitted, wait)
    local before
    local holds = lifetime > 0
    if commits and admitted and not holds then
      before = wait > 0 and encode(true, cost)
      commit(now + wait, cost)
    end
    local state = described(found_state())
    if holds and admitted then
      hold(cost, lifetime, grid)
    end
    if commits and (stale or admitted and not holds) then
      store(before, now + wait)
    elseif not commits or not admitted and not is_behind then
      return state
    end
    store_holds()
    if block then
      close_block()
    end
    return state
  end
end
