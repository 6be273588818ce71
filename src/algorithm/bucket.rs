//! The bucket: GCRA, as a debt that flows in at a rate. It is the model of two algorithms. The debt
//! of a token bucket is what it lacks to be full; that of a leaky bucket, which shapes, is its
//! content. Its Lua twin is `scripts/bucket.lua`, with what differs in `scripts/NAME/model.lua`.
//!
//! `debt` and `lump` are in parts of a unit, of which it has `unit`; a `lump` comes per `period`.

use super::{
    arithmetic::{EXACT, Rate, ceil_div, floor_div, grain_exponent},
    model::{Core, Earliest, Model, Report},
    request::Release,
    state_bytes::Reader,
};
use crate::quota::{LONGEST_REFILL, Quota};

/// The number of units of an excess in a part.
const EXCESS_UNIT: f64 = (1 << 24) as f64;

#[derive(Clone, Copy, Debug)]
pub(crate) struct BucketParams {
    pub(super) burst: i64,
    pub(super) overdraft: i64,
    /// The parts of the burst.
    capacity: i64,
    pub(super) unit: i64,
    pub(super) period: i64,
    pub(super) lump: i64,
    /// The most parts of a debt: what 100 years refill.
    pub(super) max_debt: i64,
    pub(super) shapes: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Bucket {
    pub(super) at: i64,
    /// The parts of the debt at `at`.
    pub(super) debt: i64,
    /// By how many 2^-24 parts `debt` was rounded up when the quota was changed.
    pub(super) excess: i64,
    /// The rate that this was counted at.
    pub(super) unit: i64,
    pub(super) period: i64,
    pub(super) lump: i64,
    /// The instant of the newest admitted request, if that is after `at`; else 0.
    pub(super) last: i64,
}

impl BucketParams {
    pub(super) fn new(quota: Quota, overdraft: u64, [unit, period, lump]: [i64; 3]) -> Self {
        let (burst, overdraft) = (quota.burst_size() as i64, overdraft as i64);
        let (capacity, max_debt) = (product(burst, unit), max_debt(period, lump));
        Self { burst, overdraft, capacity, unit, period, lump, max_debt, shapes: false }
    }

    pub(super) fn continuous(quota: Quota, overdraft: u64) -> Self {
        let Rate { unit, tick } = Rate::new(quota, quota.burst_size() + overdraft);
        Self::new(quota, overdraft, [unit, 1, tick])
    }

    /// The units that an empty bucket admits: with an overdraft, a request of cost 1.
    #[inline]
    fn overdrawn(&self) -> i64 {
        if self.overdraft > 0 { 1 } else { 0 }
    }
}

/// The most parts of a debt: they are exact, and a full bucket has no more.
pub(super) fn max_debt(period: i64, lump: i64) -> i64 {
    ceil_div(LONGEST_REFILL as i64, period).saturating_mul(lump).min(EXACT)
}

/// A product of units, periods or parts that is larger than all that count.
const FAR: i64 = 1 << 60;

#[inline(always)]
fn product(a: i64, b: i64) -> i64 {
    a.checked_mul(b).filter(|product| *product < FAR).unwrap_or(FAR)
}

impl Bucket {
    /// Returns whether this was counted at another rate.
    #[inline(always)]
    fn is_foreign(&self, params: &BucketParams) -> bool {
        self.unit != params.unit || self.period != params.period || self.lump != params.lump
    }

    #[inline(always)]
    fn lower(&mut self, parts: i64) {
        self.debt = (self.debt - parts).max(0);
        if self.debt == 0 {
            self.excess = 0;
        }
    }

    /// The parts of a number of units.
    #[inline(always)]
    fn parts(&self, units: i64) -> i64 {
        product(units, self.unit)
    }

    /// The parts that flow in within these periods.
    #[inline(always)]
    fn flow(&self, periods: i64) -> i64 {
        product(periods, self.lump)
    }

    /// The time in which `parts` flow in.
    #[inline(always)]
    fn refill_time(&self, parts: i64) -> i64 {
        product(ceil_div(parts, self.lump), self.period)
    }

    /// Caps the instant of the newest request at that at which the debt has flowed in.
    fn bound_last(&mut self) {
        self.last = self.last.min(self.at + self.refill_time(self.debt));
    }

    /// Begins to refill at another rate, when the last request has proceeded. If that is yet to
    /// come, what flows in before is added to the debt, whatever units wait. So quotas that
    /// alternate on one key do not raise the debt with each conversion.
    fn restart_refill(&mut self, now: i64, last: i64, max_debt: i64) {
        if last - self.at >= self.period {
            self.at = last + 1 - self.period; // the next lump comes after what was spent then
        }
        if self.at > now {
            let periods = ceil_div(self.at - now, self.period);
            self.at -= periods * self.period;
            self.debt = self.debt.saturating_add(self.flow(periods)).min(max_debt);
        }
        if last > now {
            self.bound_last();
        }
    }

