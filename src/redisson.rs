//! A limiter shared with Java services: `RRateLimiter` of [Redisson](https://redisson.pro), in
//! Redisson's own format. The limiters of this crate's format are in [`Limiter`](crate::Limiter).
//!
//! Java and Rust services draw from one limit, for example while a service moves from Java to Rust.
//! Keys, fields and bytes are those of Redisson 3.21 to 4.7, so Java clients work without any
//! change. This crate also reads entries that older releases wrote (since 3.13.3).
//!
//! ```no_run
//! use std::time::Duration;
//! use tower_ratelimit::{RedisStore, redisson::{RateLimiter, RateLimiterConfig}};
//!
//! # async fn run() -> Result<(), Box<dyn std::error::Error>> {
//! let store = RedisStore::connect("redis://127.0.0.1/").await?;
//! let limiter = RateLimiter::new(store, "LIMITER_NAME");
//! // 5 permits per 10 s, unless a rate is set already.
//! let rate = RateLimiterConfig::overall(5, Duration::from_secs(10));
//! limiter.try_set_rate(rate).await?;
//! // Waits for up to a minute.
//! if limiter.try_acquire(1, Duration::from_secs(60)).await?.is_allowed() {
//!     println!("go");
//! }
//! # Ok(())
//! # }
//! ```
//!
//! The limiter is a sliding log: it admits at most `rate` permits in *any* interval, open at its
//! old end. Where no Java service takes part, use a [`Limiter`](crate::Limiter) with
//! [`SlidingLog`](crate::Algorithm::SlidingLog): it makes the same decisions with an eighth of the
//! memory, serves waiting requests of all processes in order, and has a count for each key.
//!
//! # In a layer
//!
//! A [`RateLimitLayer`](crate::RateLimitLayer) and a [`Charge`](crate::Charge) accept it like a
//! [`Limiter`](crate::Limiter). If the name is a template, each key has a separate limiter: see
//! [`for_key`](RateLimiter::for_key). With `max_wait`, a request that waits retries after the
//! returned delay, as [`try_acquire`](RateLimiter::try_acquire) does. This limiter cannot be
//! charged together with other limits, and cannot be settled with more units than were charged.
//!
//! ```no_run
//! use std::time::Duration;
//! use tower_ratelimit::{
//!     RateLimitLayer, RedisStore, key, redisson::{RateLimiter, RateLimiterConfig},
//! };
//!
//! # async fn run() -> Result<(), Box<dyn std::error::Error>> {
//! let store = RedisStore::connect("redis://127.0.0.1/").await?;
//! let limiter = RateLimiter::new(store, "api:{key}").label("api");
//! let rate = RateLimiterConfig::overall(5, Duration::from_secs(10));
//! limiter.try_set_rate(rate).await?;
//! let layer = RateLimitLayer::new(limiter, |head: &http::request::Parts| {
//!     Some(head.headers.get("x-user")?.to_str().ok()?.to_owned()) // `api:alice`
//! });
//! # let _ = layer;
//! # Ok(())
//! # }
//! ```
//!
//! # Coming from Redisson
//!
//! | `RRateLimiter` | [`RateLimiter`] | Differences |
//! |---|---|---|
//! | `redisson.getRateLimiter(name)` | [`new`](RateLimiter::new) | rejects some names [^1] |
//! | `trySetRate(type, rate, interval)` | [`try_set_rate`] | ignores an orphaned `value` [^2] |
//! | the same with `keepAlive` | [`keep_alive`], then [`try_set_rate`] | |
//! | `setRate(type, rate, interval)` | [`set_rate`] | also deletes the other type's state |
//! | `updateRate(args)` with `keepState` | [`update_rate`] | a lower rate forgets no debt |
//! | `getConfig()` | [`config`] | `None` where Java returns zeros or an error |
//! | `tryAcquire()`, `tryAcquire(n)` | [`try_acquire`]`(n, Duration::ZERO)` | typed errors [^3] |
//! | `tryAcquire(n, timeout)` | [`try_acquire`]`(n, timeout)` | a denial is immediate [^4] |
//! | `acquire()`, `acquire(n)` | [`acquire`]`(n)` | a dropped future releases the permits |
//! | `availablePermits()` | [`available_permits`] | writes nothing |
//! | `release(n)` | [`release`]`(n)` | credits the permits only once [^5] |
//! | `expire(duration)` | [`expire`] | |
//! | `clearExpire()` | [`clear_expire`] | |
//! | `remainTimeToLive()` | [`remaining_ttl`] | an `Option` instead of -1 and -2 |
//! | `delete()` | [`delete`] | |
//! | `RateType.OVERALL`, `PER_CLIENT` | [`overall`], [`per_client`] | a client is a process: see [`client_id`] |
//!
//! [^1]: Names whose keys would be in several slots of a cluster.
//!
//! [^2]: A `value` that a deleted limiter left behind.
//!
//! [^3]: For an `n` that is 0 or above the rate.
//!
//! [^4]: If the timeout is too short, the denial is immediate; Java sleeps for all of the timeout.
//! No value means "wait without a timeout"; use `acquire`.
//!
//! [^5]: It removes them from the log, from which they would otherwise return a second time.
//!
//! [`acquire`]: RateLimiter::acquire
//! [`available_permits`]: RateLimiter::available_permits
//! [`clear_expire`]: RateLimiter::clear_expire
//! [`client_id`]: RateLimiter::client_id
//! [`config`]: RateLimiter::config
//! [`delete`]: RateLimiter::delete
//! [`expire`]: RateLimiter::expire
//! [`keep_alive`]: RateLimiter::keep_alive
//! [`overall`]: RateLimiterConfig::overall
//! [`per_client`]: RateLimiterConfig::per_client
//! [`release`]: RateLimiter::release
//! [`remaining_ttl`]: RateLimiter::remaining_ttl
//! [`set_rate`]: RateLimiter::set_rate
//! [`try_acquire`]: RateLimiter::try_acquire
//! [`try_set_rate`]: RateLimiter::try_set_rate
//! [`update_rate`]: RateLimiter::update_rate
//!
//! Java clients behave as before, including the faults of their own scripts. The next call from
//! this crate repairs the effects of these faults:
//!
//! * **The log decides.** The permits left are always the rate minus the permits in the log, and
//!   each call sets `value` to that. This repairs a `value` that was evicted, that `release`
//!   credited twice, or that an `EVAL` executed twice has lowered. A rate changed with `redis-cli`
//!   applies from the next call on.
//! * **If the log is evicted**, the permits that are used according to `value` count as taken now,
//!   for one interval, up to 2^31 - 1 permits. If a Java client adds to the log first, they are
//!   forgotten. If both keys are evicted, the limiter starts empty. The same delay can follow
//!   without an eviction: the limiter is idle, Java calls `availablePermits()`, and the rate is
//!   then raised with `redis-cli` or by a template. The added permits are available one interval
//!   later.
//! * **The clock is that of Redis**; Java writes the clock of its host. If the clock of a host is
//!   ahead, its entries stay longer by the difference. A call from this crate limits that to three
//!   intervals after it has found them, or four while earlier entries are still to expire. If other
//!   entries are added among them, the time restarts. New entries are scored no earlier than the
//!   newest one, unless that is ahead by more than an interval, so that the host does not drop them
//!   too early. If the clock of a host is behind, its entries leave earlier by the difference. This
//!   crate has no influence on the entries that a Java host with a wrong clock drops, or on the
//!   permits that it grants: Java hosts need NTP, as they do without this crate.
//! * **If the rate is lowered** below the permits that count, `value` becomes negative; Redisson's
//!   scripts treat that as used up. If the rate is raised, the added permits are available
//!   immediately. If the interval is made longer, permits that have left the shorter one do not
//!   return.
//! * **If the type changes**, the count starts at zero. The count of the old type is kept for one
//!   interval, in case the type is changed back.
//! * **An acquire counts once**, because its random id identifies a script that is executed twice.
//!   A release that is executed twice releases twice, but never more than was taken.
//! * **Expired entries** are dropped in steps of at most 1,000, or all in one step if few entries
//!   remain, so that Redis does not stall. A log is read once; later, only its changes are read. If
//!   Java changed more than 1,000 entries of a long log, a call takes one round trip for each
//!   1,000. The store's [deadline](crate::store::RedisConfig::deadline) applies to all of them
//!   together. If it passes, the next call continues where this one stopped. Only
//!   `available_permits` starts again, because it writes nothing.
//! * **The retry delay is exact.** Java instead reports when the oldest entry expires, plus 3 ms,
//!   even if that frees too few permits. If more than 1,000 entries must expire first, the delay
//!   ends when 1,000 have.
//!
//! # Keys
//!
//! * `name`: a hash with `rate`, `interval`, `type` and `keepAliveTime`
//! * `{name}:value`: the permits left
//! * `{name}:permits`: the log, one entry of 21 bytes for each acquire (about 130 bytes in Redis)
//!
//! For a rate [per client](RateLimiterConfig::per_client), `:` and the id of the client follow the
//! last two. A name that contains a `{` gets no braces: `api:{42}:value`. So `x` and `{x}` are two
//! hashes that share their other keys: do not use both. The store's
//! [`prefix`](crate::store::RedisConfig::prefix) has no effect here.
//!
//! This crate adds a key and a field:
//!
//! * `{name}:tally`, if the log has more than 8 entries, or if a clock is ahead by more than two
//!   intervals. With this key, a decision is as fast as with a short log. The key expires by
//!   itself, and can be lost without harm, even if Java changes or deletes the log.
//! * `template`, a field of the hash, if the limiter inherited the rate of a
//!   [template](RateLimiter::for_key). Java ignores it.
//!
//! # Expiry
//!
//! As with Redisson:
//!
//! * [`expire`] and [`delete`] apply to all keys of the limiter. Of the keys per client, they apply
//!   to those of this client.
//! * An acquire gives the other keys the time to live of the hash.
//! * A limiter with a [`keep_alive`] time expires after that time without a call. Denied calls
//!   count too.
//!
//! Otherwise `{name}:value` and `{name}:permits` do not expire: entries that Java adds would expire
//! too early together with them. The keys of a client expire at the latest an interval after its
//! last acquire, so that the keys of ended processes do not accumulate. If the interval is then
//! made longer, permits that the client took earlier still expire after the shorter interval; a new
//! acquire before that instant prevents this.
//!
//! # Permissions
//!
//! The limiter uses the commands `DECRBY DEL EVAL EVALSHA GET HDEL HMGET HSET PERSIST PEXPIRE PTTL
//! SET SETRANGE TIME UNLINK EXISTS ZADD ZCARD ZCOUNT ZRANGE ZRANK ZREM ZREMRANGEBYRANK ZSCORE`.

