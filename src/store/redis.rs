use std::{
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use redis::{
    Client, Cmd, ErrorKind, FromRedisValue, IntoConnectionInfo, ProtocolVersion, RedisError,
    Script, ServerErrorKind,
    aio::{ConnectionManager, ConnectionManagerConfig},
    io::tcp::TcpSettings,
};

use super::{Answer, Backend, Call, Names, Rule, Store};
use crate::{
    algorithm::{Params, Verdict},
    decision::Decision,
    error::StoreError,
};

const DEFAULT_DEADLINE: Duration = Duration::from_secs(1);
const DEFAULT_PREFIX: &str = "ratelimit";

/// Counts in Redis: one count for all replicas, exact, changed by one atomic script per decision.
///
/// It works with Redis from 6.2 on, and with Valkey. Clones share one multiplexed connection; if it
/// breaks, the store connects again by itself. The clock is that of the Redis server.
///
/// # Keys
///
/// A key is called `PREFIX:LIMITER:ALGORITHM:{KEY}`, for example
/// `ratelimit:default:token-bucket:{header:x-api-key=alice}`, so that `redis-cli --scan` shows what there is.
/// The braces make `KEY` decide about the slot in a cluster. A key expires when it is as if never seen.
///
/// # Permissions
///
/// The scripts use the commands `EVALSHA EVAL TIME GET SET DEL PEXPIREAT` and, for the sliding log,
/// `LRANGE LLEN LINDEX LSET LTRIM RPUSH`.
///
/// # When Redis is away
///
/// Each decision has a deadline, 1 s unless [`deadline`](RedisStore::deadline) says otherwise, and fails
/// with a [`StoreError`] then; the layer answers 503. A decision that failed may have been made in Redis
/// all the same. The store neither waits nor retries beyond the deadline, and goes on as soon as Redis is
/// back.
///
/// In a test with tokio's paused time the deadline passes at once while the runtime waits for Redis.
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
    link: Arc<Link>,
    prefix: Arc<str>,
    deadline: Duration,
    names: Names,
}

