-- Finish: ends a decision of the engine, whose text stands before this one.
-- `finish` takes whether the request is admitted, and its wait. It returns the state from which the
-- replies to it, and to requests before it, are computed; for a refund or a block, the state that
-- it has left. A request that is denied stores only that the clock has stepped back.
local finish

-- Stores what is held, unless that was done together with the state.
local function store_holds()
  if held and held.changed then
    store_slots()
  end
end

if returns then
  -- Returns the units of the request or, to release, those of the requests that the items name;
  -- and whether reservations are to be kept if others cannot use what they leave.
  local function releases()
    if action == 'refund' then
      return {{nil, cost}} -- units of any request
    end
    local all, are_for_others = {}, true
    for position = 1, #items, 16 do
      local instant, units = struct.unpack('<dd', items, position)
      all[#all + 1] = {instant, math.abs(units)}
      are_for_others = are_for_others and units < 0
    end
    return all, are_for_others
  end

  -- Returns the state that a refund or a block has left, as a peek sees it.
  local function observe()
    local of_block = blocks
    forget()
    returns, blocks, first_held = false, false, nil
    plan()
    returns, blocks = true, of_block
    return described(found_state())
  end

  -- Sets how long the state in the block counts, which stays as it is.
  local function keep_state()
    if found then
      advance(now)
      block.expires = expiry_now()
    end
    block.expires = held and held_until(block.expires) or block.expires
  end

  function finish()
    local kept
    if blocks then
      keep_state()
      block.ends = action == 'block' and math.max(block.ends, now + struct.unpack('<d', items)) or 0
    elseif found then
      kept = release(step_back(), releases())
      store_holds()
    elseif held and is_behind then
      put('') -- what is held follows the clock
    end
    if block then
      close_block()
    end
    if action == 'release' then
      return kept and ''
    end
    return observe()
  end
else
  function finish(admitted, wait)
    local before
    local holds = lifetime > 0
    if commits and admitted and not holds then
      -- Units that are spent whatever is left are used now: the requests that wait may leave.
      before = wait > 0 and can_be_denied and encode(true)
      commit(now + wait, cost)
    end
    local state = described(found_state())
    if not commits or not admitted and not is_behind and not has_stepped_back then
      return state
    elseif not admitted then
      block, held = nil, nil -- as they were found, without what has expired
      load()
      if is_behind and held then
        touch()
      end
      stale = found and step_back()
    elseif holds then
      make_holding()
      hold(cost, lifetime, grid)
    end
    if stale or admitted and not holds then
      store(before, now + wait)
    end
    store_holds()
    if block then
      close_block()
    end
    return state
  end
end
