-- Token bucket: starts full, gains `lump` every `period`. With a period of 1 us this is GCRA, whose
-- theoretical arrival time is `at` plus the time in which `debt` flows in. A request is admitted
-- when the balance covers the part of its cost that may not be overdrawn.
-- state   {at, debt, unit, period, lump, last, excess}: what the bucket lacks at `at` to be full,
--         the rate that this was counted at, the instant of the newest admitted request if that is
--         after `at` (else 0), by how many 2^-24 parts the debt was rounded up when the quota was
--         changed
--         'U', then integers of 7, 7, 6, 6, 4, 7 and 3 bytes
--         'V', then integers of 7, 7, 6, 7, 7 and 6 bytes: {at, debt, period, lump, last, excess},
--         if the unit is 1, and the lump does not fit in four bytes or the debt is above `max_debt`
--         'X', then integers of 7, 7, 6, 6, 4, 7 and 3 bytes: {at, units, debt, unit, lump, last,
--         excess}, for any other debt above `max_debt`: whole units, and the debt without them
--         'T', then integers of 7, 7, 6, 4 and 1 bytes: {at, debt, unit, lump, grain}, if the
--         period is 1, the other parts are 0, and no request waits. It expires when the debt has
--         flowed in, rounded up to a multiple of 2^grain us.
-- params  'T', then doubles: {limit, overdraft, unit, period, lump, max_debt, exponent}
-- `limit` is the burst. `debt` and `lump` are in parts of a token, `unit` parts to a token.
-- `max_debt` is the most that is counted in parts; `beyond` are whole units beyond it (see
-- debt.lua). 2^exponent us is the power of two that is at most the time of a whole refill.
forms = 'TUVX'
local SHORT = '<BI7I7I6I4B'
local limit, overdraft, new_unit, new_period, new_lump, max_debt, exponent =
  struct.unpack('<ddddddd', params, 2)
local grain = 2 ^ exponent
-- ENGINE
local LONG, size, size_text = '<BI7I7I6I6I4I7I3', 41, '41'
local LARGE, BEYOND = '<BI7I7I6I7I7I6', '<BI7I7I6I6I4I7I3' -- of the same size as LONG
local at, debt, beyond, excess, unit, period, lump, last
local form -- the letter of the state that was found
local stored_grain = 1 -- of the state that is stored
local shapes = false
