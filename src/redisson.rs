//! A limiter that Java services share: [Redisson](https://redisson.pro)'s `RRateLimiter`, in its own format.
//!
//! Both sides draw from one limit while a service moves from Java to Rust: the keys, their fields and bytes are
//! those of Redisson 3.21 to 4.7, whose clients find nothing that they could not have written, and nothing needs
//! to be changed on their side. What older releases left (from 3.13.3 on) is read too.
//!
//! ```no_run
//! use std::time::Duration;
//! use tower_ratelimit::{RedisStore, redisson::{RateLimiter, RateType}};
//!
//! # async fn run() -> Result<(), Box<dyn std::error::Error>> {
//! let store = RedisStore::connect("redis://127.0.0.1/").await?;
//! let limiter = RateLimiter::new(store, "LIMITER_NAME");
//! // 5 permits per 10 s, unless a rate is set already.
//! limiter.try_set_rate(RateType::Overall, 5, Duration::from_secs(10)).await?;
//! // Waits for up to a minute.
//! if limiter.try_acquire(1, Duration::from_secs(60)).await?.is_allowed() {
//!     println!("go");
//! }
//! # Ok(())
//! # }
//! ```
//!
//! It is a sliding log: never more than `rate` permits in *any* interval, open at its old end. Where no Java
//! service takes part, [`Limiter`](crate::Limiter) with [`SlidingLog`](crate::Algorithm::SlidingLog) does the
//! same with an eighth of the memory, lets requests wait in order, and works for many keys.
//!
//! # In a layer
//!
//! A [`RateLimitLayer`](crate::RateLimitLayer) and a [`Charge`](crate::Charge) take it like a
//! [`Limiter`](crate::Limiter). The name can be a template, of which each key has a limiter of its own: see
//! [`for_key`](RateLimiter::for_key). With `max_wait`, a request that waits asks again after the delay that it is told,
//! as [`try_acquire`](RateLimiter::try_acquire) does. It cannot be charged together with other limits, and not be
//! settled with more than was charged.
//!
//! ```no_run
//! use std::time::Duration;
//! use tower_ratelimit::{RateLimitLayer, RedisStore, key, redisson::{RateLimiter, RateType}};
//!
//! # async fn run() -> Result<(), Box<dyn std::error::Error>> {
//! let store = RedisStore::connect("redis://127.0.0.1/").await?;
//! let limiter = RateLimiter::new(store, "api:{key}").label("api");
//! limiter.try_set_rate(RateType::Overall, 5, Duration::from_secs(10)).await?;
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
//! | `RRateLimiter` | [`RateLimiter`] | what differs |
//! |---|---|---|
//! | `redisson.getRateLimiter(name)` | [`RateLimiter::new`] | refuses names whose keys would be in several slots of a cluster |
//! | `trySetRate(type, rate, interval)` | [`try_set_rate`](RateLimiter::try_set_rate) | an orphaned `value` of a limiter that is gone does not count |
//! | `trySetRate(type, rate, interval, keepAlive)` | [`keep_alive`](RateLimiter::keep_alive), then `try_set_rate` | |
//! | `setRate(type, rate, interval)` | [`set_rate`](RateLimiter::set_rate) | drops the state of the other type, too |
//! | `updateRate(args)` with `keepState` | [`update_rate`](RateLimiter::update_rate) | a lower rate forgets no debt |
//! | `getConfig()` | [`config`](RateLimiter::config) | `None` where Java has zeros or an error |
//! | `tryAcquire()`, `tryAcquire(n)` | [`try_acquire`](RateLimiter::try_acquire)`(n, Duration::ZERO)` | `n` of 0 and above the rate are typed errors |
//! | `tryAcquire(n, timeout)` | [`try_acquire`](RateLimiter::try_acquire)`(n, timeout)` | denies at once what cannot be in time, where Java sleeps for the whole timeout; no timeout means "for ever" |
//! | `acquire()`, `acquire(n)` | [`acquire`](RateLimiter::acquire)`(n)` | gives back when it is dropped |
//! | `availablePermits()` | [`available_permits`](RateLimiter::available_permits) | writes nothing |
//! | `release(n)` | [`release`](RateLimiter::release)`(n)` | takes the permits out of the log, so that they do not come back twice |
//! | `expire(duration)` | [`expire`](RateLimiter::expire) | |
//! | `clearExpire()` | [`clear_expire`](RateLimiter::clear_expire) | |
//! | `remainTimeToLive()` | [`remaining_ttl`](RateLimiter::remaining_ttl) | an `Option` in the place of -1 and -2 |
//! | `delete()` | [`delete`](RateLimiter::delete) | |
//! | `RateType.OVERALL`, `PER_CLIENT` | [`RateType`] | a client is a process: see [`client_id`](RateLimiter::client_id) |
//!
//! Java clients go on as they are. What they do wrong alone, they may do wrong beside this limiter, but the next
//! call from here finds it and puts it right:
//!
//! * **The log decides.** What is left is the rate less the permits in the log, always, and `value` is set to that.
//!   So a `value` that was evicted, that `release` credited twice, or that an `EVAL` which ran twice has lowered, is
//!   right again with the next call, and a rate that was changed with `redis-cli` holds from the next call on.
//! * **If the log is evicted**, what `value` says is used counts as taken now, for one interval, up to 2^31 - 1
//!   permits. If a Java client adds to the log first, that is not seen any more; if both keys are evicted, the limiter is
//!   as new. The same wait comes about if nobody uses the limiter, Java looks at its `availablePermits()`, and the
//!   rate is then raised with `redis-cli` or for a template: the permits that are added can be taken an interval later.
//! * **The clock is that of Redis**; Java writes the clock of its host. An entry of a host whose clock is ahead stays as
//!   much longer, but no longer than three intervals after a call from here has found it, or four while earlier ones
//!   are waited for; if others come among them, that counts from the last. New entries are put no earlier than
//!   it, unless it is ahead by more than an interval, so that this host does not drop them too early. An entry of a host
//!   whose clock is behind leaves as much earlier. What such a host drops or grants itself, nobody else can
//!   prevent: Java hosts need NTP, as they do without this crate.
//! * **A rate that is lowered** below what counts leaves `value` negative; Redisson's scripts take that as used up. One
//!   that is raised can be used at once. An interval that is made longer does not bring back what has
//!   left the shorter one.
//! * **The type.** With another type the count starts anew. What the old type has counted stays for one interval, in case
//!   the type is changed back.
//! * **An acquire counts once**: it has a random id, by which a script that is executed twice knows it. A release that is
//!   executed twice gives back twice, and never more than was taken.
//! * **Old entries** are dropped in steps of at most 1,000, or all at once where few are left, so
//!   that Redis does not stall; a log is not read again as long as it is known. Where Java changed
//!   a log of more than 1,000 entries beyond that, a call is several round trips, one for each
//!   1,000. The store's [deadline](RedisStore::deadline) is for all of them together. If it passes,
//!   the next call continues where this one stopped; only `available_permits`, which writes
//!   nothing, starts again.
//! * **A retry delay is exact**, where Java is told when the oldest entry expires, plus 3 ms, even if that is not
//!   enough. If more than 1,000 entries must expire first, it is when these have.
//!
//! # Keys
//!
//! `name` is a hash with `rate`, `interval`, `type` and `keepAliveTime`. `{name}:value` is what is left, and
//! `{name}:permits` the log, with one entry of 21 bytes for each acquire: about 130 bytes in Redis. For
//! [`RateType::PerClient`] both have `:` and the client's id behind. A name with a `{` is taken without braces
//! around it: `api:{42}:value`. So `x` and `{x}` are two hashes that share their other keys: do not use both. The
//! store's [`prefix`](RedisStore::prefix) does not matter here.
//!
//! Beside a log of more than 32 entries, and where a clock is ahead by more than two intervals, there is a key of our
//! own, `{name}:tally`, which makes a decision as fast as with a short log. It expires by itself, and it does no harm if
//! it is lost, or if Java changes or deletes what it is about. The hash of a limiter that was lent the rate of a
//! [template](RateLimiter::for_key) has a field of our own, `template`, which Java does not look at.
//!
//! # Expiry
//!
//! As with Redisson: [`expire`](RateLimiter::expire) and [`delete`](RateLimiter::delete) are about all of the
//! limiter's keys, but of those per client only about this client's; an acquire gives the other keys the time to live of
//! the hash; and a limiter with a [`keep_alive`](RateLimiter::keep_alive) time expires when nobody asks it for
//! so long, the denied included. Without one of these, `{name}:value` and `{name}:permits` stay, as Java's entries in
//! them would expire early otherwise. The keys of one client expire an interval after its last acquire at the latest,
//! so that those of processes that are gone do not pile up. Where the interval is made longer, what a client has taken
//! before leaves as by the shorter one, unless the client acquires again by then.
//!
//! # Permissions
//!
//! It uses the commands `DEL EVAL EVALSHA GET HDEL HMGET HSET PERSIST PEXPIRE PTTL SET TIME UNLINK EXISTS ZADD ZCARD ZCOUNT
//! ZRANGE ZRANK ZREM ZREMRANGEBYRANK ZSCORE`.

