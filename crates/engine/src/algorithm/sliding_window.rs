//! The sliding window: estimates the sliding log from the counts of `buckets` sub-windows and of
//! the one before them, which is weighted by its overlap with the window. Its Lua twin is
//! `scripts/sliding_window/model.lua`.
//!
//! Inside, one microsecond is `buckets` parts, so that a sub-window is `window` parts.

use std::mem;

use super::{
    arithmetic::{ceil_div, mul_div},
    counts::Counts,
    model::{Earliest, Model, Parameters, Report},
    request::Release,
    state_bytes::Reader,
};
use crate::quota::{Quota, QuotaError};

const MAX_BUCKETS: u32 = 100;

#[derive(Clone, Copy, Debug)]
pub(crate) struct SlidingWindowParams {
    limit: i64,
    window: i64,
    buckets: i64,
}

#[derive(Clone, Debug)]
pub(crate) struct SlidingWindowState {
    /// The position of the sub-windows.
    pub(super) grid: Grid,
    /// The counts of the sub-windows: the newest one contains `last`.
    pub(super) counts: Counts,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid {
    pub(super) at: i64,
    pub(super) start: i64,
    /// The parts of a sub-window: the window in microseconds.
    pub(super) length: i64,
    /// The instant of the newest admitted request.
    pub(super) last: i64,
    /// The number of the sub-window of the newest count, from `start`.
    pub(super) index: i64,
}

/// Ignores counts that have left the window.
impl PartialEq for SlidingWindowState {
    fn eq(&self, other: &Self) -> bool {
        let Grid { at, start, length, last, .. } = self.grid;
        (at, start, length, last)
            == (other.grid.at, other.grid.start, other.grid.length, other.grid.last)
            && self.counts_seen().eq(other.counts_seen())
    }
}

/// The window that ends at an instant.
struct View {
    instant: i64,
    slot: i64,
    /// The sum of the counts inside of the window.
    inside: i64,
    /// The count of the sub-window before them, which is weighted by its overlap.
    oldest: i64,
}

impl SlidingWindowParams {
    pub(super) fn new(quota: Quota, buckets: u32) -> Result<Self, QuotaError> {
        if !(1..=MAX_BUCKETS).contains(&buckets) {
            return Err(QuotaError::Buckets { buckets });
        }
        let (limit, window) = (quota.limit() as i64, quota.window_us() as i64);
        Ok(Self { limit, window, buckets: buckets.into() })
    }
}

impl SlidingWindowState {
    /// The sub-windows of a window, and the parts of a microsecond.
    fn parts(&self) -> i64 {
        self.counts.parts()
    }

    /// The parts from `start` to an instant.
    fn passed(&self, instant: i64) -> i64 {
        (instant - self.grid.start) * self.parts()
    }

    /// The first instant that is at least this many parts after `start`.
    #[inline(always)]
    fn instant_after(&self, passed: i64) -> i64 {
        self.grid.start + ceil_div(passed, self.parts())
    }

    #[inline(always)]
    fn slot_of(&self, instant: i64) -> i64 {
        let Grid { length, index, .. } = self.grid;
        let passed = self.passed(instant);
        let is_newest = ((passed - index * length) as u64) < length as u64;
        if is_newest { index } else { slot_after(passed, length) }
    }

    fn opening(&self, slot: i64) -> i64 {
        self.instant_after(slot * self.grid.length)
    }

    /// The parts from `start` until the newest count has left the window; `None` if all are 0.
    #[inline(always)]
    fn end(&self) -> Option<i64> {
        let newest = self.grid.index - self.counts.newest()?;
        Some((newest + self.parts() + 1) * self.grid.length)
    }

    /// The counts, newest first: 0 if they have left the window.
    pub(super) fn counts_seen(&self) -> impl Iterator<Item = i64> {
        let newest = self.grid.index.min(0);
        (newest..=newest + self.parts()).map(|i| self.counts.get(i))
    }

    /// Looks at the counts at an instant, or at the instant of the newest request if it is later.
    #[inline(always)]
    fn view(&self, now: i64) -> View {
        let instant = now.max(self.grid.last);
        let slot = self.slot_of(instant);
        let i = self.grid.index - slot + self.parts();
        View { instant, slot, inside: self.counts.sum(i), oldest: self.counts.get(i) }
    }

