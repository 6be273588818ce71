//! The token bucket: a debt that is repaid at a steady rate, up to the burst. Its Lua twin is `scripts/token_bucket.lua`.

use super::{
    Action, Ask, Compact, Outcome, Rate, Refill, Verdict, ceil_div, convert, floor_div, max, min,
    reservations::{Count, Release, Reservation, Reserved},
};
use crate::quota::Quota;

/// The parameters of `scripts/token_bucket.lua`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Params {
    burst: f64,
    overdraft: f64,
    unit: f64,
    period: f64,
    lump: f64,
    /// What flows in within the longest refill; a changed quota could make it more.
    most_debt: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct State {
    pub(super) at: f64,
    pub(super) debt: f64,
    /// By how much `debt` was rounded up when the quota was changed, in 2^-24 parts.
    pub(super) excess: f64,
    pub(super) unit: f64,
    pub(super) period: f64,
    pub(super) lump: f64,
    pub(super) last: f64,
}

/// What comes of a check in the most common case. The rest of the verdict is computed when the key is not locked any
/// more.
pub(crate) struct Checked<'a> {
    params: &'a Params,
    pub(crate) outcome: Outcome,
    debt: f64,
    now: f64,
}

impl Checked<'_> {
    #[inline]
    pub(crate) fn verdict(&self) -> Verdict {
        let Self { params: Params { burst, unit, lump, .. }, outcome, debt, now } = *self;
        let Outcome { admitted, wait } = outcome;
        let room = burst * unit - debt;
        let remaining = max(floor_div(room, *unit), 0.0);
        let replenish = ceil_div((remaining + 1.0) * unit - room, *lump);
        let reset = ceil_div(debt, *lump);
        Verdict { admitted, wait, remaining, replenish, reset, instant: now + wait }
    }
}

impl Count for State {
    type Params = Params;

    fn advance(&mut self, now: f64) {
        let periods = floor_div(now - self.at, self.period);
        self.at += periods * self.period;
        self.lower(periods * self.lump);
    }

    fn commit(&mut self, instant: f64, cost: f64) {
        let refilled = floor_div(instant - self.at, self.period) * self.lump;
        if refilled > self.debt {
            (self.debt, self.excess) = (refilled, 0.0);
        }
        self.debt += cost * self.unit;
        self.last = instant;
    }

    fn refund(&mut self, now: f64, release: &Release, params: &Params) {
        let Release { instant, units, kept } = *release;
        let mut back = units * self.unit;
        if let Some(instant) = instant {
            // What has been refilled since, up to `at`, is back already. It has repaid what is kept first.
            let mut refilled = ceil_div(max(self.at - instant, 0.0), self.period) * self.lump;
            if self.rate() != params.rate() {
                let lumps = floor_div(now - instant, params.period) + 1.0;
                // It can be beyond an i64, which the ceil of this crate goes by.
                refilled = max(refilled, (lumps * params.lump / params.unit * self.unit).ceil());
            }
            back = max(back - max(refilled - kept * self.unit, 0.0), 0.0);
        }
        self.lower(back);
        self.bound_last();
    }

    fn reset_after(&self, now: f64) -> f64 {
        match self.debt > 0.0 {
            true => max(ceil_div(self.debt, self.lump) * self.period - (now - self.at), 0.0),
            false => 0.0,
        }
    }

    fn step_back(&mut self, now: f64) -> bool {
        let back = self.at - now;
        if back > 0.0 {
            self.last -= back;
            self.at = now;
        }
        back > 0.0
    }
}

impl State {
    fn lower(&mut self, parts: f64) {
        self.debt = max(self.debt - parts, 0.0);
        if self.debt == 0.0 {
            self.excess = 0.0;
        }
    }

    /// Caps the delay behind earlier requests at the time in which their debt is refilled.
    fn bound_last(&mut self) {
        self.last = min(self.last, self.at + ceil_div(self.debt, self.lump) * self.period);
    }

    fn rate(&self) -> [f64; 3] {
        [self.unit, self.period, self.lump]
    }
}

impl Params {
    pub(super) fn new(quota: Quota, refill: Refill, overdraft: u32) -> Self {
        let (unit, period, lump) = match refill {
            Refill::Continuous => {
                let size = u64::from(quota.burst_size()) + u64::from(overdraft);
                let Rate { unit, tick } = Rate::new(quota, size);
                (unit, 1.0, tick)
            }
            Refill::Interval => (1.0, quota.window_us() as f64, quota.limit().into()),
        };
        let most_debt = super::most_debt(period, lump);
        let (burst, overdraft) = (quota.burst_size().into(), overdraft.into());
        Self { burst, overdraft, unit, period, lump, most_debt }
    }

