//! Errors of limiters and stores. Errors in requests are in
//! `middleware/rejection.rs`.

mod config;
#[cfg(feature = "redisson")]
mod redisson;
mod store;

use std::{borrow::Cow, error::Error as StdError, fmt};

#[cfg(feature = "redisson")]
pub use self::redisson::RateLimiterError;
pub use self::{
    config::ConfigError,
    store::{ErrorKind, StoreError},
};

/// Writes an error and its causes in one line.
fn write_with_causes(error: &dyn StdError, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    write!(f, "{error}")?;
    error.source().map_or(Ok(()), |cause| {
        f.write_str(": ")?;
        write_with_causes(cause, f)
    })
}

/// The reason why a limiter made no decision, or did not change a count.
///
/// Two errors are equal if their variants and fields are. A [`StoreError`] compares by its kind.
///
/// # Examples
///
/// ```
/// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let quota = Quota::per_hour(3);
/// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
/// match limiter.check("alice").cost(4).await {
///     Ok(decision) => println!("{decision}"),
///     Err(error) if error.is_store() => println!("try again: {error}"),
///     Err(error) => println!("a mistake: {error}"), // 4 of at most 3
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// The cost is 0. A request costs at least 1; [`peek`](crate::Limiter::peek) reads the state
    /// without spending.
    ZeroCost,
    /// The cost is above the maximum that the quota can ever grant. Nothing was spent.
    #[non_exhaustive]
    CostAboveQuota {
        /// The name of the limiter.
        limiter: Cow<'static, str>,
        /// The cost of the request.
        cost: u64,
        /// The largest cost that the quota can grant to one request.
        max: u64,
    },
    /// The charge is [exempt](crate::Charge::exempt): it has no limits to check.
    NoLimits,
    /// One limiter is charged twice for one key: charge it once, with the sum of the costs.
    #[non_exhaustive]
    SameLimitTwice {
        /// The name of the limiter.
        limiter: Cow<'static, str>,
    },
    /// The permit to settle holds no units of this limiter.
    #[non_exhaustive]
    NotHeld {
        /// The name that was given.
        limiter: Cow<'static, str>,
    },
    /// The units to settle have been settled already, or the request has ended.
    #[non_exhaustive]
    HoldEnded {
        /// The name of the limiter.
        limiter: Cow<'static, str>,
    },
    /// The cost of a limit of the charge is an estimate, which a check would spend: call
    /// [`Charge::hold`](crate::Charge::hold).
    #[non_exhaustive]
    HasEstimate {
        /// The name of the limiter.
        limiter: Cow<'static, str>,
    },
    /// The charge to hold has no estimate: add one with
    /// [`Charge::estimate`](crate::Charge::estimate), or call
    /// [`Charge::check`](crate::Charge::check).
    NoEstimate,
    /// The limiter counts units [at a time](crate::Algorithm::Concurrency), which are not spent:
    /// call [`Limiter::hold`](crate::Limiter::hold) or [`Charge::hold`](crate::Charge::hold).
    #[non_exhaustive]
    OnlyHolds {
        /// The name of the limiter.
        limiter: Cow<'static, str>,
    },
    /// The limiter cannot hold units: it is a leaky bucket, whose units are departures, or Redisson
    /// shares it.
    #[non_exhaustive]
    CannotHold {
        /// The name of the limiter.
        limiter: Cow<'static, str>,
    },
    /// The limits of one charge cannot be decided together: they are in different stores, or
    /// Redisson shares one of them.
    DifferentStores,
    /// The store of the limiter answers later, such as a `RedisStore`: only a
    /// [`MemoryStore`](crate::MemoryStore) answers a call that is not awaited. Nothing was spent.
    #[non_exhaustive]
    NotImmediate {
        /// The name of the limiter.
        limiter: Cow<'static, str>,
    },
    /// The settings of a limiter are invalid. Nothing was changed.
    Config(ConfigError),
    /// The store failed.
    Store(StoreError),
    /// A limiter that Redisson shares cannot do this. Nothing was changed.
    #[cfg(feature = "redisson")]
    Redisson(RateLimiterError),
}

