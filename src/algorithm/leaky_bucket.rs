use super::{
    Action, Ask, Compact, Outcome, Rate, Verdict, ceil_div, floor_div, max, min,
    turns::{Booked, Count, Turn},
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
    pub(super) unit: f64,
    pub(super) tick: f64,
}

impl Count for State {
    fn commit(&mut self, instant: f64, cost: f64) {
        let idle = (instant - self.at) * self.tick;
        if self.debt <= idle - self.tick {
            self.debt = idle; // a turn before this one was given back
        }
        self.debt += cost * self.unit;
    }

    fn refund(&mut self, now: f64, turn: f64, cost: f64) {
        let mut back = cost * self.unit;
        if turn > 0.0 {
            back = max(back - max(now - turn, 0.0) * self.tick, 0.0);
        }
        self.debt = max(self.debt - back, 0.0);
    }
}

impl Params {
    pub(super) fn new(quota: Quota) -> Self {
        let Rate { unit, tick } = Rate::new(quota);
        let most_debt = super::most_debt(1.0, tick);
        Self { burst: quota.burst_size().into(), unit, tick, most_debt }
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
        State { at, debt, unit: self.unit, tick: self.tick }
    }

    pub(super) fn compact(&self, booked: &Booked<State>, now: f64) -> Option<Compact> {
        let state = booked.state;
        let own = state.unit == self.unit && state.tick == self.tick;
        (own && booked.turns.are_over(now)).then_some([state.at, state.debt])
    }

    #[inline]
    pub(super) fn step(&self, stored: &mut Option<Booked<State>>, ask: &Ask) -> Verdict {
        let Params { burst, unit, tick, most_debt } = *self;
        let Ask { action, cost, max_wait, now, .. } = *ask;

        let mut state = State { at: now, debt: 0.0, unit, tick };
        let mut stale = false;
        if let Some(old) = stored {
            if action == Action::Refund {
                old.give_back(ask);
                old.state.debt = old.state.debt.min(most_debt);
            }
            state = old.state;
            if now < state.at {
                (state.at, stale) = (now, true);
            }
            state.debt = max(state.debt - (now - state.at) * state.tick, 0.0);
            state.at = now;
            if state.unit != unit || state.tick != tick {
                state.debt = min((state.debt / state.unit * unit).ceil(), most_debt);
                (state.unit, state.tick, stale) = (unit, tick, true);
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

        if action.writes(admitted || stale) {
            let waits = action.commits() && admitted && wait > 0.0;
            let turn = waits.then_some(Turn { instant: now + wait, cost, before });
            Booked::write(stored, (reset > 0.0).then_some(state), stale, now, turn);
        }
        Verdict { admitted, wait, remaining, replenish, reset, turn: now + wait }
    }
}
