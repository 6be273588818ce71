-- Each: decides about requests to keys of one limiter, each by itself, in their order. Texts of the
-- algorithm replace STATE, MODEL (its model, to finish.lua) and FAST, its fast path. What stands
-- behind ENGINE in state.lua goes in front of the model. For a call that creates no engine, each
-- variable that the engine captures takes time: 15 of them took an eighth of a call about one key.
-- lifetime  before the items, to hold: {lifetime, grid}, doubles
-- items  for each key the number of its runs, an integer of two bytes; then for each run {count},
--        an integer of four bytes, and {cost, max_wait}, doubles: equal requests in a row. The last
--        runs are those of all further keys, too. To block, see prelude.lua. To end and renew
--        holds, for each key their number, an integer of two bytes; then for each {epoch,
--        ends, units, used, lifetime, grid}, doubles: it ends if the lifetime is 0
-- A key that the script cannot decide about, or for which the server rejects the write, has an
-- error instead of a state; the other keys are decided.
local params = ARGV[2]
local key, block -- about which the engine decides; see block.lua
local lifetime, grid = 0, 0
if action == 'hold' then
  lifetime, grid = struct.unpack('<dd', ARGV[3])
end
-- STATE

-- Creates the functions of the engine, which takes more time than most calls need.
local function create_engine()
  local cost, max_wait
-- MODEL
  local function decide()
    plan()
    return finish(too_long == 0 or not can_be_denied, wait)
  end

  -- Decides about the requests one after the other. Returns the state that they have found.
  local function decide_all(runs)
    block, first_held = nil, nil
    forget()
    local state
    for _, run in ipairs(runs) do
      cost, max_wait = run.cost, run.max_wait
      for _ = 1, run.count do
        state = decide()
        if too_long > 0 then -- so it is for the others
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

-- Returns the states of all keys; `false` for a key without one.
local function read_all()
  local is_fast = action == fast_action or action == 'holds' and fast_action == 'hold'
  return is_fast and call('MGET', unpack(KEYS))
end

if action == 'release' then
  key = KEYS[1]
  local ok, err = pcall(engine().decide_all, {{count = 1}})
  return ok and {now} or failure(key, err)
end

-- FAST
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

-- Stores what the fast path grants. Returns the state that it has found.
local function apply(found, used, ...)
  return found and (not used or write(key, found, used, ...)) and found
end

-- A block has one request, of no cost; its items are read where it begins.
local reply, runs, position, index = {now}, {{count = 1, max_wait = 0}}, 1, 0
-- Decides about the keys behind `index`, which is the key at work.
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

-- One `pcall` for all keys costs nothing per key.
while index < #KEYS do
  local ok, err = pcall(decide_keys)
  if not ok then
    reply[index + 1] = failure(key, err)
  end
end
return #KEYS == 1 and reply[2].err and reply[2] or reply