mod acquire;
mod script;
mod target;
mod template;
#[cfg(test)]
mod tests;

use std::{
    fmt,
    sync::{Arc, Mutex, atomic::AtomicBool},
    time::{Duration, Instant},
};

use tower_ratelimit_redisson::{
    Keys, Script, process_id,
    status::{AGAIN, DONE, NO_RATE},
};

use self::script::{by_hash, sent};
pub use crate::error::RateLimiterError;
use crate::{
    error::Error,
    observe::LimiterObservers,
    store::{Deadline, RedisStore, StoreCalls, StoreFuture},
    sync::lock,
};

const MAX_INTERVAL: Duration = Duration::from_secs(36_525 * 86_400);
/// Numbers in Lua are doubles, which represent all integers up to this one exactly.
const MAX_RATE: u64 = 1 << 53;

/// The rate of a limiter: the number of permits in any interval, of all clients or of each.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::redisson::RateLimiterConfig;
///
/// let rate = RateLimiterConfig::overall(5, Duration::from_secs(10));
/// assert_eq!((rate.rate(), rate.interval()), (5, Duration::from_secs(10)));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use = "it does nothing until a limiter sets it"]
pub struct RateLimiterConfig {
    is_per_client: bool,
    rate: u64,
    interval: Duration,
    keep_alive: Option<Duration>,
}

