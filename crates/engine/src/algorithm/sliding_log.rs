//! The sliding log: at most `limit` in any interval of length `window`, open at its old end. Its
//! Lua twin is `scripts/sliding_log/model.lua`.

use std::collections::VecDeque;

use super::{
    arithmetic::grain_exponent,
    model::{Earliest, Model, Parameters, Report},
    request::Release,
    state_bytes::Reader,
};
use crate::quota::{LONGEST_REFILL, Quota};

/// The sum of all costs in a log is at most this.
const MAX_SUM: i64 = 1 << 52;
/// The entries that a new log has room for, if its limit is as large. To grow costs as many
/// instructions as half a check.
const FIRST_ENTRIES: i64 = 8;

#[derive(Clone, Copy, Debug)]
pub(crate) struct SlidingLogParams {
    limit: i64,
    window: i64,
}

/// The instant and the cost of each request that counts.
#[derive(Clone, Debug)]
pub(crate) struct SlidingLogState {
    pub(super) head: Head,
    /// The total before the first entry.
    base: u64,
    /// The admitted requests, oldest first, and those that wait. No two have the same instant.
    entries: VecDeque<Entry>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Head {
    /// The time of the log: the time of the clock and `skew`, which keeps it from following a clock
    /// that stepped back.
    pub(super) at: i64,
    pub(super) skew: i64,
    pub(super) window: i64,
    /// The number of leading entries that count no more, as of the decision.
    first: usize,
}

/// The instant of a request, and the total of all costs up to its own. Totals wrap around; their
/// differences are exact. So no sum is added up.
#[derive(Clone, Copy, Debug)]
struct Entry {
    instant: i64,
    total: u64,
}

/// Ignores what is known only during a decision.
impl PartialEq for SlidingLogState {
    fn eq(&self, other: &Self) -> bool {
        let lasting = |log: &Self| (log.head.at, log.head.skew, log.head.window);
        lasting(self) == lasting(other) && self.costs().eq(other.costs())
    }
}

/// What counts now.
struct Live {
    /// The first entry that counts, and the total before it.
    first: usize,
    before: u64,
    /// The sum of the costs that count.
    live: i64,
    /// The instant of the newest entry.
    last: i64,
}

impl SlidingLogParams {
    pub(super) fn new(quota: Quota) -> Self {
        Self { limit: quota.limit() as i64, window: quota.window_us() as i64 }
    }
}

impl SlidingLogState {
    pub(super) fn new(
        [at, skew, window]: [i64; 3],
        costs: impl IntoIterator<Item = (i64, i64)>,
    ) -> Self {
        let head = Head { at, skew, window, first: 0 };
        let mut log = Self { head, base: 0, entries: VecDeque::new() };
        for (instant, cost) in costs {
            let newest = log.newest();
            log.push(newest, instant, newest.total.wrapping_add(cost as u64));
        }
        log
    }

    /// Appends an entry that is not older than the `newest` one. `total` includes its cost.
    #[inline(always)]
    fn push(&mut self, newest: Entry, instant: i64, total: u64) {
        if newest.instant == instant {
            self.entries.pop_back();
        }
        self.entries.push_back(Entry { instant, total });
    }

    /// The instant and the cost of each entry, oldest first.
    pub(super) fn costs(&self) -> impl Iterator<Item = (i64, i64)> {
        self.entries.iter().scan(self.base, |before, &Entry { instant, total }| {
            let cost = total.wrapping_sub(*before);
            *before = total;
            Some((instant, cost as i64))
        })
    }

    /// The newest entry; without entries, one that is older than any other.
    #[inline(always)]
    fn newest(&self) -> Entry {
        let none = Entry { instant: i64::MIN, total: self.base };
        *self.entries.back().unwrap_or(&none)
    }

    /// The total of all costs before an entry.
    #[inline(always)]
    fn total_before(&self, i: usize) -> u64 {
        if i == 0 { self.base } else { self.entries[i - 1].total }
    }

