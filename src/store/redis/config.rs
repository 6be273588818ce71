//! The settings of a store in Redis: those of its connections, and those of its limiters. The
//! parser of URLs is in the crate of the connections.

use std::{error::Error, sync::Arc, time::Duration};

#[cfg(feature = "redis-1")]
use redis::aio::ConnectionLike;

#[cfg(feature = "tls-rustls-no-provider")]
use super::connections::TlsSettings;
use super::{
    connections::{Credentials, Parameters, TransportConfig, TransportError, login_provider},
    error::store_error,
};
use crate::error::StoreError;

/// The time that a request may lose to a Redis that does not answer. It is chosen, not measured:
/// some 100 round trips within a data center, and less than people notice.
const DEFAULT_DEADLINE: Duration = Duration::from_millis(100);
/// The time for which a refund or an `unblock` by another process is not seen. A flood then costs
/// Redis one command per key and second; a longer time would save little more.
const DEFAULT_DENIAL_TTL: Duration = Duration::from_secs(1);
const DEFAULT_PREFIX: &str = "ratelimit";

/// The parameters of a URL that set these. The crate of the connections reads the others.
const PARAMETERS: [&str; 3] = ["deadline", "prefix", "denial_ttl"];

/// The settings of a [`RedisStore`](crate::RedisStore): the addresses of Redis, which are one
/// server, a master behind Sentinels, or a cluster; the login; certificates; the deadline, and what
/// the process remembers.
///
/// A URL has most of them as parameters: see [`store::connect`](crate::store::connect).
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
#[derive(Clone, Debug)]
pub struct RedisConfig {
    pub(super) transport: TransportConfig,
    pub(super) deadline: Duration,
    pub(super) denial_ttl: Duration,
    pub(super) prefix: Arc<str>,
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
    /// let url = "redis+sentinel://10.0.0.1:26379,10.0.0.2:26379/main?deadline=50ms&prefix=shop";
    /// let store = RedisStore::new(RedisConfig::from_url(url)?)?;
    /// # let _ = store;
    /// # Ok(())
    /// # }
    /// ```
    pub fn from_url(url: &str) -> Result<Self, StoreError> {
        read(url).map_err(store_error)
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
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use tower_ratelimit::store::RedisConfig;
    ///
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let config = RedisConfig::server("redis://:secret@127.0.0.1:6379/0")?;
    /// # let _ = config;
    /// # Ok(())
    /// # }
    /// ```
    pub fn server(url: &str) -> Result<Self, StoreError> {
        let config = Self::from_url(url)?;
        match config.transport.is_one_server() {
            true => Ok(config),
            false => Err(store_error(TransportError::config(
                "cannot use the Redis URL: it names several servers; use `RedisConfig::from_url`",
            ))),
        }
    }

    /// Describes the master that Sentinels name. The store follows failovers.
    ///
    /// `sentinels` are the URLs of the Sentinels, with the credentials for the Sentinels. `master`
    /// is the name of the master, or a URL with the name in place of the host:
    /// `redis://[[USER]:PASSWORD@]NAME[/DB]`.
    ///
    /// The store keeps a connection to each Sentinel. It discovers other Sentinels through these,
    /// and logs in there with the settings of the first URL. It subscribes to their announcements,
    /// and polls them every second. The master is the server that most Sentinels name, if its role
    /// is master.
    ///
    /// # Errors
    ///
    /// If a URL is invalid, the list is empty, or only some of the URLs are `rediss://`.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{RedisStore, store::RedisConfig};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let sentinels = ["redis://10.0.0.1:26379", "redis://10.0.0.2:26379"];
    /// let config = RedisConfig::sentinels(sentinels, "redis://limiter:secret@mymaster/0")?;
    /// let store = RedisStore::new(config)?;
    /// # let _ = store;
    /// # Ok(())
    /// # }
    /// ```
    pub fn sentinels(
        sentinels: impl IntoIterator<Item = impl AsRef<str>>,
        master: &str,
    ) -> Result<Self, StoreError> {
        Ok(Self::new(TransportConfig::sentinels(sentinels, master).map_err(store_error)?))
    }

    /// Describes a cluster. `urls` are some of its nodes. The login of the first URL is used for
    /// all nodes that the cluster names.
    ///
    /// Each key is on one of the masters. See [`Charge`](crate::Charge#in-a-cluster) for limits on
    /// several keys.
    ///
    /// Each node has its own connections and its own circuit breaker: if a node does not answer,
    /// only decisions about its keys fail. The store follows the promotion of a replica and the
    /// move of a slot. For that it needs the commands `CLUSTER SLOTS` and `ASKING`. While a slot
    /// moves, decisions about several limits of one key wait, within their deadline, until all keys
    /// of the decision are on one node.
    ///
    /// # Errors
    ///
    /// If a URL is invalid, the list is empty, or only some of the URLs are `rediss://`.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{RedisStore, store::RedisConfig};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let nodes = ["redis://:secret@10.0.0.1", "redis://:secret@10.0.0.2"];
    /// let store = RedisStore::new(RedisConfig::cluster(nodes)?)?;
    /// # let _ = store;
    /// # Ok(())
    /// # }
    /// ```
    pub fn cluster(urls: impl IntoIterator<Item = impl AsRef<str>>) -> Result<Self, StoreError> {
        Ok(Self::new(TransportConfig::cluster(urls).map_err(store_error)?))
    }

    /// Describes a connection of the crate `redis` 1.x that reconnects by itself, which
    /// [`RedisStore::from_connection`](crate::RedisStore::from_connection) describes. The settings
    /// about addresses, logins and connections have no effect.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use tower_ratelimit::{RedisStore, store::RedisConfig};
    ///
    /// # async fn run() -> Result<(), Box<dyn std::error::Error>> {
    /// let client = redis::Client::open("redis://127.0.0.1/")?;
    /// let connection = client.get_multiplexed_async_connection().await?;
    /// let store = RedisStore::new(RedisConfig::from_connection(connection).prefix("shop"))?;
    /// # let _ = store;
    /// # Ok(())
    /// # }
    /// ```
    #[cfg(feature = "redis-1")]
    #[must_use]
    pub fn from_connection<C>(connection: C) -> Self
    where
        C: ConnectionLike + Clone + Send + Sync + 'static,
    {
        Self::new(TransportConfig::connection(Arc::new(connection)))
    }

    fn new(transport: TransportConfig) -> Self {
        Self {
            transport,
            deadline: DEFAULT_DEADLINE,
            denial_ttl: DEFAULT_DENIAL_TTL,
            prefix: DEFAULT_PREFIX.into(),
        }
    }

    fn with(mut self, change: impl FnOnce(&mut TransportConfig)) -> Self {
        change(&mut self.transport);
        self
    }

    /// Sets the user at the servers, in place of the user in the URLs. The user at the Sentinels is
    /// in their URLs.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use tower_ratelimit::store::RedisConfig;
    ///
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let config = RedisConfig::server("redis://127.0.0.1/")?.user("limiter").password("secret");
    /// # let _ = config;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn user(self, user: impl Into<String>) -> Self {
        self.with(|it| it.user = Some(user.into()))
    }