mod acquire;
mod keys;
mod per_key;
mod script;
mod target;
#[cfg(test)]
mod tests;

use std::{
    fmt,
    hash::{BuildHasher, RandomState},
    sync::{Arc, Mutex, OnceLock},
    time::{Duration, Instant},
};

use self::{
    keys::{Keys, process_id},
    script::{AGAIN, AVAILABLE_PERMITS, CONFIG, DONE, EXPIRE, NO_RATE, RELEASE, SET_RATE, Script},
};
use crate::{
    error::{ConfigError, Error},
    store::{Deadline, RedisStore, StoreFuture},
    sync::lock,
};

const LONGEST: Duration = Duration::from_secs(36_525 * 86_400);
/// Doubles hold every integer up to here.
const MOST: u64 = 1 << 53;

/// Who shares a rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RateType {
    /// All clients together.
    Overall,
    /// Each [client](RateLimiter::client_id) has the rate for itself.
    PerClient,
}

/// The rate of a limiter, as it is in Redis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RateLimiterConfig {
    rate_type: RateType,
    rate: u64,
    interval: Duration,
    keep_alive: Option<Duration>,
}

impl RateLimiterConfig {
    /// Who shares the rate.
    #[must_use]
    pub const fn rate_type(&self) -> RateType {
        self.rate_type
    }

