//! A connection to a server: it sends commands, and knows what their replies prove about the
//! connection. Reconnecting, and what replies prove about the server, are above.

use std::{
    future::poll_fn,
    io,
    sync::{Arc, Mutex},
    task::Poll,
    time::{Duration, Instant},
};

use redis::{
    Cmd, ErrorKind, FromRedisValue, RedisError, RedisResult, ServerErrorKind, Value,
    aio::ConnectionLike,
};
use tokio::{task::yield_now, time::timeout};

use super::{
    claim::Claim,
    clock_offset::ClockOffset,
    command::Command,
    endpoint::ANSWER_TIMEOUT,
    error::is_reply,
    line::{IDLE, Line},
    queue::{CommandQueue, Outcome, Position},
    session::Session,
    silence::Silence,
};
use crate::sync::lock;

#[derive(Clone)]
pub struct Connection {
    link: Link,
    state: Arc<Mutex<ConnectionState>>,
    /// Ended by the line. So a reply counts whose caller is gone.
    silence: Silence,
    has_one_clock: bool,
    /// The start of the last call, and the arrival of its reply.
    called: Instant,
    replied: Instant,
}

/// The state that the clones of a connection share.
struct ConnectionState {
    made: Instant,
    /// The time of the last command.
    used: Instant,
    clock_offset: ClockOffset,
}

/// The way of commands to a server.
pub(crate) enum Link {
    Line(Line),
    /// A connection of the application. Commands are in order if its are.
    Given(Box<dyn DynConnection>),
}

/// A connection of any kind.
pub trait DynConnection: ConnectionLike + Send + Sync {
    fn boxed(&self) -> Box<dyn DynConnection>;
}

impl<C: ConnectionLike + Clone + Send + Sync + 'static> DynConnection for C {
    fn boxed(&self) -> Box<dyn DynConnection> {
        Box::new(self.clone())
    }
}

impl Clone for Link {
    fn clone(&self) -> Self {
        match self {
            Self::Line(line) => Self::Line(line.clone()),
            Self::Given(connection) => Self::Given(connection.boxed()),
        }
    }
}

/// A new connection, before the commands of a channel.
pub(crate) enum Opened {
    Session(Session),
    Given(Box<dyn DynConnection>),
}

impl Opened {
    /// Sends a command of the connection's own, before those of a channel.
    pub(crate) async fn send(&mut self, command: &Cmd) -> RedisResult<Value> {
        match self {
            Self::Session(session) => {
                session.traffic.bound();
                session.req_packed_command(command).await
            }
            Self::Given(connection) => connection.req_packed_command(command).await,
        }
    }

    /// Reads the clock of the server. No other command delays the reply, so the first estimate of
    /// the offset is good. A connection without a reply is found unusable later.
    pub(crate) async fn read_clock(&mut self) -> Result<ClockOffset, RedisError> {
        let called = Instant::now();
        let mut offset = ClockOffset::new(called);
        let time = redis::cmd("TIME");
        let time = timeout(ANSWER_TIMEOUT, self.send(&time)).await;
        let has_ended = matches!(self, Self::Session(session) if session.traffic.has_ended());
        if !has_ended && let Ok(time) = time {
            let (seconds, micros): (f64, f64) = read(time.and_then(without_error)?)?;
            offset.age([called, Instant::now()], seconds * 1e6 + micros);
        }
        Ok(offset)
    }
}

/// The end of a command that was sent.
pub(crate) struct Replied<T> {
    pub(crate) result: Result<T, RedisError>,
    /// The error of a part of the reply.
    pub(crate) partial_error: Option<RedisError>,
    pub(crate) at: Instant,
    /// The time since it was sent.
    pub(crate) latency: Duration,
}

impl<T> Replied<T> {
    /// Returns the error, if there is one in any part.
    pub(crate) fn error(&self) -> Option<&RedisError> {
        self.result.as_ref().err().or(self.partial_error.as_ref())
    }
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
    /// Opens a connection for the commands of a queue. `clock_offset` is `None` if replies may come
    /// from several clocks.
    pub(crate) fn new(
        opened: Opened,
        clock_offset: Option<ClockOffset>,
        queue: &Arc<CommandQueue>,
    ) -> Self {
        let (silence, now) = (Silence::default(), Instant::now());
        let link = match opened {
            Opened::Session(session) => Link::Line(Line::new(session, queue, silence.clone())),
            Opened::Given(connection) => Link::Given(connection),
        };
        Self {
            link,
            has_one_clock: clock_offset.is_some(),
            state: Arc::new(Mutex::new(ConnectionState::new(clock_offset, now))),
            silence,
            called: now,
            replied: now,
        }
    }