impl RateLimiterConfig {
    /// Creates a rate that all clients share: Java's `RateType.OVERALL`.
    ///
    /// The methods that [set](RateLimiter::try_set_rate) a rate check it: 1 to 2^53 permits in 1 ms
    /// to 100 years. They count the interval in milliseconds, rounded up.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_ratelimit::redisson::RateLimiterConfig;
    ///
    /// let config = RateLimiterConfig::overall(10, Duration::from_secs(1));
    /// assert_eq!((config.rate(), config.interval()), (10, Duration::from_secs(1)));
    /// ```
    pub const fn overall(rate: u64, interval: Duration) -> Self {
        Self { is_per_client: false, rate, interval, keep_alive: None }
    }

    /// Creates a rate that each [client](RateLimiter::client_id) has separately: Java's
    /// `RateType.PER_CLIENT`. The numbers are those of [`overall`](Self::overall).
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_ratelimit::redisson::RateLimiterConfig;
    ///
    /// let config = RateLimiterConfig::per_client(10, Duration::from_secs(1));
    /// assert!(config.is_per_client());
    /// ```
    pub const fn per_client(rate: u64, interval: Duration) -> Self {
        Self { is_per_client: true, ..Self::overall(rate, interval) }
    }

    /// Returns whether each client has the rate separately.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_ratelimit::redisson::RateLimiterConfig;
    ///
    /// assert!(!RateLimiterConfig::overall(10, Duration::from_secs(1)).is_per_client());
    /// ```
    #[must_use]
    pub const fn is_per_client(&self) -> bool {
        self.is_per_client
    }

