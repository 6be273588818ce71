-- Takes permits from a limiter in its usual state, with few commands and without functions, which
-- take time to create. In any other state, this text writes nothing, and acquire.lua decides: a
-- rate to inherit, a log or a value that another client changed, a clock far ahead, a repeated
-- script. Both decide the same.
--
-- Other clients add entries and remove the oldest ones. So a log is as its tally describes it if
-- its size and its oldest entry are the same.
--
-- Steps: rate; keys; clock; the log, which is empty, short or long; denial, or entry, write, expiry
-- and reply. `break` leaves the decision to acquire.lua: nothing was written before.
local call, pack, unpack, format = redis.call, struct.pack, struct.unpack, string.format
local config = call('HMGET', KEYS[1], 'rate', 'interval', 'type', 'keepAliveTime', 'template')
repeat
  -- Rate: valid, and that of the template if the limiter inherits one.
  local rate_text, interval, kind, keep_alive = config[1], config[2], config[3], config[4] or '0'
  if not (rate_text and interval) or rate_text == '' or interval == ''
    or #rate_text > 15 or #interval > 12 or not string.find(rate_text .. interval, '^%d+$')
    or keep_alive ~= '0' and (#keep_alive > 12 or not string.find(keep_alive, '^%d+$'))
    or ARGV[2] and config[5] and string.sub(ARGV[2], 1, #config[5] + 1) ~= config[5] .. ' ' then
    break
  end
  local entry, rate, interval, keep_alive = ARGV[1], rate_text + 0, interval + 0, keep_alive + 0
  local permits = unpack('<I4', entry, 18)
  if permits > rate or permits > MAX_PERMITS or interval == 0 then
    break
  end

  -- Keys: those of all clients, or of this one.
  local left_key, log, tally_key, per_client = KEYS[2], KEYS[3], KEYS[4], kind == '1'
  if KEYS[5] then
    local i = per_client and 1 or 0
    left_key, log, tally_key = KEYS[2 + i], KEYS[4 + i], KEYS[6 + i]
  elseif per_client then
    break
  end
  if not per_client and kind ~= '0' then
    break
  end

  -- Clock.
  local time = call('TIME')
  local now_us = time[1] * 1000000 + time[2]
  local now = now_us / 1000
  now = now - now % 1
  local cutoff = now - interval

  -- The permits of the log; those of its expired entries, and the number of these; the oldest entry
  -- that has not expired, and its time; and the time of the newest entry.
  local sum, gone, expired, first, first_at, newest_at = 0, 0, 0, nil, nil, 0
  local size = call('ZCARD', log)
  local is_long = size > SHORT
  local page, tally, newest, ends_at, ahead, head, _
  if size == 0 then
    -- Empty log: all permits are left.
    local left = call('GET', left_key)
    if left and left ~= rate_text then
      break
    end
  elseif not is_long then
    -- Short log: read whole.
    page = call('ZRANGE', log, '0', '-1', 'WITHSCORES')
    for k = 1, 2 * size, 2 do
      local member, taken = page[k], 0
      if #member == 21 and string.byte(member) == 16 and member ~= entry then
        taken = unpack('<I4', member, 18)
      end
      newest_at = page[k + 1] + 0
      if newest_at <= cutoff then
        expired, gone = expired + 1, gone + taken
      elseif not first then
        first, first_at = k, newest_at
      end
      if taken == 0 or taken > MAX_PERMITS then
        newest_at = math.huge
        break
      end
      sum = sum + taken
    end
  else
    -- Long log: described by its tally. Up to 64 expired entries are read.
    tally = call('GET', tally_key)
    if not tally or #tally < USUAL_LENGTH or string.byte(tally) ~= IS_USUAL then
      break
    end
    local count
    _, count, sum, newest_at, newest, first_at, first, ends_at =
      unpack('<Bdddc21dc21d', tally)
    if count ~= size then
      break
    end
    if first_at > cutoff then
      if call('ZRANK', log, first) ~= 0 then
        break
      end
    else
      page = call('ZRANGE', log, '0', '1', 'WITHSCORES')
      if page[1] ~= first then
        break
      end
      ahead, head = unpack('<dd', tally, 84)
      expired, gone = 1, unpack('<I4', first, 18)
      first, first_at = page[3], page[4] + 0
      if first_at <= cutoff then
        page = call('ZRANGE', log, '-inf', format('%d', cutoff), 'BYSCORE', 'LIMIT', '1', '64')
        for k = 1, #page do
          local member, taken = page[k], 0
          if #member == 21 and string.byte(member) == 16 then
            taken = unpack('<I4', member, 18)
          end
          if taken == 0 or taken > MAX_PERMITS then
            newest_at = math.huge
            break
          end
          gone = gone + taken
        end
        expired = 1 + #page
        local rank = format('%d', expired)
        page = call('ZRANGE', log, rank, rank, 'WITHSCORES')
        first, first_at = page[1] or '', (page[2] or 0) + 0
      end
      if expired > 64 or expired >= ahead or #first ~= 21 or string.byte(first) ~= 16
        or unpack('<I4', first, 18) == 0 then
        break
      end
    end
  end
  if newest_at > now + interval then
    break
  end

  -- Denial.
  if sum - gone + permits > rate then
    if expired > 0 or is_long and call('ZRANK', log, entry)
      or call('GET', left_key) ~= format('%d', rate - sum) then
      break
    end
    -- The times at which enough permits, and one more permit, are available.
    local wanted, more, wait, replenish = sum + permits - rate, 1, first_at, first_at
    if sum > rate then
      more = sum - rate + 1
    end
    if is_long then
      if unpack('<I4', first, 18) < wanted then
        break
      end
    else
      local k = 1
      wait, replenish = nil, nil
      while not wait do
        local taken = unpack('<I4', page[k], 18)
        wanted, more = wanted - taken, more - taken
        replenish = replenish or more <= 0 and page[k + 1]
        wait = wanted <= 0 and page[k + 1]
        k = k + 2
      end
    end
    if keep_alive > 0 then
      local ms = math.max(keep_alive, interval)
      call('PEXPIRE', KEYS[1], ms)
      ms = per_client and interval + 1 or ms
      call('PEXPIRE', left_key, ms)
      call('PEXPIRE', log, ms)
    end
    local shift = interval * 1000 - now_us
    return pack('<ddddddd', DENIED, math.max(wait * 1000 + shift, 1), math.max(rate - sum, 0),
      math.max(replenish * 1000 + shift, 1), newest_at * 1000 + shift, rate, interval)
  end

  -- Entry: its time. Rounded up, so that the entry counts for a full interval. No earlier than the
  -- newest entry, so that a host whose clock is ahead does not drop it too early.
  local at = now
  if now_us % 1000 > 0 then
    at = now + 1
  end
  if newest_at < at then
    newest = entry
  else
    at = newest_at
    if is_long then
      -- Redis sorts entries of the same time by their bytes.
      local a, b = unpack('>I4', entry, 2), unpack('>I4', newest, 2)
      if a == b then
        break
      elseif a > b then
        newest = entry
      end
    end
  end

  -- Write: the entry, unless the log has it; then the expired ones leave, and the tally follows.
  if is_long and ends_at < now + interval or call('ZADD', log, 'NX', format('%d', at), entry) == 0
  then
    break
  end
  if expired > 0 then
    call('ZREMRANGEBYRANK', log, '0', format('%d', expired - 1))
  end
  sum = sum - gone + permits
  if is_long then
    local text = pack(NEWEST, IS_USUAL, size - expired + 1, sum, at, newest)
    if expired > 0 then
      text = text .. pack('<' .. OLDEST, first_at, first, ends_at, ahead - expired, head - gone)
    end
    call('SETRANGE', tally_key, '0', text)
  end

  -- Expiry, and the permits that are left.
  local ms
  if keep_alive > 0 then
    ms = math.max(keep_alive, interval)
    call('PEXPIRE', KEYS[1], ms)
  else
    ms = call('PTTL', KEYS[1])
  end
  if per_client then
    ms = math.min(ms > 0 and ms or CENTURY, interval + 1)
  end
  if ms > 0 then
    ms = format('%d', ms)
    call('SET', left_key, format('%d', rate - sum), 'PX', ms)
    call('PEXPIRE', log, ms)
  else
    local change = permits - gone
    change = change == 1 and '1' or format('%d', change)
    if size == 0 or redis.pcall('DECRBY', left_key, change) ~= rate - sum
      or not is_long and call('PERSIST', log) == 1 then
      call('SET', left_key, format('%d', rate - sum))
    end
  end

  -- Reply.
  local shift = interval * 1000 - now_us
  local replenish = (first_at or at) * 1000 + shift
  return pack('<ddddddd', DONE, 0, rate - sum, replenish > 0 and replenish or 1, at * 1000 + shift,
    rate, interval)
until true
