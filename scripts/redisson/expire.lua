-- Sets or clears when the limiter expires.
-- ARGV     time to live in milliseconds (empty: does not expire), template (none), tally (none)
-- Returns  1 if a key had something to set or clear, else 0
local ms = tonumber(ARGV[1])
local has_rate = read_rate()
local done = 0
for i = 1, 5 do
  if has_rate and (i == 3 or i == 5) then -- the keys of a client expire when their permits do
    redis.call('PEXPIRE', KEYS[i], math.min(ms or CENTURY, interval + 1))
  elseif ms then
    done = math.max(done, redis.call('PEXPIRE', KEYS[i], ms))
  else
    done = math.max(done, redis.call('PERSIST', KEYS[i]))
  end
end
return done