    /// Sets the password at the servers, in place of the password in the URLs.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use tower_ratelimit::store::RedisConfig;
    ///
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let password = std::fs::read_to_string("/run/secrets/redis")?;
    /// let config = RedisConfig::server("redis://127.0.0.1/")?.password(password.trim());
    /// # let _ = config;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn password(self, password: impl Into<String>) -> Self {
        self.with(|it| it.password = Some(password.into()))
    }

    /// Takes the user and the password at the servers from a provider: passwords that are rotated,
    /// or tokens that expire, such as those of IAM for Amazon ElastiCache and of Microsoft Entra.
    ///
    /// Each new connection logs in with the latest credentials. When the provider has new
    /// credentials, the open connections log in again: a rotation needs no new store and interrupts
    /// no request. Change the password at the server first, because a connection whose new login is
    /// rejected keeps the old one. Sentinels do not use the provider.
    ///
    /// A new connection calls the closure without credentials, and logs in with the result. The
    /// time limit of 900 ms for connecting includes this call: if that is too short, a task fetches
    /// the credentials, as in the second example. An open connection passes the credentials that it
    /// has used last: the future completes when there are others. After each answer, an open
    /// connection waits for a second before it calls again. So the closure may also return the
    /// credentials that it got. The future must not block its thread, nor panic.
    ///
    /// If the future fails, a new connection fails. An open connection keeps its login, and the
    /// failure is an event of the feature `tracing`.
    ///
    /// # Examples
    ///
    /// A token is valid for 15 minutes. Each connection gets a token of its own, and another one
    /// every 5 minutes, so that there is time for two more if one cannot be fetched:
    ///
    /// ```
    /// use std::{io, time::Duration};
    /// use tokio::time::sleep;
    /// use tower_ratelimit::{
    ///     RedisStore,
    ///     store::{Credentials, RedisConfig},
    /// };
    ///
    /// /// Calls the library of the vendor, which returns a token within some milliseconds.
    /// async fn token() -> Result<String, io::Error> {
    ///     # Ok("token".to_owned())
    ///     # /*
    ///     ..
    ///     # */
    /// }
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let config = RedisConfig::server("rediss://redis.internal")?;
    /// let config = config.credentials_provider(|known: Option<Credentials>| async move {
    ///     if known.is_some() {
    ///         sleep(Duration::from_secs(280)).await;
    ///     }
    ///     Ok(Credentials::new("limiter", token().await?))
    /// });
    /// let store = RedisStore::new(config)?;
    /// # let _ = store;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// A task of the application replaces the credentials by `sender.send(..)`:
    ///
    /// ```
    /// use tokio::sync::watch;
    /// use tower_ratelimit::{
    ///     RedisStore,
    ///     store::{Credentials, RedisConfig},
    /// };
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let (sender, latest) = watch::channel(Credentials::new("shop", "secret"));
    /// let config = RedisConfig::server("redis://redis.internal")?;
    /// let config = config.credentials_provider(move |known: Option<Credentials>| {
    ///     let mut latest = latest.clone();
    ///     async move {
    ///         let others = latest.wait_for(|latest| known.as_ref() != Some(latest)).await?;
    ///         Ok(others.clone())
    ///     }
    /// });
    /// let store = RedisStore::new(config)?;
    /// # let _ = (store, sender);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn credentials_provider<R>(
        self,
        provider: impl Fn(Option<Credentials>) -> R + Send + Sync + 'static,
    ) -> Self
    where
        R: Future<Output = Result<Credentials, Box<dyn Error + Send + Sync>>> + Send + 'static,
    {
        self.with(|it| it.provider = Some(login_provider(provider)))
    }

    /// Sets the number of the database, in place of the number in the URLs. The default is 0.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use tower_ratelimit::store::RedisConfig;
    ///
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let config = RedisConfig::server("redis://127.0.0.1/")?.database(2);
    /// # let _ = config;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn database(self, database: u32) -> Self {
        self.with(|it| it.database = Some(database.into()))
    }

    /// Connects to the servers by TLS, even if the URL begins with `redis://`, and trusts only
    /// these root certificates, one or more in PEM format.
    ///
    /// Without this setting, connections to `rediss://` URLs trust the root certificates of the
    /// system, and with the feature `tls-rustls-webpki-roots` also those of the crate
    /// `webpki-roots`.
    ///
    /// The crypto provider is the one that the application has installed, by
    /// `rustls::crypto::CryptoProvider::install_default`. Without one it is `ring`, if the feature
    /// `tls-rustls` is enabled; with `tls-rustls-no-provider` alone, the store is not made.
    ///
    /// The setting also applies to Sentinels with `rediss://` URLs;
    /// [`sentinel_ca_certificates`](Self::sentinel_ca_certificates) overrides it.
    ///
    /// # Errors
    ///
    /// If the text contains no certificate, or an invalid one.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use std::fs;
    /// use tower_ratelimit::{RedisStore, store::RedisConfig};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let config = RedisConfig::server("rediss://redis.internal")?
    ///     .ca_certificates(fs::read("ca.pem")?)?
    ///     .client_certificate(fs::read("client.pem")?, fs::read("client.key")?)?;
    /// let store = RedisStore::new(config)?;
    /// # let _ = store;
    /// # Ok(())
    /// # }
    /// ```
    #[cfg(feature = "tls-rustls-no-provider")]
    pub fn ca_certificates(self, pem: impl AsRef<[u8]>) -> Result<Self, StoreError> {
        self.with_tls(|it| &mut it.tls, |tls| tls.ca_certificates(pem.as_ref()))
    }

    /// Connects to the servers by TLS, even if the URL begins with `redis://`, and identifies the
    /// client by a certificate, optionally with its chain, and its private key. Both are in PEM
    /// format.
    ///
    /// The setting also applies to Sentinels with `rediss://` URLs;
    /// [`sentinel_client_certificate`](Self::sentinel_client_certificate) overrides it.
    ///
    /// # Errors
    ///
    /// If one of them is invalid.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use tower_ratelimit::store::RedisConfig;
    ///
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let (chain, key) = (std::fs::read("client.pem")?, std::fs::read("client.key")?);
    /// let config = RedisConfig::server("rediss://redis.internal")?;
    /// let config = config.client_certificate(chain, key)?;
    /// # let _ = config;
    /// # Ok(())
    /// # }
    /// ```
    #[cfg(feature = "tls-rustls-no-provider")]
    pub fn client_certificate(
        self,
        chain_pem: impl AsRef<[u8]>,
        key_pem: impl AsRef<[u8]>,
    ) -> Result<Self, StoreError> {
        let (chain, key) = (chain_pem.as_ref(), key_pem.as_ref());
        self.with_tls(|it| &mut it.tls, |tls| tls.client_certificate(chain, key))
    }

    /// Connects to the Sentinels by TLS, even if their URLs begin with `redis://`, and trusts only
    /// these root certificates there. See [`ca_certificates`](Self::ca_certificates).
    ///
    /// # Errors
    ///
    /// If the text contains no certificate, or an invalid one.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use tower_ratelimit::store::RedisConfig;
    ///
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let config = RedisConfig::sentinels(["rediss://sentinel.internal"], "main")?
    ///     .sentinel_ca_certificates(std::fs::read("ca.pem")?)?;
    /// # let _ = config;
    /// # Ok(())
    /// # }
    /// ```
    #[cfg(feature = "tls-rustls-no-provider")]
    pub fn sentinel_ca_certificates(self, pem: impl AsRef<[u8]>) -> Result<Self, StoreError> {
        self.with_tls(|it| &mut it.sentinel_tls, |tls| tls.ca_certificates(pem.as_ref()))
    }

    /// Connects to the Sentinels by TLS, even if their URLs begin with `redis://`, and identifies
    /// the client by this certificate there. See [`client_certificate`](Self::client_certificate).
    ///
    /// # Errors
    ///
    /// If one of them is invalid.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use tower_ratelimit::store::RedisConfig;
    ///
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let (chain, key) = (std::fs::read("client.pem")?, std::fs::read("client.key")?);
    /// let config = RedisConfig::sentinels(["rediss://sentinel.internal"], "main")?
    ///     .sentinel_client_certificate(chain, key)?;
    /// # let _ = config;
    /// # Ok(())
    /// # }
    /// ```
    #[cfg(feature = "tls-rustls-no-provider")]
    pub fn sentinel_client_certificate(
        self,
        chain_pem: impl AsRef<[u8]>,
        key_pem: impl AsRef<[u8]>,
    ) -> Result<Self, StoreError> {
        let (chain, key) = (chain_pem.as_ref(), key_pem.as_ref());
        self.with_tls(|it| &mut it.sentinel_tls, |tls| tls.client_certificate(chain, key))
    }

    #[cfg(feature = "tls-rustls-no-provider")]
    fn with_tls(
        mut self,
        field: impl FnOnce(&mut TransportConfig) -> &mut Option<TlsSettings>,
        change: impl FnOnce(TlsSettings) -> Result<TlsSettings, TransportError>,
    ) -> Result<Self, StoreError> {
        let tls = field(&mut self.transport);
        *tls = Some(change(tls.take().unwrap_or_default()).map_err(store_error)?);
        Ok(self)
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
        self.with(|it| it.mapping = Arc::new(map))
    }

    /// Sets the prefix of all keys in Redis, `ratelimit` by default. In a URL, it is the parameter
    /// `prefix`.
    ///
    /// Limiters of the same name count separately if their prefixes differ. The user at the server
    /// needs access to the keys with this prefix, such as `~shop:*`: see
    /// [Permissions](crate::guide::redis_permissions).
    ///
    /// # Panics
    ///
    /// If the prefix contains a `{`, which would determine the slots in a cluster.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use tower_ratelimit::store::RedisConfig;
    ///
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let config = RedisConfig::server("redis://127.0.0.1/")?.prefix("shop");
    /// # let _ = config;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    #[track_caller]
    pub fn prefix(self, prefix: &str) -> Self {
        // Braces would determine the slot of a key.
        assert!(!prefix.contains('{'), "the prefix {prefix:?} contains a '{{'");
        Self { prefix: prefix.into(), ..self }
    }

    /// Sets a line before the text of every script, for servers that read flags there. There is
    /// none by default. In a URL, the parameter `script_flags=FLAGS` sets `#!lua flags=FLAGS`.
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
    #[track_caller]
    pub fn script_header(self, line: &str) -> Self {
        assert!(!line.is_empty() && !line.contains(['\n', '\r']), "{line:?} is not one line");
        self.with(|it| it.script_header = Some(line.to_owned()))
    }

    /// Sets the number of connections of each runtime to each server, 1 by default. One connection
    /// carries as many decisions as a core of Redis can make. More connections help if a proxy or
    /// TLS is slower than Redis. The work in the background has one more.
    ///
    /// # Panics
    ///
    /// If `connections` is 0.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use tower_ratelimit::store::RedisConfig;
    ///
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let config = RedisConfig::server("rediss://redis.internal")?.connections(2);
    /// # let _ = config;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    #[track_caller]
    pub fn connections(self, connections: usize) -> Self {
        assert!(connections > 0, "a store needs at least one connection to each server");
        self.with(|it| it.connections = connections)
    }

    /// Sets the deadline of every decision, 100 ms by default. It starts with the call, and
    /// includes waiting for a connection and all commands of the decision. No command is sent after
    /// it. In a URL, it is the parameter `deadline`.
    ///
    /// [`RedisStore::new`](crate::RedisStore::new) rejects a deadline of 0, with which every
    /// decision would fail.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use std::time::Duration;
    /// use tower_ratelimit::store::RedisConfig;
    ///
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let config = RedisConfig::server("redis://127.0.0.1/")?.deadline(Duration::from_millis(50));
    /// # let _ = config;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn deadline(self, deadline: Duration) -> Self {
        Self { deadline, ..self }
    }

    /// Sets the longest time for which the process remembers a denial, 1 s by default. Zero
    /// remembers none, and any other time is valid. In a URL, it is the parameter `denial_ttl`.
    ///
    /// After a denial, the process denies checks of the key without a command, as long as Redis
    /// would deny them: until [`retry_after`](crate::Decision::retry_after), but at most for this
    /// time. Their [`source`](crate::Decision::source) is
    /// [`Source::Cached`](crate::store::Source::Cached). No request is allowed without Redis. A
    /// remembered denial applies to a check against the limit that has denied, alone or together
    /// with other limits:
    ///
    /// - with the same quota
    /// - with at least the cost of the denied check
    /// - if it may not wait until its units are available
    ///
    /// If this store returns units of the key, resets it, or applies another quota, it drops the
    /// denials of the key. If another process does, or if Redis loses the key, this process may
    /// deny for up to this time what Redis would allow. At most 57,344 keys with denials are
    /// remembered, one denial of each, in up to 23 MB.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use std::time::Duration;
    /// use tower_ratelimit::store::RedisConfig;
    ///
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let config = RedisConfig::server("redis://127.0.0.1/")?.denial_ttl(Duration::ZERO);
    /// # let _ = config; // none is remembered
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn denial_ttl(self, denial_ttl: Duration) -> Self {
        Self { denial_ttl, ..self }
    }
}

