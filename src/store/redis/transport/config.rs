//! Where Redis is, and how to log in there. All constructors of a store are made from it.

use std::{fmt, slice, sync::Arc, time::Duration};

use redis::{
    ConnectionAddr, ConnectionInfo, IntoConnectionInfo, ProtocolVersion, RedisConnectionInfo,
    auth::StreamingCredentialsProvider,
};

#[cfg(feature = "tls-rustls")]
use super::tls::Tls;
use super::{
    cluster::Cluster,
    endpoint::{Connector, Credentials, Endpoint, Mapping, Place},
    route::Route,
    sentinel::Sentinels,
    server::Server,
};
use crate::error::StoreError;

pub(crate) const DEFAULT_DEADLINE: Duration = Duration::from_millis(100);
pub(crate) const DEFAULT_PREFIX: &str = "ratelimit";

/// Where Redis is, and how to log in there: one server, a master behind Sentinels, or a cluster.
///
/// A connection is opened within 900 ms, or counts as failed: resolving the name, connecting to all
/// of its addresses at once, TLS and the login. This does not depend on the deadline of the
/// decisions: an attempt goes on for later ones.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::{RedisConfig, RedisStore};
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
    pub(crate) prefix: Arc<str>,
}

#[derive(Clone)]
enum Topology {
    Server(Url),
    Sentinels {
        sentinels: Vec<Url>,
        name: String,
        /// The place of this is the name.
        master: Url,
    },
    Cluster(Vec<Url>),
}

impl RedisConfig {
    /// Describes the server at `url`: `redis://[[USER]:PASSWORD@]HOST[:PORT][/DB]`,
    /// `unix:///PATH[?db=DB&user=USER&pass=PASSWORD]`, or for TLS `rediss://` with the feature `tls-rustls`.
    ///
    /// The protocol is RESP3 where the server knows it; `?protocol=resp2` prevents that.
    ///
    /// # Errors
    ///
    /// If the URL cannot be used.
    pub fn server(url: &str) -> Result<Self, StoreError> {
        Ok(Self::new(Topology::Server(Url::read(url)?)))
    }

    /// Describes the master behind Sentinels.
    ///
    /// `sentinels` are the URLs of the Sentinels, with the credentials for these; `master` is the
    /// name of the master, or a URL with the name in place of a host:
    /// `redis://[[USER]:PASSWORD@]NAME[/DB]`. The store learns other Sentinels from these, and logs
    /// in there as at the first one.
    ///
    /// # Errors
    ///
    /// If a URL cannot be used, there is none, or only some are `rediss://`.
    pub fn sentinels(
        sentinels: impl IntoIterator<Item = impl AsRef<str>>,
        master: &str,
    ) -> Result<Self, StoreError> {
        let master = match master.contains("://") {
            true => Url::read(master)?,
            false => Url::read(&format!("redis://{master}"))?,
        };
        let Place::Tcp((name, _)) = &master.place else {
            return Err(StoreError::config(
                "cannot use the URL of the master: it names no master; write the name that the \
                 Sentinels know, or redis://[[USER]:PASSWORD@]NAME[/DB]",
            ));
        };
        let name = name.clone();
        let sentinels = Url::read_all(sentinels, "redis://HOST:26379 for each Sentinel")?;
        Ok(Self::new(Topology::Sentinels { sentinels, name, master }))
    }

