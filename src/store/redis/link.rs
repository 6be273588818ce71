use std::{
    hash::{BuildHasher, RandomState},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use redis::{ErrorKind, FromRedisValue, RedisError};
use tokio::{
    runtime::Handle,
    time::{sleep, timeout},
};

use super::{
    breaker::{Breaker, Health},
    connection::{Connection, Question, connect, is_answer, is_of_the_connection},
    server::Server,
};
use crate::{error::StoreError, store::lock};

/// After a failed attempt to connect, its error is the answer for so long.
const RETRY_AFTER: Duration = Duration::from_millis(20);
/// A connection to a server that may not write is made anew after so long: the next one may lead to another.
const RECONNECT_AFTER: Duration = Duration::from_millis(100);
/// A connection that is open, but gives nobody an answer for so long, is given up.
const LONGEST_SILENCE: Duration = Duration::from_secs(1);
/// The pause between two questions whether Redis is back.
const PROBE_EVERY: Duration = Duration::from_millis(100);

/// The connections to the server, and whether it answers.
pub(super) struct Link {
    server: Arc<Server>,
    slots: Box<[Slot]>,
    /// The number of questions, which go round the slots.
    asked: AtomicUsize,
    breaker: Arc<Breaker>,
}

/// A connection: made when it is first needed, and again when it breaks.
#[derive(Default)]
struct Slot {
    current: Arc<Mutex<Option<Connection>>>,
    /// Held while connecting, so that one attempt serves all; the last failure.
    connecting: Arc<tokio::sync::Mutex<Option<(Instant, RedisError)>>>,
}

/// Within which time a question is answered.
#[derive(Clone, Copy)]
pub(super) struct Deadline {
    from: Instant,
    within: Duration,
}

impl Deadline {
    /// Counts from now.
    pub(super) fn new(within: Duration) -> Self {
        Self { from: Instant::now(), within }
    }

    pub(super) fn again(self) -> Self {
        Self::new(self.within)
    }

    pub(super) fn is_over(self) -> bool {
        self.from.elapsed() >= self.within
    }
}

impl Link {
    pub(super) fn new(server: Server) -> Self {
        Self::with(Arc::new(server), 1, Arc::new(Breaker::new()))
    }

    /// The same server over so many connections.
    pub(super) fn with_connections(&self, connections: usize) -> Self {
        Self::with(self.server.clone(), connections, Arc::new(Breaker::new()))
    }

    pub(super) fn with(server: Arc<Server>, connections: usize, breaker: Arc<Breaker>) -> Self {
        let slots = (0..connections).map(|_| Slot::default()).collect();
        Self { server, slots, asked: AtomicUsize::new(0), breaker }
    }

    pub(super) fn is_available(&self) -> bool {
        !self.breaker.is_open()
    }

    pub(super) fn health(&self) -> Health {
        self.breaker.health()
    }

    /// Where a connection was made.
    pub(super) fn runtime(&self) -> Option<Handle> {
        self.slots.iter().find_map(|slot| Some(lock(&slot.current).as_ref()?.runtime().clone()))
    }

    /// Asks over a connection, and fails at the deadline, or at once if Redis is not available.
    pub(super) async fn ask<T: FromRedisValue>(
        self: &Arc<Self>,
        deadline: Deadline,
        question: Question<'_>,
    ) -> Result<(T, Connection), StoreError> {
        if self.breaker.is_open() {
            self.breaker.skipped();
            self.probe(deadline.within);
            return Err(StoreError::away());
        }
        self.ask_anyway(deadline, question).await
    }

    async fn ask_anyway<T: FromRedisValue>(
        self: &Arc<Self>,
        deadline: Deadline,
        question: Question<'_>,
    ) -> Result<(T, Connection), StoreError> {
        let slot = &self.slots[self.asked.fetch_add(1, Relaxed) % self.slots.len()];
        let mut used = None;
        let answer = async {
            let connection = used.insert(self.connection(slot).await?);
            connection.ask(question).await
        };
        let left = deadline.within.saturating_sub(deadline.from.elapsed());
        let answer = timeout(left, answer).await;
        let (error, is_timeout) = match (answer, used) {
            (Ok(Ok(answer)), Some(connection)) => return Ok((answer, connection)),
            (Ok(Err(error)), used) => {
                let is_answer = used.is_some() && is_answer(&error);
                let is_old = |it: &Connection| !is_answer || it.lifetime() >= RECONNECT_AFTER;
                if let Some(connection) =
                    used.filter(|_| is_of_the_connection(&error)).filter(is_old)
                {
                    slot.give_up(&connection);
                }
                if is_answer {
                    return Err(StoreError::unavailable(error));
                }
                (StoreError::unavailable(error), false)
            }
            (_, used) => {
                let silence = deadline.within.max(LONGEST_SILENCE);
                if let Some(connection) = used.filter(|it| it.silence() >= silence) {
                    slot.give_up(&connection);
                }
                (StoreError::timeout(deadline.within), true)
            }
        };
        if self.breaker.failed(deadline.from, deadline.within, is_timeout) {
            self.probe(deadline.within);
        }
        Err(error)
    }

    async fn connection(&self, slot: &Slot) -> Result<Connection, RedisError> {
        if let Some(connection) = &*lock(&slot.current) {
            return Ok(connection.clone());
        }
        let mut failure = slot.connecting.clone().lock_owned().await;
        if let Some(connection) = &*lock(&slot.current) {
            return Ok(connection.clone());
        }
        if let Some((_, error)) = failure.as_ref().filter(|(at, _)| at.elapsed() < RETRY_AFTER) {
            return Err(error.clone());
        }
        // A task of its own, so that it goes on, and nobody begins another, if this request's deadline passes.
        let (server, breaker) = (self.server.clone(), self.breaker.clone());
        let current = slot.current.clone();
        let attempt = tokio::spawn(async move {
            let result = connect(server, breaker, current).await;
            *failure = result.as_ref().err().map(|error| (Instant::now(), error.clone()));
            result
        });
        attempt.await.unwrap_or_else(|_| {
            Err(RedisError::from((ErrorKind::Io, "the attempt to connect was given up")))
        })
    }

    /// Asks until Redis answers, if nobody does so already, and somebody could want to know.
    fn probe(self: &Arc<Self>, within: Duration) {
        /// Also when its runtime ends meanwhile.
        struct Probe(Arc<Link>);

        impl Drop for Probe {
            fn drop(&mut self) {
                self.0.breaker.end_probe();
            }
        }

        if !self.breaker.begin_probe() {
            return;
        }
        let probe = Probe(self.clone());
        tokio::spawn(async move {
            let link = &probe.0;
            while link.breaker.is_open() && Arc::strong_count(link) > 1 {
                // Of any key: the connection can be one to a cluster that was given.
                let mut get = redis::cmd("GET");
                get.arg(format!("ratelimit:probe:{}", RandomState::new().hash_one(())));
                let answer = link.ask_anyway::<()>(Deadline::new(within), Question::new(&get));
                let _ = answer.await;
                sleep(PROBE_EVERY).await;
            }
        });
    }
}

impl Slot {
    fn give_up(&self, connection: &Connection) {
        lock(&self.current).take_if(|current| current.is(connection));
    }
}
