//! The settings of the transport: addresses, credentials and TLS. It opens no connection.

use std::{fmt, slice, sync::Arc, time::Duration};

use redis::{aio::ConnectionLike, auth::StreamingCredentialsProvider};

#[cfg(feature = "tls-rustls")]
use super::tls::Tls;
use super::{
    client::Client,
    cluster::Cluster,
    connector::{Connector, Credentials, Endpoint, Mapping, Place},
    error::TransportError,
    header::Header,
    node::Keys,
    sentinel::Sentinels,
    server::{DynConnection, Server},
    url::{self, Nodes, Url},
};
use crate::error::StoreError;

const DEFAULT_DEADLINE: Duration = Duration::from_millis(100);
const DEFAULT_DENIAL_TTL: Duration = Duration::from_secs(1);
const DEFAULT_PREFIX: &str = "ratelimit";

/// The addresses of Redis and the login: one server, a master behind Sentinels, or a cluster.
///
/// An attempt to connect has a time limit of 900 ms. It includes resolving the name, connecting to
/// all of its addresses in parallel, TLS and the login. The limit does not depend on the deadline
/// of decisions: if a decision fails in the meantime, the attempt continues for later decisions.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::{RedisStore, store::RedisConfig};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let sentinels = ["redis://10.0.0.1:26379", "redis://10.0.0.2:26379", "redis://10.0.0.3:26379"];
/// let config = RedisConfig::sentinels(sentinels, "mymaster")?
///     .user("limiter")
///     .password("secret")
///     .database(2)
///     .deadline(Duration::from_millis(50));
/// let store = RedisStore::new(config)?;
/// # let _ = store;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct RedisConfig {
    topology: Topology,
    user: Option<String>,
    password: Option<String>,
    database: Option<i64>,
    credentials: Option<Credentials>,
    #[cfg(feature = "tls-rustls")]
    tls: Option<Tls>,
    #[cfg(feature = "tls-rustls")]
    sentinel_tls: Option<Tls>,
    mapping: Mapping,
    connections: usize,
    pub(crate) deadline: Duration,
    pub(crate) denial_ttl: Duration,
    pub(crate) prefix: Arc<str>,
    script_header: Option<String>,
}

#[derive(Clone)]
enum Topology {
    Server(Url),
    Sentinels {
        sentinels: Vec<Url>,
        name: String,
        /// Its place is the name.
        master: Url,
    },
    Cluster(Vec<Url>),
    /// Of the application.
    Connection(Arc<dyn DynConnection>),
}

impl RedisConfig {
    /// Describes Redis by one URL. See [`store::connect`](crate::store::connect) for its forms.
    ///
    /// # Errors
    ///
    /// If the URL is invalid.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{RedisStore, store::RedisConfig};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let url = "redis+sentinel://10.0.0.1:26379,10.0.0.2:26379/mymaster?deadline=50ms&prefix=shop";
    /// let store = RedisStore::new(RedisConfig::from_url(url)?)?;
    /// # let _ = store;
    /// # Ok(())
    /// # }
    /// ```
    pub fn from_url(url: &str) -> Result<Self, StoreError> {
        let (nodes, settings) = url::read(url)?;
        let config = match nodes {
            Nodes::Server(url) => Self::new(Topology::Server(Url::read(&url)?)),
            Nodes::Sentinels { sentinels, master } => Self::sentinels(sentinels, &master)?,
            Nodes::Cluster(nodes) => Self::cluster(nodes)?,
        };
        Ok(Self {
            connections: settings.connections.unwrap_or(config.connections),
            deadline: settings.deadline.unwrap_or(config.deadline),
            denial_ttl: settings.denial_ttl.unwrap_or(config.denial_ttl),
            prefix: settings.prefix.map_or(config.prefix.clone(), Into::into),
            script_header: settings.script_flags.map(|flags| format!("#!lua flags={flags}")),
            ..config
        })
    }

