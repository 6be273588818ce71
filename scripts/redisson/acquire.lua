-- Takes permits if that many are left.
-- ARGV     permits, id, template, tally
-- Returns  {status, wait, remaining, replenish, reset, rate, interval, tally}, in microseconds but for the
--          interval
local permits, id = tonumber(ARGV[1]), ARGV[2]

if not open() then
  return {NO_RATE, 0, 0, 0, 0, 0, 0, ''}
end
if permits > math.min(rate, LARGEST) then
  return {ABOVE_RATE, 0, 0, 0, 0, rate, interval, ''}
end

if lent then
  set(lent, as_rate(lent))
end
look(true)
local sum = count()
if not sum then
  return {AGAIN, 0, 0, 0, 0, rate, interval, stored_tally()}
end

local entry = entry_of(id, permits)
local taken = tonumber(redis.call('ZSCORE', log, entry))
local repeated = taken and taken > now - interval
local granted = repeated or sum + permits <= rate

sweep()
if granted and not repeated then
  -- Rounded up, so that it stays for a whole interval; and not before others, if their clock is ahead.
  local instant = now_ceil
  if newest and newest <= now + interval then
    instant = math.max(instant, newest)
  end
  add(instant, entry, permits)
  sum = sum + permits
end
if changed or left_text ~= as_text(rate - sum) then
  store(sum, granted and not repeated and permits or 0)
elseif keep_alive > 0 then
  extend()
end

local wait, replenish = 0, 0
if not granted then
  wait = time_until(sum + permits - rate)
end
if not granted and permits == 1 then
  replenish = wait
elseif sum > 0 then
  replenish = time_until(math.max(sum - rate, 0) + 1)
end
local reset = size > expired and leaves(newest) or 0
return {granted and DONE or DENIED, wait, math.max(rate - sum, 0), replenish, reset, rate, interval, ''}