    /// The most permits in any interval.
    #[must_use]
    pub const fn rate(&self) -> u64 {
        self.rate
    }

    /// The interval, in whole milliseconds.
    #[must_use]
    pub const fn interval(&self) -> Duration {
        self.interval
    }

    /// After how long without a call the limiter expires, if it does.
    #[must_use]
    pub const fn keep_alive(&self) -> Option<Duration> {
        self.keep_alive
    }
}

/// A limiter that Java services share. See the [module](self) for how it goes together with them.
///
/// The rate is in Redis, and is set by whoever comes first. Limiters of one name over one Redis are one, whatever
/// store and process they are made in.
#[derive(Clone)]
pub struct RateLimiter {
    store: RedisStore,
    keys: Arc<Keys>,
    keep_alive: Option<Duration>,
    /// What clients see.
    pub(crate) label: &'static str,
    /// Of which this is the limiter of a key.
    template: Option<Arc<Self>>,
    /// What was last read of a template's rate, and when.
    known: Arc<Mutex<Option<(Instant, RateLimiterConfig)>>>,
}

type Id = [u8; 16];

fn random() -> u64 {
    RandomState::new().hash_one(0)
}

/// The id of an acquire: a number that its decision keeps, and one of this process.
fn id_of(number: u64) -> Id {
    static PROCESS: OnceLock<u64> = OnceLock::new();
    let process = *PROCESS.get_or_init(random);
    (u128::from(process) << 64 | u128::from(number)).to_le_bytes()
}

