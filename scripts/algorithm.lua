-- Algorithm: a function that decides about one limit of several. Its text, model to engine,
-- replaces BODY, and finish.lua FINISH.
-- Returns  how long the request has to wait, by how much that is too long, and a function that ends
--          the decision: it takes whether all limits admit the request, and its wait, and returns
--          the state that was found
local function NAME(key, params, cost, max_wait)
-- BODY
  return wait, excess, function(admitted, wait)
    local state
-- FINISH
    return state
  end
end
