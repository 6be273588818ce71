-- Fast path of concurrency: holds of a key that is not blocked. It decides as the engine does.
-- HELD

local function store(key, found, slots, epoch, skew, joined)
  local last = slots[#slots - 1]
  return replace(key, found, with_held('', slots, epoch, now + skew, skew, joined), last - skew)
end

function fast(_, found, runs)
  local before, slots, sum, epoch, _, skew, joined = open_held(found)
  local used = before == '' and use(sum, limit, 1, runs)
  if not used or used == sum then
    return used and found
  elseif sum == 0 then
    epoch, skew, joined = now, 0, 0
  end
  local ends = math.ceil((now + skew + lifetime) / grid) * grid
  if add(slots, ends, used - sum) then
    return found, used, slots, epoch, skew, joined
  end
end

function write(key, found, _, slots, epoch, skew, joined)
  return store(key, found, slots, epoch, skew, joined)
end

function change(key, found, changes)
  local before, slots, _, epoch, _, skew, joined, has_ended = open_held(found)
  if before ~= '' or has_ended then
    return
  end
  local results, is_changed
  results, is_changed, _, slots, epoch, skew, joined =
    change_slots(changes, slots, epoch, skew, joined)
  if not results or not is_changed then
    return results, true
  elseif #slots == 0 then
    return results, done(try('DEL', key))
  end
  return results, store(key, found, slots, epoch, skew, joined)
end
