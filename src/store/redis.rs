use std::{
    fmt,
    pin::Pin,
    sync::{Arc, Mutex, OnceLock},
    time::{Duration, Instant},
};

use redis::{
    AsyncConnectionConfig, Client, Cmd, ErrorKind, FromRedisValue, IntoConnectionInfo,
    ProtocolVersion, PushInfo, PushKind, RedisError, ServerErrorKind,
    aio::{MultiplexedConnection, SendError},
    io::tcp::TcpSettings,
};
use tokio::{runtime::Handle, time::timeout};

use super::{Answer, Backend, Call, Demand, Names, Settings, Store, lock};
use crate::{
    algorithm::{self, SCRIPTS, Verdict},
    decision::{Decision, Policy},
    error::{Error, StoreError},
};

const DEFAULT_DEADLINE: Duration = Duration::from_secs(1);
/// An attempt to connect may take longer than a decision.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// After a failed attempt to connect, its error is the answer for so long.
const RETRY_AFTER: Duration = Duration::from_millis(20);
/// So long the difference of two clocks is taken as steady.
const PERIOD: Duration = Duration::from_secs(10);
/// A connection that is open, but gives nobody an answer for so long, is given up.
const LONGEST_SILENCE: Duration = Duration::from_secs(1);

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
/// The braces make `KEY` decide about the slot in a cluster. A key expires when it is as if never seen. While
/// requests wait for their turns, there is a list of these beside it, of the same name with `:turns` behind.
///
/// # Permissions
///
/// The store uses the commands `HELLO PING SELECT EVALSHA EVAL TIME GET SET DEL`, and for the sliding log and
/// for requests that wait `LINDEX LLEN LPOP LRANGE LSET LTRIM PEXPIREAT RPUSH`. It speaks RESP3; where a
/// proxy does not know that, add `?protocol=resp2` to the URL.
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
            names: Names::default().scoped(DEFAULT_PREFIX),
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
        Self { prefix: prefix.into(), names: self.names.scoped(prefix), ..self }
    }

    /// Sets the time within which every decision is made or fails, 1 s by default.
    #[must_use]
    pub fn deadline(self, deadline: Duration) -> Self {
        Self { deadline, ..self }
    }

    /// Sends a command; if that is an `EVALSHA` of what the server does not know, once more with the text.
    pub(crate) fn run<T>(&self, command: Cmd, text: &'static str) -> Answer<T>
    where
        T: FromRedisValue + Send + 'static,
    {
        let (link, deadline) = (self.link.clone(), self.deadline);
        Answer::Pending(Box::pin(async move {
            let ask = async |connection: &mut Connection| connection.eval(&command, text).await;
            link.within(deadline, ask).await.map_err(Error::from)
        }))
    }

    fn key(&self, settings: &Settings, key: &str) -> String {
        let Settings { name, algorithm, .. } = settings;
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
        let limits: Vec<Policy> = call.demands.iter().map(Demand::policy).collect();
        let invocation = Invocation::new(self, call);
        let (link, deadline) = (self.link.clone(), self.deadline);
        Answer::Pending(Box::pin(async move {
            let ask = async |connection: &mut Connection| {
                let asked = Instant::now();
                let Invocation { script, by_hash } = &invocation;
                let reply: Vec<u64> = connection.eval(by_hash, &script.text).await?;
                let (verdict, limit) = read(&reply, &limits)?;
                let age = if verdict.admitted { connection.age(asked, verdict) } else { 0.0 };
                Ok(Decision::new(limit, verdict, age))
            };
            link.within(deadline, ask).await.map_err(Error::from)
        }))
    }

    fn detach(&self, task: Pin<Box<dyn Future<Output = ()> + Send>>) {
        if let Some(runtime) = Handle::try_current().ok().or_else(|| self.link.runtime()) {
            runtime.spawn(task);
        }
    }

    fn reset(&self, settings: &Settings, key: &str) -> Answer<()> {
        let mut del = redis::cmd("DEL");
        let key = self.key(settings, key);
        del.arg(&key).arg(turns_key(&key));
        let (link, deadline) = (self.link.clone(), self.deadline);
        Answer::Pending(Box::pin(async move { Ok(link.query(deadline, del).await?) }))
    }

    fn names(&self) -> &Names {
        &self.names
    }
}

/// Where the turns are that are booked for a key.
fn turns_key(key: &str) -> String {
    [key, ":turns"].concat()
}

struct Script {
    text: String,
    /// By which a server knows it.
    hash: Box<str>,
}

