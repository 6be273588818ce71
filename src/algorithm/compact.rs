//! States that two numbers tell. So are most of those that a store in memory holds, and it holds many.

use super::{Ask, Params, State, reservations::Reserved, token_bucket::Checked};

/// The numbers, which tell a state if it is known by which parameters it was counted. The second is 0 if the
/// state is as if never seen.
pub(crate) type Compact = [f64; 2];

pub(crate) const NEVER_SEEN: Compact = [0.0; 2];

impl Params {
    /// The numbers that tell the state to those who ask after `now`, if two do: nobody waits, and it was counted
    /// by these parameters.
    pub(crate) fn compact(&self, state: &State, now: f64) -> Option<Compact> {
        match (self, state) {
            _ if state.is_never_seen() => Some(NEVER_SEEN),
            (Self::FixedWindow(params), State::FixedWindow(Some(it))) => params.compact(it, now),
            (Self::TokenBucket(params), State::TokenBucket(Some(it))) => params.compact(it, now),
            (Self::LeakyBucket(params), State::LeakyBucket(Some(it))) => params.compact(it, now),
            _ => None,
        }
    }

    /// The state that the numbers tell.
    pub(crate) fn expand(&self, numbers: Compact) -> State {
        if numbers == NEVER_SEEN {
            return State::NeverSeen;
        }
        match self {
            Self::FixedWindow(params) => {
                State::FixedWindow(Some(Reserved::new(params.expand(numbers))))
            }
            Self::TokenBucket(params) => {
                State::TokenBucket(Some(Reserved::new(params.expand(numbers))))
            }
            Self::LeakyBucket(params) => {
                State::LeakyBucket(Some(Reserved::new(params.expand(numbers))))
            }
            Self::SlidingLog(_) | Self::SlidingWindow(_) => State::NeverSeen,
        }
    }

    /// Decides as [`step`](Params::step) does, in the most common case of all; None in others.
    #[inline]
    pub(crate) fn check_quickly(&self, numbers: &mut Compact, ask: &Ask) -> Option<Checked<'_>> {
        match self {
            Self::TokenBucket(params) => params.check_quickly(numbers, ask),
            _ => None,
        }
    }
}
