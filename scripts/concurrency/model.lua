-- Model of concurrency: the functions of the engine. state.lua stands before this text.
local step_back, advance, adopt -- none: no key has a state

function drain()
  return 0
end

local function initial() end

local function decode()
  fail(key)
end

local function encode()
  return ''
end

local function earliest()
  return 0
end

local function commit() end

local function reset_after()
  return 0
end