    /// Executes a command; returns nothing if it was given up before it could be written. If it is
    /// an `EVALSHA` of an unknown script, sends the text: the server has executed nothing then, and
    /// knows the script from now on.
    ///
    /// `position` is that of a command that another connection has not written. If this one ends
    /// before it writes the command, it sets `position` again, and returns an error.
    pub(crate) async fn execute<T: FromRedisValue>(
        &mut self,
        command: Command<'_>,
        claim: &Arc<Claim>,
        position: &mut Option<Position>,
    ) -> Option<Replied<T>> {
        self.called = Instant::now();
        if !command.is_ready() {
            self.notice_end_while_idle().await;
        }
        let reply = self.send(command, claim, position).await?.and_then(without_error);
        let partial_error = reply.as_ref().ok().and_then(partial_error);
        let result = reply.and_then(read);
        let at = Instant::now();
        let latency = claim.written().map_or(Duration::ZERO, |written| at - written);
        self.replied = at;
        let replied = Replied { result, partial_error, at, latency };
        if matches!(self.link, Link::Given(_)) && replied.error().is_none_or(is_reply) {
            self.silence.end();
        }
        Some(replied)
    }

    /// Lets the runtime read that the server has closed a connection of the application. It could
    /// not while a task blocked it, or the process was stopped.
    pub(crate) async fn notice_end_while_idle(&self) {
        if let Link::Line(_) = self.link {
            return;
        }
        let is_idle = lock(&self.state).used.elapsed() >= IDLE;
        if is_idle {
            yield_now().await;
        }
        lock(&self.state).used = Instant::now();
    }

    async fn send(
        &mut self,
        command: Command<'_>,
        claim: &Arc<Claim>,
        position: &mut Option<Position>,
    ) -> Option<Result<Value, RedisError>> {
        let line = match &mut self.link {
            Link::Line(line) => line,
            Link::Given(connection) => {
                let now = Instant::now();
                if !claim.write(now) {
                    return None;
                }
                self.silence.begin(now);
                return Some(Box::pin(send_over(&mut **connection, command)).await);
            }
        };
        let begin = || {
            let position = line.push(command, claim);
            command.hand_over();
            position
        };
        let outcome = position.get_or_insert_with(begin).outcome().await;
        *position = None;
        match outcome {
            Outcome::Reply(reply) => return Some(reply),
            Outcome::GivenUp => return None,
            Outcome::Interrupted => {}
            Outcome::Unsent(kept) => *position = Some(kept),
        }
        Some(Err(io::Error::from(io::ErrorKind::BrokenPipe).into()))
    }

    pub(crate) fn has_ended(&self) -> bool {
        matches!(&self.link, Link::Line(line) if line.has_ended())
    }

    /// Returns the time since `instant` of the server's clock, in microseconds, for the last
    /// command; 0 if replies may come from several clocks.
    pub fn age(&self, instant: f64) -> f64 {
        if self.has_one_clock {
            lock(&self.state).clock_offset.age([self.called, self.replied], instant)
        } else {
            0.0
        }
    }

    pub(crate) fn lifetime(&self) -> Duration {
        lock(&self.state).made.elapsed()
    }

    /// Returns the time for which commands have waited without any reply.
    pub(crate) fn silence(&self) -> Duration {
        self.silence.time()
    }

    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.state, &other.state)
    }

    /// Returns whether it is a connection of its own, which has not ended.
    pub(crate) fn is_open(&self) -> bool {
        matches!(self.link, Link::Line(_)) && !self.has_ended()
    }
}

impl ConnectionState {
    fn new(clock_offset: Option<ClockOffset>, now: Instant) -> Self {
        let clock_offset = clock_offset.unwrap_or_else(|| ClockOffset::new(now));
        Self { made: now, used: now, clock_offset }
    }
}
