//! The token bucket: starts full, gains `lump` every `period`. With a period of 1 us this is GCRA,
//! whose theoretical arrival time is `at` plus the time in which `debt` flows in. A request is
//! admitted when the balance covers the part of its cost that may not be overdrawn. Its Lua twin is
//! `scripts/token_bucket/model.lua`.
//!
//! `debt` and `lump` are in parts of a token, `unit` parts to a token.

use std::num::NonZeroU64;

use super::{
    Refill,
    arithmetic::{EXACT, Rate, ceil_div, divide, floor_div, grain_exponent, max, min},
    debt::{convert, is_within, lower, max_debt, raise, settle, time_of, units_of},
    model::{Earliest, Model, Report},
    packed::{FastReport, FastStep, Packed},
    request::Release,
    state_bytes::Reader,
};
use crate::quota::{ConfigError, LONGEST_REFILL, Quota};

#[derive(Clone, Copy, Debug)]
pub(crate) struct TokenBucketParams {
    burst: f64,
    overdraft: f64,
    unit: f64,
    period: f64,
    lump: f64,
    /// The most parts of a debt; units beyond are counted as such.
    max_debt: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct TokenBucketState {
    pub(super) at: f64,
    /// The parts that the bucket lacks at `at` to be full.
    pub(super) debt: f64,
    /// Whole units that it lacks beyond these parts.
    pub(super) beyond: f64,
    /// By how many 2^-24 parts `debt` was rounded up when the quota was changed.
    pub(super) excess: f64,
    /// The rate that this was counted at.
    pub(super) unit: f64,
    pub(super) period: f64,
    pub(super) lump: f64,
    /// The instant of the newest admitted request, if that is after `at`; else 0.
    pub(super) last: f64,
}

impl TokenBucketParams {
    pub(super) fn new(quota: Quota, refill: Refill, overdraft: u64) -> Result<Self, ConfigError> {
        if overdraft > quota.max_overdraft() {
            return Err(ConfigError::Overdraft { overdraft, quota });
        }
        let size = quota.burst_size() + overdraft;
        let (unit, period, lump) = match refill {
            Refill::Continuous => {
                let Rate { unit, tick } = Rate::new(quota, size);
                (unit, 1.0, tick)
            }
            Refill::Interval => (1.0, quota.window_us() as f64, quota.limit() as f64),
        };
        let max_debt = max_debt(period, lump);
        let (burst, overdraft) = (quota.burst_size() as f64, overdraft as f64);
        Ok(Self { burst, overdraft, unit, period, lump, max_debt })
    }

    fn rate(&self) -> [f64; 3] {
        [self.unit, self.period, self.lump]
    }

    fn full(&self) -> f64 {
        self.burst * self.unit
    }

    /// The units that an empty bucket admits: with an overdraft, a request of cost 1.
    fn overdrawn(&self) -> f64 {
        if self.overdraft > 0.0 { 1.0 } else { 0.0 }
    }

    /// Returns the parameters for the fast path, if it knows the settings.
    pub(super) fn plain(&self) -> Option<PlainTokenBucket> {
        let Self { burst, unit, lump, max_debt, .. } = *self;
        if self.period != 1.0 || self.overdraft > 0.0 {
            return None;
        }
        Some(PlainTokenBucket {
            burst: burst as u64,
            unit: NonZeroU64::new(unit as u64)?,
            lump: lump as u64,
            full: self.full() as u64,
            max_debt: max_debt as u64,
        })
    }
}

/// A bucket with continuous refill and without an overdraft, in integers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlainTokenBucket {
    burst: u64,
    unit: NonZeroU64,
    lump: u64,
    /// The burst in parts.
    full: u64,
    max_debt: u64,
}

impl PlainTokenBucket {
    /// Returns the time until the parts have flowed in. Most buckets gain one in a microsecond.
    #[inline]
    fn time_until(&self, parts: u64) -> u64 {
        if self.lump == 1 { parts } else { parts.div_ceil(self.lump) }
    }

