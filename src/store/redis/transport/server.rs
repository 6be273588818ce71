//! The targets of connections: a server, the master that Sentinels name, or a connection of the
//! application.

use std::{io, sync::Arc};

use redis::{Cmd, RedisError, RedisResult, Value, aio::ConnectionLike};

use super::{
    command::Command,
    connector::{CONNECT_TIMEOUT, Endpoint},
    deadline::Deadline,
    line::{Line, Outcome},
    sentinel::Sentinels,
    unsent::Unsent,
};

#[allow(clippy::large_enum_variant, reason = "there is one per store, or node of a cluster")]
pub(crate) enum Server {
    One(Endpoint),
    /// The master that the Sentinels name.
    Sentinel(Sentinels),
    /// A connection of the application, which reconnects by itself.
    Given(Box<dyn DynConnection>),
}

/// A connection of any kind.
pub(crate) trait DynConnection: ConnectionLike + Send + Sync {
    fn boxed(&self) -> Box<dyn DynConnection>;
}

impl<C: ConnectionLike + Clone + Send + Sync + 'static> DynConnection for C {
    fn boxed(&self) -> Box<dyn DynConnection> {
        Box::new(self.clone())
    }
}

/// The way of commands to a server.
pub(crate) enum Link {
    Line(Line),
    /// A connection of the application. Commands are in order if its are.
    Given(Box<dyn DynConnection>),
}

impl Clone for Link {
    fn clone(&self) -> Self {
        match self {
            Self::Line(line) => Self::Line(line.clone()),
            Self::Given(connection) => Self::Given(connection.boxed()),
        }
    }
}

impl Link {
    /// Sends a command that is not a decision.
    pub(crate) async fn send(&mut self, command: &Cmd) -> RedisResult<Value> {
        match self {
            Self::Line(line) => {
                let command = Command::new(command);
                match line.push(command, Deadline::in_background(), 0).await {
                    Outcome::Reply(reply) => reply,
                    Outcome::Late | Outcome::Ended { .. } => {
                        Err(io::Error::from(io::ErrorKind::BrokenPipe).into())
                    }
                }
            }
            Self::Given(connection) => connection.req_packed_command(command).await,
        }
    }
}

/// A new connection.
pub(crate) struct Connected {
    pub(crate) link: Link,
    /// The argument for [`is_outdated`](Server::is_outdated).
    pub(crate) generation: u64,
}

impl Server {
    /// Connects, for a channel whose commands that were not sent are `unsent`.
    pub(crate) async fn connect(&self, unsent: &Arc<Unsent>) -> Result<Connected, RedisError> {
        let (session, generation) = match self {
            Self::One(endpoint) => (endpoint.open(CONNECT_TIMEOUT, None, None).await?, 0),
            Self::Sentinel(sentinels) => sentinels.connect().await?,
            Self::Given(connection) => {
                let link = Link::Given(connection.boxed());
                return Ok(Connected { link, generation: 0 });
            }
        };
        Ok(Connected { link: Link::Line(Line::new(session, unsent)), generation })
    }

    /// Returns the address, or the name of the master, for errors.
    pub(crate) fn name(&self) -> Option<Arc<str>> {
        match self {
            Self::One(endpoint) => Some(endpoint.name().clone()),
            Self::Sentinel(sentinels) => Some(sentinels.name()),
            Self::Given(_) => None,
        }
    }

    /// Returns whether a connection leads to another server than new connections do.
    pub(crate) fn is_outdated(&self, generation: u64) -> bool {
        matches!(self, Self::Sentinel(sentinels) if sentinels.is_outdated(generation))
    }

    /// Ensures that a change of the master is noticed.
    pub(crate) fn ensure_watching(&self) {
        if let Self::Sentinel(sentinels) = self {
            sentinels.ensure_watching();
        }
    }

    /// Returns whether all replies come from one server, and so from one clock.
    pub(crate) fn has_one_clock(&self) -> bool {
        matches!(self, Self::One(_) | Self::Sentinel(_))
    }
}
