//! The fixed window: at most `limit` in a window that opens at its first admitted request. Its Lua
//! twin is `scripts/fixed_window/model.lua`.

use super::{
    arithmetic::{EXACT, ceil, floor, max, min},
    model::{Earliest, Model, Report},
    packed::{FastReport, FastStep, Packed},
    request::Release,
    state_bytes::Reader,
};
use crate::quota::Quota;

#[derive(Clone, Copy, Debug)]
pub(crate) struct FixedWindowParams {
    limit: f64,
    window: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct FixedWindowState {
    /// The opening of the current window.
    pub(super) start: f64,
    /// The instant of the newest admitted request, which can be in a later window.
    pub(super) last: f64,
    /// The count of the window of `last`, or of the current one, if that is newer.
    pub(super) count: f64,
    /// The window that this was counted with.
    pub(super) length: f64,
}

impl FixedWindowParams {
    pub(super) fn new(quota: Quota) -> Self {
        Self { limit: quota.limit() as f64, window: quota.window_us() as f64 }
    }

    /// Returns the parameters for the fast path.
    pub(super) fn plain(&self) -> PlainFixedWindow {
        PlainFixedWindow { limit: self.limit as u64, window: self.window as i64 }
    }
}

/// The same in integers, for the fast path.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlainFixedWindow {
    limit: u64,
    window: i64,
}

impl PlainFixedWindow {
    /// Returns the window and its count at an instant; `None` if the window is newer.
    #[inline]
    fn window_at(&self, [start, count]: Packed, now: i64) -> Option<Packed> {
        match now - start {
            age if age < 0 => None,
            age if age < self.window && count > 0 => Some([start, count]),
            _ => Some([now, 0]),
        }
    }

    #[inline]
    pub(super) fn step(&self, packed: &mut Packed, cost: u64, now: i64) -> Option<FastStep> {
        let [start, count] = self.window_at(*packed, now)?;
        if cost == 0 || cost > self.limit {
            return None;
        }
        let spent = count + cost as i64;
        Some(if spent as u64 <= self.limit {
            *packed = [start, spent];
            FastStep { admitted: true, wait: 0, after: *packed, now }
        } else {
            let wait = (start + self.window - now) as u64;
            FastStep { admitted: false, wait, after: [start, count], now }
        })
    }

    #[inline]
    pub(super) fn report(&self, step: &FastStep) -> FastReport {
        let FastStep { after: [start, count], now, .. } = *step;
        let reset = (start + self.window - now) as u64;
        FastReport { remaining: self.remaining(count), replenish: reset, reset }
    }

    #[inline]
    pub(super) fn observe(&self, packed: Packed, now: i64) -> Option<[u64; 2]> {
        let [start, count] = self.window_at(packed, now)?;
        let reset = if count > 0 { start + self.window - now } else { 0 };
        Some([self.remaining(count), reset as u64])
    }

    fn remaining(&self, count: i64) -> u64 {
        self.limit.saturating_sub(count as u64)
    }
}

impl FixedWindowState {
    fn index_of(&self, instant: f64) -> f64 {
        floor((instant - self.start) / self.length)
    }

    /// The windows between the current one and the newest one that a request has reserved.
    pub(super) fn ahead(&self) -> f64 {
        if self.last < self.start + self.length { 0.0 } else { self.index_of(self.last) }
    }

    /// Counts with another length of a window. If requests wait, a window opens when the last of
    /// them proceeds, so that they count in it; else the window of the count stays open.
    fn set_length(&mut self, now: f64, length: f64) {
        if self.last > now {
            self.start = self.last - ceil((self.last - now) / length) * length;
        } else {
            self.start += self.ahead() * self.length;
            self.last = self.start;
        }
        self.length = length;
    }

    fn is_empty(&self) -> bool {
        self.count == 0.0 && self.ahead() == 0.0
    }
}

impl Model for FixedWindowState {
    type Params = FixedWindowParams;
    type Saved = Self;

