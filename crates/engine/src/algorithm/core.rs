//! The core of a state: the two numbers that represent it in memory, for most keys. Each model
//! defines their meaning, which depends on the parameters by which the state was counted.

/// A state in memory, as most keys have it: no request waits, and nothing is held beside it. It is
/// the position and the debt of a bucket, with the instant of the last request if units come at
/// once, the opening and the count of a fixed window, or the epoch and the held units of a limit on
/// concurrency. The rest follows from the parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Core {
    pub at: i64,
    /// 0 in the initial state.
    pub amount: i64,
}
