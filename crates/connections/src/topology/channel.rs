//! A channel: one of the connections of a runtime to a server, made on demand and again after it
//! ends. One attempt at a time serves all callers.

use std::{
    io, mem,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
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
    server::Server,
};
use crate::sync::lock;

/// The time limit of an attempt to connect. It includes queries to Sentinels, and the wait for the
/// end of a failover: a connection itself takes at most 900 ms, and the Sentinels up to 1.5 s.
const MAX_ATTEMPT: Duration = Duration::from_secs(3);
/// The pause after a failed attempt to connect. Calls meanwhile fail with its error. It is short
/// beside a deadline, so that a server that restarts is used within the same call or the next one,
/// and bounds the attempts at a port that refuses connections to 50 per second.
const RETRY_AFTER: Duration = Duration::from_millis(20);

/// The time beyond its limits after which an attempt fails only because its runtime was not driven.
const LATE_AFTER: Duration = Duration::from_millis(100);
/// The time without a command after which a connection of the background is made anew. The others
/// are used by each call, and a lost call of theirs is found out by its deadline.
const MAX_IDLE: Duration = Duration::from_secs(10);

/// The connections to a server so far, of all its channels. Each counts by itself: so `Relaxed`.
#[derive(Default)]
pub(crate) struct ConnectionCounts {
    pub(crate) all: AtomicUsize,
    /// Connections that replaced one that had ended.
    pub(crate) again: AtomicUsize,
}

pub(crate) struct Channel {
    server: Arc<Server>,
    made: Arc<ConnectionCounts>,
    current: Mutex<Option<Current>>,
    /// Whether there was a connection that can have ended.
    has_made: AtomicBool,
    /// Its commands that are not written yet.
    queue: Arc<CommandQueue>,
    /// Held while connecting, so that one attempt serves all callers.
    attempts: tokio::sync::Mutex<Attempts>,
    /// Set while there is no connection.
    wanted: Mutex<Option<Wanted>>,
    /// The time of the last command, in the background.
    used: Option<Mutex<Instant>>,
}

/// The times of the first and the last call of a row that wanted a connection.
struct Wanted {
    first: Instant,
    last: Instant,
}

struct Current {
    connection: Connection,
    /// The argument for [`Server::is_outdated`].
    generation: u64,
}

#[derive(Default)]
struct Attempts {
    /// In a task of its own, which continues after the deadline of its caller.
    running: Option<JoinHandle<Result<Connection, FailedAttempt>>>,
    failed: Option<FailedAttempt>,
}

impl Attempts {
    fn is_running(&self) -> bool {
        self.running.as_ref().is_some_and(|task| !task.is_finished())
    }
}

struct FailedAttempt {
    error: RedisError,
    at: Instant,
}

impl FailedAttempt {
    fn new(error: RedisError) -> Self {
        Self { error, at: Instant::now() }
    }

    fn of_task(error: JoinError) -> Self {
        Self::new(io::Error::other(error).into())
    }
}

impl Channel {
    pub(crate) fn new(
        server: Arc<Server>,
        made: Arc<ConnectionCounts>,
        is_in_background: bool,
    ) -> Self {
        Self {
            server,
            made,
            current: Mutex::default(),
            has_made: AtomicBool::default(),
            queue: Arc::default(),
            attempts: tokio::sync::Mutex::default(),
            wanted: Mutex::default(),
            used: is_in_background.then(|| Mutex::new(Instant::now())),
        }
    }

    /// Returns the connection as it is, usable or not.
    #[cfg(test)]
    pub(crate) fn current(&self) -> Option<Connection> {
        lock(&self.current).as_ref().map(|it| it.connection.clone())
    }

    /// Returns the time for which the server has not answered; `None` without an open connection.
    pub(crate) fn silence(&self) -> Option<Duration> {
        let current = lock(&self.current);
        let open = current.as_ref().filter(|it| !it.connection.has_ended());
        open.map(|it| it.connection.silence())
    }

    /// Returns the time for which calls have wanted a connection.
    pub(crate) fn wanted(&self) -> Option<Duration> {
        lock(&self.wanted).as_ref().map(|wanted| wanted.first.elapsed())
    }

