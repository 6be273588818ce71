-- Combine: decides about several limits for one request. All of them admit the request or none, and
-- it waits as long as the longest wait of a limit.
-- `algorithms` has the function of each algorithm under its letter; see algorithm.lua.
local limits, wait, too_long, denies = {}, 0, 0, nil
local is_plain = action == 'check' or action == 'hold'
for i = 1, #KEYS do
  local cost, max_wait, lifetime, grid = nil, nil, 0, 0
  if action == 'hold' then
    cost, max_wait, lifetime, grid = struct.unpack('<dddd', items, 32 * i - 31)
  else
    cost, max_wait = struct.unpack('<dd', items, 16 * i - 15)
  end
  if lifetime > 0 then
    max_wait = 0 -- a hold reserves no instant
  end
  limits[i] = {cost = cost, max_wait = max_wait, lifetime = lifetime, grid = grid}
  is_plain = is_plain and max_wait == 0
end

local key -- of the limit at work, for an error
local reply = {now}
local function decide_all()
  for i, limit in ipairs(limits) do
    local params, over = ARGV[i + 1], nil
    local decide = algorithms[string.byte(params)]
    key = KEYS[i]
    limit.wait, over, limit.finish =
      decide(key, params, limit.cost, limit.max_wait, limit.lifetime, limit.grid, is_plain)
    wait = math.max(wait, limit.wait)
    if can_be_denied and over > too_long then
      too_long, denies = over, i - 1
    end
  end
  reply[#KEYS + 2] = denies
  for i, limit in ipairs(limits) do
    key = KEYS[i]
    if can_be_denied then
      reply[i + 1] = limit.finish(too_long == 0, wait)
    else -- units that are spent for one limit do not wait for another
      reply[i + 1] = limit.finish(true, limit.wait)
    end
  end
end

local ok, err = pcall(decide_all)
return ok and reply or failure(key, err)
