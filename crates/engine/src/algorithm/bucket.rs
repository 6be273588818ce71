//! The bucket: GCRA, as a debt that flows in at a rate. It is the model of two algorithms. The debt
//! of a token bucket is what it lacks to be full. A leaky bucket is a bucket of burst 0 with an
//! unlimited overdraft, and bounds the wait instead: the debt is its content. The Lua twin is in
//! `scripts/bucket`.
//!
//! A unit has `unit` parts, and a lump of `lump` parts comes every `period`. The debt is counted in
//! lumps, so that a debt of 100 years can be counted at each rate. A larger debt is capped there.

use super::{
    arithmetic::{EXACT, FAR, Rate, ceil_div, floor_div, grain_exponent, product},
    core::Core,
    model::{Earliest, Model, Parameters, Report},
    request::Release,
    state_bytes::Reader,
};
use crate::quota::{LONGEST_REFILL, Quota};

/// A debt: whole lumps, and parts of one more.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
pub(crate) struct Debt {
    pub(super) lumps: i64,
    pub(super) parts: i64,
}

/// The fractions of a part in which an excess is counted.
const EXCESS_UNIT: f64 = (1 << 24) as f64;

#[derive(Clone, Copy, Debug)]
pub(crate) struct BucketParams<const SHAPES: bool> {
    pub(super) burst: i64,
    pub(super) overdraft: i64,
    /// The parts of the burst.
    pub(super) full: i64,
    pub(super) unit: i64,
    pub(super) period: i64,
    pub(super) lump: i64,
    /// The most lumps of a debt: what 100 years refill, or a full bucket if that is more.
    pub(super) most: i64,
    /// No overdraft, and a lump of one part each microsecond, as most quotas have it.
    is_simplest: bool,
}

/// A leaky bucket `SHAPES`: requests wait in the room of the burst, and depart one by one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Bucket<const SHAPES: bool> {
    pub(super) at: i64,
    /// The debt at `at`.
    pub(super) debt: Debt,
    /// By how many 2^-24 parts the debt was rounded up when the quota was changed.
    pub(super) excess: i64,
    /// The rate that this was counted at.
    pub(super) unit: i64,
    pub(super) period: i64,
    pub(super) lump: i64,
    /// The instant of the newest admitted request, if that is after `at`; else 0.
    pub(super) last: i64,
}

impl Debt {
    const NONE: Self = Self { lumps: 0, parts: 0 };

    /// Counts units, and `more` parts, in lumps. A product that is not exact is rounded up.
    #[inline(always)]
    fn of(units: i64, unit: i64, more: i64, lump: i64) -> Self {
        let parts = units.checked_mul(unit).and_then(|parts| parts.checked_add(more));
        match parts {
            Some(parts) if parts < EXACT => Self::of_parts(parts, lump),
            _ => Self { parts: 0, ..Self::rounded(units as f64 * unit as f64 + more as f64, lump) },
        }
    }

    #[inline(always)]
    fn of_parts(parts: i64, lump: i64) -> Self {
        let lumps = floor_div(parts, lump);
        Self { lumps, parts: parts - lumps * lump }
    }

    /// Counts parts that may not be exact: rounds them up, as Lua does.
    #[cold]
    fn rounded(parts: f64, lump: i64) -> Self {
        if parts < EXACT as f64 {
            return Self::of_parts(parts as i64, lump);
        }
        let lumps = (parts / lump as f64).floor() + 1.0; // a double has no odd integers there
        Self { lumps: (lumps as i64).min(FAR + 1), parts: 0 }
    }

    /// The parts of a debt; more than a full bucket has if the debt is larger than that.
    #[inline(always)]
    fn in_parts(self, lump: i64) -> i64 {
        match lump {
            1 => self.lumps,
            _ => product(self.lumps, lump) + self.parts,
        }
    }

    #[inline(always)]
    fn lumps_until_paid(self) -> i64 {
        self.lumps + i64::from(self.parts > 0)
    }

    /// Adds a debt, up to `most` lumps.
    #[inline(always)]
    fn raised(self, by: Self, lump: i64, most: i64) -> Self {
        let mut sum = Self { lumps: self.lumps + by.lumps, parts: self.parts + by.parts };
        if sum.parts >= lump {
            sum = Self { lumps: sum.lumps + 1, parts: sum.parts - lump };
        }
        if sum.lumps < most { sum } else { Self { lumps: most, parts: 0 } }
    }

    /// Subtracts a debt, down to none.
    #[inline(always)]
    fn lowered(self, by: Self, lump: i64) -> Self {
        let mut rest = Self { lumps: self.lumps - by.lumps, parts: self.parts - by.parts };
        if rest.parts < 0 {
            rest = Self { lumps: rest.lumps - 1, parts: rest.parts + lump };
        }
        if rest.lumps < 0 { Self::NONE } else { rest }
    }
}

