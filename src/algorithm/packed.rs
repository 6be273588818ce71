//! A two-number encoding that fits most states in the memory store. Each model defines the meaning
//! of the numbers, which depends on the parameters by which the state was counted. The fast path of
//! the memory store works on the two numbers: its steps are in the models, their list in
//! `table.rs`.

use super::request::Admission;

/// The two numbers; the second one is 0 in the initial state.
pub(crate) type Packed = [f64; 2];

pub(crate) const INITIAL: Packed = [0.0; 2];

/// The result of a check on the fast path. The rest of the reply is computed after the key is
/// unlocked.
pub(crate) struct FastStep {
    pub(crate) admission: Admission,
    /// The state after the check.
    pub(super) after: Packed,
    pub(super) now: f64,
}