    /// Describes a cluster, of which `urls` are some nodes. The first one says how to log in to
    /// the nodes that the cluster names.
    ///
    /// # Errors
    ///
    /// If a URL cannot be used, there is none, or only some are `rediss://`.
    pub fn cluster(urls: impl IntoIterator<Item = impl AsRef<str>>) -> Result<Self, StoreError> {
        let form = "redis://[[USER]:PASSWORD@]HOST[:PORT] for some nodes of the cluster";
        let seeds = Url::read_all(urls, form)?;
        if let Some(seed) = seeds.iter().find(|seed| matches!(seed.place, Place::Unix(_))) {
            return Err(StoreError::config(format!(
                "cannot use {}: the nodes of a cluster have hosts and ports; write {form}",
                seed.place
            )));
        }
        Ok(Self::new(Topology::Cluster(seeds)))
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
            prefix: DEFAULT_PREFIX.into(),
        }
    }

    /// Sets the user at the servers. It replaces that of the URLs; that of Sentinels is in their
    /// own URLs.
    #[must_use]
    pub fn user(self, user: impl Into<String>) -> Self {
        Self { user: Some(user.into()), ..self }
    }

    /// Sets the password at the servers. It replaces that of the URLs.
    #[must_use]
    pub fn password(self, password: impl Into<String>) -> Self {
        Self { password: Some(password.into()), ..self }
    }

    /// Takes the user and the password for the servers from a provider.
    ///
    /// Each new connection logs in with the latest credentials. If the provider has new ones, the open connections
    /// authenticate again, so a rotation needs no new store and interrupts no request. Change the password at the
    /// server first: a connection that was refused once stays logged in as before. Sentinels do not use the provider.
    /// The name of the user is `default` where only a password is set.
    ///
    /// # Examples
    ///
    /// Credentials that a task of the application replaces by `sender.send(..)`:
    ///
    /// ```
    /// use std::pin::Pin;
    /// use tokio::sync::watch;
    /// use tokio_stream::{Stream, StreamExt, wrappers::WatchStream};
    /// use tower_ratelimit::{
    ///     RedisConfig, RedisStore,
    ///     redis::{RedisResult, auth::{BasicAuth, StreamingCredentialsProvider}},
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

    /// Sets the number of the database, 0 by default. It replaces that of the URLs.
    #[must_use]
    pub fn database(self, database: u32) -> Self {
        Self { database: Some(database.into()), ..self }
    }

    /// Connects to the servers by TLS with these settings, also where the URL says `redis://`.
    /// Sentinels with `rediss://` URLs have the same settings, unless
    /// [`sentinel_tls`](Self::sentinel_tls) says otherwise.
    #[cfg(feature = "tls-rustls")]
    #[must_use]
    pub fn tls(self, tls: Tls) -> Self {
        Self { tls: Some(tls), ..self }
    }

    /// Connects to the Sentinels by TLS with these settings, also where the URL says `redis://`.
    #[cfg(feature = "tls-rustls")]
    #[must_use]
    pub fn sentinel_tls(self, tls: Tls) -> Self {
        Self { sentinel_tls: Some(tls), ..self }
    }

    /// Maps each address that a Sentinel, or a node of a cluster, names to the one to connect to,
    /// where these know each other by addresses that clients cannot use: behind port forwarding,
    /// in containers, or where a certificate is for another name. Addresses in the URLs are used
    /// as they are. A node that names no host of its own has the one by which it was asked. The
    /// function must not block or panic.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::collections::HashMap;
    /// use tower_ratelimit::RedisConfig;
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

    /// Sets what the names of all keys in Redis begin with, `ratelimit` by default. See
    /// [`RedisStore::prefix`](crate::RedisStore::prefix).
    ///
    /// # Panics
    ///
    /// If the prefix holds a `{`, which would decide about the slots in a cluster.
    #[must_use]
    pub fn prefix(self, prefix: &str) -> Self {
        assert_prefix(prefix);
        Self { prefix: prefix.into(), ..self }
    }

    /// Sets the number of connections to each server, 1 by default. One carries as many decisions
    /// as a core of Redis can make; more help where a proxy or TLS is slower than that.
    ///
    /// # Panics
    ///
    /// If it is 0.
    #[must_use]
    pub fn connections(self, connections: usize) -> Self {
        assert!(connections > 0, "a store needs at least one connection to each server");
        Self { connections, ..self }
    }

    /// Sets the time within which every decision is made or fails, 100 ms by default. See
    /// [`RedisStore::deadline`](crate::RedisStore::deadline).
    #[must_use]
    pub fn deadline(self, deadline: Duration) -> Self {
        Self { deadline, ..self }
    }

    pub(crate) fn route(&self) -> Result<Route, StoreError> {
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
                let cluster = Cluster::new(seeds?, self.connections, self.mapping.clone());
                return Ok(Route::Cluster(Arc::new(cluster)));
            }
        };
        Ok(Route::to(server, self.connections))
    }

    fn server_endpoint(&self, url: &Url, tls: &Security) -> Result<Endpoint, StoreError> {
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
    fn security(&self, urls: &[Url]) -> Result<Security, StoreError> {
        Security::new(self.tls.as_ref(), None, urls)
    }

    #[cfg(feature = "tls-rustls")]
    fn sentinel_security(&self, urls: &[Url]) -> Result<Security, StoreError> {
        Security::new(self.sentinel_tls.as_ref(), self.tls.as_ref(), urls)
    }

    #[cfg(not(feature = "tls-rustls"))]
    fn security(&self, urls: &[Url]) -> Result<Security, StoreError> {
        Security::new(urls)
    }

    #[cfg(not(feature = "tls-rustls"))]
    fn sentinel_security(&self, urls: &[Url]) -> Result<Security, StoreError> {
        Security::new(urls)
    }
}

