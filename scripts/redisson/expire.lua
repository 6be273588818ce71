-- Sets or clears when the limiter expires, and returns whether there was something to set or clear.
-- ARGV     in how many milliseconds (empty: never), template (none), tally (none)
local ms = tonumber(ARGV[1])
local known = open()
local done = 0
for i = 1, 5 do
  if known and (i == 3 or i == 5) then -- a client's keep no longer than they count
    redis.call('PEXPIRE', KEYS[i], math.min(ms or CENTURY, interval + 1))
  elseif ms then
    done = math.max(done, redis.call('PEXPIRE', KEYS[i], ms))
  else
    done = math.max(done, redis.call('PERSIST', KEYS[i]))
  end
end
return done
