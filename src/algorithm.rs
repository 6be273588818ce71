//! The algorithms: what each promises, and the door to the engine, which decides. Each has a model
//! in two languages, `algorithm/NAME.rs` and `scripts/NAME.lua`, with the same functions in the
//! same order. Both count in doubles that hold integers below 2^53, so that they agree to the bit.

mod arithmetic;
mod combine;
mod engine;
mod fixed_window;
mod leaky_bucket;
mod model;
mod packed;
mod request;
mod reservations;
mod sliding_log;
mod sliding_window;
mod state_bytes;
mod table;
#[cfg(test)]
mod tests;
mod token_bucket;

use std::{fmt, str::FromStr, time::Duration};

#[cfg(feature = "redis")]
pub(crate) use self::table::SOURCES;
pub(crate) use self::{
    combine::combine,
    packed::{INITIAL, Packed},
    request::{Action, EngineReply, EngineRequest, Release},
    table::{Params, State},
    token_bucket::FastCheck,
};
use crate::error::ConfigError;

/// How requests are counted. [`token_bucket`](Algorithm::token_bucket) is a good first choice.
///
/// | algorithm | promise | state of a key | at a boundary |
/// |---|---|---|---|
/// | fixed window | `limit` in a window that opens at its first admitted request | four numbers | up to 2 x `limit` in a short time |
/// | sliding log | `limit` in *any* interval of length `window` | an entry per admitted request | exact |
/// | sliding window | the sliding log's estimate, from counters | `buckets` + 1 counters | see [`SlidingWindow`](Algorithm::SlidingWindow) |
/// | token bucket | `burst` + `overdraft` + `limit` x t / `window` in any time t | seven numbers | smooth, or see [`Refill`] |
/// | leaky bucket | departures `window` / `limit` apart, `burst` requests in the bucket | five numbers | evenly spaced |
///
/// A denied request spends nothing. All arithmetic is exact, in microseconds, and the same in memory
/// and in Redis.
///
/// # Exact rates
///
/// A bucket counts in fractions of a microsecond, so that exactly `limit` units are back after one window: with
/// `Quota::per_second(3)`, three in each second. It counts in integers up to 2^53, which is enough for all rates of 1 to 1,000
/// per second, minute, hour and day. Beyond, where `size` (the burst and the overdraft) x `window` in microseconds /
/// the greatest common divisor of `window` and `limit` is above 2^52, the rate is the closest slower one that can be
/// counted:
///
/// | `size` | rate |
/// |---|---|
/// | `limit` of up to 1,000 per second, minute, hour or day | exact |
/// | up to 140 with any `limit` and `window`; 50,000 with a day, 1.2 million with an hour, 4.5 billion with a second | exact |
/// | up to 4.5 million | exact, or slower by less than 10^-9 |
/// | more | exact, or slower by less than `size` x 2.3 x 10^-16, so by 10^-6 at most |
///
/// # Changing a quota
///
/// The next check applies the new quota to the state as it is: what was used stays used, and it is
/// given back at the new rate. The first check that finds another quota converts the state and stores it, also if it
/// denies. Requests that are waiting keep their instants, but do not return their reservation if they are dropped
/// later, except in a sliding log. A change of algorithm starts afresh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Algorithm {
    /// A counter for a window that opens at its first admitted request: the cheapest.
    ///
    /// Across the boundary of two windows up to twice the limit can pass in a short time. With 1000
    /// per 3 s, requests that arrive like this are all admitted, 1980 of them within 3 s:
    ///
    /// ```text
    /// second       0    1    2  |  3    4    5
    /// requests    10   10  980  | 900  100    0
    ///             window 1      | window 2
    /// ```
    FixedWindow,

    /// The instant of each admitted request: exact in any interval of length `window`, open at its
    /// old end: what was admitted exactly one window ago has left.
    ///
    /// It costs 16 to 32 bytes in memory, and 13 in Redis, for each request that it remembers: up to `limit` of them per
    /// key, and those that wait.
    /// Requests that are admitted in the same microsecond share an entry.
    /// A check reads up to as many entries as its cost, and a peek those that have left the window since the last admitted
    /// request: for limits above some thousands take a sliding window or a token bucket.
    SlidingLog,

    /// The log's estimate from counters: the counts of the sub-windows inside the window, and that of
    /// the oldest one weighted by its overlap.
    ///
    /// The estimate takes the requests of the oldest sub-window as evenly spread, and can admit more
    /// than the log. The most that was measured in a window, as a multiple of `limit`, which was 1000:
    ///
    /// | `buckets` | 1 | 4 | 10 | 60 |
    /// |---|---|---|---|---|
    /// | at random instants, one request at a time | 1.04 | 1.03 | 1.02 | 1.01 |
    /// | at random instants, 100 at a time | 1.31 | 1.20 | 1.11 | 1.09 |
    /// | by somebody who sends everything right before a sub-window ends | 2.0 | 2.0 | 2.0 | 2.0 |
    ///
    /// It can also admit less: with a limit of 1 and one bucket, one request in two windows.
    SlidingWindow {
        /// The sub-windows that a window is divided into, 1 to 100. One is the well-known form with
        /// two counters.
        buckets: u32,
    },

    /// A bucket that starts full with `burst` tokens and refills at `limit` per `window`.
    ///
    /// With continuous refill this is GCRA (the generic cell rate algorithm of the ATM Forum's
    /// Traffic Management specification): what is stored is in effect one instant, the theoretical
    /// arrival time.
    TokenBucket {
        /// How tokens come back.
        refill: Refill,
        /// The tokens that may be spent before they are there: a request is admitted when the balance
        /// is at least `max(cost - overdraft, 0)`. Those who come later wait for the debt.
        overdraft: u32,
    },

    /// A bucket with a constant outflow: a shaper. An admitted request may go on after
    /// [`Decision::delay`](crate::Decision::delay); at most `burst` are in the bucket, the one that is
    /// leaving included: so many can wait, and the next one is denied.
    ///
    /// The n-th departure of a busy period is at its start + n x `window` / `limit`, rounded up to a microsecond; so
    /// neighbours are at least `window` / `limit`, rounded down, apart per unit of cost. The last request in a
    /// full bucket waits (`burst` - 1) x `window` / `limit`: with `Quota::per_hour(100)`, 59 minutes and 24 seconds.
    LeakyBucket,
}

