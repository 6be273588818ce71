//! A connection to a server: it sends commands, and records what their replies prove about the
//! connection and the server. Reconnecting is in `channel.rs`.

use std::{
    io,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use redis::{Cmd, ErrorKind, FromRedisValue, RedisError, ServerErrorKind, Value};
use tokio::{runtime::Handle, task::yield_now, time::timeout};

use super::{
    breaker::Breaker,
    clock_offset::ClockOffset,
    command::Command,
    connector::{ANSWER_TIMEOUT, Traffic, race},
    error::{TransportError, is_of_one_key, is_reply, is_routine, is_write_rejection},
    server::{Connected, DynConnection, Server},
};
use crate::sync::lock;

/// The time limit of an attempt to connect, which may include queries to Sentinels.
pub(crate) const MAX_ATTEMPT: Duration = Duration::from_secs(3);

/// After this idle time, the server may have closed the connection before the runtime has noticed.
const IDLE: Duration = Duration::from_millis(10);

pub(crate) struct Connection {
    inner: Box<dyn DynConnection>,
    traffic: Option<Arc<Traffic>>,
    /// The number of bytes that were written before the last command.
    written_before: u64,
    /// The argument for [`Server::is_outdated`].
    generation: u64,
    /// The runtime in which the connection was made.
    runtime: Handle,
    state: Arc<Mutex<State>>,
    breaker: Arc<Breaker>,
    has_one_clock: bool,
    /// The start of the last call.
    called: Instant,
}

/// The state that the clones of a connection share.
struct State {
    made: Instant,
    /// The time of the last command.
    used: Instant,
    /// The time of the first command since the last reply.
    unanswered_since: Option<Instant>,
    clock_offset: ClockOffset,
}

/// Makes a connection to `server`.
pub(crate) async fn connect(
    server: &Server,
    breaker: &Arc<Breaker>,
) -> Result<Connection, RedisError> {
    loop {
        let connection = connect_once(server, breaker).await?;
        if connection.leads_to(server) {
            return Ok(connection);
        }
    }
}

async fn connect_once(server: &Server, breaker: &Arc<Breaker>) -> Result<Connection, RedisError> {
    let state = Arc::new(Mutex::new(State::new()));
    let attempt = timeout(MAX_ATTEMPT, server.connect()).await;
    let Connected { connection: inner, traffic, generation } =
        attempt.map_err(|_| (ErrorKind::Io, "the attempt to connect took too long"))??;
    let has_one_clock = server.has_one_clock();
    let mut connection = Connection {
        inner,
        traffic,
        written_before: 0,
        generation,
        runtime: Handle::current(),
        state,
        breaker: breaker.clone(),
        has_one_clock,
        called: Instant::now(),
    };
    if has_one_clock {
        // No other command delays this reply, so the first estimate of the offset is good.
        let time = redis::cmd("TIME");
        let time = timeout(ANSWER_TIMEOUT, connection.send(&time, false)).await;
        // If the connection has ended, no command was sent over it, and its callers take another
        // one.
        if !connection.has_ended()
            && let Ok(time) = time
        {
            let (seconds, micros): (f64, f64) = read(time)?;
            connection.age(seconds * 1e6 + micros);
        }
    }
    Ok(connection)
}

/// Converts a reply. A reply of an unexpected type is an error, but still a reply.
fn read<T: FromRedisValue>(reply: Result<Value, RedisError>) -> Result<T, RedisError> {
    T::from_redis_value(reply?.extract_error()?).map_err(|error| {
        (ErrorKind::UnexpectedReturnType, "unexpected reply", error.to_string()).into()
    })
}

impl Connection {
    /// Executes a command. If that is an `EVALSHA` of an unknown script, sends the text: the server
    /// has executed nothing then, and knows the script from now on.
    pub(crate) async fn execute<T: FromRedisValue>(
        &mut self,
        command: Command<'_>,
    ) -> Result<T, RedisError> {
        self.called = Instant::now();
        let reply = self.execute_once(command.cmd(), command).await;
        if let Err(error) = &reply
            && error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)
            && let Some(by_text) = command.by_text()
        {
            return self.execute_once(&by_text, command).await;
        }
        reply
    }

    async fn execute_once<T: FromRedisValue>(
        &mut self,
        cmd: &Cmd,
        command: Command<'_>,
    ) -> Result<T, RedisError> {
        if !command.is_ready() {
            self.notice_end_while_idle().await;
        }
        let sent = Instant::now();
        lock(&self.state).unanswered_since.get_or_insert(sent);
        self.written_before = self.traffic.as_ref().map_or(0, |it| it.written());
        let reply = read(self.send(cmd, command.is_asking()).await);
        let error = reply.as_ref().err();
        if error.is_none_or(is_reply) {
            lock(&self.state).unanswered_since = None;
            self.breaker.count_reply();
            if command.is_script() {
                let is_proof = !error.is_some_and(is_write_rejection);
                self.breaker.record_reply(sent.elapsed(), is_proof);
            }
            self.record_result(error, command);
        }
        reply
    }

    /// Records whether the server executed the command.
    fn record_result(&self, error: Option<&RedisError>, command: Command<'_>) {
        match error {
            None if command.is_script() => self.breaker.record_execution(),
            Some(error) if !is_routine(error) => {
                let is_of_one_key = is_of_one_key(error);
                let error = TransportError::of_redis(error.clone());
                self.breaker.count_error(&error);
                if command.is_script() && !is_of_one_key {
                    self.breaker.record_rejection(&error);
                }
            }
            _ => {}
        }
    }

    /// Lets the runtime read that the server has closed the connection. It could not while a task
    /// blocked it, or the process was stopped.
    pub(crate) async fn notice_end_while_idle(&self) {
        if lock(&self.state).used.elapsed() >= IDLE {
            yield_now().await;
        }
        lock(&self.state).used = Instant::now();
    }

    async fn send(&mut self, cmd: &Cmd, is_asking: bool) -> Result<Value, RedisError> {
        let traffic = self.traffic.clone();
        let inner = &mut self.inner;
        let reply = async {
            if !is_asking {
                return inner.req_packed_command(cmd).await;
            }
            // In one pipeline: ASKING holds for the next command on the connection, whichever task
            // sends that.
            let mut both = redis::pipe();
            both.cmd("ASKING").add_command(cmd.clone());
            let mut replies = inner.req_packed_commands(&both, 1, 1).await?;
            Ok(replies.pop().unwrap_or(Value::Nil))
        };
        let Some(traffic) = traffic else { return reply.await };
        // The crate can lose a command in its queue if the connection ends at this moment.
        let reply = race(reply, traffic.ended()).await;
        reply.unwrap_or_else(|| Err(io::Error::from(io::ErrorKind::BrokenPipe).into()))
    }

    /// Returns whether the connection ended before a byte of the last command was written.
    pub(crate) fn is_unsent(&self) -> bool {
        let is_unsent = |it: &Arc<Traffic>| it.has_ended() && it.written() == self.written_before;
        self.traffic.as_ref().is_some_and(is_unsent)
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.traffic.as_ref().is_some_and(|it| it.has_ended())
    }

    /// Returns the time since `instant` of the server's clock, in microseconds, for the last
    /// command; 0 if replies may come from several clocks.
    pub(crate) fn age(&self, instant: f64) -> f64 {
        if self.has_one_clock {
            lock(&self.state).clock_offset.age(self.called, instant)
        } else {
            0.0
        }
    }

    pub(crate) fn lifetime(&self) -> Duration {
        lock(&self.state).made.elapsed()
    }

    /// Returns the time for which commands have waited without any reply.
    pub(crate) fn silence(&self) -> Duration {
        lock(&self.state).unanswered_since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.state, &other.state)
    }

    /// Returns whether new connections to `server` lead to the same server.
    pub(crate) fn leads_to(&self, server: &Server) -> bool {
        !server.is_outdated(self.generation)
    }

    pub(crate) fn runtime(&self) -> &Handle {
        &self.runtime
    }
}

impl Clone for Connection {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.boxed(),
            traffic: self.traffic.clone(),
            written_before: self.written_before,
            generation: self.generation,
            runtime: self.runtime.clone(),
            state: self.state.clone(),
            breaker: self.breaker.clone(),
            has_one_clock: self.has_one_clock,
            called: self.called,
        }
    }
}

impl State {
    fn new() -> Self {
        let now = Instant::now();
        Self { made: now, used: now, unanswered_since: None, clock_offset: ClockOffset::new() }
    }
}
