-- Each: decides about requests to keys of one limiter, each by itself. Texts replace STATE, the
-- parameters of the algorithm; PLAIN, its fast path; and MODEL, its model to finish.lua. FAST is
-- fast.lua, DISPATCH is dispatch.lua, and ERRORS errors.lua. What stands behind ENGINE in state.lua
-- goes in front of the model.
-- The fast paths decide about the keys that they know, and leave the others to the engine. The
-- functions of each part are made where the first key needs them: those of the engine alone would
-- take longer than most decisions.
-- lifetime  before the items, to hold: {lifetime, grid}, doubles
-- items  for each key the number of its runs, an integer of two bytes; then for each run {count},
--        an integer of four bytes, and {cost, max_wait}, doubles: equal requests in a row. The last
--        runs are those of all further keys, too. To block, see prelude.lua. To end and renew
--        holds, for each key their number, an integer of two bytes; then for each {epoch,
--        ends, units, used, lifetime, grid}, doubles: it ends if the lifetime is 0
-- A key that the script cannot decide about, or for which the server rejects the write, has an
-- error instead of a state; the other keys are decided.
local params = ARGV[2]
local key, block -- at work; see block.lua
local lifetime, grid = 0, 0
if action == 'hold' then
  lifetime, grid = struct.unpack('<dd', ARGV[3])
end
local holds = lifetime > 0 or action == 'holds'
-- Whether the fast path knows such requests, whether units are spent, and whether values are read
-- for the fast path; states replace this.
local is_common, spends, reads = can_be_denied or holds, true, true
-- `unknown` has the indexes of the keys that are not decided. By these, `asks` has what is asked,
-- `errors` the error of the server if it rejected a write, and `pending` the entries of a
-- bucket, if only these are not stored yet.
local reply, unknown, asks, errors, pending = {now, nil}, nil, nil, nil, nil
-- FAST
-- STATE

-- Returns the reply about a key: the state and, if a request is denied, how many of each run are
-- admitted.
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
-- PLAIN
  end
  local values = is_common and reads and call('MGET', unpack(KEYS))
  local position, asked, last = 1, nil, #items
  if blocks or action == 'release' then
    -- One request, of no cost; its items are read where it begins.
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
          max_wait = lifetime > 0 and 0 or max_wait -- a hold reserves no instant
          asked[j] = {count = count, cost = cost, max_wait = max_wait}
        end
      end
    end
    local found, used, a, b, c, d, e
    local write_used, written, err, entries
    if is_common then
      local value = values and values[i] or ''
-- DISPATCH
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

-- ERRORS
-- Makes the functions of the engine. Returns one that decides about a key: it takes what is asked,
-- the error of its write, entries of a bucket to store, and the state if only these are left.
-- It returns the state, none for a release, and whether a request is denied. A function can use no
-- more than 60 variables of those around it.
local function make_engine()
  local cost, max_wait
-- MODEL
  -- Decides about the requests one after the other. Returns the state that they have found.
  local function decide_all(runs)
    local state, is_denied
    for _, run in ipairs(runs) do
      cost, max_wait, run.admitted = run.cost, run.max_wait, 0
      for number = 1, run.count do
        plan()
        state = finish(too_long == 0 or not can_be_denied, wait)
        if too_long > 0 then -- so it is for the others
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