/// The lumps that come in 100 years.
fn longest(period: i64) -> i64 {
    ceil_div(LONGEST_REFILL as i64, period)
}

impl<const SHAPES: bool> BucketParams<SHAPES> {
    pub(super) fn new(quota: Quota, overdraft: u64, [unit, period, lump]: [i64; 3]) -> Self {
        let (burst, overdraft) = (quota.burst_size() as i64, overdraft as i64);
        let (full, most) = (product(burst, unit), longest(period));
        let is_simplest = (overdraft, period, lump) == (0, 1, 1);
        let params = Self { burst, overdraft, full, unit, period, lump, most, is_simplest };
        Self { most: most.max(params.full_lumps()), ..params }
    }

    pub(super) fn continuous(quota: Quota, overdraft: u64) -> Self {
        let Rate { unit, tick } = Rate::new(quota, quota.burst_size() + overdraft);
        Self::new(quota, overdraft, [unit, 1, tick])
    }

    /// The lumps of a full bucket whose overdraft is spent, too.
    fn full_lumps(&self) -> i64 {
        Debt::of(self.burst + self.overdraft, self.unit, 0, self.lump).lumps_until_paid()
    }

    /// The units that an empty bucket admits: with an overdraft, a request of cost 1.
    #[inline(always)]
    fn overdrawn(&self) -> i64 {
        i64::from(self.overdraft > 0)
    }
}

impl<const SHAPES: bool> Bucket<SHAPES> {
    #[inline(always)]
    fn is_full(&self) -> bool {
        self.debt.lumps | self.debt.parts == 0
    }

    #[inline(always)]
    fn lower(&mut self, by: Debt) {
        self.debt = self.debt.lowered(by, self.lump);
        if self.is_full() {
            self.excess = 0;
        }
    }

    /// The time until the debt is at most these parts.
    #[inline(always)]
    fn time_until(&self, parts: i64, now: i64) -> i64 {
        let lumps = self.debt.lumps - floor_div(parts - self.debt.parts, self.lump);
        (lumps.saturating_mul(self.period) - (now - self.at)).max(0)
    }

    /// Lets time pass; a full bucket refills from now on.
    #[inline(always)]
    fn settle(&mut self, now: i64) {
        self.advance(now);
        if self.is_full() {
            self.at = now;
        }
    }

    /// Caps `last` at the instant at which the debt has flowed in.
    fn bound_last(&mut self) {
        self.last = self.last.min(self.at + self.debt.lumps_until_paid() * self.period);
    }

    /// Begins to refill at another rate, when the last request has proceeded. If that is yet to
    /// come, what flows in before is added to the debt, whatever units wait. So quotas that
    /// alternate on one key do not raise the debt with each conversion.
    fn restart_refill(&mut self, now: i64, last: i64, most: i64) {
        if last - self.at >= self.period {
            self.at = last + 1 - self.period; // the next lump comes after what was spent then
        }
        if self.at > now {
            let lumps = ceil_div(self.at - now, self.period);
            self.at -= lumps * self.period;
            self.debt = self.debt.raised(Debt { lumps, parts: 0 }, self.lump, most);
        }
        if last > now {
            self.bound_last();
        }
    }

    /// Counts at the rate of another quota. Parts of a unit are rounded up, and `excess` remembers
    /// by how much, for the same reason. It computes in doubles, as Lua does.
    #[cold]
    fn convert(&mut self, now: i64, params: &BucketParams<SHAPES>) {
        let last = self.last.max(self.at);
        self.advance(last);
        let parts = self.debt.lumps as f64 * self.lump as f64 + self.debt.parts as f64;
        let (unit, new_unit) = (self.unit as f64, params.unit as f64);
        let mut units = (parts / unit).floor();
        let mut rest = parts - units * unit - self.excess as f64 / EXCESS_UNIT;
        if parts >= EXACT as f64 {
            (units, rest) = (units + 1.0, 0.0);
        }
        let exact = rest / unit * new_unit;
        let more = exact.ceil();
        let excess = ((more - exact) * EXCESS_UNIT).floor().min(EXCESS_UNIT - 1.0); // three bytes
        let debt = Debt::of(units as i64, params.unit, more as i64, params.lump);
        (self.debt, self.excess) =
            (debt.raised(Debt::NONE, params.lump, params.most), excess as i64);
        (self.unit, self.period, self.lump) = (params.unit, params.period, params.lump);
        self.restart_refill(now, last, params.most);
    }