impl RateLimiter {
    /// Makes a limiter of the name that Java gives to `getRateLimiter`. Nothing is sent to Redis.
    ///
    /// # Panics
    ///
    /// Where [`try_new`](RateLimiter::try_new) returns an error.
    #[must_use]
    #[track_caller]
    pub fn new(store: RedisStore, name: &str) -> Self {
        match Self::try_new(store, name) {
            Ok(limiter) => limiter,
            Err(error) => panic!("{error}"),
        }
    }

    /// Like [`new`](RateLimiter::new), for a name that is no literal.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Slots`] if the name is empty, or if its keys would be in several slots of a Redis Cluster: a
    /// name has no braces, or text in the first pair of them. `a}b`, `x{y` and `{}z` are refused.
    pub fn try_new(store: RedisStore, name: &str) -> Result<Self, ConfigError> {
        let keys = Arc::new(Keys::new(name, process_id())?);
        let known = Arc::default();
        Ok(Self { store, keys, keep_alive: None, label: "redisson", template: None, known })
    }

    /// Sets who this is, for [`RateType::PerClient`]; by default a random UUID of the process. Limiters with the same
    /// id are one client.
    ///
    /// No Java client may have the same id: the keys of a client from here expire with what they count.
    #[must_use]
    pub fn client_id(self, client_id: &str) -> Self {
        let keys = Keys::new(&self.keys.name, client_id).expect("the name is valid");
        Self { keys: Arc::new(keys), ..self }
    }

    /// Sets after how long without a call the limiter shall expire, in whole milliseconds, rounded up: at least its
    /// interval. It is stored by [`try_set_rate`](RateLimiter::try_set_rate), [`set_rate`](RateLimiter::set_rate)
    /// and [`update_rate`](RateLimiter::update_rate), and then holds for all clients.
    #[must_use]
    pub fn keep_alive(self, keep_alive: Duration) -> Self {
        Self { keep_alive: Some(keep_alive), ..self }
    }

    /// Sets the rate to `rate` permits per `interval`, unless one is set already. Returns whether it was set.
    ///
    /// The interval is counted in milliseconds, rounded up.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] for a rate that is not 1 to 2^53, an interval that is not 1 ms to 100
    /// years, or a [`keep_alive`](RateLimiter::keep_alive) time below the interval;
    /// [`Error::Store`] if Redis gives no answer within the store's
    /// [deadline](RedisStore::deadline): then it may have been set.
    ///
    /// # Cancel safety
    ///
    /// Dropped before it is ready, it may or may not have set the rate.
    pub async fn try_set_rate(
        &self,
        rate_type: RateType,
        rate: u64,
        interval: Duration,
    ) -> Result<bool, Error> {
        self.change_rate("try", rate_type, rate, interval).await
    }

    /// Sets the rate, and forgets what was taken: so up to twice the rate can be taken in this interval.
    ///
    /// Of a rate per client, only this client's permits are forgotten.
    ///
    /// # Errors
    ///
    /// As for [`try_set_rate`](RateLimiter::try_set_rate).
    ///
    /// # Cancel safety
    ///
    /// As for [`try_set_rate`](RateLimiter::try_set_rate).
    pub async fn set_rate(
        &self,
        rate_type: RateType,
        rate: u64,
        interval: Duration,
    ) -> Result<(), Error> {
        self.change_rate("set", rate_type, rate, interval).await.map(drop)
    }

    /// Changes the rate, if one is set, and keeps what was taken. Returns whether one was set.
    ///
    /// The next call of any client follows it. A debt that a lower rate leaves is waited for. The
    /// time of [`keep_alive`](RateLimiter::keep_alive) stays as it is in Redis, unless this limiter has one.
    ///
    /// # Errors
    ///
    /// As for [`try_set_rate`](RateLimiter::try_set_rate).
    ///
    /// # Cancel safety
    ///
    /// As for [`try_set_rate`](RateLimiter::try_set_rate).
    pub async fn update_rate(
        &self,
        rate_type: RateType,
        rate: u64,
        interval: Duration,
    ) -> Result<bool, Error> {
        self.change_rate("update", rate_type, rate, interval).await
    }