    /// Describes the server at `url`: `redis://[[USER]:PASSWORD@]HOST[:PORT][/DB]`,
    /// `unix:///PATH[?db=DB&user=USER&pass=PASSWORD]`, or for TLS `rediss://` with the feature
    /// `tls-rustls`.
    ///
    /// The protocol is RESP3 if the server supports it. `?protocol=resp2` prevents that.
    ///
    /// # Errors
    ///
    /// If the URL is invalid.
    pub fn server(url: &str) -> Result<Self, StoreError> {
        let config = Self::from_url(url)?;
        match config.topology {
            Topology::Server(_) => Ok(config),
            _ => Err(TransportError::config(
                "cannot use the Redis URL: it names several servers; use `RedisConfig::from_url`",
            )
            .into()),
        }
    }

    /// Describes the master behind Sentinels.
    ///
    /// `sentinels` are the URLs of the Sentinels, with the credentials for the Sentinels. `master`
    /// is the name of the master, or a URL with the name in place of the host:
    /// `redis://[[USER]:PASSWORD@]NAME[/DB]`. The store discovers other Sentinels through these,
    /// and logs in there with the settings of the first URL.
    ///
    /// # Errors
    ///
    /// If a URL is invalid, the list is empty, or only some of the URLs are `rediss://`.
    pub fn sentinels(
        sentinels: impl IntoIterator<Item = impl AsRef<str>>,
        master: &str,
    ) -> Result<Self, StoreError> {
        let master = match master.contains("://") {
            true => Url::read(master)?,
            false => Url::read(&format!("redis://{master}"))?,
        };
        let Place::Tcp((name, _)) = &master.place else {
            return Err(TransportError::config(
                "cannot use the URL of the master: it names no master; write the name that the \
                 Sentinels know, or redis://[[USER]:PASSWORD@]NAME[/DB]",
            )
            .into());
        };
        let name = name.clone();
        let sentinels = Url::read_all(sentinels, "redis://HOST:26379 for each Sentinel")?;
        Ok(Self::new(Topology::Sentinels { sentinels, name, master }))
    }

    /// Describes a cluster. `urls` are some of its nodes. The login of the first URL is used for
    /// all nodes that the cluster names.
    ///
    /// # Errors
    ///
    /// If a URL is invalid, the list is empty, or only some of the URLs are `rediss://`.
    pub fn cluster(urls: impl IntoIterator<Item = impl AsRef<str>>) -> Result<Self, StoreError> {
        let form = "redis://[[USER]:PASSWORD@]HOST[:PORT] for some nodes of the cluster";
        let seeds = Url::read_all(urls, form)?;
        if let Some(seed) = seeds.iter().find(|seed| matches!(seed.place, Place::Unix(_))) {
            return Err(TransportError::config(format!(
                "cannot use {}: the nodes of a cluster have hosts and ports; write {form}",
                seed.place
            ))
            .into());
        }
        Ok(Self::new(Topology::Cluster(seeds)))
    }

    /// Describes a connection that reconnects by itself, which
    /// [`RedisStore::from_connection`](crate::RedisStore::from_connection) describes. The settings
    /// about addresses, logins and connections have no effect.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use tower_ratelimit::{RedisStore, redis, store::RedisConfig};
    ///
    /// # async fn run() -> Result<(), Box<dyn std::error::Error>> {
    /// let client = redis::Client::open("redis://127.0.0.1/")?;
    /// let connection = client.get_multiplexed_async_connection().await?;
    /// let store = RedisStore::new(RedisConfig::from_connection(connection).prefix("shop"))?;
    /// # let _ = store;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn from_connection<C>(connection: C) -> Self
    where
        C: ConnectionLike + Clone + Send + Sync + 'static,
    {
        Self::new(Topology::Connection(Arc::new(connection)))
    }

    fn new(topology: Topology) -> Self {
        Self {
            topology,
            user: None,
            password: None,
            database: None,
            credentials: None,
            #[cfg(feature = "tls-rustls")]
            tls: None,
            #[cfg(feature = "tls-rustls")]
            sentinel_tls: None,
            mapping: Arc::new(|host: &str, port| (host.to_owned(), port)),
            connections: 1,
            deadline: DEFAULT_DEADLINE,
            denial_ttl: DEFAULT_DENIAL_TTL,
            prefix: DEFAULT_PREFIX.into(),
            script_header: None,
        }
    }

    /// Sets the user at the servers, in place of the user in the URLs. The user at the Sentinels is
    /// in their URLs.
    #[must_use]
    pub fn user(self, user: impl Into<String>) -> Self {
        Self { user: Some(user.into()), ..self }
    }

