//! The sliding window: estimates the sliding log from the counts of `buckets` sub-windows and of
//! the one before them, which is weighted by its overlap with the window. Its Lua twin is
//! `scripts/sliding_window/model.lua`.
//!
//! Inside, one microsecond is `buckets` parts, so that a sub-window is `window` parts.

use std::mem;

use super::{
    arithmetic::{ceil, floor, max, mul_div},
    counts::Counts,
    model::{Earliest, Model, Report},
    request::Release,
    state_bytes::Reader,
};
use crate::quota::{ConfigError, Quota};

const MAX_BUCKETS: u32 = 100;

#[derive(Clone, Copy, Debug)]
pub(crate) struct SlidingWindowParams {
    limit: f64,
    window: f64,
    buckets: f64,
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
    pub(super) at: f64,
    pub(super) start: f64,
    /// The parts of a sub-window: the window in microseconds.
    pub(super) length: f64,
    /// The instant of the newest admitted request.
    pub(super) last: f64,
    /// The number of the sub-window of `last`, from `start`.
    pub(super) index: f64,
    /// The parts of a microsecond: the sub-windows of a window.
    pub(super) parts: f64,
}

impl SlidingWindowParams {
    pub(super) fn new(quota: Quota, buckets: u32) -> Result<Self, ConfigError> {
        if !(1..=MAX_BUCKETS).contains(&buckets) {
            return Err(ConfigError::Buckets { buckets });
        }
        let (limit, window) = (quota.limit() as f64, quota.window_us() as f64);
        Ok(Self { limit, window, buckets: buckets.into() })
    }
}

impl SlidingWindowState {
    fn is_foreign_to(&self, params: &SlidingWindowParams) -> bool {
        self.grid.length != params.window || self.grid.parts != params.buckets
    }

    fn count(&self, slot: f64) -> f64 {
        let i = self.grid.index - slot;
        if i < 0.0 { 0.0 } else { self.counts.get(i as usize) }
    }

    fn slot_of(&self, instant: f64) -> f64 {
        floor((instant - self.grid.start) * self.grid.parts / self.grid.length)
    }

    fn opening(&self, slot: f64) -> f64 {
        self.grid.start + ceil(slot * self.grid.length / self.grid.parts)
    }

    fn count_inside(&self, slot: f64) -> f64 {
        (0..self.grid.parts as u32).map(|i| self.count(slot - f64::from(i))).sum()
    }

    /// The part of the count of the oldest sub-window that its overlap weights, rounded up.
    fn weight(&self, slot: f64, instant: f64) -> f64 {
        let Grid { start, length, parts, .. } = self.grid;
        let passed = (instant - start) * parts - slot * length;
        let count = self.count(slot - parts);
        count - mul_div(count, passed, length)
    }

    /// The instant from which the weight of the oldest sub-window is at most `free`.
    fn light(&self, slot: f64, oldest: f64, free: f64) -> f64 {
        let Grid { start, length, parts, .. } = self.grid;
        let overlap = mul_div(length, free, oldest);
        start + ceil(((slot + 1.0) * length - overlap) / parts)
    }

    /// The newest sub-window with a count; none if it has left the window.
    fn newest(&self, now: f64) -> Option<f64> {
        let i = self.counts.iter().position(|count| count > 0.0)?;
        let slot = self.grid.index - i as f64;
        (self.slot_of(now) <= slot + self.grid.parts).then_some(slot)
    }

