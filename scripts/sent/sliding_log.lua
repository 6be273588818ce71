-- Decides about keys of a sliding_log limiter, one by one.
-- Written by a test: edit the files that it consists of, whose comments are not sent:
-- prelude.lua, fast.lua, each.lua with sliding_log/state.lua, hold.lua, block.lua, sliding_log/model.lua, sliding_log/log.lua, engine.lua, holding.lua, finish.lua, sliding_log/fast.lua
-- EVALSHA names the text below this line 382ee00730f4065884f75651a1ed69dca6cd78a1
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
forms = 'SZ'
local limit, new_window, exponent = struct.unpack('<ddd', params, 2)
local MAX_SUM, NARROW, WIDE = 2 ^ 52, 83, 90
local NARROW_ENTRY, NARROW_SIZE = '<I7I4', 11
local form, MAX_COST, ENTRY, ENTRY_SIZE, FOOT, FOOT_SIZE
local NEWEST
local PAGE
local TAIL_SIZE, tail_text = 272, '-272'
local at, skew, window, sum, dead, gone, length, oldest_at, oldest_cost
local last, last_cost
local first, live, live_dead
local instants, costs
local found_at, found_skew, found_window, found_live, found_last
local stored_last, stored_skew, stored_window
local cuts = {}
local committed, merges

local function use_form(letter)
  form = letter
  if letter == WIDE then
    MAX_COST, ENTRY, ENTRY_SIZE, PAGE = MAX_SUM, '<I7I7', 14, 15
    FOOT, FOOT_SIZE, NEWEST = '<I7I7I7I7I7I6I6I7I7B', 62, '<I7I7I7I7I7I7I7I6I6I7I7B'
  else
    MAX_COST, ENTRY, ENTRY_SIZE, PAGE = 2 ^ 32 - 1, NARROW_ENTRY, NARROW_SIZE, 20
    FOOT, FOOT_SIZE, NEWEST = '<I7I7I7I7I4I4I4I7I4B', 52, '<I7I4I7I7I7I7I4I4I4I7I4B'
  end
end
use_form(NARROW)

