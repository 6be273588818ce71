//! A two-number encoding that fits most states in the memory store. The meaning of the numbers
//! depends on the parameters by which the state was counted.

/// The second number is 0 in the initial state.
pub(crate) type Packed = [f64; 2];

pub(crate) const INITIAL: Packed = [0.0; 2];
