//! The fixed window: at most `limit` in a window that opens at its first admitted request. Its Lua
//! twin is `scripts/fixed_window/model.lua`.

use super::{
    arithmetic::{EXACT, ceil_div},
    core::Core,
    model::{Earliest, Model, Parameters, Report},
    request::Release,
    state_bytes::Reader,
};
use crate::quota::Quota;

#[derive(Clone, Copy, Debug)]
pub(crate) struct FixedWindowParams {
    limit: i64,
    window: i64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct FixedWindowState {
    /// The opening of the current window.
    pub(super) start: i64,
    /// The instant of the newest admitted request, which can be in a later window.
    pub(super) last: i64,
    /// The count of the window of `last`, or of the current one, if that is newer.
    pub(super) count: i64,
    /// The window that this was counted with.
    pub(super) length: i64,
}

impl FixedWindowParams {
    pub(super) fn new(quota: Quota) -> Self {
        Self { limit: quota.limit() as i64, window: quota.window_us() as i64 }
    }
}

impl FixedWindowState {
    /// The number of windows after the current one. Most instants are in that one.
    #[inline(always)]
    fn index_of(&self, instant: i64) -> i64 {
        let age = instant - self.start;
        if (age as u64) < self.length as u64 { 0 } else { age.div_euclid(self.length) }
    }

    /// The windows between the current one and the newest one that a request has reserved.
    #[inline(always)]
    pub(super) fn ahead(&self) -> i64 {
        if self.last <= self.start { 0 } else { self.index_of(self.last) }
    }

    /// Counts with another length of a window. If requests wait, a window opens when the last of
    /// them proceeds, so that they count in it; else the window of the count stays open.
    fn set_length(&mut self, now: i64, length: i64) {
        if self.last > now {
            self.start = self.last - ceil_div(self.last - now, length) * length;
        } else {
            self.start += self.ahead() * self.length;
            self.last = self.start;
        }
        self.length = length;
    }

    #[inline(always)]
    fn is_empty(&self) -> bool {
        self.count == 0 && self.ahead() == 0
    }

    fn is_foreign(&self, params: &FixedWindowParams) -> bool {
        self.length != params.window
    }
}

impl Parameters for FixedWindowParams {
    fn args(&self) -> Vec<f64> {
        vec![self.limit as f64, self.window as f64]
    }

    fn full(&self) -> i64 {
        self.limit
    }

    fn drain(&self, units: i64) -> i64 {
        if units > 0 { self.window } else { 0 }
    }

    fn beside(&self, held: i64) -> Self {
        Self { limit: self.limit - held, ..*self }
    }
}

impl Model for FixedWindowState {
    type Params = FixedWindowParams;
    type Saved = Self;

    #[inline(always)]
    fn initial(now: i64, params: &FixedWindowParams) -> Self {
        Self { start: now, last: now, count: 0, length: params.window }
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader::new(bytes, b'F')?;
        let [start, last, count, length] = reader.integers([7, 7, 7, 6])?;
        (length > 0).then_some(Self { start, last, count, length })
    }

    #[inline(always)]
    fn save(&self) -> Self {
        *self
    }

    #[inline(always)]
    fn restore(&mut self, saved: Self) {
        *self = saved;
    }

    fn step_back(&mut self, now: i64) -> bool {
        let back = self.start - now;
        if back > 0 {
            self.last = self.last.saturating_sub(back).max(0);
            self.start = now;
        }
        back > 0
    }

    #[inline(always)]
    fn advance(&mut self, now: i64) {
        let windows = self.index_of(now);
        if windows > self.ahead() {
            self.count = 0;
        }
        self.start += windows * self.length;
    }

    #[inline(always)]
    fn adopt(&mut self, now: i64, params: &FixedWindowParams, _: &mut Self) -> Option<i64> {
        let mut over = None;
        if self.is_foreign(params) {
            let time = self.reset_after(now).max(0);
            if time > 0 {
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

    #[inline(always)]
    fn earliest(&self, now: i64, needed: Option<i64>, params: &FixedWindowParams) -> Earliest {
        let full = needed.is_some_and(|needed| self.count + needed > params.limit);
        let index = self.ahead() + i64::from(full);
        let opens = || (self.start + index * self.length - now).max(0);
        Earliest { wait: if index == 0 { 0 } else { opens() }, full: 0 }
    }

    #[inline(always)]
    fn commit(&mut self, instant: i64, cost: i64, _: &FixedWindowParams) {
        if self.index_of(instant) > self.ahead() {
            self.count = 0;
        }
        self.count = (self.count + cost).min(EXACT); // units spent may exceed the quota
        self.last = self.last.max(instant);
    }

    fn refund(&mut self, _: i64, release: &Release, _: &FixedWindowParams) {
        let Release { instant, units } = *release;
        // An older window does not count any more.
        if instant.is_none_or(|instant| self.index_of(instant) == self.ahead()) {
            self.count = (self.count - units).max(0);
        }
    }

    #[inline(always)]
    fn reset_after(&self, now: i64) -> i64 {
        match self.is_empty() {
            true => 0,
            false => self.start + (self.ahead() + 1) * self.length - now,
        }
    }

    fn reset_beside(&self, _: i64, reset: i64, held: i64, params: &FixedWindowParams) -> i64 {
        if reset > 0 { reset } else { params.drain(held) }
    }

    #[inline(always)]
    fn report(&self, now: i64, _: (i64, i64), params: &FixedWindowParams) -> Report {
        let (reset, left) = (self.reset_after(now), params.limit - self.count);
        if self.ahead() == 0 {
            return Report { remaining: left.max(0), replenish: reset };
        }
        Report { remaining: 0, replenish: if left > 0 { reset - self.length } else { reset } }
    }

    #[inline(always)]
    fn open(core: Core, now: i64, params: &FixedWindowParams) -> Option<Self> {
        let is_over = core.amount == 0 || now - core.at >= params.window;
        let (start, count) = if is_over { (now, 0) } else { (core.at, core.amount) };
        // The instant of the last request is not known.
        Some(Self { start, last: i64::MIN, count, length: params.window })
    }

    #[inline(always)]
    fn close(&self, now: i64, params: &FixedWindowParams) -> Option<Core> {
        let fits = !self.is_foreign(params) && self.last <= now && self.ahead() == 0;
        fits.then_some(Core { at: self.start, amount: self.count })
    }
}
