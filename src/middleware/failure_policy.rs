//! What becomes of a request when the store gives no answer.

/// What a layer does with a request when the store gives no answer. It has no say about requests that are denied,
/// nor about those that are set up wrong. See [`RateLimitLayer::on_failure`](crate::RateLimitLayer::on_failure).
///
/// | | what goes on | what can go on above the quota |
/// |---|---|---|
/// | `Closed` | nothing | nothing |
/// | `Open` | everything | everything |
/// | `Local` | `share` of the quota in each process | if the number of processes times `share` is above 1, what is above; and what was spent before |
///
/// A [`MemoryStore`](crate::MemoryStore) gives no answer about a new key when it is full of keys that
/// are in use: see [`WhenFull`](crate::WhenFull). `Open` then admits requests with new keys uncounted,
/// and `Local` rejects them as `Closed` does.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum FailurePolicy {
    /// It is refused: 503 and `Retry-After`, or `UNAVAILABLE` to gRPC.
    #[default]
    Closed,
    /// It goes on, and is not counted. Its [`Decision`](crate::Decision) tells by its
    /// [source](crate::Decision::source) that nobody decided. One that is charged to a `redisson::RateLimiter`,
    /// whose rate is in Redis alone, has none.
    Open,
    /// It is held against a part of the quota, in the memory of this process, by the same algorithm, until the
    /// store answers again. What was counted in the store is not known here; what is counted here is not told to
    /// the store afterwards.
    ///
    /// The limit, the burst and the overdraft are rounded down. Of less than one request per window it becomes
    /// one request per longer window, of 366 days at most. A request that costs
    /// more than the part can ever grant is refused as if `Closed`, and so is all that is charged to a
    /// `redisson::RateLimiter`. All layers over a store share these counts.
    ///
    /// The counts are in a [`MemoryStore`](crate::MemoryStore) of 100,000 keys that
    /// [rejects new ones](crate::WhenFull::RejectNewKeys) when all are in use: such requests are
    /// rejected as if `Closed`.
    Local {
        /// Above 0, and 1 at most: with four replicas, 0.25 keeps the sum within the quota.
        share: f64,
    },
}
