-- Fast path of the sliding window: checks that do not wait, and a state with the same sub-windows
-- and without reservations. It decides as the engine does. state.lua stands before this text.
longest = math.ceil((buckets + 1) * window / buckets)
drain, pace = longest, 1

local function count_at(found, i)
  return (struct.unpack(ONE_COUNT, found, STATE_SIZE + COUNT_SIZE * (i - 1) + 1))
end

-- Reads the state but for its counts. Returns the sum of the newest ones, the number of the current
-- sub-window, and how many have begun since the newest one of the state; none if the engine must
-- decide.
local function read(found)
  if found == '' then
    use_form(usual_form)
    return 0, 0, buckets + 1
  end
  local letter = string.byte(found)
  if letter ~= form then
    use_form(letter)
  end
  if #found ~= STATE_SIZE + COUNT_SIZE * (buckets + 1) or letter ~= NARROW and letter ~= WIDE then
    return
  end
  local _, sum
  _, parts, length, start, at, last, sum = struct.unpack(STATE, found)
  local is_same = parts == buckets and length == window
  if is_same and now >= at and now >= last and is_sound() then
    local slot = slot_of(now)
    return sum, slot, slot - slot_of(last)
  end
end

-- Returns the sum of the counts inside of the window, and the count that its overlap weights, if
-- `by` sub-windows have begun since the newest one of the state.
local function window_of(found, sum, by)
  if by > buckets then
    return 0, 0
  end
  for i = buckets - by + 1, by > 0 and buckets or 0 do
    sum = sum - count_at(found, i)
  end
  return sum, count_at(found, buckets - by + 1)
end

-- The part of the count of the oldest sub-window that its overlap weights, rounded up.
local function weight(slot, oldest)
  return oldest - mul_div(oldest, (now - start) * buckets - slot * window, window)
end

function write(key, found, sum, slot, by, granted)
  if not sum then
    local i = 1 -- of the newest count that is not 0
    while by <= buckets and count_at(found, i) == 0 do
      i = i + 1
    end
    return replace(key, found, nil, by > buckets and now or opening(slot - by - i + buckets + 2))
  end
  local newest = by == 0 and count_at(found, 1) + granted or granted
  if key and newest > granted and slot < buckets then -- the expiry stays
    return done(try('SETRANGE', key, '16', struct.pack(NEWEST, now, now, sum, newest)))
  end
  local cycles = math.floor(slot / buckets) -- `start` moves by whole windows
  start, slot = start + cycles * window, slot - cycles * buckets
  local head = struct.pack(STATE .. COUNT, form, buckets, window, start, now, now, sum, newest)
  -- Behind the newest count stand those of sub-windows without requests, and the old ones.
  local zeros, kept = math.max(math.min(by, buckets + 1) - 1, 0), ''
  if by <= buckets then
    local first = STATE_SIZE + (by == 0 and COUNT_SIZE or 0) + 1
    kept = string.sub(found, first, #found - COUNT_SIZE * by)
  end
  local state = head .. string.rep('\0', COUNT_SIZE * zeros) .. kept
  return replace(key, found, state, opening(slot + buckets + 1))
end

function fast(_, found, runs, held)
  local sum, slot, by = read(found)
  if not sum then
    return
  end
  local inside, oldest = window_of(found, sum, by)
  if inside + oldest == 0 then -- no request counts
    use_form(usual_form)
    parts, length, start, slot, by = buckets, window, now, 0, buckets + 1
  end
  local used = use(inside, limit - held - weight(slot, oldest), 1, runs)
  if used and (used <= MAX_NARROW or form == WIDE and used < MAX_COUNT) then
    return found, used > inside and used, slot, by, used - inside
  end
end
