//! Errors of limiters, stores and settings. Errors in requests are in `middleware/rejection.rs`.

mod store;

use std::{error::Error as StdError, fmt, time::Duration};

#[cfg(feature = "redis")]
pub(crate) use self::store::Kind as StoreErrorKind;
pub use self::store::StoreError;
use crate::quota::Quota;

/// Why a limiter gave no decision.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Error {
    /// A request costs at least 1; to look without spending there is
    /// [`peek`](crate::Limiter::peek).
    ZeroCost,
    /// The cost is more than the quota can ever grant, however long one waits. Nothing was spent.
    #[non_exhaustive]
    CostAboveQuota {
        /// The name of the limiter.
        limiter: &'static str,
        /// What the request would cost.
        cost: u32,
        /// The largest cost that the quota can grant to one request.
        max: u32,
    },
    /// There is no limit to hold the request against: it is [exempt](crate::Charge::exempt).
    NoLimits,
    /// One limiter is to be charged for one key twice at once: charge it once, with the sum of the costs.
    #[non_exhaustive]
    SameLimitTwice {
        /// The name of the limiter.
        limiter: &'static str,
    },
    /// The limiter that is to be settled was not charged.
    #[non_exhaustive]
    NotCharged {
        /// The name that was given.
        limiter: String,
    },
    /// The charge that is to be settled is not bound to a decision that has spent anything: pass the decision to
    /// [`Charge::decided`](crate::Charge::decided).
    NotDecided,
    /// The limits of one charge are in different stores, which cannot decide together, or one of several is
    /// shared by Redisson.
    DifferentStores,
    /// The limiter that Redisson shares has no rate, its rate is gone, or what is there is none, such as a fraction:
    /// call `redisson::RateLimiter::try_set_rate`.
    #[non_exhaustive]
    NoRate {
        /// The name of the limiter.
        name: String,
    },
    /// A limiter that Redisson shares can be checked, waited for and refunded, and settled with no more than was
    /// charged, and nothing else.
    Unsupported,
    /// A rate that cannot be, or a name that a limiter cannot have. Nothing was changed.
    Config(ConfigError),
    /// The store gave no answer.
    Store(StoreError),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ZeroCost => f.write_str(
                "a request must cost at least 1: `peek` spends nothing, and `Charge::exempt` charges nobody",
            ),
            Self::CostAboveQuota { limiter, cost, max } => write!(
                f,
                "a request that costs {cost} can never pass, the quota of {limiter:?} grants {max} at most"
            ),
            Self::NoLimits => f.write_str("an exempt charge has no limit that could decide"),
            Self::SameLimitTwice { limiter } => write!(
                f,
                "the limiter {limiter:?} is charged for the same key twice: charge it once, with the sum"
            ),
            Self::NotCharged { limiter } => {
                write!(
                    f,
                    "the charge cannot be settled: it has no limiter {limiter:?}; pass the name of one that \
                     it charges"
                )
            }
            Self::NotDecided => f.write_str(
                "the charge cannot be settled: its decision was denied, or it has none; settle an allowed decision, by \
                 `Charge::decided` or with the charge in the extensions of the request",
            ),
            Self::DifferentStores => f.write_str(
                "limits that are charged together must be in one store, with one prefix, and not shared by \
                 Redisson",
            ),
            Self::NoRate { name } => {
                write!(
                    f,
                    "the rate limiter {name:?} has no rate in Redis, or none that can be read: set one with \
                     try_set_rate"
                )
            }
            Self::Unsupported => f.write_str("a limiter that Redisson shares cannot do that"),
            Self::Config(_) => f.write_str("the rate limiter cannot be set up like that"),
            Self::Store(error) => f.write_str(store_failure(error)),
        }
    }
}

