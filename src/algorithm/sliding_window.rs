//! The sliding window: counts of parts of a window, the oldest weighted by what is left of it. Its Lua twin is
//! `scripts/sliding_window.lua`.

use super::{
    Ask, Outcome, Verdict,
    reservations::{Count, Release, Reservation, Reserved},
};
use crate::quota::Quota;

/// The parameters of `scripts/sliding_window.lua`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Params {
    limit: f64,
    window: f64,
    buckets: f64,
    grain: f64,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct State {
    pub(super) at: f64,
    pub(super) start: f64,
    /// The parts of a sub-window: the window in microseconds.
    pub(super) length: f64,
    /// The newest admitted request.
    pub(super) last: f64,
    /// The number of its sub-window, from `start`.
    pub(super) index: f64,
    /// The parts of a microsecond: the sub-windows of a window.
    pub(super) parts: f64,
    /// The counts of `parts + 1` sub-windows, newest first.
    pub(super) counts: Box<[u32]>,
}

impl State {
    fn new(now: f64, Params { window, buckets, .. }: Params) -> Self {
        let counts = vec![0; buckets as usize + 1].into_boxed_slice();
        Self { at: now, start: now, length: window, last: now, index: 0.0, parts: buckets, counts }
    }

    /// Whether it was counted by another window or other sub-windows.
    fn is_foreign_to(&self, params: &Params) -> bool {
        self.length != params.window || self.parts != params.buckets
    }

    fn count(&self, slot: f64) -> f64 {
        let i = self.index - slot;
        if i < 0.0 { 0.0 } else { self.counts.get(i as usize).copied().unwrap_or(0).into() }
    }

    fn slot_of(&self, instant: f64) -> f64 {
        ((instant - self.start) * self.parts / self.length).floor()
    }

    fn opening(&self, slot: f64) -> f64 {
        self.start + (slot * self.length / self.parts).ceil()
    }

    fn count_inside(&self, slot: f64) -> f64 {
        (0..self.parts as u32).map(|i| self.count(slot - f64::from(i))).sum()
    }

    fn weight(&self, slot: f64, instant: f64, grain: f64) -> f64 {
        let overlap = (slot + 1.0) * self.length - (instant - self.start) * self.parts;
        let count = self.count(slot - self.parts);
        (count * (overlap / grain).ceil() / (self.length / grain).ceil()).ceil()
    }

    /// The newest sub-window that counts; none if even that has left the window.
    fn newest(&self, now: f64) -> Option<f64> {
        let i = self.counts.iter().position(|&count| count > 0)?;
        let slot = self.index - i as f64;
        (self.slot_of(now) <= slot + self.parts).then_some(slot)
    }

    fn earliest(&self, now: f64, units: f64, Params { limit, grain, .. }: Params) -> f64 {
        let mut instant = now.max(self.last);
        let mut slot = self.slot_of(instant);
        let mut inside = self.count_inside(slot);
        loop {
            let oldest = self.count(slot - self.parts);
            let free = limit - units - inside;
            if free >= oldest {
                return instant;
            }
            if free >= 0.0 {
                let overlap = (free * (self.length / grain).ceil() / oldest).floor() * grain;
                let light =
                    self.start + (((slot + 1.0) * self.length - overlap) / self.parts).ceil();
                if light < self.opening(slot + 1.0) {
                    return instant.max(light);
                }
            }
            slot += 1.0;
            inside -= self.count(slot - self.parts);
            instant = self.opening(slot);
        }
    }

    /// Counts each old sub-window where its middle is, and not after `last`. `start` stays, so that two
    /// quotas that take turns do not move the counts ahead of the time.
    fn regrid(&mut self, now: f64, Params { window, buckets, .. }: Params) {
        let mut moved = vec![0_u32; buckets as usize + 1].into_boxed_slice();
        let newest = ((self.last - self.start) * buckets / window).floor();
        for (i, &count) in self.counts.iter().enumerate() {
            let slot = self.index - i as f64;
            let middle = ((self.opening(slot) + self.opening(slot + 1.0)) / 2.0).floor();
            let instant = self.opening(slot).max(middle.min(now).min(self.last));
            let i = newest - ((instant - self.start) * buckets / window).floor();
            if let Some(sum) = moved.get_mut(i as usize) {
                *sum = sum.saturating_add(count);
            }
        }
        (self.index, self.counts) = (newest, moved);
        (self.length, self.parts) = (window, buckets);
    }
}

