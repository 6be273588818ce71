//! The leaky bucket: a queue with a constant outflow. A request leaves when those before it have
//! left; a request that would not fit into the bucket is denied. Its Lua twin is
//! `scripts/leaky_bucket/model.lua`.
//!
//! `debt` is in parts: `unit` parts are one request of cost 1; `tick` parts flow out in a
//! microsecond.

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
pub(crate) struct LeakyBucketParams {
    burst: f64,
    unit: f64,
    tick: f64,
    /// The most parts of a content; units beyond are counted as such.
    max_debt: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LeakyBucketState {
    pub(super) at: f64,
    /// The content of the bucket at `at`.
    pub(super) debt: f64,
    /// Whole units of the content beyond these parts.
    pub(super) beyond: f64,
    /// The instant of the newest admitted request, if that is after `at`; else 0.
    pub(super) last: f64,
    /// By how many 2^-24 parts `debt` was rounded up when the quota was changed.
    pub(super) excess: f64,
    /// The rate that this was counted at.
    pub(super) unit: f64,
    pub(super) tick: f64,
}

impl LeakyBucketParams {
    pub(super) fn new(quota: Quota) -> Self {
        let Rate { unit, tick } = Rate::new(quota, quota.burst_size());
        let max_debt = max_debt(1.0, tick);
        Self { burst: quota.burst_size() as f64, unit, tick, max_debt }
    }

    fn rate(&self) -> [f64; 2] {
        [self.unit, self.tick]
    }

    fn full(&self) -> f64 {
        self.burst * self.unit
    }
}

impl LeakyBucketState {
    fn rate(&self) -> [f64; 2] {
        [self.unit, self.tick]
    }

    fn max_debt(&self) -> f64 {
        max_debt(1.0, self.tick)
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

    /// The parts that flow out within this time, as units and parts.
    fn flow(&self, time: f64) -> [f64; 2] {
        divide(time, self.tick, self.unit)
    }

    /// The time in which `parts`, and the units beyond, flow out.
    fn drain_time(&self, parts: f64) -> f64 {
        let Self { beyond, unit, tick, .. } = *self;
        match beyond == 0.0 {
            true => ceil_div(parts, tick),
            false => time_of([parts, beyond], unit, 1.0, tick),
        }
    }

    /// Lets later requests leave at the new rate when the last request that waits has left. Those
    /// that wait take the room of that time, whatever their units: so quotas that alternate on one
    /// key do not raise the debt with each conversion.
    fn flow_from_last(&mut self, now: f64, params: &LeakyBucketParams) {
        let (debt, flow) = ([self.debt, self.beyond], self.flow(self.last - now));
        [self.debt, self.beyond] = raise(debt, flow, self.unit, params.max_debt);
        self.bound_last();
    }

    /// Caps the instant of the newest request at that at which the bucket is empty.
    fn bound_last(&mut self) {
        self.last = min(self.last, self.at + self.drain_time(self.debt));
    }

    #[inline]
    fn time_until(&self, parts: f64, now: f64) -> f64 {
        max(self.drain_time(parts) - (now - self.at), 0.0)
    }

    /// Returns whole units, while there are units beyond the parts.
    #[cold]
    fn refund_beyond(&mut self, now: f64, release: &Release, params: &LeakyBucketParams) {
        let mut back = release.units;
        if let Some(instant) = release.instant {
            let mut flowed_out = units_of(now - instant, self.tick, self.unit);
            if self.rate() != params.rate() {
                flowed_out = max(flowed_out, units_of(now - instant, params.tick, params.unit));
            }
            back = max(back - flowed_out, 0.0);
        }
        if back > 0.0 {
            self.lower_beyond(back, 0.0);
            self.bound_last();
        }
    }
}

impl Model for LeakyBucketState {
    type Params = LeakyBucketParams;
    type Saved = Self;

    const SHAPES: bool = true;

    /// The departures of requests are its units: each has an instant of its own.
    const HOLDS: bool = false;

    fn args(params: &LeakyBucketParams) -> Vec<f64> {
        let LeakyBucketParams { burst, unit, tick, max_debt } = *params;
        vec![burst, unit, tick, max_debt, grain_exponent(burst * unit / tick)]
    }

    fn max_cost(params: &LeakyBucketParams) -> f64 {
        params.burst
    }

    fn beside(params: &LeakyBucketParams, _: f64) -> LeakyBucketParams {
        *params
    }

    fn restores_evenly(_: &LeakyBucketParams) -> bool {
        true
    }

    /// The time in which a full bucket drains.
    fn default_wait(params: &LeakyBucketParams) -> f64 {
        ceil_div(params.full(), params.tick)
    }