/// Refuses a user without a password: Redis would take the login as one of the user `default`.
fn with_password(endpoint: Endpoint) -> Result<Endpoint, StoreError> {
    let Endpoint { place, login, credentials, .. } = &endpoint;
    match login.username() {
        Some(_) if login.password().is_none() && credentials.is_none() => {
            Err(StoreError::config(format!(
                "cannot log in at {place}: there is a user and no password; for a password alone \
                 write redis://:PASSWORD@HOST, and for a user with `nopass` any password"
            )))
        }
        _ => Ok(endpoint),
    }
}

/// Which connections are made by TLS, and how.
struct Security {
    connector: Option<Connector>,
    /// Else only those to `rediss://` URLs.
    is_for_all: bool,
}

impl Security {
    /// `own` makes all connections use TLS; `other` is for `rediss://` URLs where `own` is missing.
    #[cfg(feature = "tls-rustls")]
    fn new(own: Option<&Tls>, other: Option<&Tls>, urls: &[Url]) -> Result<Self, StoreError> {
        let is_for_all = own.is_some();
        let is_used = is_for_all || urls.iter().any(|url| url.is_tls);
        let tls = own.or(other).cloned().unwrap_or_default();
        let connector = is_used.then(|| tls.connector()).transpose()?;
        Ok(Self { connector, is_for_all })
    }

