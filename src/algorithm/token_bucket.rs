use super::{
    Action, Ask, Compact, Outcome, Rate, Refill, Verdict, ceil_div, floor_div, max, min,
    turns::{Booked, Count, Turn},
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
        Verdict { admitted, wait, remaining, replenish, reset, turn: now + wait }
    }
}

impl Count for State {
    fn commit(&mut self, instant: f64, cost: f64) {
        let periods = floor_div(instant - self.at, self.period);
        self.debt = max(self.debt, periods * self.lump) + cost * self.unit;
        self.last = instant;
    }

    fn refund(&mut self, now: f64, turn: f64, cost: f64) {
        let mut back = cost * self.unit;
        if turn > 0.0 {
            back = max(back - max(ceil_div(now - turn, self.period), 0.0) * self.lump, 0.0);
        }
        self.debt = max(self.debt - back, 0.0);
        self.bound_last();
    }
}

impl State {
    /// Nobody waits longer for those before him than for what they spent.
    fn bound_last(&mut self) {
        self.last = min(self.last, self.at + ceil_div(self.debt, self.lump) * self.period);
    }

    fn refill(&mut self, now: f64) {
        let periods = floor_div(now - self.at, self.period);
        self.at += periods * self.period;
        self.debt = max(self.debt - periods * self.lump, 0.0);
    }
}

impl Params {
    pub(super) fn new(quota: Quota, refill: Refill, overdraft: u32) -> Self {
        let (unit, period, lump) = match refill {
            Refill::Continuous => {
                let Rate { unit, tick } = Rate::new(quota);
                (unit, 1.0, tick)
            }
            Refill::Interval => (1.0, quota.window_us() as f64, quota.limit().into()),
        };
        let most_debt = super::most_debt(period, lump);
        let (burst, overdraft) = (quota.burst_size().into(), overdraft.into());
        Self { burst, overdraft, unit, period, lump, most_debt }
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
        State { at, debt, unit, period, lump, last: at }
    }

    pub(super) fn compact(&self, booked: &Booked<State>, now: f64) -> Option<Compact> {
        let (Params { unit, period, lump, .. }, state) = (*self, booked.state);
        let own = state.unit == unit && state.period == period && state.lump == lump;
        let over = booked.turns.are_over(now) && state.last <= now;
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
    pub(super) fn step(&self, stored: &mut Option<Booked<State>>, ask: &Ask) -> Verdict {
        let Params { burst, overdraft, unit, period, lump, most_debt } = *self;
        let Ask { action, cost, max_wait, now, .. } = *ask;

        let mut state = State { at: now, debt: 0.0, unit, period, lump, last: 0.0 };
        let mut stale = false;
        if let Some(old) = stored {
            if action == Action::Refund {
                old.give_back(ask);
                old.state.debt = old.state.debt.min(most_debt);
            }
            state = old.state;
            if now < state.at {
                state.last -= state.at - now;
                (state.at, stale) = (now, true);
            }
            state.refill(now);
            if state.unit != unit || state.period != period || state.lump != lump {
                state.debt = min((state.debt / state.unit * unit).ceil(), most_debt);
                (state.unit, state.period, state.lump, stale) = (unit, period, lump, true);
                state.bound_last();
                state.refill(now);
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
            reset = time_until(debt);
        }

        if action.writes(admitted || stale) {
            let waits = action.commits() && admitted && wait > 0.0;
            let turn = waits.then_some(Turn { instant: now + wait, cost, before });
            Booked::write(stored, (reset > 0.0).then_some(state), stale, now, turn);
        }
        Verdict { admitted, wait, remaining, replenish, reset, turn: now + wait }
    }
}
