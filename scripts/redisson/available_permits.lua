-- Returns the permits that are left, and writes nothing.
-- ARGV     template, tally
-- Returns  {status, permits, tally}
if not read_rate() then
  return {NO_RATE, 0, ''}
end
read_log(false)
if size == 0 and left and left < rate then
  return {DONE, math.max(left, 0), ''}
end
local sum = count_permits()
if not sum then
  return {AGAIN, 0, cmsgpack.pack(tally)}
end
return {DONE, math.max(rate - sum, 0), ''}
