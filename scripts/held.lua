-- Held: the fast path of holds, and of requests beside holds: slots that the clock has not passed,
-- by a clock that has not stepped back, and a state that the fast path of the algorithm knows.
-- SLOTS

-- Decides about requests, or ends and renews holds. Returns the reply; whether the key changes; and
-- the value, the new one, and when that expires, for `write_held`. Returns nothing if the engine
-- must decide.
function fast_held(value, asked)
  local first, slots, epoch, at, skew, joined = #value + 1, {nil, nil}, 0, 0, 0, 0
  if string.byte(value, -1) == 72 then
    first, slots, epoch, at, skew, joined = read_slots(value)
    if not slots or now + skew < at or #value ~= first + 24 + 7 * #slots
      or slots[1] <= now + skew and (spends or action == 'holds') then
      return
    end
    while slots[1] and slots[1] <= now + skew do -- the units are free then
      table.remove(slots, 1)
      table.remove(slots, 1)
    end
  end
  local held, results, is_changed, spent = -math.huge, nil, false, nil
  if action == 'holds' then
    results, is_changed, spent, slots, epoch, skew, joined =
      change_slots(asked, slots, epoch, skew, joined)
    asked = {{count = 1, cost = spent, max_wait = 0}}
  else
    held = total_of(slots)
  end
  local state, used, a, b, c, d = fast(key, string.sub(value, 1, first - 1), asked, held)
  if not state then
    return
  end
  if lifetime > 0 then
    local units = 0
    for _, run in ipairs(asked) do
      units = units + run.admitted * run.cost
    end
    if units > 0 then
      if not slots[1] then
        epoch, skew, joined = now, 0, 0
      end
      joined = add_units(slots, math.ceil((now + skew + lifetime) / grid) * grid, units, joined)
    end
    used, is_changed = false, units > 0
  end
  results = results or string.sub(value, first) .. state
  if not used and not is_changed then
    return results
  end
  at = is_changed and now + skew or at
  local new, expires = write(nil, state, used, a, b, c, d)
  if slots[1] then
    new = new .. pack_slots(slots, epoch, at, skew, joined)
    -- When the last slot has ended, and what was held does not count any more.
    local parts = total_of(slots) * drain
    local time = parts < 2 ^ 53 and math.ceil(parts / pace) or math.floor(parts / pace) + 1
    expires = math.max(expires, slots[#slots - 1] - skew) + math.min(time, longest)
  end
  return results, true, value, new, expires
end
