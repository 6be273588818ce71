-- Log: loads and stores a log, and releases reservations, which are entries of it. It takes
-- the place of reservations.lua. There is no `reserve_all`: an entry is a reservation.

-- Forgets what requests to another key have found.
function forget()
  found_last, found_live, cuts, held = nil, nil, {}, nil
end

function load()
  tail = get(tail_text, '-1')
  if open_block(string.byte(tail, -1)) then
    tail = get(tail_text, '-1')
  end
  if not held and string.byte(tail, -1) == 72 then
    make_holding()
    open_holds(string.sub(tail, -151), '')
    tail = get(tail_text, '-1')
  end
  found, stale, committed, merges = tail ~= '', false, false, false
  found = found and not (block and not block.state)
  first, live, live_dead, last, last_cost, instants, costs = 0, 0, 0, 0, 0, {}, {}
  if not found then
    return
  elseif not read_foot(tail) then
    local letter, head = string.match(string.sub(tail, -1), '%u'), get('0', '6')
    -- Another version may have its letter in front, where this one has an instant.
    local is_entry = #head == 7 and math.abs(struct.unpack('<I7', head) - now) < now / 2
    fail(key, letter or is_entry and '' or string.sub(head, 1, 1))
  end
  first_read = math.max(length - PAGE, 0)
  last = instant_of(length - 1)
  last_cost = costs[length - 1]
  stored_last, stored_skew, stored_window = last, skew, window
  if not found_last then
    found_last, found_at, found_skew, found_window = last, at, skew, window
  end
end

function found_state()
  if not found_last then
    return ''
  end
  local remaining = last <= at and math.max(limit - live, 0) or 0
  first_instant(remaining + 1) -- the reply needs that entry, too
  table.sort(cuts, function(a, b)
    return a[2] < b[2]
  end)
  return condensed(cuts)
end

-- Returns nothing: few logs are read as a whole.
function whole() end

function expiry_now()
  return length > 0 and expiry_of(last, skew, window) or now
end

-- Stores the state after a decision.
function store()
  if reset_after() == 0 then
    put('')
    return
  end
  local oldest = committed and first or gone
  oldest_at = instant_of(oldest)
  oldest_cost = costs[oldest]
  if committed then
    local start, bytes, expires = newest(costs[length - 1], stale)
    if start then
      patch(start, bytes, expires)
    else
      put(bytes, expires)
    end
  else
    patch(ENTRY_SIZE * length, foot(), expiry_of(last, skew, window))
  end
end

if returns then
  local function lower(i, units)
    local back = math.min(units, costs[i])
    if back > 0 then
      costs[i], sum = costs[i] - back, sum - back
      dead = dead + (costs[i] == 0 and 1 or 0)
      patch(ENTRY_SIZE * i, struct.pack(ENTRY, instants[i], costs[i]))
    end
    return back
  end

  -- Returns units that were spent at an instant, or are reserved for it, if they are still in the
  -- log.
  local function refund_at(instant, units)
    local i = leading(instant - 1)
    while units > 0 and i < length and instant_of(i) == instant do
      units, i = units - lower(i, units), i + 1
    end
  end

  -- Returns units of any requests, the oldest first: the units that stay are those that count
  -- longest. Requests that wait keep theirs. Entries of which nothing stays are gone, as if they
  -- had left the window, so that none of them is written.
  local function refund_any(units)
    local page, stop = 16, false
    while gone < length and not stop do
      local entries = packed_entries(gone, math.min(gone + page, length) - 1)
      for position = 1, #entries, ENTRY_SIZE do
        local instant, cost = struct.unpack(ENTRY, entries, position)
        stop = instant > at or cost > units
        if stop then
          break
        end
        units, sum, gone = units - cost, sum - cost, gone + 1
        dead = dead - (cost == 0 and 1 or 0)
      end
      page = math.min(page * 2, 512)
    end
    if stop and instant_of(gone) <= at then
      lower(gone, units)
    end
  end

  -- Gives the newest entries the instant of the newest one that is not dead, so that later requests
  -- need not come after them.
  local function move_dead()
    local newest = scan(length - 1, gone, function(i)
      return costs[i] > 0
    end)
    last = instants[newest]
    local moved = string.rep(struct.pack(ENTRY, last, 0), length - 1 - newest)
    if moved ~= '' then
      patch(ENTRY_SIZE * (newest + 1), moved)
    end
  end

  -- Drops the dead entries, and those that do not count.
  local function put_living()
    local kept = {}
    scan(gone, length - 1, function(i)
      if costs[i] > 0 then
        kept[#kept + 1] = struct.pack(ENTRY, instants[i], costs[i])
      end
    end)
    dead, gone, length = 0, 0, #kept
    oldest_at, oldest_cost = struct.unpack(ENTRY, kept[1])
    put(table.concat(kept) .. foot(), expiry_of(last, skew, window))
  end

  -- Returns units to the log.
  function release(_, releases)
    advance(now)
    if length > 0 then
      sum, dead, gone = live, live_dead, first
      for _, release in ipairs(releases) do
        if release[1] then
          refund_at(release[1] + skew, release[2])
        else
          refund_any(release[2])
        end
      end
    end
    if sum == 0 then
      put('') -- no entry counts any more
      return
    end
    move_dead()
    if dead > 64 and dead > (length - gone) / 3 then
      put_living()
    else
      store()
    end
  end
end
