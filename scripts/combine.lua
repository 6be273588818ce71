-- Combine: decides about several limits for one request. All of them admit the request or none, and
-- it waits as long as the longest wait of a limit.
-- `algorithms` has the function of each algorithm under its letter; see algorithm.lua.
local limits, wait, too_long = {}, 0, 0
for i, key in ipairs(KEYS) do
  local params = ARGV[i + 1]
  local cost, max_wait = struct.unpack('<dd', items, 16 * i - 15)
  local own, over, finish = algorithms[string.byte(params)](key, params, cost, max_wait)
  limits[i] = {finish = finish, wait = own}
  wait, too_long = math.max(wait, own), math.max(too_long, over)
end

local reply = {now}
for i, limit in ipairs(limits) do
  if can_be_denied then
    reply[i + 1] = limit.finish(too_long == 0, wait)
  else -- units that are spent for one limit do not wait for another
    reply[i + 1] = limit.finish(true, limit.wait)
  end
end
return reply
