-- Fast path of the token bucket: a bucket that refills continuously and has no overdraft, requests
-- that do not wait, and a state in the short form at the same rate. It decides as the engine does.
-- queue.lua decides about requests that wait, and those that come meanwhile.
drain, pace, longest = new_unit, new_lump, most

function fast(_, found, runs, held)
  local before, expires, old = 0, 0, exponent
  waits = false
  if #found == 26 and string.byte(found) == 84 then
    local _, at, debt, unit, lump, stored = struct.unpack(SHORT, found)
    if unit ~= new_unit or lump ~= new_lump or now < at or stored > 63 then
      return
    end
    before, old = math.max(debt - (now - at) * lump, 0), stored
    if stored == exponent then -- else the whole state is written
      expires = round_up(at + math.ceil(debt / lump), grain)
    end
  elseif found ~= '' then
    waits = string.byte(found) == 81 and #found > 88 -- with reservations
    return
  end
  local debt = use(before, (limit - held) * new_unit, new_unit, runs)
  if debt and (debt <= limit * new_unit or debt < 2 ^ 53 and debt / new_lump < most) then
    return found, debt > before and debt, expires, before, old
  end
  waits = not debt and found ~= ''
end

function write(key, found, debt, expires, before, old)
  if key and debt / new_lump <= expires - now then -- their sum would be rounded
    return done(try('SETRANGE', key, '1', struct.pack('<I7I7', now, debt)))
  end
  local state = debt and struct.pack(SHORT, 84, now, debt, new_unit, new_lump, exponent)
  expires = round_up(now + math.ceil((debt or before) / new_lump), debt and grain or 2 ^ old)
  return replace(key, found, state, expires)
end
