-- Fast: what the fast paths of the algorithms have in common. A fast path decides about the most
-- common requests as the engine does, and leaves the others to it without a write.
-- fast   takes the key, its value if that is read, its runs, and the units that are held. Returns
--        the state from which the replies are computed; what is used then, if units are granted;
--        and further values for `write`. Returns nothing if the engine must decide.
-- write  takes the key and what `fast` has returned, and stores what is used. Returns whether that
--        was done; if not, the error of the server, or none if the engine must decide. Without a
--        key, it stores nothing, and returns the state and when that expires; also if no units
--        are used.
-- drain  for how long a unit counts, once it is spent, times the `pace`; all units together for the
--        `longest` time. An algorithm without it has no fast path beside holds (held.lua).

local is_denied -- whether a request of the key at work is denied
local waits, fast_waiting, write_waiting -- of a token bucket; see queue.lua

-- Returns what is used after these requests, of `size`, if each unit of their costs takes `parts`,
-- and what is missing for the one that is denied longest; none if one of them has to wait. Each run
-- gets the number of its requests that are `admitted`.
local function use(used, size, parts, runs)
  local missing = 0
  for i = 1, #runs do
    local run = runs[i]
    local each = run.cost * parts
    local granted = run.count
    if used + granted * each > size then
      granted = math.max(math.floor((size - used) / each), 0)
    end
    used, run.admitted = used + granted * each, granted
    if granted < run.count then
      if run.max_wait > 0 then
        return
      end
      is_denied = true
      missing = math.max(missing, used + each - size)
    end
  end
  return used, missing
end

-- Returns whether a command was executed, and its error.
local function done(reply)
  if type(reply) == 'table' and reply.err then
    return false, reply.err
  end
  return reply
end

-- Stores a state, and deletes the key of an empty one. If none was found, it is not done if the key
-- holds another type of value. Without a key, returns the state, or else the one that was found.
local function replace(key, found, state, expires)
  if not key then
    return state or found, expires
  elseif state == '' then
    return done(try('DEL', key))
  elseif found ~= '' then
    return done(try('SET', key, state, 'PXAT', expire_at(expires)))
  end
  return done(try('SET', key, state, 'PXAT', expire_at(expires), 'NX'))
end

-- Stores what `fast_held` has returned behind its reply.
local function write_held(key, _, _, value, new, expires)
  return replace(key, value, new, expires)
end
