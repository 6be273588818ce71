//! The connections to one server: made when they are needed, given up when they are of no use. Commands wait for
//! them within the deadline, and fail at once while the breaker is open.

use std::{
    mem,
    pin::pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use redis::{ErrorKind, FromRedisValue, RedisError};
use tokio::{
    runtime::Handle,
    task::{JoinError, JoinHandle},
    time::{sleep, timeout},
};

use super::{
    answers::{is_answer, is_of_the_connection},
    breaker::{Breaker, Duty, Health},
    connection::{Connection, LONGEST_ATTEMPT, Question, connect},
    probe::Probe,
    release::Queue,
    server::Server,
};
use crate::{error::StoreError, store::lock};

/// After a failed attempt to connect, its error is the answer for so long.
const RETRY_AFTER: Duration = Duration::from_millis(20);
/// A connection to a server that may not write is made anew after so long: the next one may lead to another.
const RECONNECT_AFTER: Duration = Duration::from_millis(100);
/// A connection that is open, but gives nobody an answer for so long, is given up.
const LONGEST_SILENCE: Duration = Duration::from_secs(1);
/// How long a call waits for its answer that no request waits for.
const BACKGROUND_DEADLINE: Duration = Duration::from_secs(1);
/// The pause between two probes, and how long each waits for its answer: whatever the deadline of
/// the callers is, so that one probe at a time is under way.
const PROBE_PAUSE: Duration = Duration::from_millis(100);
const PROBE_DEADLINE: Duration = Duration::from_secs(1);
/// The longest time that an answer still gets where the deadline is noticed late.
const LONGEST_GRACE: Duration = Duration::from_millis(20);

/// The connections to the server, and whether it answers.
pub(crate) struct Link {
    server: Arc<Server>,
    slots: Box<[Slot]>,
    /// The number of questions, which go round the slots.
    asked: AtomicUsize,
    breaker: Arc<Breaker>,
    connections_made: Arc<AtomicUsize>,
    /// The key of the last script that got no answer.
    failed_key: Mutex<Box<[u8]>>,
    /// What is to be returned in the background.
    releases: Queue,
}

/// A connection: made when it is first needed, and again when it breaks.
#[derive(Default)]
struct Slot {
    current: Arc<Mutex<Option<Connection>>>,
    /// Held while connecting, so that one attempt serves all.
    attempts: tokio::sync::Mutex<Attempts>,
}

#[derive(Default)]
struct Attempts {
    /// A task of its own, so that it goes on if the deadline of who waits for it passes, and when it began.
    running: Option<(JoinHandle<Result<Connection, FailedAttempt>>, Instant)>,
    failed: Option<FailedAttempt>,
}

struct FailedAttempt {
    error: RedisError,
    at: Instant,
}

impl FailedAttempt {
    fn new(error: RedisError) -> Self {
        Self { error, at: Instant::now() }
    }
}

/// The time within which a call is answered, however many commands it takes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline {
    from: Instant,
    within: Duration,
    is_background: bool,
}

impl Deadline {
    /// Counts from now.
    pub(crate) fn new(within: Duration) -> Self {
        Self { from: Instant::now(), within, is_background: false }
    }

    /// Of what no request waits for: its failures say nothing about the requests.
    pub(crate) fn in_background() -> Self {
        Self { is_background: true, ..Self::new(BACKGROUND_DEADLINE) }
    }

    pub(crate) fn is_over(self) -> bool {
        self.left().is_zero()
    }

    pub(crate) fn within(self) -> Duration {
        self.within
    }

    pub(crate) fn left(self) -> Duration {
        self.within.saturating_sub(self.from.elapsed())
    }

    /// Waits for an answer until the deadline.
    ///
    /// A deadline that is noticed late means that the process did not run, and so did not read an
    /// answer that may have come: it gets as long to be read, up to [`LONGEST_GRACE`].
    async fn wait_for<T>(self, answer: impl Future<Output = T>) -> Option<T> {
        let mut answer = pin!(answer);
        if let Ok(answer) = timeout(self.left(), answer.as_mut()).await {
            return Some(answer);
        }
        let late = self.from.elapsed().saturating_sub(self.within);
        timeout(late.min(LONGEST_GRACE), answer).await.ok()
    }
}

impl Link {
    pub(crate) fn new(server: Server, connections: usize) -> Self {
        Self::with(Arc::new(server), connections, Arc::new(Breaker::new()))
    }

