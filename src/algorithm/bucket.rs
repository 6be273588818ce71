//! The bucket: GCRA, as a debt that flows in at a rate. It is the model of two algorithms. The debt
//! of a token bucket is what it lacks to be full. A leaky bucket is a bucket of burst 0 with an
//! unlimited overdraft, and bounds the wait instead: the debt is its content. The Lua twin is in
//! `scripts/bucket`.
//!
//! A unit has `unit` parts, and a lump of `lump` parts comes every `period`. The debt is counted in
//! lumps, so that what 100 years refill can be counted at each rate. A larger debt is counted as
//! that.

use super::{
    arithmetic::{EXACT, Rate, ceil, ceil_div, floor, floor_div, grain_exponent, max, min},
    model::{Earliest, Model, Report},
    packed::Packed,
    request::Release,
    state_bytes::Reader,
};
use crate::quota::{LONGEST_REFILL, Quota};

/// Lumps, and parts of another one.
type Debt = [f64; 2];

/// The number of units of an excess in a part.
const EXCESS_UNIT: f64 = (1 << 24) as f64;

#[derive(Clone, Copy, Debug)]
pub(crate) struct BucketParams {
    pub(super) burst: f64,
    pub(super) overdraft: f64,
    pub(super) unit: f64,
    pub(super) period: f64,
    pub(super) lump: f64,
    /// The most lumps of a debt: those of 100 years, or of a full bucket.
    pub(super) most: f64,
    /// True for a leaky bucket: requests wait in the room of the burst, and depart one by one.
    pub(super) shapes: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Bucket {
    pub(super) at: f64,
    /// The debt at `at`.
    pub(super) debt: Debt,
    /// By how many 2^-24 parts the debt was rounded up when the quota was changed.
    pub(super) excess: f64,
    /// The rate that this was counted at.
    pub(super) unit: f64,
    pub(super) period: f64,
    pub(super) lump: f64,
    /// The instant of the newest admitted request, if that is after `at`; else 0.
    pub(super) last: f64,
}

/// Counts units, and `more` parts, in lumps. A product that is not exact is rounded up.
#[inline]
fn debt_of(units: f64, unit: f64, more: f64, lump: f64) -> Debt {
    let parts = units * unit + more;
    if parts >= EXACT {
        return [(parts / lump).floor() + 1.0, 0.0];
    }
    let lumps = floor_div(parts, lump);
    [lumps, parts - lumps * lump]
}

/// Returns the parts of a debt: above 2^53, more than a full bucket, they are not exact.
#[inline]
fn parts_of([lumps, parts]: Debt, lump: f64) -> f64 {
    lumps * lump + parts
}

#[inline]
fn lumps_until_paid([lumps, parts]: Debt) -> f64 {
    if parts > 0.0 { lumps + 1.0 } else { lumps }
}

/// Adds debts, up to `most` lumps.
#[inline]
fn raised([lumps, parts]: Debt, by: Debt, lump: f64, most: f64) -> Debt {
    let (mut lumps, mut parts) = (lumps + by[0], parts + by[1]);
    if parts >= lump {
        (lumps, parts) = (lumps + 1.0, parts - lump);
    }
    if lumps < most { [lumps, parts] } else { [most, 0.0] }
}

/// Subtracts a debt, down to 0.
#[inline]
fn lowered([lumps, parts]: Debt, by: Debt, lump: f64) -> Debt {
    let (mut lumps, mut parts) = (lumps - by[0], parts - by[1]);
    if parts < 0.0 {
        (lumps, parts) = (lumps - 1.0, parts + lump);
    }
    if lumps < 0.0 { [0.0; 2] } else { [lumps, parts] }
}

/// The lumps of 100 years.
fn longest(period: f64) -> f64 {
    ceil_div(LONGEST_REFILL as f64, period)
}

impl BucketParams {
    pub(super) fn new(quota: Quota, overdraft: u64, [unit, period, lump]: [f64; 3]) -> Self {
        let (burst, overdraft) = (quota.burst_size() as f64, overdraft as f64);
        let (shapes, most) = (false, longest(period));
        let mut params = Self { burst, overdraft, unit, period, lump, most, shapes };
        params.most = max(most, params.full_lumps());
        params
    }

    pub(super) fn continuous(quota: Quota, overdraft: u64) -> Self {
        let Rate { unit, tick } = Rate::new(quota, quota.burst_size() + overdraft);
        Self::new(quota, overdraft, [unit, 1.0, tick])
    }

    pub(super) fn full(&self) -> f64 {
        self.burst * self.unit
    }

    /// The lumps of a full bucket whose overdraft is spent, too.
    fn full_lumps(&self) -> f64 {
        lumps_until_paid(debt_of(self.burst + self.overdraft, self.unit, 0.0, self.lump))
    }

