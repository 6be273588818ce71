-- Tells the rate.
-- ARGV     template, tally (none)
-- Returns  {status, rate, interval, whether it is per client, keepAliveTime}
if not open() then
  return {NO_RATE, 0, 0, 0, 0}
end
return {DONE, rate, interval, per_client and 1 or 0, keep_alive}