impl Script {
    fn of(demands: &[Demand<'_>]) -> &'static Self {
        static ALONE: [OnceLock<Script>; SCRIPTS.len()] =
            [const { OnceLock::new() }; SCRIPTS.len()];
        static TOGETHER: [OnceLock<Script>; 1 << SCRIPTS.len()] =
            [const { OnceLock::new() }; 1 << SCRIPTS.len()];
        match demands {
            [demand] => {
                let place = demand.settings.params.place();
                ALONE[place].get_or_init(|| Self::new(algorithm::script_alone(place)))
            }
            _ => {
                let places = demands.iter().map(|demand| demand.settings.params.place());
                let all = places.fold(0, |all, place| all | 1 << place);
                TOGETHER[all].get_or_init(|| Self::new(algorithm::script_together(all)))
            }
        }
    }

    fn new(text: String) -> Self {
        let hash = redis::Script::new(&text).get_hash().into();
        Self { text, hash }
    }
}

/// A script with its keys and arguments.
struct Invocation {
    script: &'static Script,
    by_hash: Cmd,
}

impl Invocation {
    fn new(store: &RedisStore, call: &Call<'_>) -> Self {
        let script = Script::of(call.demands);
        let mut by_hash = redis::cmd("EVALSHA");
        by_hash.arg(&*script.hash).arg(2 * call.demands.len());
        for demand in call.demands {
            let key = store.key(demand.settings, demand.key);
            by_hash.arg(&key).arg(turns_key(&key));
        }
        by_hash.arg(call.action.name()).arg(call.turn as u64);
        for demand in call.demands {
            let params = &demand.settings.params;
            let args = params.args();
            if call.demands.len() > 1 {
                by_hash.arg(SCRIPTS[params.place()].0).arg(args.len() + 2);
            }
            by_hash.arg(demand.cost).arg(demand.max_wait as u64);
            for arg in args {
                by_hash.arg(arg as u64);
            }
        }
        Self { script, by_hash }
    }
}

/// Reads what a script returns: the verdict, and of several limits the one that binds.
fn read(reply: &[u64], limits: &[Policy]) -> Result<(Verdict, Policy), RedisError> {
    let garbage = || RedisError::from((ErrorKind::UnexpectedReturnType, "not a verdict"));
    let &[admitted, wait, remaining, replenish, reset, turn, ref binding @ ..] = reply else {
        return Err(garbage());
    };
    let binding = binding.first().map_or(0, |&number| (number as usize).wrapping_sub(1));
    let limit = *limits.get(binding).ok_or_else(garbage)?;
    let verdict = Verdict {
        admitted: admitted == 1,
        wait: wait as f64,
        remaining: remaining as f64,
        replenish: replenish as f64,
        reset: reset as f64,
        turn: turn as f64,
    };
    Ok((verdict, limit))
}

/// The connection to the server: made when it is first needed, and again when it breaks.
struct Link {
    client: Client,
    current: Arc<Mutex<Option<Connection>>>,
    /// Held while connecting, so that one attempt serves all; the last failure.
    connecting: tokio::sync::Mutex<Option<(Instant, RedisError)>>,
}

#[derive(Clone)]
struct Connection {
    inner: MultiplexedConnection,
    /// Where the connection was made.
    runtime: Handle,
    answers: Arc<Mutex<Answers>>,
}

/// What is known of a connection from its answers.
struct Answers {
    first: Instant,
    last: Instant,
    /// The least difference of our clock and the server's, in microseconds, in this period and the one
    /// before: it is nearest to that without the way of an answer.
    least: [f64; 2],
    period: Instant,
}

impl Link {
    fn new(url: &str) -> Result<Self, RedisError> {
        let info = url.into_connection_info()?;
        let mut settings = info.redis_settings().clone();
        if !url.contains("protocol=") {
            // With RESP3 a broken connection is noticed at once, not with the next request.
            settings = settings.set_protocol(ProtocolVersion::RESP3);
        }
        let info = info
            .set_redis_settings(settings)
            .set_tcp_settings(TcpSettings::default().set_nodelay(true));
        Ok(Self {
            client: Client::open(info)?,
            current: Arc::default(),
            connecting: tokio::sync::Mutex::default(),
        })
    }

    async fn query<T: FromRedisValue>(
        &self,
        deadline: Duration,
        cmd: Cmd,
    ) -> Result<T, StoreError> {
        self.within(deadline, async |connection| connection.query(&cmd).await).await
    }

    /// Asks over the connection, and fails at the deadline.
    async fn within<T>(
        &self,
        deadline: Duration,
        ask: impl AsyncFnOnce(&mut Connection) -> Result<T, RedisError>,
    ) -> Result<T, StoreError> {
        let mut used = None;
        let answer = async {
            let connection = used.insert(self.connection().await?);
            ask(connection).await
        };
        match timeout(deadline, answer).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(error)) => {
                if let Some(connection) = used.filter(|_| is_of_the_connection(&error)) {
                    self.give_up(&connection);
                }
                Err(StoreError::unavailable(error))
            }
            Err(_) => {
                let silence = deadline.max(LONGEST_SILENCE);
                if let Some(connection) = used.filter(|it| it.silence() >= silence) {
                    self.give_up(&connection);
                }
                Err(StoreError::timeout(deadline))
            }
        }
    }

