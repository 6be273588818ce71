-- Fast path of the fixed window: checks that do not wait, and a state with the same window and
-- without reservations. It decides as the engine does. state.lua stands before this text.
drain, pace, longest = window, 1, window

function fast(_, found, runs, held)
  local before, opened = 0, now
  if found ~= '' then
    if #found ~= size or string.byte(found) ~= 70 then
      return
    end
    local _, start, last, count, length = struct.unpack(STATE, found)
    if length ~= window or last > now or last >= start + length or count == 0 or now < start then
      return
    elseif now < start + length then
      before, opened = count, start
    end
  end
  local count = use(before, limit - held, 1, runs)
  if count and count < 2 ^ 53 then
    return found, count > before and count, opened, before
  end
end

function write(key, found, count, opened, before)
  if key and opened < now then
    return done(try('SETRANGE', key, '8', struct.pack('<I7I7', now, count)))
  end
  local state = count and struct.pack(STATE, 70, opened, now, count, window)
  return replace(key, found, state, (count or before > 0) and opened + window or now)
end
