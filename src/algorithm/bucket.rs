//! The bucket: GCRA, as a debt that flows in at a rate. It is the model of two algorithms. The debt
//! of a token bucket is what it lacks to be full; that of a leaky bucket, which shapes, is its
//! content. Its Lua twin is `scripts/bucket.lua`, with what differs in `scripts/NAME/model.lua`.
//!
//! `debt` and `lump` are in parts of a unit, of which it has `unit`; a `lump` comes per `period`.

use super::{
    arithmetic::{EXACT, Rate, ceil_div, divide, floor_div, grain_exponent, max, min},
    debt::{convert, is_within, lower, max_debt, raise, settle, time_of, units_of},
    model::{Earliest, Model, Report},
    packed::Packed,
    request::Release,
    state_bytes::Reader,
};
use crate::quota::{LONGEST_REFILL, Quota};

#[derive(Clone, Copy, Debug)]
pub(crate) struct BucketParams {
    pub(super) burst: f64,
    pub(super) overdraft: f64,
    pub(super) unit: f64,
    pub(super) period: f64,
    pub(super) lump: f64,
    /// The most parts of a debt; units beyond are counted as such.
    pub(super) max_debt: f64,
}

/// The state of a bucket; one that shapes is a leaky bucket.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Bucket<const SHAPES: bool> {
    pub(super) at: f64,
    /// The parts of the debt at `at`.
    pub(super) debt: f64,
    /// Whole units of the debt beyond these parts.
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

impl BucketParams {
    pub(super) fn new(quota: Quota, overdraft: u64, [unit, period, lump]: [f64; 3]) -> Self {
        let (burst, overdraft) = (quota.burst_size() as f64, overdraft as f64);
        Self { burst, overdraft, unit, period, lump, max_debt: max_debt(period, lump) }
    }

    pub(super) fn continuous(quota: Quota, overdraft: u64) -> Self {
        let Rate { unit, tick } = Rate::new(quota, quota.burst_size() + overdraft);
        Self::new(quota, overdraft, [unit, 1.0, tick])
    }

    pub(super) fn full(&self) -> f64 {
        self.burst * self.unit
    }

    /// The units that an empty bucket admits: with an overdraft, a request of cost 1.
    fn overdrawn(&self) -> f64 {
        if self.overdraft > 0.0 { 1.0 } else { 0.0 }
    }
}

impl<const SHAPES: bool> Bucket<SHAPES> {
    /// What a form of the state leaves out.
    const EMPTY: Self = Self {
        at: 0.0,
        debt: 0.0,
        beyond: 0.0,
        excess: 0.0,
        unit: 1.0,
        period: 1.0,
        lump: 0.0,
        last: 0.0,
    };

    /// Counts the parts of units that were stored as whole ones.
    fn settled(self) -> Self {
        let [debt, beyond] = settle([self.debt, self.beyond], self.unit, self.max_debt());
        Self { debt, beyond, ..self }
    }

    /// Returns whether this was counted at another rate.
    #[inline]
    fn is_foreign(&self, params: &BucketParams) -> bool {
        self.unit != params.unit
            || !SHAPES && self.period != params.period
            || self.lump != params.lump
    }

    /// What flows out of a leaky bucket does so all the time.
    #[inline]
    fn period(&self) -> f64 {
        if SHAPES { 1.0 } else { self.period }
    }

    fn max_debt(&self) -> f64 {
        max_debt(self.period(), self.lump)
    }

    /// Lowers the debt, if all of it is parts, by parts; else by units, and fewer parts than a unit
    /// has.
    #[inline]
    fn lower(&mut self, [units, parts]: [f64; 2]) {
        if self.beyond == 0.0 {
            self.debt = max(self.debt - parts, 0.0);
        } else {
            let debt = [self.debt, self.beyond];
            [self.debt, self.beyond] = lower(debt, [units, parts], self.unit, self.max_debt());
        }
        if self.debt == 0.0 {
            self.excess = 0.0;
        }
    }

    /// The parts that flow in within these periods, as units and parts.
    fn flow(&self, periods: f64) -> [f64; 2] {
        divide(periods, self.lump, self.unit)
    }

    /// The time in which `parts`, and the units beyond, flow in.
    fn refill_time(&self, parts: f64) -> f64 {
        let Self { beyond, unit, lump, .. } = *self;
        let period = self.period();
        match beyond == 0.0 {
            true => ceil_div(parts, lump) * period,
            false => time_of([parts, beyond], unit, period, lump),
        }
    }

    /// Caps the instant of the newest request at that at which the debt has flowed in.
    fn bound_last(&mut self) {
        self.last = min(self.last, self.at + self.refill_time(self.debt));
    }

