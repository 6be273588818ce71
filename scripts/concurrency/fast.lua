-- Fast path of concurrency: what is held of a key that is not blocked. It decides as the engine
-- does.
drain, pace, longest = 0, 1, 0

function fast(_, found, runs, held)
  return found == '' and use(held, limit, 1, runs) and found
end

function write(_, found)
  return found, 0
end
