-- Turns: the requests that wait, so that one that gives up can give its turn back. This text stands in
-- front of the algorithms whose state is a string.
-- KEYS[2]  a list, oldest first: {instant, cost}, doubles, and the state before this turn was booked

local function push(instant, cost, before)
  redis.call('RPUSH', KEYS[2], struct.pack('<dd', instant, cost) .. before)
  redis.call('PEXPIREAT', KEYS[2], math.ceil(instant / 1000))
end

local function book(now, instant, cost, before)
  local newest = redis.call('LINDEX', KEYS[2], -1)
  if newest and struct.unpack('<d', newest) <= now then
    redis.call('DEL', KEYS[2])
  end
  for _ = 1, 2 do -- drops more than it adds
    local oldest = redis.call('LINDEX', KEYS[2], 0)
    if oldest and struct.unpack('<d', oldest) <= now then
      redis.call('LPOP', KEYS[2])
    end
  end
  push(instant, cost, before)
end

-- Gives back the turn at the instant `turn`, or, if that is not waiting, `cost` units of what was spent
-- before the first one that is. The turns behind stay where they are and are counted again.
local function give_back(now, turn, cost, read, refund, commit, packed)
  local turns, place = {}, 0
  for _, entry in ipairs(redis.call('LRANGE', KEYS[2], 0, -1)) do
    local instant, units = struct.unpack('<dd', entry)
    if instant > now then
      turns[#turns + 1] = {instant, units, string.sub(entry, 17)}
      if place == 0 and instant == turn and units == cost then
        place = #turns
      end
    end
  end
  if turns[1] then
    read(turns[math.max(place, 1)][3])
  end
  if place == 0 then
    refund(cost)
  end
  redis.call('DEL', KEYS[2])
  for i, it in ipairs(turns) do
    local instant, units, before = unpack(it)
    if i > place then
      before = packed()
      commit(instant, units)
    end
    if i ~= place then
      push(instant, units, before)
    end
  end
end