    pub(crate) fn with(server: Arc<Server>, connections: usize, breaker: Arc<Breaker>) -> Self {
        let slots = (0..connections).map(|_| Slot::default()).collect();
        let (asked, releases) = (AtomicUsize::new(0), Queue::default());
        let (connections_made, failed_key) = (Arc::default(), Mutex::default());
        Self { server, slots, asked, breaker, connections_made, failed_key, releases }
    }

    pub(crate) fn releases(&self) -> &Queue {
        &self.releases
    }

    /// Whether Redis answers within all deadlines.
    pub(crate) fn is_available(&self) -> bool {
        !self.breaker.is_open()
    }

    pub(crate) fn is_available_for(&self, deadline: Duration) -> bool {
        !self.breaker.is_open_for(deadline)
    }

    pub(crate) fn consecutive_failures(&self) -> u32 {
        self.breaker.consecutive_failures()
    }

    pub(crate) fn health(&self, deadline: Duration) -> Health {
        self.breaker.health(deadline)
    }

    /// Counts a call that was asked then and got no answer, although nothing was sent here. Returns its error.
    pub(crate) fn timed_out(self: &Arc<Self>, asked: Instant, deadline: Deadline) -> StoreError {
        let error = self.named(StoreError::timeout(deadline.within)).unsent();
        if self.breaker.failed(asked, deadline.within, &error) {
            self.find_out();
        }
        error
    }

    /// The server is not called any more.
    pub(crate) fn leave(&self) {
        self.breaker.leave();
    }

    /// The number of connections that were made so far.
    pub(crate) fn connections_made(&self) -> usize {
        self.connections_made.load(Relaxed)
    }

    /// Where a connection was made.
    pub(crate) fn runtime(&self) -> Option<Handle> {
        self.slots.iter().find_map(|slot| Some(lock(&slot.current).as_ref()?.runtime().clone()))
    }

    /// Asks over a connection, and fails at the deadline, or at once if Redis is not available.
    pub(crate) async fn ask<T: FromRedisValue>(
        self: &Arc<Self>,
        deadline: Deadline,
        question: Question<'_>,
    ) -> Result<(T, Connection), StoreError> {
        if deadline.is_background {
            if self.breaker.is_open() {
                return Err(self.named(StoreError::away()));
            }
        } else if self.breaker.is_open_for(deadline.within) && !self.find_out() {
            self.breaker.skipped();
            return Err(self.named(StoreError::away()));
        }
        if deadline.is_over() {
            // A command that is sent now would be counted, although its caller has failed already.
            let error = self.named(StoreError::timeout(deadline.within));
            self.breaker.noticed(&error);
            return Err(error);
        }
        self.ask_anyway(deadline, question, false).await
    }

    async fn ask_anyway<T: FromRedisValue>(
        self: &Arc<Self>,
        deadline: Deadline,
        question: Question<'_>,
        is_probe: bool,
    ) -> Result<(T, Connection), StoreError> {
        let asked = Instant::now();
        let slot = &self.slots[self.asked.fetch_add(1, Relaxed) % self.slots.len()];
        let (mut used, mut was_sent) = (None, false);
        let answer = async {
            let mut was_resent = false;
            loop {
                let connection = match timeout(deadline.left(), self.connection(slot)).await.ok()? {
                    Ok(connection) => used.insert(connection),
                    Err(error) => return Some(Err(error)),
                };
                if deadline.is_over() {
                    return None;
                }
                was_sent = true;
                let answer = deadline.wait_for(connection.ask(question)).await?;
                if answer.is_ok() || !connection.is_unsent() {
                    return Some(answer);
                }
                was_sent = false;
                slot.give_up(connection);
                if mem::replace(&mut was_resent, true) {
                    sleep(RETRY_AFTER).await;
                }
            }
        };
        let error = match (answer.await, used) {
            (Some(Ok(answer)), Some(connection)) => return Ok((answer, connection)),
            (Some(Err(error)), used) => {
                let is_answer = used.is_some() && is_answer(&error);
                let is_old = |it: &Connection| !is_answer || it.lifetime() >= RECONNECT_AFTER;
                let is_interrupted =
                    was_sent && !is_answer && used.as_ref().is_some_and(Connection::has_ended);
                if let Some(connection) =
                    used.filter(|_| is_of_the_connection(&error)).filter(is_old)
                {
                    slot.give_up(&connection);
                }
                match is_interrupted {
                    true => StoreError::interrupted(error),
                    false if is_answer => return Err(self.named(StoreError::of_redis(error))),
                    false => StoreError::of_redis(error),
                }
            }
            _ => StoreError::timeout(deadline.within),
        };
        let error = self.named(error);
        if is_probe || deadline.is_background {
            self.breaker.noticed(&error);
        } else {
            if question.is_script() {
                *lock(&self.failed_key) = question.key().into();
            }
            if self.breaker.failed(asked, deadline.within, &error) {
                self.find_out();
            }
        }
        Err(if was_sent { error } else { error.unsent() })
    }

