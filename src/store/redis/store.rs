//! `RedisStore`: its public calls, and how a request becomes a call. The connections are in
//! the crate `tower-ratelimit-connections`.

use std::{
    fmt,
    pin::pin,
    sync::{Arc, OnceLock},
    time::Duration,
};

#[cfg(feature = "redis-1")]
use redis::aio::ConnectionLike;
use redis::{Cmd, FromRedisValue};
use tokio::{runtime::Handle, sync::oneshot, time::Instant};

use super::{
    backend::Backend,
    call::ScriptCall,
    config::RedisConfig,
    connections::{ANSWER_TIMEOUT, Command, Deadline, TransportError, home},
    cross_slot::CrossSlot,
    error::store_error,
    front::Front,
    keeper::Keeper,
    late::{self, Charged},
    monitor::Monitor,
    release::{self, ReleaseFuture},
    scan::KeyScan,
};
use crate::{
    algorithm::{Action, Algorithm, Release},
    decision::Outcome,
    error::StoreError,
    keys::Key,
    observe::{Observer, Observers},
    store::{
        AnyStore, Health, HoldGuard, LimitRequest, MemoryStore, Names, Offer, Ping, RenewableHold,
        Sealed, Settings, Store, StoreCalls, StoreFuture, StoreRequest, Task,
        denials::{Denials, Lookup},
    },
};

/// How the call, or the calls, of a request are made.
#[derive(Debug)]
enum Plan<'a> {
    /// A check joins the queue of its limiter.
    Queue(&'a LimitRequest<'a>),
    /// So does a request that holds units; if it is denied, again after ends of other holds.
    Hold(&'a LimitRequest<'a>),
    /// One call, which ends with its caller.
    Call,
    /// One call in a task, which returns the units if the caller has gone.
    Task,
    /// A call for each key, in tasks, one after the other.
    InOrder,
    /// A call for each key, all at once: they cannot be denied.
    AtOnce,
}

impl<'a> Plan<'a> {
    fn of(request: &StoreRequest<'a>, is_cluster: bool) -> Self {
        let StoreRequest { action, limits, .. } = *request;
        let is_check = action == Action::Check;
        let has_one_key = limits.iter().all(|limit| limit.key == limits[0].key);
        match limits {
            [limit] if is_check && limit.hold.is_none() => Self::Queue(limit),
            [limit] if is_check => Self::Hold(limit),
            _ if is_cluster && !has_one_key && action.can_be_denied() => Self::InOrder,
            _ if is_cluster && !has_one_key => Self::AtOnce,
            _ if is_check && limits.iter().any(LimitRequest::is_returned) => Self::Task,
            _ => Self::Call,
        }
    }
}

