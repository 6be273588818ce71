-- Bucket: the state of the token bucket and of the leaky bucket. A token bucket starts full. With a
-- period of 1 us this is GCRA, whose theoretical arrival time is `at` plus the time in which the
-- debt flows in. A request is admitted when the balance covers the part of its cost that may not be
-- overdrawn. A leaky bucket is a queue with a constant outflow. A request leaves when those before
-- it have left; one that would not fit into the bucket is denied. The debt is its content.
-- state   {at, lumps, parts, last, per, lump, excess}: what the bucket lacks at `at` to be full, as
--         lumps and parts of another one; the instant of the newest admitted request if that is
--         after `at` (else 0); the rate that this was counted at, where `per` is the unit if the
--         period is 1, else minus the period, and the unit is 1; by how many 2^-24 parts the debt
--         was rounded up when the quota was changed
--         'Q', then integers of 7, 7, 6, 7, 6 (signed), 6, 3 and 1 bytes: these, and {grain}
--         'T', then integers of 7, 7, 6, 4 and 1 bytes: {at, debt, unit, lump, grain}, the debt in
--         parts, in a token bucket if it is below 2^53, the period is 1, `last` and the excess are
--         0, and no request waits
--         The key expires when the debt has flowed in, rounded up to a multiple of 2^grain us.
-- params  'T', or 'L' for a leaky bucket, then doubles: {limit, overdraft, unit, period, lump,
--         most, exponent}
-- `limit` is the burst. A unit has `unit` parts, and a lump of `lump` parts comes every `period`.
-- `most` is the most lumps of a debt: what 100 years refill, or a full bucket if that is more.
-- 2^exponent us is the power of two that is at most the time of a whole refill.
local SHORT, LONG = '<BI7I7I6I4B', '<BI7I7I6I7i6I6I3B'
local limit, overdraft, new_unit, new_period, new_lump, most, exponent =
  struct.unpack('<ddddddd', params, 2)
local grain = 2 ^ exponent
local shapes = string.byte(params) == 76
forms, reads = 'TQ', reads and not shapes
is_common = is_common and (shapes or new_period == 1 and overdraft == 0)
-- ENGINE
local size, size_text = 44, '44'
