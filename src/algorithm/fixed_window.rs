//! The fixed window: one count for each window of the clock. Its Lua twin is `scripts/fixed_window.lua`.

use super::{
    Ask, Compact, Outcome, Verdict, max,
    reservations::{Count, Release, Reservation, Reserved},
};
use crate::quota::Quota;

/// The parameters of `scripts/fixed_window.lua`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Params {
    limit: f64,
    window: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct State {
    pub(super) start: f64,
    pub(super) ahead: f64,
    pub(super) count: f64,
    pub(super) length: f64,
}

impl Count for State {
    type Params = ();

    fn advance(&mut self, now: f64) {
        let windows = ((now - self.start) / self.length).floor();
        self.start += windows * self.length;
        if windows > self.ahead {
            (self.ahead, self.count) = (0.0, 0.0);
        } else {
            self.ahead -= windows;
        }
    }

    fn commit(&mut self, instant: f64, cost: f64) {
        let index = ((instant - self.start) / self.length).floor();
        if index > self.ahead {
            (self.ahead, self.count) = (index, 0.0);
        }
        self.count += cost;
    }

    fn refund(&mut self, _now: f64, release: &Release, (): &()) {
        let Release { instant, units, .. } = *release;
        let index = |instant: f64| ((instant - self.start) / self.length).floor();
        if instant.is_none_or(|instant| index(instant) == self.ahead) {
            self.count = max(self.count - units, 0.0);
        }
    }

    fn reset_after(&self, now: f64) -> f64 {
        match self.ahead > 0.0 || self.count > 0.0 {
            true => self.start + (self.ahead + 1.0) * self.length - now,
            false => 0.0,
        }
    }

    fn step_back(&mut self, now: f64) -> bool {
        let back = now < self.start;
        if back {
            self.start = now;
        }
        back
    }
}

impl Params {
    pub(super) fn new(quota: Quota) -> Self {
        Self { limit: quota.limit().into(), window: quota.window_us() as f64 }
    }

    pub(super) fn args(&self) -> Vec<f64> {
        vec![self.limit, self.window]
    }

    pub(super) fn expand(&self, [start, count]: Compact) -> State {
        State { start, ahead: 0.0, count, length: self.window }
    }

    pub(super) fn compact(&self, reserved: &Reserved<State>, now: f64) -> Option<Compact> {
        let state = reserved.state;
        let own = state.length == self.window;
        let over = reserved.waiting.is_over(now) && state.ahead == 0.0;
        (own && over).then_some([state.start, state.count])
    }

    #[inline]
    pub(super) fn step(&self, stored: &mut Option<Reserved<State>>, ask: &Ask) -> Verdict {
        let Params { limit, window } = *self;
        let Ask { action, cost, max_wait, now, .. } = *ask;

        let mut state = State { start: now, ahead: 0.0, count: 0.0, length: window };
        let mut stale = false;
        if let Some(old) = stored {
            state = old.state;
            stale = state.step_back(now);
            state.advance(now);
            if state.length != window {
                (state.length, stale) = (window, true);
                state.advance(now);
            }
            if state.ahead == 0.0 && state.count == 0.0 {
                state.start = now;
            }
        }

        let full = state.count + ask.needed() > limit;
        let index = if full { state.ahead + 1.0 } else { state.ahead };
        let wait = max(state.start + index * window - now, 0.0);
        let Outcome { admitted, wait } = ask.outcome(wait, max(wait - max_wait, 0.0));

        let before = state;
        if action.commits() && admitted {
            state.commit(now + wait, cost);
        }

        let State { start, ahead, count, .. } = state;
        let (mut remaining, mut replenish, mut reset) = (limit, 0.0, 0.0);
        if ahead > 0.0 || count > 0.0 {
            remaining = if ahead == 0.0 { max(limit - count, 0.0) } else { 0.0 };
            let opening = if ahead > 0.0 && count < limit { ahead } else { ahead + 1.0 };
            replenish = start + opening * window - now;
            reset = state.reset_after(now);
        }

        if action.commits() && (admitted || stale) {
            let reserved = admitted.then_some((Reservation { instant: now + wait, cost }, before));
            Reserved::write(stored, (reset > 0.0).then_some(state), stale, now, reserved);
        }
        Verdict { admitted, wait, remaining, replenish, reset, instant: now + wait }
    }
}