/// A store in Redis: all replicas share one exact count per key.
///
/// Each decision is one atomic script.
///
/// # Examples
///
/// ```no_run
/// use tower_ratelimit::{Algorithm, Limiter, Quota, RedisStore};
///
/// # async fn run() -> Result<(), Box<dyn std::error::Error>> {
/// let store = RedisStore::connect("redis://127.0.0.1/").await?;
/// let limiter = Limiter::new("api", store, Algorithm::token_bucket(), Quota::per_second(10));
///
/// if limiter.check("alice").await?.is_allowed() {
///     println!("hello, alice");
/// }
/// # Ok(())
/// # }
/// ```
///
/// # Methods
///
/// | to | call |
/// |---|---|
/// | connect, and prove that Redis can decide | [`connect`](RedisStore::connect) |
/// | start although Redis is down | [`lazy`](RedisStore::lazy) |
/// | set more than a URL can | [`new`](RedisStore::new) with a [`RedisConfig`] |
/// | see the state of Redis | [`health`](RedisStore::health), [`ping`](RedisStore::ping) |
/// | observe decisions | [`add_observer`](RedisStore::add_observer) |
/// | list keys | [`scan`](RedisStore::scan), [`scan_all`](RedisStore::scan_all) |
/// | shut down | [`flush`](RedisStore::flush) |
///
/// # Details
///
/// It supports Redis from 6.2 on, and Valkey from 8.1 on: one server, a master behind
/// [Sentinels](RedisConfig::sentinels), or a [cluster](RedisConfig::cluster). A URL or a
/// [`RedisConfig`] describes it, with all settings.
///
/// Clones share their connections, which carry any number of calls at a time. If a connection
/// ends, the store reconnects by itself. The clock is that of the Redis server.
///
/// # While Redis does not answer
///
/// Each decision has a deadline, 100 ms by default; [`deadline`](RedisConfig::deadline) changes it.
/// It starts with the call, and includes connecting and all commands of the decision. At the
/// deadline the decision fails with a [`StoreError`], and the layer applies its
/// [`FailurePolicy`](crate::FailurePolicy). Redis may have counted a decision that failed.
///
/// After five calls in a row without an answer in time, Redis counts as unavailable (circuit open).
/// Decisions then fail immediately, and the store sends one probe at a time until Redis answers
/// again. Redis stays unavailable while its answers are later than the deadline.
/// [`health`](RedisStore::health) reports the state. With the feature `tracing`, changes of the
/// state are events.
///
/// If the process was stopped, or a task blocked the runtime, a deadline may be noticed late. The
/// decision then has up to 20 ms more: its command is sent if it was not, and an answer that
/// arrived in the meantime is read. Such an answer is valid. If there is none, that is not counted
/// as a failure of Redis. No command is sent after its decision has failed.
///
/// In a test with tokio's paused time, the deadline passes immediately while the runtime waits for
/// Redis.
///
/// # Keys
///
/// The name of a key is `PREFIX:LIMITER:ALGORITHM:{KEY}`, for example
/// `ratelimit:default:token-bucket:{header:x-api-key=alice}`. `redis-cli --scan` lists the keys.
/// Because of the braces, `KEY` alone determines the slot in a cluster. Redis deletes a
/// key once its quota is full again; with a token bucket, up to one refill of the bucket later.
///
/// The value contains a letter that identifies its format. Reservations of waiting requests, and
/// the units that [permits](crate::Permit) hold, follow the state in the same value.
///
/// # Calls
///
/// Checks of a limiter share calls, in the order of their arrival. If the reply to a call is lost,
/// all of its checks fail, and Redis may have counted them. Work in the background has a thread of
/// its own, so a process that forks makes its stores after the fork.
///
/// The guide describes the [calls and connections](crate::guide::connections#calls-of-a-store), the
/// [failure modes](crate::guide::redis_failures) and the
/// [permissions](crate::guide::redis_permissions).
#[derive(Clone)]
pub struct RedisStore {
    backend: Arc<Backend>,
    front: Arc<Front>,
    deadline: Duration,
    names: Names,
    fallback: Arc<OnceLock<MemoryStore>>,
}

impl RedisStore {
    /// Makes a store from settings. It connects when it is first used.
    ///
    /// # Errors
    ///
    /// If the TLS settings are invalid, a user has no password, or the deadline is 0; or if the
    /// process cannot start the thread of the background.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use std::time::Duration;
    /// use tower_ratelimit::{RedisStore, store::RedisConfig};
    ///
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let config = RedisConfig::server("redis://127.0.0.1/")?.deadline(Duration::from_millis(50));
    /// let store = RedisStore::new(config)?;
    /// # let _ = store;
    /// # Ok(())
    /// # }
    /// ```
    pub fn new(config: RedisConfig) -> Result<Self, StoreError> {
        home::start().map_err(|error| {
            StoreError::config(format!(
                "cannot start the thread for work in the background: {error}; raise the limits of \
                 threads and open files"
            ))
        })?;
        if config.deadline.is_zero() {
            return Err(StoreError::config(
                "cannot use a deadline of 0: every decision would fail; set for example 50 ms, in \
                 a URL by `deadline=50ms`"
                    .to_owned(),
            ));
        }
        let RedisConfig { transport, deadline, denial_ttl, prefix } = config;
        let monitor = Arc::new(Monitor::new(prefix.clone(), transport.user().map(Into::into)));
        let client = transport.client(monitor.clone()).map_err(store_error)?;
        let names = Names::default();
        let lines = names.lines().clone();
        let denials = Denials::new(denial_ttl, lines.clone());
        let backend = Backend::new(client, monitor, prefix, denials, lines);
        Ok(Self {
            front: Front::new(backend.clone()),
            backend,
            deadline,
            names,
            fallback: Arc::default(),
        })
    }

