//! The ways to a server.

use std::{sync::Arc, time::Duration};

use redis::{
    AsyncConnectionConfig, Client, ConnectionAddr, ConnectionInfo, ErrorKind, IntoConnectionInfo,
    ProtocolVersion, RedisError,
    aio::{AsyncPushSender, ConnectionLike, MultiplexedConnection},
};

use super::sentinel::Sentinels;

/// An attempt to connect may take longer than a decision.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// What connections are made to.
#[allow(clippy::large_enum_variant, reason = "there is one per store, or node of a cluster")]
pub(super) enum Server {
    One(Client),
    /// The master that the Sentinels name.
    Sentinel(Sentinels),
    /// Somebody else's connection, which mends itself.
    Given(Box<dyn Wire>),
}

/// A connection, of whatever kind.
pub(super) trait Wire: ConnectionLike + Send + Sync {
    fn boxed(&self) -> Box<dyn Wire>;
}

impl<C: ConnectionLike + Clone + Send + Sync + 'static> Wire for C {
    fn boxed(&self) -> Box<dyn Wire> {
        Box::new(self.clone())
    }
}

impl Server {
    pub(super) fn one(url: &str) -> Result<Self, RedisError> {
        Ok(Self::One(Client::open(read_url(url)?)?))
    }

    pub(super) fn client(client: &Client) -> Result<Self, RedisError> {
        Ok(Self::One(Client::open(with_resp3(client.get_connection_info()))?))
    }

    /// `url` is that of a master, with its name in place of a host.
    pub(super) fn sentinel(sentinels: Vec<String>, url: &str) -> Result<Self, RedisError> {
        let info = read_url(url)?;
        let name = match info.addr() {
            ConnectionAddr::Tcp(name, _) => name.clone(),
            ConnectionAddr::TcpTls { host, .. } => host.clone(),
            _ => {
                let text =
                    "the URL of a master behind Sentinels is redis://[[USER]:PASSWORD@]NAME[/DB]";
                return Err((ErrorKind::InvalidClientConfig, text).into());
            }
        };
        let sentinels: Result<_, _> = sentinels.iter().map(|url| read_url(url)).collect();
        let mapping = Arc::new(|host: &str, port| (host.to_owned(), port));
        Ok(Self::Sentinel(Sentinels::new(sentinels?, name, info, mapping)?))
    }

    /// Makes a connection; `disconnected` is told when it breaks, if it can be. Returns it with the
    /// number by which to ask whether it [is void](Self::is_void).
    pub(super) async fn connect(
        &self,
        disconnected: impl AsyncPushSender + Clone,
    ) -> Result<(Box<dyn Wire>, u64), RedisError> {
        Ok(match self {
            Self::One(client) => (Box::new(open(client, disconnected).await?), 0),
            Self::Sentinel(sentinels) => {
                let (connection, number) = sentinels.connect(disconnected).await?;
                (Box::new(connection), number)
            }
            Self::Given(wire) => (wire.boxed(), 0),
        })
    }

    /// Whether a connection leads to another server than new ones do.
    pub(super) fn is_void(&self, number: u64) -> bool {
        matches!(self, Self::Sentinel(sentinels) if sentinels.is_void(number))
    }

    /// Sees to it that a change of the master is noticed.
    pub(super) fn keep_watching(&self) {
        if let Self::Sentinel(sentinels) = self {
            sentinels.keep_watching();
        }
    }

    /// Whether all answers come from one server, and so by one clock.
    pub(super) fn has_one_clock(&self) -> bool {
        matches!(self, Self::One(_) | Self::Sentinel(_))
    }
}

/// Connects to a server whose answers are waited for by deadlines of their own.
pub(super) async fn open(
    client: &Client,
    pushed: impl AsyncPushSender,
) -> Result<MultiplexedConnection, RedisError> {
    open_with(client, pushed, CONNECT_TIMEOUT, None).await
}

pub(super) async fn open_with(
    client: &Client,
    pushed: impl AsyncPushSender,
    connect_within: Duration,
    answer_within: Option<Duration>,
) -> Result<MultiplexedConnection, RedisError> {
    let config = AsyncConnectionConfig::new()
        .set_response_timeout(answer_within)
        .set_connection_timeout(Some(connect_within));
    if client.get_connection_info().redis_settings().protocol() != ProtocolVersion::RESP3 {
        return client.get_multiplexed_async_connection_with_config(&config).await;
    }
    let with_pushes = config.clone().set_push_sender(pushed);
    match client.get_multiplexed_async_connection_with_config(&with_pushes).await {
        Err(error) if knows_no_hello(&error) => {
            let info = with_protocol(client.get_connection_info(), ProtocolVersion::RESP2);
            Client::open(info)?.get_multiplexed_async_connection_with_config(&config).await
        }
        result => result,
    }
}

/// Whether the server, or a proxy in front of it, speaks no RESP3.
fn knows_no_hello(error: &RedisError) -> bool {
    error.kind() == ErrorKind::RESP3NotSupported
        || error.code() == Some("NOPROTO")
        || error.detail().is_some_and(|it| it.contains("unknown command") && it.contains("HELLO"))
}

/// With RESP3, unless the URL says otherwise: a broken connection is noticed at once then, not with the next
/// request. Without `CLIENT SETINFO`, which servers before 7.2 do not know and a user may not be allowed.
pub(super) fn read_url(url: &str) -> Result<ConnectionInfo, RedisError> {
    let info = with_nodelay(url.into_connection_info()?);
    let mut settings = info.redis_settings().clone().set_skip_set_lib_name();
    if !url.contains("protocol=") {
        settings = settings.set_protocol(ProtocolVersion::RESP3);
    }
    Ok(info.set_redis_settings(settings))
}

/// With RESP3: a client has RESP2 by default, and does not tell whether it was asked for.
pub(super) fn with_resp3(info: &ConnectionInfo) -> ConnectionInfo {
    with_nodelay(with_protocol(info, ProtocolVersion::RESP3))
}

fn with_protocol(info: &ConnectionInfo, protocol: ProtocolVersion) -> ConnectionInfo {
    let settings = info.redis_settings().clone().set_protocol(protocol);
    info.clone().set_redis_settings(settings)
}

fn with_nodelay(info: ConnectionInfo) -> ConnectionInfo {
    let settings = info.tcp_settings().clone().set_nodelay(true);
    info.set_tcp_settings(settings)
}