    /// Returns whether there is an open connection of this channel, or an attempt to make one.
    pub(crate) fn is_in_use(&self) -> bool {
        let is_open = lock(&self.current).as_ref().is_some_and(|it| it.connection.is_open());
        is_open || self.attempts.try_lock().is_ok_and(|it| it.is_running())
    }

    /// Returns the connection, or makes one.
    pub(crate) async fn connection(self: &Arc<Self>) -> Result<Connection, RedisError> {
        self.server.ensure_watching();
        self.close_if_idle();
        match self.usable() {
            Some(connection) => Ok(connection),
            None => Box::pin(self.connect()).await,
        }
    }

    async fn connect(self: &Arc<Self>) -> Result<Connection, RedisError> {
        self.want();
        let attempts = &mut *self.attempts.lock().await;
        if let Some(connection) = self.usable() {
            return Ok(connection);
        }
        // The deadline of its caller may have passed before it failed.
        if let Some(ended) = attempts.running.take_if(|task| task.is_finished()) {
            attempts.failed =
                ended.await.map_or_else(|it| Some(FailedAttempt::of_task(it)), Result::err);
        }
        if let Some(failed) = attempts.failed.as_ref().filter(|it| it.at.elapsed() < RETRY_AFTER) {
            return Err(failed.error.clone());
        }
        let result = attempts.running.get_or_insert_with(|| self.attempt()).await;
        attempts.running = None;
        match result.unwrap_or_else(|error| Err(FailedAttempt::of_task(error))) {
            Ok(connection) => {
                attempts.failed = None;
                Ok(connection)
            }
            Err(failed) => Err(attempts.failed.insert(failed).error.clone()),
        }
    }

    fn want(&self) {
        let (now, wanted) = (Instant::now(), &mut *lock(&self.wanted));
        match wanted {
            Some(wanted) if now - wanted.last < MAX_SILENCE => wanted.last = now,
            _ => *wanted = Some(Wanted { first: now, last: now }),
        }
    }

    /// Closes a connection of the background that no command has used for a while: a proxy may have
    /// forgotten it without a word, and a command that is sent then is lost.
    fn close_if_idle(&self) {
        let Some(used) = &self.used else { return };
        let now = Instant::now();
        let last = mem::replace(&mut *lock(used), now);
        if now - last > MAX_IDLE {
            self.has_made.store(false, Relaxed); // the server has ended none
            lock(&self.current).take();
        }
    }

    fn attempt(self: &Arc<Self>) -> JoinHandle<Result<Connection, FailedAttempt>> {
        let channel = self.clone();
        tokio::spawn(async move {
            let Self { server, made, current, has_made, queue, wanted, .. } = &*channel;
            let made_now = connect(server, queue).await.map_err(FailedAttempt::new)?;
            let connection = made_now.connection.clone();
            *lock(current) = Some(made_now);
            *lock(wanted) = None;
            if has_made.swap(true, Relaxed) {
                made.again.fetch_add(1, Relaxed);
            }
            made.all.fetch_add(1, Relaxed);
            Ok(connection)
        })
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

    pub(crate) fn give_up_silent(&self, time: Duration) {
        lock(&self.current).take_if(|current| current.connection.silence() > time);
    }

    pub(crate) fn give_up(&self, connection: &Connection) {
        lock(&self.current).take_if(|current| current.connection.is(connection));
    }
}

/// Makes a connection to the server, again if another server took its place meanwhile.
async fn connect(server: &Server, queue: &Arc<CommandQueue>) -> Result<Current, RedisError> {
    let mut was_late = false;
    loop {
        let start = Instant::now();
        let attempt = timeout(MAX_ATTEMPT, server.connect()).await;
        let attempt = attempt.unwrap_or_else(|_| {
            Err((ErrorKind::Io, "the attempt to connect took too long").into())
        });
        let is_late = || start.elapsed() > server.connects_within(MAX_ATTEMPT) + LATE_AFTER;
        if attempt.is_err() && is_late() && !mem::replace(&mut was_late, true) {
            continue; // its runtime was not driven meanwhile
        }
        let (mut opened, generation) = attempt?;
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