    /// Sets the password at the servers, in place of the password in the URLs.
    #[must_use]
    pub fn password(self, password: impl Into<String>) -> Self {
        Self { password: Some(password.into()), ..self }
    }

    /// Takes the user and the password at the servers from a provider.
    ///
    /// Each new connection logs in with the latest credentials. When the provider has new
    /// credentials, the open connections authenticate again: a rotation needs no new store and
    /// interrupts no request. Change the password at the server first, because a connection whose
    /// new login is rejected keeps the old one. Sentinels do not use the provider. If only a
    /// password is set, the name of the user is `default`.
    ///
    /// # Examples
    ///
    /// A task of the application replaces these credentials by `sender.send(..)`:
    ///
    /// ```
    /// use std::pin::Pin;
    /// use tokio::sync::watch;
    /// use tokio_stream::{Stream, StreamExt, wrappers::WatchStream};
    /// use tower_ratelimit::{
    ///     RedisStore,
    ///     redis::{
    ///         RedisResult,
    ///         auth::{BasicAuth, StreamingCredentialsProvider},
    ///     },
    ///     store::RedisConfig,
    /// };
    ///
    /// struct Rotated(watch::Receiver<BasicAuth>);
    ///
    /// impl StreamingCredentialsProvider for Rotated {
    ///     fn subscribe(&self) -> Pin<Box<dyn Stream<Item = RedisResult<BasicAuth>> + Send>> {
    ///         Box::pin(WatchStream::new(self.0.clone()).map(Ok))
    ///     }
    /// }
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let first = BasicAuth::new("limiter".to_owned(), "secret".to_owned());
    /// let (sender, receiver) = watch::channel(first);
    /// let config = RedisConfig::server("redis://redis.internal")?;
    /// let store = RedisStore::new(config.credentials_provider(Rotated(receiver)))?;
    /// # let _ = (store, sender);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn credentials_provider(
        self,
        provider: impl StreamingCredentialsProvider + 'static,
    ) -> Self {
        Self { credentials: Some(Credentials(Arc::new(provider))), ..self }
    }

    /// Sets the number of the database, in place of the number in the URLs. The default is 0.
    #[must_use]
    pub fn database(self, database: u32) -> Self {
        Self { database: Some(database.into()), ..self }
    }

    /// Connects to the servers by TLS with these settings, even if the URL begins with `redis://`.
    /// The settings also apply to Sentinels with `rediss://` URLs;
    /// [`sentinel_tls`](Self::sentinel_tls) overrides them.
    #[cfg(feature = "tls-rustls")]
    #[must_use]
    pub fn tls(self, tls: Tls) -> Self {
        Self { tls: Some(tls), ..self }
    }

    /// Connects to the Sentinels by TLS with these settings, even if the URL begins with
    /// `redis://`.
    #[cfg(feature = "tls-rustls")]
    #[must_use]
    pub fn sentinel_tls(self, tls: Tls) -> Self {
        Self { sentinel_tls: Some(tls), ..self }
    }

    /// Maps each address that a Sentinel or a node of a cluster names to the address to connect to.
    ///
    /// It is needed if clients cannot use the addresses by which the servers know each other:
    ///
    /// * behind port forwarding
    /// * in containers
    /// * if a certificate is for another name
    ///
    /// Addresses in the URLs are not mapped. If a node names no host for itself, the function gets
    /// the host of the connection. The function must not block or panic.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::collections::HashMap;
    /// use tower_ratelimit::store::RedisConfig;
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let table = HashMap::from([(("172.17.0.2", 6379), ("redis-1.example.com", 7001))]);
    /// let config = RedisConfig::cluster(["redis://redis-1.example.com:7001"])?.map_addresses(
    ///     move |host, port| {
    ///         let (host, port) = table.get(&(host, port)).copied().unwrap_or((host, port));
    ///         (host.to_owned(), port)
    ///     },
    /// );
    /// # let _ = config;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn map_addresses(
        self,
        map: impl Fn(&str, u16) -> (String, u16) + Send + Sync + 'static,
    ) -> Self {
        Self { mapping: Arc::new(map), ..self }
    }

    /// Sets the prefix of all keys in Redis, `ratelimit` by default. In a URL, it is the parameter
    /// `prefix`.
    ///
    /// Limiters of the same name count separately if their prefixes differ. The user at the server
    /// needs access to the keys with this prefix, such as `~shop:*`: see
    /// [Permissions](crate::guide::operation#permissions).
    ///
    /// # Panics
    ///
    /// If the prefix contains a `{`, which would determine the slots in a cluster.
    #[must_use]
    pub fn prefix(self, prefix: &str) -> Self {
        // Braces would determine the slot of a key.
        assert!(!prefix.contains('{'), "the prefix {prefix:?} contains a '{{'");
        Self { prefix: prefix.into(), ..self }
    }

    /// Sets a line before the text of every script, for servers that read flags there. There is none
    /// by default. In a URL, the parameter `script_flags=FLAGS` sets `#!lua flags=FLAGS`.
    ///
    /// Upstash locks all keys during a script, unless this line is `#!lua
    /// flags=allow-key-locking`. Redis 6.2 rejects scripts that begin with `#!`, and later versions
    /// reject flags that they do not know. With any such line, Redis 7 and later reject every
    /// decision when their memory is full, also those that would be denials. The page on
    /// [servers](crate::guide::servers) describes what each server needs.
    ///
    /// # Panics
    ///
    /// If the text is not one line.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::store::RedisConfig;
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let config = RedisConfig::from_url("redis://:secret@example.upstash.io")?
    ///     .script_header("#!lua flags=allow-key-locking");
    /// # let _ = config;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn script_header(self, line: &str) -> Self {
        assert!(!line.is_empty() && !line.contains(['\n', '\r']), "{line:?} is not one line");
        Self { script_header: Some(line.to_owned()), ..self }
    }

    /// Sets the number of connections to each server, 1 by default. One connection carries as many
    /// decisions as a core of Redis can make. More connections help if a proxy or TLS is slower
    /// than Redis.
    ///
    /// # Panics
    ///
    /// If `connections` is 0.
    #[must_use]
    pub fn connections(self, connections: usize) -> Self {
        assert!(connections > 0, "a store needs at least one connection to each server");
        Self { connections, ..self }
    }

    /// Sets the deadline of every decision, 100 ms by default. See
    /// [`RedisStore::deadline`](crate::RedisStore::deadline).
    #[must_use]
    pub fn deadline(self, deadline: Duration) -> Self {
        Self { deadline, ..self }
    }

    /// Sets the longest time for which the process remembers a denial, 1 s by default. See
    /// [`RedisStore::denial_ttl`](crate::RedisStore::denial_ttl).
    #[must_use]
    pub fn denial_ttl(self, denial_ttl: Duration) -> Self {
        Self { denial_ttl, ..self }
    }

    pub(crate) fn client(&self) -> Result<Client, TransportError> {
        let header = self.script_header.as_deref().map(|line| Arc::new(Header::new(line)));
        let keys = Keys { prefix: self.prefix.clone(), header };
        let server = match &self.topology {
            Topology::Server(url) => {
                let tls = self.security(slice::from_ref(url))?;
                Server::One(self.server_endpoint(url, &tls)?)
            }
            Topology::Sentinels { sentinels, name, master } => {
                let (tls, sentinel_tls) =
                    (self.security(slice::from_ref(master))?, self.sentinel_security(sentinels)?);
                let nodes: Result<_, _> = sentinels
                    .iter()
                    .map(|url| with_password(url.endpoint(&sentinel_tls)))
                    .collect();
                let template = self.server_endpoint(master, &tls)?;
                let mapping = self.mapping.clone();
                let sentinels = Sentinels::new(nodes?, name.clone(), template, mapping);
                Server::Sentinel(sentinels)
            }
            Topology::Cluster(urls) => {
                let tls = self.security(urls)?;
                let seeds: Result<_, _> =
                    urls.iter().map(|url| self.server_endpoint(url, &tls)).collect();
                let cluster = Cluster::new(seeds?, self.connections, self.mapping.clone(), keys);
                return Ok(Client::Cluster(Arc::new(cluster)));
            }
            Topology::Connection(connection) => {
                return Ok(Client::of(Server::Given(connection.boxed()), 1, keys));
            }
        };
        Ok(Client::of(server, self.connections, keys))
    }

    fn server_endpoint(&self, url: &Url, tls: &Security) -> Result<Endpoint, TransportError> {
        let mut endpoint = url.endpoint(tls);
        if let Some(user) = &self.user {
            endpoint.login = endpoint.login.set_username(user);
        }
        if let Some(password) = &self.password {
            endpoint.login = endpoint.login.set_password(password);
        }
        if let Some(database) = self.database {
            endpoint.login = endpoint.login.set_db(database);
        }
        endpoint.credentials = self.credentials.clone();
        with_password(endpoint)
    }

    #[cfg(feature = "tls-rustls")]
    fn security(&self, urls: &[Url]) -> Result<Security, TransportError> {
        Security::new(self.tls.as_ref(), None, urls)
    }

    #[cfg(feature = "tls-rustls")]
    fn sentinel_security(&self, urls: &[Url]) -> Result<Security, TransportError> {
        Security::new(self.sentinel_tls.as_ref(), self.tls.as_ref(), urls)
    }

    #[cfg(not(feature = "tls-rustls"))]
    fn security(&self, urls: &[Url]) -> Result<Security, TransportError> {
        Security::new(urls)
    }

    #[cfg(not(feature = "tls-rustls"))]
    fn sentinel_security(&self, urls: &[Url]) -> Result<Security, TransportError> {
        Security::new(urls)
    }
}

