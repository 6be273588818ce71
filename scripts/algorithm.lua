-- Algorithm: a function that decides about one limit of several. Texts of the algorithm replace
-- STATE, PLAIN, HELD and MODEL, see each.lua. `is_plain`: no limit lets the request wait.
-- Returns  how long the request has to wait, by how much that is too long, and a function that ends
--          the decision: it takes whether all limits admit the request, and its wait, and returns
--          the state that was found
local function NAME(key, params, cost, max_wait, lifetime, grid, is_plain)
  local block -- see block.lua
  -- Whether the fast path knows such requests; states replace this.
  local is_common, holds = lifetime == 0, lifetime > 0
-- STATE
  local fast, write, change, reads, decided = nil, nil, nil, true, {}
  local value, runs = '', {{count = 1, cost = cost, max_wait = 0}}
  if is_plain and is_common then
-- PLAIN
    value = reads and call('GETRANGE', key, '0', '-1') or ''
    decided = {fast(key, value, runs)}
  end
  if is_plain and not decided[1] and (holds or string.byte(value, -1) == 72) then
    fast = nil
-- HELD
    value = holds and call('GETRANGE', key, '0', '-1') or value
    decided = fast and {fast(key, value, runs)} or decided
  end
  if decided[1] then
    return 0, decided[2] and 0 or 1, function(admitted)
      if admitted then
        local written, err = write(key, unpack(decided, 1, 7))
        if not written then
          error(err or 'it was not stored', 0)
        end
      end
      return decided[1]
    end
  end

-- MODEL
  forget()
  plan()
  return wait, too_long, finish
end
