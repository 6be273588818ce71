//! A connection to a server: it sends commands, and records what their replies prove about the
//! connection and the server. Reconnecting is in `channel.rs`.

use std::{
    future::poll_fn,
    io,
    sync::{Arc, Mutex},
    task::Poll,
    time::{Duration, Instant},
};

use redis::{ErrorKind, FromRedisValue, RedisError, ServerErrorKind, Value};
use tokio::{runtime::Handle, task::yield_now, time::timeout};

use super::{
    breaker::Breaker,
    clock_offset::ClockOffset,
    command::Command,
    connector::ANSWER_TIMEOUT,
    deadline::Deadline,
    error::{TransportError, is_of_one_key, is_reply, is_routine, is_write_rejection},
    line::{IDLE, Outcome},
    server::{Connected, DynConnection, Link, Server},
    unsent::{Ticket, Unsent},
};
use crate::sync::lock;

/// The time limit of an attempt to connect, which may include queries to Sentinels.
pub(crate) const MAX_ATTEMPT: Duration = Duration::from_secs(3);

pub(crate) struct Connection {
    link: Link,
    /// True if the connection ended before a byte of the last command was written.
    is_unsent: bool,
    /// The error of a part of the last reply.
    partial_error: Option<RedisError>,
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
    unsent: &Arc<Unsent>,
) -> Result<Connection, RedisError> {
    loop {
        let connection = connect_once(server, breaker, unsent).await?;
        if connection.leads_to(server) {
            return Ok(connection);
        }
    }
}

async fn connect_once(
    server: &Server,
    breaker: &Arc<Breaker>,
    unsent: &Arc<Unsent>,
) -> Result<Connection, RedisError> {
    let state = Arc::new(Mutex::new(State::new()));
    let attempt = timeout(MAX_ATTEMPT, server.connect(unsent)).await;
    let Connected { link, generation } =
        attempt.map_err(|_| (ErrorKind::Io, "the attempt to connect took too long"))??;
    let has_one_clock = server.has_one_clock();
    let mut connection = Connection {
        link,
        is_unsent: false,
        partial_error: None,
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
        let deadline = Deadline::new(ANSWER_TIMEOUT);
        let time = timeout(ANSWER_TIMEOUT, connection.send(Command::new(&time), deadline, 0)).await;
        // If the connection has ended, no command was sent over it, and its callers take another
        // one.
        if !connection.has_ended()
            && let Ok(Some(time)) = time
        {
            let (seconds, micros): (f64, f64) = read(time.and_then(without_error)?)?;
            connection.age(seconds * 1e6 + micros);
        }
    }
    Ok(connection)
}

/// Sends a command over a connection of the application.
async fn send_over(
    connection: &mut dyn DynConnection,
    command: Command<'_>,
) -> Result<Value, RedisError> {
    let cmd = command.cmd();
    let mut pending = connection.req_packed_command(cmd);
    let first = poll_fn(|cx| Poll::Ready(pending.as_mut().poll(cx))).await;
    command.hand_over();
    let reply = match first {
        Poll::Ready(reply) => reply,
        Poll::Pending => pending.as_mut().await,
    };
    drop(pending);
    let reply = reply.and_then(without_error);
    if let Err(error) = &reply
        && error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)
        && let Some(by_text) = command.by_text()
    {
        return connection.req_packed_command(&by_text).await;
    }
    reply
}

/// Returns the error that is the whole reply.
fn without_error(reply: Value) -> Result<Value, RedisError> {
    match reply {
        Value::ServerError(error) => Err(error.into()),
        reply => Ok(reply),
    }
}

/// Returns the first error in a reply that has others beside it.
fn partial_error(reply: &Value) -> Option<RedisError> {
    let Value::Array(parts) = reply else { return None };
    parts.iter().find_map(|part| match part {
        Value::ServerError(error) => Some(error.clone().into()),
        _ => None,
    })
}

/// Converts a reply. A reply of an unexpected type is an error, but still a reply.
fn read<T: FromRedisValue>(reply: Value) -> Result<T, RedisError> {
    T::from_redis_value(reply).map_err(|error| {
        (ErrorKind::UnexpectedReturnType, "unexpected reply", error.to_string()).into()
    })
}

impl Connection {
    /// Executes a command; returns nothing if its deadline passed before it could be written. If it
    /// is an `EVALSHA` of an unknown script, sends the text: the server has executed nothing then,
    /// and knows the script from now on.
    pub(crate) async fn execute<T: FromRedisValue>(
        &mut self,
        command: Command<'_>,
        deadline: Deadline,
        ticket: &Ticket,
    ) -> Option<Result<T, RedisError>> {
        self.called = Instant::now();
        if !command.is_ready() {
            self.notice_end_while_idle().await;
        }
        let sent = Instant::now();
        lock(&self.state).unanswered_since.get_or_insert(sent);
        let reply = self.send(command, deadline, ticket.number()).await?.and_then(without_error);
        let partial = reply.as_ref().ok().and_then(partial_error);
        let reply = reply.and_then(read);
        let error = reply.as_ref().err().or(partial.as_ref());
        if error.is_none_or(is_reply) {
            lock(&self.state).unanswered_since = None;
            self.breaker.count_reply();
            if command.is_script() {
                let is_proof = !error.is_some_and(is_write_rejection);
                self.breaker.record_reply(sent.elapsed(), is_proof);
            }
            self.record_result(error, command);
        }
        self.partial_error = partial;
        Some(reply)
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

    /// Returns whether a command is sent without a pause.
    pub(crate) fn is_ready(&self) -> bool {
        matches!(self.link, Link::Line(_)) || lock(&self.state).used.elapsed() < IDLE
    }

    /// Lets the runtime read that the server has closed a connection of the application. It could
    /// not while a task blocked it, or the process was stopped.
    pub(crate) async fn notice_end_while_idle(&self) {
        if !self.is_ready() {
            yield_now().await;
        }
        lock(&self.state).used = Instant::now();
    }

    async fn send(
        &mut self,
        command: Command<'_>,
        deadline: Deadline,
        number: u64,
    ) -> Option<Result<Value, RedisError>> {
        self.is_unsent = false;
        let outcome = match &mut self.link {
            Link::Line(line) => {
                let outcome = line.push(command, deadline, number);
                command.hand_over();
                outcome.await
            }
            Link::Given(connection) => {
                return Some(send_over(&mut **connection, command).await);
            }
        };
        match outcome {
            Outcome::Reply(reply) => Some(reply),
            Outcome::Late => None,
            Outcome::Ended { was_written } => {
                self.is_unsent = !was_written;
                Some(Err(io::Error::from(io::ErrorKind::BrokenPipe).into()))
            }
        }
    }

    /// Returns whether the connection ended before a byte of the last command was written.
    pub(crate) fn is_unsent(&self) -> bool {
        self.is_unsent
    }

    /// Returns the error of a part of the last reply.
    pub(crate) fn partial_error(&self) -> Option<&RedisError> {
        self.partial_error.as_ref()
    }

    pub(crate) fn has_ended(&self) -> bool {
        matches!(&self.link, Link::Line(line) if line.traffic().has_ended())
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
            link: self.link.clone(),
            is_unsent: self.is_unsent,
            partial_error: None,
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
