//! The store in Redis: keys, scripts and their replies. How commands reach a server is in the modules below.

pub(crate) mod script;
mod transport;

use std::{fmt, mem, pin::Pin, sync::Arc, time::Duration};

use redis::{Cmd, FromRedisValue, aio::ConnectionLike};
use tokio::{runtime::Handle, task::JoinSet};

use self::script::{Decided, Limit, Script};
pub(crate) use self::transport::Deadline;
#[cfg(feature = "tls-rustls")]
pub use self::transport::Tls;
use self::transport::{
    ANSWER_TIMEOUT, DEFAULT_DEADLINE, DEFAULT_PREFIX, Job, Question, Releases, Route, Run, Server,
    assert_prefix,
};
pub use self::transport::{Health, RedisConfig};
use super::{Answer, AnyStore, Call, Demand, Names, Settings, Store};
use crate::{
    algorithm::{Action, Release},
    decision::{Decision, Policy, Receipt},
    error::StoreError,
    keys::Key,
};

/// Counts in Redis: one count for all replicas, exact, changed by one atomic script per decision.
///
/// It works with Redis from 6.2 on, and with Valkey: one server, a master behind [Sentinels](RedisStore::sentinel),
/// or a [cluster](RedisStore::cluster). [`RedisConfig`] has further settings, such as TLS certificates. Clones share
/// one multiplexed connection, or as many as [`connections`](RedisConfig::connections) says; if one breaks, the store
/// connects again by itself. The clock is that of the Redis server.
///
/// # Keys
///
/// A key is called `PREFIX:LIMITER:ALGORITHM:{KEY}`, for example
/// `ratelimit:default:token-bucket:{header:x-api-key=alice}`, so that `redis-cli --scan` shows what there is.
/// The braces make `KEY` decide about the slot in a cluster. A key expires when it is as if never seen. The
/// value begins with a letter for its form; reservations of waiting requests stand behind the state in the same value.
///
/// # When Redis is away
///
/// Each decision has a deadline, 100 ms unless [`deadline`](RedisStore::deadline) says otherwise.
/// It counts from the call, and includes connecting and all commands of the decision. Then the
/// decision fails with a [`StoreError`], and the layer does what its
/// [`FailurePolicy`](crate::FailurePolicy) says. A decision that failed may have been made in Redis
/// all the same.
///
/// After five calls in a row without an answer in time, Redis is taken as unavailable: decisions
/// fail at once, and one probe at a time finds out when Redis answers again. An answer that comes
/// later than the deadline proves nothing: Redis stays unavailable while it is slower than that.
/// [`health`](RedisStore::health) reports this, and so do events of the crate `tracing`, with the
/// feature of that name.
///
/// If the process does not run for a while (it was stopped, or a task blocked the runtime) and
/// finds the deadline passed, it still reads for up to 20 ms what Redis has answered meanwhile.
/// Such a decision is late, and no failure.
///
/// In a test with tokio's paused time the deadline passes at once while the runtime waits for Redis.
///
/// What each kind of failure does, and which permissions the store needs, is told in
/// [the page on operation](crate::operation).
///
/// # Examples
///
/// ```no_run
/// use tower_ratelimit::{Algorithm, Limiter, Quota, RedisStore};
///
/// # async fn run() -> Result<(), Box<dyn std::error::Error>> {
/// let store = RedisStore::connect("redis://127.0.0.1/").await?;
/// let limiter = Limiter::new(store, Algorithm::token_bucket(), Quota::per_second(10));
///
/// if limiter.check("alice").await?.is_allowed() {
///     println!("hello, alice");
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct RedisStore {
    route: Route,
    prefix: Arc<str>,
    deadline: Duration,
    names: Names,
}

impl RedisStore {
    /// Makes a store from a description of where Redis is. It connects when it is first used.
    ///
    /// # Errors
    ///
    /// If the TLS settings cannot be used, or a user has no password.
    pub fn new(config: RedisConfig) -> Result<Self, StoreError> {
        let store = Self::over(config.route()?).prefix(&config.prefix);
        Ok(store.deadline(config.deadline))
    }

    /// Connects to the server at `url`, and proves by [`ping`](RedisStore::ping) that decisions can be made there with the
    /// default prefix (for another one use [`lazy`](RedisStore::lazy)): `redis://[[USER]:PASSWORD@]HOST[:PORT][/DB]` or
    /// `unix:///PATH[?db=DB&user=USER&pass=PASSWORD]`; with a TLS feature also `rediss://`.
    ///
    /// # Errors
    ///
    /// If the URL is wrong, or the server does not answer within a second.
    ///
    /// # Cancel safety
    ///
    /// The future can be dropped at any time.
    pub async fn connect(url: &str) -> Result<Self, StoreError> {
        let store = Self::lazy(url)?;
        store.ping().await?;
        Ok(store)
    }