    #[inline]
    fn debt_at(&self, [at, debt]: Packed, now: i64) -> Option<u64> {
        let elapsed = u64::try_from(now - at).ok()?;
        Some((debt as u64).saturating_sub(elapsed.saturating_mul(self.lump)))
    }

    #[inline]
    pub(super) fn step(&self, packed: &mut Packed, cost: u64, now: i64) -> Option<FastStep> {
        let debt = self.debt_at(*packed, now)?;
        if cost == 0 || cost > self.burst {
            return None;
        }
        let spent = debt + cost * self.unit.get();
        if spent >= self.max_debt {
            return None;
        }
        Some(if spent <= self.full {
            *packed = [now, spent as i64];
            FastStep { admitted: true, wait: 0, after: *packed, now }
        } else {
            let wait = self.time_until(spent - self.full);
            FastStep { admitted: false, wait, after: [now, debt as i64], now }
        })
    }

    #[inline]
    pub(super) fn report(&self, step: &FastStep) -> FastReport {
        let debt = step.after[1] as u64;
        let remaining = self.full.saturating_sub(debt) / self.unit;
        let missing = (remaining + 1) * self.unit.get() + debt - self.full;
        let (replenish, reset) = (self.time_until(missing), self.time_until(debt));
        FastReport { remaining, replenish, reset }
    }

    #[inline]
    pub(super) fn observe(&self, packed: Packed, now: i64) -> Option<[u64; 2]> {
        let debt = self.debt_at(packed, now)?;
        Some([self.full.saturating_sub(debt) / self.unit, self.time_until(debt)])
    }
}

impl TokenBucketState {
    fn rate(&self) -> [f64; 3] {
        [self.unit, self.period, self.lump]
    }

    fn max_debt(&self) -> f64 {
        max_debt(self.period, self.lump)
    }

    fn set_debt(&mut self, [debt, beyond]: [f64; 2]) {
        (self.debt, self.beyond) = (debt, beyond);
        if debt == 0.0 {
            self.excess = 0.0;
        }
    }

    fn lower(&mut self, parts: f64) {
        self.set_debt([max(self.debt - parts, 0.0), 0.0]);
    }

    /// The same with units beyond the parts.
    #[cold]
    fn lower_beyond(&mut self, units: f64, parts: f64) {
        let debt = [self.debt, self.beyond];
        self.set_debt(lower(debt, [units, parts], self.unit, self.max_debt()));
    }

    /// The parts that flow in within these periods, as units and parts.
    fn flow(&self, periods: f64) -> [f64; 2] {
        divide(periods, self.lump, self.unit)
    }

    /// The time in which `parts`, and the units beyond, are refilled.
    fn refill_time(&self, parts: f64) -> f64 {
        let Self { beyond, unit, period, lump, .. } = *self;
        match beyond == 0.0 {
            true => ceil_div(parts, lump) * period,
            false => time_of([parts, beyond], unit, period, lump),
        }
    }

    /// Caps the queueing delay at the time in which the debt is refilled.
    fn bound_last(&mut self) {
        self.last = min(self.last, self.at + self.refill_time(self.debt));
    }

    /// Begins to refill at another rate, now or when the last request that waits proceeds: what
    /// flows in before that is added to the debt.
    fn restart_refill(&mut self, now: f64, max_debt: f64) {
        if self.last > now {
            let periods = ceil_div(self.last - now, self.period);
            self.at = self.last - periods * self.period;
            let debt = [self.debt, self.beyond];
            [self.debt, self.beyond] = raise(debt, self.flow(periods), self.unit, max_debt);
            self.bound_last();
        } else if now - self.at >= self.period {
            self.at = now + 1.0 - self.period; // the next lump comes after what is spent now
        }
    }

    /// Returns whole units, while there are units beyond the parts.
    #[cold]
    fn refund_beyond(&mut self, now: f64, release: &Release, params: &TokenBucketParams) {
        let mut back = release.units;
        if let Some(instant) = release.instant {
            let periods = ceil_div(max(self.at - instant, 0.0), self.period);
            let mut refilled = units_of(periods, self.lump, self.unit);
            if self.rate() != params.rate() {
                let lumps = floor_div(now - instant, params.period) + 1.0;
                refilled = max(refilled, units_of(lumps, params.lump, params.unit));
            }
            back = max(back - refilled, 0.0);
        }
        if back > 0.0 {
            self.lower_beyond(back, 0.0);
            self.bound_last();
        }
    }