impl Count for State {
    type Params = Params;

    fn advance(&mut self, now: f64) {
        self.at = now;
    }

    fn commit(&mut self, instant: f64, cost: f64) {
        let slot = self.slot_of(instant);
        let counts = self.counts.len();
        let by = ((slot - self.index) as usize).min(counts);
        self.counts.copy_within(..counts - by, by);
        self.counts[..by].fill(0);
        self.counts[0] = self.counts[0].saturating_add(cost as u32);
        let cycles = (slot / self.parts).floor(); // `start` moves by whole windows
        self.start += cycles * self.length;
        (self.last, self.index) = (instant, slot - cycles * self.parts);
    }

    fn refund(&mut self, now: f64, release: &Release, params: &Params) {
        let mut units = release.units;
        if let Some(instant) = release.instant {
            if self.is_foreign_to(params) {
                return; // a changed quota has moved the counts
            }
            let i = self.index - self.slot_of(instant);
            if i >= 0.0
                && let Some(count) = self.counts.get_mut(i as usize)
            {
                *count = (f64::from(*count) - units).max(0.0) as u32;
            }
            return;
        }
        let inside = (self.index - self.slot_of(now)).min(0.0) + self.parts + 1.0;
        for count in self.counts[..inside as usize].iter_mut().rev() {
            let back = f64::from(*count).min(units);
            *count -= back as u32;
            units -= back;
        }
    }

    fn reset_after(&self, now: f64) -> f64 {
        self.newest(now).map_or(0.0, |newest| self.opening(newest + self.parts + 1.0) - now)
    }

    fn step_back(&mut self, now: f64) -> bool {
        let back = self.at - now;
        if back > 0.0 {
            (self.at, self.start, self.last) = (now, self.start - back, self.last - back);
        }
        back > 0.0
    }
}

impl Params {
    pub(super) fn new(quota: Quota, buckets: u32) -> Self {
        let (limit, window) = (quota.limit().into(), quota.window_us() as f64);
        // The finest grain for which the product of a count and an overlap is exact.
        let mut grain = 1.0;
        while limit * (window / grain) >= super::EXACT / 2.0 {
            grain *= 2.0;
        }
        Self { limit, window, buckets: buckets.into(), grain }
    }

    pub(super) fn args(&self) -> Vec<f64> {
        vec![self.limit, self.window, self.buckets, self.grain]
    }

    pub(super) fn step(&self, stored: &mut Option<Reserved<State>>, ask: &Ask) -> Verdict {
        let Params { limit, grain, .. } = *self;
        let Ask { action, cost, max_wait, now, .. } = *ask;

        let known = match stored {
            Some(old) if !action.commits() => Some(Reserved::new(old.state.clone())),
            _ => stored.take(),
        };
        let (seen, mut stale) = (known.is_some(), false);
        let mut reserved = known.unwrap_or_else(|| Reserved::new(State::new(now, *self)));
        let state = &mut reserved.state;
        if seen {
            stale = state.step_back(now);
            if state.is_foreign_to(self) && state.newest(now).is_some() {
                state.regrid(now, *self);
                stale = true;
            }
            if state.newest(now).is_none() {
                *state = State::new(now, *self);
            }
        }

        let wait = state.earliest(now, ask.needed().min(limit), *self) - now;
        let Outcome { admitted, wait } = ask.outcome(wait, (wait - max_wait).max(0.0));

        if admitted || stale {
            state.advance(now);
        }
        let mut reservation = None;
        if action.commits() && admitted {
            let instant = now + wait;
            reservation = (wait > 0.0).then(|| (Reservation { instant, cost }, state.clone()));
            state.commit(instant, cost);
        }

        let (mut remaining, mut replenish, reset) = (limit, 0.0, state.reset_after(now));
        if reset > 0.0 {
            remaining = 0.0;
            if state.last <= now {
                let slot = state.slot_of(now);
                let inside = state.count_inside(slot);
                remaining = (limit - inside - state.weight(slot, now, grain)).max(0.0);
            }
            replenish = state.earliest(now, remaining + 1.0, *self) - now;
        }

        if action.commits() {
            let none_waits = admitted && reservation.is_none();
            reserved.waiting.update(stale || none_waits, now, reservation);
            *stored = (reset > 0.0).then_some(reserved);
        }
        Verdict { admitted, wait, remaining, replenish, reset, instant: now + wait }
    }
}