    async fn change_rate(
        &self,
        mode: &str,
        rate_type: RateType,
        rate: u64,
        interval: Duration,
    ) -> Result<bool, Error> {
        if !(1..=MOST).contains(&rate) {
            return Err(ConfigError::Rate { rate }.into());
        }
        if interval < Duration::from_millis(1) || interval > LONGEST {
            return Err(ConfigError::Interval { interval }.into());
        }
        let in_time = |keep_alive: &Duration| (interval..=LONGEST).contains(keep_alive);
        // That of a template is for its keys, and is not to make it expire itself.
        let keep_alive = self.keep_alive.filter(|_| !self.is_template());
        if let Some(keep_alive) = keep_alive.filter(|it| !in_time(it)) {
            return Err(ConfigError::KeepAlive { keep_alive, interval }.into());
        }
        let [rate, interval] = [rate, millis(interval)].map(|number| number.to_string());
        let rate_type = if rate_type == RateType::Overall { "0" } else { "1" };
        let keep_alive = keep_alive.map_or(String::new(), |it| millis(it).to_string());
        let args = [mode, &rate, &interval, rate_type, &keep_alive];
        let (args, deadline) = (args.map(str::as_bytes), self.store.start_deadline());
        let (_, set) = self.ask_in_steps(deadline, &SET_RATE, &args, "").await?;
        *lock(&self.known) = None;
        Ok(set == 1)
    }

    /// The rate, or `None` if none is set, or what is set is none: it and the interval are whole numbers in decimal
    /// digits, and the type is 0 or 1.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] if Redis gives no answer.
    ///
    /// # Cancel safety
    ///
    /// The future can be dropped at any time.
    pub async fn config(&self) -> Result<Option<RateLimiterConfig>, Error> {
        let deadline = self.store.start_deadline();
        self.read(deadline, &self.lent(deadline).await?).await
    }

    async fn read(
        &self,
        deadline: Deadline,
        lent: &str,
    ) -> Result<Option<RateLimiterConfig>, Error> {
        let (status, rate, interval, per_client, keep_alive): (i64, u64, u64, bool, u64) =
            self.run(deadline, &CONFIG, &[], lent, b"").await?;
        Ok((status == DONE).then(|| RateLimiterConfig {
            rate_type: if per_client { RateType::PerClient } else { RateType::Overall },
            rate,
            interval: Duration::from_millis(interval),
            keep_alive: (keep_alive > 0).then(|| Duration::from_millis(keep_alive)),
        }))
    }

    /// The permits that could be taken now. It writes nothing.
    ///
    /// # Errors
    ///
    /// [`Error::NoRate`] if there is no rate, [`Error::Store`] if Redis gives no answer.
    ///
    /// # Cancel safety
    ///
    /// The future can be dropped at any time.
    pub async fn available_permits(&self) -> Result<u64, Error> {
        let deadline = self.store.start_deadline();
        let lent = self.lent(deadline).await?;
        let (status, permits) = self.ask_in_steps(deadline, &AVAILABLE_PERMITS, &[], &lent).await?;
        if status == NO_RATE { Err(self.no_rate()) } else { Ok(permits) }
    }

    /// Gives permits back before their interval is over: as many as were taken, if `permits` is more than that.
    ///
    /// Those that were taken first are given back first, whoever took them, so that what was taken later still counts
    /// for its full interval. Of an acquire that has so got back a part, the rest cannot be
    /// [cancelled](crate::Charge::cancel) any more, and counts until its interval is over.
    ///
    /// # Errors
    ///
    /// [`Error::ZeroCost`] if `permits` is 0, [`Error::NoRate`] if there is no rate,
    /// [`Error::Store`] if Redis gives no answer: then some or all of them may have been given
    /// back. More than 1,000 acquires take several round trips within one deadline.
    ///
    /// # Cancel safety
    ///
    /// Dropped before it is ready, it may or may not have given back.
    pub async fn release(&self, permits: u32) -> Result<(), Error> {
        if permits == 0 {
            return Err(Error::ZeroCost);
        }
        self.give_back(self.store.start_deadline(), permits, 0, b"").await
    }