    fn time_until(&self, parts: f64, now: f64) -> f64 {
        max(self.refill_time(parts) - (now - self.at), 0.0)
    }
}

impl Model for TokenBucketState {
    type Params = TokenBucketParams;
    type Saved = Self;

    fn args(params: &TokenBucketParams) -> Vec<f64> {
        let TokenBucketParams { burst, overdraft, unit, period, lump, max_debt } = *params;
        let exponent = grain_exponent(burst * unit / lump);
        vec![burst, overdraft, unit, period, lump, max_debt, exponent]
    }

    fn max_cost(params: &TokenBucketParams) -> f64 {
        params.burst + params.overdraft
    }

    fn beside(params: &TokenBucketParams, held: f64) -> TokenBucketParams {
        TokenBucketParams { burst: params.burst - held, ..*params }
    }

    fn restores_evenly(params: &TokenBucketParams) -> bool {
        params.period == 1.0
    }

    /// The longest wait for which `debt` stays exact.
    fn max_reservable(params: &TokenBucketParams) -> f64 {
        let full = (params.burst + params.overdraft) * params.unit;
        min(LONGEST_REFILL as f64, floor_div(EXACT - full, params.lump) * params.period)
    }

    #[inline]
    fn initial(now: f64, params: &TokenBucketParams) -> Self {
        let TokenBucketParams { unit, period, lump, .. } = *params;
        Self { at: now, debt: 0.0, beyond: 0.0, excess: 0.0, unit, period, lump, last: 0.0 }
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        if let Some(mut reader) = Reader::new(bytes, b'T') {
            let [at, debt, unit, lump, _grain] = reader.integers([7, 7, 6, 4, 1])?;
            let (period, last) = (1.0, 0.0);
            return Some(Self { at, debt, beyond: 0.0, excess: 0.0, unit, period, lump, last });
        }
        if let Some(mut reader) = Reader::new(bytes, b'U') {
            let [at, debt, unit, period, lump, last, excess] =
                reader.integers([7, 7, 6, 6, 4, 7, 3])?;
            return Some(Self { at, debt, beyond: 0.0, excess, unit, period, lump, last });
        }
        let state = if let Some(mut reader) = Reader::new(bytes, b'V') {
            let [at, beyond, period, lump, last, excess] = reader.integers([7, 7, 6, 7, 7, 6])?;
            Self { at, debt: 0.0, beyond, excess, unit: 1.0, period, lump, last }
        } else {
            let mut reader = Reader::new(bytes, b'X')?;
            let [at, beyond, debt, unit, lump, last, excess] =
                reader.integers([7, 7, 6, 6, 4, 7, 3])?;
            Self { at, debt, beyond, excess, unit, period: 1.0, lump, last }
        };
        let [debt, beyond] = settle([state.debt, state.beyond], state.unit, state.max_debt());
        Some(Self { debt, beyond, ..state })
    }

    #[inline]
    fn save(&self) -> Self {
        *self
    }

    #[inline]
    fn restore(&mut self, saved: Self) {
        *self = saved;
    }

    #[inline]
    fn step_back(&mut self, now: f64) -> bool {
        let back = self.at - now;
        if back > 0.0 {
            self.last = max(self.last - back, 0.0);
            self.at = now;
        }
        back > 0.0
    }

    #[inline]
    fn advance(&mut self, now: f64) {
        let periods = floor_div(now - self.at, self.period);
        self.at += periods * self.period;
        if self.beyond == 0.0 {
            self.lower(periods * self.lump);
        } else {
            let [units, parts] = self.flow(periods);
            self.lower_beyond(units, parts);
        }
    }

