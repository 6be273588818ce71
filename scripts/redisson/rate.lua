-- Redisson's rate limiter: at most `rate` permits in any interval. This file reads and sets the
-- rate; it precedes each script of this folder, and log.lua follows it where a script uses the log.
-- KEYS[1]    a hash: rate, interval, type (0 overall, 1 per client), keepAliveTime (0 for none).
--            This crate adds the field template: the first three, if they were inherited from a
--            template
-- KEYS[2]    the permits that are left, an integer as text, which may be negative
-- KEYS[3]    the same for this client
-- KEYS[4]    the log: a sorted set of {length, id, permits} (1, `length` and 4 bytes), scored by
--            the time of the acquire
-- KEYS[5]    the same for this client
-- KEYS[6]    added by this crate: the tally of a log that is long, or that has entries of a clock
--            far ahead; see log.lua
-- KEYS[7]    the same for this client
-- ARGV       after the ARGS arguments of the script, both or none of:
--            rate, interval, type and keepAliveTime of the template, or empty
--            the tally that the previous call returned, or empty
-- Times are in milliseconds; all numbers are integers below 2^53.
-- Redisson's scripts may run between two calls. They add to the log and drop its oldest entries,
-- and change the permits left by the same amount. So the permits left and all permits in the log
-- must add up to the rate.
local template_text, previous_tally = ARGV[ARGS + 1] or '', ARGV[ARGS + 2] or ''

local rate, interval, keep_alive, per_client
local left_key, log, tally_key
-- The hash has no valid rate; it has neither rate nor interval, but other fields.
local is_new, is_foreign
-- The rate of the template, if it is still to be written to the hash.
local inherited

local function integer(text, max)
  return text and string.find(text, '^%d+$') and math.min(tonumber(text), max) or nil
end

-- Returns whether the fields are a rate. They are checked because any client can write them.
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

-- Reads the rate, and returns whether there is one. The template's rate applies if the hash has
-- none, or still has the one that it inherited before.
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
  if is_new and redis.call('EXISTS', log) == 0 then -- a deleted limiter left the key behind
    redis.call('DEL', left_key)
  end
end
