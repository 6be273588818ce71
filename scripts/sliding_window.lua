-- Sliding window: estimates the sliding log from the counts of `buckets` sub-windows and of the one
-- before them, which is weighted by its overlap with the window.
-- key   'W', parts, a byte, then doubles: {at, start, length, last}, then `parts + 1` counts of four bytes, newest
--       first: `last`, the newest admitted request, is in the first of these sub-windows; see also reservations.lua
-- ARGV  cost, max_wait, limit, window, buckets, grain
-- Inside, one microsecond is `buckets` parts, so that a sub-window is `window` parts; overlaps are rounded
-- up to `grain` parts.
local function sliding_window(key, arg)
  local cost, max_wait = tonumber(ARGV[arg + 1]), tonumber(ARGV[arg + 2])
  local needed = asks and cost or -math.huge
  local limit, window = tonumber(ARGV[arg + 3]), tonumber(ARGV[arg + 4])
  local buckets, grain = tonumber(ARGV[arg + 5]), tonumber(ARGV[arg + 6])

  local at, start, last, stale = now, now, now, false
  local index, counts = 0 -- the sub-window of `last`, from `start`
  local length, parts = window, buckets -- of the state: a sub-window's parts, a microsecond's parts

  local function zeros(n)
    local all = {}
    for i = 1, n do
      all[i] = 0
    end
    return all
  end

  local function count(slot)
    return counts[index - slot + 1] or 0
  end

  local function slot_of(instant)
    return math.floor((instant - start) * parts / length)
  end

  local function opening(slot)
    return start + math.ceil(slot * length / parts)
  end

  local function count_inside(slot)
    local sum = 0
    for i = math.max(index - slot + 1, 1), math.min(index - slot + parts, parts + 1) do
      sum = sum + counts[i]
    end
    return sum
  end

  local function weight(slot, instant)
    local overlap = (slot + 1) * length - (instant - start) * parts
    return math.ceil(count(slot - parts) * math.ceil(overlap / grain) / math.ceil(length / grain))
  end

  -- The newest sub-window that counts; none if even that has left the window.
  local function newest()
    for i = 1, parts + 1 do
      if counts[i] > 0 then
        local slot = index - i + 1
        return slot_of(now) <= slot + parts and slot or nil
      end
    end
  end

  -- Counts each old sub-window where its middle is, and not after `last`. `start` stays, so that two quotas
  -- that take turns do not move the counts ahead of the time.
  local function regrid()
    local moved, newest = zeros(buckets + 1), math.floor((last - start) * buckets / window)
    for slot = index, index - parts, -1 do
      local middle = math.floor((opening(slot) + opening(slot + 1)) / 2)
      local instant = math.max(opening(slot), math.min(middle, now, last))
      local i = newest - math.floor((instant - start) * buckets / window) + 1
      if moved[i] then
        moved[i] = math.min(moved[i] + count(slot), 2 ^ 32 - 1)
      end
    end
    index, counts, length, parts = newest, moved, window, buckets
  end

  local function read(state)
    local form, place
    parts = string.byte(state, 2) or 0
    if #state == 4 * parts + 38 then
      form, parts, at, start, length, last, place = struct.unpack('<BBdddd', state)
    end
    -- The numbers of another program must not keep the loops below from ending.
    if form ~= 87 or parts == 0 or not (length >= 1 and length < 2 ^ 53 and start > -2 ^ 53 and start <= last
        and last < 2 ^ 53 and (last - start) * parts / length < 2 ^ 53) then
      fail(key)
    end
    counts = {struct.unpack('<' .. string.rep('I4', parts + 1), state, place)}
    counts[parts + 2] = nil -- the position behind them
    index = slot_of(last)
  end

  local function packed()
    local form = '<BBdddd' .. string.rep('I4', parts + 1)
    return struct.pack(form, 87, parts, at, start, length, last, unpack(counts, 1, parts + 1))
  end

  local function commit(instant, units)
    local slot = slot_of(instant)
    local by = math.min(slot - index, parts + 1)
    for i = parts + 1, 1, -1 do
      counts[i] = i > by and counts[i - by] or 0
    end
    counts[1] = math.min(counts[1] + units, 2 ^ 32 - 1) -- what is spent may be above the quota
    local cycles = math.floor(slot / parts) -- `start` moves by whole windows
    start, last, index = start + cycles * length, instant, slot - cycles * parts
  end

  local function model()
    local function advance(time)
      at = time
    end

    local function refund(instant, units)
      if instant then
        if length ~= window or parts ~= buckets then
          return -- a changed quota has moved the counts
        end
        local i = index - slot_of(instant) + 1
        if counts[i] then -- else it counts no more
          counts[i] = math.max(counts[i] - units, 0)
        end
        return
      end
      for i = math.min(index - slot_of(now), 0) + parts + 1, 1, -1 do
        local back = math.min(counts[i], units)
        counts[i] = counts[i] - back
        units = units - back
      end
    end

    local function reset_after()
      local newest = newest()
      return newest and opening(newest + parts + 1) - now or 0
    end

    return {read = read, packed = packed, advance = advance, commit = commit, refund = refund, reset = reset_after}
  end

  local state = redis.call('GETRANGE', key, '0', 4 * buckets + 37)
  local known = state ~= ''
  if known then
    local other = string.byte(state, 2) or 0
    if other ~= buckets then
      state = redis.call('GETRANGE', key, '0', 4 * other + 37)
    end
    read(state)
    if now < at then -- the clock stepped back
      start, last, at, stale = start - (at - now), last - (at - now), now, true
    end
  end
  if known and not asks and not commits then
    reservations().give_back(key, #state, stale, cost, model)
  end
  if action == 'release' then
    return {}
  end
  if known and newest() and (length ~= window or parts ~= buckets) then -- the quota was changed
    regrid()
    stale = true
  end
  local fresh = not known or not newest()
  if fresh then
    start, last, index, counts = now, now, 0, zeros(buckets + 1)
    length, parts = window, buckets
  end
  at = now

  local function earliest(units)
    local instant = math.max(now, last)
    local slot = slot_of(instant)
    local inside = count_inside(slot)
    for _ = 0, parts + 1 do -- then even the newest has left the window
      local oldest = count(slot - parts)
      local free = limit - units - inside
      if free >= oldest then
        return instant
      end
      if free >= 0 then
        local overlap = math.floor(free * math.ceil(length / grain) / oldest) * grain
        local light = start + math.ceil(((slot + 1) * length - overlap) / parts)
        if light < opening(slot + 1) then
          return math.max(instant, light)
        end
      end
      slot = slot + 1
      inside = inside - count(slot - parts)
      instant = opening(slot)
    end
    return instant
  end

  local wait = earliest(math.min(needed, limit)) - now
  local admitted, wait = settle(wait, math.max(wait - max_wait, 0))

  local before
  if commits and admitted then
    before = wait > 0 and packed()
    commit(now + wait, cost)
  end

  local remaining, replenish, reset = limit, 0, 0
  if newest() then
    remaining = 0
    if last <= now then
      local slot = slot_of(now)
      remaining = math.max(limit - count_inside(slot) - weight(slot, now), 0)
    end
    replenish = earliest(remaining + 1) - now
    reset = opening(newest() + parts + 1) - now
  end

  if commits and (admitted or stale) then
    write(key, packed(), stale or fresh, before, now + wait, cost, reset, model)
  end
  return {admitted and 1 or 0, wait, remaining, replenish, reset, now + wait}
end

