//! The sliding window: estimates the sliding log from the counts of `buckets` sub-windows and of
//! the one before them, which is weighted by its overlap with the window. Its Lua twin is
//! `scripts/sliding_window/model.lua`.
//!
//! Inside, one microsecond is `buckets` parts, so that a sub-window is `window` parts.

use std::mem;

use super::{
    counts::Counts,
    model::{Earliest, Model, Report},
    request::Release,
    state_bytes::Reader,
};
use crate::quota::{ConfigError, Quota};

fn mul_div(a: i64, b: i64, c: i64) -> i64 {
    (a as i128 * b as i128 / c as i128) as i64
}

const MAX_BUCKETS: u32 = 100;

#[derive(Clone, Copy, Debug)]
pub(crate) struct SlidingWindowParams {
    limit: i64,
    window: i64,
    buckets: i64,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SlidingWindowState {
    /// The position of the sub-windows.
    pub(super) grid: Grid,
    /// The counts of `parts + 1` sub-windows, newest first: the first one contains `last`.
    pub(super) counts: Counts,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Grid {
    pub(super) at: i64,
    pub(super) start: i64,
    /// The parts of a sub-window: the window in microseconds.
    pub(super) length: i64,
    /// The instant of the newest admitted request.
    pub(super) last: i64,
    /// The number of the sub-window of `last`, from `start`.
    pub(super) index: i64,
    /// The parts of a microsecond: the sub-windows of a window.
    pub(super) parts: i64,
}

impl SlidingWindowParams {
    pub(super) fn new(quota: Quota, buckets: u32) -> Result<Self, ConfigError> {
        if !(1..=MAX_BUCKETS).contains(&buckets) {
            return Err(ConfigError::Buckets { buckets });
        }
        let (limit, window) = (quota.limit() as i64, quota.window_us() as i64);
        Ok(Self { limit, window, buckets: buckets.into() })
    }
}

impl SlidingWindowState {
    fn is_foreign_to(&self, params: &SlidingWindowParams) -> bool {
        self.grid.length != params.window || self.grid.parts != params.buckets
    }

    fn count(&self, slot: i64) -> i64 {
        let i = self.grid.index - slot;
        if i < 0 { 0 } else { self.counts.get(i as usize) }
    }

    fn slot_of(&self, instant: i64) -> i64 {
        ((instant - self.grid.start) * self.grid.parts).div_euclid(self.grid.length)
    }

    fn opening(&self, slot: i64) -> i64 {
        self.grid.start - (-slot * self.grid.length).div_euclid(self.grid.parts)
    }

    fn count_inside(&self, slot: i64) -> i64 {
        (0..self.grid.parts as u32).map(|i| self.count(slot - i as i64)).sum()
    }

    /// The part of the count of the oldest sub-window that its overlap weights, rounded up.
    fn weight(&self, slot: i64, instant: i64) -> i64 {
        let Grid { start, length, parts, .. } = self.grid;
        let passed = (instant - start) * parts - slot * length;
        let count = self.count(slot - parts);
        count - mul_div(count, passed, length)
    }

    /// The instant from which the weight of the oldest sub-window is at most `free`.
    fn light(&self, slot: i64, oldest: i64, free: i64) -> i64 {
        let Grid { start, length, parts, .. } = self.grid;
        let overlap = mul_div(length, free, oldest);
        start - (overlap - (slot + 1) * length).div_euclid(parts)
    }

    /// The newest sub-window with a count; none if it has left the window.
    fn newest(&self, now: i64) -> Option<i64> {
        let i = self.counts.iter().position(|count| count > 0)?;
        let slot = self.grid.index - i as i64;
        (self.slot_of(now) <= slot + self.grid.parts).then_some(slot)
    }

    fn first_instant(
        &self,
        now: i64,
        needed: i64,
        SlidingWindowParams { limit, .. }: SlidingWindowParams,
    ) -> i64 {
        let mut instant = now.max(self.grid.last);
        let mut slot = self.slot_of(instant);
        let mut inside = self.count_inside(slot);
        // After these steps, the newest sub-window has left the window.
        for _ in 0..=self.counts.len() {
            let oldest = self.count(slot - self.grid.parts);
            let free = limit - needed - inside;
            if free >= oldest {
                return instant;
            }
            if free >= 0 {
                let light = self.light(slot, oldest, free);
                if light < self.opening(slot + 1) {
                    return instant.max(light);
                }
            }
            slot += 1;
            inside -= self.count(slot - self.grid.parts);
            instant = self.opening(slot);
        }
        instant
    }

    /// Counts each old sub-window where its middle is, or if requests wait in it, at its end, and
    /// not after `last`. `start` stays, so that two alternating quotas do not move the counts ahead
    /// of the time.
    fn regrid(
        &mut self,
        now: i64,
        SlidingWindowParams { window, buckets, .. }: SlidingWindowParams,
    ) -> Counts {
        let Grid { start, last, .. } = self.grid;
        let mut moved = Counts::zeros(buckets as usize + 1);
        let newest = ((last - start) * buckets).div_euclid(window);
        for (i, count) in self.counts.iter().enumerate() {
            let slot = self.grid.index - i as i64;
            let (opening, closing) = (self.opening(slot), self.opening(slot + 1));
            let end = last.min(closing - 1);
            let middle = (opening + closing).div_euclid(2);
            let instant = if end > now { end } else { opening.max(middle.min(last)) };
            let i = newest - ((instant - start) * buckets).div_euclid(window);
            if i >= 0 && (i as usize) < moved.len() {
                moved.add(i as usize, count);
            }
        }
        self.grid = Grid { index: newest, length: window, parts: buckets, ..self.grid };
        moved
    }
}

impl Model for SlidingWindowState {
    type Params = SlidingWindowParams;
    type Saved = (Grid, Option<Counts>);

    fn args(params: &SlidingWindowParams) -> Vec<f64> {
        vec![params.limit as f64, params.window as f64, params.buckets as f64]
    }

    fn max_cost(params: &SlidingWindowParams) -> i64 {
        params.limit
    }

    fn full(params: &SlidingWindowParams) -> i64 {
        params.limit
    }

    fn drain(units: i64, params: &SlidingWindowParams) -> i64 {
        let SlidingWindowParams { window, buckets, .. } = *params;
        if units > 0 { ((buckets + 1) * window + buckets - 1) / buckets } else { 0 }
    }

    fn beside(params: &SlidingWindowParams, held: i64) -> SlidingWindowParams {
        SlidingWindowParams { limit: params.limit - held, ..*params }
    }

    #[inline]
    fn initial(
        now: i64,
        &SlidingWindowParams { window, buckets, .. }: &SlidingWindowParams,
    ) -> Self {
        let counts = Counts::zeros(buckets as usize + 1);
        let grid =
            Grid { at: now, start: now, length: window, last: now, index: 0, parts: buckets };
        Self { grid, counts }
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
        let index = ((last - start) * parts).div_euclid(length);
        let counts = (0..=parts as usize).map(|_| reader.integer(size));
        let counts = counts.collect::<Option<_>>()?;
        Some(Self { grid: Grid { at, start, length, last, index, parts }, counts })
    }

    #[inline]
    fn save(&self) -> Self::Saved {
        (self.grid, None)
    }

    #[inline]
    fn restore(&mut self, (grid, counts): Self::Saved) {
        self.grid = grid;
        if let Some(counts) = counts {
            self.counts = counts;
        }
    }

    #[inline]
    fn step_back(&mut self, now: i64) -> bool {
        let Grid { at, start, last, .. } = &mut self.grid;
        let back = *at - now;
        if back > 0 {
            (*at, *start, *last) = (now, *start - back, *last - back);
        }
        back > 0
    }

    #[inline]
    fn advance(&mut self, now: i64) {
        self.grid.at = now;
    }

    #[inline]
    fn adopt(
        &mut self,
        now: i64,
        params: &SlidingWindowParams,
        saved: &mut Self::Saved,
    ) -> Option<i64> {
        self.advance(now);
        let over = self.is_foreign_to(params).then(|| self.reset_after(now));
        if over.is_some_and(|over| over > 0) {
            let moved = self.regrid(now, *params);
            saved.1 = Some(mem::replace(&mut self.counts, moved));
        }
        if self.newest(now).is_none() {
            let Self { grid, counts } = Self::initial(now, params);
            self.grid = grid;
            saved.1.get_or_insert(mem::replace(&mut self.counts, counts));
        }
        over
    }

    #[inline]
    fn earliest(&self, now: i64, needed: Option<i64>, params: &SlidingWindowParams) -> Earliest {
        let needed = needed.map_or(-(1 << 60), |needed| needed.min(params.limit));
        (self.first_instant(now, needed, *params) - now).into()
    }

    #[inline]
    fn commit(&mut self, instant: i64, cost: i64, _: &SlidingWindowParams) {
        let slot = self.slot_of(instant);
        let by = (slot - self.grid.index).min(self.counts.len() as i64) as usize;
        self.counts.shift(by);
        self.counts.add(0, cost);
        let Grid { start, length, last, index, parts, .. } = &mut self.grid;
        let cycles = slot.div_euclid(*parts); // `start` moves by whole windows
        *start += cycles * *length;
        (*last, *index) = (instant, slot - cycles * *parts);
    }

    fn refund(&mut self, now: i64, release: &Release, params: &SlidingWindowParams) {
        let Release { instant, mut units } = *release;
        if let Some(instant) = instant {
            if self.is_foreign_to(params) {
                return; // a changed quota has moved the counts
            }
            let i = self.grid.index - self.slot_of(instant);
            // An older sub-window does not count any more.
            if i >= 0 {
                self.counts.remove(i as usize, units);
            }
            return;
        }
        // Requests that wait keep theirs: their sub-windows may have replaced some that count now.
        let ahead = self.grid.index - self.slot_of(now);
        let inside = ahead.min(0) + self.grid.parts + 1;
        for i in (ahead.max(0) as usize..inside as usize).rev() {
            units -= self.counts.remove(i, units);
        }
    }

    #[inline]
    fn reset_after(&self, now: i64) -> i64 {
        let end = |newest| self.opening(newest + self.grid.parts + 1) - now;
        self.newest(now).map_or(0, end)
    }

    #[inline]
    fn report(&self, now: i64, reset: i64, params: &SlidingWindowParams) -> Report {
        let SlidingWindowParams { limit, .. } = *params;
        if reset == 0 {
            return Report { remaining: limit, replenish: 0 };
        }
        let mut remaining = 0;
        if self.grid.last <= now {
            let slot = self.slot_of(now);
            let inside = self.count_inside(slot);
            remaining = (limit - inside - self.weight(slot, now)).max(0);
        }
        let replenish = self.first_instant(now, remaining + 1, *params) - now;
        Report { remaining, replenish }
    }
}