    /// The first entry, from an index on, for which this is false, and its index.
    #[inline(always)]
    fn skip(&self, from: usize, is_true: impl Fn(&Entry) -> bool) -> (usize, Option<&Entry>) {
        match self.entries.get(from) {
            Some(entry) if is_true(entry) => self.skip_more(from + 1, is_true),
            entry => (from, entry),
        }
    }

    /// Does the same by steps that double and then halve.
    #[inline(never)]
    fn skip_more(&self, from: usize, is_true: impl Fn(&Entry) -> bool) -> (usize, Option<&Entry>) {
        let (mut low, mut high, mut step) = (from, from, 1);
        while self.entries.get(high).is_some_and(&is_true) {
            (low, high, step) = (high + 1, high + step, step * 2);
        }
        high = high.min(self.entries.len());
        while low < high {
            let middle = low.midpoint(high);
            match is_true(&self.entries[middle]) {
                true => low = middle + 1,
                false => high = middle,
            }
        }
        (low, self.entries.get(low))
    }

    /// Looks for the first entry that counts.
    #[inline(always)]
    fn find_first(&mut self) {
        let oldest = self.head.at - self.head.window;
        self.head.first = self.skip(0, |entry| entry.instant <= oldest).0;
    }

    /// Looks at the entries that count. `None` if no entry does.
    #[inline(always)]
    fn view(&self) -> Option<Live> {
        let (first, newest) = (self.head.first, self.newest());
        if first >= self.entries.len() {
            return None;
        }
        let before = self.total_before(first);
        let live = newest.total.wrapping_sub(before) as i64;
        Some(Live { first, before, live, last: newest.instant })
    }

    /// The first instant, by the time of the log, at which at most this many units count.
    #[inline(always)]
    fn first_instant(&self, view: &Live, units: i64, window: i64) -> i64 {
        let Live { first, before, live, last } = *view;
        let (instant, excess) = (self.head.at.max(last), live - units);
        if excess <= 0 {
            return instant;
        }
        // When this entry leaves, the excess has left.
        let is_early = |entry: &Entry| (entry.total.wrapping_sub(before) as i64) < excess;
        let (_, entry) = self.skip(first, is_early);
        instant.max(entry.map_or(last, |entry| entry.instant) + window)
    }

    #[inline(always)]
    fn drop_leading(&mut self, count: usize) {
        self.base = self.total_before(count);
        self.head.first = 0;
        for _ in 0..count {
            self.entries.pop_front();
        }
    }

    /// Returns units that were spent at an instant, or are reserved for it, if they are still in
    /// the log.
    fn refund_at(&mut self, instant: i64, units: i64) {
        let i = self.entries.partition_point(|entry| entry.instant < instant);
        if self.entries.get(i).is_none_or(|entry| entry.instant != instant) {
            return;
        }
        let cost = self.entries[i].total.wrapping_sub(self.total_before(i));
        let back = cost.min(units as u64);
        for entry in self.entries.range_mut(i..) {
            entry.total = entry.total.wrapping_sub(back);
        }
        if back == cost {
            self.entries.remove(i);
        }
    }

    /// Returns units of any requests, the oldest first: the units that stay are those that count
    /// longest. Requests that wait keep theirs.
    fn refund_any(&mut self, units: i64) {
        let mut units = units as u64;
        while let Some(&Entry { instant, total }) = self.entries.front()
            && instant <= self.head.at
        {
            let cost = total.wrapping_sub(self.base);
            if units < cost {
                self.base = self.base.wrapping_add(units);
                return;
            }
            units -= cost;
            self.drop_leading(1);
        }
    }
}

impl Parameters for SlidingLogParams {
    fn args(&self) -> Vec<f64> {
        let (limit, window) = (self.limit as f64, self.window as f64);
        vec![limit, window, grain_exponent(self.window)]
    }

    fn full(&self) -> i64 {
        self.limit
    }

    fn drain(&self, units: i64) -> i64 {
        if units > 0 { self.window } else { 0 }
    }

    /// The longest wait for which the sum of all costs in the log stays exact.
    fn max_reservable(&self) -> i64 {
        let exact = (MAX_SUM / 2 / self.limit).saturating_mul(self.window);
        exact.min(LONGEST_REFILL as i64)
    }

