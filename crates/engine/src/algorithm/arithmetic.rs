//! Exact arithmetic: integers below 2^53, as Lua counts in doubles, and rates as fractions. No
//! algorithm.

use crate::quota::{MAX_PER_MICRO, Quota};

/// Doubles hold every integer up to here.
pub(super) const EXACT: i64 = 1 << 53;

/// The rate of a bucket as a fraction: `unit` parts to a unit of the quota, `tick` parts per
/// microsecond.
///
/// It is exact if a full bucket then counts at most 2^52 parts, which leaves as many for requests
/// that wait, and if `tick` fits in four bytes. Otherwise it is the closest slower rate with at
/// most as many parts.
#[derive(Debug, PartialEq)]
pub(super) struct Rate {
    pub(super) unit: i64,
    pub(super) tick: i64,
}

impl Rate {
    /// The rate of a bucket that can lack up to `size` units.
    pub(super) fn new(quota: Quota, size: u64) -> Self {
        let (window, limit) = (quota.window_us().into(), quota.limit().into());
        let max = [(1 << 52) / u128::from(size), MAX_PER_MICRO.into()];
        let [unit, tick] = closest_above([window, limit], max);
        Self { unit: unit as i64, tick: tick as i64 }
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

/// More than anything that is counted: it stands for larger products.
pub(super) const FAR: i64 = 1 << 60;

/// The product of integers that are not negative, at most [`FAR`].
#[inline(always)]
pub(super) fn product(a: i64, b: i64) -> i64 {
    a.saturating_mul(b).min(FAR)
}

/// The quotient of `dividend / divisor`, rounded down. Avoids the division in the most common case,
/// a divisor of 1.
#[inline(always)]
pub(super) fn floor_div(dividend: i64, divisor: i64) -> i64 {
    match divisor {
        1 => dividend,
        _ if dividend >= 0 => (dividend as u64 / divisor as u64) as i64,
        _ => dividend.div_euclid(divisor),
    }
}

/// The quotient of `dividend / divisor`, rounded up.
#[inline(always)]
pub(super) fn ceil_div(dividend: i64, divisor: i64) -> i64 {
    match divisor {
        1 => dividend,
        _ if dividend > 0 => ((dividend - 1) as u64 / divisor as u64 + 1) as i64,
        _ => -(-dividend / divisor),
    }
}

/// The quotient of `a * b / c`, of integers that are not negative, rounded down.
#[inline]
pub(super) fn mul_div(a: i64, b: i64, c: i64) -> i64 {
    match (a as u64).checked_mul(b as u64) {
        Some(product) => (product / c as u64) as i64,
        None => wide_mul_div(a, b, c),
    }
}

#[cold]
fn wide_mul_div(a: i64, b: i64, c: i64) -> i64 {
    (a as u128 * b as u128 / c as u128) as i64
}

/// The exponent of the power of two that is at most `time`, or 0: the scripts round expiries up to
/// multiples of that power. Computed here, as Lua 5.4 has no `math.frexp`.
pub(super) fn grain_exponent(time: i64) -> f64 {
    time.max(1).ilog2().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotients_are_rounded_as_their_names_say() {
        for dividend in -40_i64..=40 {
            for divisor in 1..=9 {
                assert_eq!(floor_div(dividend, divisor), dividend.div_euclid(divisor));
                assert_eq!(ceil_div(dividend, divisor), -(-dividend).div_euclid(divisor));
                if let Ok(times) = u64::try_from(dividend) {
                    assert_eq!(mul_div(times as i64, 7, divisor), times as i64 * 7 / divisor);
                }
            }
        }
        assert_eq!(mul_div(EXACT, EXACT, EXACT - 1), EXACT + 1);
        assert_eq!(mul_div(EXACT, EXACT - 2, EXACT - 1), EXACT - 2);
        assert_eq!([product(3, 5), product(FAR, 2), product(FAR - 1, 1)], [15, FAR, FAR - 1]);
    }

    /// Returns the least fraction that is at least this one, by trying all.
    fn searched([numerator, denominator]: [u128; 2], max: [u128; 2]) -> Option<[u128; 2]> {
        let all = (1..=max[1]).flat_map(|below| (1..=max[0]).map(move |above| [above, below]));
        let fits = all.filter(|it| it[0] * denominator >= numerator * it[1]);
        fits.min_by(|one, other| (one[0] * other[1]).cmp(&(other[0] * one[1])))
    }

    #[test]
    fn the_closest_fraction_above_is_the_one_that_a_search_finds() {
        for numbers in 0..12_u128.pow(2) {
            let fraction = [numbers / 12 + 1, numbers % 12 + 1];
            for maxima in 0..9_u128.pow(2) {
                let max = [maxima / 9 + 1, maxima % 9 + 1];
                let Some(searched) = searched(fraction, max) else { continue };
                let found = closest_above(fraction, max);
                assert_eq!(found[0] * searched[1], searched[0] * found[1], "{fraction:?} {max:?}");
                let is_within = |i: usize| (1..=max[i]).contains(&found[i]);
                assert!(is_within(0) && is_within(1), "{fraction:?}: {found:?} {max:?}");
            }
        }
    }
}