fn read(url: &str) -> Result<RedisConfig, TransportError> {
    let (transport, parameters) = TransportConfig::from_url(url, &PARAMETERS)?;
    let config = RedisConfig::new(transport);
    Ok(RedisConfig {
        deadline: time(&parameters, "deadline")?.unwrap_or(config.deadline),
        denial_ttl: time(&parameters, "denial_ttl")?.unwrap_or(config.denial_ttl),
        prefix: prefix(&parameters)?.unwrap_or(config.prefix),
        transport: config.transport,
    })
}

fn prefix(parameters: &Parameters<'_>) -> Result<Option<Arc<str>>, TransportError> {
    match parameters.get("prefix") {
        Some(prefix) if prefix.contains(['{', '%']) => {
            Err(parameters.invalid("a prefix contains no braces and no percent signs"))
        }
        prefix => Ok(prefix.map(Into::into)),
    }
}

/// Reads a parameter such as `deadline=50ms`.
fn time(parameters: &Parameters<'_>, name: &str) -> Result<Option<Duration>, TransportError> {
    let Some(text) = parameters.get(name) else { return Ok(None) };
    match duration(text) {
        Some(time) => Ok(Some(time)),
        None => Err(parameters.invalid(&format!(
            "`{name}={text}` is not a time; write for example {name}=50ms or {name}=2s"
        ))),
    }
}

/// Reads a time such as `50ms`, `2s` or `1m`.
fn duration(text: &str) -> Option<Duration> {
    let digits = text.find(|c: char| !c.is_ascii_digit())?;
    let number: u32 = text[..digits].parse().ok()?;
    let unit = match &text[digits..] {
        "us" => Duration::from_micros(1),
        "ms" => Duration::from_millis(1),
        "s" => Duration::from_secs(1),
        "m" => Duration::from_secs(60),
        _ => return None,
    };
    Some(unit * number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_of_a_url_are_settings() {
        let url = "redis+cluster://a?deadline=50ms&connections=2&prefix=shop&denial_ttl=0s";
        let config = RedisConfig::from_url(url).unwrap();
        let found = (config.deadline, config.denial_ttl, &*config.prefix);
        assert_eq!(found, (Duration::from_millis(50), Duration::ZERO, "shop"));
        assert_eq!(config.transport.connections, 2);
    }
}
