-- Algorithm: a function that decides about one limit of several. Texts of the algorithm replace
-- STATE, FAST and MODEL, see each.lua. `is_plain`: no limit lets the request wait.
-- Returns  how long the request has to wait, by how much that is too long, and a function that ends
--          the decision: it takes whether all limits admit the request, and its wait, and returns
--          the state that was found
local function NAME(key, params, cost, max_wait, lifetime, grid, is_plain)
  local block -- see block.lua
-- STATE
  if is_plain then
    local function read_all()
      return {call('GETRANGE', key, '0', '-1')}
    end

-- FAST
    local runs = {{count = 1, cost = cost, max_wait = 0}}
    local decided = fast and {fast(key, 1, runs)}
    if decided and decided[1] then
      return 0, decided[2] and 0 or 1, function(admitted)
        if admitted then
          write(key, unpack(decided, 1, 7))
        end
        return decided[1]
      end
    end
  end

-- MODEL
  forget()
  plan()
  return wait, too_long, finish
end