fn store_failure(error: &StoreError) -> &'static str {
    match error.is_full() {
        true => "the store of the rate limiter has no room for the key",
        false => "the store of the rate limiter gave no answer",
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

/// Settings that do not go together.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConfigError {
    /// Another limiter over the same store has the name; their counts would mix.
    #[non_exhaustive]
    NameTaken {
        /// The name.
        name: String,
    },
    /// A name is 1 to 64 of the characters `A-Z a-z 0-9 - _ . /`.
    #[non_exhaustive]
    Name {
        /// The name.
        name: String,
    },
    /// There is no algorithm of that name.
    #[non_exhaustive]
    UnknownAlgorithm {
        /// The name.
        name: String,
    },
    /// Only the buckets have a burst of their own.
    #[non_exhaustive]
    BurstWithoutBucket {
        /// The name of the algorithm.
        algorithm: &'static str,
        /// The quota with the burst.
        quota: Quota,
    },
    /// A sliding window has 1 to 100 buckets.
    #[non_exhaustive]
    Buckets {
        /// The number of buckets.
        buckets: u32,
    },
    /// A trusted network is an address, or one with a prefix, such as `10.0.0.0/8`.
    #[non_exhaustive]
    Network {
        /// What was given.
        network: String,
    },
    /// The burst and the overdraft together are above `u32::MAX`, or take more than 100 years to
    /// refill.
    #[non_exhaustive]
    Overdraft {
        /// The overdraft.
        overdraft: u32,
        /// The quota.
        quota: Quota,
    },
    /// The keys of a `redisson::RateLimiter` of this name would be in several slots of a cluster: the
    /// name is empty, or has braces that hold no text.
    #[non_exhaustive]
    Slots {
        /// The name.
        name: String,
    },
    /// The rate of a `redisson::RateLimiter` is 1 to 2^53 permits.
    #[non_exhaustive]
    Rate {
        /// The rate.
        rate: u64,
    },
    /// The interval of a `redisson::RateLimiter` is 1 ms to 100 years.
    #[non_exhaustive]
    Interval {
        /// The interval.
        interval: Duration,
    },
    /// A `redisson::RateLimiter` must be kept alive for at least its interval, and at most 100 years.
    #[non_exhaustive]
    KeepAlive {
        /// How long it would be kept alive.
        keep_alive: Duration,
        /// Its interval.
        interval: Duration,
    },
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NameTaken { name } => write!(
                f,
                "the store already has a limiter named {name:?}: name this one with \
                 `Limiter::named`, or clone the other one if they shall count together"
            ),
            Self::Name { name } => write!(
                f,
                "limiter name {name:?}: use 1 to 64 of the characters A-Z a-z 0-9 - _ . /"
            ),
            Self::UnknownAlgorithm { name } => write!(
                f,
                "algorithm {name:?}: use fixed-window, sliding-window, sliding-log, token-bucket or \
                 leaky-bucket"
            ),
            Self::BurstWithoutBucket { algorithm, quota } => write!(
                f,
                "quota \"{quota}\": a {algorithm} admits up to its limit at once and has no other \
                 burst; leave the burst out, or use token-bucket or leaky-bucket"
            ),
            Self::Buckets { buckets } => {
                write!(f, "a sliding window has 1 to 100 buckets, not {buckets}")
            }
            Self::Network { network } => {
                write!(f, "network {network:?}: write an address, or one with a prefix: 10.0.0.0/8")
            }
            Self::Overdraft { overdraft, quota } => write!(
                f,
                "an overdraft of {overdraft} is too much for the quota \"{quota}\": with the burst \
                 it must be below 2^32 and refill within 100 years"
            ),
            Self::Slots { name } => write!(
                f,
                "limiter name {name:?}: its keys would be in several slots of a cluster; use a name \
                 without braces, or with text in the first pair of them, such as \"api:{{42}}\""
            ),
            Self::Rate { rate } => write!(f, "a rate is 1 to 2^53 permits, not {rate}"),
            Self::Interval { interval } => {
                write!(f, "an interval is 1 ms to 100 years, not {interval:?}")
            }
            Self::KeepAlive { keep_alive, interval } => write!(
                f,
                "a limiter that is kept alive for {keep_alive:?} would forget what was taken in its \
                 interval of {interval:?}: keep it alive for longer, and at most 100 years"
            ),
        }
    }
}

impl StdError for ConfigError {}
