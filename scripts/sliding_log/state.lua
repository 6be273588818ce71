-- Sliding log: at most `limit` in any interval of length `window`, open at its old end.
-- state   for each admitted request, oldest first, {instant, cost}, integers of 7 and 4 bytes; then
--         the foot: integers of 7, 7, 7, 7, 4, 4, 4, 7 and 4 bytes, and 'S': {at, skew, window,
--         sum, dead, gone, length, oldest_at, oldest_cost}: `length` entries, of which the first
--         `gone` do not count any more; `sum` is that of the costs of the others, `dead` the number
--         of those whose cost is 0, as they were released; and the oldest of the others
--         Once a cost does not fit in four bytes: entries of 7 and 7 bytes, a foot of 7, 7, 7, 7,
--         7, 6, 6, 7 and 7 bytes, and 'Z'
-- params  'S', then doubles: {limit, window, exponent}; 2^exponent us is the power of two that is
--         at most the window
-- `at` is the time of the log: that of the clock, and `skew`, which keeps it from following a clock
-- that stepped back.
is_common, reads, forms = is_common and not holds, false, 'SZ'
local limit, new_window, exponent = struct.unpack('<ddd', params, 2)
local MAX_SUM, NARROW, WIDE = 2 ^ 52, 83, 90
local NARROW_ENTRY, NARROW_SIZE = '<I7I4', 11
local form, MAX_COST, ENTRY, ENTRY_SIZE, FOOT, FOOT_SIZE
local NEWEST -- an entry and the foot
local PAGE -- the number of entries that are read with the foot
local TAIL_SIZE, tail_text = 272, '-272' -- the size of that; a multiple of both entries and a foot
local at, skew, window, sum, dead, gone, length, oldest_at, oldest_cost
local last, last_cost
-- `first`: the number of leading entries that do not count now; `live`: the sum of the others.
local first, live, live_dead
local instants, costs
-- What was found: the foot, the sum of the entries that count, the newest one. `cuts` are the
-- instants of entries that must leave for a request, and the sums up to them.
local found_at, found_skew, found_window, found_live, found_last
-- The log that is stored, by which the key expires.
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

-- Reads the foot from the end of a value. Returns false if it is none.
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

-- Returns the entries from one to another, packed.
local function packed_entries(from, to)
  -- Numbers as arguments would be printed with more digits, which takes longer.
  local start, stop = ENTRY_SIZE * from, ENTRY_SIZE * (to + 1) - 1
  if block then
    return string.sub(block.state, start + 1, stop + 1)
  end
  return call('GETRANGE', key, string.format('%d', start), string.format('%d', stop))
end

-- Returns the log as the first request has found it, with a few entries that represent all that
-- count: the replies to the requests are the same. 'S', then doubles: {at, skew, window}, then for
-- each entry {instant, cost}.
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

-- The instant at which a key expires: when no entry counts any more, rounded up, or up to a window
-- later.
local function expiry_of(last, skew, window)
  local expires = last + window - skew
  return window == new_window and round_up(expires, 2 ^ exponent) or expires + window
end

local function foot()
  return struct.pack(FOOT, at, skew, window, sum, dead, gone, length, oldest_at, oldest_cost, form)
end

-- Uses the form for larger costs. Returns these entries in it.
local function widened(entries)
  use_form(WIDE)
  local all = {}
  for position = 1, #entries, NARROW_SIZE do
    all[#all + 1] = struct.pack(ENTRY, struct.unpack(NARROW_ENTRY, entries, position))
  end
  return table.concat(all)
end

-- Makes the bytes to store with the newest entry; from time to time without those that do not
-- count. The oldest one is known unless they are the same. `stale`: whether another clock or
-- window has counted the log. Returns the index from which the bytes replace others, if they are
-- not the whole log; the bytes; and the instant at which the key expires, if that is a new one.
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
