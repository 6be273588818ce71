//! The sliding log: at most `limit` in any interval of length `window`, open at its old end. Its
//! Lua twin is `scripts/sliding_log/model.lua`.

use std::{collections::VecDeque, ops::Range};

use super::{
    arithmetic::grain_exponent,
    model::{Earliest, Model, Report},
    request::Release,
    state_bytes::Reader,
};
use crate::quota::{LONGEST_REFILL, Quota};

/// The sum of all costs in a log is at most this.
const MAX_SUM: i64 = (1_u64 << 52) as i64;

#[derive(Clone, Copy, Debug)]
pub(crate) struct SlidingLogParams {
    limit: i64,
    window: i64,
}

/// The instant and the cost of each request that counts.
#[derive(Clone, Debug)]
pub(crate) struct SlidingLogState {
    /// The time of the log: that of the clock, and `skew`, which keeps it from following a clock
    /// that stepped back.
    pub(super) at: i64,
    pub(super) skew: i64,
    pub(super) window: i64,
    /// The sum of the costs of all entries.
    pub(super) sum: i64,
    /// The instant of each admitted request, and its cost, oldest first.
    pub(super) entries: VecDeque<(i64, i64)>,
    /// The number of leading entries that do not count any more, since the last `advance`.
    first: usize,
    /// The sum of the others.
    live: i64,
}

/// Ignores the fields that are known only during a decision.
impl PartialEq for SlidingLogState {
    fn eq(&self, other: &Self) -> bool {
        let lasting = |log: &Self| (log.at, log.skew, log.window, log.sum);
        lasting(self) == lasting(other) && self.entries == other.entries
    }
}

impl SlidingLogParams {
    pub(super) fn new(quota: Quota) -> Self {
        Self { limit: quota.limit() as i64, window: quota.window_us() as i64 }
    }
}

impl SlidingLogState {
    pub(super) fn new([at, skew, window]: [i64; 3], entries: VecDeque<(i64, i64)>) -> Self {
        let sum = entries.iter().map(|&(_, cost)| cost).sum();
        Self { at, skew, window, sum, entries, first: 0, live: sum }
    }

    fn last(&self) -> i64 {
        self.entries.back().map_or(0, |&(instant, _)| instant)
    }

    /// Finds the entries that count. Adds up only the costs that have left, or count again, since
    /// the last time, so that many looks at a long log add up each cost once.
    fn find_live(&mut self) {
        let oldest = self.at - self.window;
        let first = self.entries.partition_point(|&(instant, _)| instant <= oldest);
        let sum =
            |range: Range<usize>| -> i64 { self.entries.range(range).map(|&(_, cost)| cost).sum() };
        self.live = match self.first <= first {
            true => self.live - sum(self.first..first),
            false => self.live + sum(first..self.first),
        };
        self.first = first;
    }

    /// The instant of the entry with which `units` of the live ones have left, found from the
    /// nearer end.
    fn leaving(&self, units: i64) -> i64 {
        let mut sum = 0;
        if units <= self.live / 2 {
            for &(instant, cost) in self.entries.range(self.first..) {
                sum += cost;
                if sum >= units {
                    return instant;
                }
            }
        }
        for &(instant, cost) in self.entries.range(self.first..).rev() {
            sum += cost;
            if sum > self.live - units {
                return instant;
            }
        }
        self.last()
    }

    /// The first instant, by the time of the log, at which `needed` units are left.
    fn first_instant(&self, needed: i64, params: &SlidingLogParams) -> i64 {
        if self.first == self.entries.len() {
            return self.at;
        }
        let excess = self.live + needed - params.limit;
        let instant = self.at.max(self.last());
        match excess > 0 {
            true => instant.max(self.leaving(excess) + params.window),
            false => instant,
        }
    }

    fn drop_expired(&mut self) {
        self.entries.drain(..self.first);
        (self.first, self.sum) = (0, self.live);
    }

    fn lower(&mut self, i: usize, units: i64) -> i64 {
        let back = units.min(self.entries[i].1);
        self.entries[i].1 -= back;
        self.sum -= back;
        back
    }

    /// Returns units that were spent at an instant, or are reserved for it, if they are still in
    /// the log.
    fn refund_at(&mut self, instant: i64, mut units: i64) {
        let mut i = self.entries.partition_point(|&(other, _)| other < instant);
        while units > 0 && self.entries.get(i).is_some_and(|&(other, _)| other == instant) {
            units -= self.lower(i, units);
            if self.entries[i].1 == 0 {
                self.entries.remove(i);
            } else {
                i += 1;
            }
        }
    }

