//! The leaky bucket: requests leave at a steady rate, and the others queue. Its Lua twin is `scripts/leaky_bucket.lua`.

use super::{
    Ask, Compact, Outcome, Rate, Verdict, ceil_div, convert, floor_div, max, min,
    reservations::{Count, Release, Reservation, Reserved},
};
use crate::quota::Quota;

/// The parameters of `scripts/leaky_bucket.lua`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Params {
    burst: f64,
    unit: f64,
    tick: f64,
    most_debt: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct State {
    pub(super) at: f64,
    pub(super) debt: f64,
    /// By how much `debt` was rounded up when the quota was changed, in 2^-24 parts.
    pub(super) excess: f64,
    pub(super) unit: f64,
    pub(super) tick: f64,
}

impl Count for State {
    type Params = Params;

    fn advance(&mut self, now: f64) {
        self.lower((now - self.at) * self.tick);
        self.at = now;
    }

    fn commit(&mut self, instant: f64, cost: f64) {
        let idle = (instant - self.at) * self.tick;
        if self.debt <= idle - self.tick {
            (self.debt, self.excess) = (idle, 0.0); // it proceeds later than it could
        }
        self.debt += cost * self.unit;
    }

    fn refund(&mut self, now: f64, release: &Release, params: &Params) {
        let Release { instant, units, kept } = *release;
        let mut back = units * self.unit;
        if let Some(instant) = instant {
            // What has flowed out since is back already. What is kept was the first to flow out.
            let mut flowed_out = (now - instant) * self.tick;
            if self.rate() != params.rate() {
                let other = (now - instant) * params.tick / params.unit * self.unit;
                flowed_out = max(flowed_out, other.ceil()); // beyond an i64, too
            }
            back = max(back - max(flowed_out - kept * self.unit, 0.0), 0.0);
        }
        self.lower(back);
    }

    fn reset_after(&self, now: f64) -> f64 {
        max(ceil_div(self.debt, self.tick) - (now - self.at), 0.0)
    }

    fn step_back(&mut self, now: f64) -> bool {
        let back = now < self.at;
        self.at = min(self.at, now);
        back
    }
}

impl State {
    fn rate(&self) -> [f64; 2] {
        [self.unit, self.tick]
    }

    fn lower(&mut self, parts: f64) {
        self.debt = max(self.debt - parts, 0.0);
        if self.debt == 0.0 {
            self.excess = 0.0;
        }
    }
}

impl Params {
    pub(super) fn new(quota: Quota) -> Self {
        let Rate { unit, tick } = Rate::new(quota, quota.burst_size().into());
        let most_debt = super::most_debt(1.0, tick);
        Self { burst: quota.burst_size().into(), unit, tick, most_debt }
    }

    fn rate(&self) -> [f64; 2] {
        [self.unit, self.tick]
    }

    pub(super) fn args(&self) -> Vec<f64> {
        vec![self.burst, self.unit, self.tick, self.most_debt]
    }

    /// The time in which a full bucket runs dry.
    pub(super) fn drain_time(&self) -> f64 {
        ceil_div(self.burst * self.unit, self.tick)
    }

    /// The longest wait, for another limit too, for which `debt` stays exact.
    pub(super) fn longest_wait(&self) -> f64 {
        let full = self.burst * self.unit;
        max(floor_div(super::EXACT - full, self.tick), self.drain_time())
    }

    pub(super) fn expand(&self, [at, debt]: Compact) -> State {
        State { at, debt, excess: 0.0, unit: self.unit, tick: self.tick }
    }

    pub(super) fn compact(&self, reserved: &Reserved<State>, now: f64) -> Option<Compact> {
        let state = reserved.state;
        let own = state.rate() == self.rate() && state.excess == 0.0;
        (own && reserved.waiting.is_over(now)).then_some([state.at, state.debt])
    }

    #[inline]
    pub(super) fn step(&self, stored: &mut Option<Reserved<State>>, ask: &Ask) -> Verdict {
        let Params { burst, unit, tick, most_debt } = *self;
        let Ask { action, cost, max_wait, now, .. } = *ask;

        let mut state = State { at: now, debt: 0.0, excess: 0.0, unit, tick };
        let mut stale = false;
        if let Some(old) = stored {
            state = old.state;
            stale = state.step_back(now);
            state.advance(now);
            if state.rate() != self.rate() {
                stale = true;
                (state.debt, state.excess) =
                    convert([state.debt, state.excess], state.unit, unit, most_debt);
                (state.unit, state.tick) = (unit, tick);
            }
        }

        let time_until = |parts: f64| max(ceil_div(parts, tick), 0.0);

        let full = burst * unit;
        let wait = time_until(state.debt);
        let late = max(time_until(state.debt - (full - ask.needed() * unit)), wait - max_wait);
        let Outcome { admitted, wait } = ask.outcome(wait, late);

        let before = state;
        if action.commits() && admitted {
            state.commit(now + wait, cost);
            state.debt = min(state.debt, most_debt);
        }

        let debt = state.debt;
        let remaining = max(floor_div(full - debt, unit), 0.0);
        let (mut replenish, mut reset) = (0.0, 0.0);
        if debt > 0.0 {
            replenish = time_until((remaining + 1.0) * unit - (full - debt));
            reset = time_until(debt);
        }

        if action.commits() && (admitted || stale) {
            let reserved = admitted.then_some((Reservation { instant: now + wait, cost }, before));
            Reserved::write(stored, (reset > 0.0).then_some(state), stale, now, reserved);
        }
        Verdict { admitted, wait, remaining, replenish, reset, instant: now + wait }
    }
}
