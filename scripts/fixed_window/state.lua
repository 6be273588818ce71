-- Fixed window: at most `limit` in a window that opens at its first admitted request.
-- state   'F', then integers of 7, 7, 6 and 5 bytes: {start, count, length, ahead}: the opening of
--         the current window, the count of the newest window that a request has reserved, the
--         window that this was counted with, the windows between the current and the newest one
-- params  'F', then doubles: {limit, window}
local STATE, size, size_text = '<BI7I7I6I5', 26, '26'
local limit, window = struct.unpack('<dd', params, 2)
local start, ahead, count, length
