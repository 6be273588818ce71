-- Sets the rate. The mode is `try` (only if there is none), `set` (always; forgets the permits
-- taken) or `update` (only if there is one; keeps the permits taken).
-- ARGV     mode, rate, interval, type, keepAliveTime (empty: none, or unchanged), template (none),
--          tally
-- Returns  {status, 1 if the rate was set else 0, tally}
local mode = ARGV[1]

local had_rate = read_rate()
if previous_tally == '' then
  if mode == 'try' and had_rate or mode == 'update' and not had_rate then
    return {DONE, 0, ''}
  end
  local old_keep_alive = had_rate and keep_alive or 0
  if had_rate and mode ~= 'set' then
    read_log(true) -- by the old rate
    if size == 0 then -- no permits are in use, whatever the key says
      redis.call('DEL', left_key)
    end
    if per_client ~= (ARGV[4] == '1') then
      redis.call('PEXPIRE', left_key, interval + 1)
      redis.call('PEXPIRE', log, interval + 1)
    end
  end

  local default = mode == 'update' and as_text(old_keep_alive) or '0'
  set({ARGV[2], ARGV[3], ARGV[4], ARGV[5] ~= '' and ARGV[5] or default})
  if old_keep_alive > 0 and keep_alive == 0 then
    redis.call('PERSIST', KEYS[1])
  end
  if mode == 'set' then
    redis.call('UNLINK', KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7])
    return {DONE, 1, ''}
  end
elseif not had_rate then -- the first call set the rate, and it was deleted since
  return {DONE, 1, ''}
end

read_log(true)
local sum = count_permits()
if not sum then
  return {AGAIN, 1, saved_tally()}
end
sweep()
store(sum, 0)
return {DONE, 1, ''}
