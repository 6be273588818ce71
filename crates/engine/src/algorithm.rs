//! The algorithms: their guarantees and names, and the entry to the engine, which decides. Each has
//! a model in two languages, `crates/engine/src/algorithm/NAME.rs` and `scripts/NAME/model.lua`:
//! the functions that both have stand in the same order. Both buckets share one, `bucket`. Rust
//! counts in integers, Lua in doubles that hold integers below 2^53, so both agree to the bit. It
//! knows no keys, stores or clocks.

mod arithmetic;
mod block;
mod bucket;
mod combine;
mod concurrency;
mod core;
mod counts;
mod engine;
mod fixed_window;
mod hold;
mod holding;
mod leaky_bucket;
mod model;
mod request;
mod reservations;
mod sliding_log;
mod sliding_window;
mod state_bytes;
mod table;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
mod tests;
mod token_bucket;

use std::{fmt, str::FromStr, time::Duration};

pub use self::{
    block::LONGEST_BLOCK,
    combine::{Combined, PerLimit, combine},
    core::Core,
    hold::{HoldAction, HoldChange, HoldReceipt, HoldReply, Lifetime},
    request::{Action, Admission, EngineReply, EngineRequest, Release, units},
    table::{Kind, Params, SOURCES, ScriptSource, State},
};
use crate::quota::{Quota, QuotaError};

