//! `RateLimiterError`: the mistakes in the use of a limiter that Redisson shares, without knowledge
//! of that limiter.

use std::{borrow::Cow, error::Error, fmt, time::Duration};

/// A mistake in the use of a [`RateLimiter`](crate::redisson::RateLimiter): in its name, its rate
/// or the call. The methods that also call Redis return it in
/// [`Error::Redisson`](crate::Error::Redisson).
///
/// # Examples
///
/// ```no_run
/// # use tower_ratelimit::{RedisStore, redisson::RateLimiter};
/// # #[tokio::main]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let store = RedisStore::connect("redis://127.0.0.1/").await?;
/// if let Err(error) = RateLimiter::try_new(store, "a}b") {
///     println!("{error}");
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum RateLimiterError {
    /// The limiter has no valid rate: the rate was never set, has expired or was deleted, or is
    /// malformed, such as a fraction. Call
    /// [`try_set_rate`](crate::redisson::RateLimiter::try_set_rate).
    #[non_exhaustive]
    NoRate {
        /// The name of the limiter in decisions: its
        /// [label](crate::redisson::RateLimiter::label).
        limiter: Cow<'static, str>,
        /// The name in Redis under which the rate is missing.
        name: Box<str>,
    },
    /// The limiter does not support the operation. It supports checks, waiting and refunds.
    #[non_exhaustive]
    Unsupported {
        /// The name of the limiter in decisions: its
        /// [label](crate::redisson::RateLimiter::label).
        limiter: Cow<'static, str>,
    },
    /// The keys of this name would be in several slots of a cluster: the name is empty, or contains
    /// braces without text between them.
    #[non_exhaustive]
    Slots {
        /// The name in Redis.
        name: Box<str>,
    },
    /// The rate is not 1 to 2^53 permits in 1 ms to 100 years.
    #[non_exhaustive]
    Rate {
        /// The number of permits.
        rate: u64,
        /// The interval.
        interval: Duration,
    },
    /// The keep-alive is below the interval, or above 100 years.
    #[non_exhaustive]
    KeepAlive {
        /// The keep-alive.
        keep_alive: Duration,
        /// The interval.
        interval: Duration,
    },
}

impl RateLimiterError {
    /// Returns the name of the limiter in decisions, if the error is not about a setting.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # use tower_ratelimit::{RedisStore, redisson::RateLimiter};
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let store = RedisStore::connect("redis://127.0.0.1/").await?;
    /// if let Err(error) = RateLimiter::try_new(store, "a}b") {
    ///     println!("{:?}", error.limiter());
    /// }
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn limiter(&self) -> Option<&str> {
        match self {
            Self::NoRate { limiter, .. } | Self::Unsupported { limiter } => Some(limiter),
            Self::Slots { .. } | Self::Rate { .. } | Self::KeepAlive { .. } => None,
        }
    }
}

/// The text: a `main` that returns the error prints it so.
impl fmt::Debug for RateLimiterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for RateLimiterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoRate { name, .. } => write!(
                f,
                "the rate limiter {name:?} cannot decide: its rate in Redis is missing or invalid; \
                 set a rate with `try_set_rate`"
            ),
            Self::Unsupported { limiter } => write!(
                f,
                "limiter {limiter:?} does not support the operation: Redisson shares it; check, \
                 wait or refund"
            ),
            Self::Slots { name } => write!(
                f,
                "limiter name {name:?}: its keys would be in several slots of a cluster; use a \
                 name without braces, or with text in the first pair, such as \"api:{{42}}\""
            ),
            Self::Rate { rate, interval } => write!(
                f,
                "invalid rate of {rate} permits in {interval:?}: a limiter cannot count it; use 1 \
                 to 2^53 permits in 1 ms to 100 years"
            ),
            Self::KeepAlive { keep_alive, interval } => write!(
                f,
                "keep-alive {keep_alive:?}: the limiter would forget permits taken in its interval \
                 of {interval:?}; use at least the interval, and at most 100 years"
            ),
        }
    }
}

impl Error for RateLimiterError {}
