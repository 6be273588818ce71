-- Engine: decides about one limit with the functions of a model. Stands before block.lua, the
-- model, reservations.lua or log.lua, holding.lua and finish.lua, which ends the decision: only
-- that writes. Takes {key, params, cost, max_wait, lifetime, grid}; the lifetime is 0 if the
-- request holds no units. What several of these texts use is declared here. The private functions
-- of a model end with its text: each that is made later would search through their variables.
local wait, too_long
-- The functions of a model. A key expires at `expiry`, or without that when its state is over.
-- Without `fits_beside`, an empty key admits the whole quota, and without `size_of`, a state has
-- the `size`.
local initial, encode, step_back, advance, adopt, earliest, commit, reset_after, drain
local decode, expiry, refund, fits_beside, size_of
-- Of reservations.lua or log.lua; `found` is the state, as it is loaded, and `stale` says whether
-- another clock or quota has counted it.
local found, stale
local forget, load, found_state, whole, expiry_now, store, release, reserve_all
-- Of block.lua.
local get, state_length, put, patch, in_block, open_block
local is_fresh -- whether nothing was stored since the state was loaded
-- Of holding.lua.
local held, first_held -- before the first request
local make_holding, open_holds, held_total, packed_holds, inside, skew_at, touch, hold, held_until
local expire_holds, store_slots, change_holds
local clock = now -- `now` is earlier while expired units are spent
-- A model decides by a `limit` that is smaller by the units that are held. The fast path, outside
-- of this function, decides about other keys by the whole one.
local capacity, limit = limit, limit

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
  local fits = not held or not can_be_denied
  if not fits then
    fits = fits_beside and fits_beside(cost) or not fits_beside and cost <= limit
  end
  wait, full = earliest(fits and can_be_denied and cost or -math.huge)
  if block and can_be_denied then
    -- The request proceeds after the block. A queue that is full has room when it has drained.
    local rest = block.ends - now
    wait, full = math.max(wait, rest), full and full > rest and full or 0
  end
  too_long = fits and math.max(wait - max_wait, full or 0) or math.huge -- holds have to end
end

-- Whether the clock has stepped back since the last change of the slots, or of the state. Unless
-- that is stored then, their time stands still until the clock has caught up.
local is_behind, has_stepped_back

-- Loads the state, and applies the slots that have ended. Returns the skew of the slots.
local function open_key()
  load()
  local skew = held and held.slots[1] and skew_at() or 0
  is_behind = held and held.slots[1] and clock + held.skew < held.at
  has_stepped_back = commits and found and step_back()
  stale = has_stepped_back
  if held and not blocks and expire_holds() then
    load()
  end
  if is_behind and held then
    touch()
  end
  return skew
end

-- Loads the state, and computes how long the request has to wait, and by how much that is too long.
local function plan()
  if block and not block.state then
    block = nil -- of a request before this one
  end
  open_key()
  if not first_held then
    first_held = held and held.slots[1] and packed_holds() or ''
  end
  plan_loaded()
end

-- Returns the state for a reply, with what was held and the block.
local function described(state)
  state = (first_held or '') .. state
  return block and block.ends > now and in_block(state) or state
end
