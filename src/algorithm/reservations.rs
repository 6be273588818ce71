//! Reservations: the requests that wait, so that one that is dropped can release what it reserved. It holds what the
//! algorithms with a state of fixed size have in common; a sliding log has its reservations in the log.

use std::collections::VecDeque;

/// A state that requests can be counted in.
pub(crate) trait Count: Clone {
    /// The parameters by which units are returned.
    type Params;

    /// Lets time pass until `now`.
    fn advance(&mut self, now: f64);

    /// Counts a request that proceeds at `instant`.
    fn commit(&mut self, instant: f64, cost: f64);

    /// Returns what was spent at an instant, as far as that still counts, or at any instant.
    fn refund(&mut self, now: f64, release: &Release, params: &Self::Params);

    /// The time until the state is the initial one.
    fn reset_after(&self, now: f64) -> f64;

    /// Follows a clock that stepped back. Returns whether it did.
    fn step_back(&mut self, now: f64) -> bool;
}

/// What is returned of what a request has spent, or reserved.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Release {
    /// When the request proceeded, or would have; none for units that no request is named for.
    pub(crate) instant: Option<f64>,
    pub(crate) units: f64,
    /// What the request has used, of what it has spent.
    pub(crate) kept: f64,
}

impl Release {
    /// Units that no request is named for.
    pub(crate) fn grant(units: f64) -> Self {
        Self { instant: None, units, kept: 0.0 }
    }
}

/// A state, and the reservations that are counted in it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Reserved<S> {
    pub(super) state: S,
    pub(super) waiting: Waiting<S>,
}

/// Most keys have none, and a state in memory is small.
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
    pub(super) instant: f64,
    pub(super) cost: f64,
}

impl<S: Count> Reserved<S> {
    /// Returns units to the state. What has an instant to come is only returned if its reservation is found, as the
    /// state may have been lost and others may have spent since. Reservations that stay keep their instants.
    pub(super) fn release(
        stored: &mut Option<Self>,
        now: f64,
        releases: &[Release],
        params: &S::Params,
    ) {
        let Some(Self { state, waiting }) = stored else { return };
        if state.step_back(now) {
            waiting.0 = None;
        }
        waiting.0.take_if(|it| it.are_over(now));
        match &mut waiting.0 {
            Some(reservations) => {
                reservations.fold(now, usize::MAX);
                reservations.base.advance(now);
                for release in releases {
                    reservations.release(now, release, params);
                }
                *state = reservations.base.clone();
                for it in &reservations.entries {
                    state.commit(it.instant, it.cost);
                }
                waiting.0.take_if(|it| it.entries.is_empty());
            }
            None => {
                state.advance(now);
                for release in releases {
                    if release.instant.is_none_or(|instant| instant <= now) {
                        state.refund(now, release, params);
                    }
                }
            }
        }
        if state.reset_after(now) == 0.0 {
            *stored = None;
        }
    }
}

impl<S: Count> Reservations<S> {
    fn release(&mut self, now: f64, release: &Release, params: &S::Params) {
        let Release { instant, units, .. } = *release;
        let Some(instant) = instant.filter(|instant| *instant > now) else {
            return self.base.refund(now, release, params);
        };
        let place = self.entries.partition_point(|it| it.instant < instant);
        if let Some(it) = self.entries.get_mut(place).filter(|it| it.instant == instant) {
            it.cost -= units.min(it.cost);
            if it.cost == 0.0 {
                self.entries.remove(place);
            }
        }
    }

    /// Makes up to `most` of the entries whose time has come part of the base.
    pub(super) fn fold(&mut self, now: f64, most: usize) {
        let passed = self.entries.partition_point(|it| it.instant <= now);
        for it in self.entries.drain(..passed.min(most)) {
            self.base.advance(it.instant);
            self.base.commit(it.instant, it.cost);
        }
    }
}

impl<S> Reservations<S> {
    fn are_over(&self, now: f64) -> bool {
        self.entries.back().is_none_or(|newest| newest.instant <= now)
    }
}

impl<S: Count> Reserved<S> {
    /// Stores what a check left: `state`, if that is not the initial one, and of an admitted request, its reservation
    /// and the state before it. Reservations by another clock or quota (`stale`) stay counted, and cannot be released.
    #[inline]
    pub(super) fn write(
        stored: &mut Option<Self>,
        state: Option<S>,
        stale: bool,
        now: f64,
        reserved: Option<(Reservation, S)>,
    ) {
        let Some(state) = state else {
            *stored = None;
            return;
        };
        match stored {
            Some(reserved) => reserved.state = state,
            None => *stored = Some(Self::new(state)),
        }
        if let Some(it) = stored {
            it.waiting.update(stale, now, reserved);
        }
    }
}

impl<S> Reserved<S> {
    pub(super) fn new(state: S) -> Self {
        Self { state, waiting: Waiting(None) }
    }
}

impl<S: Count> Waiting<S> {
    #[inline]
    pub(super) fn update(&mut self, stale: bool, now: f64, reserved: Option<(Reservation, S)>) {
        if stale {
            self.0 = None;
        }
        let Some((reservation, before)) = reserved else { return };
        if reservation.instant > now {
            self.add(now, reservation, before);
            return;
        }
        self.0.take_if(|it| it.are_over(now));
        if let Some(reservations) = &mut self.0 {
            // It proceeds before those that wait for another limit.
            reservations.fold(now, usize::MAX);
            reservations.base.advance(now);
            reservations.base.commit(now, reservation.cost);
        }
    }

    fn add(&mut self, now: f64, reservation: Reservation, before: S) {
        self.0.take_if(|it| it.are_over(now));
        let new = || Box::new(Reservations { base: before, entries: VecDeque::new() });
        let reservations = self.0.get_or_insert_with(new);
        reservations.fold(now, 2); // more than are added
        // Mostly the last one; unless another limit was waited for longer.
        let place = reservations.entries.partition_point(|it| it.instant < reservation.instant);
        match reservations.entries.get_mut(place) {
            Some(same) if same.instant == reservation.instant => same.cost += reservation.cost,
            _ => reservations.entries.insert(place, reservation),
        }
    }
}

impl<S> Waiting<S> {
    /// Whether no request waits any more.
    pub(super) fn is_over(&self, now: f64) -> bool {
        self.0.as_ref().is_none_or(|it| it.are_over(now))
    }
}
