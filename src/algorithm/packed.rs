//! A two-number encoding that fits most states in the memory store. Each model defines the meaning
//! of the numbers, which depends on the parameters by which the state was counted.

/// The two numbers; the second one is 0 in the initial state.
pub(crate) type Packed = [f64; 2];

pub(crate) const INITIAL: Packed = [0.0; 2];
