use super::{Action, Ask, Rate, Verdict};
use crate::quota::Quota;

/// What `scripts/leaky_bucket.lua` takes behind action, cost and `max_wait`.
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

impl Params {
    pub(super) fn new(quota: Quota) -> Self {
        let Rate { unit, tick } = Rate::new(quota);
        let most_debt = super::most_debt(1.0, tick);
        Self { burst: quota.burst_size().into(), unit, tick, most_debt }
    }

    pub(super) fn args(&self) -> Vec<f64> {
        vec![self.burst, self.unit, self.tick, self.most_debt]
    }

    #[inline]
    pub(super) fn step(&self, stored: &mut Option<State>, ask: &Ask) -> Verdict {
        let Params { burst, unit, tick, most_debt } = *self;
        let Ask { action, cost, max_wait, now } = *ask;

        let (mut debt, mut stale) = (0.0, false);
        if let Some(old) = stored {
            let mut at = old.at;
            if now < at {
                (at, stale) = (now, true);
            }
            debt = (old.debt - (now - at) * old.tick).max(0.0);
            if old.unit != unit || old.tick != tick {
                debt = (debt / old.unit * unit).ceil().min(most_debt);
                stale = true;
            }
        }

        let time_until = |parts: f64| (parts / tick).ceil().max(0.0);

        let full = burst * unit;
        let wait = time_until(debt);
        let late = time_until(debt - (full - cost * unit)).max(wait - max_wait);
        let admitted = late == 0.0;

        if action == Action::Refund {
            debt = (debt - cost * unit).max(0.0);
        } else if action == Action::Check && admitted {
            debt += cost * unit;
        }

        let remaining = ((full - debt) / unit).floor().max(0.0);
        let (mut replenish, mut reset) = (0.0, 0.0);
        if debt > 0.0 {
            replenish = time_until((remaining + 1.0) * unit - (full - debt));
            reset = time_until(debt);
        }

        if action.writes(admitted || stale) {
            *stored = (reset > 0.0).then_some(State { at: now, debt, unit, tick });
        }
        Verdict { admitted, wait: if admitted { wait } else { late }, remaining, replenish, reset }
    }
}