    /// The units that an empty bucket admits: with an overdraft, a request of cost 1.
    fn overdrawn(&self) -> f64 {
        if self.overdraft > 0.0 { 1.0 } else { 0.0 }
    }
}

impl Bucket {
    /// Returns whether this was counted at another rate.
    #[inline]
    fn is_foreign(&self, params: &BucketParams) -> bool {
        self.unit != params.unit || self.period != params.period || self.lump != params.lump
    }

    #[inline]
    fn is_full(&self) -> bool {
        self.debt == [0.0; 2]
    }

    #[inline]
    fn lower(&mut self, by: Debt) {
        self.debt = lowered(self.debt, by, self.lump);
        if self.is_full() {
            self.excess = 0.0;
        }
    }

    /// The time until the debt is at most these parts.
    fn time_until(&self, parts: f64, now: f64) -> f64 {
        let lumps = self.debt[0] - floor_div(parts - self.debt[1], self.lump);
        max(lumps * self.period - (now - self.at), 0.0)
    }

    /// Caps the instant of the newest request at that at which the debt has flowed in.
    fn bound_last(&mut self) {
        self.last = min(self.last, self.at + lumps_until_paid(self.debt) * self.period);
    }

    /// Begins to refill at another rate, when the last request has proceeded. If that is yet to
    /// come, what flows in before is added to the debt, whatever units wait. So quotas that
    /// alternate on one key do not raise the debt with each conversion.
    fn restart_refill(&mut self, now: f64, last: f64, most: f64) {
        if last - self.at >= self.period {
            self.at = last + 1.0 - self.period; // the next lump comes after what was spent then
        }
        if self.at > now {
            let lumps = ceil_div(self.at - now, self.period);
            self.at -= lumps * self.period;
            self.debt = raised(self.debt, [lumps, 0.0], self.lump, most);
        }
        if last > now {
            self.bound_last();
        }
    }

    /// Counts at the rate of another quota. Parts of a unit are rounded up, and by how much is
    /// remembered, for the same reason. The computation is that of Lua, in doubles.
    fn convert(&mut self, now: f64, params: &BucketParams) {
        let last = max(self.last, self.at);
        self.advance(last);
        let parts = parts_of(self.debt, self.lump);
        let mut units = (parts / self.unit).floor();
        let mut rest = parts - units * self.unit - self.excess / EXCESS_UNIT;
        if parts >= EXACT {
            (units, rest) = (units + 1.0, 0.0);
        }
        let exact = rest / self.unit * params.unit;
        let more = ceil(exact);
        self.excess = min(floor((more - exact) * EXCESS_UNIT), EXCESS_UNIT - 1.0); // three bytes
        let debt = debt_of(units, params.unit, more, params.lump);
        self.debt = raised(debt, [0.0; 2], params.lump, params.most);
        (self.unit, self.period, self.lump) = (params.unit, params.period, params.lump);
        self.restart_refill(now, last, params.most);
    }

    /// The time until later requests may proceed. In a leaky bucket, only the content delays them.
    #[inline]
    fn queue(&self, now: f64, params: &BucketParams) -> f64 {
        if params.shapes { 0.0 } else { max(self.last - now, 0.0) }
    }
}

impl Model for Bucket {
    type Params = BucketParams;
    type Saved = Self;

    fn args(params: &BucketParams) -> Vec<f64> {
        let BucketParams { burst, overdraft, unit, period, lump, most, .. } = *params;
        let exponent = grain_exponent(burst * unit / lump);
        vec![burst, overdraft, unit, period, lump, most, exponent]
    }

    fn shapes(params: &BucketParams) -> bool {
        params.shapes
    }

    /// The departures of requests are the units of a shaper: each has an instant of its own.
    fn holds(params: &BucketParams) -> bool {
        !params.shapes
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
        if params.shapes { params.full_lumps() } else { 0.0 }
    }

    /// The longest wait, for another limit too, with which the whole debt is counted.
    fn max_reservable(params: &BucketParams) -> f64 {
        let counted = (params.most - params.full_lumps()) * params.period;
        min(LONGEST_REFILL as f64, max(counted, Self::default_wait(params)))
    }