/// An algorithm that counts requests. [`token_bucket`](Algorithm::token_bucket) is a good default.
///
/// # Examples
///
/// ```
/// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
///
/// let store = MemoryStore::new();
/// let quota = Quota::per_second(10).burst(20);
/// let api = Limiter::new("api", store.clone(), Algorithm::token_bucket(), quota);
/// let login = Limiter::new("login", store, Algorithm::sliding_log(), Quota::per_minute(5));
/// # let _ = (api, login);
/// ```
///
/// # Methods
///
/// | to | call |
/// |---|---|
/// | admit bursts, then a steady rate | [`token_bucket`](Algorithm::token_bucket) |
/// | be exact in any interval, with a small limit | [`sliding_log`](Algorithm::sliding_log) |
/// | roll over thousands of requests | [`sliding_window`](Algorithm::sliding_window) |
/// | count per day | [`fixed_window`](Algorithm::fixed_window) |
/// | space requests evenly | [`leaky_bucket`](Algorithm::leaky_bucket) |
/// | limit requests in flight | [`concurrency`](Algorithm::concurrency) |
///
/// # Details
///
/// | algorithm | guarantee | bytes of a key in Redis |
/// |---|---|---|
/// | fixed window | `limit` in a window that opens at its first admitted request | 120 |
/// | sliding log | `limit` in *any* interval of length `window` | 152, and 11 to 48 for each request |
/// | sliding window | an estimate of the sliding log, from counters | 152, and 5 for each bucket |
/// | token bucket | `burst` + `overdraft` + `limit` x t / `window` in any time t | 120; 136 with [`Refill::Interval`] |
/// | leaky bucket | departures `window` / `limit` apart, `burst` in the bucket | 136 |
/// | concurrency | `limit` at a time | 248 |
///
/// A waiting request takes up to 40 bytes more. For memory, see
/// [`MemoryStore`](store/struct.MemoryStore.html#memory).
///
/// The most in one window: up to 2 x `limit` in a fixed window, in a short time; `limit` in a
/// sliding log; `burst` + `limit` in a token bucket, of which `burst` can come at once, or all of
/// them with [`Refill::Interval`]; `limit` in a leaky bucket, evenly spaced. A
/// [`SlidingWindow`](Algorithm::SlidingWindow) documents its measured excess. [Choosing an
/// algorithm](guide/algorithms/index.html) compares their use, bytes and CPU time.
///
/// A denied request spends nothing. The arithmetic is exact, in microseconds, and the same in
/// memory and in Redis.
///
/// # Exact rates
///
/// A bucket counts in fractions of a microsecond, so that exactly `limit` units are back after one
/// window: with `Quota::per_second(3)`, three in each second. It counts in integers up to 2^53,
/// which is enough for all rates of 1 to 1,000 per second, minute, hour and day.
///
/// Let `size` be the burst plus the overdraft. If `size` x `window` in microseconds / the greatest
/// common divisor of `window` and `limit` is above 2^52, or `limit` divided by that divisor is 2^32
/// or more, the bucket uses the closest slower rate that it can count:
///
/// | `size` | rate |
/// |---|---|
/// | `limit` of up to 1,000 per second, minute, hour or day | exact |
/// | up to 140, with any `window` and a `limit` below 2^32 | exact |
/// | up to 50,000 with a day, 1.2 million with an hour, 4.5 billion with a second | exact |
/// | up to 4.5 million | exact, or slower by less than 10^-9 |
/// | more | exact, or slower by less than `size` x 2.3 x 10^-16: 10^-6 for 2^32, 0.0023 for 10^13 |
///
/// [Large quotas](guide/quotas/index.html#large-quotas) has more. The other algorithms, and
/// [`Refill::Interval`], are exact for all quotas.
///
/// # Changing a quota
///
/// The next check applies the new quota to the state as it is: used units stay used, and are
/// restored at the new rate, from the last admitted request on. The first request that the new
/// quota admits converts the state. A denied request stores nothing, so it changes nothing for
/// another quota of the key. Until a request is admitted, used units count for as long as they
/// would have counted by the old quota, at most.
///
/// A bucket counts at most the debt that 100 years refill.
///
/// Waiting requests keep their instants, and new ones come after them, even if the quota is raised:
/// until the last reserved instant, a new request is denied or has to wait. From then on, the new
/// quota counts. In a leaky bucket, waiting requests take the room of the time until the last of
/// them leaves.
///
/// If a waiting request is dropped after an admitted check with another quota, the sliding log
/// releases its reservation. The fixed window and the sliding window release it if the length of
/// the window is the same. Otherwise, and in the buckets, it can pass unused. See
/// [configuration](guide/configuration/index.html#changes-without-a-restart).
///
/// Another algorithm begins with an empty state. If the first one is chosen again before its state
/// has expired, that state counts.
///
/// With the feature `serde`, an algorithm is its [name](Algorithm::name) as text, or with other
/// settings than the defaults the [fields of a
/// limit](guide/configuration/index.html#settings-in-structs-of-your-own).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Algorithm {
    /// A counter for a window that opens at its first admitted request: the cheapest algorithm.
    ///
    /// A [hold](struct.Limiter.html#method.hold) opens no window. Its end does: held units count in
    /// the window in which their permit ends, so neighbouring windows can have 1 and 19 requests of
    /// a limit of 10, by the instants at which they were admitted.
    ///
    /// Across the boundary of two windows, up to twice the limit can pass in a short time. With
    /// 1000 per 3 s, all of these requests are admitted, 1980 of them within 3 s:
    ///
    /// ```text
    /// second       0    1    2  |  3    4    5
    /// requests    10   10  980  | 900  100    0
    ///             window 1      | window 2
    /// ```
    FixedWindow,

    /// The instant of each admitted request: exact in any interval of length `window`. The interval
    /// is open at its old end: a request that was admitted exactly one window ago does not count.
    ///
    /// Each entry takes 16 to 32 bytes in memory. In Redis it takes 11, and up to 48 with the room
    /// that a string gets to grow; 14 to 64 if a cost of the key is 2^32 or more. A key has up to
    /// `limit` entries, and one for each waiting request; requests that are admitted in the same
    /// microsecond share an entry.
    ///
    /// A check reads up to as many entries as its cost. A peek reads the entries that have left the
    /// window since the last admitted request. So for limits above some thousands, use a sliding
    /// window or a token bucket.
    ///
    /// If Redis loses the key, such as by an eviction, a restart or a
    /// [failover](guide/redis_failovers/index.html), up to `limit` more are admitted in this
    /// window.
    SlidingLog,

    /// An estimate of the sliding log from counters: the counts of the sub-windows inside the
    /// window, and that of the oldest one weighted by its overlap.
    ///
    /// The estimate assumes that the requests of the oldest sub-window are evenly spread, and can
    /// admit more than the log. The maximum measured in a window, as a multiple of a `limit` of
    /// 1000:
    ///
    /// | `buckets` | 1 | 4 | 10 | 60 |
    /// |---|---|---|---|---|
    /// | at random instants, one request at a time | 1.04 | 1.03 | 1.02 | 1.01 |
    /// | at random instants, 100 at a time | 1.31 | 1.20 | 1.11 | 1.09 |
    /// | a client that sends everything right before a sub-window ends | 2.0 | 2.0 | 2.0 | 2.0 |
    ///
    /// It can also admit less: with a limit of 1 and one bucket, one request in two windows.
    #[non_exhaustive]
    SlidingWindow {
        /// The number of sub-windows in a window, 1 to 100. One is the well-known form with two
        /// counters.
        buckets: u32,
    },

    /// A bucket that starts full with `burst` tokens and refills at `limit` per `window`.
    ///
    /// With continuous refill this is GCRA (the generic cell rate algorithm of the ATM Forum's
    /// Traffic Management specification): the state is equivalent to one instant, the theoretical
    /// arrival time, at which the bucket will be full again. Each admitted token moves it later by
    /// `window` / `limit`. A request that would move it further ahead than `burst` such steps is
    /// denied.
    #[non_exhaustive]
    TokenBucket {
        /// The way in which tokens are refilled.
        refill: Refill,
        /// The tokens that may be spent before they are refilled: a request is admitted when the
        /// balance is at least `max(cost - overdraft, 0)`. Later requests wait until the debt is
        /// repaid.
        overdraft: u64,
    },

    /// A bucket with a constant outflow: a shaper. An admitted request may proceed after
    /// [`Decision::delay`](struct.Decision.html#method.delay). At most `burst` requests are in the
    /// bucket, including the one that is leaving; further ones are denied. So for `n` requests that
    /// wait, the burst is `n + 1`.
    ///
    /// [`Limiter::check`](struct.Limiter.html#method.check) returns at once, and does not wait for
    /// the delay. [`try_acquire`](struct.Limiter.html#method.try_acquire),
    /// [`acquire`](struct.Limiter.html#method.acquire) and a [layer](struct.RateLimitLayer.html)
    /// wait.
    ///
    /// The n-th departure of a busy period is at its start + n x `window` / `limit`, rounded up to
    /// a microsecond. So departures are at least `window` / `limit`, rounded down, apart per unit
    /// of cost. The last request in a full bucket waits (`burst` - 1) x `window` / `limit`: with
    /// `Quota::per_hour(100)`, 59 minutes and 24 seconds.
    LeakyBucket,

    /// At most `limit` units at a time, however long each is held: requests in flight, open
    /// streams, running jobs. Its quota is [`Quota::concurrent`]. A request takes its units with
    /// [`Limiter::hold`](struct.Limiter.html#method.hold), and the end of its permit makes them
    /// available again. A [layer](struct.RateLimitLayer.html) holds them to the end of the response
    /// body.
    ///
    /// A process that crashes keeps its units from others for up to a
    /// [lifetime](struct.Limiter.html#method.hold_lifetime) of a hold. See
    /// [concurrency](guide/concurrency/index.html).
    Concurrency,
}

