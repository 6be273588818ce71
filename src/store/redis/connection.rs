use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use redis::{
    Cmd, ErrorKind, FromRedisValue, PushInfo, PushKind, RedisError, ServerErrorKind, aio::SendError,
};
use tokio::{runtime::Handle, time::timeout};

use super::{
    breaker::Breaker,
    server::{CONNECT_TIMEOUT, Server, Wire},
};
use crate::{algorithm::Verdict, store::lock};

/// So long the difference of two clocks is taken as steady.
const PERIOD: Duration = Duration::from_secs(10);

pub(super) struct Connection {
    wire: Box<dyn Wire>,
    /// Where the connection was made.
    runtime: Handle,
    answers: Arc<Mutex<Answers>>,
    breaker: Arc<Breaker>,
    has_one_clock: bool,
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

/// Makes a connection and puts it into `slot`, for as long as it is whole.
pub(super) async fn connect(
    server: Arc<Server>,
    breaker: Arc<Breaker>,
    slot: Arc<Mutex<Option<Connection>>>,
) -> Result<Connection, RedisError> {
    let answers = Arc::new(Mutex::new(Answers::new()));
    let (weak_slot, broken) = (Arc::downgrade(&slot), Arc::downgrade(&answers));
    let disconnected = move |push: PushInfo| {
        if push.kind == PushKind::Disconnection
            && let Some(slot) = weak_slot.upgrade()
        {
            lock(&slot).take_if(|it| Arc::as_ptr(&it.answers) == broken.as_ptr());
        }
        Ok::<(), SendError>(())
    };
    let wire = server.connect(disconnected).await?;
    let has_one_clock = server.has_one_clock();
    let runtime = Handle::current();
    let mut connection = Connection { wire, runtime, answers, breaker, has_one_clock };
    if has_one_clock {
        // While nothing else is on the way, so that the clocks are compared well.
        let asked = Instant::now();
        let time = redis::cmd("TIME");
        if let Ok(time) = timeout(CONNECT_TIMEOUT, connection.query(&time)).await {
            let (seconds, micros): (f64, f64) = time?;
            lock(&connection.answers).age(asked, seconds * 1e6 + micros);
        }
    }
    *lock(&slot) = Some(connection.clone());
    Ok(connection)
}

/// Whether the server has answered, if with an error.
pub(super) fn is_answer(error: &RedisError) -> bool {
    // An extension is an error of a kind that the client has no name for.
    let kind = error.kind();
    matches!(kind, ErrorKind::Server(_) | ErrorKind::Extension | ErrorKind::UnexpectedReturnType)
}

/// Whether an error means that the connection is of no use, and not that the server refused a command.
pub(super) fn is_of_the_connection(error: &RedisError) -> bool {
    error.is_io_error()
        || error.is_unrecoverable_error()
        // After a failover the server may have become a replica. Redis 6.2 puts what stops a script into an `ERR`.
        || matches!(
            error.kind(),
            ErrorKind::Server(ServerErrorKind::ReadOnly | ServerErrorKind::MasterDown)
        )
        || error.detail().is_some_and(|detail| detail.contains(" -READONLY "))
}

impl Connection {
    pub(super) async fn query<T: FromRedisValue>(&mut self, cmd: &Cmd) -> Result<T, RedisError> {
        let reply = self.wire.req_packed_command(cmd).await;
        let answer = reply
            .and_then(|value| value.extract_error())
            .and_then(|value| Ok(T::from_redis_value(value)?));
        let error = answer.as_ref().err();
        if error.is_none_or(is_answer) {
            lock(&self.answers).last = Instant::now();
            self.breaker.answered(error.is_some());
        }
        answer
    }

    /// Runs a script by its hash, and with its text if the server does not know it yet: that is not run
    /// twice, and the server knows it from then on.
    pub(super) async fn eval<T: FromRedisValue>(
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
    pub(super) fn age(&self, asked: Instant, verdict: Verdict) -> f64 {
        if self.has_one_clock {
            lock(&self.answers).age(asked, verdict.turn - verdict.wait)
        } else {
            0.0
        }
    }

    pub(super) fn lifetime(&self) -> Duration {
        lock(&self.answers).first.elapsed()
    }

    pub(super) fn silence(&self) -> Duration {
        lock(&self.answers).last.elapsed()
    }

    pub(super) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.answers, &other.answers)
    }

    pub(super) fn runtime(&self) -> &Handle {
        &self.runtime
    }
}

impl Clone for Connection {
    fn clone(&self) -> Self {
        Self {
            wire: self.wire.boxed(),
            runtime: self.runtime.clone(),
            answers: self.answers.clone(),
            breaker: self.breaker.clone(),
            has_one_clock: self.has_one_clock,
        }
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
