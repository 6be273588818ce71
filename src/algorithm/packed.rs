//! A two-number encoding that fits most states in the memory store. Each model defines the meaning
//! of the numbers, which depends on the parameters by which the state was counted. The fast path of
//! the memory store works on the two numbers; its steps are in the models.

use super::{fixed_window::PlainFixedWindow, token_bucket::PlainTokenBucket};

/// The two numbers; the second one is 0 in the initial state. Integers, which take fewer
/// instructions than doubles to divide and to round. They are below 2^53, as those of the engine.
pub(crate) type Packed = [i64; 2];

pub(crate) const INITIAL: Packed = [0; 2];

/// The parameters of the algorithms that the fast path knows.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fast {
    TokenBucket(PlainTokenBucket),
    FixedWindow(PlainFixedWindow),
}

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

impl Fast {
    /// Decides as the engine does about a check that does not wait, and changes the state if the
    /// request is admitted; `None` if the cost is invalid, or if the state is newer.
    #[inline]
    pub(crate) fn step(&self, packed: &mut Packed, cost: u64, now: i64) -> Option<FastStep> {
        match self {
            Self::TokenBucket(bucket) => bucket.step(packed, cost, now),
            Self::FixedWindow(window) => window.step(packed, cost, now),
        }
    }

    #[inline]
    pub(crate) fn report(&self, step: &FastStep) -> FastReport {
        match self {
            Self::TokenBucket(bucket) => bucket.report(step),
            Self::FixedWindow(window) => window.report(step),
        }
    }

    /// Returns what remains, and the time until the state is the initial one; `None` as for
    /// [`step`](Self::step).
    #[inline]
    pub(crate) fn observe(&self, packed: Packed, now: i64) -> Option<[u64; 2]> {
        match self {
            Self::TokenBucket(bucket) => bucket.observe(packed, now),
            Self::FixedWindow(window) => window.observe(packed, now),
        }
    }
}
