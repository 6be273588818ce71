//! A node: one server with its channels and its breaker. Commands wait for a connection within the
//! deadline, and fail immediately while the breaker is open. It does not know clusters.

use std::{
    hash::BuildHasher,
    mem,
    pin::pin,
    sync::{Arc, Mutex, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use foldhash::fast::RandomState;
use redis::{FromRedisValue, RedisError};
use tokio::{
    task::yield_now,
    time::{sleep, timeout},
};

use super::{
    super::{
        health::{Breaker, Event, NodeHealth, Owner, Tell},
        home,
        link::{
            ANSWER_TIMEOUT, Claim, Command, Connection, Deadline, Header, MAX_SILENCE, Replied,
            ServerState, TransportError, is_of_the_connection, is_reply, is_routine,
            is_write_rejection,
        },
    },
    background::JobQueue,
    channel::Channel,
    channels::Channels,
    server::Server,
};
use crate::sync::lock;

/// The least lifetime of a connection that is given up because of an error reply. A new one may
/// lead to a server that accepts writes. Without this, each call to a replica would make a
/// connection: now it is ten per second.
const RECONNECT_AFTER: Duration = Duration::from_millis(100);
/// The pause before a command is sent over a third connection, or a further one: shorter than the
/// time for which a line waits for it, `MAX_REENTRY`. A server that closes each connection at once
/// gets 20 attempts per deadline.
const RESEND_AFTER: Duration = Duration::from_millis(5);
/// The pause between two probes: as long as the default deadline of callers, so an outage lasts at
/// most one deadline longer for them than for the server. Ten probes per second cost it nothing.
const PROBE_PAUSE: Duration = Duration::from_millis(100);
/// The deadline of a probe, independent of the deadlines of callers: one probe at a time is in
/// flight, and its latency shows for which deadlines the server works.
const PROBE_DEADLINE: Duration = Duration::from_secs(1);

/// The time limit of the command that tells a slow server from one that hangs. Together with the
/// time for a connection, it is below the longest time between two probes.
const TIME_TIMEOUT: Duration = Duration::from_millis(500);

/// What all nodes of a client have in common.
#[derive(Clone)]
pub(crate) struct Common {
    /// The number of connections to a node.
    pub(crate) connections: usize,
    /// The line before all scripts.
    pub(crate) header: Option<Arc<Header>>,
    pub(crate) owner: Arc<dyn Owner>,
}

pub struct Node {
    server: Arc<Server>,
    channels: Channels,
    /// Distributes the keys over the channels.
    hasher: RandomState,
    breaker: Breaker,
    common: Common,
    /// The key of the last script without a reply.
    failed_key: Mutex<Box<[u8]>>,
    jobs: Arc<JobQueue>,
}

impl Node {
    pub(crate) fn new(server: Server, common: Common) -> Self {
        let server = Arc::new(server);
        let breaker = Breaker::new(server.name().unwrap_or_default(), common.owner.clone());
        Self {
            channels: Channels::new(server.clone(), common.connections),
            hasher: RandomState::default(),
            failed_key: Mutex::default(),
            jobs: Arc::default(),
            server,
            breaker,
            common,
        }
    }

    /// Returns the jobs for this node.
    pub(crate) fn jobs(&self) -> &Arc<JobQueue> {
        &self.jobs
    }

    /// Returns whether the breaker is closed for all deadlines.
    pub(crate) fn is_available(&self) -> bool {
        !self.breaker.is_open()
    }

    /// Returns whether the breaker is closed for calls with this deadline.
    pub fn is_available_for(&self, deadline: Duration) -> bool {
        !self.breaker.is_open_for(deadline)
    }

    pub(crate) fn health(&self, deadline: Duration) -> NodeHealth {
        self.breaker.health(deadline)
    }

    /// Tells the state of the breaker, in order with its changes.
    pub(crate) fn tell_breaker(&self, tell: &Arc<Tell>) {
        self.breaker.tell(tell.clone());
    }

    /// Reports a new node to the owner.
    pub(crate) fn announce(&self) {
        self.breaker.announce();
    }

    fn notify(&self, event: Event<'_>) {
        self.common.owner.notify(&event);
    }

    /// Records that a caller has no reply at its deadline. `claim` is that of its call, if there is
    /// one. Returns the error of the caller.
    pub fn record_timeout(
        self: &Arc<Self>,
        deadline: Deadline,
        claim: Option<&Claim>,
    ) -> TransportError {
        let error = self.timeout(deadline, claim);
        self.count_failure(deadline.start(), deadline, &error);
        error
    }

    /// Returns the error of a call without a reply at its deadline.
    fn timeout(&self, deadline: Deadline, claim: Option<&Claim>) -> TransportError {
        let written = claim.and_then(Claim::written);
        let had = written.map_or_else(|| self.delay(deadline), |at| at.elapsed());
        let error = match deadline.is_fair(had) {
            true => TransportError::timeout(deadline.within()),
            false => TransportError::late(deadline.within()),
        };
        let error = self.named(error);
        if written.is_some() { error } else { error.unsent() }
    }

    /// Returns the time for which the server may have kept a command from being written. If this
    /// process did not run meanwhile, that is its own delay, unless the server is silent for longer
    /// than [`MAX_SILENCE`].
    fn delay(&self, deadline: Deadline) -> Duration {
        let silence = self.channels.silence();
        let known = silence.unwrap_or_else(|| self.channels.wanted());
        let is_own = deadline.has_grace() && known < MAX_SILENCE;
        if is_own { Duration::ZERO } else { silence.unwrap_or(Duration::MAX) }
    }

    /// Records that one of the callers of a shared call has failed. Returns its error.
    pub fn record_failure(
        self: &Arc<Self>,
        deadline: Deadline,
        error: TransportError,
    ) -> TransportError {
        let error = self.named(error);
        match error.is_circuit_open() {
            true => self.notify(Event::Skipped),
            false => self.count_failure(deadline.start(), deadline, &error),
        }
        error
    }

    /// Records that the node gets no more calls.
    pub(crate) fn retire(&self) {
        self.breaker.retire();
    }

    /// Returns the number of connections so far.
    pub(crate) fn connections_made(&self) -> usize {
        self.channels.made().all.load(Relaxed)
    }

    /// Returns whether a connection was ever made in place of another one.
    pub(crate) fn has_reconnected(&self) -> bool {
        self.channels.made().again.load(Relaxed) > 0
    }

    /// Proves that the server can execute the scripts of the owner.
    pub(crate) async fn ping(self: &Arc<Self>, deadline: Deadline) -> Result<(), TransportError> {
        let probe = self.common.owner.ping("ping");
        let by_text = probe.by_text();
        for command in [Command::new(&by_text), probe.command()] {
            self.execute::<()>(deadline, command).await?;
        }
        Ok(())
    }

    /// Records that the server executed a script with `key`. If it rejected others before, finds
    /// out in the background whether it executes all again.
    fn record_execution(self: &Arc<Self>, key: &[u8]) {
        if !self.breaker.record_execution() {
            return;
        }
        let (node, proof) = (self.clone(), self.common.owner.proof(key));
        home::spawn(async move {
            let deadline = Deadline::new(ANSWER_TIMEOUT);
            let by_text = proof.by_text();
            for command in [Command::new(&by_text), proof.command()] {
                let Err(error) = node.execute::<()>(deadline, command).await else { continue };
                // The reply to a call by its hash is counted already.
                let is_rejected = error.is_error_reply() && !error.redis().is_some_and(is_routine);
                if is_rejected && !command.is_script() {
                    node.breaker.record_rejection(&error);
                }
                return;
            }
            node.breaker.record_proof();
        });
    }

    /// Executes a command. It fails at the deadline, or immediately while the breaker is open.
    pub async fn execute<T: FromRedisValue>(
        self: &Arc<Self>,
        deadline: Deadline,
        command: Command<'_>,
    ) -> Result<(T, Connection), TransportError> {
        if deadline.is_background() {
            if self.breaker.is_open() {
                return Err(self.named(TransportError::circuit_open()));
            }
        } else if self.breaker.is_open_for(deadline.within()) {
            self.ensure_probing();
            if let Server::Given(_) = *self.server {
                yield_now().await; // its runtime may be driven by calls alone
            }
            self.notify(Event::Skipped);
            return Err(self.named(TransportError::circuit_open()));
        }
        let now = Instant::now();
        if deadline.is_too_late_at(now) {
            // A command that is sent now would be executed, although its caller fails.
            let error = self.timeout(deadline, None);
            if !deadline.is_shared() && !error.is_late() {
                self.notify(Event::Failed(&error));
            }
            return Err(error);
        }
        self.execute_unchecked(now, deadline, command, false).await
    }

    /// Returns the number of its connections of a runtime.
    pub fn connections(&self) -> usize {
        self.common.connections
    }

    /// Returns whether a command that is handed over is written, and its reply read, even if its
    /// caller is not polled. A connection of the application may need its callers.
    pub fn drives_connections(&self) -> bool {
        !matches!(*self.server, Server::Given(_))
    }

    /// Returns the index of the connection for a key: the commands of a key take one connection, so
    /// that they are executed in order.
    pub fn channel_of(&self, key: &[u8]) -> usize {
        match self.common.connections {
            1 => 0,
            count => self.hasher.hash_one(key) as usize % count,
        }
    }

    /// Waits until the next command over a connection can be sent immediately, or fails.
    pub(crate) async fn ready(&self, channel: usize) {
        if let Ok(connection) = self.channels.current().get(channel).connection().await {
            connection.notice_end_while_idle().await;
        }
    }

    /// Executes a command, even while the breaker is open, and records the result.
    async fn execute_unchecked<T: FromRedisValue>(
        self: &Arc<Self>,
        start: Instant,
        deadline: Deadline,
        command: Command<'_>,
        is_probe: bool,
    ) -> Result<(T, Connection), TransportError> {
        let headed = self.common.header.as_ref().and_then(|header| header.apply(command));
        let command = headed.as_ref().map_or(command, |headed| headed.command(command));
        let channels = self.channels.current();
        let channel = channels.get(self.channel_of(command.key()));
        let claim = command.claim();
        claim.reopen(); // another node has not executed it
        let mut connection = None;
        let replied = {
            let mut sent = pin!(self.send(channel, command, &claim, &mut connection));
            match deadline.wait_for(sent.as_mut()).await {
                None if !claim.give_up() => deadline.linger(sent).await,
                replied => replied,
            }
        };
        let (error, is_reply) = match (replied.flatten(), connection) {
            (Some(Ok((reply, partial_error))), Some(connection)) => {
                if let Some(error) = partial_error {
                    give_up_if_unusable(channel, &connection, &error, true);
                }
                return Ok((reply, connection));
            }
            (Some(Err(error)), connection) => {
                explain(channel, connection, claim.written().is_some(), error)
            }
            _ => (self.timeout(deadline, Some(&claim)), false),
        };
        let error = self.named(error);
        if is_reply {
            return Err(error);
        }
        if is_probe || deadline.is_background() {
            if !error.is_late() {
                self.notify(Event::Failed(&error));
            }
        } else if !(deadline.is_shared() && error.is_timeout()) {
            if command.is_script() {
                *lock(&self.failed_key) = command.key().into();
            }
            self.count_failure(start, deadline, &error);
        }
        Err(if claim.give_up() { error.unsent() } else { error })
    }

    /// Sends a command, again if a connection ended before a byte of it was written. Returns
    /// nothing if it was given up. A reply can have the error of a part beside it. `connection`
    /// becomes the last one that it was sent over.
    async fn send<T: FromRedisValue>(
        self: &Arc<Self>,
        channel: &Arc<Channel>,
        command: Command<'_>,
        claim: &Arc<Claim>,
        connection: &mut Option<Connection>,
    ) -> Option<Result<(T, Option<RedisError>), RedisError>> {
        let mut was_resent = false;
        // The place of the command, if a connection has ended before it wrote it.
        let mut position = None;
        loop {
            let connection = match channel.connection().await {
                Ok(found) => connection.insert(found),
                Err(error) => {
                    *connection = None; // it is no reply to the command
                    return Some(Err(error));
                }
            };
            let replied = connection.execute(command, claim, &mut position).await?;
            self.record_reply(&replied, command);
            let Replied { result, partial_error, .. } = replied;
            if result.is_ok() || position.is_none() {
                return Some(result.map(|reply| (reply, partial_error)));
            }
            channel.give_up(connection);
            if mem::replace(&mut was_resent, true) {
                sleep(RESEND_AFTER).await;
            }
        }
    }

    /// Records a call that began at `start` and got no reply.
    fn count_failure(self: &Arc<Self>, start: Instant, deadline: Deadline, error: &TransportError) {
        if error.is_late() {
            return;
        }
        self.notify(Event::Failed(error));
        if self.breaker.record_failure(start, deadline.within(), error) {
            self.ensure_probing();
        }
    }

    /// Records what a reply proves about the server.
    fn record_reply<T>(self: &Arc<Self>, replied: &Replied<T>, command: Command<'_>) {
        let error = replied.error();
        if error.is_some_and(|error| !is_reply(error)) {
            return;
        }
        self.notify(Event::Replied);
        if command.is_script() {
            let Replied { at, latency, .. } = *replied;
            self.breaker.record_reply(at, latency, !error.is_some_and(is_write_rejection));
        }
        match error {
            None if command.is_script() => self.record_execution(command.key()),
            Some(error) if !is_routine(error) => {
                let is_of_one_key = self.common.owner.is_of_one_key(error);
                let error = TransportError::of_redis(error.clone());
                self.notify(Event::Failed(&error));
                if command.is_script() && !is_of_one_key {
                    self.breaker.record_rejection(&error);
                }
            }
            _ => {}
        }
    }

    /// Names the server in an error.
    pub fn named(&self, error: TransportError) -> TransportError {
        error.at(self.server.name())
    }

    /// Sends a probe. If it is unknown why the server does not answer, finds that out before.
    /// Returns whether the answer has closed the breaker.
    async fn send_probe(self: &Arc<Self>) -> bool {
        let breaker = &self.breaker;
        let mut found = ServerState::Unavailable;
        if breaker.is_unexplained() {
            found = self.examine().await;
            // A server that answers may have recovered a moment ago: the probe shows it.
            if found != ServerState::Slow {
                breaker.explain(found);
            }
        }
        let failed_key = lock(&self.failed_key).clone();
        let probe = self.common.owner.probe(&failed_key);
        let deadline = Deadline::new(PROBE_DEADLINE);
        let probed =
            self.execute_unchecked::<()>(Instant::now(), deadline, probe.command(), true).await;
        let error = match probed {
            Ok(_) if !breaker.is_open() => return true,
            // The reply was too late for the callers.
            Ok(_) => {
                breaker.explain(ServerState::Slow);
                breaker.remind(&self.named(TransportError::timeout(breaker.failed_within())));
                return false;
            }
            Err(error) => error,
        };
        match error.server_state() {
            ServerState::Unavailable if found == ServerState::Unavailable => {}
            ServerState::Unavailable => breaker.explain(found),
            clear => breaker.explain(clear),
        }
        breaker.remind(&error);
        false
    }

    /// Finds out why the server does not answer: whether it accepts a new connection, and answers a
    /// command there. It takes up to 1.4 s.
    async fn examine(&self) -> ServerState {
        // A connection of its own: no other command has a place on it.
        let mut opened = match timeout(ANSWER_TIMEOUT, self.server.connect()).await {
            Err(_) => return ServerState::Unavailable,
            Ok(Err(error)) => return TransportError::of_redis(error).server_state(),
            Ok(Ok((opened, _))) => opened,
        };
        let time = redis::cmd("TIME"); // needs no key, and a user of scripts may read the clock
        match timeout(TIME_TIMEOUT, opened.send(&time)).await {
            Ok(Err(error)) if !is_reply(&error) => ServerState::Unavailable,
            Ok(_) => ServerState::Slow,
            Err(_) => ServerState::Silent,
        }
    }

    /// Ensures that probes are sent until Redis answers.
    fn ensure_probing(self: &Arc<Self>) {
        /// Ends the probing, also by a panic.
        struct Probing(Arc<Node>);

        impl Drop for Probing {
            fn drop(&mut self) {
                self.0.breaker.end_probing();
            }
        }

        if !self.breaker.begin_probing() {
            return;
        }
        let probing = Probing(self.clone());
        home::spawn(async move {
            let node = &probing.0;
            while node.breaker.is_open() && Arc::strong_count(node) > 1 {
                let has_closed = node.send_probe().await;
                sleep(PROBE_PAUSE).await;
                if has_closed {
                    // The server has had the time to answer on the connections of callers, too.
                    node.channels.give_up_silent(PROBE_PAUSE);
                }
            }
        });
    }
}

/// Explains an error of the crate `redis`, and gives up the connection if the error makes it
/// unusable. Returns whether the server replied, too.
fn explain(
    channel: &Channel,
    connection: Option<Connection>,
    was_sent: bool,
    error: RedisError,
) -> (TransportError, bool) {
    let is_reply = connection.is_some() && is_reply(&error);
    let is_interrupted =
        was_sent && !is_reply && connection.as_ref().is_some_and(Connection::has_ended);
    if let Some(connection) = &connection {
        give_up_if_unusable(channel, connection, &error, is_reply);
    }
    let error = match is_interrupted {
        true => TransportError::interrupted(error),
        false => TransportError::of_redis(error),
    };
    (error, is_reply)
}

/// Gives up a connection if an error means that it is unusable.
fn give_up_if_unusable(
    channel: &Channel,
    connection: &Connection,
    error: &RedisError,
    is_reply: bool,
) {
    let is_old = !is_reply || connection.lifetime() >= RECONNECT_AFTER;
    if is_old && is_of_the_connection(error) {
        channel.give_up(connection);
    }
}

#[cfg(test)]
mod tests;
