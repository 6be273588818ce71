-- Decides about keys of a token_bucket limiter, one by one.
-- Written by a test: edit the files that it consists of, whose comments are not sent:
-- prelude.lua, each.lua with bucket/state.lua, fast.lua, token_bucket/fast.lua, dispatch.lua, token_bucket/queue.lua, leaky_bucket/fast.lua, held.lua, slots.lua, errors.lua, engine.lua, block.lua, bucket/model.lua, reservations.lua, holding.lua, finish.lua
-- EVALSHA names the text below this line a8bf05b009b75c58d2402c181eba81d61aeb36dc
local action, items = ARGV[1], ARGV[#ARGV]
local can_be_denied = action == 'check' or action == 'peek' or action == 'hold'
local commits = action == 'check' or action == 'spend' or action == 'hold'
local blocks = action == 'block' or action == 'unblock'
local returns = action == 'refund' or action == 'release' or blocks

local call, try = redis.call, redis.pcall
local unpack = table.unpack or unpack
local time = call('TIME')
local now = time[1] * 1000000 + time[2]

local forms
local function round_up(time, grain)
  return math.ceil(time / grain) * grain
end

local function expire_at(time)
  if not (time > 0 and time < 2 ^ 63) then
    error('it expires at ' .. time, 0)
  end
  return string.format('%.0f', math.ceil(time / 1000))
end
local params = ARGV[2]
local key, block
local lifetime, grid = 0, 0
if action == 'hold' then
  lifetime, grid = struct.unpack('<dd', ARGV[3])
end
local holds = lifetime > 0 or action == 'holds'
local is_common, spends, reads = can_be_denied or holds, true, true
local reply, unknown, asks, errors, pending = {now, nil}, nil, nil, nil, nil

local is_denied
local waits, fast_waiting, write_waiting

local function use(used, size, parts, runs)
  local missing = 0
  for i = 1, #runs do
    local run = runs[i]
    local each = run.cost * parts
    local granted = run.count
    if used + granted * each > size then
      granted = math.max(math.floor((size - used) / each), 0)
    end
    used, run.admitted = used + granted * each, granted
    if granted < run.count then
      if run.max_wait > 0 then
        return
      end
      is_denied = true
      missing = math.max(missing, used + each - size)
    end
  end
  return used, missing
end

local function done(reply)
  if type(reply) == 'table' and reply.err then
    return false, reply.err
  end
  return reply
end

local function replace(key, found, state, expires)
  if not key then
    return state or found, expires
  elseif state == '' then
    return done(try('DEL', key))
  elseif found ~= '' then
    return done(try('SET', key, state, 'PXAT', expire_at(expires)))
  end
  return done(try('SET', key, state, 'PXAT', expire_at(expires), 'NX'))
end

local function write_held(key, _, _, value, new, expires)
  return replace(key, value, new, expires)
end
local SHORT, LONG = '<BI7I7I6I4B', '<BI7I7I6I7i6I6I3B'
local limit, overdraft, new_unit, new_period, new_lump, most, exponent =
  struct.unpack('<ddddddd', params, 2)
local grain = 2 ^ exponent
local shapes = string.byte(params) == 76
forms, reads = 'TQ', reads and not shapes
is_common = is_common and (shapes or new_period == 1 and overdraft == 0)

local function with_verdict(state, runs)
  local verdict = {}
  for j, run in ipairs(runs) do
    verdict[j] = struct.pack('<I2', run.admitted)
  end
  return {state, table.concat(verdict)}
end

do
  local fast, write, drain, pace, longest, fast_held
  if is_common then
drain, pace, longest = new_unit, new_lump, most

function fast(_, found, runs, held)
  local before, expires, old = 0, 0, exponent
  waits = false
  if #found == 26 and string.byte(found) == 84 then
    local _, at, debt, unit, lump, stored = struct.unpack(SHORT, found)
    if unit ~= new_unit or lump ~= new_lump or now < at or stored > 63 then
      return
    end
    before, old = math.max(debt - (now - at) * lump, 0), stored
    if stored == exponent then
      expires = round_up(at + math.ceil(debt / lump), grain)
    end
  elseif found ~= '' then
    waits = string.byte(found) == 81 and #found > 88
    return
  end
  local debt = use(before, (limit - held) * new_unit, new_unit, runs)
  if debt and (debt <= limit * new_unit or debt < 2 ^ 53 and debt / new_lump < most) then
    return found, debt > before and debt, expires, before, old
  end
  waits = not debt and found ~= ''
end

function write(key, found, debt, expires, before, old)
  if key and debt / new_lump <= expires - now then
    return done(try('SETRANGE', key, '1', struct.pack('<I7I7', now, debt)))
  end
  local state = debt and struct.pack(SHORT, 84, now, debt, new_unit, new_lump, exponent)
  expires = round_up(now + math.ceil((debt or before) / new_lump), debt and grain or 2 ^ old)
  return replace(key, found, state, expires)
end
  end
  local values = is_common and reads and call('MGET', unpack(KEYS))
  local position, asked, last = 1, nil, #items
  if blocks or action == 'release' then
    asked, last = {{count = 1, max_wait = 0}}, 0
  end
  for i = 1, #KEYS do
    key, is_denied = KEYS[i], false
    if position <= last then
      local runs
      runs, position = struct.unpack('<I2', items, position)
      asked = {nil}
      for j = 1, runs do
        if action == 'holds' then
          asked[j], position = {struct.unpack('<dddddd', items, position)}, position + 48
        else
          local count, cost, max_wait
          count, cost, max_wait, position = struct.unpack('<I4dd', items, position)
          max_wait = lifetime > 0 and 0 or max_wait
          asked[j] = {count = count, cost = cost, max_wait = max_wait}
        end
      end
    end
    local found, used, a, b, c, d, e
    local write_used, written, err, entries
    if is_common then
      local value = values and values[i] or ''
      write_used = write
      if not holds then
        found, used, a, b, c, d, e = fast(key, value, asked, 0)
      end
      if waits and not holds then
        if not fast_waiting then
          local usual_fast, usual_write = fast, write
local SIZE, unit, lump, full = 44, new_unit, new_lump, limit * new_unit
local at, debt, last
local PAGE, page_end = 256, '255'

local function read(key, value)
  value = reads and string.sub(value, 1, PAGE) or try('GETRANGE', key, '0', page_end)
  if type(value) == 'table' then
    return
  end
  local letter, _ = string.byte(value)
  local lumps, parts, excess, other_unit, other_lump, found = 0, 0, 0, unit, lump, exponent
  at, last = now, 0
  if letter == 81 and #value >= SIZE then
    _, at, lumps, parts, last, other_unit, other_lump, excess, found = struct.unpack(LONG, value)
  elseif letter == 84 and #value == 26 then
    _, at, parts, other_unit, other_lump, found = struct.unpack(SHORT, value)
  elseif value ~= '' then
    return
  end
  debt = lumps * lump + parts
  if other_unit == unit and other_lump == lump and excess == 0 and found == exponent
    and now >= at and debt < 2 ^ 53 then
    return value
  end
end

local function encode()
  local lumps = math.floor(debt / lump)
  local parts = debt - lumps * lump
  return struct.pack(LONG, 81, at, lumps, parts, last, unit, lump, 0, exponent)
end

local function newest_reservation(key, value)
  if #value <= SIZE then
    return
  end
  local is_other = #value < PAGE and math.max(#value - 2 * SIZE, 1) % 16 > 0
  if #value == PAGE then
    value = call('GETRANGE', key, '-16', '-1')
  end
  local instant, cost = struct.unpack('<dd', value, #value - 15)
  return instant > now and instant, is_other or not (cost >= 1 and cost <= 2 ^ 53)
end

local function grant(run, entries)
  local each, granted = run.cost * unit, 0
  local rest = shapes and 0 or full - each
  while granted < run.count do
    local wait = math.max(math.ceil((debt - rest) / lump), not shapes and last - now or 0, 0)
    if wait > run.max_wait or shapes and debt + each > full then
      is_denied = true
      break
    end
    local instant, newest = now + wait, entries[#entries]
    if newest and newest[1] == instant then
      newest[2] = newest[2] + run.cost
    elseif wait > 0 then
      entries.before = entries.before or encode()
      entries[#entries + 1] = {instant, run.cost}
    end
    if not shapes then
      debt = math.max(debt, wait * lump)
    end
    last, debt, granted = wait > 0 and instant or 0, debt + each, granted + 1
  end
  run.admitted = granted
end

local function length_of(key, value)
  local is_longer = #value == PAGE
  local length = is_longer and call('STRLEN', key) or #value
  local middle = 2 * SIZE + math.floor((length - 2 * SIZE) / 32) * 16
  local entry = is_longer and call('GETRANGE', key, middle, middle + 7)
    or string.sub(value, middle + 1, middle + 8)
  return struct.unpack('<d', entry) > now and length
end

local function store(key, value, newest, entries, expires)
  local first, head, packed = entries[1], encode(), {}
  for i, entry in ipairs(entries) do
    packed[i] = struct.pack('<dd', entry[1], entry[2])
  end
  local new = table.concat(packed)
  if first and newest then
    local length = first[1] > newest and length_of(key, value)
    if not length then
      return {head, entries.before, entries}
    elseif length < PAGE then
      head = head .. string.sub(value, SIZE + 1) .. new
    else
      call('SETRANGE', key, length, new)
    end
  elseif first then
    head = head .. entries.before .. new
  end
  local empty_at = now + math.ceil(debt / lump)
  if value == '' or #value > SIZE and not newest then
    call('SET', key, head, 'PXAT', expire_at(round_up(empty_at, grain)))
    return
  end
  call('SETRANGE', key, '0', head)
  if empty_at > expires then
    call('PEXPIREAT', key, expire_at(round_up(empty_at, grain)))
  end
end

function write(key, _, _, value, newest, entries, expires)
  local ok, left = pcall(store, key, value, newest, entries, expires)
  if ok then
    return not left, nil, left
  end
  return false, left
end

function fast(key, value, runs)
  value = read(key, value)
  if not value then
    return
  end
  local newest, is_other = newest_reservation(key, value)
  if is_other then
    return
  end
  local expires = round_up(at + math.ceil(debt / lump), grain)
  local before, entries = math.max(debt - (now - at) * lump, 0), {}
  at, debt = now, before
  for _, run in ipairs(runs) do
    grant(run, entries)
  end
  local first, is_bounded = entries[1], debt < 2 ^ 53 and debt / lump < most
  if debt == before or is_bounded and (first and first[1] >= (newest or 0)
    or not first and not newest and shapes) then
    return string.sub(value, 1, SIZE), debt > before, value, newest, entries, expires
  end
end
          fast_waiting, write_waiting, fast, write = fast, write, usual_fast, usual_write
        end
        is_denied, write_used = false, write_waiting
        found, used, a, b, c, d, e = fast_waiting(key, value, asked)
      end
      if not found and drain and (holds or string.byte(value, -1) == 72) then
        if not fast_held then
local add_units, change_slots

local function read_slots(value)
  local count, mark = string.byte(value, -2, -1)
  local first = math.max(#value - 24 - 14 * (count or 0), 0)
  local letter, counts = string.byte(value, first, first + 1)
  if first == 0 or count == 0 or letter ~= 72 or mark ~= 72 or counts % 16 ~= count then
    return first
  end
  local _, _, epoch, at, skew, position = struct.unpack('<BBI7I7I7', value, first)
  local slots, joined = {nil, nil}, 0
  for i = 1, count do
    local ends, units
    ends, units, position = struct.unpack('<I7I7', value, position)
    if units > 0 then
      slots[#slots + 1], slots[#slots + 2] = ends, units
      joined = i == (counts - count) / 16 and ends or joined
    end
  end
  return first, slots, epoch, at, skew, joined
end

local function pack_slots(slots, epoch, at, skew, joined, count)
  local size, last = #slots, 0
  while last < size and slots[last + 1] <= joined do
    last = last + 2
  end
  count = math.max(count or 0, size / 2)
  for i = size + 1, 2 * count do
    slots[i] = 0
  end
  slots[2 * count + 1], slots[2 * count + 2] = count, 72
  local form = count == 1 and '<BBI7I7I7I7I7BB'
    or '<BBI7I7I7' .. string.rep('I7', 2 * count) .. 'BB'
  local bytes = struct.pack(form, 72, count + 8 * last, epoch, at, skew, unpack(slots))
  for i = #slots, size + 1, -1 do
    slots[i] = nil
  end
  return bytes
end

local function total_of(slots)
  local sum = 0
  for i = 2, #slots, 2 do
    sum = sum + slots[i]
  end
  return math.min(sum, 2 ^ 53)
end

if action == 'hold' or action == 'holds' then
  function add_units(slots, ends, units, joined)
    local i = #slots + 1
    while i > 1 and slots[i - 2] >= ends do
      i = i - 2
    end
    if slots[i] == ends then
      slots[i + 1] = slots[i + 1] + units
      return joined
    end
    table.insert(slots, i, units)
    table.insert(slots, i, ends)
    if #slots <= 18 then
      return joined
    end
    local nearest = 1
    for j = 3, 17, 2 do
      if slots[j + 2] - slots[j] < slots[nearest + 2] - slots[nearest] then
        nearest = j
      end
    end
    table.remove(slots, nearest)
    units = table.remove(slots, nearest)
    slots[nearest + 1] = slots[nearest + 1] + units
    return math.max(joined, slots[nearest])
  end
end

if action == 'holds' then
  function change_slots(changes, slots, epoch, skew, joined)
    local ENDED, LOST, EXPIRED, RENEWED = 1, 2, 3, 4
    local results, is_changed, spent, time = {}, false, 0, now + skew
    for i, change in ipairs(changes) do
      local of, ends, units, used, lifetime, grid = unpack(change, 1, 6)
      local is_known, result, renewed = slots[1] and of == epoch, EXPIRED, 0
      if is_known and ends > time then
        local left, last, rest, still = {nil, nil}, math.max(ends, joined), units, 0
        for j = 1, #slots, 2 do
          local taken = slots[j] >= ends and slots[j] <= last and math.min(slots[j + 1], rest) or 0
          rest = rest - taken
          if slots[j + 1] > taken then
            left[#left + 1], left[#left + 2] = slots[j], slots[j + 1] - taken
            still = slots[j] <= joined and slots[j] or still
          end
        end
        slots, joined, is_changed = left, still, true
      end
      if ends <= time then
        spent = spent + (lifetime > 0 and 0 or math.max(used - units, 0))
      elseif lifetime > 0 then
        if not slots[1] and not is_known then
          epoch, skew, joined = now, 0, 0
        end
        lifetime = is_known and math.max(lifetime, ends - time) or lifetime
        renewed = math.ceil((now + skew + lifetime) / grid) * grid
        result, is_changed, joined = RENEWED, true, add_units(slots, renewed, units, joined)
      else
        result, spent = is_known and ENDED or LOST, spent + used
      end
      results[i] = struct.pack('<ddd', result, epoch, renewed)
    end
    return table.concat(results), is_changed, spent, slots, epoch, skew, joined
  end
end

function fast_held(value, asked)
  local first, slots, epoch, at, skew, joined = #value + 1, {nil, nil}, 0, 0, 0, 0
  if string.byte(value, -1) == 72 then
    first, slots, epoch, at, skew, joined = read_slots(value)
    if not slots or now + skew < at or #value ~= first + 24 + 7 * #slots
      or slots[1] <= now + skew and (spends or action == 'holds') then
      return
    end
    while slots[1] and slots[1] <= now + skew do
      table.remove(slots, 1)
      table.remove(slots, 1)
    end
  end
  local held, results, is_changed, spent = -math.huge, nil, false, nil
  if action == 'holds' then
    results, is_changed, spent, slots, epoch, skew, joined =
      change_slots(asked, slots, epoch, skew, joined)
    asked = {{count = 1, cost = spent, max_wait = 0}}
  else
    held = total_of(slots)
  end
  local state, used, a, b, c, d = fast(key, string.sub(value, 1, first - 1), asked, held)
  if not state then
    return
  end
  if lifetime > 0 then
    local units = 0
    for _, run in ipairs(asked) do
      units = units + run.admitted * run.cost
    end
    if units > 0 then
      if not slots[1] then
        epoch, skew, joined = now, 0, 0
      end
      joined = add_units(slots, math.ceil((now + skew + lifetime) / grid) * grid, units, joined)
    end
    used, is_changed = false, units > 0
  end
  results = results or string.sub(value, first) .. state
  if not used and not is_changed then
    return results
  end
  at = is_changed and now + skew or at
  local new, expires = write(nil, state, used, a, b, c, d)
  if slots[1] then
    new = new .. pack_slots(slots, epoch, at, skew, joined)
    local parts = total_of(slots) * drain
    local time = parts < 2 ^ 53 and math.ceil(parts / pace) or math.floor(parts / pace) + 1
    expires = math.max(expires, slots[#slots - 1] - skew) + math.min(time, longest)
  end
  return results, true, value, new, expires
end
        end
        is_denied, write_used = false, write_held
        found, used, a, b, c = fast_held(value, asked)
      end
      written = found and (not used or action == 'peek')
      if found and not written then
        written, err, entries = write_used(key, found, used, a, b, c, d, e)
      end
    end
    reply[i + 1] = found and is_denied and with_verdict(found, asked) or found
    if not written then
      if not unknown then
        unknown, asks, errors, pending = {}, {}, {}, {}
      end
      unknown[#unknown + 1], asks[i], errors[i], pending[i] = i, asked, err, entries
    end
  end
end
if not unknown then
  return reply
end

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
local function make_engine()
  local cost, max_wait
local size, size_text = 44, '44'
local wait, too_long
local initial, encode, step_back, advance, adopt, earliest, commit, reset_after, drain
local decode, expiry, refund, fits_beside, size_of
local found, stale
local forget, load, found_state, whole, expiry_now, store, release, reserve_all
local get, state_length, put, patch, in_block, open_block
local is_fresh
local held, first_held
local make_holding, open_holds, held_total, packed_holds, inside, skew_at, touch, hold, held_until
local expire_holds, store_slots, change_holds
local clock = now
local capacity, limit = limit, limit

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
    local rest = block.ends - now
    wait, full = math.max(wait, rest), full and full > rest and full or 0
  end
  too_long = fits and math.max(wait - max_wait, full or 0) or math.huge
end

local is_behind, has_stepped_back

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

local function plan()
  if block and not block.state then
    block = nil
  end
  open_key()
  if not first_held then
    first_held = held and held.slots[1] and packed_holds() or ''
  end
  plan_loaded()
end

local function described(state)
  state = (first_held or '') .. state
  return block and block.ends > now and in_block(state) or state
end

function in_block(state)
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

function put(state, expires)
  is_fresh = false
  if held then
    held.length = #state
    if held.slots[1] then
      state, expires = state .. packed_holds(), held_until(expires)
      held.count, held.changed = #held.slots / 2, false
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

function patch(from, bytes, expires)
  is_fresh = false
  if held then
    from, expires = tonumber(from), expires and held_until(expires)
    if from + #bytes > held.length then
      held.length, held.count = from + #bytes, math.max(held.count, #held.slots / 2)
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

function open_block(letter)
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
    if can_be_denied and ends - now > max_wait and action ~= 'peek' then
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
do
local at, lumps, parts, last, unit, period, lump, excess
local grain = grain

local function debt_of(units, unit, more, lump)
  local parts = units * unit + more
  if parts >= 2 ^ 53 then
    return math.floor(parts / lump) + 1, 0
  end
  local lumps = math.floor(parts / lump)
  return lumps, parts - lumps * lump
end

local function lumps_until_paid(lumps, parts)
  return parts > 0 and lumps + 1 or lumps
end

local function raise(more_lumps, more_parts, most)
  lumps, parts = lumps + more_lumps, parts + more_parts
  if parts >= lump then
    lumps, parts = lumps + 1, parts - lump
  end
  if lumps >= most then
    lumps, parts = most, 0
  end
end

local function lowered(lumps, parts, less_lumps, less_parts)
  lumps, parts = lumps - less_lumps, parts - less_parts
  if parts < 0 then
    lumps, parts = lumps - 1, parts + lump
  end
  if lumps < 0 then
    return 0, 0
  end
  return lumps, parts
end

local function longest(period)
  return math.ceil(3155760000000000 / period)
end

local function is_full()
  return lumps == 0 and parts == 0
end

local function lower(less_lumps, less_parts)
  lumps, parts = lowered(lumps, parts, less_lumps, less_parts)
  if is_full() then
    excess = 0
  end
end

local function time_until(rest)
  local needed = lumps - math.floor((rest - parts) / lump)
  return math.max(needed * period - (now - at), 0)
end

local function bound_last()
  last = math.min(last, at + lumps_until_paid(lumps, parts) * period)
end

local function restart_refill(last)
  if last - at >= period then
    at = last + 1 - period
  end
  if at > now then
    local before = math.ceil((at - now) / period)
    at = at - before * period
    raise(before, 0, most)
  end
  if last > now then
    bound_last()
  end
end

local function convert()
  local last = math.max(last, at)
  advance(last)
  local debt = lumps * lump + parts
  local units = math.floor(debt / unit)
  local rest = debt - units * unit - excess / 2 ^ 24
  if debt >= 2 ^ 53 then
    units, rest = units + 1, 0
  end
  local exact = rest / unit * new_unit
  local more = math.ceil(exact)
  excess = math.min(math.floor((more - exact) * 2 ^ 24), 2 ^ 24 - 1)
  unit, period, lump = new_unit, new_period, new_lump
  lumps, parts = debt_of(units, unit, more, lump)
  raise(0, 0, most)
  restart_refill(last)
end

local function is_foreign()
  return unit ~= new_unit or period ~= new_period or lump ~= new_lump
end

function drain(units)
  local needed = lumps_until_paid(debt_of(units, new_unit, 0, new_lump))
  return math.min(needed, most) * new_period
end

function fits_beside(units)
  return units <= limit + overdraft and limit + (overdraft > 0 and 1 or 0) >= 1
end

function initial()
  at, lumps, parts, excess, last, grain = now, 0, 0, 0, 0, 2 ^ exponent
  unit, period, lump = new_unit, new_period, new_lump
end

function decode(state)
  local letter, other = string.byte(state)
  if letter == 84 and #state == 26 then
    letter, at, parts, unit, lump, other = struct.unpack(SHORT, state)
    period, last, excess = 1, 0, 0
    lumps, parts = debt_of(0, unit, parts, lump)
  elseif letter == 81 and #state >= size then
    local per
    letter, at, lumps, parts, last, per, lump, excess, other = struct.unpack(LONG, state)
    unit, period = per < 0 and 1 or per, per < 0 and -per or 1
  else
    fail(key)
  end
  if unit * lump == 0 then
    fail(key)
  end
  grain = 2 ^ other
  return state
end

function encode(waits)
  local debt = lumps * lump + parts
  grain = 2 ^ exponent
  if waits or shapes or period ~= 1 or last > 0 or excess > 0 or debt >= 2 ^ 53 then
    local per = period == 1 and unit or -period
    return struct.pack(LONG, 81, at, lumps, parts, last, per, lump, excess, exponent)
  end
  return struct.pack(SHORT, 84, at, debt, unit, lump, exponent)
end

function step_back()
  local back = at - now
  if back > 0 then
    at, last = now, math.max(last - back, 0)
  end
  return back > 0
end

function advance(time)
  local passed = math.floor((time - at) / period)
  at = at + passed * period
  lower(passed, 0)
end

function adopt()
  local changed = is_foreign()
  if changed and reset_after() > 0 then
    convert()
  elseif changed then
    initial()
  end
  advance(now)
  if is_full() then
    at = now
  end
  return changed
end

function earliest(needed)
  if shapes then
    return time_until(0), time_until(limit * unit - needed * unit)
  end
  local wait = math.max(last - now, 0)
  if needed > 0 then
    local covered = math.max(needed - overdraft, 0)
    wait = math.max(time_until(limit * unit - covered * unit), wait)
  end
  return wait
end

function commit(instant, units)
  local refilled = math.floor((instant - at) / period)
  if lumps_until_paid(lumps, parts) + (shapes and 1 or 0) <= refilled then
    lumps, parts, excess = refilled, 0, 0
  end
  local more_lumps, more_parts = debt_of(units, unit, 0, lump)
  raise(more_lumps, more_parts, is_foreign() and longest(period) or most)
  last = instant > at and instant or 0
end

if returns then
  function refund(instant, units)
    if instant and last > now then
      return
    end
    local back, rest = debt_of(units, unit, 0, lump)
    if instant then
      local refilled, of_next = math.ceil(math.max(at - instant, 0) / period), 0
      if is_foreign() then
        local passed = math.floor((now - instant) / new_period) + (shapes and 0 or 1)
        local debt = math.ceil(passed * new_lump / new_unit * unit)
        local other, of_other = debt_of(0, unit, debt, lump)
        if other >= refilled then
          refilled, of_next = other, of_other
        end
      end
      back, rest = lowered(back, rest, refilled, of_next)
    end
    if back > 0 or rest > 0 then
      lower(back, rest)
      bound_last()
    end
  end
end

function reset_after()
  return is_full() and 0 or time_until(0)
end

function expiry(reset)
  return round_up(now + reset, grain)
end
local first_found

local ENTRY = 16
local read_size = tonumber(size_text)

function forget()
  first_found, held = nil, nil
end

local function find_holds()
  local own = size_of and size_of(found) or size
  local is_longer = #found > own or own > read_size and state_length() > own
  if string.byte(found) ~= 72 and not is_longer then
    return
  end
  local tail, first = get('-151', '-1'), string.sub(found, 1, 1)
  local last = string.byte(tail, -1)
  if last == 72 then
    make_holding()
    local state = open_holds(tail, first)
    found = state and string.sub(state, 1, read_size + 1) or get('0', size_text)
  elseif last < 63 or last > 67 or math.max(state_length() - 2 * own, 1) % ENTRY > 0 then
    fail(key, first .. string.sub(tail, -1))
  end
end

function whole()
  local own = found and (size_of and size_of(found) or size)
  return is_fresh and (not found and '' or #found <= own and found)
end

function load()
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

function found_state()
  return first_found or ''
end

local function expiry_after(reset)
  return expiry and expiry(reset) or now + reset
end

function expiry_now()
  return expiry_after(reset_after())
end

local function grown(state, other)
  if #state < #other then
    decode(state)
    state = encode(true)
  end
  return state
end

local function tails()
  local function read_tail(size)
    local tail = get(size, -1)
    if #tail >= size + ENTRY and struct.unpack('<d', tail, #tail - ENTRY + 1) > now then
      return tail
    end
  end

  local function fold(tail, size, last)
    decode(string.sub(tail, 1, size))
    local position = size + 1
    local instant, cost = struct.unpack('<dd', tail, position)
    while instant <= last do
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
    return base, table.concat(packed)
  end

  return {fold = fold, lower = lower, read = read_tail, recount = recount}
end

local function reserving()
  local tails = tails()

  local function insert(head, instant, cost, more, reset, last)
    local tail = get(size, -1)
    local first, behind = tails.fold(tail, size, last), #tail + 1
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
    local base = encode(true)
    put(grown(head, base) .. base .. rest, expiry_after(reset))
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
    local folds = oldest <= now or instant < newest
    if folds or #head ~= size then
      insert(head, instant, cost, more, reset, folds and now or 0)
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

function reserve_all(head, before, entries)
  local more = {}
  for i = 2, #entries do
    more[i - 1] = struct.pack('<dd', entries[i][1], entries[i][2])
  end
  local instant, cost = entries[1][1], entries[1][2]
  decode(head)
  reserving()(head, before, instant, cost, table.concat(more), reset_after())
end

if returns then
  function release(stale, releases, are_for_others)
    local tails, entries, before = tails(), {}, nil
    local tail = not stale and tails.read(size)
    if tail then
      advance(now)
      before = are_for_others and encode(true)
      for position = tails.fold(tail, size, now), #tail, ENTRY do
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
    local base, behind = tails.recount(entries)
    local reset, waits = reset_after(), behind ~= ''
    local head = reset > 0 and encode(waits) or ''
    if waits and head == before then
      return true
    end
    put(waits and head .. grown(base, head) .. behind or head, expiry_after(reset))
  end
end

function store(before, instant)
  local reset = reset_after()
  local head = before and encode(true)
  before = before and grown(before, head)
  if before and not stale then
    reserving()(head, before, instant, cost, '', reset)
  elseif before then
    put(head .. before .. struct.pack('<dd', instant, cost), expiry_after(reset))
  elseif reset == 0 then
    put('')
  elseif found and #found > size and not stale then
    head = encode(true)
    local tails, value = tails(), nil
    local tail = tails.read(size)
    if tail then
      local position = tails.fold(tail, size, now)
      commit(now + earliest(-math.huge), cost)
      local base = encode(true)
      value = grown(head, base) .. base .. string.sub(tail, position)
    end
    put(value or encode(), expiry_after(reset))
  else
    put(encode(), expiry_after(reset))
  end
end
end

function make_holding()
  if hold then
    return
  end
local add_units, change_slots

local function read_slots(value)
  local count, mark = string.byte(value, -2, -1)
  local first = math.max(#value - 24 - 14 * (count or 0), 0)
  local letter, counts = string.byte(value, first, first + 1)
  if first == 0 or count == 0 or letter ~= 72 or mark ~= 72 or counts % 16 ~= count then
    return first
  end
  local _, _, epoch, at, skew, position = struct.unpack('<BBI7I7I7', value, first)
  local slots, joined = {nil, nil}, 0
  for i = 1, count do
    local ends, units
    ends, units, position = struct.unpack('<I7I7', value, position)
    if units > 0 then
      slots[#slots + 1], slots[#slots + 2] = ends, units
      joined = i == (counts - count) / 16 and ends or joined
    end
  end
  return first, slots, epoch, at, skew, joined
end

local function pack_slots(slots, epoch, at, skew, joined, count)
  local size, last = #slots, 0
  while last < size and slots[last + 1] <= joined do
    last = last + 2
  end
  count = math.max(count or 0, size / 2)
  for i = size + 1, 2 * count do
    slots[i] = 0
  end
  slots[2 * count + 1], slots[2 * count + 2] = count, 72
  local form = count == 1 and '<BBI7I7I7I7I7BB'
    or '<BBI7I7I7' .. string.rep('I7', 2 * count) .. 'BB'
  local bytes = struct.pack(form, 72, count + 8 * last, epoch, at, skew, unpack(slots))
  for i = #slots, size + 1, -1 do
    slots[i] = nil
  end
  return bytes
end

local function total_of(slots)
  local sum = 0
  for i = 2, #slots, 2 do
    sum = sum + slots[i]
  end
  return math.min(sum, 2 ^ 53)
end

if action == 'hold' or action == 'holds' then
  function add_units(slots, ends, units, joined)
    local i = #slots + 1
    while i > 1 and slots[i - 2] >= ends do
      i = i - 2
    end
    if slots[i] == ends then
      slots[i + 1] = slots[i + 1] + units
      return joined
    end
    table.insert(slots, i, units)
    table.insert(slots, i, ends)
    if #slots <= 18 then
      return joined
    end
    local nearest = 1
    for j = 3, 17, 2 do
      if slots[j + 2] - slots[j] < slots[nearest + 2] - slots[nearest] then
        nearest = j
      end
    end
    table.remove(slots, nearest)
    units = table.remove(slots, nearest)
    slots[nearest + 1] = slots[nearest + 1] + units
    return math.max(joined, slots[nearest])
  end
end

if action == 'holds' then
  function change_slots(changes, slots, epoch, skew, joined)
    local ENDED, LOST, EXPIRED, RENEWED = 1, 2, 3, 4
    local results, is_changed, spent, time = {}, false, 0, now + skew
    for i, change in ipairs(changes) do
      local of, ends, units, used, lifetime, grid = unpack(change, 1, 6)
      local is_known, result, renewed = slots[1] and of == epoch, EXPIRED, 0
      if is_known and ends > time then
        local left, last, rest, still = {nil, nil}, math.max(ends, joined), units, 0
        for j = 1, #slots, 2 do
          local taken = slots[j] >= ends and slots[j] <= last and math.min(slots[j + 1], rest) or 0
          rest = rest - taken
          if slots[j + 1] > taken then
            left[#left + 1], left[#left + 2] = slots[j], slots[j + 1] - taken
            still = slots[j] <= joined and slots[j] or still
          end
        end
        slots, joined, is_changed = left, still, true
      end
      if ends <= time then
        spent = spent + (lifetime > 0 and 0 or math.max(used - units, 0))
      elseif lifetime > 0 then
        if not slots[1] and not is_known then
          epoch, skew, joined = now, 0, 0
        end
        lifetime = is_known and math.max(lifetime, ends - time) or lifetime
        renewed = math.ceil((now + skew + lifetime) / grid) * grid
        result, is_changed, joined = RENEWED, true, add_units(slots, renewed, units, joined)
      else
        result, spent = is_known and ENDED or LOST, spent + used
      end
      results[i] = struct.pack('<ddd', result, epoch, renewed)
    end
    return table.concat(results), is_changed, spent, slots, epoch, skew, joined
  end
end

  function held_total()
    return total_of(held.slots)
  end

  function packed_holds(count)
    return pack_slots(held.slots, held.epoch, held.at, held.skew, held.joined, count)
  end

  function open_holds(tail, first)
    local position, slots, epoch, at, skew, joined = read_slots(tail)
    if not slots then
      fail(key, first .. string.sub(tail, position, position))
    end
    local is_all = #tail < 151
    local length = (is_all and 0 or state_length() - #tail) + position - 1
    held = {slots = slots, epoch = epoch, at = at, skew = skew, joined = joined,
      count = string.byte(tail, -2), length = length}
    return is_all and string.sub(tail, 1, length)
  end

  function inside(from, to)
    from, to = tonumber(from), tonumber(to)
    from = from < 0 and math.max(from + held.length, 0) or from
    return from, math.min(to < 0 and to + held.length or to, held.length - 1)
  end

  function skew_at()
    return clock + held.skew < held.at and held.at - clock or held.skew
  end

  function touch()
    held.skew = skew_at()
    held.at, held.changed = clock + held.skew, true
  end

  local function held_or_none()
    local state = not held and whole()
    return held or {slots = {}, epoch = 0, at = 0, skew = 0, joined = 0, count = 0,
      length = state and #state or state_length()}
  end

  function hold(units, lifetime, grid)
    held = held_or_none()
    if not held.slots[1] then
      held.epoch, held.at, held.skew, held.joined = clock, clock, 0, 0
    end
    touch()
    local ends = math.ceil((held.at + lifetime) / grid) * grid
    held.joined = add_units(held.slots, ends, units, held.joined)
  end

  function held_until(expires)
    local slots = held.slots
    local last = slots[1] and slots[#slots - 1] - skew_at() or 0
    return math.max(expires or clock, last) + drain(held_total())
  end

  local function spend_at(instant, units)
    local saved = {now, cost, max_wait, can_be_denied, returns}
    now, cost, max_wait, can_be_denied, returns = instant, units, 0, false, false
    load()
    plan_loaded()
    commit(now + wait, cost)
    store()
    now, cost, max_wait, can_be_denied, returns = unpack(saved, 1, 5)
  end

  function expire_holds()
    local time = clock + skew_at()
    local function next_end()
      local first = held and held.slots[1]
      return first and first <= time and table.remove(held.slots, 1)
    end
    local ends = next_end()
    if not ends then
      return false
    end
    block = block or {ends = 0, state = call('GETRANGE', key, '0', '-1')}
    touch()
    while ends do
      local units = table.remove(held.slots, 1)
      held.changed, held.joined = true, ends < held.joined and held.joined or 0
      spend_at(ends - held.skew, units)
      ends = next_end()
    end
    if held and held.changed then
      local state = get('0', '-1')
      held.count, held.changed = #held.slots / 2, false
      block.state = state .. (held.slots[1] and packed_holds() or '')
    end
    forget()
    return true
  end

  function store_slots()
    local expires, slots, state = expiry_now(), held.slots, whole()
    if state or #slots == 0 and held.length <= 1024 or held.length == 0 then
      put(state or get('0', '-1'), expires)
      return
    end
    held.count, held.changed = math.max(held.count, #slots / 2), false
    local bytes = packed_holds(held.count)
    expires = held_until(expires)
    if block then
      block.state = string.sub(block.state, 1, held.length) .. bytes
      block.expires, block.changed = expires, true
      return
    end
    call('SETRANGE', key, held.length, bytes)
    call('PEXPIREAT', key, expire_at(expires))
  end

  function change_holds(changes)
    local skew = open_key()
    local changed, results, is_changed, spent = held_or_none(), nil, nil, nil
    results, is_changed, spent, changed.slots, changed.epoch, changed.skew, changed.joined =
      change_slots(changes, changed.slots, changed.epoch, skew, changed.joined)
    if is_changed then
      held = changed
      held.at, held.changed = clock + held.skew, true
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
      store_slots()
    end
    if block then
      close_block()
    end
    return results
  end
end
local finish

local function store_holds()
  if held and held.changed then
    store_slots()
  end
end

if returns then
  local function releases()
    if action == 'refund' then
      return {{nil, cost}}
    end
    local all, are_for_others = {}, true
    for position = 1, #items, 16 do
      local instant, units = struct.unpack('<dd', items, position)
      all[#all + 1] = {instant, math.abs(units)}
      are_for_others = are_for_others and units < 0
    end
    return all, are_for_others
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
    local kept
    if blocks then
      keep_state()
      block.ends = action == 'block' and math.max(block.ends, now + struct.unpack('<d', items)) or 0
    elseif found then
      kept = release(step_back(), releases())
      store_holds()
    elseif held and is_behind then
      put('')
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
      before = wait > 0 and can_be_denied and encode(true)
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
  local function decide_all(runs)
    local state, is_denied
    for _, run in ipairs(runs) do
      cost, max_wait, run.admitted = run.cost, run.max_wait, 0
      for number = 1, run.count do
        plan()
        state = finish(too_long == 0 or not can_be_denied, wait)
        if too_long > 0 then
          is_denied = can_be_denied
          break
        end
        run.admitted = number
      end
    end
    return state, is_denied
  end

  return function(runs, err, entries, state)
    block, first_held = nil, nil
    forget()
    if err then
      error(err, 0)
    elseif entries then
      reserve_all(unpack(entries, 1, 3))
      return state
    elseif action == 'holds' then
      make_holding()
      cost, max_wait = 0, 0
      return change_holds(runs)
    end
    return decide_all(runs)
  end
end

local decide = make_engine()
for _, i in ipairs(unknown) do
  key = KEYS[i]
  local ok, result, is_denied = pcall(decide, asks[i], errors[i], pending[i], reply[i + 1])
  if not ok then
    result = failure(key, result)
  elseif is_denied then
    result = with_verdict(result, asks[i])
  end
  reply[i + 1] = result or nil
end
return #KEYS == 1 and reply[2] and reply[2].err and reply[2] or reply