    /// The longest wait, for another limit too, for which `debt` stays exact.
    fn max_reservable(params: &LeakyBucketParams) -> f64 {
        let exact = floor_div(EXACT - params.full(), params.tick);
        min(LONGEST_REFILL as f64, max(exact, Self::default_wait(params)))
    }

    #[inline]
    fn initial(now: f64, params: &LeakyBucketParams) -> Self {
        let LeakyBucketParams { unit, tick, .. } = *params;
        Self { at: now, debt: 0.0, beyond: 0.0, last: 0.0, excess: 0.0, unit, tick }
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        if let Some(mut reader) = Reader::new(bytes, b'L') {
            let [at, debt, last, unit, tick, excess] = reader.integers([7, 7, 7, 6, 4, 3])?;
            return Some(Self { at, debt, beyond: 0.0, last, excess, unit, tick });
        }
        let mut reader = Reader::new(bytes, b'M')?;
        let [at, debt, last, unit, tick, excess, beyond] =
            reader.integers([7, 7, 7, 6, 4, 3, 7])?;
        Some(Self { at, debt, beyond, last, excess, unit, tick })
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
        let time = now - self.at;
        if self.beyond == 0.0 {
            self.lower(time * self.tick);
        } else {
            let [units, parts] = self.flow(time);
            self.lower_beyond(units, parts);
        }
        self.at = now;
    }

    #[inline]
    fn adopt(&mut self, now: f64, params: &LeakyBucketParams, _: &mut Self::Saved) -> bool {
        let changed = self.rate() != params.rate();
        if changed {
            self.advance(max(self.last, now));
            let debt = [self.debt, self.beyond];
            ([self.debt, self.beyond], self.excess) =
                convert(debt, self.excess, self.unit, params.unit, params.max_debt);
            [self.unit, self.tick] = params.rate();
            self.at = now;
            if self.last > now {
                self.flow_from_last(now, params);
            }
        }
        changed
    }

    #[inline]
    fn earliest(&self, now: f64, needed: f64, params: &LeakyBucketParams) -> Earliest {
        let room = params.full() - needed * self.unit;
        let wait = self.time_until(self.debt, now);
        Earliest { wait, full: self.time_until(self.debt - room, now) }
    }

    #[inline]
    fn commit(&mut self, instant: f64, cost: f64, params: &LeakyBucketParams) {
        // The request may proceed later than it could.
        if self.beyond == 0.0 {
            let idle = (instant - self.at) * self.tick;
            if self.debt <= idle - self.tick {
                (self.debt, self.excess) = (idle, 0.0);
            }
        } else {
            let idle @ [units, parts] = self.flow(instant - self.at);
            if is_within([self.debt, self.beyond], self.tick, idle, self.unit) {
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

    fn refund(&mut self, now: f64, release: &Release, params: &LeakyBucketParams) {
        let Release { instant, units } = *release;
        if instant.is_some() && self.last > now {
            return; // later reservations, by another quota, may count on what came in since
        }
        if self.beyond > 0.0 {
            return self.refund_beyond(now, release, params);
        }
        let mut back = units * self.unit;
        if let Some(instant) = instant {
            // Units that have flowed out since are back already.
            let mut flowed_out = (now - instant) * self.tick;
            if self.rate() != params.rate() {
                let other = (now - instant) * params.tick / params.unit * self.unit;
                flowed_out = max(flowed_out, other.ceil()); // can exceed an i64
            }
            back = max(back - flowed_out, 0.0);
        }
        if back > 0.0 {
            self.lower(back);
            self.bound_last();
        }
    }

    #[inline]
    fn reset_after(&self, now: f64) -> f64 {
        self.time_until(self.debt, now)
    }

    #[inline]
    fn report(&self, now: f64, reset: f64, params: &LeakyBucketParams) -> Report {
        let room = params.full() - self.debt;
        let remaining = max(floor_div(room, self.unit), 0.0);
        if reset == 0.0 {
            return Report { remaining, replenish: 0.0 };
        }
        let missing = (remaining + 1.0) * self.unit - room;
        Report { remaining, replenish: self.time_until(missing, now) }
    }

    #[inline]
    fn pack(&self, now: f64, params: &LeakyBucketParams) -> Option<Packed> {
        let fits = self.rate() == params.rate()
            && self.excess == 0.0
            && self.beyond == 0.0
            && self.last <= now;
        fits.then_some([self.at as i64, self.debt as i64])
    }

    #[inline]
    fn unpack([at, debt]: Packed, params: &LeakyBucketParams) -> Option<Self> {
        Some(Self { debt: debt as f64, ..Self::initial(at as f64, params) })
    }
}
