-- Alone: one limit decides.
local function settle(wait, late)
  local admitted = late == 0 or not asks
  return admitted, admitted and wait or late
end