    /// Counts at the rate of another quota: a whole number of parts, and what the debt is rounded
    /// up by. In doubles, as Lua does.
    #[cold]
    fn convert(&mut self, now: i64, params: &BucketParams) {
        let last = self.last.max(self.at);
        self.advance(last);
        let units = self.debt / self.unit;
        let rest = (self.debt - units * self.unit) as f64 - self.excess as f64 / EXCESS_UNIT;
        let exact = rest / self.unit as f64 * params.unit as f64;
        let parts = exact.ceil();
        let excess = ((parts - exact) * EXCESS_UNIT).floor().min(EXCESS_UNIT - 1.0); // three bytes
        (self.unit, self.period, self.lump) = (params.unit, params.period, params.lump);
        self.debt = self.parts(units).saturating_add(parts as i64).min(params.max_debt);
        self.excess = excess as i64;
        self.restart_refill(now, last, params.max_debt);
    }

    #[inline(always)]
    fn time_until(&self, parts: i64, now: i64) -> i64 {
        if parts <= 0 { 0 } else { (self.refill_time(parts) - (now - self.at)).max(0) }
    }

    /// The time until later requests may proceed. In a leaky bucket, only the content delays them.
    #[inline(always)]
    fn queue(&self, now: i64, params: &BucketParams) -> i64 {
        if params.shapes { 0 } else { (self.last - now).max(0) }
    }
}

impl Model for Bucket {
    type Params = BucketParams;
    type Saved = Self;

    fn args(params: &BucketParams) -> Vec<f64> {
        let BucketParams { burst, overdraft, unit, period, lump, max_debt, shapes } = *params;
        let exponent = grain_exponent(burst * unit / lump);
        let args = match shapes {
            true => vec![burst, unit, lump, max_debt],
            false => vec![burst, overdraft, unit, period, lump, max_debt],
        };
        args.into_iter().map(|number| number as f64).chain([exponent]).collect()
    }

    #[inline(always)]
    fn max_cost(params: &BucketParams) -> i64 {
        params.burst + params.overdraft
    }

    fn beside(params: &BucketParams, held: i64) -> BucketParams {
        let burst = params.burst - held;
        // Fewer parts than none, if more is held than the bucket has by another quota.
        BucketParams { burst, capacity: -product(-burst, params.unit), ..*params }
    }

    fn full(params: &BucketParams) -> i64 {
        params.burst + params.overdrawn()
    }

    fn drain(units: i64, params: &BucketParams) -> i64 {
        let parts = units.saturating_mul(params.unit).min(params.max_debt);
        ceil_div(parts, params.lump).saturating_mul(params.period)
    }

    fn shapes(params: &BucketParams) -> bool {
        params.shapes
    }

    fn restores_evenly(params: &BucketParams) -> bool {
        params.period == 1
    }

    /// The time in which a full leaky bucket drains.
    fn default_wait(params: &BucketParams) -> i64 {
        if params.shapes { ceil_div(params.capacity, params.lump) } else { 0 }
    }

    /// The longest wait, for another limit too, for which `debt` stays exact.
    fn max_reservable(params: &BucketParams) -> i64 {
        let full = (params.burst + params.overdraft) * params.unit;
        let exact = ((EXACT - full) / params.lump).saturating_mul(params.period);
        exact.max(Self::default_wait(params)).min(LONGEST_REFILL as i64)
    }

    #[inline(always)]
    fn initial(now: i64, params: &BucketParams) -> Self {
        let BucketParams { unit, period, lump, .. } = *params;
        Self { at: now, debt: 0, excess: 0, unit, period, lump, last: 0 }
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let form = *bytes.first()?;
        let mut reader = Reader::new(bytes, form)?;
        let state = match form {
            b'T' => {
                let [at, debt, unit, lump, _grain] = reader.integers([7, 7, 6, 4, 1])?;
                Self { at, debt, excess: 0, unit, period: 1, lump, last: 0 }
            }
            b'U' => {
                let [at, debt, unit, period, lump, last, excess] =
                    reader.integers([7, 7, 6, 6, 4, 7, 3])?;
                Self { at, debt, excess, unit, period, lump, last }
            }
            b'L' => {
                let [at, debt, last, unit, lump, excess] = reader.integers([7, 7, 7, 6, 4, 3])?;
                Self { at, debt, excess, unit, period: 1, lump, last }
            }
            _ => return None,
        };
        Some(state)
    }

    #[inline(always)]
    fn save(&self) -> Self {
        *self
    }

    #[inline(always)]
    fn restore(&mut self, saved: Self) {
        *self = saved;
    }

