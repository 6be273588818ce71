-- Tells what is left, and writes nothing.
-- ARGV     template, tally
-- Returns  {status, permits, tally}
if not open() then
  return {NO_RATE, 0, ''}
end
look(false)
if size == 0 and left and left < rate then
  return {DONE, math.max(left, 0), ''}
end
local sum = count()
if not sum then
  return {AGAIN, 0, packed_tally()}
end
return {DONE, math.max(rate - sum, 0), ''}
