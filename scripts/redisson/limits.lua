-- Constants of all scripts. The text before this one defines ARGS, the number of the arguments that
-- the script has besides the common ones; see rate.lua.
-- A log of at most SHORT entries is read whole. A call reads at most MAX_ENTRIES of a longer one.
local SHORT, HEAD, MAX_ENTRIES = 8, 128, 1000
local MAX_PERMITS, MAX_EXACT, CENTURY = 2147483647, 2 ^ 53, 36525 * 86400000
local DENIED, DONE, ABOVE_RATE, NO_RATE, AGAIN, PER_CLIENT = 0, 1, 2, 3, 4, 5
-- The first part of a stored tally, which quick.lua reads: IS_USUAL, the number of entries, their
-- permits, and the newest entry with its time; the oldest entry with its time, the time at which
-- the tally expires, and the number and the permits of the entries in the head.
local NEWEST, OLDEST, IS_USUAL, USUAL_LENGTH = '<Bdddc21', 'dc21ddd', 1, 99
