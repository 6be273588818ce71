//! States that two numbers tell. So are most of those that a store in memory holds, and it holds many.

use super::{
    Action, Ask, Params, Spent, State, Verdict,
    decide::Decide,
    turns::{Booked, Count, Left},
};

/// The numbers, which tell a state if it is known by which parameters it was counted. The second is 0 if the
/// state is as if never seen.
pub(crate) type Compact = [f64; 2];

const NEVER_SEEN: Compact = [0.0; 2];

impl Params {
    /// Like [`step`](Params::step), in the most common case of all; None in others.
    #[inline]
    pub(crate) fn spend_quickly(&self, numbers: &mut Compact, ask: &Ask) -> Option<Spent<'_>> {
        match self {
            Self::TokenBucket(params) => params.spend_quickly(numbers, ask),
            _ => None,
        }
    }

    /// Like [`step`](Params::step); returns the state if two numbers do not tell it any more.
    pub(crate) fn step_compact(
        &self,
        numbers: &mut Compact,
        ask: &Ask,
    ) -> (Verdict, Option<Box<State>>) {
        match self {
            Self::FixedWindow(params) => step(params, numbers, ask, State::FixedWindow),
            Self::TokenBucket(params) => step(params, numbers, ask, State::TokenBucket),
            Self::LeakyBucket(params) => step(params, numbers, ask, State::LeakyBucket),
            Self::SlidingLog(_) | Self::SlidingWindow(_) => {
                let mut state = State::NeverSeen;
                let verdict = self.step(&mut state, ask);
                (verdict, (!state.is_never_seen()).then(|| Box::new(state)))
            }
        }
    }

    /// The state that the numbers tell.
    pub(crate) fn expand(&self, numbers: Compact) -> State {
        match self {
            _ if numbers == NEVER_SEEN => State::NeverSeen,
            Self::FixedWindow(params) => State::FixedWindow(Some(expand(params, numbers))),
            Self::TokenBucket(params) => State::TokenBucket(Some(expand(params, numbers))),
            Self::LeakyBucket(params) => State::LeakyBucket(Some(expand(params, numbers))),
            Self::SlidingLog(_) | Self::SlidingWindow(_) => State::NeverSeen,
        }
    }

    /// The numbers that tell the state to those who ask after `now`, if two do: nobody waits, and it was counted
    /// by these parameters.
    pub(crate) fn compact(&self, state: &State, now: f64) -> Option<Compact> {
        match (self, state) {
            _ if state.is_never_seen() => Some(NEVER_SEEN),
            (Self::FixedWindow(params), State::FixedWindow(stored)) => compact(params, stored, now),
            (Self::TokenBucket(params), State::TokenBucket(stored)) => compact(params, stored, now),
            (Self::LeakyBucket(params), State::LeakyBucket(stored)) => compact(params, stored, now),
            _ => None,
        }
    }
}

fn step<D: Decide>(
    params: &D,
    numbers: &mut Compact,
    ask: &Ask,
    state: impl FnOnce(Option<Booked<D::State>>) -> State,
) -> (Verdict, Option<Box<State>>) {
    let mut old = (numbers[1] > 0.0).then(|| params.expand(*numbers));
    if ask.action == Action::Refund
        && let Some(old) = &mut old
    {
        old.refund(ask.now, ask.turn, ask.cost);
    }
    let (verdict, left) = params.decide(old, ask);
    let Some(left) = left else { return (verdict, None) };
    let compact = match &left {
        Left { state: None, .. } => Some(NEVER_SEEN),
        Left { state: Some(state), turn: None, .. } => params.compact(state, ask.now),
        Left { turn: Some(_), .. } => None,
    };
    if let Some(compact) = compact {
        *numbers = compact;
        return (verdict, None);
    }
    let mut booked = old.map(Booked::new);
    Booked::write(&mut booked, left, ask.now);
    (verdict, Some(Box::new(state(booked))))
}

fn expand<D: Decide>(params: &D, numbers: Compact) -> Booked<D::State> {
    Booked::new(params.expand(numbers))
}

fn compact<D: Decide>(params: &D, stored: &Option<Booked<D::State>>, now: f64) -> Option<Compact> {
    let booked = stored.as_ref().filter(|it| it.turns.are_over(now))?;
    params.compact(&booked.state, now)
}
