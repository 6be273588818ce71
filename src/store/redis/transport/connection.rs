//! A connection to a server: it sends commands and reads what their answers say about the connection.

use std::{
    io,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use redis::{Arg, Cmd, ErrorKind, FromRedisValue, RedisError, ServerErrorKind, Value};
use tokio::{runtime::Handle, task::yield_now, time::timeout};

use super::{
    answers::{is_answer, is_refusal, is_routine},
    breaker::Breaker,
    endpoint::{ANSWER_TIMEOUT, Traffic, race},
    server::{Connected, Server, Wire},
};
use crate::{error::StoreError, store::lock};

/// So long the difference of two clocks is taken as steady.
const PERIOD: Duration = Duration::from_secs(10);

/// An attempt to connect ends then, also where several servers are asked for the way.
pub(crate) const LONGEST_ATTEMPT: Duration = Duration::from_secs(3);

/// A connection that was idle for this time may have been closed by the server before the runtime has read that.
const IDLE: Duration = Duration::from_millis(10);

pub(crate) struct Connection {
    wire: Box<dyn Wire>,
    traffic: Option<Arc<Traffic>>,
    /// The bytes that had been written when the last command was handed over.
    written_before: u64,
    /// By which the server tells whether it leads to it.
    generation: u64,
    /// Where the connection was made.
    runtime: Handle,
    answers: Arc<Mutex<Answers>>,
    breaker: Arc<Breaker>,
    has_one_clock: bool,
    asked: Instant,
}

#[derive(Clone, Copy)]
pub(crate) struct Question<'a> {
    cmd: &'a Cmd,
    /// Of the script that `cmd` names by its hash.
    text: Option<&'a str>,
    /// Whether it is about keys that are on their way to this node of a cluster.
    is_asking: bool,
}

impl<'a> Question<'a> {
    pub(crate) fn new(cmd: &'a Cmd) -> Self {
        Self { cmd, text: None, is_asking: false }
    }

    pub(crate) fn script(cmd: &'a Cmd, text: &'a str) -> Self {
        Self { text: Some(text), ..Self::new(cmd) }
    }

    pub(crate) fn asking(self, is_asking: bool) -> Self {
        Self { is_asking, ..self }
    }

    pub(crate) fn is_script(self) -> bool {
        self.text.is_some()
    }

    /// The first key.
    pub(crate) fn key(self) -> &'a [u8] {
        let place = match self.cmd.args_iter().next() {
            Some(Arg::Simple(b"EVALSHA" | b"EVAL")) => 3,
            _ => 1,
        };
        match self.cmd.args_iter().nth(place) {
            Some(Arg::Simple(key)) => key,
            _ => b"",
        }
    }
}

/// What is known of a connection from its answers.
struct Answers {
    first: Instant,
    /// When the last command was handed over.
    asked: Instant,
    /// Since when there are questions and no answers.
    unanswered: Option<Instant>,
    /// The least difference of our clock and the server's, in microseconds, in this period and the one
    /// before: it is nearest to that without the way of an answer.
    least: [f64; 2],
    period: Instant,
}

/// Makes a connection and puts it into `slot`, for as long as it is whole.
pub(crate) async fn connect(
    server: Arc<Server>,
    breaker: Arc<Breaker>,
    slot: Arc<Mutex<Option<Connection>>>,
) -> Result<Connection, RedisError> {
    loop {
        let connection = connect_once(&server, &breaker).await?;
        if connection.leads_to(&server) {
            *lock(&slot) = Some(connection.clone());
            return Ok(connection);
        }
    }
}

async fn connect_once(server: &Server, breaker: &Arc<Breaker>) -> Result<Connection, RedisError> {
    let answers = Arc::new(Mutex::new(Answers::new()));
    let attempt = timeout(LONGEST_ATTEMPT, server.connect()).await;
    let Connected { wire, traffic, generation } =
        attempt.map_err(|_| (ErrorKind::Io, "the attempt to connect took too long"))??;
    let has_one_clock = server.has_one_clock();
    let (runtime, breaker) = (Handle::current(), breaker.clone());
    let mut connection = Connection {
        wire,
        traffic,
        written_before: 0,
        generation,
        runtime,
        answers,
        breaker,
        has_one_clock,
        asked: Instant::now(),
    };
    if has_one_clock {
        // While nothing else is on the way, so that the clocks are compared well.
        let time = redis::cmd("TIME");
        let time = timeout(ANSWER_TIMEOUT, connection.send(&time, false)).await;
        // If the connection has ended, its callers have not sent anything, and take another one.
        if !connection.has_ended()
            && let Ok(time) = time
        {
            let (seconds, micros): (f64, f64) = read(time)?;
            lock(&connection.answers).age(connection.asked, seconds * 1e6 + micros);
        }
    }
    Ok(connection)
}

/// A reply that is not what was asked for is an answer all the same.
fn read<T: FromRedisValue>(reply: Result<Value, RedisError>) -> Result<T, RedisError> {
    T::from_redis_value(reply?.extract_error()?).map_err(|error| {
        (ErrorKind::UnexpectedReturnType, "no answer of ours", error.to_string()).into()
    })
}