    #[cfg(not(feature = "tls-rustls"))]
    fn new(urls: &[Url]) -> Result<Self, StoreError> {
        match urls.iter().any(|url| url.is_tls) {
            true => Err(StoreError::config(
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
        };
        text.field("connections", &self.connections)
            .field("deadline", &self.deadline)
            .finish_non_exhaustive()
    }
}

/// Braces decide about the slot of a key.
pub(crate) fn assert_prefix(prefix: &str) {
    assert!(!prefix.contains('{'), "the prefix {prefix:?} holds a '{{'");
}

/// A URL that was read.
#[derive(Clone)]
struct Url {
    place: Place,
    login: RedisConnectionInfo,
    is_tls: bool,
}

impl Url {
    fn read(url: &str) -> Result<Self, StoreError> {
        let refused = |why: &str| {
            StoreError::config(format!(
                "cannot use the Redis URL {}: {why}; write redis://HOST:PORT/DB, unix:///PATH, or \
                 with the feature `tls-rustls` rediss://HOST:PORT/DB, with special characters of a \
                 password as in %2F for a slash",
                masked(url)
            ))
        };
        let plain = |from: &str, to: &str| url.strip_prefix(from).map(|rest| [to, rest].concat());
        let plain = plain("rediss://", "redis://").or_else(|| plain("valkeys://", "valkey://"));
        if plain.is_some() && url.ends_with("#insecure") {
            return Err(refused(
                "certificates are always checked; remove `#insecure`, and give the CA \
                 certificates to `RedisConfig::tls`",
            ));
        }
        let is_tls = plain.is_some();
        let info: ConnectionInfo =
            plain.as_deref().unwrap_or(url).into_connection_info().map_err(|error| {
                let why = error.to_string();
                refused(why.split(" - InvalidClientConfig").next().unwrap_or(&why))
            })?;
        let place = match info.addr() {
            ConnectionAddr::Tcp(host, port) => Place::Tcp((host.clone(), *port)),
            ConnectionAddr::Unix(path) => Place::Unix(path.clone()),
            other => return Err(refused(&format!("{other} is no address"))),
        };
        if info.redis_settings().db() < 0 {
            return Err(refused("a database has a number from 0 on"));
        }
        if matches!(place, Place::Tcp(_)) && url.contains("?db=") {
            return Err(refused("the database is the path of this URL"));
        }
        // Servers before 7.2 do not know CLIENT SETINFO, and a user may not be allowed to use it.
        let mut login = info.redis_settings().clone().set_skip_set_lib_name();
        if !url.rsplit_once('?').is_some_and(|(_, query)| query.contains("protocol=")) {
            login = login.set_protocol(ProtocolVersion::RESP3);
        }
        Ok(Self { place, login, is_tls })
    }

    fn endpoint(&self, tls: &Security) -> Endpoint {
        let Self { place, login, is_tls } = self.clone();
        let is_by_tls = matches!(place, Place::Tcp(_)) && (is_tls || tls.is_for_all);
        let tls = tls.connector.clone().filter(|_| is_by_tls);
        Endpoint { place, login, credentials: None, tls }
    }

    fn read_all(
        urls: impl IntoIterator<Item = impl AsRef<str>>,
        form: &str,
    ) -> Result<Vec<Self>, StoreError> {
        let urls: Result<Vec<_>, _> =
            urls.into_iter().map(|url| Self::read(url.as_ref())).collect();
        match urls {
            Ok(urls) if urls.is_empty() => {
                Err(StoreError::config(format!("cannot find Redis: there is no URL; write {form}")))
            }
            Ok(urls) if urls.iter().any(|url| url.is_tls != urls[0].is_tls) => {
                Err(StoreError::config(
                    "cannot use redis:// and rediss:// URLs together: the nodes that are not \
                     listed are connected to as the first one is; write rediss:// for all of them",
                ))
            }
            urls => urls,
        }
    }
}

/// The URL without its user, its password and its query.
fn masked(url: &str) -> String {
    let without_query = |url: &str| url.split('?').next().unwrap_or_default().to_owned();
    if url.contains("unix://") {
        return without_query(url); // it has the password in the query
    }
    let scheme = url.find("://").map_or("", |end| &url[..end + 3]);
    match url.rsplit_once('@') {
        Some((_, rest)) => [scheme, "***@", &without_query(rest)].concat(),
        // A password that is followed by no '@' stands where the port should.
        None if url[scheme.len()..].matches(':').count() > 1 => [scheme, "***"].concat(),
        None => without_query(url),
    }
}

/// The endpoint at a `redis://` URL.
#[cfg(test)]
pub(crate) fn endpoint(url: &str) -> Endpoint {
    Url::read(url).unwrap().endpoint(&Security { connector: None, is_for_all: false })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_masked() {
        for (url, shown) in [
            ("redis://alice:secret@host:6379/0", "redis://***@host:6379/0"),
            ("redis://:se@cret@host", "redis://***@host"),
            ("alice:secret@host", "***@host"),
            ("redis://alice:sec?ret@host:6379/0", "redis://***@host:6379/0"),
            ("redis://host?secret=1", "redis://host"),
            ("redis://alice:secret:host:6379", "redis://***"),
            ("unix:///a/socket?pass=sec@ret", "unix:///a/socket"),
            ("localhost", "localhost"),
        ] {
            assert_eq!(masked(url), shown);
        }
    }
}
