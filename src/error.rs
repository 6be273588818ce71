//! Errors of limiters, stores and settings. Errors in requests are in `middleware/rejection.rs`.

mod store;

use std::{error::Error as StdError, fmt, time::Duration};

pub use self::store::{ErrorKind, StoreError};
use crate::quota::Quota;

/// The reason why a limiter made no decision, or did not change a count.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Error {
    /// The cost is 0. A request costs at least 1; [`peek`](crate::Limiter::peek) reads the state
    /// without spending.
    ZeroCost,
    /// The cost is above the maximum that the quota can ever grant. Nothing was spent.
    #[non_exhaustive]
    CostAboveQuota {
        /// The name of the limiter.
        limiter: &'static str,
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
        limiter: &'static str,
    },
    /// The permit to settle holds no units of this limiter.
    #[non_exhaustive]
    NotHeld {
        /// The name that was given.
        limiter: String,
    },
    /// The units to settle have been settled already, or the request has ended.
    #[non_exhaustive]
    HoldEnded {
        /// The name of the limiter.
        limiter: String,
    },
    /// The cost of a limit of the charge is an estimate, which a check would spend: call
    /// [`Charge::hold`](crate::Charge::hold).
    #[non_exhaustive]
    HasEstimate {
        /// The name of the limiter.
        limiter: String,
    },
    /// The charge to hold has no estimate: add one with
    /// [`Charge::estimate`](crate::Charge::estimate), or call
    /// [`Charge::check`](crate::Charge::check).
    NoEstimate,
    /// The limiter cannot hold units: it is a leaky bucket, whose units are departures, or Redisson
    /// shares it.
    #[non_exhaustive]
    CannotHold {
        /// The name of the limiter.
        limiter: String,
    },
    /// The limits of one charge cannot be decided together: they are in different stores, or
    /// Redisson shares one of them.
    DifferentStores,
    /// The limiter that Redisson shares has no valid rate: the rate was never set, has expired or
    /// was deleted, or is malformed, such as a fraction. Call
    /// `redisson::RateLimiter::try_set_rate`.
    #[non_exhaustive]
    NoRate {
        /// The name of the limiter.
        name: String,
    },
    /// A limiter that Redisson shares does not support the operation. It supports checks, waiting
    /// and refunds.
    Unsupported,
    /// The store of the limiter answers later, such as a `RedisStore`: only a
    /// [`MemoryStore`](crate::MemoryStore) answers a call that is not awaited. Nothing was spent.
    #[non_exhaustive]
    NotImmediate {
        /// The name of the limiter.
        limiter: &'static str,
    },
    /// The settings of a limiter are invalid. Nothing was changed.
    Config(ConfigError),
    /// The store failed.
    Store(StoreError),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ZeroCost => f.write_str(
                "invalid cost 0: a request must cost at least 1; use `peek` to read without \
                 spending, or `Charge::exempt` to count nothing",
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
                 call `hold` or `hold_within`"
            ),
            Self::NoEstimate => f.write_str(
                "the charge cannot be held: it has no estimate; add one with `estimate`, or call \
                 `check`",
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
            Self::NoRate { name } => write!(
                f,
                "the rate limiter {name:?} cannot decide: its rate in Redis is missing or invalid; \
                 set a rate with `try_set_rate`"
            ),
            Self::Unsupported => f.write_str(
                "the operation is not supported: Redisson shares the limiter; check, wait or \
                 refund",
            ),
            Self::NotImmediate { limiter } => write!(
                f,
                "cannot check the limiter {limiter:?} without waiting: its store answers later; \
                 await `check`"
            ),
            Self::Config(_) => f.write_str("the settings of the rate limiter are invalid"),
            Self::Store(error) => f.write_str(store_failure(error)),
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
    /// let is_allowed = match limiter.check_n("alice", 5).await {
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
}

