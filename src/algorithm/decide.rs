//! What the algorithms have in common whose state has a fixed size.

use super::{
    Action, Ask, Compact, Verdict,
    turns::{Booked, Count, Left},
};

/// The parameters of an algorithm whose state has a fixed size.
pub(super) trait Decide {
    type State: Count + Copy;

    /// Decides, and says what is left, if that is to be written.
    fn decide(&self, state: Option<Self::State>, ask: &Ask)
    -> (Verdict, Option<Left<Self::State>>);

    /// The state that two numbers tell; it was counted by these parameters.
    fn expand(&self, numbers: Compact) -> Self::State;

    /// The numbers that tell the state to those who ask after `now`, if two do. The second is not 0.
    fn compact(&self, state: &Self::State, now: f64) -> Option<Compact>;
}

/// Decides, and stores what is left.
pub(super) fn step<D: Decide>(
    params: &D,
    stored: &mut Option<Booked<D::State>>,
    ask: &Ask,
) -> Verdict {
    if ask.action == Action::Refund
        && let Some(old) = stored
    {
        old.give_back(ask);
    }
    let (verdict, left) = params.decide(stored.as_ref().map(|it| it.state), ask);
    if let Some(left) = left {
        Booked::write(stored, left, ask.now);
    }
    verdict
}