local function read_foot(tail)
  local letter = string.byte(tail, -1)
  if letter ~= form then
    use_form(letter)
  end
  if letter ~= NARROW and letter ~= WIDE or #tail <= FOOT_SIZE then
    return false
  end
  at, skew, window, sum, dead, gone, length, oldest_at, oldest_cost =
    struct.unpack(FOOT, tail, #tail - FOOT_SIZE + 1)
  return gone < length and #tail == math.min(ENTRY_SIZE * length + FOOT_SIZE, TAIL_SIZE)
end

local function packed_entries(from, to)
  local start, stop = ENTRY_SIZE * from, ENTRY_SIZE * (to + 1) - 1
  if block then
    return string.sub(block.state, start + 1, stop + 1)
  end
  return call('GETRANGE', key, string.format('%d', start), string.format('%d', stop))
end

local function condensed(cuts)
  local head = struct.pack('<Bddd', 83, found_at, found_skew, found_window)
  local parts, before = {head}, 0
  for _, cut in ipairs(cuts) do
    local instant, total = unpack(cut)
    if total > before then
      parts[#parts + 1] = struct.pack('<dd', instant, total - before)
      before = total
    end
  end
  if found_live > before then
    parts[#parts + 1] = struct.pack('<dd', found_last, found_live - before)
  end
  return table.concat(parts)
end

local function expiry_of(last, skew, window)
  local expires = last + window - skew
  return window == new_window and round_up(expires, 2 ^ exponent) or expires + window
end

local function foot()
  return struct.pack(FOOT, at, skew, window, sum, dead, gone, length, oldest_at, oldest_cost, form)
end

local function widened(entries)
  use_form(WIDE)
  local all = {}
  for position = 1, #entries, NARROW_SIZE do
    all[#all + 1] = struct.pack(ENTRY, struct.unpack(NARROW_ENTRY, entries, position))
  end
  return table.concat(all)
end

local function newest(cost, stale)
  sum, dead, gone = live, live_dead, first
  local expires, is_alone = expiry_of(last, skew, window), length - first == 1
  if is_alone or cost > MAX_COST or first > PAGE and first > length - first then
    local rest = ''
    if is_alone then
      oldest_at, oldest_cost = last, cost
      use_form(NARROW)
    else
      rest = packed_entries(first, length - 2)
    end
    if cost > MAX_COST then
      rest = widened(rest)
    end
    gone, length = 0, length - first
    return nil, rest .. struct.pack(ENTRY, last, cost) .. foot(), expires
  end
  local is_later = stale or expires > expiry_of(stored_last, stored_skew, stored_window)
  local bytes = struct.pack(NEWEST, last, cost, at, skew, window, sum, dead, gone, length,
    oldest_at, oldest_cost, form)
  return string.format('%d', ENTRY_SIZE * (length - 1)), bytes, is_later and expires
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
local tail, first_read

function drain()
  return new_window
end

local function encode() end

local function read_entries(from, to)
  local bytes, before = tail, first_read
  if from < first_read then
    bytes, before = packed_entries(from, to), from
  end
  for i = from, to do
    if not costs[i] then
      instants[i], costs[i] = struct.unpack(ENTRY, bytes, ENTRY_SIZE * (i - before) + 1)
    end
  end
end

local function instant_of(i)
  if not instants[i] then
    read_entries(i, i)
  end
  return instants[i]
end

local function leading(time)
  local low, high, step = gone, gone, 1
  while high < length and instant_of(high) <= time do
    low, high, step = high + 1, high + step, step * 2
  end
  high = math.min(high, length)
  while low < high do
    local middle = math.floor((low + high) / 2)
    if instant_of(middle) <= time then
      low = middle + 1
    else
      high = middle
    end
  end
  return low
end

local function scan(from, to, visit)
  local step, page = from <= to and 1 or -1, 1
  for i = from, to, step do
    if not costs[i] then
      local other = i + step * (page - 1)
      other = step > 0 and math.min(other, to) or math.max(other, to)
      read_entries(math.min(i, other), math.max(i, other))
      page = math.min(page * 2, 512)
    end
    if visit(i) then
      return i
    end
  end
end

local function sum_of(from, to)
  local cost_of = ENTRY_SIZE == 11 and '<I4' or '<I7'
  local units, zeros = 0, 0
  for start = from, to, 512 do
    local entries = packed_entries(start, math.min(start + 511, to))
    for position = 8, #entries, ENTRY_SIZE do
      local cost = struct.unpack(cost_of, entries, position)
      units = units + cost
      zeros = zeros + (cost == 0 and 1 or 0)
    end
  end
  return units, zeros
end

local function find_live()
  first, live, live_dead = gone, sum, dead
  if instant_of(gone) > at - window then
    return
  end
  first = leading(at - window)
  if first - gone <= length - first then
    local units, zeros = sum_of(gone, first - 1)
    live, live_dead = sum - units, dead - zeros
  else
    live, live_dead = sum_of(first, length - 1)
  end
end

local function leaving(units)
  local total, i = 0, first
  instant_of(first)
  if costs[first] >= units then
    return instants[first], costs[first]
  elseif units <= live / 2 then
    i = scan(first, length - 1, function(i)
      total = total + costs[i]
      return total >= units
    end)
    return instants[i], total
  end
  i = scan(length - 1, first, function(i)
    total = total + costs[i]
    return total > live - units
  end)
  if i then
    return instants[i], live - total + costs[i]
  end
  return last, live
end

local function first_instant(needed)
  if first == length then
    return at
  end
  local excess, instant = live + needed - limit, math.max(at, last)
  if excess <= 0 then
    return instant
  end
  local left, total = leaving(excess)
  if found_last and left < found_last then
    cuts[#cuts + 1] = {left, total}
  end
  return math.max(instant, left + window)
end

local function initial()
  at, skew, window, sum, dead, gone, length = now, 0, new_window, 0, 0, 0, 0
end

local function step_back()
  local back = now + skew < at
  if back then
    skew = at - now
  end
  return back
end

local function advance(time)
  at = time + skew
  if at < last + window then
    find_live()
  else
    at, skew, last, sum, dead, gone, length = time, 0, 0, 0, 0, 0, 0
  end
end

local function adopt()
  advance(now)
  local changed = window ~= new_window
  window = new_window
  if changed and length > 0 then
    find_live()
  end
  return changed and length > 0
end

local function earliest(needed)
  found_live = found_live or live
  return first_instant(needed) - at
end

local function commit(instant, units)
  units = math.min(units, MAX_SUM - live)
  if units == 0 then
    return
  end
  committed, instant = true, instant + skew
  merges = length > 0 and last == instant and last_cost + units <= MAX_COST
  if merges then
    live_dead = live_dead - (last_cost == 0 and 1 or 0)
    instants[length - 1], costs[length - 1] = last, last_cost + units
  else
    instants[length], costs[length] = instant, units
    last, length = instant, length + 1
  end
  live = live + units
end

local function reset_after()
  return first < length and last + window - at or 0
end

local found, stale
local reserve_all

local function forget()
  found_last, found_live, cuts, held = nil, nil, {}, nil
end

local function load()
  tail = get(tail_text, '-1')
  if open_block(string.byte(tail, -1)) then
    tail = get(tail_text, '-1')
  end
  if not held and string.byte(tail, -1) == 72 then
    open_holds(string.sub(tail, -MOST_SIZE), '')
    tail = get(tail_text, '-1')
  end
  found, stale, committed, merges = tail ~= '', false, false, false
  found = found and not (block and not block.state)
  first, live, live_dead, last, last_cost, instants, costs = 0, 0, 0, 0, 0, {}, {}
  if not found then
    return
  elseif not read_foot(tail) then
    local letter, head = string.match(string.sub(tail, -1), '%u'), get('0', '6')
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

local function found_state()
  if not found_last then
    return ''
  end
  local remaining = last <= at and math.max(limit - live, 0) or 0
  first_instant(remaining + 1)
  table.sort(cuts, function(a, b)
    return a[2] < b[2]
  end)
  return condensed(cuts)
end

function whole() end

local function expiry_now()
  return length > 0 and expiry_of(last, skew, window) or now
end

local function store()
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

local release
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

  local function refund_at(instant, units)
    local i = leading(instant - 1)
    while units > 0 and i < length and instant_of(i) == instant do
      units, i = units - lower(i, units), i + 1
    end
  end

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
      put('')
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

local function read()
  local tail = redis.pcall('GETRANGE', key, tail_text, '-1')
  if tail == '' then
    found_last, window, length, last = nil, new_window, 0, 0
    return tail
  elseif type(tail) == 'table' or not read_foot(tail) then
    return
  end
  last, last_cost = struct.unpack(ENTRY, tail, #tail - FOOT_SIZE - ENTRY_SIZE + 1)
  if window == new_window and skew == 0 and dead == 0 and now >= at and now >= last then
    found_last, found_at, found_skew, found_window = last, at, 0, window
    stored_last, stored_skew, stored_window = last, 0, window
    return tail
  end
end

local page, position, entries

local function read_page(tail)
  entries = length - gone
  if entries <= PAGE then
    page, position = tail, #tail - FOOT_SIZE - ENTRY_SIZE * entries + 1
  else
    page, position, entries = packed_entries(gone, gone + PAGE - 1), 1, PAGE
  end
end

local function find_oldest(tail)
  page, first, live, live_dead = nil, gone, sum, 0
  if tail == '' or last + window <= now then
    first, length, gone, live = 0, 0, 0, 0
    return true
  elseif oldest_at > now - window then
    return true
  end
  read_page(tail)
  while entries > 0 do
    oldest_at, oldest_cost = struct.unpack(ENTRY, page, position)
    if oldest_at > now - window then
      return true
    end
    first, live = first + 1, live - oldest_cost
    position, entries = position + ENTRY_SIZE, entries - 1
  end
end

local function found_until(units, tail)
  if not found_last then
    return ''
  elseif length == 0 then
    return struct.pack('<Bddd', 83, found_at, 0, window)
  elseif oldest_cost >= units and oldest_cost < live then
    return struct.pack('<Bddddddd', 83, found_at, 0, window, oldest_at, oldest_cost, last,
      live - oldest_cost)
  elseif not page then
    read_page(tail)
  end
  local total, i = 0, 0
  cuts = {}
  while total < units and i < entries do
    local instant, cost = struct.unpack(ENTRY, page, position + ENTRY_SIZE * i)
    total, i = total + cost, i + 1
    cuts[i] = {instant, total}
  end
  found_live = live
  return (total >= units or i == length - first) and condensed(cuts)
end

local function fast(_, _, runs)
  local tail = read()
  if not tail or not find_oldest(tail) then
    return
  end
  local used, missing = use(live, limit, 1, runs)
  local state = used and found_until(math.max(live + 1 - limit, 1, missing), tail)
  if state then
    return state, used > live and used
  end
end

local function write(_, _, used)
  local granted = used - live
  at, skew, live = now, 0, used
  if length == 0 or last < now or last_cost + granted > MAX_COST then
    last, last_cost, length = now, 0, length + 1
  end
  local start, bytes, expires = newest(last_cost + granted, false)
  if not start then
    call('SET', key, bytes, 'PXAT', expire_at(expires))
    return true
  end
  call('SETRANGE', key, start, bytes)
  if expires then
    call('PEXPIREAT', key, expire_at(expires))
  end
  return true
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