    /// Connects to Redis at `url`, and proves by [`ping`](RedisStore::ping) that it can decide.
    ///
    /// The URL names one server, such as `redis://[[USER]:PASSWORD@]HOST[:PORT][/DB]`, or
    /// Sentinels or the nodes of a cluster, and has settings as parameters, such as
    /// `?prefix=shop`: see [`store::connect`](crate::store::connect).
    ///
    /// # Errors
    ///
    /// If the URL is invalid, or Redis does not answer within a second.
    ///
    /// # Cancel safety
    ///
    /// The future can be dropped at any time.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime with time and I/O.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use tower_ratelimit::{Algorithm, Limiter, Quota, RedisStore};
    ///
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let store = RedisStore::connect("redis://127.0.0.1/?prefix=shop&deadline=50ms").await?;
    /// let limiter = Limiter::new("api", store, Algorithm::token_bucket(), Quota::per_second(10));
    /// # let _ = limiter;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn connect(url: &str) -> Result<Self, StoreError> {
        let store = Self::lazy(url)?;
        store.ping().await?;
        Ok(store)
    }

    /// Makes a store that connects to Redis at `url` when it is first used. See
    /// [`connect`](RedisStore::connect).
    ///
    /// # Errors
    ///
    /// If the URL is invalid.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use tower_ratelimit::RedisStore;
    ///
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let store = RedisStore::lazy("redis://127.0.0.1/?prefix=shop")?; // Redis may be down
    /// # let _ = store;
    /// # Ok(())
    /// # }
    /// ```
    pub fn lazy(url: &str) -> Result<Self, StoreError> {
        Self::new(RedisConfig::from_url(url)?)
    }

    /// Makes a store over a connection of the crate `redis` 1.x that reconnects by itself, for
    /// example `redis::aio::ConnectionManager`. It must lead to one server; for a cluster use
    /// [`RedisConfig::cluster`].
    ///
    /// The connection decides when it reconnects. A `ConnectionManager` does not reconnect if a
    /// server hangs or has become a replica, and requests that were not sent fail with the
    /// connection.
    ///
    /// All runtimes and the background use this one connection. While the runtime that made it is
    /// blocked or not driven, permits are not renewed, and no end is sent.
    ///
    /// [`RedisConfig::from_connection`] makes a store with another prefix.
    ///
    /// # Panics
    ///
    /// If the process cannot start the thread of the background.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use tower_ratelimit::RedisStore;
    ///
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let client = redis::Client::open("redis://127.0.0.1/")?;
    /// let store = RedisStore::from_connection(redis::aio::ConnectionManager::new(client).await?);
    /// # let _ = store;
    /// # Ok(())
    /// # }
    /// ```
    #[cfg(feature = "redis-1")]
    #[must_use]
    pub fn from_connection<C>(connection: C) -> Self
    where
        C: ConnectionLike + Clone + Send + Sync + 'static,
    {
        let config = RedisConfig::from_connection(connection);
        Self::new(config).expect("a connection needs no settings, and the thread can start")
    }

    /// Proves that Redis can decide: the server, or each master with slots in a cluster, runs a
    /// script with every command that decisions use, and accepts writes. Nothing is written.
    /// Connecting may take a second.
    ///
    /// # Errors
    ///
    /// If the server does not answer, is a replica or rejects writes, or if the user lacks a
    /// permission that decisions need. The error names the permission.
    ///
    /// # Cancel safety
    ///
    /// The future can be dropped at any time.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime with time and I/O.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # use tower_ratelimit::RedisStore;
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let store = RedisStore::connect("redis://127.0.0.1/").await?;
    /// if let Err(error) = store.ping().await {
    ///     eprintln!("{error:?}"); // names a permission that is missing, say
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn ping(&self) -> Result<(), StoreError> {
        let deadline = Deadline::new(ANSWER_TIMEOUT.max(self.deadline));
        let Backend { client, monitor, .. } = &*self.backend;
        let pinged = client.ping(deadline).await;
        pinged.map_err(|error| monitor.explain(error).into_store_error())
    }

    /// Waits until the units that were returned before this call are back in Redis: units of ended
    /// permits, and of requests that were dropped while they waited, also for their answer. A
    /// process that exits without it can lose the last ones. The units of a permit then count as
    /// used when its hold expires.
    ///
    /// Call it after the server has shut down, within a timeout: while Redis does not answer, it
    /// waits until the holds expire, up to 30 s for the answers to such requests, and up to an hour
    /// for units of dropped requests. If more was used than a hold has, it waits for up to an hour
    /// after the hold has expired. It needs only the runtime of its caller: the ones in which the
    /// permits were taken may have ended, or stand still.
    ///
    /// # Cancel safety
    ///
    /// The future can be dropped at any time. The units are returned nevertheless.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use std::time::Duration;
    /// use tower_ratelimit::RedisStore;
    ///
    /// # async fn run() -> Result<(), Box<dyn std::error::Error>> {
    /// let store = RedisStore::connect("redis://127.0.0.1/").await?;
    /// // .. a server with graceful shutdown ..
    /// let _ = tokio::time::timeout(Duration::from_secs(2), store.flush()).await;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn flush(&self) {
        let (Backend { calls, denials, .. }, deadline) =
            (&*self.backend, self.start_deadline().shared(true));
        let mut calls = pin!(calls.done());
        // In a runtime that is not driven, a call does not end.
        if deadline.wait_for(calls.as_mut()).await.is_none() {
            deadline.linger(calls).await;
        }
        denials.changes.done().await;
    }

    /// Returns the state of the server and the counters, without calling Redis.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # use tower_ratelimit::RedisStore;
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let store = RedisStore::connect("redis://127.0.0.1/").await?;
    /// let health = store.health();
    /// println!("{}: {} timeouts", health.status(), health.timeouts);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn health(&self) -> Health {
        self.backend.monitor.health(self.backend.client.health(self.deadline))
    }

    /// Returns a scan over the keys with state of the limiter with this name and algorithm, on all
    /// servers of the store: see [`KeyScan`].
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # use tower_ratelimit::{Algorithm, RedisStore};
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let store = RedisStore::connect("redis://127.0.0.1/").await?;
    /// let mut scan = store.scan("api", Algorithm::token_bucket());
    /// while let Some(keys) = scan.next().await? {
    ///     println!("{keys:?}");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn scan(&self, limiter: &str, algorithm: Algorithm) -> KeyScan {
        KeyScan::new(self.backend.clone(), Some((limiter, algorithm)))
    }

    /// Returns a scan over the keys with state of all limiters, also under other prefixes and of
    /// other services: see [`KeyScan::next_names`].
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # use tower_ratelimit::RedisStore;
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let store = RedisStore::connect("redis://127.0.0.1/").await?;
    /// let mut scan = store.scan_all();
    /// while let Some(names) = scan.next_names().await? {
    ///     println!("{names:?}");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn scan_all(&self) -> KeyScan {
        KeyScan::new(self.backend.clone(), None)
    }

    /// Adds an observer to the store and its clones: see [`observe`](crate::observe).
    ///
    /// It gets the state of the circuit breakers now, and from now on their changes and the events
    /// of the limiters that are made over the store. Limiters that exist already keep their
    /// observers. Adding an observer again has no effect.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::sync::Arc;
    /// use tower_ratelimit::{RedisStore, observe::TopDenied};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let denied = Arc::new(TopDenied::new(1_000));
    /// let store = RedisStore::lazy("redis://127.0.0.1/")?;
    /// store.add_observer(denied.clone());
    /// # Ok(())
    /// # }
    /// ```
    pub fn add_observer(&self, observer: Arc<dyn Observer>) {
        self.backend.monitor.add_observer(&self.backend.client, observer);
    }

    /// Starts the deadline of a call that takes several commands.
    pub(crate) fn start_deadline(&self) -> Deadline {
        Deadline::new(self.deadline)
    }

    /// Executes a command for a limiter. If the server does not know the script of an `EVALSHA`,
    /// sends the text.
    pub(crate) fn run<T>(
        &self,
        limiter: &'static str,
        deadline: Deadline,
        command: Cmd,
        text: &'static str,
    ) -> StoreFuture<T>
    where
        T: FromRedisValue + Send + 'static,
    {
        let backend = self.backend.clone();
        StoreFuture::pending(async move {
            let Backend { client, monitor, .. } = &*backend;
            let reply = client.execute(deadline, Command::script(&command, text)).await;
            let failed = |error| monitor.failed(client, limiter, error, false);
            let (reply, _) = reply.map_err(failed)?;
            Ok(reply)
        })
    }

    /// Releases units of a key by `run` in the background; again, if Redis has not executed that.
    pub(crate) fn release_by(
        &self,
        key: &str,
        run: impl Fn() -> ReleaseFuture + Send + Sync + 'static,
    ) {
        self.backend.client.execute_later(release::task(key, run));
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore")
            .field("prefix", &self.backend.prefix)
            .field("deadline", &self.deadline)
            .finish_non_exhaustive()
    }
}