/// The way in which a token bucket is refilled. With the feature `serde`, it is read and written as
/// `"continuous"` or `"interval"`.
///
/// # Examples
///
/// ```
/// use tower_ratelimit::{Algorithm, config::Refill};
///
/// // All tokens of an hour together:
/// let hourly = Algorithm::token_bucket().refill(Refill::Interval);
/// assert_ne!(hourly, Algorithm::token_bucket());
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Refill {
    /// A token every `window / limit`.
    #[default]
    Continuous,
    /// `limit` tokens together, every `window` from the first request on. In any time t, it admits
    /// at most `burst` + `overdraft` + `limit` for each window that has begun. A full burst can be
    /// spent right before a refill, and another one right after it.
    Interval,
}

impl Algorithm {
    /// Every algorithm, with its default settings.
    pub const ALL: &[Self] = &[
        Self::FixedWindow,
        Self::sliding_window(),
        Self::SlidingLog,
        Self::token_bucket(),
        Self::LeakyBucket,
        Self::Concurrency,
    ];

    /// Returns a [fixed window](Algorithm::FixedWindow).
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let store = MemoryStore::new();
    /// let quota = Quota::per_day(1_000);
    /// let limiter = Limiter::new("day", store, Algorithm::fixed_window(), quota);
    /// assert_eq!(limiter.check("alice").await?.remaining(), 999);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub const fn fixed_window() -> Self {
        Self::FixedWindow
    }

    /// Returns a [sliding log](Algorithm::SlidingLog).
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let store = MemoryStore::new();
    /// let quota = Quota::per_minute(5);
    /// let limiter = Limiter::new("login", store, Algorithm::sliding_log(), quota);
    /// assert_eq!(limiter.check("alice").await?.remaining(), 4);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub const fn sliding_log() -> Self {
        Self::SlidingLog
    }

    /// Returns a [sliding window](Algorithm::SlidingWindow) in its well-known form, with two
    /// counters: of one [bucket](Self::buckets).
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let store = MemoryStore::new();
    /// let quota = Quota::per_hour(5_000);
    /// let limiter = Limiter::new("api", store, Algorithm::sliding_window(), quota);
    /// assert_eq!(limiter.check("alice").await?.remaining(), 4_999);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub const fn sliding_window() -> Self {
        Self::SlidingWindow { buckets: 1 }
    }

    /// Returns a [token bucket](Algorithm::TokenBucket) with continuous [refill](Self::refill) and
    /// no [overdraft](Self::overdraft).
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let store = MemoryStore::new();
    /// let quota = Quota::per_second(10).burst(20);
    /// let limiter = Limiter::new("api", store, Algorithm::token_bucket(), quota);
    /// assert_eq!(limiter.check("alice").await?.remaining(), 19);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub const fn token_bucket() -> Self {
        Self::TokenBucket { refill: Refill::Continuous, overdraft: 0 }
    }

    /// Returns a [leaky bucket](Algorithm::LeakyBucket).
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let store = MemoryStore::new();
    /// let quota = Quota::per_second(10).burst(5);
    /// let limiter = Limiter::new("printer", store, Algorithm::leaky_bucket(), quota);
    /// let _ = limiter.acquire("alice", 1).await?; // at once
    /// let _ = limiter.acquire("alice", 1).await?; // 100 ms later
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub const fn leaky_bucket() -> Self {
        Self::LeakyBucket
    }

    /// Returns a limit on [concurrency](Algorithm::Concurrency).
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let store = MemoryStore::new();
    /// let limiter = Limiter::new("jobs", store, Algorithm::concurrency(), Quota::concurrent(1));
    /// let job = limiter.hold("alice", 1).await?.admitted();
    /// assert!(!limiter.hold("alice", 1).await?.is_admitted());
    /// drop(job);
    /// assert!(limiter.hold("alice", 1).await?.is_admitted());
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub const fn concurrency() -> Self {
        Self::Concurrency
    }

    /// Sets the number of sub-windows in a window of a sliding window, 1 to 100. With more of them,
    /// the estimate is closer to a sliding log. A [`Limiter`](struct.Limiter.html) checks the
    /// number.
    ///
    /// # Panics
    ///
    /// If this is no [sliding window](Algorithm::sliding_window).
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::Algorithm;
    ///
    /// const TENTHS: Algorithm = Algorithm::sliding_window().buckets(10);
    /// # let _ = TENTHS;
    /// ```
    #[must_use]
    #[track_caller]
    pub const fn buckets(self, buckets: u32) -> Self {
        match self {
            Self::SlidingWindow { .. } => Self::SlidingWindow { buckets },
            _ => panic!("only a sliding window has buckets: call `Algorithm::sliding_window()`"),
        }
    }

    /// Sets the way in which a token bucket is refilled.
    ///
    /// # Panics
    ///
    /// If this is no [token bucket](Algorithm::token_bucket).
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{Algorithm, config::Refill};
    ///
    /// const HOURLY: Algorithm = Algorithm::token_bucket().refill(Refill::Interval);
    /// # let _ = HOURLY;
    /// ```
    #[must_use]
    #[track_caller]
    pub const fn refill(self, refill: Refill) -> Self {
        match self {
            Self::TokenBucket { overdraft, .. } => Self::TokenBucket { refill, overdraft },
            _ => panic!("only a token bucket has a refill: call `Algorithm::token_bucket()`"),
        }
    }

    /// Sets the tokens of a token bucket that may be spent before they are refilled. A
    /// [`Limiter`](struct.Limiter.html) checks the number.
    ///
    /// # Panics
    ///
    /// If this is no [token bucket](Algorithm::token_bucket).
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let store = MemoryStore::new();
    /// let algorithm = Algorithm::token_bucket().overdraft(50);
    /// let limiter = Limiter::new("api", store, algorithm, Quota::per_minute(10));
    /// assert!(limiter.check("alice").cost(60).await?.is_allowed()); // 50 in advance
    /// assert!(!limiter.check("alice").await?.is_allowed());
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    #[track_caller]
    pub const fn overdraft(self, overdraft: u64) -> Self {
        match self {
            Self::TokenBucket { refill, .. } => Self::TokenBucket { refill, overdraft },
            _ => panic!("only a token bucket has an overdraft: call `Algorithm::token_bucket()`"),
        }
    }

    /// Returns the name, as it is printed, read and used in the keys of a store.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::Algorithm;
    ///
    /// assert_eq!(Algorithm::token_bucket().name(), "token-bucket");
    /// assert_eq!("sliding-log".parse(), Ok(Algorithm::sliding_log()));
    /// ```
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::FixedWindow => "fixed-window",
            Self::SlidingLog => "sliding-log",
            Self::SlidingWindow { .. } => "sliding-window",
            Self::TokenBucket { .. } => "token-bucket",
            Self::LeakyBucket => "leaky-bucket",
            Self::Concurrency => "concurrency",
        }
    }
}

