//! The ways to a server.

use std::time::Duration;

use redis::{
    AsyncConnectionConfig, Client, ConnectionAddr, ConnectionInfo, ErrorKind, IntoConnectionInfo,
    ProtocolVersion, RedisError, TlsMode,
    aio::{AsyncPushSender, ConnectionLike},
    sentinel::{SentinelClient, SentinelNodeConnectionInfo, SentinelServerType},
};

/// An attempt to connect may take longer than a decision.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// What connections are made to.
pub(super) enum Server {
    One(Client),
    /// The master that the Sentinels name.
    Sentinel {
        client: tokio::sync::Mutex<SentinelClient>,
        name: String,
    },
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
        Ok(Self::One(Client::open(with_nodelay(client.get_connection_info().clone()))?))
    }

    /// `url` is that of a master, with its name in place of a host.
    pub(super) fn sentinel(sentinels: Vec<String>, url: &str) -> Result<Self, RedisError> {
        let info = read_url(url)?;
        let mut node = SentinelNodeConnectionInfo::default()
            .set_tcp_settings(info.tcp_settings().clone())
            .set_redis_connection_info(info.redis_settings().clone());
        let name = match info.addr() {
            ConnectionAddr::Tcp(name, _) => name.clone(),
            ConnectionAddr::TcpTls { host, insecure, .. } => {
                node =
                    node.set_tls_mode(if *insecure { TlsMode::Insecure } else { TlsMode::Secure });
                host.clone()
            }
            _ => {
                let text =
                    "the URL of a master behind Sentinels is redis://[[USER]:PASSWORD@]NAME[/DB]";
                return Err((ErrorKind::InvalidClientConfig, text).into());
            }
        };
        let sentinels = sentinels
            .iter()
            .map(|url| Ok(with_nodelay(url.as_str().into_connection_info()?)))
            .collect::<Result<Vec<_>, RedisError>>()?;
        let client =
            SentinelClient::build(sentinels, name.clone(), Some(node), SentinelServerType::Master)?;
        Ok(Self::Sentinel { client: client.into(), name })
    }

    /// Makes a connection; `disconnected` is told when it breaks, if it can be.
    pub(super) async fn connect(
        &self,
        disconnected: impl AsyncPushSender,
    ) -> Result<Box<dyn Wire>, RedisError> {
        let client = match self {
            Self::One(client) => client.clone(),
            Self::Sentinel { client, name } => {
                let client = client.lock().await.async_get_client().await;
                client.map_err(|error| match error.kind() {
                    kind @ ErrorKind::MasterNameNotFoundBySentinel => {
                        (kind, "the Sentinels know no master that is up by the name", name.clone())
                            .into()
                    }
                    _ => error,
                })?
            }
            Self::Given(wire) => return Ok(wire.boxed()),
        };
        let config = AsyncConnectionConfig::new()
            .set_response_timeout(None)
            .set_connection_timeout(Some(CONNECT_TIMEOUT));
        let config = match client.get_connection_info().redis_settings().protocol() {
            ProtocolVersion::RESP3 => config.set_push_sender(disconnected),
            _ => config,
        };
        Ok(Box::new(client.get_multiplexed_async_connection_with_config(&config).await?))
    }

    /// Whether all answers come from one server, and so by one clock.
    pub(super) fn has_one_clock(&self) -> bool {
        matches!(self, Self::One(_) | Self::Sentinel { .. })
    }
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

pub(super) fn with_nodelay(info: ConnectionInfo) -> ConnectionInfo {
    let settings = info.tcp_settings().clone().set_nodelay(true);
    info.set_tcp_settings(settings)
}
