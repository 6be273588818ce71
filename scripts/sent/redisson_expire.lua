-- expire of a limiter in Redisson's format.
-- Written by a test: edit the files that it consists of, whose comments are not sent:
-- ARGS, redisson/limits.lua, redisson/rate.lua, redisson/expire.lua
-- EVALSHA names the text below this line f3c16baa9d67adc431eb9e8726454ae97e4ac2a1
local ARGS = 1
local SHORT, HEAD, MAX_ENTRIES = 8, 128, 1000
local MAX_PERMITS, MAX_EXACT, CENTURY = 2147483647, 2 ^ 53, 36525 * 86400000
local DENIED, DONE, ABOVE_RATE, NO_RATE, AGAIN, PER_CLIENT = 0, 1, 2, 3, 4, 5
local NEWEST, OLDEST, IS_USUAL, USUAL_LENGTH = '<Bdddc21', 'dc21ddd', 1, 99
local template_text, previous_tally = ARGV[ARGS + 1] or '', ARGV[ARGS + 2] or ''

local rate, interval, keep_alive, per_client
local left_key, log, tally_key
local is_new, is_foreign
local inherited

local function integer(text, max)
  return text and string.find(text, '^%d+$') and math.min(tonumber(text), max) or nil
end

local function use(config)
  rate, interval = integer(config[1], MAX_EXACT), integer(config[2], CENTURY)
  keep_alive = integer(config[4], CENTURY) or 0
  per_client = config[3] == '1'
  local i = per_client and 1 or 0
  left_key, log, tally_key = KEYS[2 + i], KEYS[4 + i], KEYS[6 + i]
  if #KEYS == 4 then
    left_key, log, tally_key = KEYS[2], KEYS[3], KEYS[4]
  end
  return rate and interval and interval > 0 and (per_client or config[3] == '0')
end

local function as_template(config)
  return table.concat(config, ' ', 1, 3)
end

local function read_rate()
  local config = redis.call('HMGET', KEYS[1], 'rate', 'interval', 'type', 'keepAliveTime',
    'template')
  is_new = not use(config)
  is_foreign = is_new and not (config[1] or config[2]) and redis.call('EXISTS', KEYS[1]) == 1
  if template_text ~= '' then
    local template = {string.match(template_text, '^(%d+) (%d+) (%d) (%d+)$')}
    local follows = config[5] and not is_new and config[5] == as_template(config)
    if template[1] and (is_new or follows and config[5] ~= as_template(template)) then
      inherited = template
      return use(inherited)
    end
  end
  return not is_new
end

local function set(config, template)
  assert(not is_foreign, 'the key of the limiter holds something else; use another name')
  redis.call('HSET', KEYS[1], 'rate', config[1], 'interval', config[2], 'type', config[3],
    'keepAliveTime', config[4])
  if template then
    redis.call('HSET', KEYS[1], 'template', template)
  else
    redis.call('HDEL', KEYS[1], 'template')
  end
  use(config)
  if keep_alive > 0 then
    redis.call('PEXPIRE', KEYS[1], math.max(keep_alive, interval))
  end
  if is_new and redis.call('EXISTS', log) == 0 then
    redis.call('DEL', left_key)
  end
end
local ms = tonumber(ARGV[1])
local has_rate = read_rate()
local done = 0
for i = 1, 5 do
  if has_rate and (i == 3 or i == 5) then
    redis.call('PEXPIRE', KEYS[i], math.min(ms or CENTURY, interval + 1))
  elseif ms then
    done = math.max(done, redis.call('PEXPIRE', KEYS[i], ms))
  else
    done = math.max(done, redis.call('PERSIST', KEYS[i]))
  end
end
return done