    fn beside(&self, held: i64) -> Self {
        Self { limit: self.limit - held, ..*self }
    }
}

impl Model for SlidingLogState {
    type Params = SlidingLogParams;
    type Saved = Head;

    const RESERVES: bool = false;

    fn initial(now: i64, params: &SlidingLogParams) -> Self {
        let log = Self::new([now, 0, params.window], []);
        let entries = VecDeque::with_capacity(params.limit.clamp(1, FIRST_ENTRIES) as usize);
        Self { entries, ..log }
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader::new(bytes, b'S')?;
        let head = reader.doubles()?;
        let (mut costs, mut last, mut sum) = (Vec::new(), i64::MIN, 0);
        while !reader.is_at_end() {
            let [instant, cost] = reader.doubles()?;
            // No script writes other entries.
            if instant < last || !(0..=MAX_SUM - sum).contains(&cost) {
                return None;
            }
            (last, sum) = (instant, sum + cost);
            costs.push((instant, cost));
        }
        Some(Self::new(head, costs))
    }

    fn save(&self) -> Head {
        self.head
    }

    fn restore(&mut self, saved: Head) {
        self.head = saved;
    }

    fn step_back(&mut self, now: i64) -> bool {
        let Head { at, skew, .. } = &mut self.head;
        let back = now + *skew < *at;
        if back {
            *skew = *at - now;
        }
        back
    }

    #[inline(always)]
    fn advance(&mut self, now: i64) {
        self.head.at = now + self.head.skew;
        self.find_first();
        if self.head.first == self.entries.len() {
            (self.head.at, self.head.skew) = (now, 0);
        }
    }

    #[inline(always)]
    fn adopt(&mut self, now: i64, params: &SlidingLogParams, _: &mut Head) -> Option<i64> {
        self.advance(now);
        if self.head.window == params.window {
            return None;
        }
        let over = self.reset_after(now);
        self.head.window = params.window;
        if over > 0 {
            self.find_first();
        }
        Some(over)
    }

    #[inline(always)]
    fn earliest(&self, _: i64, needed: Option<i64>, params: &SlidingLogParams) -> Earliest {
        let at = self.head.at;
        let instant = match (self.view(), needed) {
            (None, _) => at,
            (Some(view), None) => at.max(view.last),
            (Some(view), Some(needed)) => {
                self.first_instant(&view, params.limit - needed, params.window)
            }
        };
        Earliest { wait: instant - at, full: 0 }
    }

    #[inline(always)]
    fn commit(&mut self, instant: i64, cost: i64, _: &SlidingLogParams) {
        let Head { first, skew, .. } = self.head;
        let (instant, newest) = (instant + skew, self.newest());
        let live = newest.total.wrapping_sub(self.total_before(first)) as i64;
        let units = cost.min(MAX_SUM - live); // units spent may exceed the quota
        if units > 0 {
            self.drop_leading(first);
            self.push(newest, instant, newest.total.wrapping_add(units as u64));
        }
    }

    fn refund(&mut self, _: i64, release: &Release, _: &SlidingLogParams) {
        self.drop_leading(self.head.first);
        match release.instant {
            Some(instant) => self.refund_at(instant + self.head.skew, release.units),
            None => self.refund_any(release.units),
        }
    }

    #[inline(always)]
    fn reset_after(&self, _: i64) -> i64 {
        match self.head.first < self.entries.len() {
            true => self.newest().instant + self.head.window - self.head.at,
            false => 0,
        }
    }

    #[inline(always)]
    fn report(&self, _: i64, known: (i64, i64), params: &SlidingLogParams) -> Report {
        let (at, limit) = (self.head.at, params.limit);
        let Some(view) = self.view() else { return Report { remaining: limit, replenish: 0 } };
        let remaining = if view.last > at { 0 } else { (limit - view.live).max(0) };
        let next = remaining + 1;
        if known.0 == next {
            return Report { remaining, replenish: known.1 };
        }
        let instant = self.first_instant(&view, limit - next, params.window);
        Report { remaining, replenish: instant - at }
    }

    fn last_instant(&self) -> Option<i64> {
        Some(self.newest().instant.saturating_sub(self.head.skew))
    }
}
