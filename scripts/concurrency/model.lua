-- Model of concurrency: the functions of the engine. state.lua stands before this text.
local expiry -- none: a key expires when its last hold has expired
local capacity = limit

-- Decides by a quota that is smaller by the units that are held.
local function hold_back(units)
  limit = capacity - units
end

local function fits_beside(units)
  return units <= limit
end

function drain()
  return 0
end

local function size_of()
  return size
end

local function initial() end

local function decode()
  fail(key)
end

local function encode()
  return ''
end

local function step_back()
  return false
end

local function advance() end

local function adopt()
  return false
end

local function earliest()
  return 0
end

local function commit() end

local function refund() end

local function reset_after()
  return 0
end