    /// The time until later requests may proceed. In a leaky bucket, only the content delays them.
    #[inline(always)]
    fn queue(&self, now: i64) -> i64 {
        if self.last == 0 || SHAPES { 0 } else { (self.last - now).max(0) }
    }

    #[inline(always)]
    fn is_foreign(&self, params: &BucketParams<SHAPES>) -> bool {
        self.unit != params.unit || self.period != params.period || self.lump != params.lump
    }
}

impl<const SHAPES: bool> Parameters for BucketParams<SHAPES> {
    fn args(&self) -> Vec<f64> {
        let Self { burst, overdraft, unit, period, lump, most, full, .. } = *self;
        let args = [burst, overdraft, unit, period, lump, most].map(|number| number as f64);
        args.into_iter().chain([grain_exponent(full / lump)]).collect()
    }

    #[inline]
    fn max_cost(&self) -> i64 {
        self.burst + self.overdraft
    }

    #[inline]
    fn full(&self) -> i64 {
        self.burst + self.overdrawn()
    }

    #[inline]
    fn drain(&self, units: i64) -> i64 {
        let debt = Debt::of(units, self.unit, 0, self.lump);
        debt.lumps_until_paid().min(self.most) * self.period
    }

    fn restores_evenly(&self) -> bool {
        self.period == 1
    }

    /// The time in which a full leaky bucket drains.
    fn default_wait(&self) -> i64 {
        if SHAPES { self.full_lumps() } else { 0 }
    }

    /// The longest wait, also for another limit, with which no debt is capped.
    fn max_reservable(&self) -> i64 {
        let counted = (self.most - self.full_lumps()) * self.period;
        counted.max(self.default_wait()).min(LONGEST_REFILL as i64)
    }

    #[inline(always)]
    fn beside(&self, held: i64) -> Self {
        // Fewer parts than none, if more is held than the bucket has by another quota.
        let full = self.full - product(held, self.unit);
        Self { burst: self.burst - held, full, ..*self }
    }
}

impl<const SHAPES: bool> Model for Bucket<SHAPES> {
    type Params = BucketParams<SHAPES>;
    type Saved = Self;

    const SHAPES: bool = SHAPES;

    #[inline(always)]
    fn initial(now: i64, params: &BucketParams<SHAPES>) -> Self {
        let BucketParams { unit, period, lump, .. } = *params;
        Self { at: now, debt: Debt::NONE, excess: 0, unit, period, lump, last: 0 }
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let form = *bytes.first()?;
        let mut reader = Reader::new(bytes, form)?;
        let state = match form {
            b'T' => {
                let [at, parts, unit, lump, _grain] = reader.integers([7, 7, 6, 4, 1])?;
                let debt = if lump > 0 { Debt::of(0, unit, parts, lump) } else { Debt::NONE };
                Self { at, debt, excess: 0, unit, period: 1, lump, last: 0 }
            }
            b'Q' => {
                let [at, lumps, parts, last] = reader.integers([7, 7, 6, 7])?;
                let per = reader.signed(6)?;
                let [lump, excess, _grain] = reader.integers([6, 3, 1])?;
                let (unit, period) = if per < 0 { (1, -per) } else { (per, 1) };
                Self { at, debt: Debt { lumps, parts }, excess, unit, period, lump, last }
            }
            _ => return None,
        };
        (state.lump > 0 && state.unit > 0).then_some(state)
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
        let lumps = floor_div(now - self.at, self.period);
        self.at += lumps * self.period;
        self.lower(Debt { lumps, parts: 0 });
    }

    #[inline(always)]
    fn adopt(&mut self, now: i64, params: &BucketParams<SHAPES>, _: &mut Self) -> Option<i64> {
        let mut over = None;
        if self.is_foreign(params) {
            let time = self.reset_after(now);
            if time > 0 {
                self.convert(now, params);
            } else {
                *self = Self::initial(now, params);
            }
            over = Some(time);
        }
        self.settle(now);
        over
    }

    #[inline(always)]
    fn earliest(&self, now: i64, needed: Option<i64>, params: &BucketParams<SHAPES>) -> Earliest {
        if SHAPES {
            let mut earliest = Earliest { wait: self.time_until(0, now), full: 0 };
            if let Some(needed) = needed {
                earliest.full = self.time_until(params.full - product(needed, self.unit), now);
            }
            return earliest;
        }
        let mut wait = self.queue(now);
        if let Some(needed) = needed {
            let covered = product((needed - params.overdraft).max(0), self.unit);
            wait = self.time_until(params.full - covered, now).max(wait);
        }
        Earliest { wait, full: 0 }
    }