    #[inline(always)]
    fn step_back(&mut self, now: i64) -> bool {
        let back = self.at - now;
        if back > 0 {
            self.last = (self.last - back).max(0);
            self.at = now;
        }
        back > 0
    }

    #[inline(always)]
    fn advance(&mut self, now: i64) {
        let periods = floor_div(now - self.at, self.period);
        self.at += periods * self.period;
        self.lower(self.flow(periods));
    }

    #[inline(always)]
    fn adopt(&mut self, now: i64, params: &BucketParams, _: &mut Self) -> Option<i64> {
        let mut over = None;
        if self.is_foreign(params) {
            let time = self.reset_after(now);
            if time > 0 {
                // A copy: the state stays in registers otherwise.
                let mut converted = *self;
                converted.convert(now, params);
                *self = converted;
            } else {
                *self = Self::initial(now, params);
            }
            over = Some(time);
        }
        self.advance(now);
        if self.debt == 0 {
            self.at = now;
        }
        over
    }

    #[inline(always)]
    fn earliest(&self, now: i64, needed: Option<i64>, params: &BucketParams) -> Earliest {
        if params.shapes {
            let room = needed.map_or(i64::MAX, |needed| params.capacity - self.parts(needed));
            let full = self.time_until(self.debt.saturating_sub(room), now);
            return Earliest { wait: self.time_until(self.debt, now), full };
        }
        let mut wait = self.queue(now, params);
        if let Some(needed) = needed {
            let covered = self.parts((needed - params.overdraft).max(0));
            let missing = covered + self.debt - params.capacity;
            wait = self.time_until(missing, now).max(wait);
        }
        wait.into()
    }

    #[inline(always)]
    fn commit(&mut self, instant: i64, cost: i64, params: &BucketParams) {
        // The request may proceed later than it could. Departures of a shaper are apart, still.
        let refilled = self.flow(floor_div(instant - self.at, self.period));
        let apart = if params.shapes { self.lump } else { 0 };
        if self.debt <= refilled - apart {
            (self.debt, self.excess) = (refilled, 0);
        }
        let most = match self.is_foreign(params) {
            true => max_debt(self.period, self.lump),
            false => params.max_debt,
        };
        self.debt = self.debt.saturating_add(self.parts(cost)).min(most);
        self.last = if instant > self.at { instant } else { 0 };
    }

    fn refund(&mut self, now: i64, release: &Release, params: &BucketParams) {
        let Release { instant, units } = *release;
        if instant.is_some() && self.last > now {
            return; // later reservations, by another quota, may count on what came in since
        }
        let mut back = self.parts(units);
        if let Some(instant) = instant {
            // Units that were refilled since, up to `at`, are back already.
            let mut refilled = self.flow(ceil_div((self.at - instant).max(0), self.period));
            if self.is_foreign(params) {
                // A request of a token bucket may have proceeded just before a lump.
                let more = if params.shapes { 0 } else { 1 };
                let lumps = (floor_div(now - instant, params.period) + more) as f64;
                let other = lumps * params.lump as f64 / params.unit as f64 * self.unit as f64;
                refilled = refilled.max(other.ceil() as i64);
            }
            back = (back - refilled).max(0);
        }
        if back > 0 {
            self.lower(back);
            self.bound_last();
        }
    }

    #[inline(always)]
    fn reset_after(&self, now: i64) -> i64 {
        self.time_until(self.debt, now)
    }

    #[inline(always)]
    fn report(&self, now: i64, reset: i64, params: &BucketParams) -> Report {
        let overdrawn = params.overdrawn();
        if reset == 0 {
            return Report { remaining: params.burst + overdrawn, replenish: 0 };
        }
        let room = params.capacity - self.debt;
        let queue = self.queue(now, params);
        let mut remaining = 0;
        if queue == 0 {
            remaining = (floor_div(room, self.unit) + overdrawn).max(0);
        }
        let missing = self.parts(remaining + 1 - overdrawn).saturating_sub(room);
        Report { remaining, replenish: self.time_until(missing, now).max(queue) }
    }

    #[inline(always)]
    fn open(core: Core, params: &BucketParams) -> Option<Self> {
        Some(Self { debt: core.amount, ..Self::initial(core.at, params) })
    }

    #[inline(always)]
    fn close(&self, now: i64, params: &BucketParams) -> Option<Core> {
        if self.is_foreign(params) || self.excess > 0 || self.last > now {
            return None;
        }
        // A core has no room for the instant of the last request, from which another quota would
        // restore the units, unless it is that of the debt.
        let mut state = *self;
        if self.last > self.at {
            state.advance(self.last);
        }
        (state.last <= state.at).then_some(Core { at: state.at, amount: state.debt })
    }
}
