//! `FailurePolicy`: the treatment of a request if the store does not decide. `recovery.rs` applies
//! it.

/// The treatment of a request about which the store does not decide. The policy has no effect on
/// requests that are denied or misconfigured. See
/// [`RateLimitLayer::on_failure`](crate::RateLimitLayer::on_failure) and, for a limiter that is
/// used without a layer, [`Limiter::on_failure`](crate::Limiter::on_failure).
///
/// | | requests that proceed | requests that can proceed above the quota |
/// |---|---|---|
/// | `Closed` | none | none |
/// | `Wait` | none, until the store decides | none |
/// | `Open` | all | all |
/// | `Local` | `share` of the quota in each process | the excess, if the number of processes times `share` is above 1; and the units that were spent before |
///
/// A [`MemoryStore`](crate::MemoryStore) does not decide about a new key if all its keys are in
/// use: see [`WhenFull`](crate::store::WhenFull). `Open` then admits requests with new keys
/// uncounted, and `Local` and `Wait` reject them, as `Closed` does.
///
/// With the feature `serde`, a policy is read and written as `"closed"`, `"wait"`, `"open"` or
/// `{"local": {"share": 0.25}}`.
///
/// # Examples
///
/// ```
/// # use tower_ratelimit::{
/// #     Algorithm, FailurePolicy, Limiter, MemoryStore, Quota, RateLimitLayer, key,
/// # };
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let quota = Quota::per_hour(3);
/// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
/// let limiter = limiter.on_failure(FailurePolicy::local(0.25)); // four replicas
/// let layer = RateLimitLayer::new(limiter, key::PeerIp).on_failure(FailurePolicy::Open);
/// let _ = layer;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "kebab-case", deny_unknown_fields))]
#[non_exhaustive]
pub enum FailurePolicy {
    /// Rejects the request: 503 and `Retry-After`, or `UNAVAILABLE` for gRPC. A limiter without a
    /// layer returns [`Error::Store`](crate::Error::Store).
    #[default]
    Closed,
    /// Lets a request that may wait ask again until the store decides, for as long as it may wait:
    /// up to [`max_wait`](crate::RateLimitLayer::max_wait) from its arrival. Then it is rejected,
    /// as by `Closed`. So is a request that may not wait.
    ///
    /// This is for clients of a vendor: late is better than banned. Of the requests of a key, only
    /// the first one asks, once in 50 ms to a second. When the store decides again, the others
    /// follow one after the other, in the order of their arrival.
    ///
    /// It outlasts errors of every kind, such as a missing permission or a damaged key: the log
    /// names them. [`acquire`](crate::Limiter::acquire) waits without a bound.
    Wait,
    /// Lets the request proceed uncounted. The [source](crate::Decision::source) of its
    /// [`Decision`](crate::Decision) reports that there was no decision of the store. A request
    /// that is charged to a `redisson::RateLimiter` has no decision, because its rate is only in
    /// Redis.
    Open,
    /// Applies a fraction of the quota by the same algorithm, with counts in the memory of this
    /// process, until the store answers again. Counts are not transferred from the store to the
    /// process, nor back.
    ///
    /// So each key begins with a whole burst of the share in each process, also a key that the
    /// store has just denied. At a burst of 20, four processes with a share of 0.25 admit up to 20
    /// requests more: 4 times 5. A `burst(1)` makes that 4.
    ///
    /// The limit, the burst and the overdraft are rounded down. A fraction below one request per
    /// window becomes one request per longer window, of at most 366 days. A request is rejected, as
    /// by `Closed`, in these cases:
    ///
    /// * It costs more than the fraction can ever grant.
    /// * It is charged to a `redisson::RateLimiter`.
    /// * It has a new key, and the counts in memory are full.
    ///
    /// The counts are in a [`MemoryStore`](crate::MemoryStore) of 100,000 keys that [rejects new
    /// keys](crate::store::WhenFull::RejectNewKeys). All layers over a store share them.
    #[non_exhaustive]
    Local {
        /// The fraction of the quota, above 0 and at most 1. With four replicas, 0.25 keeps the sum
        /// within the quota.
        #[cfg_attr(feature = "serde", serde(deserialize_with = "valid_share"))]
        share: f64,
    },
}

impl FailurePolicy {
    /// Returns the policy [`Local`](FailurePolicy::Local), with a fraction of the quota.
    ///
    /// # Panics
    ///
    /// If `share` is not above 0 and at most 1.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::FailurePolicy;
    ///
    /// const A_QUARTER: FailurePolicy = FailurePolicy::local(0.25); // four replicas
    /// # let _ = A_QUARTER;
    /// ```
    #[must_use]
    #[track_caller]
    pub const fn local(share: f64) -> Self {
        assert!(is_share(share), "a share must be above 0 and at most 1");
        Self::Local { share }
    }
}

const fn is_share(share: f64) -> bool {
    share > 0.0 && share <= 1.0
}

#[cfg(feature = "serde")]
fn valid_share<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    let share = serde::Deserialize::deserialize(deserializer)?;
    if !is_share(share) {
        let text = format!("a share must be above 0 and at most 1, not {share}");
        return Err(serde::de::Error::custom(text));
    }
    Ok(share)
}
