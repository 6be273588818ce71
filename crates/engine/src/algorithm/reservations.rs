//! Reservations: the requests that wait, so that a request that is dropped can release what it
//! reserved. A sliding log does not use them: it contains its reservations. The Lua twin in
//! `scripts/` has the same name; it also loads and stores the states.

use std::collections::VecDeque;

use super::{
    model::{Earliest, Model},
    request::Release,
};

/// A state, and the reservations that are counted in it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Reserved<S> {
    pub(super) state: S,
    pub(super) waiting: Waiting<S>,
}

/// Boxed: most keys have none, and a state in memory should be small.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Waiting<S>(pub(super) Option<Box<Reservations<S>>>);

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Reservations<S> {
    /// The state before the first of the entries.
    pub(super) base: S,
    /// In the order of their instants.
    pub(super) entries: VecDeque<Reservation>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Reservation {
    pub(super) instant: i64,
    pub(super) cost: i64,
}

impl<S: Model> Reserved<S> {
    #[inline(always)]
    pub(super) fn new(state: S) -> Self {
        Self { state, waiting: Waiting(None) }
    }

    /// Follows a clock that has stepped back. Reservations by another clock stay counted, and
    /// cannot be released.
    pub(super) fn follow_clock(&mut self, now: i64) {
        if self.state.step_back(now) {
            self.waiting.0 = None;
        }
    }
}

impl<S: Model> Reservations<S> {
    pub(super) fn are_over(&self, now: i64) -> bool {
        self.entries.back().is_none_or(|newest| newest.instant <= now)
    }

    /// Makes the entries whose instant has passed part of the base.
    pub(super) fn fold(&mut self, now: i64, params: &S::Params) {
        while let Some(&Reservation { instant, cost }) = self.entries.front() {
            if instant > now {
                return;
            }
            self.entries.pop_front();
            self.base.advance(instant);
            self.base.commit(instant, cost, params);
        }
    }

    /// Inserts an entry. Folds when the script does, if half of the entries are over or another
    /// request waits longer for another limit: a clock that steps back finds the same entries.
    fn insert(&mut self, now: i64, reservation: Reservation, params: &S::Params) {
        let Reservation { instant, cost } = reservation;
        let is_last = self.entries.back().is_none_or(|newest| newest.instant <= instant);
        let middle = self.entries.get(self.entries.len() / 2);
        if !is_last || middle.is_some_and(|entry| entry.instant <= now) {
            self.fold(now, params);
        }
        let index = self.entries.partition_point(|entry| entry.instant < instant);
        match self.entries.get_mut(index) {
            Some(same) if same.instant == instant => same.cost += cost,
            _ => self.entries.insert(index, reservation),
        }
    }

    /// Lowers the cost of the entry at the instant of the release, if there is one; returns units
    /// of the past to the base.
    pub(super) fn lower(&mut self, now: i64, release: &Release, params: &S::Params) {
        let Release { instant, units, .. } = *release;
        let Some(instant) = instant.filter(|instant| *instant > now) else {
            return self.base.refund(now, release, params);
        };
        let index = self.entries.partition_point(|entry| entry.instant < instant);
        if let Some(entry) = self.entries.get_mut(index).filter(|entry| entry.instant == instant) {
            entry.cost -= units.min(entry.cost);
            if entry.cost == 0 {
                self.entries.remove(index);
            }
        }
    }
}

impl<S: Model> Waiting<S> {
    /// Returns true if no request waits any more.
    pub(super) fn is_over(&self, now: i64) -> bool {
        self.0.as_ref().is_none_or(|reservations| reservations.are_over(now))
    }

    /// The instant of the last request that waits.
    pub(super) fn until(&self) -> Option<i64> {
        Some(self.0.as_ref()?.entries.back()?.instant)
    }

    /// Keeps the reservation of an admitted request, or counts a request that proceeds before other
    /// requests that wait for another limit; `before` is the state without it.
    #[inline(never)]
    pub(super) fn insert(
        &mut self,
        now: i64,
        reservation: Reservation,
        before: &S,
        params: &S::Params,
    ) {
        let Reservation { instant, cost } = reservation;
        self.0.take_if(|reservations| reservations.are_over(now));
        if instant > now {
            let new = || Box::new(Reservations { base: before.clone(), entries: VecDeque::new() });
            let reservations = self.0.get_or_insert_with(new);
            reservations.insert(now, reservation, params);
        } else if let Some(reservations) = &mut self.0 {
            reservations.fold(now, params);
            reservations.base.advance(now);
            // Behind requests that cannot be released any more.
            let Earliest { wait, .. } = reservations.base.earliest(now, None, params);
            reservations.base.commit(now + wait, cost, params);
        }
    }
}