/// Returns the units to reserve for the end of a block, so that one request proceeds then, and
/// the others at the rate. `late` is the time from that end until the key is in its initial
/// state. Windows have no rate: their restart takes a window, which must not be longer than the
/// block.
pub fn restart_units(algorithm: Algorithm, quota: Quota, block: Duration, late: Duration) -> u64 {
    match algorithm {
        Algorithm::TokenBucket { refill: Refill::Continuous, overdraft } => {
            let missing = late.as_micros() * u128::from(quota.limit());
            let missing = missing.div_ceil(quota.window().as_micros());
            let left = u128::from(quota.burst_size()).saturating_sub(missing) as u64;
            // A bucket with an overdraft admits a request when it is empty.
            left.saturating_sub(u64::from(overdraft == 0))
        }
        Algorithm::LeakyBucket | Algorithm::Concurrency => 0,
        _ if quota.window() > block || !late.is_zero() => 0,
        _ => quota.limit() - 1,
    }
}

/// Returns the algorithm for a quota that was reduced to a fraction.
pub fn scaled(algorithm: Algorithm, fraction: f64, quota: Quota) -> Algorithm {
    match algorithm {
        Algorithm::TokenBucket { refill, overdraft } => {
            let overdraft = (overdraft as f64 * fraction) as u64;
            // The limit can be rounded down further: then the overdraft takes too long to
            // refill.
            Algorithm::TokenBucket { refill, overdraft: overdraft.min(quota.max_overdraft()) }
        }
        other => other,
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Reads a [name](Algorithm::name); the settings are the defaults.
impl FromStr for Algorithm {
    type Err = QuotaError;

    fn from_str(name: &str) -> Result<Self, QuotaError> {
        let mut all = Self::ALL.iter().copied();
        all.find(|algorithm| algorithm.name() == name)
            .ok_or_else(|| QuotaError::UnknownAlgorithm { name: name.to_owned() })
    }
}

/// Converts a duration into microseconds, rounded up.
pub fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_nanos().div_ceil(1_000)).unwrap_or(i64::MAX)
}
