-- Decides about keys of a sliding_window limiter, one by one.
-- Written by a test: edit the files that it consists of, whose comments are not sent:
-- prelude.lua, fast.lua, each.lua with sliding_window/state.lua, hold.lua, block.lua, sliding_window/model.lua, reservations.lua, engine.lua, holding.lua, finish.lua, sliding_window/fast.lua
-- EVALSHA names the text below this line 9f36e26670a68e4ace5a546be6869df33db487ec
local action, items = ARGV[1], ARGV[#ARGV]
local can_be_denied = action == 'check' or action == 'peek' or action == 'hold'
local commits = action == 'check' or action == 'spend' or action == 'hold'
local blocks = action == 'block' or action == 'unblock'
local returns = action == 'refund' or action == 'release' or blocks

local fast_action = 'check'
local call = redis.call
local unpack = table.unpack or unpack
local time = call('TIME')
local now = time[1] * 1000000 + time[2]

local forms
local UNDECIDED = ' cannot be decided about; delete it: '

local function fail(key, letters)
  if not letters then
    local head = call('GETRANGE', key, '0', '8')
    letters = string.match(head, '^B.......(.)') or string.sub(head, 1, 1)
  end
  if string.find(letters, '[^%UBH' .. forms .. ']') then
    error('VERSION the key ' .. key .. ' cannot be read: its state was written by a newer version '
      .. 'of this crate, or by an older one, and was not changed; finish the deployment, or wait '
      .. 'until an older state expires', 0)
  end
  error('ERR the key ' .. key .. ' holds no state of this limiter: delete it', 0)
end

local function failure(key, err)
  local text = type(err) == 'table' and err.err or err
  local of_command = string.match(text, '^@user_script: %d+: (.*)$')
  if string.find(text, '^%u+ the key ') then
    return {err = text}
  elseif string.find(text, 'WRONGTYPE', 1, true) then
    text = 'WRONGTYPE the key ' .. key .. ' holds another type of value: delete it'
  elseif of_command then
    text = string.match(of_command, '^%-(.*)$') or 'ERR ' .. of_command
  elseif not string.find(text, '^%u+ ') then
    text = 'ERR the key ' .. key .. UNDECIDED .. text
  end
  return {err = text}
end

local function round_up(time, grain)
  return math.ceil(time / grain) * grain
end

local function expire_at(time)
  if not (time > 0 and time < 2 ^ 63) then
    error('it expires at ' .. time, 0)
  end
  return string.format('%.0f', math.ceil(time / 1000))
end

local change_fast

local function use(used, size, parts, runs)
  local missing = 0
  for i = 1, #runs do
    local run = runs[i]
    local each = run.cost * parts
    local granted = math.min(run.count, math.max(math.floor((size - used) / each), 0))
    used = used + granted * each
    if granted < run.count then
      if run.max_wait > 0 then
        return
      end
      missing = math.max(missing, used + each - size)
    end
  end
  return used, missing
end

local function replace(key, found, state, expires)
  if found ~= '' then
    return call('SET', key, state, 'PXAT', expire_at(expires))
  end
  return call('SET', key, state, 'PXAT', expire_at(expires), 'NX')
end
local params = ARGV[2]
local key, block
local lifetime, grid = 0, 0
if action == 'hold' then
  lifetime, grid = struct.unpack('<dd', ARGV[3])
end
forms = 'WX'
local limit, window, buckets = struct.unpack('<ddd', params, 2)
local MAX_COUNT, MAX_NARROW = 2 ^ 46, 2 ^ 32 - 1
local NARROW, WIDE = 87, 88
local form, STATE, STATE_SIZE, COUNT, COUNT_SIZE, ONE_COUNT, NEWEST
local size
local at, start, length, last
local index, parts, counts

local function use_form(letter)
  form = letter
  if letter == WIDE then
    STATE, STATE_SIZE, NEWEST = '<BBI7i7I7i7I7', 37, '<I7i7I7I7'
    COUNT, COUNT_SIZE, ONE_COUNT = 'I7', 7, '<I7'
  else
    STATE, STATE_SIZE, NEWEST = '<BBI7i7I7i7I5', 35, '<I7i7I5I4'
    COUNT, COUNT_SIZE, ONE_COUNT = 'I4', 4, '<I4'
  end
end

local usual_form = limit > MAX_NARROW and WIDE or NARROW
use_form(usual_form)
size = STATE_SIZE + COUNT_SIZE * (buckets + 1)
local usual_size, size_text = size, string.format('%d', size)

local function mul_div(a, b, c)
  if a * b < 2 ^ 53 then
    return math.floor(a * b / c)
  end
  local quotient, rest, unit = 0, 0, 2 ^ 42
  while unit >= 1 do
    local digit = math.floor(a / unit)
    a = a - digit * unit
    local part = rest * 64 + digit * b
    local whole = math.floor(part / c)
    quotient, rest = quotient * 64 + whole, part - whole * c
    unit = unit / 64
  end
  return quotient
end

local function slot_of(instant)
  return math.floor((instant - start) * parts / length)
end

local function opening(slot)
  return start + math.ceil(slot * length / parts)
end

local function is_sound()
  local max = 2 ^ 53
  return parts > 0 and length >= 1 and length < max
    and start > -max and start <= last and last < max
    and (last - start) * parts / length < max
end

local function create_engine()
  local cost, max_wait
local held
local HEAD, SLOT, MAX_SLOTS = '<BBI7I7I7', '<I7I7', 9
local HELD_SIZE, SLOT_SIZE = 25, 14
local MOST_SIZE, most_text = 151, '-151'
local get, state_length
local whole
local is_fresh
local first_held
local clock = now
local capacity, limit = limit, limit
local drain, expiry, refund

local function size_of()
  return size
end

local function fits_beside(units)
  return units <= limit
end

local function held_total()
  local sum = 0
  for _, slot in ipairs(held.slots) do
    sum = sum + slot.units
  end
  return math.min(sum, 2 ^ 53)
end

local function packed_holds(count)
  local slots = held.slots
  local parts, joined = {}, 0
  for i = 1, count do
    local slot = slots[i]
    joined = slot and slot.ends <= held.joined and i or joined
    parts[i + 1] = struct.pack(SLOT, slot and slot.ends or 0, slot and slot.units or 0)
  end
  parts[1] = struct.pack(HEAD, 72, count + 16 * joined, held.epoch, held.at, held.skew)
  return table.concat(parts) .. struct.pack('<BB', count, 72)
end

local function open_holds(tail, first)
  local count = string.byte(tail, -2) or 0
  local size = HELD_SIZE + SLOT_SIZE * count
  local position, _, counts, epoch, at, skew = math.max(#tail - size + 1, 0)
  if count < 1 or position == 0 or string.byte(tail, position) ~= 72
    or string.byte(tail, position + 1) % 16 ~= count then
    fail(key, first .. string.sub(tail, position, position))
  end
  _, counts, epoch, at, skew, position = struct.unpack(HEAD, tail, position)
  local slots = {}
  for _ = 1, count do
    local ends, units
    ends, units, position = struct.unpack(SLOT, tail, position)
    if units > 0 then
      slots[#slots + 1] = {ends = ends, units = units}
    end
  end
  local is_all = #tail < MOST_SIZE
  local before = (is_all and #tail or state_length()) - size
  held = {slots = slots, epoch = epoch, at = at, skew = skew, count = count, length = before}
  local last = slots[(counts - count) / 16]
  held.joined = last and last.ends or 0
  return is_all and string.sub(tail, 1, before)
end

local function inside(from, to)
  from, to = tonumber(from), tonumber(to)
  from = from < 0 and math.max(from + held.length, 0) or from
  return from, math.min(to < 0 and to + held.length or to, held.length - 1)
end

local function skew_at()
  return clock + held.skew < held.at and held.at - clock or held.skew
end

local function touch()
  held.skew = skew_at()
  held.at, held.changed = clock + held.skew, true
end

local function add_slot(ends, units)
  local slots, i = held.slots, 1
  while slots[i] and slots[i].ends < ends do
    i = i + 1
  end
  if slots[i] and slots[i].ends == ends then
    slots[i].units = slots[i].units + units
  else
    table.insert(slots, i, {ends = ends, units = units})
  end
  if #slots > MAX_SLOTS then
    local nearest = 1
    for j = 2, MAX_SLOTS do
      if slots[j + 1].ends - slots[j].ends < slots[nearest + 1].ends - slots[nearest].ends then
        nearest = j
      end
    end
    local joined = table.remove(slots, nearest)
    slots[nearest].units = slots[nearest].units + joined.units
    held.joined = math.max(held.joined, slots[nearest].ends)
  end
end

local function hold(units, lifetime, grid, is_known)
  if not held then
    local state = whole()
    held = {slots = {}, count = 0, length = state and #state or state_length()}
  end
  if #held.slots == 0 and not is_known then
    held.epoch, held.at, held.skew, held.joined = clock, clock, 0, 0
  end
  touch()
  local ends = math.ceil((held.at + lifetime) / grid) * grid
  add_slot(ends, units)
  return ends
end

local function take(ends, units)
  touch()
  local left, last, joined = {}, math.max(ends, held.joined), 0
  for _, slot in ipairs(held.slots) do
    if slot.ends >= ends and slot.ends <= last then
      local taken = math.min(slot.units, units)
      slot.units, units = slot.units - taken, units - taken
    end
    if slot.units > 0 then
      left[#left + 1] = slot
      joined = slot.ends <= held.joined and slot.ends or joined
    end
  end
  held.slots, held.joined = left, joined
end

local function held_until(expires)
  local slots = held.slots
  local last = slots[1] and slots[#slots].ends - skew_at() or 0
  return math.max(expires or clock, last) + drain(held_total())
end

local function in_block(state)
  return struct.pack('<BI7', 66, block.ends) .. state
end

function get(from, to)
  if held then
    from, to = inside(from, to)
    if from > to then
      return ''
    end
  end
  if block then
    from, to = tonumber(from), tonumber(to)
    return string.sub(block.state, from < 0 and from or from + 1, to < 0 and to or to + 1)
  end
  return call('GETRANGE', key, from, to)
end

function state_length()
  return held and held.length or block and #block.state or call('STRLEN', key)
end

local function put(state, expires)
  is_fresh = false
  if held then
    held.length = #state
    if #held.slots > 0 then
      state, expires = state .. packed_holds(#held.slots), held_until(expires)
      held.count, held.changed = #held.slots, false
    else
      held = nil
    end
  end
  if block then
    block.state, block.expires, block.changed = state, expires, true
  elseif state == '' then
    call('DEL', key)
  else
    call('SET', key, state, 'PXAT', expire_at(expires))
  end
end

local function patch(from, bytes, expires)
  is_fresh = false
  if held then
    from, expires = tonumber(from), expires and held_until(expires)
    if from + #bytes > held.length then
      held.length, held.count = from + #bytes, math.max(held.count, #held.slots)
      bytes, held.changed = bytes .. packed_holds(held.count), false
    end
  end
  if block then
    local state = block.state
    from = tonumber(from)
    local rest = string.sub(state, from + #bytes + 1)
    block.state, block.changed = string.sub(state, 1, from) .. bytes .. rest, true
    block.expires = expires or block.expires
    return
  end
  call('SETRANGE', key, from, bytes)
  if expires then
    call('PEXPIREAT', key, expire_at(expires))
  end
end

local function open_block(letter)
  if block or letter ~= 66 and not blocks then
    return false
  end
  local ends = 0
  if letter == 66 then
    local head, last = call('GETRANGE', key, '0', '8'), call('GETRANGE', key, '-1', '-1')
    local letters = string.sub(head, 1, 1) .. last
    if #head < 9 or letters ~= 'BB' then
      fail(key, letters)
    end
    ends = struct.unpack('<I7', head, 2)
    if can_be_denied and ends - now > max_wait then
      block = {ends = ends}
      return false
    end
  end
  local value = call('GETRANGE', key, '0', '-1')
  local state = letter == 66 and string.sub(value, 9, -2) or value
  block = {ends = ends, state = state, changed = blocks}
  return true
end

local function close_block()
  local ends, state, expires = block.ends, block.state, block.expires
  local is_over = ends <= now
  if not block.changed then
    return
  elseif is_over and state == '' then
    call('DEL', key)
    return
  end
  local value = is_over and state or in_block(state) .. 'B'
  if expires or state == '' then
    call('SET', key, value, 'PXAT', expire_at(math.max(expires or 0, is_over and 0 or ends)))
  else
    call('SET', key, value, 'KEEPTTL')
  end
end

function drain()
  return math.ceil((buckets + 1) * window / buckets)
end

local function size_of(state)
  local letter, own = string.byte(state, 1, 2)
  local head, each = 35, 4
  if letter == WIDE then
    head, each = 37, 7
  end
  return head + each * ((own or 0) + 1)
end

local function is_foreign()
  return length ~= window or parts ~= buckets
end

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

local function count_inside(slot)
  local sum = 0
  for i = math.max(index - slot + 1, 1), math.min(index - slot + parts, parts + 1) do
    sum = sum + counts[i]
  end
  return sum
end

local function light(slot, oldest, free)
  local overlap = mul_div(length, free, oldest)
  return start + math.ceil(((slot + 1) * length - overlap) / parts)
end

local function newest()
  for i = 1, parts + 1 do
    if counts[i] > 0 then
      local slot = index - i + 1
      return slot_of(now) <= slot + parts and slot or nil
    end
  end
end

local function first_instant(needed)
  local instant = math.max(now, last)
  local slot = slot_of(instant)
  local inside = count_inside(slot)
  for _ = 0, parts + 1 do
    local oldest = count(slot - parts)
    local free = limit - needed - inside
    if free >= oldest then
      return instant
    end
    if free >= 0 then
      local light = light(slot, oldest, free)
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

local function regrid()
  local moved, newest = zeros(buckets + 1), math.floor((last - start) * buckets / window)
  for slot = index, index - parts, -1 do
    local opened, closes = opening(slot), opening(slot + 1)
    local ends = math.min(closes - 1, last)
    local instant = math.max(opened, math.min(math.floor((opened + closes) / 2), last))
    if ends > now then
      instant = ends
    end
    local i = newest - math.floor((instant - start) * buckets / window) + 1
    if moved[i] then
      moved[i] = math.min(moved[i] + count(slot), MAX_COUNT)
    end
  end
  index, counts, length, parts = newest, moved, window, buckets
end

local function initial()
  use_form(usual_form)
  at, start, length, last = now, now, window, now
  index, parts, counts = 0, buckets, zeros(buckets + 1)
end

local function decode(state, is_head)
  local letter, position, _
  letter, parts = string.byte(state, 1, 2)
  local stays_wide = not is_head and form == WIDE
  use_form(letter)
  if is_head then
    size = STATE_SIZE + COUNT_SIZE * ((parts or 0) + 1)
    if size ~= usual_size then
      state = get('0', size)
    end
  end
  if (letter == NARROW or letter == WIDE) and #state >= size then
    _, parts, length, start, at, last, _, position = struct.unpack(STATE, state)
  end
  if not position or not is_sound() then
    fail(key)
  end
  counts = {struct.unpack('<' .. string.rep(COUNT, parts + 1), state, position)}
  if stays_wide then
    use_form(WIDE)
  end
  counts[parts + 2] = nil
  index = slot_of(last)
  return state
end

local function encode(_, more)
  if form == NARROW and math.max(unpack(counts, 1, parts + 1)) + (more or 0) > MAX_NARROW then
    use_form(WIDE)
  end
  local head = struct.pack(STATE, form, parts, length, start, at, last, count_inside(index))
  return head .. struct.pack('<' .. string.rep(COUNT, parts + 1), unpack(counts, 1, parts + 1))
end

local function step_back()
  local back = at - now
  if back > 0 then
    at, start, last = now, start - back, last - back
  end
  return back > 0
end

local function advance(time)
  at = time
end

local function adopt()
  advance(now)
  local changed = is_foreign()
  if changed and newest() then
    regrid()
  end
  if not newest() then
    initial()
  end
  return changed
end

local function earliest(needed)
  return first_instant(math.min(needed, limit)) - now
end

local function commit(instant, units)
  local slot = slot_of(instant)
  local by = math.min(slot - index, parts + 1)
  for i = parts + 1, 1, -1 do
    counts[i] = i > by and counts[i - by] or 0
  end
  counts[1] = math.min(counts[1] + units, MAX_COUNT)
  local cycles = math.floor(slot / parts)
  start, last, index = start + cycles * length, instant, slot - cycles * parts
end

if returns then
  function refund(instant, units)
    if instant then
      if is_foreign() then
        return
      end
      local i = index - slot_of(instant) + 1
      if counts[i] then
        counts[i] = math.max(counts[i] - units, 0)
      end
      return
    end
    local ahead = index - slot_of(now)
    for i = math.min(ahead, 0) + parts + 1, math.max(ahead, 0) + 1, -1 do
      local back = math.min(counts[i], units)
      counts[i] = counts[i] - back
      units = units - back
    end
  end
end

local function reset_after()
  local newest = newest()
  return newest and opening(newest + parts + 1) - now or 0
end

local found, stale
local first_found

local ENTRY = 16
local read_size = tonumber(size_text)

local function forget()
  first_found, held = nil, nil
end

local function find_holds()
  local own = size_of(found)
  local is_longer = #found > own or own > read_size and state_length() > own
  if string.byte(found) ~= 72 and not is_longer then
    return
  end
  local tail, first = get(most_text, '-1'), string.sub(found, 1, 1)
  local last = string.byte(tail, -1)
  if last == 72 then
    local state = open_holds(tail, first)
    found = state and string.sub(state, 1, read_size + 1) or get('0', size_text)
  elseif last < 63 or last > 67 or math.max(state_length() - 2 * own, 1) % ENTRY > 0 then
    fail(key, first .. string.sub(tail, -1))
  end
end

function whole()
  return is_fresh and (not found and '' or #found <= size_of(found) and found)
end

local function load()
  found, stale, is_fresh = get('0', size_text), false, true
  if open_block(string.byte(found)) then
    found = get('0', size_text)
  elseif block and not block.state then
    found = nil
    return
  end
  if not held then
    find_holds()
  end
  found = found ~= '' and decode(found, true) or nil
  first_found = first_found or found or ''
end

local function found_state()
  return first_found or ''
end

local function expiry_after(reset)
  return expiry and expiry(reset) or now + reset
end

local function expiry_now()
  return expiry_after(reset_after())
end

local function tails()
  local function read_tail(size)
    local tail = get(size, -1)
    if #tail >= size + ENTRY and struct.unpack('<d', tail, #tail - ENTRY + 1) > now then
      return tail
    end
  end

  local function fold(tail, size)
    decode(string.sub(tail, 1, size))
    local position = size + 1
    local instant, cost = struct.unpack('<dd', tail, position)
    while instant <= now do
      advance(instant)
      commit(instant, cost)
      position = position + ENTRY
      instant, cost = struct.unpack('<dd', tail, position)
    end
    advance(now)
    return position
  end

  local function lower(entries, instant, units)
    local low, high = 1, #entries + 1
    while low < high do
      local middle = math.floor((low + high) / 2)
      if entries[middle][1] < instant then
        low = middle + 1
      else
        high = middle
      end
    end
    local entry = entries[low]
    if entry and entry[1] == instant then
      entry[2] = entry[2] - math.min(units, entry[2])
    end
  end

  local function recount(entries)
    local base, packed = encode(true), {}
    for _, entry in ipairs(entries) do
      if entry[2] > 0 then
        commit(entry[1], entry[2])
        packed[#packed + 1] = struct.pack('<dd', entry[1], entry[2])
      end
    end
    return packed[1] and base .. table.concat(packed) or ''
  end

  return {fold = fold, lower = lower, read = read_tail, recount = recount}
end

local function reserving()
  local tails = tails()

  local function insert(head, instant, cost, more, reset)
    local tail = get(size, -1)
    local first, behind = tails.fold(tail, size), #tail + 1
    while behind > first and struct.unpack('<d', tail, behind - ENTRY) > instant do
      behind = behind - ENTRY
    end
    local ahead = behind
    if behind > first then
      local other, units = struct.unpack('<dd', tail, behind - ENTRY)
      if other == instant then
        ahead, cost = behind - ENTRY, cost + units
      end
    end
    local entry = struct.pack('<dd', instant, cost)
    local rest = string.sub(tail, first, ahead - 1) .. entry .. more .. string.sub(tail, behind)
    put(head .. encode(true) .. rest, expiry_after(reset))
  end

  local function reserve(head, before, instant, cost, more, reset)
    local entry = struct.pack('<dd', instant, cost)
    local length = state_length()
    local newest, newest_cost = 0, 0
    if length >= 2 * size + ENTRY then
      newest, newest_cost = struct.unpack('<dd', get(length - ENTRY, -1))
    end
    if newest <= now then
      put(head .. before .. entry .. more, expiry_after(reset))
      return
    end
    local middle = 2 * size + math.floor((length - 2 * size) / ENTRY / 2) * ENTRY
    local oldest = struct.unpack('<d', get(middle, middle + 7))
    local has_grown = #head ~= size
    if oldest <= now or instant < newest or has_grown then
      insert(head, instant, cost, more, reset)
      return
    end
    if newest == instant then
      entry = struct.pack('<dd', instant, newest_cost + cost)
      length = length - ENTRY
    end
    patch(length, entry .. more)
    patch(0, head, expiry_after(reset))
  end

  return reserve
end

local function reserve_all(head, before, entries)
  local more = {}
  for i = 2, #entries do
    more[i - 1] = struct.pack('<dd', entries[i][1], entries[i][2])
  end
  local instant, cost = entries[1][1], entries[1][2]
  decode(head)
  reserving()(head, before, instant, cost, table.concat(more), reset_after())
end

local release
if returns then
  function release(stale, releases)
    local tails, entries = tails(), {}
    local tail = not stale and tails.read(size)
    if tail then
      for position = tails.fold(tail, size), #tail, ENTRY do
        entries[#entries + 1] = {struct.unpack('<dd', tail, position)}
      end
    else
      advance(now)
    end
    for _, release in ipairs(releases) do
      local instant, units = release[1], release[2]
      if instant and instant > now then
        tails.lower(entries, instant, units)
      else
        refund(instant, units)
      end
    end
    local behind, reset = tails.recount(entries), reset_after()
    if reset == 0 then
      put('')
    else
      put(encode(behind ~= '') .. behind, expiry_after(reset))
    end
  end
end

local function store(before, instant)
  local reset = reset_after()
  local head = before and encode(true)
  if before and #before ~= #head then
    decode(before)
    before = encode(true)
  end
  if before and not stale then
    reserving()(head, before, instant, cost, '', reset)
  elseif before then
    put(head .. before .. struct.pack('<dd', instant, cost), expiry_after(reset))
  elseif reset == 0 then
    put('')
  elseif found and #found > size and not stale then
    head = encode(true)
    local tails, behind = tails(), nil
    local tail = tails.read(size)
    if tail then
      local position = tails.fold(tail, size)
      commit(now, cost)
      behind = encode(true) .. string.sub(tail, position)
    end
    put(behind and head .. behind or encode(), expiry_after(reset))
  else
    put(encode(), expiry_after(reset))
  end
end
local wait, too_long

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
    local rest = block.ends - now
    wait, full = math.max(wait, rest), full and full > rest and full or 0
  end
  too_long = fits and math.max(wait - max_wait, full or 0) or math.huge
end

local function spend_at(instant, units)
  local saved = {now, cost, max_wait, can_be_denied, returns}
  now, cost, max_wait, can_be_denied, returns = instant, units, 0, false, false
  load()
  plan_loaded()
  local before = wait > 0 and encode(true, cost)
  commit(now + wait, cost)
  store(before, now + wait)
  now, cost, max_wait, can_be_denied, returns = unpack(saved, 1, 5)
end

local function expire_holds()
  local time = clock + skew_at()
  local first = held.slots[1]
  if not first or first.ends > time then
    return false
  end
  block = block or {ends = 0, state = call('GETRANGE', key, '0', '-1')}
  touch()
  while first and first.ends <= time do
    table.remove(held.slots, 1)
    held.changed, held.joined = true, first.ends < held.joined and held.joined or 0
    spend_at(first.ends - held.skew, first.units)
    first = held and held.slots[1]
  end
  if held and held.changed then
    local state = get('0', '-1')
    held.count, held.changed = #held.slots, false
    block.state = state .. (#held.slots > 0 and packed_holds(#held.slots) or '')
  end
  forget()
  return true
end

local is_behind, has_stepped_back

local function open_key()
  load()
  is_behind = held and held.slots[1] and clock + held.skew < held.at
  has_stepped_back = commits and found and step_back()
  stale = has_stepped_back
  local time = clock + (held and held.slots[1] and skew_at() or 0)
  if held and not blocks and expire_holds() then
    load()
  end
  if is_behind and held then
    touch()
  end
  return time
end

local function plan()
  if block and not block.state then
    block = nil
  end
  open_key()
  if not first_held then
    local slots = held and #held.slots or 0
    first_held = slots > 0 and packed_holds(slots) or ''
  end
  plan_loaded()
end

local function described(state)
  state = (first_held or '') .. state
  return block and block.ends > now and in_block(state) or state
end

local function store_holds()
  if not held or not held.changed then
    return
  end
  local expires, slots, state = expiry_now(), held.slots, whole()
  if state or #slots == 0 and held.length <= 1024 or held.length == 0 then
    put(state or get('0', '-1'), expires)
    return
  end
  local count = math.max(held.count, #slots)
  local bytes = packed_holds(count)
  held.count, held.changed = count, false
  expires = held_until(expires)
  if block then
    block.state = string.sub(block.state, 1, held.length) .. bytes
    block.expires, block.changed = expires, true
    return
  end
  call('SETRANGE', key, held.length, bytes)
  call('PEXPIREAT', key, expire_at(expires))
end

local ENDED, LOST, EXPIRED, RENEWED = 1, 2, 3, 4

local function change_hold(time, epoch, ends, units, used, lifetime, grid)
  local has_expired = ends <= time
  local is_known = held and #held.slots > 0 and held.epoch == epoch
  if is_known and not has_expired then
    take(ends, units)
  end
  if has_expired then
    return EXPIRED, 0, lifetime > 0 and 0 or math.max(used - units, 0)
  elseif lifetime > 0 then
    lifetime = is_known and math.max(lifetime, ends - time) or lifetime
    return RENEWED, hold(units, lifetime, grid, is_known), 0
  end
  return is_known and ENDED or LOST, 0, used
end

local function change_holds(changes)
  block, first_held, cost, max_wait = nil, nil, 0, 0
  forget()
  local time = open_key()
  local results, spent = {}, 0
  for i, change in ipairs(changes) do
    local result, ends, units = change_hold(time, unpack(change, 1, 6))
    results[i] = struct.pack('<ddd', result, held and held.epoch or 0, ends)
    spent = spent + units
  end
  if spent > 0 then
    spend_at(now, spent)
  end
  if held and held.changed then
    load()
    if found then
      advance(now)
    else
      initial()
    end
    store_holds()
  end
  if block then
    close_block()
  end
  return table.concat(results)
end

local finish

if returns then
  local function releases()
    if action == 'refund' then
      return {{nil, cost}}
    end
    local all = {}
    for position = 1, #items, 16 do
      all[#all + 1] = {struct.unpack('<dd', items, position)}
    end
    return all
  end

  local function observe()
    local of_block = blocks
    forget()
    returns, blocks, first_held = false, false, nil
    plan()
    returns, blocks = true, of_block
    return described(found_state())
  end

  local function keep_state()
    if found then
      advance(now)
      block.expires = expiry_now()
    end
    block.expires = held and held_until(block.expires) or block.expires
  end

  function finish()
    if blocks then
      keep_state()
      block.ends = action == 'block' and math.max(block.ends, now + struct.unpack('<d', items)) or 0
    elseif found then
      release(step_back(), releases())
      store_holds()
    elseif held and is_behind then
      put('')
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
    if not commits or not admitted and not is_behind and not has_stepped_back then
      return state
    elseif not admitted then
      block, held = nil, nil
      load()
      if is_behind and held then
        touch()
      end
      stale = found and step_back()
    elseif holds then
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
  local function decide()
    plan()
    return finish(too_long == 0 or not can_be_denied, wait)
  end

  local function decide_all(runs)
    block, first_held = nil, nil
    forget()
    local state
    for _, run in ipairs(runs) do
      cost, max_wait = run.cost, run.max_wait
      for _ = 1, run.count do
        state = decide()
        if too_long > 0 then
          break
        end
      end
    end
    return state
  end

  return {change_holds = change_holds, decide_all = decide_all, reserve_all = reserve_all}
end

local created
local function engine()
  created = created or create_engine()
  return created
end

local function read_all()
  local is_fast = action == fast_action or action == 'holds' and fast_action == 'hold'
  return is_fast and call('MGET', unpack(KEYS))
end

if action == 'release' then
  key = KEYS[1]
  local ok, err = pcall(engine().decide_all, {{count = 1}})
  return ok and {now} or failure(key, err)
end

local states = read_all()

local function count_at(found, i)
  return (struct.unpack(ONE_COUNT, found, STATE_SIZE + COUNT_SIZE * (i - 1) + 1))
end

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

local function window_of(found, sum, by)
  if by > buckets then
    return 0, 0
  end
  for i = buckets - by + 1, by > 0 and buckets or 0 do
    sum = sum - count_at(found, i)
  end
  return sum, count_at(found, buckets - by + 1)
end

local function weight(slot, oldest)
  return oldest - mul_div(oldest, (now - start) * buckets - slot * window, window)
end

local function write(key, found, sum, slot, by, granted)
  local newest = by == 0 and count_at(found, 1) + granted or granted
  if newest > granted and slot < buckets then
    return call('SETRANGE', key, '16', struct.pack(NEWEST, now, now, sum, newest))
  end
  local cycles = math.floor(slot / buckets)
  start, slot = start + cycles * window, slot - cycles * buckets
  local head = struct.pack(STATE .. COUNT, form, buckets, window, start, now, now, sum, newest)
  local zeros, kept = math.max(math.min(by, buckets + 1) - 1, 0), ''
  if by <= buckets then
    local first = STATE_SIZE + (by == 0 and COUNT_SIZE or 0) + 1
    kept = string.sub(found, first, #found - COUNT_SIZE * by)
  end
  local state = head .. string.rep('\0', COUNT_SIZE * zeros) .. kept
  return replace(key, found, state, opening(slot + buckets + 1))
end

local function fast(_, i, runs)
  local found = states[i] or ''
  local sum, slot, by = read(found)
  if not sum then
    return
  end
  local inside, oldest = window_of(found, sum, by)
  if inside + oldest == 0 then
    parts, length, start, slot, by = buckets, window, now, 0, buckets + 1
  end
  local used = use(inside, limit - weight(slot, oldest), 1, runs)
  if used and (used <= MAX_NARROW or form == WIDE) then
    return found, used > inside and used, slot, by, used - inside
  end
end
if action == 'holds' then
  local function change(changes, i)
    return change_fast and change_fast(i, changes) or engine().change_holds(changes)
  end
  local position, reply = 1, {now}
  for i = 1, #KEYS do
    local count, changes = nil, {}
    count, position = struct.unpack('<I2', items, position)
    for j = 1, count do
      changes[j] = {struct.unpack('<dddddd', items, position)}
      position = position + 48
    end
    key = KEYS[i]
    local ok, result = pcall(change, changes, i)
    reply[i + 1] = ok and result or failure(key, result)
  end
  return reply
end

local function read_runs(position)
  local count, runs = nil, {}
  count, position = struct.unpack('<I2', items, position)
  for i = 1, count do
    local run = {}
    run.count, run.cost, run.max_wait, position = struct.unpack('<I4dd', items, position)
    runs[i] = run
  end
  return runs, position
end

local function apply(found, used, ...)
  return found and (not used or write(key, found, used, ...)) and found
end

local reply, runs, position, index = {now}, {{count = 1, max_wait = 0}}, 1, 0
local function decide_keys()
  local is_fast, keys = fast and action == fast_action, KEYS
  for i = index + 1, #keys do
    index, key, block = i, keys[i], nil
    if not blocks and position <= #items then
      runs, position = read_runs(position)
    end
    local found = is_fast and apply(fast(key, i, runs))
    reply[i + 1] = found or engine().decide_all(runs)
  end
end

while index < #KEYS do
  local ok, err = pcall(decide_keys)
  if not ok then
    reply[index + 1] = failure(key, err)
  end
end
return #KEYS == 1 and reply[2].err and reply[2] or reply