    fn args(params: &FixedWindowParams) -> Vec<f64> {
        vec![params.limit, params.window]
    }

    fn max_cost(params: &FixedWindowParams) -> f64 {
        params.limit
    }

    fn beside(params: &FixedWindowParams, held: f64) -> FixedWindowParams {
        FixedWindowParams { limit: params.limit - held, ..*params }
    }

    #[inline]
    fn initial(now: f64, params: &FixedWindowParams) -> Self {
        Self { start: now, last: now, count: 0.0, length: params.window }
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader::new(bytes, b'F')?;
        let [start, last, count, length] = reader.integers([7, 7, 7, 6])?;
        Some(Self { start, last, count, length })
    }

    #[inline]
    fn save(&self) -> Self {
        *self
    }

    #[inline]
    fn restore(&mut self, saved: Self) {
        *self = saved;
    }

    #[inline]
    fn step_back(&mut self, now: f64) -> bool {
        let back = self.start - now;
        if back > 0.0 {
            self.last = max(self.last - back, 0.0);
            self.start = now;
        }
        back > 0.0
    }

    #[inline]
    fn advance(&mut self, now: f64) {
        let windows = self.index_of(now);
        if windows > self.ahead() {
            self.count = 0.0;
        }
        self.start += windows * self.length;
    }

    #[inline]
    fn adopt(&mut self, now: f64, params: &FixedWindowParams, _: &mut Self) -> Option<f64> {
        let mut over = None;
        if self.length != params.window {
            let time = max(self.reset_after(now), 0.0);
            if time > 0.0 {
                self.set_length(now, params.window);
            } else {
                *self = Self::initial(now, params);
            }
            over = Some(time);
        }
        self.advance(now);
        if self.is_empty() {
            self.start = now;
        }
        over
    }

    #[inline]
    fn earliest(&self, now: f64, needed: f64, params: &FixedWindowParams) -> Earliest {
        let full = self.count + needed > params.limit;
        let index = if full { self.ahead() + 1.0 } else { self.ahead() };
        max(self.start + index * self.length - now, 0.0).into()
    }

    #[inline]
    fn commit(&mut self, instant: f64, cost: f64, _: &FixedWindowParams) {
        if self.index_of(instant) > self.ahead() {
            self.count = 0.0;
        }
        self.count = min(self.count + cost, EXACT); // units spent may exceed the quota
        self.last = max(self.last, instant);
    }

    fn refund(&mut self, _: f64, release: &Release, _: &FixedWindowParams) {
        let Release { instant, units } = *release;
        // An older window does not count any more.
        if instant.is_none_or(|instant| self.index_of(instant) == self.ahead()) {
            self.count = max(self.count - units, 0.0);
        }
    }

    #[inline]
    fn reset_after(&self, now: f64) -> f64 {
        match self.is_empty() {
            true => 0.0,
            false => self.start + (self.ahead() + 1.0) * self.length - now,
        }
    }

    #[inline]
    fn report(&self, now: f64, reset: f64, params: &FixedWindowParams) -> Report {
        let Self { start, count, length, .. } = *self;
        let ahead = self.ahead();
        if reset == 0.0 {
            return Report { remaining: params.limit, replenish: 0.0 };
        }
        let remaining = if ahead == 0.0 { max(params.limit - count, 0.0) } else { 0.0 };
        let opening = if ahead > 0.0 && count < params.limit { ahead } else { ahead + 1.0 };
        Report { remaining, replenish: start + opening * length - now }
    }

    #[inline]
    fn pack(&self, now: f64, params: &FixedWindowParams) -> Option<Packed> {
        let fits = self.length == params.window && self.last <= now && self.ahead() == 0.0;
        fits.then_some([self.start as i64, self.count as i64])
    }

    #[inline]
    fn unpack([start, count]: Packed, params: &FixedWindowParams) -> Option<Self> {
        let (start, count) = (start as f64, count as f64);
        Some(Self { start, last: start, count, length: params.window })
    }
}
