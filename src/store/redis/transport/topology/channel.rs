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
use tokio::{
    task::{JoinError, JoinHandle},
    time::timeout,
};

use super::{
    super::link::{CommandQueue, Connection, MAX_SILENCE},
    server::{Connected, Server},
};
use crate::sync::lock;

/// The time limit of an attempt to connect. It includes queries to Sentinels, and the wait for the
/// end of a failover: a connection itself takes at most 900 ms, and the Sentinels up to 1.5 s.
const MAX_ATTEMPT: Duration = Duration::from_secs(3);
/// The pause after a failed attempt to connect. Calls meanwhile fail with its error. It is short
/// beside a deadline, so that a server that restarts is used within the same call or the next one,
/// and bounds the attempts at a port that refuses connections to 50 per second.
const RETRY_AFTER: Duration = Duration::from_millis(20);

pub(crate) struct Channel {
    server: Arc<Server>,
    /// The number of connections to the server so far, of all its channels.
    connections_made: Arc<AtomicUsize>,
    current: Arc<Mutex<Option<Current>>>,
    /// Its commands that are not written yet.
    queue: Arc<CommandQueue>,
    /// Held while connecting, so that one attempt serves all callers.
    attempts: tokio::sync::Mutex<Attempts>,
}

struct Current {
    connection: Connection,
    /// The argument for [`Server::is_outdated`].
    generation: u64,
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
    pub(crate) fn new(server: Arc<Server>, connections_made: Arc<AtomicUsize>) -> Self {
        let (current, attempts) = (Arc::default(), tokio::sync::Mutex::default());
        Self { server, connections_made, current, queue: Arc::default(), attempts }
    }

    /// Returns the connection as it is, usable or not.
    pub(crate) fn current(&self) -> Option<Connection> {
        lock(&self.current).as_ref().map(|it| it.connection.clone())
    }

    /// Returns whether there is a connection over which a command is sent without a pause.
    pub(crate) fn is_ready(&self) -> bool {
        let current = lock(&self.current);
        current.as_ref().is_some_and(|it| self.is_usable(it) && it.connection.is_ready())
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
        let (server, queue) = (self.server.clone(), self.queue.clone());
        let (current, made) = (self.current.clone(), self.connections_made.clone());
        let attempt = async move {
            let made_now = connect(&server, &queue).await.map_err(FailedAttempt::new)?;
            let connection = made_now.connection.clone();
            *lock(&current) = Some(made_now);
            made.fetch_add(1, Relaxed);
            Ok(connection)
        };
        Attempt { task: tokio::spawn(attempt), began: Instant::now() }
    }

    /// Returns the connection, if it is open, has replies, and leads to the server.
    fn usable(&self) -> Option<Connection> {
        let current = &mut *lock(&self.current);
        current.take_if(|it| !self.is_usable(it));
        current.as_ref().map(|it| it.connection.clone())
    }

    fn is_usable(&self, Current { connection, generation }: &Current) -> bool {
        let has_replies = !connection.has_ended() && connection.silence() < MAX_SILENCE;
        has_replies && !self.server.is_outdated(*generation)
    }

    pub(crate) fn give_up(&self, connection: &Connection) {
        lock(&self.current).take_if(|current| current.connection.is(connection));
    }
}

/// Makes a connection to the server, again if another server took its place meanwhile.
async fn connect(server: &Server, queue: &Arc<CommandQueue>) -> Result<Current, RedisError> {
    loop {
        let attempt = timeout(MAX_ATTEMPT, server.connect()).await;
        let Connected { mut opened, generation } =
            attempt.map_err(|_| (ErrorKind::Io, "the attempt to connect took too long"))??;
        let clock_offset = match server.has_one_clock() {
            true => Some(opened.read_clock().await?),
            false => None,
        };
        if !server.is_outdated(generation) {
            let connection = Connection::new(opened, clock_offset, queue);
            return Ok(Current { connection, generation });
        }
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