    /// Makes a store that connects to the server at `url` when it is first used. See
    /// [`connect`](RedisStore::connect).
    ///
    /// # Errors
    ///
    /// If the URL is wrong.
    pub fn lazy(url: &str) -> Result<Self, StoreError> {
        Self::new(RedisConfig::server(url)?)
    }

    /// Makes a store over the master that Sentinels name, and follows it when it changes. It connects
    /// when it is first used.
    ///
    /// From then on the store keeps a connection to each Sentinel, also to those that it learns from
    /// the given ones. It subscribes to their announcements, and asks them each second. The server
    /// that most of them name counts, if its role is master.
    ///
    /// `sentinels` are the URLs of the Sentinels; `master` is that of the master, with its name in place of a host:
    /// `redis://[[USER]:PASSWORD@]NAME[/DB]`.
    ///
    /// # Errors
    ///
    /// If a URL is wrong, or there is none.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::RedisStore;
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let sentinels = ["redis://10.0.0.1:26379", "redis://10.0.0.2:26379", "redis://10.0.0.3:26379"];
    /// let store = RedisStore::sentinel(sentinels, "redis://limiter:secret@mymaster/0")?;
    /// # let _ = store;
    /// # Ok(())
    /// # }
    /// ```
    pub fn sentinel(
        sentinels: impl IntoIterator<Item = impl AsRef<str>>,
        master: &str,
    ) -> Result<Self, StoreError> {
        Self::new(RedisConfig::sentinels(sentinels, master)?)
    }

    /// Makes a store over a cluster, of which `urls` are some nodes. It connects when it is first used.
    ///
    /// Each key is on one of the masters. See [`Charge`](crate::Charge#in-a-cluster) for limits on several keys.
    ///
    /// Each node has connections of its own, and is taken as unavailable by itself: the decisions about its keys
    /// fail, and the others go on. The store follows when a replica takes over, and when slots move. It needs the
    /// commands `CLUSTER SLOTS` and `ASKING` for that. While a slot is moved key by key, decisions about
    /// several limits of one key wait within their deadline until all of these are on one node.
    ///
    /// # Errors
    ///
    /// If a URL is wrong, or there is none.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::RedisStore;
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let store = RedisStore::cluster(["redis://:secret@10.0.0.1", "redis://:secret@10.0.0.2"])?;
    /// # let _ = store;
    /// # Ok(())
    /// # }
    /// ```
    pub fn cluster(urls: impl IntoIterator<Item = impl AsRef<str>>) -> Result<Self, StoreError> {
        Self::new(RedisConfig::cluster(urls)?)
    }

    /// Makes a store over a connection that mends itself when it breaks, such as
    /// `redis::aio::ConnectionManager`. It leads to one server: for a cluster there is
    /// [`cluster`](RedisStore::cluster). When to connect again is up to the connection: the manager does not when a
    /// server hangs, or has become a replica, and requests that were not sent fail with the connection.
    #[must_use]
    pub fn from_connection<C>(connection: C) -> Self
    where
        C: ConnectionLike + Clone + Send + Sync + 'static,
    {
        Self::over(Route::to(Server::Given(Box::new(connection)), 1))
    }

    fn over(route: Route) -> Self {
        Self {
            route,
            prefix: DEFAULT_PREFIX.into(),
            deadline: DEFAULT_DEADLINE,
            names: Names::default().scoped(DEFAULT_PREFIX),
        }
    }

    /// Proves that decisions can be made: the server, or each master of a cluster that has slots, runs a script and
    /// allows writes. It may take a second to connect.
    ///
    /// # Errors
    ///
    /// If the server does not answer, is a replica, cannot write, or lacks a right that every decision needs: the
    /// error names it.
    ///
    /// # Cancel safety
    ///
    /// The future can be dropped at any time.
    pub async fn ping(&self) -> Result<(), StoreError> {
        let deadline = Deadline::new(ANSWER_TIMEOUT.max(self.deadline));
        self.route.ping(deadline, &self.prefix).await
    }

    /// Returns how well Redis answers, without calling it.
    #[must_use]
    pub fn health(&self) -> Health {
        self.route.health(self.deadline)
    }

    /// Sets what the names of all keys in Redis begin with, `ratelimit` by default. Limiters of the same
    /// name count apart if their prefixes differ.
    ///
    /// # Panics
    ///
    /// If the prefix holds a `{`, which would decide about the slots in a cluster.
    #[must_use]
    pub fn prefix(self, prefix: &str) -> Self {
        assert_prefix(prefix);
        Self { prefix: prefix.into(), names: self.names.scoped(prefix), ..self }
    }