    #[inline]
    fn adopt(&mut self, now: f64, params: &TokenBucketParams, _: &mut Self::Saved) -> bool {
        let changed = self.rate() != params.rate();
        if changed {
            self.advance(max(self.last, now));
            let debt = [self.debt, self.beyond];
            ([self.debt, self.beyond], self.excess) =
                convert(debt, self.excess, self.unit, params.unit, params.max_debt);
            [self.unit, self.period, self.lump] = params.rate();
            self.restart_refill(now, params.max_debt);
        }
        if self.debt == 0.0 {
            self.at = now;
        }
        changed
    }

    #[inline]
    fn earliest(&self, now: f64, needed: f64, params: &TokenBucketParams) -> Earliest {
        let mut wait = max(self.last - now, 0.0);
        if needed > 0.0 {
            let covered = max(needed - params.overdraft, 0.0);
            let missing = covered * self.unit - (params.full() - self.debt);
            wait = max(self.time_until(missing, now), wait);
        }
        wait.into()
    }

    #[inline]
    fn commit(&mut self, instant: f64, cost: f64, params: &TokenBucketParams) {
        let periods = floor_div(instant - self.at, self.period);
        if self.beyond == 0.0 {
            let refilled = periods * self.lump;
            if refilled >= self.debt {
                (self.debt, self.excess) = (refilled, 0.0);
            }
        } else {
            let refilled @ [units, parts] = self.flow(periods);
            if is_within([self.debt, self.beyond], 0.0, refilled, self.unit) {
                (self.debt, self.beyond, self.excess) = (parts, units, 0.0);
            }
        }
        let is_own = self.rate() == params.rate();
        let most = if is_own { params.max_debt } else { self.max_debt() };
        let debt = self.debt + cost * self.unit;
        if self.beyond == 0.0 && debt <= most {
            self.debt = debt;
        } else {
            let debt = [self.debt, self.beyond + cost];
            [self.debt, self.beyond] = settle(debt, self.unit, most);
        }
        self.last = if instant > self.at { instant } else { 0.0 };
    }

    fn refund(&mut self, now: f64, release: &Release, params: &TokenBucketParams) {
        let Release { instant, units } = *release;
        if instant.is_some() && self.last > now {
            return; // later reservations, by another quota, may count on what came in since
        }
        if self.beyond > 0.0 {
            return self.refund_beyond(now, release, params);
        }
        let mut back = units * self.unit;
        if let Some(instant) = instant {
            // Units that were refilled since, up to `at`, are back already.
            let mut refilled = ceil_div(max(self.at - instant, 0.0), self.period) * self.lump;
            if self.rate() != params.rate() {
                let lumps = floor_div(now - instant, params.period) + 1.0;
                // `f64::ceil`, as the number can exceed an i64.
                refilled = max(refilled, (lumps * params.lump / params.unit * self.unit).ceil());
            }
            back = max(back - refilled, 0.0);
        }
        if back > 0.0 {
            self.lower(back);
            self.bound_last();
        }
    }

    #[inline]
    fn reset_after(&self, now: f64) -> f64 {
        if self.debt > 0.0 { self.time_until(self.debt, now) } else { 0.0 }
    }

    #[inline]
    fn report(&self, now: f64, reset: f64, params: &TokenBucketParams) -> Report {
        let overdrawn = params.overdrawn();
        if reset == 0.0 {
            return Report { remaining: params.burst + overdrawn, replenish: 0.0 };
        }
        let room = params.full() - self.debt;
        let mut remaining = 0.0;
        if self.last <= now {
            remaining = max(floor_div(room, self.unit) + overdrawn, 0.0);
        }
        let missing = (remaining + 1.0 - overdrawn) * self.unit - room;
        Report { remaining, replenish: max(self.time_until(missing, now), self.last - now) }
    }

    #[inline]
    fn pack(&self, now: f64, params: &TokenBucketParams) -> Option<Packed> {
        let fits = self.rate() == params.rate()
            && self.excess == 0.0
            && self.beyond == 0.0
            && self.last <= now;
        fits.then_some([self.at as i64, self.debt as i64])
    }

    #[inline]
    fn unpack([at, debt]: Packed, params: &TokenBucketParams) -> Option<Self> {
        Some(Self { debt: debt as f64, ..Self::initial(at as f64, params) })
    }
}
