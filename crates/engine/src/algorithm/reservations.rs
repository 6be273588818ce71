//! Reservations: the requests that wait, so that a request that is dropped can release what it
//! reserved. A sliding log does not use them: it contains its reservations. The Lua twin in
//! `scripts/` has the same name; it also loads and stores the states.

use std::collections::VecDeque;

use super::{
    model::{Earliest, Model},
    request::Release,
};

/// The reservations for which memory is kept when all of them are over.
const KEPT: usize = 64;

/// A state, and the reservations that are counted in it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Reserved<S> {
    pub(super) state: S,
    /// Boxed: most keys have none, and a state in memory should be small.
    pub(super) waiting: Option<Box<Reservations<S>>>,
}

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
        Self { state, waiting: None }
    }

    /// Follows a clock that has stepped back. Reservations by another clock stay counted, and
    /// cannot be released.
    pub(super) fn follow_clock(&mut self, now: i64) {
        if self.state.step_back(now) {
            self.waiting = None;
        }
    }

    /// The instant of the last request that waits, if its reservation is known.
    pub(super) fn waits_until(&self, now: i64) -> Option<i64> {
        let newest = self.waiting.as_ref().and_then(|waiting| waiting.entries.back());
        let instant = newest.map(|newest| newest.instant).or_else(|| self.state.last_instant());
        instant.filter(|instant| *instant > now)
    }

    /// Keeps the reservation of an admitted request, which the state does not count yet. Or counts
    /// a request that proceeds before other requests, which wait for another limit.
    #[inline(never)]
    pub(super) fn reserve(&mut self, now: i64, reservation: Reservation, params: &S::Params) {
        let Self { state, waiting } = self;
        let Reservation { instant, cost } = reservation;
        if instant > now {
            let new = || Box::new(Reservations { base: state.clone(), entries: VecDeque::new() });
            let waiting = waiting.get_or_insert_with(new);
            if waiting.entries.back().is_some_and(|newest| newest.instant <= now) {
                waiting.entries.clear();
                waiting.entries.shrink_to(KEPT);
                waiting.base.clone_from(state);
            }
            return waiting.insert(now, reservation, params);
        }
        waiting.take_if(|waiting| waiting.are_over(now));
        if let Some(waiting) = waiting {
            waiting.fold(now, params);
            waiting.base.advance(now);
            // Behind requests that cannot be released any more.
            let Earliest { wait, .. } = waiting.base.earliest(now, None, params);
            waiting.base.commit(now + wait, cost, params);
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
        // Most requests wait longest: then it is the last one.
        let earlier = self.entries.iter().rposition(|entry| entry.instant < instant);
        let index = earlier.map_or(0, |earlier| earlier + 1);
        match self.entries.get_mut(index) {
            Some(same) if same.instant == instant => same.cost += cost,
            Some(_) => self.entries.insert(index, reservation),
            None => self.entries.push_back(reservation),
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