fn store_failure(error: &StoreError) -> &'static str {
    match error.kind() {
        ErrorKind::Full => "the store of the rate limiter has no room for the key",
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

/// Invalid settings.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConfigError {
    /// Another limiter over the same store uses the name: their counts would mix.
    #[non_exhaustive]
    NameTaken {
        /// The name.
        name: String,
    },
    /// The name is invalid: it must be 1 to 64 of the characters `A-Z a-z 0-9 - _ . /`.
    #[non_exhaustive]
    Name {
        /// The name.
        name: String,
    },
    /// The configuration has no limit of this name.
    #[non_exhaustive]
    MissingLimit {
        /// The name.
        name: String,
    },
    /// The new configuration lacks limits of the previous one, which limiters use. Nothing was
    /// changed.
    #[non_exhaustive]
    LimitsRemoved {
        /// The names of all limits that were removed, in their order.
        names: Vec<String>,
    },
    /// No algorithm has this name.
    #[non_exhaustive]
    UnknownAlgorithm {
        /// The name.
        name: String,
    },
    /// The quota has a burst, but the algorithm is not a bucket.
    #[non_exhaustive]
    BurstWithoutBucket {
        /// The name of the algorithm.
        algorithm: &'static str,
        /// The quota with the burst.
        quota: Quota,
    },
    /// The number of buckets of a sliding window is not 1 to 100.
    #[non_exhaustive]
    Buckets {
        /// The number of buckets.
        buckets: u32,
    },
    /// A network is not an address, with or without a prefix length: `10.0.0.0/8`.
    #[non_exhaustive]
    Network {
        /// The text that was given.
        network: String,
    },
    /// The sum of burst and overdraft is above 2^46, or takes more than 100 years to refill.
    #[non_exhaustive]
    Overdraft {
        /// The overdraft.
        overdraft: u64,
        /// The quota.
        quota: Quota,
    },
    /// The keys of a `redisson::RateLimiter` of this name would be in several slots of a cluster:
    /// the name is empty, or contains braces without text between them.
    #[non_exhaustive]
    Slots {
        /// The name.
        name: String,
    },
    /// The rate of a `redisson::RateLimiter` is not 1 to 2^53 permits.
    #[non_exhaustive]
    Rate {
        /// The rate.
        rate: u64,
    },
    /// The interval of a `redisson::RateLimiter` is not 1 ms to 100 years.
    #[non_exhaustive]
    Interval {
        /// The interval.
        interval: Duration,
    },
    /// The keep-alive of a `redisson::RateLimiter` is below its interval, or above 100 years.
    #[non_exhaustive]
    KeepAlive {
        /// The keep-alive.
        keep_alive: Duration,
        /// The interval.
        interval: Duration,
    },
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NameTaken { name } => write!(
                f,
                "limiter name {name:?}: the store already has a limiter of this name; choose \
                 another name, or clone the first limiter to share its counts"
            ),
            Self::Name { name } => write!(
                f,
                "limiter name {name:?}: use 1 to 64 of the characters A-Z a-z 0-9 - _ . /"
            ),
            Self::MissingLimit { name } => {
                write!(f, "limit {name:?} is missing: add it to the configuration")
            }
            Self::LimitsRemoved { names } => removed_limits(names, f),
            Self::UnknownAlgorithm { name } => write!(
                f,
                "algorithm {name:?}: use fixed-window, sliding-window, sliding-log, token-bucket \
                 or leaky-bucket"
            ),
            Self::BurstWithoutBucket { algorithm, quota } => write!(
                f,
                "quota \"{quota}\": a {algorithm} admits up to its limit at once and has no other \
                 burst; omit the burst, or use token-bucket or leaky-bucket"
            ),
            Self::Buckets { buckets } => {
                write!(f, "a sliding window has 1 to 100 buckets, not {buckets}")
            }
            Self::Network { network } => {
                write!(
                    f,
                    "network {network:?}: use an address, or one with a prefix length, such as \
                     10.0.0.0/8"
                )
            }
            Self::Overdraft { overdraft, quota } => write!(
                f,
                "an overdraft of {overdraft} is too large for the quota \"{quota}\": with the \
                 burst it must be at most 2^46 and refill within 100 years; use at most {}",
                quota.max_overdraft()
            ),
            Self::Slots { .. }
            | Self::Rate { .. }
            | Self::Interval { .. }
            | Self::KeepAlive { .. } => self.fmt_redisson(f),
        }
    }
}

impl ConfigError {
    /// Writes the errors of a `redisson::RateLimiter`.
    fn fmt_redisson(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Slots { name } => write!(
                f,
                "limiter name {name:?}: its keys would be in several slots of a cluster; use a \
                 name without braces, or with text in the first pair, such as \"api:{{42}}\""
            ),
            Self::Rate { rate } => write!(f, "rate {rate}: use 1 to 2^53 permits"),
            Self::Interval { interval } => {
                write!(f, "interval {interval:?}: use 1 ms to 100 years")
            }
            Self::KeepAlive { keep_alive, interval } => write!(
                f,
                "keep-alive {keep_alive:?}: the limiter would forget permits taken in its interval \
                 of {interval:?}; use at least the interval, and at most 100 years"
            ),
            _ => Ok(()),
        }
    }
}

fn removed_limits(names: &[String], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let (noun, uses, pronoun) = match names.len() {
        1 => ("limit", "was removed, but a limiter uses it", "it"),
        _ => ("limits", "were removed, but limiters use them", "them"),
    };
    let names: Vec<_> = names.iter().map(|name| format!("{name:?}")).collect();
    write!(
        f,
        "the {noun} {} {uses}; nothing changed: restore {pronoun}, or call \
         `reload_keeping_removed`",
        names.join(", ")
    )
}

impl StdError for ConfigError {}
