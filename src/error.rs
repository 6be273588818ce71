//! Errors of limiters, stores and settings. Errors in requests are in `middleware/rejection.rs`.

use std::{error::Error as StdError, fmt, sync::Arc, time::Duration};

use crate::{algorithm::Algorithm, quota::Quota};

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

/// Why a store gave no answer.
#[derive(Clone)]
pub struct StoreError {
    kind: Kind,
    was_sent: bool,
    /// The name of the server that was asked.
    server: Option<Arc<String>>,
}

#[derive(Clone, Debug)]
enum Kind {
    Timeout(Duration),
    Full(usize),
    Away,
    #[cfg(feature = "redis")]
    Config(Arc<str>),
    #[cfg(feature = "redis")]
    Redis(Arc<RedisCause>),
    #[cfg(feature = "redis")]
    Interrupted(Arc<RedisCause>),
    #[cfg(feature = "redis")]
    Unavailable(Arc<dyn StdError + Send + Sync>),
}

/// An error of the crate `redis`. It has no source: that of the crate has the same text once more.
#[cfg(feature = "redis")]
#[derive(Debug)]
struct RedisCause(redis::RedisError);

#[cfg(feature = "redis")]
impl fmt::Display for RedisCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = self.0.to_string();
        let is_closed = text.eq_ignore_ascii_case("broken pipe");
        f.write_str(if is_closed { "the server closed the connection" } else { &text })?;
        match self.0.code() {
            Some("WRONGPASS" | "NOAUTH") => {
                f.write_str("; check the user and the password in the URL or in `RedisConfig`")
            }
            Some("NOPERM") => f.write_str("; allow what docs/operation.md lists in Permissions"),
            _ if text.contains("can't run this command") => {
                f.write_str("; `RedisStore::ping` names the right that is missing")
            }
            _ => Ok(()),
        }
    }
}

#[cfg(feature = "redis")]
impl StdError for RedisCause {}

impl StoreError {
    fn new(kind: Kind) -> Self {
        Self { kind, was_sent: true, server: None }
    }

    /// The store was not asked at all.
    #[cfg(feature = "redis")]
    pub(crate) fn unsent(self) -> Self {
        Self { was_sent: false, ..self }
    }

    #[cfg(feature = "redis")]
    pub(crate) fn at(self, server: Option<Arc<String>>) -> Self {
        Self { server, ..self }
    }

    /// Whether the store may have been asked.
    #[cfg(feature = "redis")]
    pub(crate) fn was_sent(&self) -> bool {
        self.was_sent
    }

    /// The store did not answer within its `deadline`; whether the cost was spent is not known.
    pub(crate) fn timeout(deadline: Duration) -> Self {
        Self::new(Kind::Timeout(deadline))
    }

    /// The store holds `max_keys` keys that it may not forget, and cannot take another.
    pub(crate) fn full(max_keys: usize) -> Self {
        Self::new(Kind::Full(max_keys))
    }

    /// The store gave no answers lately, and was not asked.
    #[cfg(feature = "redis")]
    pub(crate) fn away() -> Self {
        Self::new(Kind::Away).unsent()
    }

    /// Redis cannot be reached, or answered with an error.
    #[cfg(feature = "redis")]
    pub(crate) fn of_redis(error: redis::RedisError) -> Self {
        Self::new(Kind::Redis(Arc::new(RedisCause(error))))
    }

    /// The settings of the store cannot be used. The text says what to do.
    #[cfg(feature = "redis")]
    pub(crate) fn config(text: impl Into<Arc<str>>) -> Self {
        Self::new(Kind::Config(text.into())).unsent()
    }

    /// The connection ended while the call was under way; whether the cost was spent is not known.
    #[cfg(feature = "redis")]
    pub(crate) fn interrupted(error: redis::RedisError) -> Self {
        Self::new(Kind::Interrupted(Arc::new(RedisCause(error))))
    }