impl RedisStore {
    /// Connects to the server at `url`: `redis://[[USER]:PASSWORD@]HOST[:PORT][/DB]` or
    /// `unix:///PATH[?db=DB]`.
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
        store.link.query::<String>(store.deadline, redis::cmd("PING")).await?;
        Ok(store)
    }

    /// Makes a store that connects to the server at `url` when it is first used.
    ///
    /// # Errors
    ///
    /// If the URL is wrong.
    pub fn lazy(url: &str) -> Result<Self, StoreError> {
        Ok(Self {
            link: Arc::new(Link::new(url).map_err(StoreError::unavailable)?),
            prefix: DEFAULT_PREFIX.into(),
            deadline: DEFAULT_DEADLINE,
            names: Names::default(),
        })
    }

    /// Sets what the names of all keys in Redis begin with, `ratelimit` by default. Limiters of the same
    /// name count apart if their prefixes differ.
    ///
    /// # Panics
    ///
    /// If the prefix holds a `{`, which would decide about the slots in a cluster.
    #[must_use]
    pub fn prefix(self, prefix: &str) -> Self {
        assert!(!prefix.contains('{'), "the prefix {prefix:?} holds a '{{'");
        Self { prefix: prefix.into(), names: Names::default(), ..self }
    }

    /// Sets the time within which every decision is made or fails, 1 s by default.
    #[must_use]
    pub fn deadline(self, deadline: Duration) -> Self {
        Self { deadline, ..self }
    }

    fn key(&self, rule: &Rule, key: &str) -> String {
        let Rule { name, algorithm, .. } = rule;
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

impl Backend for RedisStore {
    fn call(&self, call: &Call<'_>) -> Answer<Decision> {
        let (quota, cost) = (call.rule.quota, call.cost);
        let key = self.key(call.rule, call.key);
        let invocation = Invocation::new(call, key);
        let (link, deadline) = (self.link.clone(), self.deadline);
        Answer::Pending(Box::pin(async move {
            let reply = link.within(deadline, |line| invocation.run(line)).await?;
            Ok(Decision::new(quota, cost, reply.into()))
        }))
    }

    fn reset(&self, rule: &Rule, key: &str) -> Answer<()> {
        let mut del = redis::cmd("DEL");
        del.arg(self.key(rule, key));
        let (link, deadline) = (self.link.clone(), self.deadline);
        Answer::Pending(Box::pin(async move { link.query(deadline, del).await }))
    }

    fn names(&self) -> &Names {
        &self.names
    }
}

/// A script with its key and arguments.
struct Invocation {
    params: Params,
    by_hash: Cmd,
}

impl Invocation {
    fn new(call: &Call<'_>, key: String) -> Self {
        let params = call.rule.params;
        let mut by_hash = redis::cmd("EVALSHA");
        let hash =
            call.rule.script_hash.get_or_init(|| Script::new(params.script()).get_hash().into());
        by_hash.arg(&**hash).arg(1).arg(key);
        by_hash.arg(call.action.name()).arg(call.cost).arg(call.max_wait as u64);
        for arg in params.args() {
            by_hash.arg(arg as u64);
        }
        Self { params, by_hash }
    }

    /// Runs the script by its hash, and with its text if the server does not know it yet: that is not
    /// run twice, and the server knows it from then on.
    async fn run(self, mut line: Line) -> Result<Reply, RedisError> {
        match line.query(&self.by_hash).await {
            Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {
                let mut by_text = redis::cmd("EVAL");
                by_text.arg(self.params.script());
                for arg in self.by_hash.args_iter().skip(2) {
                    if let redis::Arg::Simple(arg) = arg {
                        by_text.arg(arg);
                    }
                }
                line.query(&by_text).await
            }
            reply => reply,
        }
    }
}

/// What every script returns.
type Reply = (i64, u64, u64, u64, u64);

impl From<Reply> for Verdict {
    fn from((admitted, wait, remaining, replenish, reset): Reply) -> Self {
        Self {
            admitted: admitted == 1,
            wait: wait as f64,
            remaining: remaining as f64,
            replenish: replenish as f64,
            reset: reset as f64,
        }
    }
}

/// The connection to the server, made when it is first needed.
struct Link {
    client: Client,
    line: Mutex<Option<Line>>,
}

/// A connection, and how many answers came over it.
#[derive(Clone)]
struct Line {
    manager: ConnectionManager,
    answers: Arc<AtomicU64>,
}

impl Link {
    fn new(url: &str) -> Result<Self, RedisError> {
        let info = url.into_connection_info()?;
        let mut settings = info.redis_settings().clone();
        if !url.contains("protocol=") {
            // With RESP3 the manager notices a broken connection at once, not with the next request.
            settings = settings.set_protocol(ProtocolVersion::RESP3);
        }
        let info = info
            .set_redis_settings(settings)
            .set_tcp_settings(TcpSettings::default().set_nodelay(true));
        Ok(Self { client: Client::open(info)?, line: Mutex::new(None) })
    }

    async fn query<T: FromRedisValue>(
        &self,
        deadline: Duration,
        cmd: Cmd,
    ) -> Result<T, StoreError> {
        self.within(deadline, |mut line| async move { line.query(&cmd).await }).await
    }

    /// Asks over the connection, and fails at the deadline.
    async fn within<T, F>(
        &self,
        deadline: Duration,
        ask: impl FnOnce(Line) -> F,
    ) -> Result<T, StoreError>
    where
        F: Future<Output = Result<T, RedisError>>,
    {
        let line = self.line().map_err(StoreError::unavailable)?;
        let seen = line.answers();
        match tokio::time::timeout(deadline, ask(line.clone())).await {
            Ok(answer) => answer.map_err(StoreError::unavailable),
            Err(_) => {
                // The manager gives up a connection that was closed. This one is open, has worked, and
                // gave nobody an answer for as long as the deadline.
                if seen > 0 && line.answers() == seen {
                    self.give_up(&line);
                }
                Err(StoreError::timeout(deadline))
            }
        }
    }

    fn give_up(&self, line: &Line) {
        let mut current = self.lock();
        if current.as_ref().is_some_and(|other| Arc::ptr_eq(&other.answers, &line.answers)) {
            *current = None;
        }
    }

    fn line(&self) -> Result<Line, RedisError> {
        let mut line = self.lock();
        if let Some(line) = &*line {
            return Ok(line.clone());
        }
        // The decisions have a deadline of their own; a failed attempt is repeated by the next one.
        let config = ConnectionManagerConfig::new()
            .set_response_timeout(None)
            .set_connection_timeout(Some(Duration::from_secs(5)))
            .set_number_of_retries(0);
        let manager = ConnectionManager::new_lazy_with_config(self.client.clone(), config)?;
        Ok(line.insert(Line { manager, answers: Arc::default() }).clone())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Line>> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Line {
    async fn query<T: FromRedisValue>(&mut self, cmd: &Cmd) -> Result<T, RedisError> {
        let answer = match cmd.query_async(&mut self.manager).await {
            // Nothing was sent; and it may be an earlier attempt to connect that failed.
            Err(error) if error.is_connection_refusal() => cmd.query_async(&mut self.manager).await,
            answer => answer,
        };
        self.answers.fetch_add(1, Ordering::Relaxed);
        answer
    }

    fn answers(&self) -> u64 {
        self.answers.load(Ordering::Relaxed)
    }
}
