-- Each: decides about requests to keys of one limiter, each by itself, in their order. Texts of the
-- algorithm replace STATE, MODEL (its model, to finish.lua) and FAST, its fast path.
-- items  for each key the number of its runs, an integer of two bytes; then for each run {count,
--        cost}, integers of four bytes, and {max_wait}, a double: equal requests in a row. The last
--        runs are those of all further keys, too.
-- Of several keys, one that the script cannot decide about has `false` instead of a state: none of
-- its requests was counted. A single one is an error.
local params = ARGV[2]
local key -- about which the engine decides
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
    block, call = nil, redis.call
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

  return {decide_all = decide_all, reserve_all = reserve_all}
end

local created
local function engine()
  created = created or create_engine()
  return created
end

if action == 'release' then
  key = KEYS[1]
  engine().decide_all({{count = 1}})
  return {now}
end

-- Returns true for an error that concerns one key.
local function is_of_key(err)
  local text = type(err) == 'table' and err.err or err
  return string.find(text, FOREIGN, 1, true) or string.find(text, 'WRONGTYPE', 1, true)
end

-- Returns the states of all keys; `false` for a key without one.
local function read_all()
  return action == 'check' and call('MGET', unpack(KEYS))
end

local function read_runs(position)
  local count, runs = nil, {}
  count, position = struct.unpack('<I2', items, position)
  for i = 1, count do
    local run = {}
    run.count, run.cost, run.max_wait, position = struct.unpack('<I4I4d', items, position)
    runs[i] = run
  end
  return runs, position
end

-- FAST
-- Stores what the fast path grants. Returns the state that it has found.
local function apply(found, used, ...)
  return found and (not used or write(key, found, used, ...)) and found
end

local reply, runs, position, written = {now}, nil, 1, false
for i = 1, #KEYS do
  key = KEYS[i]
  if position <= #items then
    runs, position = read_runs(position)
  end
  local found = fast and action == 'check' and apply(fast(key, i, runs))
  if found then
    reply[i + 1], written = found, true
  elseif #KEYS == 1 then
    reply[2] = engine().decide_all(runs)
  else
    local ok, state = pcall(engine().decide_all, runs)
    if not ok and not written and not is_of_key(state) then
      error(state, 0)
    end
    reply[i + 1], written = ok and state, written or ok
  end
end
return reply
