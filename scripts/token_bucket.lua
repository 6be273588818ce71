-- Token bucket: starts full, gains `lump` every `period`. With a period of 1 us this is GCRA, whose
-- theoretical arrival time is `at` plus the time in which `debt` flows in.
-- A request is admitted when the balance covers what of its cost may not be overdrawn.
-- KEYS[1]  {at, debt, unit, period, lump, last}, doubles: what the bucket lacks at `at` to be full, the
--          rate that this was counted at, the instant of the newest admitted request
-- KEYS[2]  the turns that are booked: see turns.lua
-- ARGV     action (check, peek, refund), cost, max_wait, turn, burst, overdraft, unit, period, lump,
--          most_debt
-- Returns  {admitted, wait, remaining, replenish, reset, turn}
-- Times are in microseconds, `debt` and `lump` in parts of a token, `unit` parts to a token; all
-- numbers are integers below 2^53.
local action, cost, max_wait = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local turn, burst, overdraft = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local new_unit, new_period, new_lump = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
local most_debt = tonumber(ARGV[10])

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

local at, debt, last, stale = now, 0, 0, false
local unit, period, lump = new_unit, new_period, new_lump

local function read(state)
  at, debt, unit, period, lump, last = struct.unpack('<dddddd', state)
end

local function packed()
  return struct.pack('<dddddd', at, debt, unit, period, lump, last)
end

local function commit(instant, units)
  debt = math.max(debt, math.floor((instant - at) / period) * lump) + units * unit
  last = instant
end

local function refund(units)
  local back = units * unit
  if turn > 0 then -- what has flowed in since is back already
    back = math.max(back - math.max(math.ceil((now - turn) / period), 0) * lump, 0)
  end
  debt = math.max(debt - back, 0)
end

local function refill()
  local periods = math.floor((now - at) / period)
  at = at + periods * period
  debt = math.max(debt - periods * lump, 0)
end

local state = redis.call('GET', KEYS[1])
if state then
  read(state)
  if action == 'refund' then
    give_back(now, turn, cost, read, refund, commit, packed)
  end
  if now < at then -- the clock stepped back
    at, last, stale = now, last - (at - now), true
  end
  refill()
  if unit ~= new_unit or period ~= new_period or lump ~= new_lump then -- the quota was changed
    debt = math.min(math.ceil(debt / unit * new_unit), most_debt)
    unit, period, lump, stale = new_unit, new_period, new_lump, true
    refill()
  end
  if debt == 0 then
    at = now
  end
end

local function time_until(parts)
  return math.max(math.ceil(parts / lump) * period - (now - at), 0)
end

local full = burst * unit
local covered = math.max(math.min(cost - overdraft, burst), 0) -- a refund may be above the quota
local short = covered * unit - (full - debt)
local wait = math.max(time_until(short), last - now)
local instant = now + wait
local late = math.max(wait - max_wait, 0)
local admitted = late == 0

local before
if action == 'check' and admitted then
  before = wait > 0 and packed()
  commit(instant, cost)
end

local overdrawn = overdraft > 0 and 1 or 0
local remaining, replenish, reset = burst + overdrawn, 0, 0
if debt > 0 then
  remaining = 0
  if last <= now then
    remaining = math.max(math.floor((full - debt) / unit) + overdrawn, 0)
  end
  replenish = math.max(time_until((remaining + 1 - overdrawn) * unit - (full - debt)), last - now)
  reset = time_until(debt)
end

if action == 'refund' or action == 'check' and (admitted or stale) then
  write(now, stale, instant, cost, before, packed(), reset)
end
return {admitted and 1 or 0, admitted and wait or late, remaining, replenish, reset, instant}