    /// The first instant, not before the view, at which at most this many units count.
    #[inline(always)]
    fn first_instant(&self, view: &View, units: i64) -> i64 {
        let free = units - view.inside;
        let View { instant, slot, oldest, .. } = *view;
        if free >= oldest { instant } else { self.wait_until_free(instant, slot, oldest, free) }
    }

    #[inline(never)]
    fn wait_until_free(&self, instant: i64, mut slot: i64, mut oldest: i64, mut free: i64) -> i64 {
        let Grid { length, index, .. } = self.grid;
        let parts = self.parts();
        // After these steps, the newest sub-window has left the window.
        let end = slot + parts + 2;
        while free < 0 && slot < end {
            slot += 1;
            oldest = self.counts.get(index - slot + parts);
            free += oldest;
        }
        // The overlap at which the weight of the oldest sub-window is what is free.
        let overlap =
            if (0..oldest).contains(&free) { mul_div(length, free, oldest) } else { length };
        instant.max(self.instant_after((slot + 1) * length - overlap))
    }

    /// Counts each old sub-window where its middle is, or if requests waited in it when the state
    /// was `counted`, at its end, and not after `last`. `start` stays, so that two alternating
    /// quotas do not move the counts ahead of the time. Returns the counts as they were.
    fn regrid(&mut self, counted: i64, params: &SlidingWindowParams) -> Counts {
        let &SlidingWindowParams { window, buckets, .. } = params;
        let Grid { start, last, .. } = self.grid;
        let slot_of = |instant: i64| ((instant - start) * buckets).div_euclid(window);
        let mut moved = Counts::zeros(buckets);
        let newest = slot_of(last);
        for old in 0..=self.parts() {
            let slot = self.grid.index - old;
            let (opening, closing) = (self.opening(slot), self.opening(slot + 1));
            let end = last.min(closing - 1);
            let middle = (opening + closing).div_euclid(2);
            let instant = if end > counted { end } else { opening.max(middle.min(last)) };
            let i = newest - slot_of(instant);
            if (0..=buckets).contains(&i) {
                moved.add(i, self.counts.get(old));
            }
        }
        self.grid = Grid { index: newest, length: window, ..self.grid };
        mem::replace(&mut self.counts, moved)
    }

    fn is_foreign(&self, params: &SlidingWindowParams) -> bool {
        self.grid.length != params.window || self.parts() != params.buckets
    }
}

impl Parameters for SlidingWindowParams {
    fn args(&self) -> Vec<f64> {
        [self.limit, self.window, self.buckets].map(|number| number as f64).into()
    }

    fn full(&self) -> i64 {
        self.limit
    }

    fn drain(&self, units: i64) -> i64 {
        let Self { window, buckets, .. } = *self;
        if units > 0 { ceil_div((buckets + 1) * window, buckets) } else { 0 }
    }

    fn beside(&self, held: i64) -> Self {
        Self { limit: self.limit - held, ..*self }
    }
}

impl Model for SlidingWindowState {
    type Params = SlidingWindowParams;
    /// With the counts, if the parameters are others.
    type Saved = (Grid, Option<Counts>);

    fn initial(now: i64, params: &SlidingWindowParams) -> Self {
        let grid = Grid { at: now, start: now, length: params.window, last: now, index: 0 };
        Self { grid, counts: Counts::zeros(params.buckets) }
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let narrow = Reader::new(bytes, b'W').map(|reader| (reader, 5, 4));
        let (mut reader, sum_size, size) =
            narrow.or_else(|| Some((Reader::new(bytes, b'X')?, 7, 7)))?;
        let [parts, length] = reader.integers([1, 7])?;
        let start = reader.signed(7)?;
        let at = reader.integer(7)?;
        let last = reader.signed(7)?;
        reader.integer(sum_size)?; // of the counts
        if parts == 0 || length == 0 {
            return None;
        }
        let mut counts = Counts::zeros(parts);
        for i in 0..=parts {
            counts.add(i, reader.integer(size)?);
        }
        let index = slot_after((last - start) * parts, length);
        Some(Self { grid: Grid { at, start, length, last, index }, counts })
    }

