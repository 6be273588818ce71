-- Fast path of the fixed window: checks that do not wait, and a state with the same window and
-- without reservations. It decides as the engine does. state.lua stands before this text.

function fast(_, found, runs)
  local before, is_open = 0, false
  if found ~= '' then
    if #found ~= size or string.byte(found) ~= 70 then
      return
    end
    local _, start, last, count, length = struct.unpack(STATE, found)
    if length ~= window or last > now or last >= start + length or count == 0 or now < start then
      return
    elseif now < start + length then
      before, is_open = count, true
    end
  end
  local count = use(before, limit, 1, runs)
  if count then
    return found, count > before and count, is_open
  end
end

function write(key, found, count, is_open)
  if is_open then
    return done(try('SETRANGE', key, '8', struct.pack('<I7I7', now, count)))
  end
  return replace(key, found, struct.pack(STATE, 70, now, now, count, window), now + window)
end
