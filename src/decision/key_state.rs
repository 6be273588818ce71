//! `KeyState`: the state of a key, as the calls report it that are not decided by a quota. It knows
//! no store.

use std::{fmt, time::Duration};

use super::{Decision, Source, Status, UNKNOWN, rounded};
use crate::quota::Quota;

/// The state of a key: what a peek returns, and a call that spends, refunds, blocks or unblocks
/// whatever is left. Of several limits it is the state at the limit that
/// [binds](Decision::limiter). With the feature `serde`, it is
/// [serialized](crate::guide::configuration#results-as-json), with times in milliseconds.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), tower_ratelimit::Error> {
/// let quota = Quota::per_second(10);
/// let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::token_bucket(), quota);
///
/// let state = limiter.spend("alice", 7).await?;
/// assert_eq!(state.remaining(), 3);
/// assert_eq!(state.reset_after(), Duration::from_millis(700));
///
/// let state = limiter.check("alice").cost(5).peek().await?;
/// assert!(!state.allows());
/// assert_eq!(state.retry_after(), Some(Duration::from_millis(200)));
/// assert_eq!(state.to_string(), r#""api" (10/s): 3 left, the rest after 700ms"#);
/// # Ok(())
/// # }
/// ```
// A decision about the cost that was peeked at, or else about a cost of 1.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct KeyState(Decision);

impl KeyState {
    /// Returns the state that a peek has found.
    pub(crate) fn peeked(decision: Decision) -> Self {
        Self(decision)
    }

    /// Returns the state after a change, which no quota denies.
    pub(crate) fn changed(change: Decision) -> Self {
        let is_allowed = change.remaining > 0;
        let wait = match (is_allowed, change.replenish) {
            (true, _) => 0,
            (false, 0) => UNKNOWN, // units that are held have to be returned first
            (false, replenish) => replenish,
        };
        let status = Status::new(change.source(), is_allowed);
        Self(Decision { cost: 1, status, wait, ..change.without_counts() })
    }

    /// Returns the name of the limiter; of several limiters, of the one that
    /// [binds](Decision::limiter).
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// assert_eq!(limiter.peek("alice").await?.limiter(), "api");
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub const fn limiter(&self) -> &'static str {
        self.0.limiter()
    }

    /// Returns the quota.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// assert_eq!(limiter.peek("alice").await?.quota(), Quota::per_hour(3));
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn quota(&self) -> Quota {
        self.0.quota()
    }

    /// Returns the number of requests of cost 1 that would be allowed now.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// let _ = limiter.check("alice").await?;
    /// assert_eq!(limiter.peek("alice").await?.remaining(), 2);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub const fn remaining(&self) -> u64 {
        self.0.remaining()
    }

    /// Returns the number of units that are [held](crate::Limiter::hold): taken, until their
    /// permits are settled or dropped.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// let permit = limiter.hold("alice", 2).await?;
    /// assert_eq!(limiter.peek("alice").await?.held(), 2);
    /// drop(permit);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn held(&self) -> u64 {
        self.0.held()
    }

    /// Returns the time until [`remaining`](KeyState::remaining) grows; zero if it is at its
    /// maximum.
    ///
    /// # Examples
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// let _ = limiter.check("alice").await?;
    /// let state = limiter.peek("alice").await?;
    /// assert_eq!(state.replenish_after(), Duration::from_secs(3_600));
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub const fn replenish_after(&self) -> Duration {
        self.0.replenish_after()
    }

    /// Returns the time until the key is in its initial state. While units are held, this is the
    /// time if all holds end now, and all of their units are used: in memory and in Redis. Of a
    /// limit on concurrency, it is zero. Of a blocked key, it is the time until the block
    /// ends, or until no unit counts, whichever is later.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// assert!(limiter.peek("alice").await?.reset_after().is_zero()); // unused
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub const fn reset_after(&self) -> Duration {
        self.0.reset_after()
    }

    /// Returns the time until the [block](crate::Limiter::block) of the key ends; `None` if it is
    /// not blocked.
    ///
    /// # Examples
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// limiter.block("mallory", Duration::from_secs(600)).await?;
    /// let state = limiter.peek("mallory").await?;
    /// assert_eq!(state.blocked_for(), Some(Duration::from_secs(600)));
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn blocked_for(&self) -> Option<Duration> {
        self.0.blocked_for()
    }

    /// Returns whether a request would be allowed now, with or without a delay: one of the cost
    /// that was peeked for, by default 1.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// assert!(limiter.check("alice").cost(3).peek().await?.allows());
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub const fn allows(&self) -> bool {
        self.0.is_allowed()
    }

    /// Returns the time after which that request would be allowed, if no other request spends units
    /// before: as in [`Decision::retry_after`], `None` if it would be allowed now, or if the time
    /// is unknown.
    ///
    /// # Examples
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// let _ = limiter.check("alice").await?;
    /// let state = limiter.check("alice").cost(3).peek().await?;
    /// assert_eq!(state.retry_after(), Some(Duration::from_secs(3_600)));
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub const fn retry_after(&self) -> Option<Duration> {
        self.0.retry_after()
    }

    /// Returns the delay with which a peek found that the request would be allowed: a
    /// [leaky bucket](crate::Algorithm::LeakyBucket) has one. It is zero after other calls.
    ///
    /// # Examples
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// let queue = Limiter::new("queue", MemoryStore::new(), Algorithm::leaky_bucket(), quota);
    /// let _ = queue.check("alice").await?;
    /// assert_eq!(queue.peek("alice").await?.delay(), Duration::from_secs(1_200));
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub const fn delay(&self) -> Duration {
        self.0.delay()
    }

    /// Returns the origin of the state.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, store::Source};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// assert_eq!(limiter.peek("alice").await?.source(), Source::Store);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub const fn source(&self) -> Source {
        self.0.source()
    }
}

/// Writes a line for a log or a terminal, such as `"api" (5/min): 4 left, the rest after 12s`.
/// Times are rounded up: to whole milliseconds below 10 seconds, to whole seconds from there.
impl fmt::Display for KeyState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} ({}): {} left", self.limiter(), self.quota(), self.remaining())?;
        if self.held() > 0 {
            write!(f, ", {} held", self.held())?;
        }
        match (self.blocked_for(), self.reset_after()) {
            (Some(time), _) => write!(f, ", blocked for {:?}", rounded(time)),
            (None, Duration::ZERO) => Ok(()),
            (None, time) => write!(f, ", the rest after {:?}", rounded(time)),
        }
    }
}

impl fmt::Debug for KeyState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyState")
            .field("limiter", &self.limiter())
            .field("quota", &self.quota())
            .field("remaining", &self.remaining())
            .field("held", &self.held())
            .field("replenish_after", &self.replenish_after())
            .field("reset_after", &self.reset_after())
            .field("blocked_for", &self.blocked_for())
            .field("retry_after", &self.retry_after())
            .field("source", &self.source())
            .finish()
    }
}
