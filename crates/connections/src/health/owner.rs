//! The owner of the connections, as they know it: it has the scripts, counts, and writes logs.

use std::{error::Error, fmt::Display, time::Duration};

use redis::{Cmd, RedisError};

use super::super::link::{Command, ServerState, TransportError};

/// The owner of the connections. All nodes of a client have the same.
pub trait Owner: Send + Sync + 'static {
    /// Gets an event, in the task of a call: it must be fast, and must not block or panic. No lock
    /// of the connections is held meanwhile.
    fn notify(&self, event: &Event<'_>);

    /// Returns whether an error of a script concerns one key: it says nothing about the server.
    fn is_of_one_key(&self, error: &RedisError) -> bool;

    /// Returns the script that proves that a server can execute the scripts of the owner, with a
    /// key that has this hash tag.
    fn ping(&self, tag: &str) -> Probe;

    /// Returns the script that shows that an outage is over, with a key in the slot of `key`; if
    /// that is empty, with any key.
    fn probe(&self, key: &[u8]) -> Probe;

    /// Returns the script that shows that a server executes all scripts of the owner again, with a
    /// key in the slot of `key`.
    fn proof(&self, key: &[u8]) -> Probe;
}

/// A script that changes nothing, but needs what the scripts of the owner need. A Redis that
/// rejects writes or scripts still answers `TIME`.
#[derive(Debug)]
pub struct Probe {
    /// An `EVALSHA`.
    pub cmd: Cmd,
    pub text: &'static str,
}

impl Probe {
    pub fn command(&self) -> Command<'_> {
        Command::script(&self.cmd, self.text)
    }

    /// Returns the same script by its text. A ping sends both forms: scripts need the permission
    /// for each of them.
    pub(crate) fn by_text(&self) -> Cmd {
        self.command().by_text().expect("a probe is a script")
    }
}

/// An event of the connections. `server` is its address, or the name of the master; empty for a
/// connection of the application.
pub enum Event<'a> {
    /// A server has replied, perhaps with an error.
    Replied,
    /// A call, or an attempt to connect, has failed, or a server has replied with an error that is
    /// not part of the protocol.
    Failed(&'a TransportError),
    /// A call failed immediately, because a breaker is open.
    Skipped,
    /// A breaker was opened or closed. The events of a breaker are in order.
    BreakerChanged { server: &'a str, is_open: bool },
    /// Calls fail from now on. `changes` is their number since the last of these events.
    Unavailable { server: &'a str, cause: ServerState, changes: u32, error: &'a TransportError },
    /// It is known why a server does not answer.
    Explained { server: &'a str, cause: ServerState },
    /// An outage lasts. The error is that of the last probe.
    StillUnavailable {
        server: &'a str,
        cause: ServerState,
        outage: Duration,
        error: &'a TransportError,
    },
    /// An outage has ended.
    Available { server: &'a str, changes: u32, outage: Duration },
    /// A server answers, but rejects scripts. The error contains no key.
    Rejects { server: &'a str, changes: u32, error: &'a TransportError },
    /// It has rejected scripts for this time.
    StillRejects { server: &'a str, outage: Duration, error: &'a TransportError },
    /// It no longer rejects scripts.
    Executes { server: &'a str, changes: u32, outage: Duration },
    /// A node of a cluster no longer has slots.
    Retired { server: &'a str, changes: u32 },
    /// A server rejected new credentials on an open connection.
    LoginRejected { server: &'a str },
    /// The provider of the credentials has failed, for an open connection.
    NoCredentials { server: &'a str, error: &'a (dyn Error + 'static) },
    /// The Sentinels name another master.
    MasterChanged { master: &'a str, old: &'a dyn Display, new: &'a dyn Display },
    /// The master that the Sentinels name cannot be used.
    MasterUnusable { master: &'a str, address: &'a dyn Display, error: &'a (dyn Error + 'static) },
    /// A Sentinel does not accept a subscription, and is only polled.
    NotSubscribed { master: &'a str, error: &'a (dyn Error + 'static) },
}

/// An owner that hears nothing, and whose servers are not probed.
#[cfg(test)]
pub(crate) struct Nobody;

#[cfg(test)]
impl Owner for Nobody {
    fn notify(&self, _: &Event<'_>) {}

    fn is_of_one_key(&self, _: &RedisError) -> bool {
        false
    }

    fn ping(&self, _: &str) -> Probe {
        unreachable!("no server is pinged")
    }

    fn probe(&self, _: &[u8]) -> Probe {
        unreachable!("no server is probed")
    }

    fn proof(&self, _: &[u8]) -> Probe {
        unreachable!("no server is probed")
    }
}
