-- Sets the rate: `try` if there is none, `set` in any case, forgetting what was taken, `update` if there is
-- one, keeping what was taken.
-- ARGV     mode, rate, interval, type, keepAliveTime (empty: none, or as it is), template (none), tally
-- Returns  {status, whether it was set, tally}
local mode = ARGV[1]

local known = open()
if ARGV[#ARGV] == '' then
  if mode == 'try' and known or mode == 'update' and not known then
    return {DONE, 0, ''}
  end
  local kept_alive = known and keep_alive or 0
  if known and mode ~= 'set' then
    look(true) -- by the old rate
    if size == 0 then -- nothing is in use, whatever the value is
      redis.call('DEL', left_key)
    end
    if per_client ~= (ARGV[4] == '1') then
      expire_in(interval + 1)
    end
  end

  local stays = mode == 'update' and string.format('%.0f', kept_alive) or '0'
  set({ARGV[2], ARGV[3], ARGV[4], ARGV[5] ~= '' and ARGV[5] or stays})
  if kept_alive > 0 and keep_alive == 0 then
    redis.call('PERSIST', KEYS[1])
  end
  if mode == 'set' then
    redis.call('UNLINK', KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7])
    return {DONE, 1, ''}
  end
elseif not known then -- the rate was set by the first call, and is gone since
  return {DONE, 1, ''}
end

look(true)
local sum = count()
if not sum then
  return {AGAIN, 1, stored_tally()}
end
sweep()
store(sum, 0)
return {DONE, 1, ''}