    /// Sets the time within which every decision is made or fails, 100 ms by default. It counts
    /// from the call, and includes waiting for a connection and all commands of the decision: none
    /// is sent when the time is over.
    ///
    /// Clones with other deadlines share the connections. When Redis is too slow for one of them,
    /// those with a longer deadline still call it.
    #[must_use]
    pub fn deadline(self, deadline: Duration) -> Self {
        Self { deadline, ..self }
    }

    /// Starts the deadline of a call that takes several commands.
    pub(crate) fn start_deadline(&self) -> Deadline {
        Deadline::new(self.deadline)
    }

    /// Sends a command; if that is an `EVALSHA` of what the server does not know, once more with the text.
    pub(crate) fn run<T>(&self, deadline: Deadline, command: Cmd, text: &'static str) -> Answer<T>
    where
        T: FromRedisValue + Send + 'static,
    {
        let route = self.route.clone();
        Answer::Pending(Box::pin(async move {
            let (answer, _) = route.ask(deadline, Question::script(&command, text)).await?;
            Ok(answer)
        }))
    }

    /// Has a key released by `run`, when its turn among the releases has come; again, if that fails unsent.
    pub(crate) fn release_by(&self, key: &str, run: impl Fn() -> Run + Send + Sync + 'static) {
        self.route.release_later(Job::task(key.to_owned(), Box::new(run)));
    }

    fn key(&self, settings: &Settings, key: &Key<'_>) -> String {
        let Settings { name, algorithm, .. } = settings;
        // With nothing in the braces they would decide about no slot; no other key is written like this.
        let key = Some(key.as_str()).filter(|key| !key.is_empty()).unwrap_or("%");
        [&self.prefix, ":", name, ":", algorithm.name(), ":{", key, "}"].concat()
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore")
            .field("prefix", &self.prefix)
            .field("deadline", &self.deadline)
            .finish_non_exhaustive()
    }
}

impl Store for RedisStore {}

impl From<RedisStore> for AnyStore {
    fn from(store: RedisStore) -> Self {
        Self::Redis(store)
    }
}

impl RedisStore {
    pub(super) fn call(&self, call: &Call<'_>) -> Answer<Decision> {
        let (route, deadline) = (self.route.clone(), self.start_deadline());
        if !self.route.is_cluster() || call.demands.iter().all(|it| it.key == call.demands[0].key) {
            let question = ScriptCall::new(self, call);
            return Answer::Pending(Box::pin(
                async move { Ok(question.ask(&route, deadline).await?) },
            ));
        }
        let apart = Apart::new(self, call);
        let action = call.action;
        Answer::Pending(Box::pin(async move {
            Ok(match action.can_be_denied() {
                true => apart.ask(deadline).await?,
                false => apart.change(deadline).await?,
            })
        }))
    }

    pub(super) fn release(
        &self,
        settings: &Settings,
        key: &Key<'_>,
        release: Release,
    ) -> Answer<()> {
        let releases = Releases::new(settings, self.key(settings, key), release);
        let (route, deadline) = (self.route.clone(), self.start_deadline());
        Answer::Pending(Box::pin(async move { Ok(releases.send(&route, deadline).await?) }))
    }

    pub(super) fn release_later(&self, settings: &Settings, key: &Key<'_>, release: Release) {
        let releases = Releases::new(settings, self.key(settings, key), release);
        self.route.release_later(Job::Key(releases));
    }

    pub(crate) fn detach(&self, task: Pin<Box<dyn Future<Output = ()> + Send>>) {
        if let Some(runtime) = Handle::try_current().ok().or_else(|| self.route.runtime()) {
            runtime.spawn(task);
        }
    }

    pub(super) fn reset(&self, settings: &Arc<Settings>, key: &Key<'_>) -> Answer<()> {
        let mut del = redis::cmd("DEL");
        let key = self.key(settings, key);
        del.arg(&key);
        let (route, deadline) = (self.route.clone(), self.start_deadline());
        Answer::Pending(Box::pin(async move {
            let ((), _) = route.ask(deadline, Question::new(&del)).await?;
            Ok(())
        }))
    }

    pub(super) fn names(&self) -> &Names {
        &self.names
    }
}

/// A script with its keys and arguments.
struct ScriptCall {
    script: &'static Script,
    command: Cmd,
    action: Action,
    limits: Vec<Limit>,
    policies: Vec<Policy>,
}

impl ScriptCall {
    fn new(store: &RedisStore, call: &Call<'_>) -> Self {
        let limit = |demand: &Demand<'_>| {
            let Demand { settings, key, cost, max_wait } = *demand;
            let key = store.key(settings, key);
            Limit { key, params: settings.params, cost, max_wait }
        };
        let limits: Vec<_> = call.demands.iter().map(limit).collect();
        let (command, script) = script::decide(call.action, &limits);
        let policies = call.demands.iter().map(Demand::policy).collect();
        Self { script, command, action: call.action, limits, policies }
    }