impl Sealed for RedisStore {}

impl Store for RedisStore {
    fn into_any(self) -> AnyStore {
        AnyStore::Dyn(Arc::new(self))
    }
}

impl StoreCalls for RedisStore {
    fn decide(&self, request: &StoreRequest<'_>) -> StoreFuture<Outcome> {
        let start = Instant::now();
        let undecided = match self.backend.denials.look_up(request, start) {
            Lookup::Denied(decision) => {
                return StoreFuture::cached(Outcome::of_nothing(decision));
            }
            Lookup::Undecided(undecided) => undecided,
        };
        let deadline = Deadline::starting(start.into(), self.deadline);
        let Self { front, backend, .. } = self;
        let limiter = request.limits[0].settings.name;
        let resolve = {
            let backend = backend.clone();
            move |result| backend.resolve(limiter, undecided, result)
        };
        let open = || backend.open_ends(request.limits);
        match Plan::of(request, backend.client.is_cluster()) {
            Plan::Queue(limit) => {
                let queued = front.enter(limit, deadline);
                StoreFuture::pending(async move { resolve(queued.await) })
            }
            Plan::Hold(limit) => {
                let (front, limit, open) = (front.clone(), limit.kept(), open());
                let queued = front.enter(&limit.request(), deadline);
                StoreFuture::pending(async move {
                    let again = async || {
                        // The calls before it may have later deadlines.
                        let second = front.enter(&limit.request(), deadline);
                        let second = deadline.wait_for(second).await;
                        second.unwrap_or_else(|| Err(TransportError::timeout(deadline.within())))
                    };
                    resolve(open.execute(queued, again, deadline).await)
                })
            }
            Plan::Call => {
                let call = ScriptCall::new(backend, request);
                StoreFuture::pending(async move {
                    resolve(call.execute(deadline, &Arc::default()).await)
                })
            }
            Plan::Task => {
                let (call, open) = (Arc::new(ScriptCall::new(backend, request)), open());
                StoreFuture::pending(async move {
                    let execute = async || late::execute(&call, deadline).await.map(Charged::take);
                    resolve(open.execute(execute(), execute, deadline).await)
                })
            }
            Plan::InOrder => {
                let (calls, open) = (CrossSlot::new(backend, request), open());
                StoreFuture::pending(async move {
                    let execute = || calls.execute_in_order(deadline);
                    resolve(open.execute(execute(), execute, deadline).await)
                })
            }
            Plan::AtOnce => {
                let calls = CrossSlot::new(backend, request);
                StoreFuture::pending(async move { resolve(calls.execute_all(deadline).await) })
            }
        }
    }