    async fn connection(&self) -> Result<Connection, RedisError> {
        if let Some(connection) = &*lock(&self.current) {
            return Ok(connection.clone());
        }
        let mut failure = self.connecting.lock().await;
        if let Some(connection) = &*lock(&self.current) {
            return Ok(connection.clone());
        }
        if let Some((_, error)) = failure.as_ref().filter(|(at, _)| at.elapsed() < RETRY_AFTER) {
            return Err(error.clone());
        }
        // A task of its own, so that it goes on if this request's deadline passes.
        let attempt = tokio::spawn(connect(self.client.clone(), self.current.clone()));
        let result = attempt.await.unwrap_or_else(|_| {
            Err(RedisError::from((ErrorKind::Io, "the attempt to connect was given up")))
        });
        *failure = result.as_ref().err().map(|error| (Instant::now(), error.clone()));
        result
    }

    fn runtime(&self) -> Option<Handle> {
        lock(&self.current).as_ref().map(|connection| connection.runtime.clone())
    }

    fn give_up(&self, connection: &Connection) {
        lock(&self.current).take_if(|current| current.is(connection));
    }
}

async fn connect(
    client: Client,
    current: Arc<Mutex<Option<Connection>>>,
) -> Result<Connection, RedisError> {
    let slot = Arc::downgrade(&current);
    let answers = Arc::new(Mutex::new(Answers::new()));
    let broken = Arc::downgrade(&answers);
    // The decisions have a deadline of their own.
    let config = AsyncConnectionConfig::new()
        .set_response_timeout(None)
        .set_connection_timeout(Some(CONNECT_TIMEOUT));
    let config = match client.get_connection_info().redis_settings().protocol() {
        ProtocolVersion::RESP3 => config.set_push_sender(move |push: PushInfo| {
            if push.kind == PushKind::Disconnection
                && let Some(slot) = slot.upgrade()
            {
                lock(&slot).take_if(|it| Arc::as_ptr(&it.answers) == broken.as_ptr());
            }
            Ok::<(), SendError>(())
        }),
        _ => config,
    };
    let inner = client.get_multiplexed_async_connection_with_config(&config).await?;
    let mut connection = Connection { inner, runtime: Handle::current(), answers };
    // While nothing else is on the way, so that the clocks are compared well.
    let asked = Instant::now();
    let time = redis::cmd("TIME");
    if let Ok(time) = timeout(CONNECT_TIMEOUT, connection.query(&time)).await {
        let (seconds, micros): (f64, f64) = time?;
        lock(&connection.answers).age(asked, seconds * 1e6 + micros);
    }
    *lock(&current) = Some(connection.clone());
    Ok(connection)
}

/// Whether an error means that the connection is of no use, and not that the server refused a command.
fn is_of_the_connection(error: &RedisError) -> bool {
    error.is_io_error()
        || error.is_unrecoverable_error()
        // After a failover the server may have become a replica. Redis 6.2 puts what stops a script into an `ERR`.
        || error.kind() == ErrorKind::Server(ServerErrorKind::ReadOnly)
        || error.detail().is_some_and(|detail| detail.contains(" -READONLY "))
}

impl Connection {
    async fn query<T: FromRedisValue>(&mut self, cmd: &Cmd) -> Result<T, RedisError> {
        let answer = cmd.query_async(&mut self.inner).await;
        lock(&self.answers).last = Instant::now();
        answer
    }

    /// Runs a script by its hash, and with its text if the server does not know it yet: that is not run
    /// twice, and the server knows it from then on.
    async fn eval<T: FromRedisValue>(
        &mut self,
        by_hash: &Cmd,
        text: &str,
    ) -> Result<T, RedisError> {
        match self.query(by_hash).await {
            Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {
                let mut by_text = redis::cmd("EVAL");
                by_text.arg(text);
                for arg in by_hash.args_iter().skip(2) {
                    if let redis::Arg::Simple(arg) = arg {
                        by_text.arg(arg);
                    }
                }
                self.query(&by_text).await
            }
            reply => reply,
        }
    }

    /// How long ago the server decided, in microseconds. It makes those whose answers have different ways
    /// go on in the order of their turns.
    fn age(&self, asked: Instant, verdict: Verdict) -> f64 {
        lock(&self.answers).age(asked, verdict.turn - verdict.wait)
    }

    fn silence(&self) -> Duration {
        lock(&self.answers).last.elapsed()
    }

    fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.answers, &other.answers)
    }
}

impl Answers {
    fn new() -> Self {
        let now = Instant::now();
        Self { first: now, last: now, least: [f64::INFINITY; 2], period: now }
    }

    /// How long ago the server decided, at an instant of its clock.
    fn age(&mut self, asked: Instant, decided: f64) -> f64 {
        let now = Instant::now();
        let periods = (now - self.period).as_nanos() / PERIOD.as_nanos();
        if periods > 0 {
            self.least = [f64::INFINITY, if periods == 1 { self.least[0] } else { f64::INFINITY }];
            self.period = now;
        }
        let difference = (now - self.first).as_micros() as f64 - decided;
        self.least[0] = self.least[0].min(difference);
        // It was not before the question, whatever the server's clock does.
        let most = (now - asked).as_micros() as f64;
        (difference - self.least[0].min(self.least[1])).min(most)
    }
}
