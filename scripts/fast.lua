-- Fast: what the fast paths of the algorithms have in common. A fast path decides about the most
-- common checks of a key, as the engine does. Its text has two functions:
-- fast   takes the key, its index and its runs. Returns the state from which the replies are
--        computed, and, if units are granted, what is used then and further values for `write`;
--        nothing if the engine must decide.
-- write  takes the key and what `fast` has returned, and stores what is used. Returns false if the
--        key holds another type of value.

local change_fast -- ends and renews holds; only concurrency has it

-- Returns what is used after these requests, of `size`, if each unit of their costs takes `parts`,
-- and what is missing for the one that is denied longest; none if one of them has to wait.
local function use(used, size, parts, runs)
  local missing = 0
  for i = 1, #runs do
    local run = runs[i]
    local each = run.cost * parts
    local granted = math.min(run.count, math.max(math.floor((size - used) / each), 0))
    used = used + granted * each
    if granted < run.count then
      if run.max_wait > 0 then
        return
      end
      missing = math.max(missing, used + each - size)
    end
  end
  return used, missing
end

-- Stores a new state. Returns false if none was found, because the key holds another type of value.
local function replace(key, found, state, expires)
  if found ~= '' then
    return call('SET', key, state, 'PXAT', expire_at(expires))
  end
  return call('SET', key, state, 'PXAT', expire_at(expires), 'NX')
end