    fn release_in_background(
        &self,
        settings: &Arc<Settings>,
        key: &Key<'_>,
        release: Release,
        offer: Option<Arc<Offer>>,
    ) -> Option<Task> {
        let begin = {
            let (denials, settings) = (self.backend.denials.clone(), settings.clone());
            let key = key.clone().into_owned();
            move || denials.begin_return(&settings, &key)
        };
        let (signal, executed) = oneshot::channel::<()>();
        let (until_executed, returned) = ((begin(), signal), move || drop(begin()));
        let key = self.backend.key(settings, key);
        let job = release::job(&settings.params, &key, release, offer, until_executed, returned);
        self.backend.client.execute_later(job);
        Some(Box::pin(async move { drop(executed.await) }))
    }

    fn keep_hold(&self, hold: &dyn Fn() -> RenewableHold) -> Option<Box<dyn HoldGuard>> {
        Some(Keeper::of(&self.backend).keep(hold()))
    }

    fn reset(&self, settings: &Arc<Settings>, key: &Key<'_>) -> StoreFuture<()> {
        let change = self.backend.denials.begin_reset(settings, key);
        let mut del = redis::cmd("DEL");
        let key = self.backend.key(settings, key);
        del.arg(&key);
        let (backend, deadline) = (self.backend.clone(), self.start_deadline());
        let limiter = settings.name;
        StoreFuture::pending(async move {
            let Backend { client, monitor, .. } = &*backend;
            let reply = client.execute(deadline, Command::new(&del)).await;
            drop(change);
            let ((), _) = reply.map_err(|error| monitor.failed(client, limiter, error, true))?;
            Ok(())
        })
    }

