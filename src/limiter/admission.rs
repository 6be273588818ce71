//! `Admission`: the answer to a call that gives a guard to an admitted request.

use crate::decision::Decision;

/// Whether a request was admitted, with what it then has: a [`Permit`](crate::Permit) or a
/// [`Reservation`](crate::Reservation).
///
/// A permit that is dropped counts as used, because a call that is cut off has used its units. A
/// reservation that is dropped is released, because a turn that was not taken has used none.
///
/// # Examples
///
/// ```
/// use tower_ratelimit::{Admission, Algorithm, Limiter, MemoryStore, Quota};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tower_ratelimit::Error> {
/// # let store = MemoryStore::new();
/// let quota = Quota::per_minute(1_000);
/// let tokens = Limiter::new("tokens", store, Algorithm::sliding_log(), quota);
/// match tokens.hold("alice", 600).await? {
///     Admission::Admitted(permit) => permit.settle(250),
///     Admission::Denied(decision) => println!("{} units are left", decision.remaining()),
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "a request may be denied, and a guard that is dropped ends"]
pub enum Admission<G> {
    /// The request may proceed.
    Admitted(G),
    /// The request may not proceed. It has spent, held and reserved nothing.
    Denied(Decision),
}

impl<G> Admission<G> {
    /// Returns whether the request was admitted.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// assert!(limiter.hold("alice", 3).await?.is_admitted());
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn is_admitted(&self) -> bool {
        matches!(self, Self::Admitted(_))
    }

    /// Returns what an admitted request has; `None` if it is denied.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_ratelimit::Error> {
    /// let places = Limiter::new(
    ///     "places",
    ///     MemoryStore::new(),
    ///     Algorithm::concurrency(),
    ///     Quota::concurrent(1),
    /// );
    /// let place = places.hold("alice", 1).await?.admitted();
    /// assert!(place.is_some());
    /// assert!(places.hold("alice", 1).await?.admitted().is_none());
    /// # Ok(())
    /// # }
    /// ```
    pub fn admitted(self) -> Option<G> {
        match self {
            Self::Admitted(guard) => Some(guard),
            Self::Denied(_) => None,
        }
    }

    /// Returns what an admitted request has, or the decision as an error.
    ///
    /// # Errors
    ///
    /// The decision of a denied request.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// match limiter.hold("alice", 2).await?.into_result() {
    ///     Ok(permit) => permit.settle(1),
    ///     Err(denied) => println!("retry in {:?}", denied.retry_after()),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn into_result(self) -> Result<G, Decision> {
        match self {
            Self::Admitted(guard) => Ok(guard),
            Self::Denied(decision) => Err(decision),
        }
    }
}

impl<G: Guard> Admission<G> {
    /// Returns the decision: why the request is denied, and the state of its key.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// let admission = limiter.hold("alice", 2).await?;
    /// assert_eq!(admission.decision().remaining(), 1);
    /// # Ok(())
    /// # }
    /// ```
    pub fn decision(&self) -> &Decision {
        match self {
            Self::Admitted(guard) => guard.decision(),
            Self::Denied(decision) => decision,
        }
    }
}

/// What an admitted request has. The trait is not exported, which seals it.
pub trait Guard {
    fn decision(&self) -> &Decision;
}
