//! A two-number encoding that fits most states in the memory store. Each model defines the meaning
//! of the numbers, which depends on the parameters by which the state was counted. The fast path of
//! the memory store works on the two numbers: its steps are in the models, their list in
//! `table.rs`.

/// The two numbers; the second one is 0 in the initial state. Integers, which take fewer
/// instructions than doubles to divide and to round. They are below 2^53, as those of the engine.
pub(crate) type Packed = [i64; 2];

pub(crate) const INITIAL: Packed = [0; 2];

/// The result of a check on the fast path. The rest of the reply is computed after the key is
/// unlocked.
pub(crate) struct FastStep {
    pub(crate) admitted: bool,
    /// The retry-after of a denied request.
    pub(crate) wait: u64,
    /// The state after the check.
    pub(super) after: Packed,
    pub(crate) now: i64,
}

/// The rest of the reply.
pub(crate) struct FastReport {
    pub(crate) remaining: u64,
    pub(crate) replenish: u64,
    pub(crate) reset: u64,
}
