-- Algorithm: a function that decides about one limit of several. Texts of the algorithm replace
-- STATE, PLAIN, HELD and MODEL, see each.lua. `is_plain`: no limit lets the request wait.
-- Returns  how long the request has to wait, by how much that is too long, and a function that ends
--          the decision: it takes whether all limits admit the request, and its wait, and returns
--          the state that was found
local function NAME(key, params, cost, max_wait, lifetime, grid, is_plain)
  local block -- see block.lua
  local is_common, holds, spends, reads = is_plain, lifetime > 0, true, true -- see each.lua
-- STATE
  local fast, write, drain, pace, longest
  local found, used, a, b, c, d, e
  local is_held = false
  is_denied = false
  if is_common then
-- PLAIN
    local value = reads and call('GETRANGE', key, '0', '-1') or ''
    local runs = {{count = 1, cost = cost, max_wait = 0}}
    if not holds then
      found, used, a, b, c, d, e = fast(key, value, runs, 0)
    end
    if not found and drain and (holds or string.byte(value, -1) == 72) then
      local fast_held
      do
-- HELD
      end
      is_denied, is_held = false, true
      found, used, a, b, c = fast_held(value, runs)
    end
  end
  if found then
    return 0, is_denied and 1 or 0, function(admitted)
      if admitted and used then
        local written, err
        if is_held then
          written, err = replace(key, a, b, c)
        else
          written, err = write(key, found, used, a, b, c, d, e)
        end
        if not written then
          error(err or 'it was not stored', 0)
        end
      end
      return found
    end
  end

-- MODEL
  forget()
  plan()
  return wait, too_long, finish
end