    /// Returns the maximum number of permits in any interval.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_ratelimit::redisson::RateLimiterConfig;
    ///
    /// assert_eq!(RateLimiterConfig::overall(10, Duration::from_secs(1)).rate(), 10);
    /// ```
    #[must_use]
    pub const fn rate(&self) -> u64 {
        self.rate
    }

    /// Returns the interval. Redis stores it in whole milliseconds.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_ratelimit::redisson::RateLimiterConfig;
    ///
    /// let config = RateLimiterConfig::overall(10, Duration::from_secs(1));
    /// assert_eq!(config.interval(), Duration::from_secs(1));
    /// ```
    #[must_use]
    pub const fn interval(&self) -> Duration {
        self.interval
    }

    /// Returns the time without a call after which the limiter expires, or `None` if it does not:
    /// what [`RateLimiter::keep_alive`] has set.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_ratelimit::redisson::RateLimiterConfig;
    ///
    /// let config = RateLimiterConfig::overall(10, Duration::from_secs(1));
    /// assert_eq!(config.keep_alive(), None); // a limiter in Redis may have one
    /// ```
    #[must_use]
    pub const fn keep_alive(&self) -> Option<Duration> {
        self.keep_alive
    }
}

/// A limiter shared with Java services. The [module](self) describes how both sides work together.
///
/// The rate is stored in Redis, and the first client sets it. Limiters with the same name and the
/// same Redis share one count, also across stores and processes.
///
/// # Examples
///
/// ```no_run
/// # use std::time::Duration;
/// # use tower_ratelimit::{RedisStore, redisson::{RateLimiter, RateLimiterConfig}};
/// # #[tokio::main]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let store = RedisStore::connect("redis://127.0.0.1/").await?;
/// # let limiter = RateLimiter::new(store, "shared");
/// limiter.try_set_rate(RateLimiterConfig::overall(10, Duration::from_secs(1))).await?;
/// if limiter.try_acquire(1, Duration::from_millis(500)).await?.is_allowed() {
///     println!("go");
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct RateLimiter {
    store: RedisStore,
    keys: Arc<Keys>,
    keep_alive: Option<Duration>,
    /// The name in headers and decisions.
    pub(crate) label: &'static str,
    /// The template from which this limiter of a key inherits the rate.
    template: Option<Arc<Self>>,
    /// The rate of a template as last read, and the time of reading.
    cached_rate: Arc<Mutex<Option<(Instant, RateLimiterConfig)>>>,
    /// True if the rate was per client in an earlier call, so that the script needs all keys.
    is_per_client: Arc<AtomicBool>,
    observers: LimiterObservers,
}

/// The default name in headers and decisions.
const LABEL: &str = "redisson";

impl RateLimiter {
    /// Creates a limiter with the name that Java passes to `getRateLimiter`. Sends no command.
    ///
    /// # Panics
    ///
    /// If [`try_new`](RateLimiter::try_new) returns an error.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # use tower_ratelimit::{RedisStore, redisson::RateLimiter};
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let store = RedisStore::connect("redis://127.0.0.1/").await?;
    /// let limiter = RateLimiter::new(store, "shared");
    /// # let _ = limiter;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    #[track_caller]
    pub fn new(store: RedisStore, name: &str) -> Self {
        match Self::try_new(store, name) {
            Ok(limiter) => limiter,
            Err(error) => panic!("{error}"),
        }
    }