    /// Begins to refill at another rate, when the last request has proceeded. If that is yet to
    /// come, what flows in before is added to the debt, whatever units wait. So quotas that
    /// alternate on one key do not raise the debt with each conversion.
    fn restart_refill(&mut self, now: f64, last: f64, max_debt: f64) {
        if last - self.at >= self.period() {
            self.at = last + 1.0 - self.period(); // the next lump comes after what was spent then
        }
        if self.at > now {
            let periods = ceil_div(self.at - now, self.period());
            self.at -= periods * self.period();
            let debt = [self.debt, self.beyond];
            [self.debt, self.beyond] = raise(debt, self.flow(periods), self.unit, max_debt);
        }
        if last > now {
            self.bound_last();
        }
    }

    /// Counts at the rate of another quota.
    fn convert(&mut self, now: f64, params: &BucketParams) {
        let last = max(self.last, self.at);
        self.advance(last);
        let debt = [self.debt, self.beyond];
        ([self.debt, self.beyond], self.excess) =
            convert(debt, self.excess, self.unit, params.unit, params.max_debt);
        (self.unit, self.period, self.lump) = (params.unit, params.period, params.lump);
        self.restart_refill(now, last, params.max_debt);
    }

    fn time_until(&self, parts: f64, now: f64) -> f64 {
        max(self.refill_time(parts) - (now - self.at), 0.0)
    }

    /// The time until later requests may proceed. In a leaky bucket, only the content delays them.
    #[inline]
    fn queue(&self, now: f64) -> f64 {
        if SHAPES { 0.0 } else { max(self.last - now, 0.0) }
    }
}

impl<const SHAPES: bool> Model for Bucket<SHAPES> {
    type Params = BucketParams;
    type Saved = Self;

    const SHAPES: bool = SHAPES;

    /// The departures of requests are the units of a shaper: each has an instant of its own.
    const HOLDS: bool = !SHAPES;

    fn args(params: &BucketParams) -> Vec<f64> {
        let BucketParams { burst, overdraft, unit, period, lump, max_debt } = *params;
        let exponent = grain_exponent(burst * unit / lump);
        match SHAPES {
            true => vec![burst, unit, lump, max_debt, exponent],
            false => vec![burst, overdraft, unit, period, lump, max_debt, exponent],
        }
    }

    fn max_cost(params: &BucketParams) -> f64 {
        params.burst + params.overdraft
    }

    fn beside(params: &BucketParams, held: f64) -> BucketParams {
        BucketParams { burst: params.burst - held, ..*params }
    }

    fn restores_evenly(params: &BucketParams) -> bool {
        params.period == 1.0
    }

    /// The time in which a full leaky bucket drains.
    fn default_wait(params: &BucketParams) -> f64 {
        if SHAPES { ceil_div(params.full(), params.lump) } else { 0.0 }
    }

    /// The longest wait, for another limit too, for which `debt` stays exact.
    fn max_reservable(params: &BucketParams) -> f64 {
        let full = (params.burst + params.overdraft) * params.unit;
        let exact = floor_div(EXACT - full, params.lump) * params.period;
        min(LONGEST_REFILL as f64, max(exact, Self::default_wait(params)))
    }

    #[inline]
    fn initial(now: f64, params: &BucketParams) -> Self {
        let BucketParams { unit, period, lump, .. } = *params;
        Self { at: now, debt: 0.0, beyond: 0.0, excess: 0.0, unit, period, lump, last: 0.0 }
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let form = *bytes.first()?;
        let mut reader = Reader::new(bytes, form)?;
        let state = match (form, SHAPES) {
            (b'T', false) => {
                let [at, debt, unit, lump, _grain] = reader.integers([7, 7, 6, 4, 1])?;
                Self { at, debt, unit, lump, ..Self::EMPTY }
            }
            (b'U', false) => {
                let [at, debt, unit, period, lump, last, excess] =
                    reader.integers([7, 7, 6, 6, 4, 7, 3])?;
                Self { at, debt, excess, unit, period, lump, last, ..Self::EMPTY }
            }
            (b'V', false) => {
                let [at, beyond, period, lump, last, excess] =
                    reader.integers([7, 7, 6, 7, 7, 6])?;
                Self { at, beyond, excess, period, lump, last, ..Self::EMPTY }.settled()
            }
            (b'X', false) => {
                let [at, beyond, debt, unit, lump, last, excess] =
                    reader.integers([7, 7, 6, 6, 4, 7, 3])?;
                Self { at, debt, beyond, excess, unit, lump, last, ..Self::EMPTY }.settled()
            }
            (b'L', true) => {
                let [at, debt, last, unit, lump, excess] = reader.integers([7, 7, 7, 6, 4, 3])?;
                Self { at, debt, excess, unit, lump, last, ..Self::EMPTY }
            }
            (b'M', true) => {
                let [at, debt, last, unit, lump, excess, beyond] =
                    reader.integers([7, 7, 7, 6, 4, 3, 7])?;
                Self { at, debt, beyond, excess, unit, lump, last, ..Self::EMPTY }
            }
            _ => return None,
        };
        Some(state)
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
        let periods = floor_div(now - self.at, self.period());
        self.at += periods * self.period();
        self.lower(match self.beyond == 0.0 {
            true => [0.0, periods * self.lump],
            false => self.flow(periods),
        });
    }

