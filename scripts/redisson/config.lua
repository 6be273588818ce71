-- Returns the rate.
-- ARGV     template, tally (none)
-- Returns  {status, rate, interval, 1 if the rate is per client else 0, keepAliveTime}
if not read_rate() then
  return {NO_RATE, 0, 0, 0, 0}
end
return {DONE, rate, interval, per_client and 1 or 0, keep_alive}
