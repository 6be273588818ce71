-- Finish: ends a decision of the engine, whose text stands before this one. Takes whether the
-- request is `admitted`, and its `wait`; leaves the state that was found.
if commits and admitted then
  local before = wait > 0 and encode and encode()
  commit(now + wait, cost)
  state = report and report() or found or ''
  store(before, now + wait)
elseif not returns then
  state = report and report() or found or ''
  if commits and stale then
    store()
  end
end
