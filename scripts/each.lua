-- Each: decides about several keys of one limiter, each by itself. The text of the algorithm, model
-- to engine, replaces BODY, and finish.lua FINISH.
local reply = {now}
for i = 1, #KEYS do
  local key, params = KEYS[i], ARGV[2]
  local cost, max_wait = struct.unpack('<dd', items, 16 * i - 15)
-- BODY
  local admitted, state = excess == 0 or not can_be_denied
-- FINISH
  reply[i + 1] = state
end
return reply