impl Connection {
    /// Asks; a script by its hash, and with its text if the server does not know it yet: that is not run twice, and
    /// the server knows it from then on.
    pub(crate) async fn ask<T: FromRedisValue>(
        &mut self,
        question: Question<'_>,
    ) -> Result<T, RedisError> {
        self.asked = Instant::now();
        let Question { cmd, text, .. } = question;
        match (self.query(cmd, question).await, text) {
            (Err(error), Some(text))
                if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) =>
            {
                let mut by_text = redis::cmd("EVAL");
                by_text.arg(text);
                for arg in cmd.args_iter().skip(2) {
                    if let Arg::Simple(arg) = arg {
                        by_text.arg(arg);
                    }
                }
                self.query(&by_text, question).await
            }
            (reply, _) => reply,
        }
    }

    async fn query<T: FromRedisValue>(
        &mut self,
        cmd: &Cmd,
        question: Question<'_>,
    ) -> Result<T, RedisError> {
        self.read_what_came_while_idle().await;
        let sent = Instant::now();
        lock(&self.answers).unanswered.get_or_insert(sent);
        self.written_before = self.traffic.as_ref().map_or(0, |it| it.written());
        let answer = read(self.send(cmd, question.is_asking).await);
        let error = answer.as_ref().err();
        if error.is_none_or(is_answer) {
            lock(&self.answers).unanswered = None;
            self.breaker.count_answer();
            if question.is_script() {
                self.breaker.answered(sent.elapsed(), !error.is_some_and(is_refusal));
            }
            if let Some(error) = error.filter(|it| !is_routine(it)) {
                self.breaker.noticed(&StoreError::of_redis(error.clone()));
            }
        }
        answer
    }

    /// Lets the runtime read whether the server has closed the connection: it has not, if a task blocked it, or the
    /// process was stopped.
    async fn read_what_came_while_idle(&self) {
        if lock(&self.answers).asked.elapsed() >= IDLE {
            yield_now().await;
        }
        lock(&self.answers).asked = Instant::now();
    }

    /// Whether nothing of the last command was written before the connection ended.
    pub(crate) fn is_unsent(&self) -> bool {
        let unsent = |it: &Arc<Traffic>| it.has_ended() && it.written() == self.written_before;
        self.traffic.as_ref().is_some_and(unsent)
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.traffic.as_ref().is_some_and(|it| it.has_ended())
    }

    async fn send(&mut self, cmd: &Cmd, is_asking: bool) -> Result<Value, RedisError> {
        let traffic = self.traffic.clone();
        let wire = &mut self.wire;
        let reply = async {
            if !is_asking {
                return wire.req_packed_command(cmd).await;
            }
            // As one, because it holds for the next command on the connection, whoever sends that.
            let mut both = redis::pipe();
            both.cmd("ASKING").add_command(cmd.clone());
            let mut replies = wire.req_packed_commands(&both, 1, 1).await?;
            Ok(replies.pop().unwrap_or(Value::Nil))
        };
        let Some(traffic) = traffic else { return reply.await };
        // A command that is handed over while the connection ends can be forgotten in the queue to it.
        let reply = race(reply, traffic.ended()).await;
        reply.unwrap_or_else(|| Err(io::Error::from(io::ErrorKind::BrokenPipe).into()))
    }

    /// How long ago the server decided, in microseconds. It makes those whose answers have different ways
    /// go on in the order of their turns.
    pub(crate) fn age(&self, decided: f64) -> f64 {
        if self.has_one_clock { lock(&self.answers).age(self.asked, decided) } else { 0.0 }
    }

    pub(crate) fn lifetime(&self) -> Duration {
        lock(&self.answers).first.elapsed()
    }

    /// For how long nobody who asks has got an answer.
    pub(crate) fn silence(&self) -> Duration {
        lock(&self.answers).unanswered.map_or(Duration::ZERO, |since| since.elapsed())
    }

    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.answers, &other.answers)
    }

    /// Whether it leads to the server that new connections lead to.
    pub(crate) fn leads_to(&self, server: &Server) -> bool {
        !server.is_void(self.generation)
    }

    pub(crate) fn runtime(&self) -> &Handle {
        &self.runtime
    }
}

impl Clone for Connection {
    fn clone(&self) -> Self {
        Self {
            wire: self.wire.boxed(),
            traffic: self.traffic.clone(),
            written_before: self.written_before,
            generation: self.generation,
            runtime: self.runtime.clone(),
            answers: self.answers.clone(),
            breaker: self.breaker.clone(),
            has_one_clock: self.has_one_clock,
            asked: self.asked,
        }
    }
}

impl Answers {
    fn new() -> Self {
        let now = Instant::now();
        Self { first: now, asked: now, unanswered: None, least: [f64::INFINITY; 2], period: now }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_of_a_command_is_found() {
        let cmd = |words: &[&str]| {
            let mut cmd = Cmd::new();
            cmd.arg(words);
            cmd
        };
        let key_of = |cmd: Cmd| Question::new(&cmd).key().to_vec();
        assert_eq!(key_of(cmd(&["EVALSHA", "hash", "2", "a", "b", "c"])), b"a");
        assert_eq!(key_of(cmd(&["EVAL", "text", "1", "a"])), b"a");
        assert_eq!(key_of(cmd(&["DEL", "a", "b"])), b"a");
        assert_eq!(key_of(cmd(&["PING"])), b"");
    }
}