    fn observers(&self) -> Observers {
        self.backend.monitor.observers()
    }

    fn add_observer(&self, observer: Arc<dyn Observer>) {
        self.add_observer(observer);
    }

    fn blocked_until(&self, settings: &Arc<Settings>, key: &Key<'_>) -> Option<Instant> {
        self.backend.denials.blocked_until(settings, key)
    }

    fn spawn_background(&self, task: Task) {
        let open = self.backend.calls.begin();
        let task = async move {
            task.await;
            drop(open);
        };
        // The connection for its answer is usually in the current runtime.
        match Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn(task)),
            Err(_) => drop(home::spawn(task)),
        }
    }

    fn fallback(&self) -> Option<AnyStore> {
        Some(self.fallback.get_or_init(MemoryStore::new).clone().into_any())
    }

    fn flush(&self) -> Task {
        let store = self.clone();
        Box::pin(async move { Self::flush(&store).await })
    }

    fn ping(&self) -> Ping {
        let store = self.clone();
        Box::pin(async move { Self::ping(&store).await })
    }

    fn health(&self) -> Health {
        Self::health(self)
    }

    fn names(&self) -> &Names {
        &self.names
    }
}

#[cfg(test)]
mod tests {
    use std::{
        iter,
        sync::atomic::{AtomicUsize, Ordering::SeqCst},
        task::{Context, Wake, Waker},
    };

    use super::*;
    use crate::{
        algorithm::{HoldReceipt, Params},
        quota::Quota,
        store::{Reporting, Source},
        sync::lock,
    };

