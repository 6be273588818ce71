-- Model of concurrency: the functions of the engine. state.lua stands before this text.
-- Without `step_back`, `advance` and `adopt`: no key has a state.

function drain()
  return 0
end

function initial() end

function decode()
  fail(key)
end

function encode()
  return ''
end

function earliest()
  return 0
end

function commit() end

function reset_after()
  return 0
end
