//! The debt of a bucket: what it lacks to be full. Does not know a state. The Lua twin is
//! `scripts/debt.lua`.
//!
//! A debt is counted in parts of a unit, as far as these fit: up to `max_debt`. Whole units beyond
//! that are counted as units, so that a debt that fits at one rate is not forgotten at another one.
//! While there are units beyond, the parts are those that fit, so they are more than a full bucket.

use super::arithmetic::{EXACT, ceil, divide, floor, floor_div, max, min};
use crate::quota::{LONGEST_REFILL, LONGEST_WINDOW};

/// Parts, and whole units beyond them.
pub(super) type Debt = [f64; 2];

/// A time longer than all that can be reserved, in place of a longer one.
const FAR: f64 = (LONGEST_REFILL + LONGEST_WINDOW) as f64;

/// The number of units of an excess in a part.
const EXCESS_UNIT: f64 = (1 << 24) as f64;

/// The most parts of a debt: they are exact, and a full bucket has no more.
pub(super) fn max_debt(period: f64, lump: f64) -> f64 {
    min(ceil(LONGEST_REFILL as f64 / period) * lump, EXACT)
}

/// Counts as many units as fit in parts. All units together are at most 2^53.
pub(super) fn settle([debt, beyond]: Debt, unit: f64, max_debt: f64) -> Debt {
    let units = min(beyond, floor_div(max_debt - debt, unit));
    let debt = debt + units * unit;
    [debt, min(beyond - units, EXACT - floor_div(debt, unit))]
}

/// Adds units, and fewer parts than a unit has.
pub(super) fn raise(
    [debt, beyond]: Debt,
    [units, parts]: [f64; 2],
    unit: f64,
    max_debt: f64,
) -> Debt {
    if parts > max_debt - debt {
        return settle([debt + (parts - unit), beyond + units + 1.0], unit, max_debt);
    }
    settle([debt + parts, beyond + units], unit, max_debt)
}

/// Subtracts units, and fewer parts than a unit has, down to 0.
#[cold]
pub(super) fn lower(
    [debt, beyond]: Debt,
    [units, parts]: [f64; 2],
    unit: f64,
    max_debt: f64,
) -> Debt {
    let (debt, beyond) = (debt - parts, beyond - units);
    if beyond < 0.0 {
        return [max(debt + beyond * unit, 0.0), 0.0];
    }
    let [debt, beyond] = settle([debt, beyond], unit, max_debt);
    [max(debt, 0.0), beyond]
}

/// Returns whether the debt, and `more` parts, are at most these units and parts.
pub(super) fn is_within(
    [debt, beyond]: Debt,
    more: f64,
    [units, parts]: [f64; 2],
    unit: f64,
) -> bool {
    (beyond - units) * unit + debt + more <= parts
}

/// The units that flow in within these periods, rounded up.
pub(super) fn units_of(periods: f64, lump: f64, unit: f64) -> f64 {
    let [units, parts] = divide(periods, lump, unit);
    if parts > 0.0 { units + 1.0 } else { units }
}

/// The time in which `parts` and the units beyond flow in.
pub(super) fn time_of([parts, beyond]: Debt, unit: f64, period: f64, lump: f64) -> f64 {
    let [whole, rest] = divide(beyond, unit, lump);
    let periods = floor(parts / lump);
    let more = parts - periods * lump + rest;
    min((whole + periods + ceil(more / lump)) * period, FAR)
}

/// Converts a debt with its excess, in 2^-24 parts, to another rate, as a whole number of parts and
/// what it was rounded up by. So quotas that alternate on one key do not raise the debt with each
/// conversion.
pub(super) fn convert(
    [debt, beyond]: Debt,
    excess: f64,
    unit: f64,
    new_unit: f64,
    new_max_debt: f64,
) -> (Debt, f64) {
    let units = floor_div(debt, unit);
    let exact = (debt - units * unit - excess / EXCESS_UNIT) / unit * new_unit;
    let parts = ceil(exact);
    let excess = min(floor((parts - exact) * EXCESS_UNIT), EXCESS_UNIT - 1.0); // three bytes
    (settle([parts, beyond + units], new_unit, new_max_debt), excess)
}