    #[inline]
    fn initial(now: f64, params: &BucketParams) -> Self {
        let BucketParams { unit, period, lump, .. } = *params;
        Self { at: now, debt: [0.0; 2], excess: 0.0, unit, period, lump, last: 0.0 }
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let form = *bytes.first()?;
        let mut reader = Reader::new(bytes, form)?;
        let state = match form {
            b'T' => {
                let [at, parts, unit, lump, _grain] = reader.integers([7, 7, 6, 4, 1])?;
                if lump == 0.0 {
                    return None;
                }
                let debt = debt_of(0.0, unit, parts, lump);
                Self { at, debt, excess: 0.0, unit, period: 1.0, lump, last: 0.0 }
            }
            b'Q' => {
                let [at, lumps, parts, last] = reader.integers([7, 7, 6, 7])?;
                let per = reader.signed(6)?;
                let [lump, excess, _grain] = reader.integers([6, 3, 1])?;
                let (unit, period) = if per < 0.0 { (1.0, -per) } else { (per, 1.0) };
                Self { at, debt: [lumps, parts], excess, unit, period, lump, last }
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
        let lumps = floor_div(now - self.at, self.period);
        self.at += lumps * self.period;
        self.lower([lumps, 0.0]);
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
        if self.is_full() {
            self.at = now;
        }
        over
    }

    #[inline]
    fn earliest(&self, now: f64, needed: f64, params: &BucketParams) -> Earliest {
        if params.shapes {
            let room = params.full() - needed * self.unit;
            return Earliest { wait: self.time_until(0.0, now), full: self.time_until(room, now) };
        }
        let mut wait = self.queue(now, params);
        if needed > 0.0 {
            let covered = max(needed - params.overdraft, 0.0);
            wait = max(self.time_until(params.full() - covered * self.unit, now), wait);
        }
        wait.into()
    }

    #[inline]
    fn commit(&mut self, instant: f64, cost: f64, params: &BucketParams) {
        // The request may proceed later than it could. Departures of a shaper are apart, still.
        let lumps = floor_div(instant - self.at, self.period);
        let apart = if params.shapes { 1.0 } else { 0.0 };
        if lumps_until_paid(self.debt) + apart <= lumps {
            (self.debt, self.excess) = ([lumps, 0.0], 0.0);
        }
        let most = if self.is_foreign(params) { longest(self.period) } else { params.most };
        self.debt = raised(self.debt, debt_of(cost, self.unit, 0.0, self.lump), self.lump, most);
        self.last = if instant > self.at { instant } else { 0.0 };
    }

    fn refund(&mut self, now: f64, release: &Release, params: &BucketParams) {
        let Release { instant, units } = *release;
        if instant.is_some() && self.last > now {
            return; // later reservations, by another quota, may count on what came in since
        }
        let mut back = debt_of(units, self.unit, 0.0, self.lump);
        if let Some(instant) = instant {
            // Units that were refilled since, up to `at`, are back already.
            let mut refilled = [ceil_div(max(self.at - instant, 0.0), self.period), 0.0];
            if self.is_foreign(params) {
                // A request of a token bucket may have proceeded just before a lump.
                let more = if params.shapes { 0.0 } else { 1.0 };
                let lumps = floor_div(now - instant, params.period) + more;
                // `f64::ceil`, as the number can exceed an i64.
                let parts = (lumps * params.lump / params.unit * self.unit).ceil();
                let other = debt_of(0.0, self.unit, parts, self.lump);
                if other > refilled {
                    refilled = other;
                }
            }
            back = lowered(back, refilled, self.lump);
        }
        if back > [0.0; 2] {
            self.lower(back);
            self.bound_last();
        }
    }

    #[inline]
    fn reset_after(&self, now: f64) -> f64 {
        if self.is_full() { 0.0 } else { self.time_until(0.0, now) }
    }

    #[inline]
    fn report(&self, now: f64, reset: f64, params: &BucketParams) -> Report {
        let overdrawn = params.overdrawn();
        if reset == 0.0 {
            return Report { remaining: params.burst + overdrawn, replenish: 0.0 };
        }
        let queue = self.queue(now, params);
        let mut remaining = 0.0;
        if queue == 0.0 {
            let room = params.full() - parts_of(self.debt, self.lump);
            remaining = max(floor_div(room, self.unit) + overdrawn, 0.0);
        }
        let room = params.full() - (remaining + 1.0 - overdrawn) * self.unit;
        Report { remaining, replenish: max(self.time_until(room, now), queue) }
    }

    #[inline]
    fn pack(&self, now: f64, params: &BucketParams) -> Option<Packed> {
        if self.is_foreign(params) || self.excess != 0.0 || self.last > now {
            return None;
        }
        // Two numbers have no room for the instant of the last request, from which another quota
        // would restore the units, unless it is that of the debt.
        let mut state = *self;
        state.advance(max(self.last, self.at));
        let parts = parts_of(state.debt, state.lump);
        (state.last <= state.at && parts < EXACT).then_some([state.at as i64, parts as i64])
    }

    #[inline]
    fn unpack([at, parts]: Packed, params: &BucketParams) -> Option<Self> {
        let debt = debt_of(0.0, params.unit, parts as f64, params.lump);
        Some(Self { debt, ..Self::initial(at as f64, params) })
    }
}
