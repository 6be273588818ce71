//! The servers that connections are made to.

use std::sync::Arc;

use redis::{RedisError, aio::ConnectionLike};

use super::{
    endpoint::{CONNECT_TIMEOUT, Endpoint, Traffic},
    sentinel::Sentinels,
};

/// What connections are made to.
#[allow(clippy::large_enum_variant, reason = "there is one per store, or node of a cluster")]
pub(crate) enum Server {
    One(Endpoint),
    /// The master that the Sentinels name.
    Sentinel(Sentinels),
    /// Somebody else's connection, which mends itself.
    Given(Box<dyn Wire>),
}

/// A connection, of whatever kind.
pub(crate) trait Wire: ConnectionLike + Send + Sync {
    fn boxed(&self) -> Box<dyn Wire>;
}

impl<C: ConnectionLike + Clone + Send + Sync + 'static> Wire for C {
    fn boxed(&self) -> Box<dyn Wire> {
        Box::new(self.clone())
    }
}

/// A new connection.
pub(crate) struct Connected {
    pub(crate) wire: Box<dyn Wire>,
    /// Unknown for somebody else's connection.
    pub(crate) traffic: Option<Arc<Traffic>>,
    /// By which to ask whether the connection [is void](Server::is_void).
    pub(crate) generation: u64,
}

impl Server {
    pub(crate) async fn connect(&self) -> Result<Connected, RedisError> {
        let (channel, generation) = match self {
            Self::One(endpoint) => (endpoint.open(CONNECT_TIMEOUT, None, None).await?, 0),
            Self::Sentinel(sentinels) => sentinels.connect().await?,
            Self::Given(wire) => {
                return Ok(Connected { wire: wire.boxed(), traffic: None, generation: 0 });
            }
        };
        let traffic = Some(channel.traffic.clone());
        Ok(Connected { wire: Box::new(channel), traffic, generation })
    }

    /// Returns the address, or what stands for it, for errors.
    pub(crate) fn name(&self) -> Option<Arc<String>> {
        match self {
            Self::One(endpoint) => Some(endpoint.name()),
            Self::Sentinel(sentinels) => Some(sentinels.name()),
            Self::Given(_) => None,
        }
    }

    /// Whether a connection leads to another server than new ones do.
    pub(crate) fn is_void(&self, generation: u64) -> bool {
        matches!(self, Self::Sentinel(sentinels) if sentinels.is_void(generation))
    }

    /// Sees to it that a change of the master is noticed.
    pub(crate) fn keep_watching(&self) {
        if let Self::Sentinel(sentinels) = self {
            sentinels.keep_watching();
        }
    }

    /// Whether all answers come from one server, and so by one clock.
    pub(crate) fn has_one_clock(&self) -> bool {
        matches!(self, Self::One(_) | Self::Sentinel(_))
    }
}