    /// Creates a limiter like [`new`](RateLimiter::new), for a name that is not a literal.
    ///
    /// # Errors
    ///
    /// [`RateLimiterError::Slots`] if the name is empty, or if its keys would be in several slots
    /// of a Redis Cluster. A valid name has no braces, or has text in the first pair of them:
    /// `a}b`, `x{y` and `{}z` are rejected.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # use tower_ratelimit::{RedisStore, redisson::RateLimiter};
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let store = RedisStore::connect("redis://127.0.0.1/").await?;
    /// let name = std::env::args().nth(1).unwrap_or_else(|| "shared".to_owned());
    /// let limiter = RateLimiter::try_new(store, &name)?;
    /// # let _ = limiter;
    /// # Ok(())
    /// # }
    /// ```
    pub fn try_new(store: RedisStore, name: &str) -> Result<Self, RateLimiterError> {
        let keys = Arc::new(keys_of(name, process_id())?);
        let observers = LimiterObservers::new(store.observers(), LABEL);
        Ok(Self {
            store,
            keys,
            keep_alive: None,
            label: LABEL,
            template: None,
            cached_rate: Arc::default(),
            is_per_client: Arc::default(),
            observers,
        })
    }

    /// Sets the id of this client, for a rate [per client](RateLimiterConfig::per_client). The
    /// default is a random UUID of the process. Limiters with the same id are one client.
    ///
    /// No Java client may have the same id, because this crate lets the keys of a client expire
    /// when their permits no longer count.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # use tower_ratelimit::{RedisStore, redisson::RateLimiter};
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let store = RedisStore::connect("redis://127.0.0.1/").await?;
    /// let limiter = RateLimiter::new(store, "shared").client_id("worker-1");
    /// # let _ = limiter;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    #[allow(clippy::missing_panics_doc, reason = "the name is valid")]
    pub fn client_id(self, client_id: &str) -> Self {
        let keys = keys_of(&self.keys.name, client_id).expect("the name is valid");
        Self { keys: Arc::new(keys), ..self }
    }