/// Rejects a user without a password, because Redis would log in the user `default`.
fn with_password(endpoint: Endpoint) -> Result<Endpoint, TransportError> {
    let Endpoint { login, credentials, .. } = &endpoint;
    let place = endpoint.name();
    match login.username() {
        Some(_) if login.password().is_none() && credentials.is_none() => {
            Err(TransportError::config(format!(
                "cannot log in at {place}: there is a user but no password; for a password alone \
                 write redis://:PASSWORD@HOST, and for a user with `nopass` any password"
            )))
        }
        _ => Ok(endpoint),
    }
}

/// The connections that use TLS, and its settings.
struct Security {
    connector: Option<Connector>,
    /// If false, only connections to `rediss://` URLs use TLS.
    is_for_all: bool,
}

impl Security {
    /// `own` makes all connections use TLS. `other` is for `rediss://` URLs if `own` is missing.
    #[cfg(feature = "tls-rustls")]
    fn new(own: Option<&Tls>, other: Option<&Tls>, urls: &[Url]) -> Result<Self, TransportError> {
        let is_for_all = own.is_some();
        let is_used = is_for_all || urls.iter().any(|url| url.is_tls);
        let tls = own.or(other).cloned().unwrap_or_default();
        let connector = is_used.then(|| tls.connector()).transpose()?;
        Ok(Self { connector, is_for_all })
    }

