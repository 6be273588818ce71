-- Model of the leaky bucket: the functions of the engine that bucket.lua does not have. That and
-- state.lua stand before this text.

local function size_of(state)
  return string.byte(state) == 77 and BEYOND_SIZE or 36
end

-- `is_head`: whether the state was read as the head of the value.
local function decode(state, is_head)
  local letter, other, _ = string.byte(state), 0
  if is_head then
    size, form = size_of(state), letter
    if form == 77 then
      state = get('0', size)
    end
  end
  beyond = 0
  if letter == 76 and #state >= 36 then
    _, at, debt, last, unit, lump, excess, other = struct.unpack(STATE, state)
  elseif letter == 77 and #state >= BEYOND_SIZE then
    _, at, debt, last, unit, lump, excess, beyond = struct.unpack(BEYOND, state)
  else
    fail(key)
  end
  if unit * lump == 0 then
    fail(key)
  end
  stored_grain = is_head and 2 ^ other or stored_grain
  return state
end

local function earliest(needed)
  local room = limit * unit - needed * unit
  return time_until(debt), time_until(debt - room)
end

-- A state that stays as it is tells the fast path its own grain, by another burst a coarser one.
function expiry(reset)
  return round_up(now + known(reset), math.max(grain, stored_grain))
end

