//! The fixed window: at most `limit` in a window that opens at its first admitted request. Its Lua
//! twin is `scripts/fixed_window/model.lua`.

use super::{
    arithmetic::max,
    model::{Earliest, Model, Report},
    packed::Packed,
    request::Release,
    state_bytes::Reader,
};
use crate::quota::Quota;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Params {
    limit: f64,
    window: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct State {
    /// The opening of the current window.
    pub(super) start: f64,
    /// The windows between it and the newest one that a request has reserved.
    pub(super) ahead: f64,
    /// The count of that newest window.
    pub(super) count: f64,
    /// The window that this was counted with.
    pub(super) length: f64,
}

impl Params {
    pub(super) fn new(quota: Quota) -> Self {
        Self { limit: quota.limit().into(), window: quota.window_us() as f64 }
    }
}

impl State {
    fn index_of(&self, instant: f64) -> f64 {
        ((instant - self.start) / self.length).floor()
    }

    fn is_empty(&self) -> bool {
        self.ahead == 0.0 && self.count == 0.0
    }
}

impl Model for State {
    type Params = Params;
    type Saved = Self;

    fn args(params: &Params) -> Vec<f64> {
        vec![params.limit, params.window]
    }

    fn max_cost(params: &Params) -> f64 {
        params.limit
    }

    #[inline]
    fn initial(now: f64, params: &Params) -> Self {
        Self { start: now, ahead: 0.0, count: 0.0, length: params.window }
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader::new(bytes, b'F')?;
        let [start, count, length, ahead] = reader.integers([7, 7, 6, 5])?;
        Some(Self { start, ahead, count, length })
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
        let back = now < self.start;
        if back {
            self.start = now;
        }
        back
    }

    #[inline]
    fn advance(&mut self, now: f64) {
        let windows = self.index_of(now);
        self.start += windows * self.length;
        if windows > self.ahead {
            (self.ahead, self.count) = (0.0, 0.0);
        } else {
            self.ahead -= windows;
        }
    }

    #[inline]
    fn adopt(&mut self, now: f64, params: &Params, _: &mut Self::Saved) -> bool {
        let changed = self.length != params.window;
        if changed {
            self.length = params.window;
            self.advance(now);
        }
        if self.is_empty() {
            self.start = now;
        }
        changed
    }

    #[inline]
    fn earliest(&self, now: f64, needed: f64, params: &Params) -> Earliest {
        let full = self.count + needed > params.limit;
        let index = if full { self.ahead + 1.0 } else { self.ahead };
        max(self.start + index * self.length - now, 0.0).into()
    }

    #[inline]
    fn commit(&mut self, instant: f64, cost: f64, _: &Params) {
        let index = self.index_of(instant);
        if index > self.ahead {
            (self.ahead, self.count) = (index, 0.0);
        }
        self.count += cost;
    }

    fn refund(&mut self, _: f64, release: &Release, _: &Params) {
        let Release { instant, units, .. } = *release;
        // An older window does not count any more.
        if instant.is_none_or(|instant| self.index_of(instant) == self.ahead) {
            self.count = max(self.count - units, 0.0);
        }
    }

    #[inline]
    fn reset_after(&self, now: f64) -> f64 {
        match self.is_empty() {
            true => 0.0,
            false => self.start + (self.ahead + 1.0) * self.length - now,
        }
    }

    #[inline]
    fn report(&self, now: f64, reset: f64, params: &Params) -> Report {
        let Self { start, ahead, count, length } = *self;
        if reset == 0.0 {
            return Report { remaining: params.limit, replenish: 0.0 };
        }
        let remaining = if ahead == 0.0 { max(params.limit - count, 0.0) } else { 0.0 };
        let opening = if ahead > 0.0 && count < params.limit { ahead } else { ahead + 1.0 };
        Report { remaining, replenish: start + opening * length - now }
    }

    #[inline]
    fn pack(&self, _: f64, params: &Params) -> Option<Packed> {
        (self.length == params.window && self.ahead == 0.0).then_some([self.start, self.count])
    }

    #[inline]
    fn unpack([start, count]: Packed, params: &Params) -> Option<Self> {
        Some(Self { start, ahead: 0.0, count, length: params.window })
    }
}
