use std::{collections::VecDeque, mem};

use super::{Action, Ask, Outcome, Verdict};
use crate::quota::Quota;

/// Sums of costs are kept modulo this.
const MODULUS: f64 = (1_u64 << 48) as f64;

/// The parameters of `scripts/sliding_log.lua`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Params {
    limit: f64,
    window: f64,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct State {
    pub(super) at: f64,
    pub(super) skew: f64,
    pub(super) window: f64,
    pub(super) total: f64,
    /// The instant of each admitted request, and the sum of all costs before it.
    pub(super) entries: VecDeque<(f64, f64)>,
}

impl State {
    fn new(window: f64) -> Self {
        Self { at: 0.0, skew: 0.0, window, total: 0.0, entries: VecDeque::new() }
    }

    fn last(&self) -> f64 {
        self.entries.back().map_or(0.0, |&(instant, _)| instant)
    }

    /// Whether a request is yet to go on.
    pub(super) fn is_waited_for(&self, now: f64) -> bool {
        self.last() > now + self.skew
    }

    fn sum_from(&self, i: usize) -> f64 {
        self.entries.get(i).map_or(0.0, |&(_, before)| (self.total - before).rem_euclid(MODULUS))
    }

    fn count_expired(&self, now: f64, window: f64) -> usize {
        self.entries.partition_point(|&(instant, _)| instant <= now - window)
    }

    /// The place of what was spent at the instant `turn`, if it still counts.
    fn spent(&self, expired: usize, turn: f64, cost: f64) -> Option<usize> {
        let first = self.entries.partition_point(|&(instant, _)| instant < turn).max(expired);
        let same = self.entries.range(first..).take_while(|&&(instant, _)| instant == turn);
        (first..first + same.count()).find(|&i| self.sum_from(i) - self.sum_from(i + 1) == cost)
    }

    fn remove(&mut self, place: usize, cost: f64) {
        self.entries.remove(place);
        for (_, before) in self.entries.range_mut(place..) {
            *before = (*before - cost).rem_euclid(MODULUS);
        }
        self.total = (self.total - cost).rem_euclid(MODULUS);
    }

    fn earliest(&self, now: f64, expired: usize, units: f64, params: Params) -> f64 {
        let Params { limit, window } = params;
        let leaving = self.entries.partition_point(|&(_, before)| {
            (self.total - before).rem_euclid(MODULUS) + units > limit
        });
        let mut instant = now.max(self.last());
        if leaving > expired {
            instant = instant.max(self.entries[leaving - 1].0 + window);
        }
        instant
    }
}

impl Params {
    pub(super) fn new(quota: Quota) -> Self {
        Self { limit: quota.limit().into(), window: quota.window_us() as f64 }
    }

    pub(super) fn args(&self) -> Vec<f64> {
        vec![self.limit, self.window]
    }

    /// The longest wait for which the sum of all costs in the log stays below its modulus.
    pub(super) fn longest_wait(&self) -> f64 {
        (MODULUS / 2.0 / self.limit).floor() * self.window
    }

    pub(super) fn step(&self, stored: &mut Option<State>, ask: &Ask) -> Verdict {
        let Params { limit, window } = *self;
        let Ask { action, cost, max_wait, turn, now: clock, .. } = *ask;

        let (mut now, mut skew, mut stale) = (clock, 0.0, false);
        let mut log = stored.take().unwrap_or_else(|| State::new(window));
        let mut left = None; // a log that is over, until something is written
        if !log.entries.is_empty() {
            (now, skew) = (clock + log.skew, log.skew);
            if now < log.at {
                (now, skew, stale) = (log.at, log.at - clock, true);
            }
            if now < log.last() + log.window {
                stale = stale || log.window != window;
            } else {
                (now, skew, stale) = (clock, 0.0, false);
                left = Some(mem::replace(&mut log, State::new(window)));
            }
        }

        // The entries that do not count any more.
        let mut expired = log.count_expired(now, window);
        let wait = log.earliest(now, expired, ask.needed(), *self) - now;
        let Outcome { admitted, wait } = ask.outcome(wait, (wait - max_wait).max(0.0));

        let gives_back = action == Action::Refund && turn > 0.0;
        let place = gives_back.then(|| log.spent(expired, turn + skew, cost)).flatten();
        if let Some(place) = place {
            log.remove(place, cost);
        } else if action == Action::Refund && turn == 0.0 {
            // The oldest first: what is left then stays for as long as any of it could. Not those that wait.
            let waiting = log.entries.partition_point(|&(instant, _)| instant <= now);
            let rest = (log.sum_from(expired) - cost).max(log.sum_from(waiting));
            let total = log.total;
            let mut back = log
                .entries
                .partition_point(|&(_, before)| (total - before).rem_euclid(MODULUS) > rest);
            if log.sum_from(back) < rest && back > expired {
                back -= 1;
                log.entries[back].1 = (total - rest).rem_euclid(MODULUS);
            }
            expired = expired.max(back);
        } else if action.commits() && admitted {
            let units = cost.min(MODULUS - 1.0 - log.sum_from(expired));
            log.entries.push_back((now + wait, log.total));
            log.total = (log.total + units).rem_euclid(MODULUS);
        }

        let (mut remaining, mut replenish, mut reset) = (limit, 0.0, 0.0);
        if log.entries.len() > expired {
            remaining =
                if log.last() <= now { (limit - log.sum_from(expired)).max(0.0) } else { 0.0 };
            replenish = log.earliest(now, expired, remaining + 1.0, *self) - now;
            reset = log.last() + window - now;
        }

        if action.writes(admitted || stale) {
            left = None;
            if admitted || action == Action::Refund {
                log.entries.drain(..expired.min(log.entries.len()));
            }
            (log.at, log.skew, log.window) = (now, skew, window);
        }
        *stored = if log.entries.is_empty() { left } else { Some(log) };
        Verdict { admitted, wait, remaining, replenish, reset, turn: clock + wait }
    }
}
