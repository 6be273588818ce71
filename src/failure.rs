//! What becomes of a request when the store gives no answer.

use std::sync::{Arc, Mutex};

use crate::{
    charge::Charge,
    store::{MemoryStore, Names, lock},
};

/// What a layer does with a request when the store gives no answer. It has no say about requests that are denied,
/// nor about those that are set up wrong. See [`RateLimitLayer::on_failure`](crate::RateLimitLayer::on_failure).
///
/// | | what goes on | what can be over the quota |
/// |---|---|---|
/// | `Closed` | nothing | nothing |
/// | `Open` | everything | everything |
/// | `Local` | `share` of the quota, in each process | what replicas have more than 1 / `share`; what was spent before |
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum FailurePolicy {
    /// It is refused: 503 and `Retry-After`, or `UNAVAILABLE` to gRPC.
    #[default]
    Closed,
    /// It goes on, and is not counted.
    Open,
    /// It is held against a part of the quota, in the memory of this process, by the same algorithm, until the
    /// store answers again. What was counted in the store is not known here; what is counted here is not told to
    /// the store afterwards.
    ///
    /// A quota of less than one request per window becomes one request per longer window. A request that costs
    /// more than the part can ever grant is refused as if `Closed`, and so is all that is charged to a
    /// `redisson::RateLimiter`, whose rate is in Redis alone. There is room for 100,000 keys; more are refused.
    Local {
        /// Above 0, and 1 at most: with four replicas, 0.25 keeps the sum within the quota.
        share: f64,
    },
}

/// A policy with what it needs.
#[derive(Clone, Debug)]
pub(crate) enum Fallback {
    Closed,
    Open,
    Local(Local),
}

impl Fallback {
    pub(crate) fn new(policy: FailurePolicy) -> Self {
        match policy {
            FailurePolicy::Closed => Self::Closed,
            FailurePolicy::Open => Self::Open,
            FailurePolicy::Local { share } => {
                assert!(
                    share > 0.0 && share <= 1.0,
                    "a share is above 0 and at most 1, not {share}"
                );
                Self::Local(Local { share, stores: Arc::default() })
            }
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Local {
    share: f64,
    /// One for each store that has failed, so that limiters of the same name stay apart.
    stores: Arc<Mutex<Vec<(Names, MemoryStore)>>>,
}

impl Local {
    /// The charge to this process's share; `None` if there is none.
    pub(crate) fn charge(&self, charge: &Charge) -> Option<Charge> {
        charge.to_share(self.share, |names| {
            let stores = &mut *lock(&self.stores);
            if let Some((_, store)) = stores.iter().find(|(it, _)| it.is_same(names)) {
                return store.clone();
            }
            let store = MemoryStore::new();
            stores.push((names.clone(), store.clone()));
            store
        })
    }
}