/// How a token bucket refills.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Refill {
    /// A token every `window / limit`.
    #[default]
    Continuous,
    /// `limit` tokens at once, every `window` from the first request on: in any time t at most `burst` +
    /// `overdraft` + `limit` for each window that has begun. Right before such an instant a full burst can
    /// be spent, and right after it another one.
    Interval,
}

impl Algorithm {
    /// A token bucket with continuous refill and no overdraft.
    #[must_use]
    pub const fn token_bucket() -> Self {
        Self::TokenBucket { refill: Refill::Continuous, overdraft: 0 }
    }

    /// A sliding window in its well-known form, with two counters.
    #[must_use]
    pub const fn sliding_window() -> Self {
        Self::SlidingWindow { buckets: 1 }
    }

    /// The name, as it is printed, read and used in the keys of a store.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::FixedWindow => "fixed-window",
            Self::SlidingLog => "sliding-log",
            Self::SlidingWindow { .. } => "sliding-window",
            Self::TokenBucket { .. } => "token-bucket",
            Self::LeakyBucket => "leaky-bucket",
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Reads a [name](Algorithm::name); the settings are the defaults.
impl FromStr for Algorithm {
    type Err = ConfigError;

    fn from_str(name: &str) -> Result<Self, ConfigError> {
        let all = [
            Self::FixedWindow,
            Self::SlidingLog,
            Self::sliding_window(),
            Self::token_bucket(),
            Self::LeakyBucket,
        ];
        all.into_iter()
            .find(|algorithm| algorithm.name() == name)
            .ok_or_else(|| ConfigError::UnknownAlgorithm { name: name.to_owned() })
    }
}

/// A duration in microseconds, rounded up.
pub(crate) fn micros(duration: Duration) -> f64 {
    duration.as_nanos().div_ceil(1_000) as f64
}