    /// Sets the time without a call after which the limiter expires, in whole milliseconds, rounded
    /// up. It must be at least the interval.
    ///
    /// [`try_set_rate`](RateLimiter::try_set_rate), [`set_rate`](RateLimiter::set_rate) and
    /// [`update_rate`](RateLimiter::update_rate) store it, and it then applies to all clients.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use tower_ratelimit::{RedisStore, redisson::RateLimiter};
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let store = RedisStore::connect("redis://127.0.0.1/").await?;
    /// let limiter = RateLimiter::new(store, "shared").keep_alive(Duration::from_secs(3_600));
    /// # let _ = limiter;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn keep_alive(self, keep_alive: Duration) -> Self {
        Self { keep_alive: Some(keep_alive), ..self }
    }

    /// Sets the rate, unless one is set already. Returns whether it was set.
    ///
    /// If this limiter has no [`keep_alive`](RateLimiter::keep_alive) time, that of `config` is set
    /// with the rate, as [`config`](RateLimiter::config) has returned it.
    ///
    /// # Errors
    ///
    /// - [`RateLimiterError::Rate`] if the rate is not 1 to 2^53 permits in 1 ms to 100 years, and
    ///   [`KeepAlive`](RateLimiterError::KeepAlive) if the keep-alive time is below the interval.
    /// - [`Error::Store`] if Redis does not reply within the store's
    ///   [deadline](crate::store::RedisConfig::deadline). The rate may have been set nevertheless.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped before it is ready, the rate may or may not have been set.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use tower_ratelimit::{RedisStore, redisson::{RateLimiter, RateLimiterConfig}};
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let store = RedisStore::connect("redis://127.0.0.1/").await?;
    /// # let limiter = RateLimiter::new(store, "shared");
    /// let config = RateLimiterConfig::overall(10, Duration::from_secs(1));
    /// let is_new = limiter.try_set_rate(config).await?; // false: another service has set one
    /// # let _ = is_new;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn try_set_rate(&self, config: RateLimiterConfig) -> Result<bool, Error> {
        self.change_rate("try", config).await
    }

    /// Sets the rate, and forgets all permits taken. So up to twice the rate can be taken in this
    /// interval.
    ///
    /// If the rate is per client, only the permits of this client are forgotten.
    ///
    /// # Errors
    ///
    /// As for [`try_set_rate`](RateLimiter::try_set_rate).
    ///
    /// # Cancel safety
    ///
    /// As for [`try_set_rate`](RateLimiter::try_set_rate).
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use tower_ratelimit::{RedisStore, redisson::{RateLimiter, RateLimiterConfig}};
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let store = RedisStore::connect("redis://127.0.0.1/").await?;
    /// # let limiter = RateLimiter::new(store, "shared");
    /// limiter.set_rate(RateLimiterConfig::overall(20, Duration::from_secs(1))).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn set_rate(&self, config: RateLimiterConfig) -> Result<(), Error> {
        self.change_rate("set", config).await.map(drop)
    }

    /// Changes the rate if one is set, and keeps the permits taken. Returns whether one was set.
    ///
    /// The new rate applies from the next call of any client on. If a lower rate leaves a debt,
    /// later requests wait until the debt is repaid. The [`keep_alive`](RateLimiter::keep_alive)
    /// time stays as stored in Redis, unless this limiter or `config` has one.
    ///
    /// # Errors
    ///
    /// As for [`try_set_rate`](RateLimiter::try_set_rate).
    ///
    /// # Cancel safety
    ///
    /// As for [`try_set_rate`](RateLimiter::try_set_rate).
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use tower_ratelimit::{RedisStore, redisson::{RateLimiter, RateLimiterConfig}};
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let store = RedisStore::connect("redis://127.0.0.1/").await?;
    /// # let limiter = RateLimiter::new(store, "shared");
    /// limiter.update_rate(RateLimiterConfig::overall(20, Duration::from_secs(1))).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn update_rate(&self, config: RateLimiterConfig) -> Result<bool, Error> {
        self.change_rate("update", config).await
    }

    async fn change_rate(&self, mode: &str, config: RateLimiterConfig) -> Result<bool, Error> {
        let RateLimiterConfig { is_per_client, rate, interval, keep_alive } = config;
        let is_interval = (Duration::from_millis(1)..=MAX_INTERVAL).contains(&interval);
        if !(1..=MAX_RATE).contains(&rate) || !is_interval {
            return Err(RateLimiterError::Rate { rate, interval }.into());
        }
        // The time of a template applies to the limiters of its keys; the template must not expire.
        let keep_alive = self.keep_alive.or(keep_alive).filter(|_| !self.is_template());
        let is_valid = |time: &Duration| (interval..=MAX_INTERVAL).contains(time);
        if let Some(keep_alive) = keep_alive.filter(|time| !is_valid(time)) {
            return Err(RateLimiterError::KeepAlive { keep_alive, interval }.into());
        }
        let [rate, interval] = [rate, millis(interval)].map(|number| number.to_string());
        let rate_type = if is_per_client { "1" } else { "0" };
        let keep_alive = keep_alive.map_or(String::new(), |time| millis(time).to_string());
        let args = [mode, &rate, &interval, rate_type, &keep_alive];
        let (args, deadline) = (args.map(str::as_bytes), self.store.start_deadline());
        let result = self.execute_in_steps(deadline, Script::SetRate, &args, "").await;
        *lock(&self.cached_rate) = None;
        self.call_lines();
        result.map(|(_, is_set)| is_set == 1)
    }

    /// Returns the rate, or `None` if none is set or the stored fields are invalid. Rate and
    /// interval must be integers in decimal digits, and the type 0 or 1.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] if Redis does not reply.
    ///
    /// # Cancel safety
    ///
    /// The future can be dropped at any time.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # use tower_ratelimit::{RedisStore, redisson::RateLimiter};
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let store = RedisStore::connect("redis://127.0.0.1/").await?;
    /// # let limiter = RateLimiter::new(store, "shared");
    /// if let Some(config) = limiter.config().await? {
    ///     println!("{} per {:?}", config.rate(), config.interval());
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn config(&self) -> Result<Option<RateLimiterConfig>, Error> {
        let deadline = self.store.start_deadline();
        self.read_config(deadline, &self.template_rate(deadline).await?).await
    }

    async fn read_config(
        &self,
        deadline: Deadline,
        template_rate: &str,
    ) -> Result<Option<RateLimiterConfig>, Error> {
        let (status, rate, interval, is_per_client, keep_alive): (i64, u64, u64, bool, u64) =
            self.execute(deadline, Script::Config, &[], template_rate, b"").await?;
        Ok((status == DONE).then(|| RateLimiterConfig {
            is_per_client,
            rate,
            interval: Duration::from_millis(interval),
            keep_alive: (keep_alive > 0).then(|| Duration::from_millis(keep_alive)),
        }))
    }

    /// Returns the number of permits that could be taken now. Writes nothing.
    ///
    /// # Errors
    ///
    /// [`RateLimiterError::NoRate`] if there is no rate, [`Error::Store`] if Redis does not reply.
    ///
    /// # Cancel safety
    ///
    /// The future can be dropped at any time.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # use tower_ratelimit::{RedisStore, redisson::RateLimiter};
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let store = RedisStore::connect("redis://127.0.0.1/").await?;
    /// # let limiter = RateLimiter::new(store, "shared");
    /// println!("{} left", limiter.available_permits().await?);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn available_permits(&self) -> Result<u64, Error> {
        let deadline = self.store.start_deadline();
        let rate = self.template_rate(deadline).await?;
        let (status, permits) =
            self.execute_in_steps(deadline, Script::AvailablePermits, &[], &rate).await?;
        if status == NO_RATE { Err(self.no_rate()) } else { Ok(permits) }
    }

    /// Releases permits before their interval is over. If `permits` exceeds the permits taken, all
    /// of these are released.
    ///
    /// The oldest permits of all clients are released first, so that later ones still count for
    /// their full interval. If that releases a part of an acquire, the rest counts until its
    /// interval is over, even if its request is dropped.
    ///
    /// More than 1,000 acquires take several round trips within one deadline.
    ///
    /// # Errors
    ///
    /// - [`Error::ZeroCost`] if `permits` is 0.
    /// - [`RateLimiterError::NoRate`] if there is no rate.
    /// - [`Error::Store`] if Redis does not reply. Some or all permits may have been released
    ///   nevertheless.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped before it is ready, the permits may or may not have been released.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # use tower_ratelimit::{RedisStore, redisson::RateLimiter};
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let store = RedisStore::connect("redis://127.0.0.1/").await?;
    /// # let limiter = RateLimiter::new(store, "shared");
    /// let _ = limiter.acquire(5).await?;
    /// limiter.release(2).await?; // they were not needed
    /// # Ok(())
    /// # }
    /// ```
    pub async fn release(&self, permits: u64) -> Result<(), Error> {
        if permits == 0 {
            return Err(Error::ZeroCost);
        }
        self.release_taken(self.store.start_deadline(), permits, 0, b"").await
    }

    /// Releases `permits` of the `taken` permits of the acquire with this id, or the oldest permits
    /// if the id is empty. Then calls the line of the limiter, whose permits may be released even
    /// after an error.
    async fn release_taken(
        &self,
        deadline: Deadline,
        permits: u64,
        taken: u64,
        id: &[u8],
    ) -> Result<(), Error> {
        let (mut rest, taken) = (permits.min(MAX_RATE), taken.min(MAX_RATE).to_string());
        let result = loop {
            if rest == 0 {
                break Ok(());
            }
            let permits = rest.to_string();
            let args = [permits.as_bytes(), id, taken.as_bytes()];
            match self.execute_in_steps(deadline, Script::Release, &args, "").await {
                Ok((NO_RATE, _)) if self.template.is_some() => break Ok(()),
                Ok((NO_RATE, _)) => break Err(self.no_rate()),
                Ok((_, left)) => rest = left,
                Err(error) => break Err(error),
            }
        };
        self.call_line();
        result
    }

    /// Lets all keys of the limiter expire after `time`, in whole milliseconds, rounded up. Returns
    /// whether there was a key.
    ///
    /// Of the keys per client, only those of this client are affected, and they expire after an
    /// interval at the latest. A time of zero deletes the keys.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] if Redis does not reply.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped before it is ready, the call may or may not have taken effect.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use tower_ratelimit::{RedisStore, redisson::RateLimiter};
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let store = RedisStore::connect("redis://127.0.0.1/").await?;
    /// # let limiter = RateLimiter::new(store, "shared");
    /// limiter.expire(Duration::from_secs(3_600)).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn expire(&self, time: Duration) -> Result<bool, Error> {
        self.expire_in(&millis(time.min(MAX_INTERVAL)).to_string()).await
    }

    /// Reverts [`expire`](RateLimiter::expire). Returns whether a key had a time to live.
    ///
    /// # Errors
    ///
    /// As for [`expire`](RateLimiter::expire).
    ///
    /// # Cancel safety
    ///
    /// As for [`expire`](RateLimiter::expire).
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # use tower_ratelimit::{RedisStore, redisson::RateLimiter};
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let store = RedisStore::connect("redis://127.0.0.1/").await?;
    /// # let limiter = RateLimiter::new(store, "shared");
    /// limiter.clear_expire().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn clear_expire(&self) -> Result<bool, Error> {
        self.expire_in("").await
    }

    async fn expire_in(&self, ms: &str) -> Result<bool, Error> {
        let deadline = self.store.start_deadline();
        let done: Result<i64, _> =
            self.execute(deadline, Script::Expire, &[ms.as_bytes()], "", b"").await;
        self.call_lines();
        done.map(|done| done == 1)
    }

    /// Returns the time until the limiter expires, in whole milliseconds, or `None` if it does not
    /// expire or does not exist.
    ///
    /// # Errors
    ///
    /// As for [`expire`](RateLimiter::expire).
    ///
    /// # Cancel safety
    ///
    /// The future can be dropped at any time.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # use tower_ratelimit::{RedisStore, redisson::RateLimiter};
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let store = RedisStore::connect("redis://127.0.0.1/").await?;
    /// # let limiter = RateLimiter::new(store, "shared");
    /// println!("{:?}", limiter.remaining_ttl().await?);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn remaining_ttl(&self) -> Result<Option<Duration>, Error> {
        let mut command = redis::cmd("PTTL");
        command.arg(self.name());
        let ms: i64 = self.store.run(self.label, self.store.start_deadline(), command, "").await?;
        Ok(u64::try_from(ms).ok().map(Duration::from_millis))
    }

    /// Deletes the rate and the permits taken. Returns whether there was a key. Of the keys per
    /// client, only those of this client are deleted.
    ///
    /// # Errors
    ///
    /// As for [`expire`](RateLimiter::expire).
    ///
    /// # Cancel safety
    ///
    /// As for [`expire`](RateLimiter::expire).
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # use tower_ratelimit::{RedisStore, redisson::RateLimiter};
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let store = RedisStore::connect("redis://127.0.0.1/").await?;
    /// # let limiter = RateLimiter::new(store, "shared");
    /// limiter.delete().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn delete(&self) -> Result<bool, Error> {
        let mut command = redis::cmd("DEL");
        command.arg(&self.keys.all);
        let deleted: Result<i64, _> =
            self.store.run(self.label, self.store.start_deadline(), command, "").await;
        self.call_lines();
        deleted.map(|deleted| deleted > 0)
    }

    /// Returns the name.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # use tower_ratelimit::{RedisStore, redisson::RateLimiter};
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let store = RedisStore::connect("redis://127.0.0.1/").await?;
    /// # let limiter = RateLimiter::new(store, "shared");
    /// assert_eq!(limiter.name(), "shared");
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn name(&self) -> &str {
        &self.keys.name
    }

    fn no_rate(&self) -> Error {
        let name = self.template.as_deref().unwrap_or(self).name().into();
        RateLimiterError::NoRate { limiter: self.label.into(), name }.into()
    }

    fn execute<T>(
        &self,
        deadline: Deadline,
        script: Script,
        args: &[&[u8]],
        template_rate: &str,
        tally: &[u8],
    ) -> StoreFuture<T>
    where
        T: redis::FromRedisValue + Send + 'static,
    {
        let command = by_hash(script, &self.keys.all, args, template_rate, tally);
        self.store.run(self.label, deadline, command, &sent(script).text)
    }

    /// Executes a script, repeatedly if it takes several calls to read a long log.
    async fn execute_in_steps(
        &self,
        deadline: Deadline,
        script: Script,
        args: &[&[u8]],
        template_rate: &str,
    ) -> Result<(i64, u64), Error> {
        let mut tally = vec![];
        loop {
            let (status, number, next): (i64, u64, Vec<u8>) =
                self.execute(deadline, script, args, template_rate, &tally).await?;
            if status != AGAIN {
                return Ok((status, number));
            }
            tally = next;
        }
    }
}

impl fmt::Debug for RateLimiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RateLimiter").field("name", &self.name()).finish_non_exhaustive()
    }
}

fn keys_of(name: &str, client_id: &str) -> Result<Keys, RateLimiterError> {
    Keys::new(name, client_id).ok_or_else(|| RateLimiterError::Slots { name: name.into() })
}

fn millis(time: Duration) -> u64 {
    time.as_nanos().div_ceil(1_000_000) as u64
}
