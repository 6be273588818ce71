//! A channel: one of the connections to a server, made on demand and again after it ends. One
//! attempt at a time serves all callers.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use redis::{ErrorKind, RedisError};
use tokio::task::{JoinError, JoinHandle};

use super::{
    breaker::Breaker,
    connection::{Connection, MAX_ATTEMPT, connect},
    line::MAX_SILENCE,
    server::Server,
    unsent::{Ticket, Unsent},
};
use crate::sync::lock;

/// The pause after a failed attempt to connect. Calls meanwhile fail with its error.
const RETRY_AFTER: Duration = Duration::from_millis(20);

pub(crate) struct Channel {
    server: Arc<Server>,
    breaker: Arc<Breaker>,
    /// The number of connections to the server so far, of all its channels.
    connections_made: Arc<AtomicUsize>,
    current: Arc<Mutex<Option<Connection>>>,
    unsent: Arc<Unsent>,
    /// Held while connecting, so that one attempt serves all callers.
    attempts: tokio::sync::Mutex<Attempts>,
}

#[derive(Default)]
struct Attempts {
    running: Option<Attempt>,
    failed: Option<FailedAttempt>,
}

/// An attempt in a task of its own, which continues after the deadline of its caller.
struct Attempt {
    task: JoinHandle<Result<Connection, FailedAttempt>>,
    began: Instant,
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

impl Channel {
    pub(crate) fn new(
        server: Arc<Server>,
        breaker: Arc<Breaker>,
        connections_made: Arc<AtomicUsize>,
    ) -> Self {
        let (current, attempts) = (Arc::default(), tokio::sync::Mutex::default());
        let unsent = Arc::default();
        Self { server, breaker, connections_made, current, unsent, attempts }
    }

    /// Returns the connection as it is, usable or not.
    pub(crate) fn current(&self) -> Option<Connection> {
        lock(&self.current).clone()
    }

    /// Returns whether there is a connection over which a command is sent without a pause.
    pub(crate) fn is_ready(&self) -> bool {
        let current = lock(&self.current);
        current.as_ref().is_some_and(|it| self.is_usable(it) && it.is_ready())
    }

    /// Returns the connection, or makes one.
    pub(crate) async fn connection(&self) -> Result<Connection, RedisError> {
        self.server.ensure_watching();
        if let Some(connection) = self.usable() {
            return Ok(connection);
        }
        let attempts = &mut *self.attempts.lock().await;
        if let Some(connection) = self.usable() {
            return Ok(connection);
        }
        // The deadline of its caller may have passed before it failed.
        if let Some(ended) = attempts.running.take_if(|it| it.task.is_finished()) {
            attempts.failed = attempt_result(ended.task).await.err();
        }
        if let Some(failed) = attempts.failed.as_ref().filter(|it| it.at.elapsed() < RETRY_AFTER) {
            return Err(failed.error.clone());
        }
        // An attempt beyond its time limit is in a runtime that does not run.
        let running = attempts.running.take_if(|it| it.began.elapsed() <= 2 * MAX_ATTEMPT);
        let running = attempts.running.insert(running.unwrap_or_else(|| self.attempt()));
        let result = attempt_result(&mut running.task).await;
        attempts.running = None;
        match result {
            Ok(connection) => {
                attempts.failed = None;
                Ok(connection)
            }
            Err(failed) => Err(attempts.failed.insert(failed).error.clone()),
        }
    }

    fn attempt(&self) -> Attempt {
        let (server, breaker) = (self.server.clone(), self.breaker.clone());
        let (current, made) = (self.current.clone(), self.connections_made.clone());
        let unsent = self.unsent.clone();
        let attempt = async move {
            let connection = connect(&server, &breaker, &unsent).await;
            let connection = connection.map_err(FailedAttempt::new)?;
            *lock(&current) = Some(connection.clone());
            made.fetch_add(1, Relaxed);
            Ok(connection)
        };
        Attempt { task: tokio::spawn(attempt), began: Instant::now() }
    }

    /// Returns the connection, if it is open, has replies, and leads to the server.
    fn usable(&self) -> Option<Connection> {
        let current = &mut *lock(&self.current);
        current.take_if(|it| !self.is_usable(it));
        current.clone()
    }

    fn is_usable(&self, it: &Connection) -> bool {
        !it.has_ended() && it.silence() < MAX_SILENCE && it.leads_to(&self.server)
    }

    /// Returns the place of a command behind those that were sent before.
    pub(crate) fn ticket(&self) -> Ticket {
        self.unsent.ticket()
    }

    pub(crate) fn give_up(&self, connection: &Connection) {
        lock(&self.current).take_if(|current| current.is(connection));
    }
}

async fn attempt_result(
    task: impl Future<Output = Result<Result<Connection, FailedAttempt>, JoinError>>,
) -> Result<Connection, FailedAttempt> {
    task.await.unwrap_or_else(|_| {
        let error = (ErrorKind::Io, "the attempt to connect was cancelled");
        Err(FailedAttempt::new(error.into()))
    })
}
