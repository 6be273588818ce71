-- Token bucket: starts full, gains `lump` every `period`. With a period of 1 us this is GCRA, whose
-- theoretical arrival time is `at` plus the time in which `debt` flows in.
-- A request is admitted when the balance covers what of its cost may not be overdrawn.
-- KEYS[1]  {at, debt, unit, period, lump}, doubles: what the bucket lacks at `at` to be full, and the
--          rate that this was counted at
-- ARGV     action (check, peek, refund), cost, max_wait, burst, overdraft, unit, period, lump,
--          most_debt
-- Returns  {admitted, wait, remaining, replenish, reset}
-- Times are in microseconds, `debt` and `lump` in parts of a token, `unit` parts to a token; all
-- numbers are integers below 2^53.
local action, cost, max_wait = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local burst, overdraft = tonumber(ARGV[4]), tonumber(ARGV[5])
local unit, period, lump = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local most_debt = tonumber(ARGV[9])

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

local at, debt, stale = now, 0, false

local function refill(every, by)
  local periods = math.floor((now - at) / every)
  at = at + periods * every
  debt = math.max(debt - periods * by, 0)
end

local state = redis.call('GET', KEYS[1])
if state then
  local old_unit, old_period, old_lump
  at, debt, old_unit, old_period, old_lump = struct.unpack('<ddddd', state)
  if now < at then -- the clock stepped back
    at, stale = now, true
  end
  refill(old_period, old_lump)
  if old_unit ~= unit or old_period ~= period or old_lump ~= lump then -- the quota was changed
    stale = true
    debt = math.min(math.ceil(debt / old_unit * unit), most_debt)
    refill(period, lump)
  end
  if debt == 0 then
    at = now
  end
end

local function periods_until(parts)
  return math.max(math.ceil(parts / lump), 0)
end

local function time_until(parts)
  return math.max(periods_until(parts) * period - (now - at), 0)
end

local full = burst * unit
local short = math.max(cost - overdraft, 0) * unit - (full - debt)
local wait = time_until(short)
local late = math.max(wait - max_wait, 0)
local admitted = late == 0

if action == 'refund' then
  debt = math.max(debt - cost * unit, 0)
elseif action == 'check' and admitted then
  debt = math.max(debt, periods_until(short) * lump) + cost * unit
end

local overdrawn = overdraft > 0 and 1 or 0
local remaining = math.max(math.floor((full - debt) / unit) + overdrawn, 0)
local replenish, reset = 0, 0
if debt > 0 then
  replenish = time_until((remaining + 1 - overdrawn) * unit - (full - debt))
  reset = time_until(debt)
end

if action == 'refund' or action == 'check' and (admitted or stale) then
  if reset > 0 then
    redis.call('SET', KEYS[1], struct.pack('<ddddd', at, debt, unit, period, lump),
      'PXAT', math.ceil((now + reset) / 1000))
  else
    redis.call('DEL', KEYS[1])
  end
end
return {admitted and 1 or 0, admitted and wait or late, remaining, replenish, reset}
