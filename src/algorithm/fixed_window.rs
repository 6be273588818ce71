use super::{Action, Ask, Verdict};
use crate::quota::Quota;

/// What `scripts/fixed_window.lua` takes behind action, cost and `max_wait`.
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
    pub(super) window: f64,
}

impl State {
    fn advance(&mut self, now: f64, length: f64) {
        let windows = ((now - self.start) / length).floor();
        self.start += windows * length;
        if windows > self.ahead {
            (self.start, self.ahead, self.count) = (now, 0.0, 0.0);
        } else {
            self.ahead -= windows;
        }
    }
}

impl Params {
    pub(super) fn new(quota: Quota) -> Self {
        Self { limit: quota.limit().into(), window: quota.window_us() as f64 }
    }

    pub(super) fn args(&self) -> Vec<f64> {
        vec![self.limit, self.window]
    }

    #[inline]
    pub(super) fn step(&self, stored: &mut Option<State>, ask: &Ask) -> Verdict {
        let Params { limit, window } = *self;
        let Ask { action, cost, max_wait, now } = *ask;

        let mut state = State { start: now, ahead: 0.0, count: 0.0, window };
        let mut stale = false;
        if let Some(old) = stored {
            state = *old;
            if now < state.start {
                (state.start, stale) = (now, true);
            }
            state.advance(now, old.window);
            if old.window != window {
                state.advance(now, window);
                (state.window, stale) = (window, true);
            }
        }
        let State { start, mut ahead, mut count, .. } = state;

        let mut turn = ahead;
        if count + cost > limit {
            turn = ahead + 1.0;
        }
        let wait = (start + turn * window - now).max(0.0);
        let late = (wait - max_wait).max(0.0);
        let admitted = late == 0.0;

        if action == Action::Refund {
            count = (count - cost).max(0.0);
            if count == 0.0 && ahead > 0.0 {
                (ahead, count) = (ahead - 1.0, limit);
            }
        } else if action == Action::Check && admitted {
            if turn > ahead {
                (ahead, count) = (turn, 0.0);
            }
            count += cost;
        }

        let (mut remaining, mut replenish, mut reset) = (limit, 0.0, 0.0);
        if ahead > 0.0 || count > 0.0 {
            remaining = if ahead == 0.0 { (limit - count).max(0.0) } else { 0.0 };
            let opening = if ahead > 0.0 && count < limit { ahead } else { ahead + 1.0 };
            replenish = start + opening * window - now;
            reset = start + (ahead + 1.0) * window - now;
        }

        if action.writes(admitted || stale) {
            *stored = (reset > 0.0).then_some(State { start, ahead, count, window });
        }
        Verdict { admitted, wait: if admitted { wait } else { late }, remaining, replenish, reset }
    }
}
