-- Verdict: a request is admitted by all of its limits or by none, and then goes on when the last of them
-- lets it. The one that binds is that, or the one that denies longest, or the one with least remaining.
local settles, wait, late, binding = {}, 0, 0, 1
local arg = 2
for i = 1, #KEYS / 2 do
  local cost, max_wait = tonumber(ARGV[arg + 2]), tonumber(ARGV[arg + 3])
  local needed = (action == 'check' or action == 'peek') and cost or -math.huge
  local own_wait, own_late, settle = algorithms[ARGV[arg + 1]](
    KEYS[2 * i - 1], KEYS[2 * i], cost, needed, max_wait, arg + 4)
  if own_late > late or late == 0 and own_wait > wait then
    binding = i
  end
  wait, late = math.max(wait, own_wait), math.max(late, own_late)
  settles[i] = settle
  arg = arg + 4 + tonumber(ARGV[arg + 4])
end

local admitted = late == 0 or action == 'spend'
local remaining, replenish, reset
for i, settle in ipairs(settles) do
  local own_remaining, own_replenish, own_reset = settle(admitted, wait)
  if wait == 0 and i > 1 and own_remaining < remaining then
    binding = i
  end
  if i == 1 or i == binding then
    remaining, replenish, reset = own_remaining, own_replenish, own_reset
  end
end
if not admitted then
  wait = late
end
return {admitted and 1 or 0, wait, remaining, replenish, reset, now + wait, binding}
