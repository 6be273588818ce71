-- Each: several keys of one limiter, each decided by itself.
local reply = {now}
for i, key in ipairs(KEYS) do
  local cost, max_wait = struct.unpack('<dd', ARGV[2], 16 * i - 15)
  local wait, excess, finish = decide(key, ARGV[3], cost, max_wait)
  if finish then
    reply[i + 1] = finish(excess == 0 or not can_be_denied, wait)
  end
end
return reply