    /// The store cannot decide, for another reason.
    #[cfg(feature = "redis")]
    pub(crate) fn unavailable(source: impl StdError + Send + Sync + 'static) -> Self {
        Self::new(Kind::Unavailable(Arc::new(source)))
    }

    /// What the crate `redis` said, if anything.
    #[cfg(feature = "redis")]
    pub(crate) fn redis(&self) -> Option<&redis::RedisError> {
        match &self.kind {
            Kind::Redis(cause) | Kind::Interrupted(cause) => Some(&cause.0),
            _ => None,
        }
    }

    /// The kind of error that Redis answered with, if it did.
    #[cfg(feature = "redis")]
    pub(crate) fn server_kind(&self) -> Option<redis::ServerErrorKind> {
        match self.redis()?.kind() {
            redis::ErrorKind::Server(kind) => Some(kind),
            _ => None,
        }
    }

    /// Whether Redis has answered with an error.
    #[cfg(feature = "redis")]
    fn is_answer(&self) -> bool {
        use redis::ErrorKind::{Extension, Server};
        self.redis().is_some_and(|error| matches!(error.kind(), Server(_) | Extension))
    }

    /// Returns whether the deadline passed; the cost may have been spent.
    #[must_use]
    pub fn is_timeout(&self) -> bool {
        matches!(self.kind, Kind::Timeout(_))
    }

    /// Returns whether the connection ended while the call was under way; the cost may have been
    /// spent.
    #[must_use]
    pub fn is_interrupted(&self) -> bool {
        #[cfg(feature = "redis")]
        return matches!(self.kind, Kind::Interrupted(_));
        #[cfg(not(feature = "redis"))]
        false
    }

    /// Returns whether the store has no room for another key.
    #[must_use]
    pub fn is_full(&self) -> bool {
        matches!(self.kind, Kind::Full(_))
    }
}

/// With the cause, as this is what `main` prints.
impl fmt::Debug for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self.source() {
            Some(cause) => format!("{self}: {cause}"),
            None => self.to_string(),
        };
        f.debug_tuple("StoreError").field(&text).finish()
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.kind {
            Kind::Timeout(deadline) => match &self.server {
                Some(server) => write!(f, "no answer from Redis at {server} within {deadline:?}"),
                None => write!(f, "no answer within {deadline:?}"),
            },
            Kind::Full(max_keys) => write!(
                f,
                "no room for a new key: the store holds {max_keys} keys that are in use; raise \
                 `max_keys`"
            ),
            Kind::Away => match &self.server {
                Some(server) => {
                    write!(f, "Redis at {server} does not answer, and is not called until it does")
                }
                None => f.write_str("the store does not answer, and is not called until it does"),
            },
            #[cfg(feature = "redis")]
            Kind::Config(text) => f.write_str(text),
            #[cfg(feature = "redis")]
            Kind::Interrupted(_) => match &self.server {
                Some(server) => write!(
                    f,
                    "the connection to Redis at {server} ended while the call was under way, and \
                     the call may have been counted"
                ),
                None => f.write_str("the connection to Redis ended while the call was under way"),
            },
            #[cfg(feature = "redis")]
            Kind::Redis(_) | Kind::Unavailable(_) => match &self.server {
                Some(server) if self.is_answer() => {
                    write!(f, "Redis at {server} answered with an error")
                }
                None if self.is_answer() => f.write_str("Redis answered with an error"),
                Some(server) => write!(f, "Redis at {server} is not available"),
                None => f.write_str("the store is not available"),
            },
        }
    }
}

impl StdError for StoreError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match &self.kind {
            #[cfg(feature = "redis")]
            Kind::Redis(cause) | Kind::Interrupted(cause) => Some(&**cause),
            #[cfg(feature = "redis")]
            Kind::Unavailable(source) => Some(&**source),
            _ => None,
        }
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
        /// The algorithm.
        algorithm: Algorithm,
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