/// The text with its causes: a `main` that returns the error prints it so.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_with_causes(self, f)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ZeroCost => f.write_str(
                "invalid cost 0: a cost or an estimate must be at least 1; to count nothing, leave \
                 the limit out of the charge, and to read without spending, use `peek`",
            ),
            Self::CostAboveQuota { limiter, cost, max } => write!(
                f,
                "invalid cost {cost}: the quota of limiter {limiter:?} grants at most {max} to one \
                 request; lower the cost, or raise the quota"
            ),
            Self::NoLimits => f.write_str(
                "the charge cannot be checked: it is exempt and has no limits; add a limit, or \
                 skip the check",
            ),
            Self::SameLimitTwice { limiter } => write!(
                f,
                "invalid charge: limiter {limiter:?} is charged for the same key twice; charge it \
                 once, with the sum of the costs"
            ),
            Self::NotHeld { limiter } => write!(
                f,
                "cannot settle limiter {limiter:?}: the request holds no units of it; pass the \
                 name of a limiter with an estimate"
            ),
            Self::HoldEnded { limiter } => write!(
                f,
                "cannot settle limiter {limiter:?}: its units are settled, or the request has \
                 ended; settle once, before the end of the request"
            ),
            Self::HasEstimate { limiter } => write!(
                f,
                "the charge cannot be checked: the cost of limiter {limiter:?} is an estimate; \
                 call `hold`"
            ),
            Self::NoEstimate => f.write_str(
                "the charge cannot be held: it has no estimate; add one with `estimate`, or call \
                 `check`",
            ),
            Self::OnlyHolds { limiter } => write!(
                f,
                "limiter {limiter:?} cannot spend units: it counts them at a time; call `hold`, \
                 and keep the permit"
            ),
            Self::CannotHold { limiter } => write!(
                f,
                "limiter {limiter:?} cannot hold units: it is a leaky bucket, or Redisson shares \
                 it; use another algorithm"
            ),
            Self::DifferentStores => f.write_str(
                "invalid charge: its limits are in different stores or prefixes, or Redisson \
                 shares one of them; limits that are charged together must be in one store",
            ),
            Self::NotImmediate { limiter } => write!(
                f,
                "cannot check the limiter {limiter:?} without waiting: its store answers later; \
                 await `check`"
            ),
            Self::Config(_) => f.write_str("the settings of the rate limiter are invalid"),
            Self::Store(error) => f.write_str(store_failure(error)),
            #[cfg(feature = "redisson")]
            Self::Redisson(error) => error.fmt(f),
        }
    }
}

impl Error {
    /// Returns whether the store failed. The other errors are mistakes in the call or in the
    /// settings, and occur again if the call is repeated: so only a failure of the store is a
    /// reason to let a request through.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{Algorithm, Error, Limiter, MemoryStore, Quota};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Error> {
    /// # let store = MemoryStore::new();
    /// let limiter = Limiter::new("api", store, Algorithm::token_bucket(), Quota::per_second(10));
    /// let is_allowed = match limiter.check("alice").cost(5).await {
    ///     Ok(decision) => decision.is_allowed(),
    ///     Err(error) if error.is_store() => true,
    ///     Err(error) => return Err(error),
    /// };
    /// assert!(is_allowed);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn is_store(&self) -> bool {
        matches!(self, Self::Store(_))
    }

    /// Returns the kind of the failure, if the store failed.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{Algorithm, Error, Limiter, MemoryStore, Quota, store::ErrorKind};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// let store = MemoryStore::with_max_keys(1);
    /// let limiter = Limiter::new("api", store, Algorithm::sliding_log(), Quota::per_hour(1));
    /// assert_eq!(limiter.check("alice").await.map(|decision| decision.is_allowed()), Ok(true));
    ///
    /// let error = limiter.check("ben").await.expect_err("the store is full");
    /// assert_eq!((error.kind(), error.limiter()), (Some(ErrorKind::Full), Some("api")));
    /// # }
    /// ```
    #[must_use]
    pub fn kind(&self) -> Option<ErrorKind> {
        match self {
            Self::Store(error) => Some(error.kind()),
            _ => None,
        }
    }

    /// Returns the name of the limiter, as in [`Decision::limiter`](crate::Decision::limiter), if
    /// the error concerns one.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// if let Err(error) = limiter.check("alice").cost(4).await {
    ///     assert_eq!(error.limiter(), Some("api"));
    /// }
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn limiter(&self) -> Option<&str> {
        match self {
            Self::CostAboveQuota { limiter, .. }
            | Self::SameLimitTwice { limiter }
            | Self::NotHeld { limiter }
            | Self::HoldEnded { limiter }
            | Self::HasEstimate { limiter }
            | Self::OnlyHolds { limiter }
            | Self::CannotHold { limiter }
            | Self::NotImmediate { limiter } => Some(limiter),
            Self::Config(error) => error.limiter(),
            Self::Store(error) => error.limiter(),
            #[cfg(feature = "redisson")]
            Self::Redisson(error) => error.limiter(),
            Self::ZeroCost | Self::NoLimits | Self::NoEstimate | Self::DifferentStores => None,
        }
    }
}

fn store_failure(error: &StoreError) -> &'static str {
    match error.kind() {
        ErrorKind::Full => "the store of the rate limiter has no room for the key",
        ErrorKind::OtherVersion => {
            "the rate limiter cannot read the state of the key, which another version has written"
        }
        _ => "the store of the rate limiter failed",
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Self::Store(error) => Some(error),
            Self::Config(error) => Some(error),
            _ => None,
        }
    }
}

impl From<ConfigError> for Error {
    fn from(error: ConfigError) -> Self {
        Self::Config(error)
    }
}

impl From<StoreError> for Error {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

#[cfg(feature = "redisson")]
impl From<RateLimiterError> for Error {
    fn from(error: RateLimiterError) -> Self {
        Self::Redisson(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Decision;

    #[test]
    fn a_result_of_a_check_is_as_small_as_its_decision() {
        assert!(size_of::<Error>() <= 48);
        assert_eq!(size_of::<Result<Decision, Error>>(), size_of::<Decision>());
    }
}
