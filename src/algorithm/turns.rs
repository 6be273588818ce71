//! The requests that wait, so that one that gives up can give its turn back.

use std::collections::VecDeque;

use super::Ask;

/// A state that turns can be booked in.
pub(crate) trait Count: Clone {
    /// Counts a request that goes on at `instant`.
    fn commit(&mut self, instant: f64, cost: f64);

    /// Gives back what was spent at the instant `turn`, if it still counts, or, if that is 0, at any.
    fn refund(&mut self, now: f64, turn: f64, cost: f64);
}

/// A state, and the turns that are booked in it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Booked<S> {
    pub(super) state: S,
    pub(super) turns: Turns<S>,
}

/// Oldest first.
#[allow(clippy::box_collection, reason = "few keys have any, and an entry shall be small")]
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Turns<S>(pub(super) Option<Box<VecDeque<Turn<S>>>>);

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Turn<S> {
    pub(super) instant: f64,
    pub(super) cost: f64,
    /// The state before this turn was booked.
    pub(super) before: S,
}

impl<S: Count> Booked<S> {
    /// Gives back the turn at the instant `ask.turn`, or, if that is not waiting, what was spent before the
    /// first one that is. The turns behind stay where they are and are counted again.
    pub(super) fn give_back(&mut self, &Ask { now, turn, cost, .. }: &Ask) {
        let mut none = VecDeque::new();
        let turns = self.turns.0.as_deref_mut().unwrap_or(&mut none);
        let kept = turns.partition_point(|it| it.instant <= now);
        let found = |it: &Turn<S>| it.instant == turn && it.cost == cost;
        let place = turns.iter().skip(kept).position(found).map(|place| kept + place);
        let state = &mut self.state;
        if let Some(turn) = turns.get(place.unwrap_or(kept)) {
            *state = turn.before.clone();
        }
        match place {
            Some(place) => drop(turns.remove(place)),
            None => state.refund(now, turn, cost),
        }
        for turn in turns.iter_mut().skip(place.unwrap_or(kept)) {
            turn.before = state.clone();
            state.commit(turn.instant, turn.cost);
        }
    }
}

impl<S> Booked<S> {
    pub(super) fn new(state: S) -> Self {
        Self { state, turns: Turns(None) }
    }

    /// Stores what a check or a refund left.
    #[inline]
    pub(super) fn write(
        stored: &mut Option<Self>,
        state: Option<S>,
        stale: bool,
        now: f64,
        turn: Option<Turn<S>>,
    ) {
        let Some(state) = state else {
            *stored = None;
            return;
        };
        match stored {
            Some(booked) => booked.state = state,
            None => *stored = Some(Self::new(state)),
        }
        if let Some(booked) = stored {
            booked.turns.update(stale, now, turn);
        }
    }
}

impl<S> Turns<S> {
    /// Whether nobody waits any more.
    pub(super) fn are_over(&self, now: f64) -> bool {
        let newest = self.0.as_ref().and_then(|turns| turns.back());
        newest.is_none_or(|turn| turn.instant <= now)
    }

    /// Forgets the turns that were booked by another clock or quota, and books one.
    #[inline]
    pub(super) fn update(&mut self, stale: bool, now: f64, turn: Option<Turn<S>>) {
        if stale {
            self.0 = None;
        }
        if let Some(turn) = turn {
            self.book(now, turn);
        }
    }

    fn book(&mut self, now: f64, turn: Turn<S>) {
        let turns = self.0.get_or_insert_default();
        let is_past = |newest: &Turn<S>| newest.instant <= now || newest.instant > turn.instant;
        if turns.back().is_some_and(is_past) {
            turns.clear();
        }
        for _ in 0..2 {
            if turns.front().is_some_and(|oldest| oldest.instant <= now) {
                turns.pop_front();
            }
        }
        turns.push_back(turn);
    }
}