    fn save(&self) -> Self::Saved {
        (self.grid, None)
    }

    #[inline(always)]
    fn restore(&mut self, (grid, counts): Self::Saved) {
        self.grid = grid;
        if let Some(counts) = counts {
            self.counts = counts;
        }
    }

    fn step_back(&mut self, now: i64) -> bool {
        let Grid { at, start, last, .. } = &mut self.grid;
        let back = *at - now;
        if back > 0 {
            (*at, *start, *last) = (now, *start - back, *last - back);
        }
        back > 0
    }

    fn advance(&mut self, now: i64) {
        self.grid.at = now;
    }

    #[inline(always)]
    fn adopt(
        &mut self,
        now: i64,
        params: &SlidingWindowParams,
        saved: &mut Self::Saved,
    ) -> Option<i64> {
        let (counted, mut over) = (self.grid.at, None);
        self.advance(now);
        if self.is_foreign(params) {
            over = Some(self.reset_after(now));
            saved.1 = Some(self.regrid(counted, params));
        }
        if over == Some(0) || self.end().is_none_or(|end| self.passed(now) >= end) {
            // As the initial state, with the counts so far back that none is in the window.
            let index = -self.parts() - 1;
            self.grid = Grid { start: now, last: now, index, ..self.grid };
        }
        over
    }

    #[inline(always)]
    fn earliest(&self, now: i64, needed: Option<i64>, params: &SlidingWindowParams) -> Earliest {
        let instant = match needed {
            Some(needed) => self.first_instant(&self.view(now), (params.limit - needed).max(0)),
            None => now.max(self.grid.last),
        };
        Earliest { wait: instant - now, full: 0 }
    }

    #[inline(always)]
    fn commit(&mut self, instant: i64, cost: i64, _: &SlidingWindowParams) {
        let (slot, parts) = (self.slot_of(instant), self.parts());
        self.counts.shift(slot - self.grid.index);
        self.counts.add(0, cost);
        // `start` moves by whole windows.
        let cycles = if (0..parts).contains(&slot) { 0 } else { slot.div_euclid(parts) };
        let Grid { start, length, last, index, .. } = &mut self.grid;
        *start += cycles * *length;
        (*last, *index) = (instant, slot - cycles * parts);
    }

    fn refund(&mut self, now: i64, release: &Release, params: &SlidingWindowParams) {
        let Release { instant, mut units } = *release;
        if let Some(instant) = instant {
            // A changed quota has moved the counts. An older sub-window does not count any more.
            if !self.is_foreign(params) {
                self.counts.remove(self.grid.index - self.slot_of(instant), units);
            }
            return;
        }
        // Requests that wait keep theirs: their sub-windows may have replaced some that count now.
        let ahead = self.grid.index - self.slot_of(now);
        for i in (ahead.max(0)..=ahead.min(0) + self.parts()).rev() {
            units -= self.counts.remove(i, units);
        }
    }

    #[inline(always)]
    fn reset_after(&self, now: i64) -> i64 {
        self.end().map_or(0, |end| (self.instant_after(end) - now).max(0))
    }

    #[inline(always)]
    fn report(&self, now: i64, known: (i64, i64), params: &SlidingWindowParams) -> Report {
        let view = self.view(now);
        let mut remaining = 0;
        if view.instant == now {
            let length = self.grid.length;
            // The weight of the oldest sub-window is rounded up.
            let passed = self.passed(now) - view.slot * length;
            let left = if view.oldest > 0 { mul_div(view.oldest, passed, length) } else { 0 };
            remaining = (params.limit - view.inside - view.oldest + left).max(0);
        }
        let next = remaining + 1;
        if known.0 == next {
            return Report { remaining, replenish: known.1 };
        }
        Report { remaining, replenish: self.first_instant(&view, params.limit - next) - now }
    }
}

/// The sub-window after this many parts, as the scripts compute it: 2^53 parts or more, after a
/// wait for another limit, are not exact in doubles.
#[inline(never)]
fn slot_after(passed: i64, length: i64) -> i64 {
    match passed < 1 << 53 {
        true => passed.div_euclid(length),
        false => (passed as f64 / length as f64).floor() as i64,
    }
}