    async fn ask(&self, route: &Route, deadline: Deadline) -> Result<Decision, StoreError> {
        let question = Question::script(&self.command, &self.script.text);
        let (reply, connection) = route.ask(deadline, question).await?;
        let decided = script::read(&reply, self.action, &self.limits);
        let Decided { reply, limit, now } = decided.map_err(StoreError::of_redis)?;
        let age = if reply.admitted { connection.age(now) } else { 0.0 };
        Ok(Decision::new(self.policies[limit], reply, self.action, age))
    }
}

/// A call about keys that may be on several servers, which have clocks of their own.
struct Apart {
    /// For each key a call.
    calls: Vec<ScriptCall>,
    /// For each limit the call that it is part of.
    call_of: Vec<usize>,
    /// For each limit its key, and what is charged for it.
    limits: Vec<(Arc<Settings>, String, u32)>,
    route: Route,
}

impl Apart {
    fn new(store: &RedisStore, call: &Call<'_>) -> Self {
        let mut keys: Vec<&Key<'_>> = vec![];
        let mut call_of = vec![];
        for demand in call.demands {
            let known = keys.iter().position(|key| *key == demand.key);
            call_of.push(known.unwrap_or_else(|| {
                keys.push(demand.key);
                keys.len() - 1
            }));
        }
        let of_key = |key| {
            let demands: Vec<_> = call.demands.iter().filter(|it| it.key == key).copied().collect();
            ScriptCall::new(store, &Call { demands: &demands, ..*call })
        };
        let limit =
            |it: &Demand<'_>| (it.settings.clone(), store.key(it.settings, it.key), it.cost);
        Self {
            calls: keys.into_iter().map(of_key).collect(),
            call_of,
            limits: call.demands.iter().map(limit).collect(),
            route: store.route.clone(),
        }
    }

    /// Asks one after the other. If one denies what the ones before have taken, or gives no answer, that is returned.
    async fn ask(self, deadline: Deadline) -> Result<Decision, StoreError> {
        let mut taken = Taken { apart: &self, instants: vec![] };
        let mut binding = None;
        for call in &self.calls {
            let decision = call.ask(&self.route, deadline).await?;
            if !decision.is_allowed() {
                return Ok(decision);
            }
            taken.instants.push(instant_of(&decision));
            binding = tighter(binding, decision);
        }
        let instants = mem::take(&mut taken.instants);
        Ok(self.with_receipts(binding, &instants))
    }

    /// Spends, or returns, wherever it can be.
    async fn change(self, deadline: Deadline) -> Result<Decision, StoreError> {
        let mut tasks = JoinSet::new();
        let calls = self.calls.len();
        let this = Arc::new(self);
        for place in 0..calls {
            let this = this.clone();
            tasks.spawn(async move { (place, this.calls[place].ask(&this.route, deadline).await) });
        }
        let (mut binding, mut failure) = (None, None);
        let mut instants = vec![0.0; calls];
        for (place, answer) in tasks.join_all().await {
            match answer {
                Ok(decision) => {
                    instants[place] = instant_of(&decision);
                    binding = tighter(binding, decision);
                }
                Err(error) => failure = Some(error),
            }
        }
        match failure {
            Some(error) => Err(error),
            None => Ok(this.with_receipts(binding, &instants)),
        }
    }

    fn with_receipts(&self, binding: Option<Decision>, instants: &[f64]) -> Decision {
        let of_limits = self.call_of.iter().map(|call| instants[*call]).collect();
        binding.expect("a request has a limit").with_receipts(of_limits)
    }
}

/// What the first servers have taken, which is returned unless all of them have decided.
struct Taken<'a> {
    apart: &'a Apart,
    /// Of the calls that were answered.
    instants: Vec<f64>,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        for ((settings, key, cost), call) in self.apart.limits.iter().zip(&self.apart.call_of) {
            if let Some(&instant) = self.instants.get(*call).filter(|instant| **instant > 0.0) {
                let (instant, units) = (Some(instant), (*cost).into());
                let release = Release { instant, units, kept: 0.0 };
                let releases = Releases::new(settings, key.clone(), release);
                self.apart.route.release_later(Job::Key(releases));
            }
        }
    }
}

/// That of a decision that has spent something; else one that names nothing.
fn instant_of(decision: &Decision) -> f64 {
    match decision.receipt() {
        Receipt::At(instant) => *instant,
        _ => 0.0,
    }
}

fn tighter(binding: Option<Decision>, other: Decision) -> Option<Decision> {
    Some(binding.filter(|it| it.remaining() <= other.remaining()).unwrap_or(other))
}
