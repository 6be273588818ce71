-- Algorithm: a function that decides about one limit of several. Texts of the algorithm replace
-- STATE, PLAIN, DISPATCH and MODEL, see each.lua. `is_plain`: no limit lets the request wait.
-- Returns  how long the request has to wait, by how much that is too long, and a function that ends
--          the decision: it takes whether all limits admit the request, and its wait, and returns
--          the state that was found
local function NAME(key, params, cost, max_wait, lifetime, grid, is_plain)
  local block -- see block.lua
  local is_common, holds, spends, reads = is_plain, lifetime > 0, true, true -- see each.lua
-- STATE
  local fast, write, drain, pace, longest, fast_held
  local found, used, a, b, c, d, e, write_used
  is_denied = false
  if is_common then
-- PLAIN
    local value = reads and call('GETRANGE', key, '0', '-1') or ''
    local asked = {{count = 1, cost = cost, max_wait = 0}}
-- DISPATCH
  end
  if found then
    return 0, is_denied and 1 or 0, function(admitted)
      if admitted and used then
        local written, err = write_used(key, found, used, a, b, c, d, e)
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