    #[inline(always)]
    fn commit(&mut self, instant: i64, cost: i64, params: &BucketParams<SHAPES>) {
        if instant > self.at {
            // The request may proceed later than it could. Departures of a shaper stay apart.
            let lumps = floor_div(instant - self.at, self.period);
            if self.debt.lumps_until_paid() + i64::from(SHAPES) <= lumps {
                (self.debt, self.excess) = (Debt { lumps, parts: 0 }, 0);
            }
        }
        let most = if self.is_foreign(params) { longest(self.period) } else { params.most };
        self.debt = self.debt.raised(Debt::of(cost, self.unit, 0, self.lump), self.lump, most);
        self.last = if instant > self.at { instant } else { 0 };
    }

    fn refund(&mut self, now: i64, release: &Release, params: &BucketParams<SHAPES>) {
        let Release { instant, units } = *release;
        if instant.is_some() && self.last > now {
            return; // later reservations, by another quota, may count on what came in since
        }
        let mut back = Debt::of(units, self.unit, 0, self.lump);
        if let Some(instant) = instant {
            // Units that were refilled since, up to `at`, are back already.
            let lumps = ceil_div((self.at - instant).max(0), self.period);
            let mut refilled = Debt { lumps, parts: 0 };
            if self.is_foreign(params) {
                // A request of a token bucket may have proceeded just before a lump.
                let more = i64::from(!SHAPES);
                let lumps = (floor_div(now - instant, params.period) + more) as f64;
                let parts = lumps * params.lump as f64 / params.unit as f64 * self.unit as f64;
                let other = Debt::rounded(parts.ceil(), self.lump);
                if other > refilled {
                    refilled = other;
                }
                if back.lumps > FAR {
                    // Both may be more than all that is counted.
                    let lumps_of = |parts: f64| (parts / self.lump as f64).floor();
                    let more = lumps_of(units as f64 * self.unit as f64) - lumps_of(parts.ceil());
                    (back, refilled) = (Debt { lumps: more as i64, parts: 0 }, Debt::NONE);
                }
            }
            back = back.lowered(refilled, self.lump);
        }
        if back > Debt::NONE {
            self.lower(back);
            self.bound_last();
        }
    }

    #[inline(always)]
    fn reset_after(&self, now: i64) -> i64 {
        if self.is_full() { 0 } else { self.time_until(0, now) }
    }

    #[inline(always)]
    fn reset_beside(&self, now: i64, _: i64, held: i64, params: &BucketParams<SHAPES>) -> i64 {
        let mut used = *self;
        used.commit(now.max(used.last), held, params);
        used.reset_after(now)
    }

    #[inline(always)]
    fn report(&self, now: i64, _: (i64, i64), params: &BucketParams<SHAPES>) -> Report {
        let (queue, overdrawn) = (self.queue(now), params.overdrawn());
        let room = params.full - self.debt.in_parts(self.lump);
        let is_none = room < 0 || queue > 0;
        let remaining = if is_none { 0 } else { floor_div(room, self.unit) + overdrawn };
        let room = params.full - (remaining + 1 - overdrawn) * self.unit;
        Report { remaining, replenish: self.time_until(room, now).max(queue) }
    }

    #[inline(always)]
    fn simplest(params: &BucketParams<SHAPES>) -> Option<BucketParams<SHAPES>> {
        params.is_simplest.then_some(BucketParams { overdraft: 0, period: 1, lump: 1, ..*params })
    }

    #[inline(always)]
    fn open(core: Core, now: i64, params: &BucketParams<SHAPES>) -> Option<Self> {
        // Behind the debt, the time from `at` to the last request.
        let parts = floor_div(core.amount, params.period);
        let later = core.amount - parts * params.period;
        let last = if later > 0 { core.at + later } else { 0 };
        let debt = Debt::of_parts(parts, params.lump);
        let mut state = Self { debt, last, ..Self::initial(core.at, params) };
        state.settle(now);
        Some(state)
    }

    #[inline(always)]
    fn close(&self, now: i64, params: &BucketParams<SHAPES>) -> Option<Core> {
        if self.is_foreign(params) || self.excess > 0 || self.last > now {
            return None;
        }
        let mut state = *self;
        if self.last > self.at {
            state.advance(self.last);
        }
        // From `last`, another quota restores the units.
        let later = (state.last - state.at).max(0);
        let parts = state.debt.in_parts(state.lump);
        let amount = parts.checked_mul(state.period)?.checked_add(later)?;
        let amount = if state.is_full() { 0 } else { amount };
        (parts < EXACT).then_some(Core { at: state.at, amount })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_debt_beyond_exact_integers_is_rounded_as_in_lua() {
        let debt = Debt::of(212_527_313_460, 250_000, 0, 3);
        assert_eq!(debt.lumps, debt.lumps as f64 as i64);
    }
}
