-- Concurrency: at most `limit` units are held at a time. Nothing is spent, so a key has no state:
-- its value is what is held.
-- params  'C', then a double: {limit}
spends, forms = false, ''
local limit = struct.unpack('<d', params, 2)
-- ENGINE
local size, size_text = 0, '0'