    fn named(&self, error: StoreError) -> StoreError {
        error.at(self.server.name())
    }

    async fn connection(&self, slot: &Slot) -> Result<Connection, RedisError> {
        self.server.keep_watching();
        if let Some(connection) = slot.current(&self.server) {
            return Ok(connection);
        }
        let attempts = &mut *slot.attempts.lock().await;
        if let Some(connection) = slot.current(&self.server) {
            return Ok(connection);
        }
        // Its caller may have given up before it failed.
        if let Some((ended, _)) = attempts.running.take_if(|(task, _)| task.is_finished()) {
            attempts.failed = attempt_result(ended).await.err();
        }
        if let Some(failed) = attempts.failed.as_ref().filter(|it| it.at.elapsed() < RETRY_AFTER) {
            return Err(failed.error.clone());
        }
        // One that takes longer is in a runtime that does not run; what one that is over has made is given up.
        let running = attempts.running.take_if(|(_, began)| began.elapsed() <= 2 * LONGEST_ATTEMPT);
        let (task, _) = attempts.running.insert(running.unwrap_or_else(|| {
            let (server, breaker) = (self.server.clone(), self.breaker.clone());
            let (current, made) = (slot.current.clone(), self.connections_made.clone());
            let attempt = async move {
                let connection = connect(server, breaker, current).await;
                let connection = connection.map_err(FailedAttempt::new)?;
                made.fetch_add(1, Relaxed);
                Ok(connection)
            };
            (tokio::spawn(attempt), Instant::now())
        }));
        let result = attempt_result(task).await;
        attempts.running = None;
        match result {
            Ok(connection) => {
                attempts.failed = None;
                Ok(connection)
            }
            Err(failed) => Err(attempts.failed.insert(failed).error.clone()),
        }
    }

    /// Sees to it that somebody asks until Redis answers. Returns whether that is the caller.
    fn find_out(self: &Arc<Self>) -> bool {
        /// Also when its runtime ends meanwhile.
        struct Probing(Arc<Link>);

        impl Drop for Probing {
            fn drop(&mut self) {
                self.0.breaker.end_probe();
            }
        }

        match self.breaker.duty() {
            Duty::Nothing => return false,
            Duty::EngineRequest => return true,
            Duty::Probe => {}
        }
        let probing = Probing(self.clone());
        tokio::spawn(async move {
            let link = &probing.0;
            while link.breaker.is_open() && Arc::strong_count(link) > 1 {
                link.breaker.probes();
                let probe = Probe::beside(&lock(&link.failed_key));
                let deadline = Deadline::new(PROBE_DEADLINE);
                let _ = link.ask_anyway::<()>(deadline, probe.question(), true).await;
                sleep(PROBE_PAUSE).await;
            }
        });
        false
    }
}

async fn attempt_result(
    task: impl Future<Output = Result<Result<Connection, FailedAttempt>, JoinError>>,
) -> Result<Connection, FailedAttempt> {
    task.await.unwrap_or_else(|_| {
        let error = (ErrorKind::Io, "the attempt to connect was given up");
        Err(FailedAttempt::new(error.into()))
    })
}

impl Slot {
    /// The connection, if it is open, answers, and leads to the server.
    fn current(&self, server: &Server) -> Option<Connection> {
        let current = &mut *lock(&self.current);
        current.take_if(|it| {
            it.has_ended() || it.silence() >= LONGEST_SILENCE || !it.leads_to(server)
        });
        current.clone()
    }

    fn give_up(&self, connection: &Connection) {
        lock(&self.current).take_if(|current| current.is(connection));
    }
}
