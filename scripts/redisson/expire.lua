-- Sets or clears when the limiter expires, and returns whether there was something to set or clear.
-- ARGV     in how many milliseconds (empty: never), tally
local known = open()
local done = 0
for i = 1, 5 do
  if ARGV[1] ~= '' then
    done = math.max(done, redis.call('PEXPIRE', KEYS[i], ARGV[1]))
  elseif known and (i == 3 or i == 5) then
    redis.call('PEXPIRE', KEYS[i], interval + 1)
  else
    done = math.max(done, redis.call('PERSIST', KEYS[i]))
  end
end
return done
