-- Fixed window: at most `limit` in a window that opens at its first admitted request.
-- state   'F', then integers of 7, 7, 7 and 6 bytes: {start, last, count, length}: the opening of
--         the current window, the instant of the newest admitted request, which can be in a later
--         window, the count of the window of `last`, or of the current one if that is newer, the
--         window that this was counted with
-- params  'F', then doubles: {limit, window}
forms = 'F'
local STATE, size = '<BI7I7I7I6', 28
local limit, window = struct.unpack('<dd', params, 2)
-- ENGINE
local size_text = '28'