    #[cfg(not(feature = "tls-rustls"))]
    fn new(urls: &[Url]) -> Result<Self, TransportError> {
        match urls.iter().any(|url| url.is_tls) {
            true => Err(TransportError::config(
                "cannot use a rediss:// URL: TLS is not compiled in; enable the feature \
                 `tls-rustls`",
            )),
            false => Ok(Self { connector: None, is_for_all: false }),
        }
    }
}

impl fmt::Debug for RedisConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let places = |urls: &[Url]| -> Vec<String> {
            urls.iter().map(|url| url.place.to_string()).collect()
        };
        let mut text = f.debug_struct("RedisConfig");
        match &self.topology {
            Topology::Server(url) => text.field("server", &url.place.to_string()),
            Topology::Sentinels { sentinels, name, .. } => {
                text.field("sentinels", &places(sentinels)).field("master", name)
            }
            Topology::Cluster(urls) => text.field("cluster", &places(urls)),
            Topology::Connection(_) => &mut text,
        };
        text.field("connections", &self.connections)
            .field("deadline", &self.deadline)
            .finish_non_exhaustive()
    }
}

impl Url {
    fn endpoint(&self, tls: &Security) -> Endpoint {
        let Self { place, login, is_tls } = self.clone();
        let is_by_tls = matches!(place, Place::Tcp(_)) && (is_tls || tls.is_for_all);
        let tls = tls.connector.clone().filter(|_| is_by_tls);
        Endpoint::new(place, login, tls)
    }
}

/// Returns the endpoint at a `redis://` URL.
#[cfg(test)]
pub(crate) fn endpoint(url: &str) -> Endpoint {
    Url::read(url).unwrap().endpoint(&Security { connector: None, is_for_all: false })
}
