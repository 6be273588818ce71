-- Algorithm: a function that decides about one limit of several. Texts of the algorithm replace
-- STATE and MODEL, see each.lua.
-- Returns  how long the request has to wait, by how much that is too long, and a function that ends
--          the decision: it takes whether all limits admit the request, and its wait, and returns
--          the state that was found
local function NAME(key, params, cost, max_wait)
-- STATE
-- MODEL
  plan()
  return wait, too_long, finish
end
