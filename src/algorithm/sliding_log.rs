//! The sliding log: when each request that counts was admitted, and for what cost.

use std::{collections::VecDeque, mem};

use super::{Ask, Outcome, Verdict, reservations::Release};
use crate::quota::Quota;

/// The sum of all costs in a log is at most this.
const MAX_SUM: f64 = (1_u64 << 52) as f64;

/// An entry in Redis has four bytes for its cost.
const MAX_COST: f64 = u32::MAX as f64;

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
    /// Of the costs of all entries.
    pub(super) sum: f64,
    /// The instant of each admitted request, and its cost.
    pub(super) entries: VecDeque<(f64, f64)>,
}

impl State {
    fn new(window: f64) -> Self {
        Self { at: 0.0, skew: 0.0, window, sum: 0.0, entries: VecDeque::new() }
    }

    fn last(&self) -> f64 {
        self.entries.back().map_or(0.0, |&(instant, _)| instant)
    }

    /// Whether a request waits.
    pub(super) fn is_waited_for(&self, now: f64) -> bool {
        self.last() > now + self.skew
    }

    fn count_expired(&self, now: f64, window: f64) -> usize {
        self.entries.partition_point(|&(instant, _)| instant <= now - window)
    }

    /// The sum of the costs from `first` on, added up from the nearer end.
    fn sum_from(&self, first: usize) -> f64 {
        let sum = |entries: &mut dyn Iterator<Item = &(f64, f64)>| -> f64 {
            entries.map(|&(_, cost)| cost).sum()
        };
        if first <= self.entries.len() / 2 {
            self.sum - sum(&mut self.entries.range(..first))
        } else {
            sum(&mut self.entries.range(first..))
        }
    }

    /// The entry with which `units` of the `live` ones from `first` on have left, found from the nearer end.
    fn leaving(&self, first: usize, live: f64, units: f64) -> f64 {
        let mut sum = 0.0;
        if units <= live / 2.0 {
            for &(instant, cost) in self.entries.range(first..) {
                sum += cost;
                if sum >= units {
                    return instant;
                }
            }
        }
        for &(instant, cost) in self.entries.range(first..).rev() {
            sum += cost;
            if sum > live - units {
                return instant;
            }
        }
        self.last()
    }

    /// The first instant at which a request of `units` conforms, behind `live` ones from `first` on.
    fn earliest(&self, now: f64, first: usize, live: f64, units: f64, params: Params) -> f64 {
        let Params { limit, window } = params;
        let excess = live + units - limit;
        let instant = now.max(self.last());
        match excess > 0.0 && first < self.entries.len() {
            true => instant.max(self.leaving(first, live, excess) + window),
            false => instant,
        }
    }

    /// Follows the clock; returns the time of the log.
    fn follow(&mut self, clock: f64) -> (f64, bool) {
        let now = clock + self.skew;
        match now < self.at {
            true => {
                self.skew = self.at - clock; // it stepped back
                (self.at, true)
            }
            false => (now, false),
        }
    }

    fn lower(&mut self, i: usize, units: f64) -> f64 {
        let back = units.min(self.entries[i].1);
        self.entries[i].1 -= back;
        self.sum -= back;
        back
    }

    /// Returns what was spent at an instant, or is reserved for it, if that is still in the log.
    fn release(&mut self, instant: f64, mut units: f64) {
        let mut place = self.entries.partition_point(|&(other, _)| other < instant);
        while units > 0.0 && self.entries.get(place).is_some_and(|&(other, _)| other == instant) {
            units -= self.lower(place, units);
            if self.entries[place].1 == 0.0 {
                self.entries.remove(place);
            } else {
                place += 1;
            }
        }
    }

    /// Returns units, the oldest first: what is left then stays for as long as any of it could. Not those of requests
    /// that wait.
    fn refund(&mut self, now: f64, expired: usize, mut units: f64) {
        let mut i = expired;
        while units > 0.0 && self.entries.get(i).is_some_and(|&(instant, _)| instant <= now) {
            units -= self.lower(i, units);
            if self.entries[i].1 == 0.0 {
                i += 1;
            }
        }
        self.entries.drain(expired..i);
    }
}

impl Params {
    pub(super) fn new(quota: Quota) -> Self {
        Self { limit: quota.limit().into(), window: quota.window_us() as f64 }
    }

    pub(super) fn args(&self) -> Vec<f64> {
        vec![self.limit, self.window]
    }

    /// The longest wait for which the sum of all costs in the log stays exact.
    pub(super) fn longest_wait(&self) -> f64 {
        (MAX_SUM / 2.0 / self.limit).floor() * self.window
    }

    pub(super) fn release(stored: &mut Option<State>, clock: f64, releases: &[Release]) {
        let Some(log) = stored else { return };
        let (now, _) = log.follow(clock);
        let expired = log.count_expired(now, log.window);
        log.sum = log.sum_from(expired);
        log.entries.drain(..expired);
        for Release { instant, units, .. } in releases {
            match instant {
                Some(instant) => log.release(instant + log.skew, *units),
                None => log.refund(now, 0, *units),
            }
        }
        log.at = now;
        if log.entries.is_empty() {
            *stored = None;
        }
    }

    pub(super) fn step(&self, stored: &mut Option<State>, ask: &Ask) -> Verdict {
        let Params { limit, window } = *self;
        let Ask { action, cost, max_wait, now: clock, .. } = *ask;

        let (mut now, mut stale) = (clock, false);
        let mut log = stored.take().unwrap_or_else(|| State::new(window));
        let (at, skew) = (log.at, log.skew);
        let mut over = None; // a log that is over, until something is written
        if !log.entries.is_empty() {
            (now, stale) = log.follow(clock);
            if now < log.last() + log.window {
                stale = stale || log.window != window;
            } else {
                log.skew = skew;
                (now, stale) = (clock, false);
                over = Some(mem::replace(&mut log, State::new(window)));
            }
        }

        // The entries that do not count any more.
        let expired = log.count_expired(now, window);
        let mut live = log.sum_from(expired);
        let wait = log.earliest(now, expired, live, ask.needed(), *self) - now;
        let Outcome { admitted, wait } = ask.outcome(wait, (wait - max_wait).max(0.0));

        if action.commits() && admitted {
            let units = cost.min(MAX_SUM - live); // what is spent may be above the quota
            match log.entries.back_mut() {
                Some((instant, cost)) if *instant == now + wait && *cost + units <= MAX_COST => {
                    *cost += units;
                }
                _ => log.entries.push_back((now + wait, units)),
            }
            log.sum += units;
            live += units;
        }

        let (mut remaining, mut replenish, mut reset) = (limit, 0.0, 0.0);
        if log.entries.len() > expired {
            remaining = if log.last() <= now { (limit - live).max(0.0) } else { 0.0 };
            replenish = log.earliest(now, expired, live, remaining + 1.0, *self) - now;
            reset = log.last() + window - now;
        }

        if action.commits() && (admitted || stale) {
            over = None;
            if admitted {
                log.entries.drain(..expired);
                log.sum = live;
            }
            (log.at, log.window) = (now, window);
        } else {
            (log.at, log.skew) = (at, skew);
        }
        *stored = if log.entries.is_empty() { over } else { Some(log) };
        Verdict { admitted, wait, remaining, replenish, reset, instant: clock + wait }
    }
}
