//! Exact arithmetic: integers below 2^53 in doubles, as Lua counts, and rates as fractions. No
//! algorithm.

use crate::quota::{LONGEST_REFILL, Quota};

/// Doubles hold every integer up to here.
pub(super) const EXACT: f64 = (1_u64 << 53) as f64;

/// The rate of a bucket as a fraction: `unit` parts to a unit of the quota, `tick` parts per
/// microsecond.
///
/// It is exact if a full bucket then counts at most 2^52 parts, which leaves as many for requests
/// that wait. Otherwise it is the closest slower rate with at most as many.
#[derive(Debug, PartialEq)]
pub(super) struct Rate {
    pub(super) unit: f64,
    pub(super) tick: f64,
}

impl Rate {
    /// The rate of a bucket that can lack up to `size` units.
    pub(super) fn new(quota: Quota, size: u64) -> Self {
        let (window, limit) = (quota.window_us().into(), quota.limit().into());
        let max_unit = (1 << 52) / u128::from(size);
        let (unit, tick) = closest_above(window, limit, max_unit);
        Self { unit: unit as f64, tick: tick as f64 }
    }
}

/// The closest fraction that is at least `numerator / denominator`, with a numerator of at most
/// `max`: the fraction itself in lowest terms, if that fits. A walk down the Stern-Brocot tree
/// (Graham, Knuth, Patashnik: Concrete Mathematics, 4.5).
pub(super) fn closest_above(numerator: u128, denominator: u128, max: u128) -> (u128, u128) {
    let (mut below, mut above) = ((0, 1), (1, 0));
    loop {
        let gap_below = numerator * below.1 - denominator * below.0;
        let gap_above = above.0 * denominator - above.1 * numerator;
        if gap_above == 0 {
            return above;
        }
        // As many steps as keep the lower one below; then as many as keep the upper one at or
        // above.
        let down = ((gap_below - 1) / gap_above).min((max - below.0) / above.0);
        below = (below.0 + down * above.0, below.1 + down * above.1);
        let gap_below = gap_below - down * gap_above;
        let up =
            (gap_above / gap_below).min((max - above.0).checked_div(below.0).unwrap_or(u128::MAX));
        above = (above.0 + up * below.0, above.1 + up * below.1);
        if down == 0 && up == 0 {
            return above;
        }
    }
}

/// `math.max`. Faster than `f64::max`, which also handles NaN.
#[inline]
pub(super) fn max(a: f64, b: f64) -> f64 {
    if a > b { a } else { b }
}

/// `math.min`.
#[inline]
pub(super) fn min(a: f64, b: f64) -> f64 {
    if a < b { a } else { b }
}

/// `math.floor(dividend / divisor)` of integers. Avoids the division in the most common case, a
/// divisor of 1.
#[inline]
pub(super) fn floor_div(dividend: f64, divisor: f64) -> f64 {
    if divisor == 1.0 { dividend } else { floor(dividend / divisor) }
}

/// `math.ceil(dividend / divisor)` of integers.
#[inline]
pub(super) fn ceil_div(dividend: f64, divisor: f64) -> f64 {
    if divisor == 1.0 { dividend } else { ceil(dividend / divisor) }
}

/// `f64::floor` for numbers within an `i64`. The standard one is a call, unless the build is for
/// processors with an instruction for it.
#[inline]
pub(super) fn floor(number: f64) -> f64 {
    let truncated = number as i64 as f64;
    if truncated > number { truncated - 1.0 } else { truncated }
}

/// `f64::ceil` for numbers within an `i64`.
#[inline]
pub(super) fn ceil(number: f64) -> f64 {
    let truncated = number as i64 as f64;
    if truncated < number { truncated + 1.0 } else { truncated }
}

/// Converts a debt with its excess, in 2^-24 parts, to another rate, as a whole number of parts and
/// what it was rounded up by. So quotas that alternate on one key do not raise the debt with each
/// conversion.
pub(super) fn convert(
    [debt, excess]: [f64; 2],
    unit: f64,
    new_unit: f64,
    max_debt: f64,
) -> (f64, f64) {
    let exact = min((debt - excess / EXCESS_UNIT) / unit * new_unit, max_debt);
    let debt = ceil(exact);
    (debt, min(floor((debt - exact) * EXCESS_UNIT), EXCESS_UNIT - 1.0)) // three bytes
}

/// The number of units of an excess in a part.
const EXCESS_UNIT: f64 = (1 << 24) as f64;

/// The exponent of the power of two that is at most `time`, or 0: the scripts round expiries up to
/// multiples of that power. Computed here, as Lua 5.4 has no `math.frexp`.
#[cfg_attr(not(feature = "redis"), allow(dead_code))]
pub(super) fn grain_exponent(time: f64) -> f64 {
    let biased = time.max(1.0).to_bits() >> 52;
    biased as f64 - 1023.0
}

/// The largest debt of a bucket: exact, and repaid within the longest refill.
pub(super) fn max_debt(period: f64, lump: f64) -> f64 {
    (floor_div(LONGEST_REFILL as f64, period) * lump).min(EXACT)
}