    /// Names the plan of a request with this action: each limit has a key, a longest wait, and
    /// whether its units are held.
    fn plan(action: Action, limits: &[(&str, u64, bool)], is_cluster: bool) -> String {
        let quota = Quota::per_day(9);
        let algorithm = Algorithm::token_bucket();
        let params = Params::new(algorithm, quota).unwrap();
        let settings = Arc::new(Settings::new("a", algorithm, quota, params, Source::Store));
        let observers = Observers::default();
        let keys: Vec<_> = limits.iter().map(|limit| Key::from(limit.0)).collect();
        let limit = |(key, &(_, max_wait, holds)): (_, &(_, u64, bool))| {
            let hold = holds.then_some(Duration::from_secs(1));
            let (settings, observers) = (&settings, &observers);
            LimitRequest { settings, observers, key, cost: 1, max_wait, hold }
        };
        let limits: Vec<_> = keys.iter().zip(limits).map(limit).collect();
        let request = StoreRequest::new(action, &limits, Reporting::Each);
        let plan = format!("{:?}", Plan::of(&request, is_cluster));
        plan.split('(').next().unwrap().to_owned()
    }

    #[test]
    fn the_plan_of_a_request_follows_from_its_action_its_limits_and_the_kind_of_server() {
        let (spent, waits, held) = (("a", 0, false), ("a", 1, false), ("a", 0, true));
        let other = ("b", 0, false);
        for (action, limits, on_one_server, in_cluster) in [
            (Action::Check, &[spent][..], "Queue", "Queue"),
            (Action::Check, &[waits], "Queue", "Queue"),
            (Action::Check, &[held], "Hold", "Hold"),
            (Action::Peek, &[spent], "Call", "Call"),
            (Action::Spend, &[spent], "Call", "Call"),
            (Action::Check, &[spent, spent], "Call", "Call"),
            (Action::Check, &[spent, waits], "Task", "Task"),
            (Action::Check, &[held, spent], "Task", "Task"),
            (Action::Check, &[spent, other], "Call", "InOrder"),
            (Action::Check, &[held, other], "Task", "InOrder"),
            (Action::Peek, &[spent, other], "Call", "InOrder"),
            (Action::Spend, &[spent, other], "Call", "AtOnce"),
            (Action::Refund, &[spent, other], "Call", "AtOnce"),
        ] {
            let plans = [false, true].map(|is_cluster| plan(action, limits, is_cluster));
            assert_eq!(plans, [on_one_server, in_cluster], "{action:?} {limits:?}");
        }
    }

    #[test]
    fn a_bounded_number_of_calls_is_awaited_and_each_that_ends_makes_room() {
        let store = RedisStore::lazy("redis://127.0.0.1/").unwrap();
        let begin = || store.backend.begin_late_call();
        let mut calls: Vec<_> = iter::from_fn(begin).collect();
        assert_eq!(calls.len(), 1_000);
        assert!(store.clone().backend.begin_late_call().is_none());
        calls.pop();
        let last = begin();
        assert!(last.is_some() && begin().is_none());
    }

    /// The task that sends ends, when it is told to hurry: it records how many it finds.
    struct Hurried(Arc<Backend>, AtomicUsize);

    impl Wake for Hurried {
        fn wake(self: Arc<Self>) {
            self.1.store(lock(&self.0.holds).take_due().ended.len(), SeqCst);
        }
    }

    #[test]
    fn an_end_is_there_when_the_task_that_sends_it_is_told_to_hurry() {
        let backend = RedisStore::lazy("redis://127.0.0.1/").unwrap().backend.clone();
        lock(&backend.holds).has_task = true; // the test is the task
        let (algorithm, quota) = (Algorithm::concurrency(), Quota::concurrent(1));
        let params = Params::new(algorithm, quota).unwrap();
        let hold = Keeper::of(&backend).keep(RenewableHold {
            settings: Arc::new(Settings::new("a", algorithm, quota, params, Source::Store)),
            observers: Observers::default(),
            key: "k".into(),
            units: 1,
            lifetime: Duration::from_secs(60),
            receipt: HoldReceipt { epoch: 0, ends: 0 },
            age: Duration::ZERO,
        });
        let hurried = Arc::new(Hurried(backend.clone(), AtomicUsize::new(0)));
        let mut needed = pin!(backend.ends.needed());
        let waker = Waker::from(hurried.clone());
        assert!(needed.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        hold.end(0);
        assert_eq!(hurried.1.load(SeqCst), 1);
    }
}
