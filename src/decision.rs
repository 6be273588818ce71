//! The answer of a limiter: whether the request is allowed, what remains, and when to come back.

use std::{fmt, sync::Arc, time::Duration};

use crate::{
    algorithm::{Action, EngineReply},
    quota::Quota,
};

/// The answer of a check: may the request go on, and how does its key stand after it?
///
/// The layer puts it into the extensions of the request and of the response.
///
/// # Examples
///
/// ```
/// use std::{fmt, time::Duration};
/// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), tower_ratelimit::Error> {
/// let limiter = Limiter::new(MemoryStore::new(), Algorithm::token_bucket(), Quota::per_second(2));
///
/// let first = limiter.check("alice").await?;
/// assert!(first.is_allowed());
/// assert_eq!(first.remaining(), 1);
/// assert_eq!(first.reset_after(), Duration::from_millis(500));
///
/// limiter.check("alice").await?;
/// let third = limiter.check("alice").await?;
/// assert!(!third.is_allowed());
/// assert_eq!(third.retry_after(), Some(Duration::from_millis(500)));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, PartialEq)]
#[must_use = "a denied request must not go on"]
pub struct Decision {
    // Not as a policy and a verdict, which would take more room.
    limiter: &'static str,
    quota: Quota,
    cost: u32,
    source: Source,
    admitted: bool,
    wait: f64,
    remaining: f64,
    replenish: f64,
    reset: f64,
    receipt: Receipt,
    /// How long ago the store decided, in microseconds.
    age: f64,
}

/// By what a store finds again what a request has spent.
#[derive(Clone, Debug, PartialEq)]
pub enum Receipt {
    /// Nothing was spent.
    None,
    /// The instant at which the request proceeds, by the clock of the store, for all of its limits.
    At(f64),
    /// The same for each of its limits, if they are on several servers.
    Each(Arc<[f64]>),
    /// The id of an acquire in the log of a foreign limiter.
    Id(u64),
}

impl Receipt {
    /// That of one of the limits, by its index in the charge.
    pub(crate) fn of(&self, limit: usize) -> Self {
        match self {
            Self::Each(instants) => instants.get(limit).map_or(Self::None, |it| Self::At(*it)),
            receipt => receipt.clone(),
        }
    }
}

/// The limit that a request is held against.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Policy {
    pub(crate) limiter: &'static str,
    pub(crate) quota: Quota,
    pub(crate) cost: u32,
    pub(crate) source: Source,
}

/// Who decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Source {
    /// The limiter's store.
    Store,
    /// A store in memory, with a share of the quota, because the limiter's gave no answer:
    /// [`FailurePolicy::Local`](crate::FailurePolicy::Local).
    Local,
    /// Nobody, because the store gave no answer: the request goes on by
    /// [`FailurePolicy::Open`](crate::FailurePolicy::Open), and what remains, and all times, are 0.
    Open,
}

impl Decision {
    #[inline]
    pub(crate) fn new(limit: Policy, verdict: EngineReply, action: Action, age: f64) -> Self {
        let spent = verdict.admitted && action.commits();
        let receipt = if spent { Receipt::At(verdict.instant) } else { Receipt::None };
        Self::with_receipt(limit, verdict, receipt, age)
    }

    #[inline]
    pub(crate) fn with_receipt(
        limit: Policy,
        verdict: EngineReply,
        receipt: Receipt,
        age: f64,
    ) -> Self {
        let Policy { limiter, quota, cost, source } = limit;
        let EngineReply { admitted, wait, remaining, replenish, reset, .. } = verdict;
        Self {
            limiter,
            quota,
            cost,
            source,
            admitted,
            wait,
            remaining,
            replenish,
            reset,
            receipt,
            age,
        }
    }

    /// The decision of a request that proceeds uncounted, because the store did not decide.
    pub(crate) fn uncounted(limit: Policy) -> Self {
        let nothing = EngineReply {
            admitted: true,
            wait: 0.0,
            remaining: 0.0,
            replenish: 0.0,
            reset: 0.0,
            instant: 0.0,
        };
        let limit = Policy { source: Source::Open, ..limit };
        Self::with_receipt(limit, nothing, Receipt::None, 0.0)
    }

    pub(crate) fn proceeds_immediately(&self) -> bool {
        self.admitted && self.wait == 0.0
    }

    /// How long ago the store decided.
    pub(crate) const fn age(&self) -> Duration {
        micros(self.age)
    }

    /// What is left of the delay.
    pub(crate) const fn sleep(&self) -> Duration {
        self.delay().saturating_sub(self.age())
    }

    /// Returns whether the request may go on, after [`delay`](Decision::delay).
    #[must_use]
    pub const fn is_allowed(&self) -> bool {
        self.admitted
    }

    /// The time after which an allowed request may go on.
    ///
    /// It is zero unless the algorithm is a leaky bucket, or the check allowed a wait.
    #[must_use]
    pub const fn delay(&self) -> Duration {
        if self.is_allowed() { micros(self.wait) } else { Duration::ZERO }
    }

    /// The time after which the same request, if no other comes between, is allowed; `None` if it is
    /// allowed now. Exact to the microsecond.
    #[must_use]
    pub const fn retry_after(&self) -> Option<Duration> {
        if self.is_allowed() { None } else { Some(micros(self.wait)) }
    }

    /// The number of requests of cost 1 that would be allowed right now, after this decision.
    #[must_use]
    pub const fn remaining(&self) -> u64 {
        self.remaining as u64
    }

    /// The time until [`remaining`](Decision::remaining) grows; zero if it is as large as can be. It counts
    /// from the decision, and so does [`reset_after`](Decision::reset_after): not from after the delay.
    #[must_use]
    pub const fn replenish_after(&self) -> Duration {
        micros(self.replenish)
    }

    /// The time until the key is as if it had never been seen.
    #[must_use]
    pub const fn reset_after(&self) -> Duration {
        micros(self.reset)
    }

    /// The name of the limiter that decided; of several, of the one that binds: it denies longest, or has least
    /// remaining, and of several such makes the request wait longest. All that the decision tells is about it,
    /// but for the delay, which is that of the request.
    #[must_use]
    pub const fn limiter(&self) -> &'static str {
        self.limiter
    }

    /// The quota that the request was held against.
    #[must_use]
    pub const fn quota(&self) -> Quota {
        self.quota
    }

    /// Who decided.
    #[must_use]
    pub const fn source(&self) -> Source {
        self.source
    }

    pub(crate) fn receipt(&self) -> &Receipt {
        &self.receipt
    }

    /// With the receipts of all of its limits.
    #[cfg(feature = "redis")]
    pub(crate) fn with_receipts(self, instants: Arc<[f64]>) -> Self {
        Self { receipt: Receipt::Each(instants), ..self }
    }

    /// What the request costs.
    #[must_use]
    pub const fn cost(&self) -> u32 {
        self.cost
    }
}

impl fmt::Debug for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Decision")
            .field("is_allowed", &self.is_allowed())
            .field("delay", &self.delay())
            .field("retry_after", &self.retry_after())
            .field("remaining", &self.remaining())
            .field("replenish_after", &self.replenish_after())
            .field("reset_after", &self.reset_after())
            .field("limiter", &self.limiter())
            .field("quota", &self.quota())
            .field("cost", &self.cost())
            .field("source", &self.source())
            .finish()
    }
}

const fn micros(time: f64) -> Duration {
    Duration::from_micros(time as u64)
}