    #[inline]
    fn adopt(&mut self, now: f64, params: &BucketParams, _: &mut Self) -> Option<f64> {
        let mut over = None;
        if self.is_foreign(params) {
            let time = self.reset_after(now);
            if time > 0.0 {
                self.convert(now, params);
            } else {
                *self = Self::initial(now, params);
            }
            over = Some(time);
        }
        self.advance(now);
        if self.debt == 0.0 {
            self.at = now;
        }
        over
    }

    #[inline]
    fn earliest(&self, now: f64, needed: f64, params: &BucketParams) -> Earliest {
        if SHAPES {
            let room = params.full() - needed * self.unit;
            let wait = self.time_until(self.debt, now);
            return Earliest { wait, full: self.time_until(self.debt - room, now) };
        }
        let mut wait = self.queue(now);
        if needed > 0.0 {
            let covered = max(needed - params.overdraft, 0.0);
            let missing = covered * self.unit - (params.full() - self.debt);
            wait = max(self.time_until(missing, now), wait);
        }
        wait.into()
    }

    #[inline]
    fn commit(&mut self, instant: f64, cost: f64, params: &BucketParams) {
        // The request may proceed later than it could. Departures of a shaper are apart, still.
        let periods = floor_div(instant - self.at, self.period());
        let apart = if SHAPES { self.lump } else { 0.0 };
        if self.beyond == 0.0 {
            let refilled = periods * self.lump;
            if self.debt <= refilled - apart {
                (self.debt, self.excess) = (refilled, 0.0);
            }
        } else {
            let refilled @ [units, parts] = self.flow(periods);
            if is_within([self.debt, self.beyond], apart, refilled, self.unit) {
                (self.debt, self.beyond, self.excess) = (parts, units, 0.0);
            }
        }
        let most = if self.is_foreign(params) { self.max_debt() } else { params.max_debt };
        let debt = self.debt + cost * self.unit;
        if self.beyond == 0.0 && debt <= most {
            self.debt = debt;
        } else {
            let debt = [self.debt, self.beyond + cost];
            [self.debt, self.beyond] = settle(debt, self.unit, most);
        }
        self.last = if instant > self.at { instant } else { 0.0 };
    }

    fn refund(&mut self, now: f64, release: &Release, params: &BucketParams) {
        let Release { instant, units } = *release;
        if instant.is_some() && self.last > now {
            return; // later reservations, by another quota, may count on what came in since
        }
        let whole = self.beyond > 0.0; // returns whole units
        let mut back = if whole { units } else { units * self.unit };
        if let Some(instant) = instant {
            // Units that were refilled since, up to `at`, are back already.
            let periods = ceil_div(max(self.at - instant, 0.0), self.period());
            let mut refilled = match whole {
                true => units_of(periods, self.lump, self.unit),
                false => periods * self.lump,
            };
            if self.is_foreign(params) {
                // A request of a token bucket may have proceeded just before a lump.
                let more = if SHAPES { 0.0 } else { 1.0 };
                let lumps = floor_div(now - instant, params.period) + more;
                let other = match whole {
                    true => units_of(lumps, params.lump, params.unit),
                    // `f64::ceil`, as the number can exceed an i64.
                    false => (lumps * params.lump / params.unit * self.unit).ceil(),
                };
                refilled = max(refilled, other);
            }
            back = max(back - refilled, 0.0);
        }
        if back > 0.0 {
            self.lower(if whole { [back, 0.0] } else { [0.0, back] });
            self.bound_last();
        }
    }

    #[inline]
    fn reset_after(&self, now: f64) -> f64 {
        if self.debt > 0.0 { self.time_until(self.debt, now) } else { 0.0 }
    }

    #[inline]
    fn report(&self, now: f64, reset: f64, params: &BucketParams) -> Report {
        let overdrawn = params.overdrawn();
        if reset == 0.0 {
            return Report { remaining: params.burst + overdrawn, replenish: 0.0 };
        }
        let (room, queue) = (params.full() - self.debt, self.queue(now));
        let mut remaining = 0.0;
        if queue == 0.0 {
            remaining = max(floor_div(room, self.unit) + overdrawn, 0.0);
        }
        let missing = (remaining + 1.0 - overdrawn) * self.unit - room;
        Report { remaining, replenish: max(self.time_until(missing, now), queue) }
    }

    #[inline]
    fn pack(&self, now: f64, params: &BucketParams) -> Option<Packed> {
        let is_common = !self.is_foreign(params)
            && self.excess == 0.0
            && self.beyond == 0.0
            && self.last <= now;
        if !is_common {
            return None;
        }
        // Two numbers have no room for the instant of the last request, from which another quota
        // would restore the units, unless it is that of the debt.
        let mut state = *self;
        state.advance(max(self.last, self.at));
        (state.last <= state.at).then_some([state.at as i64, state.debt as i64])
    }

    #[inline]
    fn unpack([at, debt]: Packed, params: &BucketParams) -> Option<Self> {
        Some(Self { debt: debt as f64, ..Self::initial(at as f64, params) })
    }
}