    fn first_instant(
        &self,
        now: f64,
        needed: f64,
        SlidingWindowParams { limit, .. }: SlidingWindowParams,
    ) -> f64 {
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
            if free >= 0.0 {
                let light = self.light(slot, oldest, free);
                if light < self.opening(slot + 1.0) {
                    return instant.max(light);
                }
            }
            slot += 1.0;
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
        now: f64,
        SlidingWindowParams { window, buckets, .. }: SlidingWindowParams,
    ) -> Counts {
        let Grid { start, last, .. } = self.grid;
        let mut moved = Counts::zeros(buckets as usize + 1);
        let newest = ((last - start) * buckets / window).floor();
        for (i, count) in self.counts.iter().enumerate() {
            let slot = self.grid.index - i as f64;
            let (opening, closing) = (self.opening(slot), self.opening(slot + 1.0));
            let end = last.min(closing - 1.0);
            let middle = ((opening + closing) / 2.0).floor();
            let instant = if end > now { end } else { opening.max(middle.min(last)) };
            let i = newest - ((instant - start) * buckets / window).floor();
            if i >= 0.0 && (i as usize) < moved.len() {
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
        vec![params.limit, params.window, params.buckets]
    }

    fn max_cost(params: &SlidingWindowParams) -> f64 {
        params.limit
    }

    fn beside(params: &SlidingWindowParams, held: f64) -> SlidingWindowParams {
        SlidingWindowParams { limit: params.limit - held, ..*params }
    }

    #[inline]
    fn initial(
        now: f64,
        &SlidingWindowParams { window, buckets, .. }: &SlidingWindowParams,
    ) -> Self {
        let counts = Counts::zeros(buckets as usize + 1);
        let grid =
            Grid { at: now, start: now, length: window, last: now, index: 0.0, parts: buckets };
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
        let index = ((last - start) * parts / length).floor();
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
    fn step_back(&mut self, now: f64) -> bool {
        let Grid { at, start, last, .. } = &mut self.grid;
        let back = *at - now;
        if back > 0.0 {
            (*at, *start, *last) = (now, *start - back, *last - back);
        }
        back > 0.0
    }

    #[inline]
    fn advance(&mut self, now: f64) {
        self.grid.at = now;
    }

    #[inline]
    fn adopt(
        &mut self,
        now: f64,
        params: &SlidingWindowParams,
        saved: &mut Self::Saved,
    ) -> Option<f64> {
        self.advance(now);
        let over = self.is_foreign_to(params).then(|| self.reset_after(now));
        if over.is_some_and(|over| over > 0.0) {
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
    fn earliest(&self, now: f64, needed: f64, params: &SlidingWindowParams) -> Earliest {
        (self.first_instant(now, needed.min(params.limit), *params) - now).into()
    }

    #[inline]
    fn commit(&mut self, instant: f64, cost: f64, _: &SlidingWindowParams) {
        let slot = self.slot_of(instant);
        let by = (slot - self.grid.index).min(self.counts.len() as f64) as usize;
        self.counts.shift(by);
        self.counts.add(0, cost);
        let Grid { start, length, last, index, parts, .. } = &mut self.grid;
        let cycles = floor(slot / *parts); // `start` moves by whole windows
        *start += cycles * *length;
        (*last, *index) = (instant, slot - cycles * *parts);
    }

    fn refund(&mut self, now: f64, release: &Release, params: &SlidingWindowParams) {
        let Release { instant, mut units } = *release;
        if let Some(instant) = instant {
            if self.is_foreign_to(params) {
                return; // a changed quota has moved the counts
            }
            let i = self.grid.index - self.slot_of(instant);
            // An older sub-window does not count any more.
            if i >= 0.0 {
                self.counts.remove(i as usize, units);
            }
            return;
        }
        // Requests that wait keep theirs: their sub-windows may have replaced some that count now.
        let ahead = self.grid.index - self.slot_of(now);
        let inside = ahead.min(0.0) + self.grid.parts + 1.0;
        for i in (ahead.max(0.0) as usize..inside as usize).rev() {
            units -= self.counts.remove(i, units);
        }
    }

    #[inline]
    fn reset_after(&self, now: f64) -> f64 {
        let end = |newest| self.opening(newest + self.grid.parts + 1.0) - now;
        self.newest(now).map_or(0.0, end)
    }

    #[inline]
    fn report(&self, now: f64, reset: f64, params: &SlidingWindowParams) -> Report {
        let SlidingWindowParams { limit, .. } = *params;
        if reset == 0.0 {
            return Report { remaining: limit, replenish: 0.0 };
        }
        let mut remaining = 0.0;
        if self.grid.last <= now {
            let slot = self.slot_of(now);
            let inside = self.count_inside(slot);
            remaining = max(limit - inside - self.weight(slot, now), 0.0);
        }
        let replenish = self.first_instant(now, remaining + 1.0, *params) - now;
        Report { remaining, replenish }
    }
}