    /// Returns `permits` of those that the acquire with this id has `taken`, or the oldest if the id is empty.
    async fn give_back(
        &self,
        deadline: Deadline,
        permits: u32,
        taken: u32,
        id: &[u8],
    ) -> Result<(), Error> {
        let (mut rest, taken) = (u64::from(permits), taken.to_string());
        while rest > 0 {
            let permits = rest.to_string();
            let args = [permits.as_bytes(), id, taken.as_bytes()];
            let (status, left) = self.ask_in_steps(deadline, &RELEASE, &args, "").await?;
            if status == NO_RATE {
                return if self.template.is_some() { Ok(()) } else { Err(self.no_rate()) };
            }
            rest = left;
        }
        Ok(())
    }

    /// Lets all keys of the limiter expire after `time`, in whole milliseconds, rounded up. Returns whether there was
    /// one. Of the keys per client, it is about this client's, which expire an interval after now at the latest. A time of
    /// zero deletes them.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] if Redis gives no answer.
    ///
    /// # Cancel safety
    ///
    /// Dropped before it is ready, it may or may not have been done.
    pub async fn expire(&self, time: Duration) -> Result<bool, Error> {
        self.expire_in(&millis(time.min(LONGEST)).to_string()).await
    }

    /// Takes back [`expire`](RateLimiter::expire). Returns whether a key had a time to live.
    ///
    /// # Errors
    ///
    /// As for [`expire`](RateLimiter::expire).
    ///
    /// # Cancel safety
    ///
    /// As for [`expire`](RateLimiter::expire).
    pub async fn clear_expire(&self) -> Result<bool, Error> {
        self.expire_in("").await
    }

    async fn expire_in(&self, ms: &str) -> Result<bool, Error> {
        let deadline = self.store.start_deadline();
        let done: i64 = self.run(deadline, &EXPIRE, &[ms.as_bytes()], "", b"").await?;
        Ok(done == 1)
    }

    /// How long the limiter will be there, in whole milliseconds; `None` if it does not expire, or is not there.
    ///
    /// # Errors
    ///
    /// As for [`expire`](RateLimiter::expire).
    ///
    /// # Cancel safety
    ///
    /// The future can be dropped at any time.
    pub async fn remaining_ttl(&self) -> Result<Option<Duration>, Error> {
        let mut command = redis::cmd("PTTL");
        command.arg(self.name());
        let ms: i64 = self.store.run(self.store.start_deadline(), command, "").await?;
        Ok(u64::try_from(ms).ok().map(Duration::from_millis))
    }

    /// Deletes the limiter: its rate, and what was taken. Returns whether there was anything. Of the keys per
    /// client, it is about this client's.
    ///
    /// # Errors
    ///
    /// As for [`expire`](RateLimiter::expire).
    ///
    /// # Cancel safety
    ///
    /// As for [`expire`](RateLimiter::expire).
    pub async fn delete(&self) -> Result<bool, Error> {
        let mut command = redis::cmd("DEL");
        command.arg(&self.keys.all);
        let deleted: i64 = self.store.run(self.store.start_deadline(), command, "").await?;
        Ok(deleted > 0)
    }

    /// The name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.keys.name
    }

    fn no_rate(&self) -> Error {
        let limiter = self.template.as_deref().unwrap_or(self);
        Error::NoRate { name: limiter.name().to_owned() }
    }

    fn run<T>(
        &self,
        deadline: Deadline,
        script: &Script,
        args: &[&[u8]],
        lent: &str,
        tally: &[u8],
    ) -> StoreFuture<T>
    where
        T: redis::FromRedisValue + Send + 'static,
    {
        let args = [args, &[lent.as_bytes(), tally]].concat();
        self.store.run(deadline, script.by_hash(&self.keys.all, &args), script.text)
    }

    /// Asks, again where it takes several calls to know a long log.
    async fn ask_in_steps(
        &self,
        deadline: Deadline,
        script: &Script,
        args: &[&[u8]],
        lent: &str,
    ) -> Result<(i64, u64), Error> {
        let mut tally = vec![];
        loop {
            let (status, number, next): (i64, u64, Vec<u8>) =
                self.run(deadline, script, args, lent, &tally).await?;
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

fn millis(time: Duration) -> u64 {
    time.as_nanos().div_ceil(1_000_000) as u64
}
