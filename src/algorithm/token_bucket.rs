use super::{Action, Ask, Rate, Refill, Verdict};
use crate::quota::Quota;

/// What `scripts/token_bucket.lua` takes behind action, cost and `max_wait`.
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
}

fn refill(now: f64, at: f64, debt: f64, every: f64, by: f64) -> (f64, f64) {
    let periods = ((now - at) / every).floor();
    (at + periods * every, (debt - periods * by).max(0.0))
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
        ((super::EXACT - full) / self.lump).floor() * self.period
    }

    #[inline]
    pub(super) fn step(&self, stored: &mut Option<State>, ask: &Ask) -> Verdict {
        let Params { burst, overdraft, unit, period, lump, most_debt } = *self;
        let Ask { action, cost, max_wait, now } = *ask;

        let (mut at, mut debt, mut stale) = (now, 0.0, false);
        if let Some(old) = stored {
            (at, debt) = (old.at, old.debt);
            if now < at {
                (at, stale) = (now, true);
            }
            (at, debt) = refill(now, at, debt, old.period, old.lump);
            if old.unit != unit || old.period != period || old.lump != lump {
                stale = true;
                debt = (debt / old.unit * unit).ceil().min(most_debt);
                (at, debt) = refill(now, at, debt, period, lump);
            }
            if debt == 0.0 {
                at = now;
            }
        }

        let periods_until = |parts: f64| if parts > 0.0 { (parts / lump).ceil() } else { 0.0 };
        let time_until = |parts: f64| (periods_until(parts) * period - (now - at)).max(0.0);

        let full = burst * unit;
        let short = (cost - overdraft).max(0.0) * unit - (full - debt);
        let wait = if short > 0.0 { time_until(short) } else { 0.0 };
        let late = (wait - max_wait).max(0.0);
        let admitted = late == 0.0;

        if action == Action::Refund {
            debt = (debt - cost * unit).max(0.0);
        } else if action == Action::Check && admitted {
            debt = debt.max(periods_until(short) * lump) + cost * unit;
        }

        let overdrawn = if overdraft > 0.0 { 1.0 } else { 0.0 };
        let remaining = (((full - debt) / unit).floor() + overdrawn).max(0.0);
        let (mut replenish, mut reset) = (0.0, 0.0);
        if debt > 0.0 {
            replenish = time_until((remaining + 1.0 - overdrawn) * unit - (full - debt));
            reset = time_until(debt);
        }

        if action.writes(admitted || stale) {
            *stored = (reset > 0.0).then_some(State { at, debt, unit, period, lump });
        }
        Verdict { admitted, wait: if admitted { wait } else { late }, remaining, replenish, reset }
    }
}
