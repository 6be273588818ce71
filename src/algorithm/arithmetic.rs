//! Exact arithmetic: integers below 2^53 in doubles, as Lua counts, and rates as fractions. No
//! algorithm.

use crate::quota::{MAX_PER_MICRO, Quota};

/// Doubles hold every integer up to here.
pub(super) const EXACT: f64 = (1_u64 << 53) as f64;

/// The rate of a bucket as a fraction: `unit` parts to a unit of the quota, `tick` parts per
/// microsecond.
///
/// It is exact if a full bucket then counts at most 2^52 parts, which leaves as many for requests
/// that wait, and if `tick` fits in four bytes. Otherwise it is the closest slower rate with at
/// most as many parts.
#[derive(Debug, PartialEq)]
pub(super) struct Rate {
    pub(super) unit: f64,
    pub(super) tick: f64,
}

impl Rate {
    /// The rate of a bucket that can lack up to `size` units.
    pub(super) fn new(quota: Quota, size: u64) -> Self {
        let (window, limit) = (quota.window_us().into(), quota.limit().into());
        let max = [(1 << 52) / u128::from(size), MAX_PER_MICRO.into()];
        let [unit, tick] = closest_above([window, limit], max);
        Self { unit: unit as f64, tick: tick as f64 }
    }
}

/// The closest fraction that is at least this one, with a numerator and a denominator of at most
/// `max`: the fraction itself in lowest terms, if these fit. A walk down the Stern-Brocot tree
/// (Graham, Knuth, Patashnik: Concrete Mathematics, 4.5).
pub(super) fn closest_above([numerator, denominator]: [u128; 2], max: [u128; 2]) -> [u128; 2] {
    let (mut below, mut above) = ([0, 1], [1, 0]);
    loop {
        let gap_below = numerator * below[1] - denominator * below[0];
        let gap_above = above[0] * denominator - above[1] * numerator;
        if gap_above == 0 {
            return above;
        }
        // As many steps as keep the lower one below; then as many as keep the upper one at or
        // above.
        let down = ((gap_below - 1) / gap_above).min(steps(below, above, max));
        below = [below[0] + down * above[0], below[1] + down * above[1]];
        let gap_below = gap_below - down * gap_above;
        let up = (gap_above / gap_below).min(steps(above, below, max));
        above = [above[0] + up * below[0], above[1] + up * below[1]];
        if down == 0 && up == 0 {
            return above;
        }
    }
}

/// How often `step` can be added to a fraction, part by part, until a part exceeds its maximum.
fn steps(fraction: [u128; 2], step: [u128; 2], max: [u128; 2]) -> u128 {
    let of = |i: usize| (max[i] - fraction[i]).checked_div(step[i]).unwrap_or(u128::MAX);
    of(0).min(of(1))
}

/// `math.floor(a * b / c)` of integers, with `a` up to 2^53, and `b` up to `c`, which is up to
/// 2^46.
#[inline]
pub(super) fn mul_div(a: f64, b: f64, c: f64) -> f64 {
    if a * b < EXACT { floor(a * b / c) } else { long_divide(a, b, c) }
}

/// A long division with digits of base 64: the numbers in it are up to 127 x 2^46, which is exact.
#[cold]
fn long_divide(mut a: f64, b: f64, c: f64) -> f64 {
    let (mut quotient, mut rest) = (0.0, 0.0);
    let mut unit = (1_u64 << 48) as f64;
    while unit >= 1.0 {
        let digit = (a / unit).floor();
        a -= digit * unit;
        let part = rest * 64.0 + digit * b;
        let whole = (part / c).floor();
        (quotient, rest) = (quotient * 64.0 + whole, part - whole * c);
        unit /= 64.0;
    }
    quotient
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

/// The exponent of the power of two that is at most `time`, or 0: the scripts round expiries up to
/// multiples of that power. Computed here, as Lua 5.4 has no `math.frexp`.
#[cfg_attr(not(feature = "redis"), allow(dead_code))]
pub(super) fn grain_exponent(time: f64) -> f64 {
    let biased = time.max(1.0).to_bits() >> 52;
    biased as f64 - 1023.0
}