    /// Returns units of any requests, the oldest first: the units that stay are those that count
    /// longest. Requests that wait keep theirs.
    fn refund_any(&mut self, mut units: i64) {
        let mut i = 0;
        while units > 0 && self.entries.get(i).is_some_and(|&(instant, _)| instant <= self.at) {
            units -= self.lower(i, units);
            if self.entries[i].1 == 0 {
                i += 1;
            }
        }
        self.entries.drain(..i);
    }
}

impl Model for SlidingLogState {
    type Params = SlidingLogParams;
    type Saved = [i64; 3];

    const RESERVES: bool = false;

    fn args(params: &SlidingLogParams) -> Vec<f64> {
        vec![params.limit as f64, params.window as f64, grain_exponent(params.window)]
    }

    fn max_cost(params: &SlidingLogParams) -> i64 {
        params.limit
    }

    fn full(params: &SlidingLogParams) -> i64 {
        params.limit
    }

    fn drain(units: i64, params: &SlidingLogParams) -> i64 {
        if units > 0 { params.window } else { 0 }
    }

    fn beside(params: &SlidingLogParams, held: i64) -> SlidingLogParams {
        SlidingLogParams { limit: params.limit - held, ..*params }
    }

    /// The longest wait for which the sum of all costs in the log stays exact.
    fn max_reservable(params: &SlidingLogParams) -> i64 {
        let exact = (MAX_SUM / 2 / params.limit).saturating_mul(params.window);
        exact.min(LONGEST_REFILL as i64)
    }

    #[inline]
    fn initial(now: i64, params: &SlidingLogParams) -> Self {
        Self::new([now, 0, params.window], VecDeque::new())
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader::new(bytes, b'S')?;
        let head = reader.doubles()?.map(|number: f64| number as i64);
        let mut entries = VecDeque::new();
        while !reader.is_at_end() {
            let [instant, cost] = reader.doubles()?.map(|number| number as i64);
            entries.push_back((instant, cost));
        }
        Some(Self::new(head, entries))
    }

    #[inline]
    fn save(&self) -> [i64; 3] {
        [self.at, self.skew, self.window]
    }

    #[inline]
    fn restore(&mut self, saved: [i64; 3]) {
        [self.at, self.skew, self.window] = saved;
    }

    #[inline]
    fn step_back(&mut self, now: i64) -> bool {
        let back = now + self.skew < self.at;
        if back {
            self.skew = self.at - now;
        }
        back
    }

    #[inline]
    fn advance(&mut self, now: i64) {
        self.at = now + self.skew;
        self.find_live();
        if self.first == self.entries.len() {
            (self.at, self.skew) = (now, 0); // no entry counts any more
        }
    }

    #[inline]
    fn adopt(&mut self, now: i64, params: &SlidingLogParams, _: &mut [i64; 3]) -> Option<i64> {
        self.advance(now);
        if self.window == params.window {
            return None;
        }
        let over = self.reset_after(now);
        self.window = params.window;
        if over > 0 {
            self.find_live();
        }
        Some(over)
    }

    #[inline]
    fn earliest(&self, _: i64, needed: Option<i64>, params: &SlidingLogParams) -> Earliest {
        (self.first_instant(needed.unwrap_or(-(1 << 60)), params) - self.at).into()
    }

    #[inline]
    fn commit(&mut self, instant: i64, cost: i64, _: &SlidingLogParams) {
        let units = cost.min(MAX_SUM - self.live); // units spent may exceed the quota
        if units == 0 {
            return;
        }
        self.drop_expired();
        let instant = instant + self.skew;
        match self.entries.back_mut() {
            Some((last, cost)) if *last == instant => *cost += units,
            _ => self.entries.push_back((instant, units)),
        }
        self.sum += units;
        self.live = self.sum;
    }

    fn refund(&mut self, _: i64, release: &Release, _: &SlidingLogParams) {
        self.drop_expired();
        match release.instant {
            Some(instant) => self.refund_at(instant + self.skew, release.units),
            None => self.refund_any(release.units),
        }
        self.live = self.sum;
    }

    #[inline]
    fn reset_after(&self, _: i64) -> i64 {
        match self.first < self.entries.len() {
            true => self.last() + self.window - self.at,
            false => 0,
        }
    }

    #[inline]
    fn report(&self, _: i64, reset: i64, params: &SlidingLogParams) -> Report {
        if reset == 0 {
            return Report { remaining: params.limit, replenish: 0 };
        }
        let waits = self.last() > self.at;
        let remaining = if waits { 0 } else { (params.limit - self.live).max(0) };
        Report { remaining, replenish: self.first_instant(remaining + 1, params) - self.at }
    }

    fn waits_until(&self, now: i64) -> Option<i64> {
        let last = self.last() - self.skew;
        (last > now).then_some(last)
    }
}
