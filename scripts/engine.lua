-- Engine: decides about one limit with the functions of a model, whose text stands before this one.
-- `found`, `stale`, `load`, `store` and `release` are those of reservations.lua or log.lua, whose
-- text stands between them; hold.lua and block.lua stand before the model. Behind this text stand
-- holding.lua and finish.lua, which ends the decision: only that writes. Takes {key, params, cost,
-- max_wait, lifetime, grid}; the lifetime is 0 if the request holds no units.
local wait, too_long

-- Computes how long the request has to wait, and by how much that is too long, from the state as it
-- is loaded.
local function plan_loaded()
  wait, too_long = 0, 0
  if block and not block.state then
    wait = block.ends - now
    too_long = wait - max_wait
    return
  elseif returns then
    return
  elseif found then
    stale = step_back() or stale
    stale = adopt() or stale
  else
    initial()
  end
  local full
  limit = capacity - (held and held_total() or 0)
  local fits = not held or not can_be_denied or fits_beside(cost)
  wait, full = earliest(fits and can_be_denied and cost or -math.huge)
  if block and can_be_denied then
    -- The request proceeds after the block. A queue that is full has room when it has drained.
    local rest = block.ends - now
    wait, full = math.max(wait, rest), full and full > rest and full or 0
  end
  too_long = fits and math.max(wait - max_wait, full or 0) or math.huge -- holds have to end
end
