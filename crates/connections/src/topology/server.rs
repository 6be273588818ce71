//! The targets of connections: a server, the master that Sentinels name, or a connection of the
//! application.

use std::{sync::Arc, time::Duration};

use redis::RedisError;

use super::{
    super::link::{CONNECT_TIMEOUT, DynConnection, Endpoint, Opened},
    sentinel::Sentinels,
};

#[allow(clippy::large_enum_variant, reason = "there is one per store, or node of a cluster")]
pub(crate) enum Server {
    One(Endpoint),
    /// The master that the Sentinels name.
    Sentinel(Sentinels),
    /// A connection of the application, which reconnects by itself.
    Given(Box<dyn DynConnection>),
}

impl Server {
    /// Makes a connection. Returns the argument for [`is_outdated`](Self::is_outdated), too.
    pub(crate) async fn connect(&self) -> Result<(Opened, u64), RedisError> {
        let (session, generation) = match self {
            Self::One(endpoint) => (endpoint.open(CONNECT_TIMEOUT, None, None).await?, 0),
            Self::Sentinel(sentinels) => sentinels.connect().await?,
            Self::Given(connection) => return Ok((Opened::Given(connection.boxed()), 0)),
        };
        Ok((Opened::Session(session), generation))
    }

    /// Returns the time limit of [`connect`](Self::connect), which is `longest` if it has none.
    pub(crate) fn connects_within(&self, longest: Duration) -> Duration {
        if let Self::One(_) = self { CONNECT_TIMEOUT } else { longest }
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
