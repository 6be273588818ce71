-- Each: decides about requests to keys of one limiter, each by itself, in their order. The text of
-- the algorithm, model to engine, replaces BODY, and finish.lua FINISH.
-- A request of several whose key cannot be decided about has `false` in the place of a state:
-- nothing of it was counted. A single one is an error.
local function decide(key, params, cost, max_wait)
-- BODY
  local admitted, state = excess == 0 or not can_be_denied
-- FINISH
  return state
end

local params = ARGV[2]
if #KEYS == 1 then
  return {now, decide(KEYS[1], params, struct.unpack('<dd', items))}
end

-- Returns true for an error that concerns one key.
local function is_of_key(err)
  local text = type(err) == 'table' and err.err or tostring(err)
  return string.find(text, FOREIGN, 1, true) or string.find(text, 'WRONGTYPE', 1, true)
end

local reply, written = {now}, false
for i = 1, #KEYS do
  local cost, max_wait = struct.unpack('<dd', items, 16 * i - 15)
  local ok, state = pcall(decide, KEYS[i], params, cost, max_wait)
  if not ok and not written and not is_of_key(state) then
    error(state, 0)
  end
  written = written or ok
  reply[i + 1] = ok and state
end
return reply