    fn rate(&self) -> [f64; 3] {
        [self.unit, self.period, self.lump]
    }

    pub(super) fn args(&self) -> Vec<f64> {
        vec![self.burst, self.overdraft, self.unit, self.period, self.lump, self.most_debt]
    }

    /// The longest wait for which `debt` stays exact.
    pub(super) fn longest_wait(&self) -> f64 {
        let full = (self.burst + self.overdraft) * self.unit;
        floor_div(super::EXACT - full, self.lump) * self.period
    }

    pub(super) fn expand(&self, [at, debt]: Compact) -> State {
        let Params { unit, period, lump, .. } = *self;
        State { at, debt, excess: 0.0, unit, period, lump, last: at }
    }

    pub(super) fn compact(&self, reserved: &Reserved<State>, now: f64) -> Option<Compact> {
        let state = reserved.state;
        let own = state.rate() == self.rate() && state.excess == 0.0;
        let over = reserved.waiting.is_over(now) && state.last <= now;
        (own && over).then_some([state.at, state.debt])
    }

    /// Decides as [`step`](Params::step) does, in the most common case: a check that does not wait, of a bucket that
    /// refills continuously and has no overdraft. None in others.
    #[inline]
    pub(super) fn check_quickly(&self, numbers: &mut Compact, ask: &Ask) -> Option<Checked<'_>> {
        let Params { burst, overdraft, unit, period, lump, most_debt } = *self;
        let (Ask { action, cost, max_wait, now, outcome, .. }, [at, debt]) = (*ask, *numbers);
        let plain = period == 1.0 && overdraft == 0.0 && action == Action::Check;
        if !plain || max_wait > 0.0 || outcome.is_some() || now < at {
            return None;
        }
        let mut debt = max(debt - (now - at) * lump, 0.0);
        let after = debt + cost * unit;
        if after >= most_debt {
            return None;
        }
        let missing = after - burst * unit;
        let mut outcome = Outcome { admitted: missing <= 0.0, wait: 0.0 };
        if outcome.admitted {
            debt = after;
            *numbers = [now, debt];
        } else {
            outcome.wait = ceil_div(missing, lump);
        }
        Some(Checked { params: self, outcome, debt, now })
    }

    #[inline]
    pub(super) fn step(&self, stored: &mut Option<Reserved<State>>, ask: &Ask) -> Verdict {
        let Params { burst, overdraft, unit, period, lump, most_debt } = *self;
        let Ask { action, cost, max_wait, now, .. } = *ask;

        let mut state = State { at: now, debt: 0.0, excess: 0.0, unit, period, lump, last: 0.0 };
        let mut stale = false;
        if let Some(old) = stored {
            state = old.state;
            stale = state.step_back(now);
            state.advance(now);
            if state.rate() != self.rate() {
                stale = true;
                (state.debt, state.excess) =
                    convert([state.debt, state.excess], state.unit, unit, most_debt);
                (state.unit, state.period, state.lump) = (unit, period, lump);
                state.bound_last();
                state.advance(now);
            }
            if state.debt == 0.0 {
                state.at = now;
            }
        }

        let since = now - state.at;
        let time_until = |parts: f64| max(ceil_div(parts, lump) * period - since, 0.0);

        let full = burst * unit;
        let mut wait = max(state.last - now, 0.0);
        let needed = ask.needed();
        if needed > 0.0 {
            let covered = max(needed - overdraft, 0.0);
            wait = max(time_until(covered * unit - (full - state.debt)), wait);
        }
        let Outcome { admitted, wait } = ask.outcome(wait, max(wait - max_wait, 0.0));

        let before = state;
        if action.commits() && admitted {
            state.commit(now + wait, cost);
            state.debt = min(state.debt, most_debt);
        }

        let State { debt, last, .. } = state;
        let overdrawn = if overdraft > 0.0 { 1.0 } else { 0.0 };
        let (mut remaining, mut replenish, mut reset) = (burst + overdrawn, 0.0, 0.0);
        if debt > 0.0 {
            remaining = 0.0;
            if last <= now {
                remaining = max(floor_div(full - debt, unit) + overdrawn, 0.0);
            }
            replenish = time_until((remaining + 1.0 - overdrawn) * unit - (full - debt));
            replenish = max(replenish, last - now);
            reset = state.reset_after(now);
        }

        if action.commits() && (admitted || stale) {
            let reserved = admitted.then_some((Reservation { instant: now + wait, cost }, before));
            Reserved::write(stored, (reset > 0.0).then_some(state), stale, now, reserved);
        }
        Verdict { admitted, wait, remaining, replenish, reset, instant: now + wait }
    }
}
