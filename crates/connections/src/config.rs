//! The settings of the connections: addresses, credentials and TLS. It opens no connection.

use std::{error::Error, fmt, slice, sync::Arc};

use super::{
    health::{Event, Owner},
    link::{
        Connector, DynConnection, Endpoint, Header, Logins, Mapping, Place, Provider, TlsSettings,
        TransportError, connector,
    },
    topology::{Client, Cluster, Common, Sentinels, Server},
    url::{Nodes, Parameters, Url, read},
};

/// The addresses of Redis, the login, and the settings of connections.
#[derive(Clone)]
pub struct TransportConfig {
    topology: Topology,
    pub user: Option<String>,
    pub password: Option<String>,
    pub database: Option<i64>,
    pub provider: Option<Provider>,
    pub tls: Option<TlsSettings>,
    pub sentinel_tls: Option<TlsSettings>,
    pub mapping: Mapping,
    pub connections: usize,
    /// The line before the text of every script.
    pub script_header: Option<String>,
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

impl TransportConfig {
    /// Reads one URL for all nodes and settings. `further` are the names of parameters that the
    /// owner reads from the result.
    pub fn from_url<'a>(
        url: &'a str,
        further: &[&str],
    ) -> Result<(Self, Parameters<'a>), TransportError> {
        let (nodes, settings, parameters) = read(url, further)?;
        let config = match nodes {
            Nodes::Server(url) => Self::new(Topology::Server(Url::read(&url)?)),
            Nodes::Sentinels { sentinels, master } => Self::sentinels(sentinels, &master)?,
            Nodes::Cluster(nodes) => Self::cluster(nodes)?,
        };
        let config = Self {
            connections: settings.connections.unwrap_or(config.connections),
            script_header: settings.script_flags.map(|flags| format!("#!lua flags={flags}")),
            ..config
        };
        Ok((config, parameters))
    }

    pub fn is_one_server(&self) -> bool {
        matches!(self.topology, Topology::Server(_))
    }

    /// `master` is the name of the master, or a URL with the name in place of the host.
    pub fn sentinels(
        sentinels: impl IntoIterator<Item = impl AsRef<str>>,
        master: &str,
    ) -> Result<Self, TransportError> {
        let master = match master.contains("://") {
            true => Url::read(master)?,
            false => Url::read(&format!("redis://{master}"))?,
        };
        let Place::Tcp((name, _)) = &master.place else {
            return Err(TransportError::config(
                "cannot use the URL of the master: it names no master; write the name that the \
                 Sentinels know, or redis://[[USER]:PASSWORD@]NAME[/DB]",
            ));
        };
        let name = name.clone();
        let sentinels = Url::read_all(sentinels, "redis://HOST:26379 for each Sentinel")?;
        Ok(Self::new(Topology::Sentinels { sentinels, name, master }))
    }

    /// `urls` are some of the nodes.
    pub fn cluster(
        urls: impl IntoIterator<Item = impl AsRef<str>>,
    ) -> Result<Self, TransportError> {
        let form = "redis://[[USER]:PASSWORD@]HOST[:PORT] for some nodes of the cluster";
        let seeds = Url::read_all(urls, form)?;
        if let Some(seed) = seeds.iter().find(|seed| matches!(seed.place, Place::Unix(_))) {
            return Err(TransportError::config(format!(
                "cannot use {}: the nodes of a cluster have hosts and ports; write {form}",
                seed.place
            )));
        }
        Ok(Self::new(Topology::Cluster(seeds)))
    }

    /// A connection that reconnects by itself. The settings about addresses, logins and connections
    /// have no effect.
    pub fn connection(connection: Arc<dyn DynConnection>) -> Self {
        Self::new(Topology::Connection(connection))
    }

    fn new(topology: Topology) -> Self {
        Self {
            topology,
            user: None,
            password: None,
            database: None,
            provider: None,
            tls: None,
            sentinel_tls: None,
            mapping: Arc::new(|host: &str, port| (host.to_owned(), port)),
            connections: 1,
            script_header: None,
        }
    }

    /// Makes a client, which connects when it is first used.
    pub fn client(&self, owner: Arc<dyn Owner>) -> Result<Client, TransportError> {
        let header = self.script_header.as_deref().map(|line| Arc::new(Header::new(line)));
        let common = Common { connections: self.connections, header, owner: owner.clone() };
        let server = match &self.topology {
            Topology::Server(url) => {
                let tls = self.security(slice::from_ref(url))?;
                Server::One(self.server_endpoint(url, &tls, &owner)?)
            }
            Topology::Sentinels { sentinels, name, master } => {
                let (tls, sentinel_tls) = (
                    self.security(slice::from_ref(master))?,
                    Security::new(self.sentinel_tls.as_ref(), self.tls.as_ref(), sentinels)?,
                );
                let nodes: Result<_, _> = sentinels
                    .iter()
                    .map(|url| with_password(url.endpoint(&sentinel_tls)))
                    .collect();
                let template = self.server_endpoint(master, &tls, &owner)?;
                let mapping = self.mapping.clone();
                let sentinels = Sentinels::new(nodes?, name.clone(), template, mapping, owner);
                Server::Sentinel(sentinels)
            }
            Topology::Cluster(urls) => {
                let tls = self.security(urls)?;
                let seeds: Result<_, _> =
                    urls.iter().map(|url| self.server_endpoint(url, &tls, &owner)).collect();
                let cluster = Cluster::new(seeds?, self.mapping.clone(), common);
                return Ok(Client::of_cluster(cluster));
            }
            Topology::Connection(connection) => {
                let common = Common { connections: 1, ..common };
                return Ok(Client::of(Server::Given(connection.boxed()), common));
            }
        };
        Ok(Client::of(server, common))
    }

    /// Returns the name of the user at the servers, if the settings have it.
    pub fn user(&self) -> Option<&str> {
        let url = match &self.topology {
            Topology::Server(url) => Some(url),
            Topology::Sentinels { master, .. } => Some(master),
            Topology::Cluster(urls) => urls.first(),
            Topology::Connection(_) => None,
        };
        let url = url.filter(|_| self.provider.is_none())?;
        Some(self.user.as_deref().or(url.login.username()).unwrap_or("default"))
    }

    fn server_endpoint(
        &self,
        url: &Url,
        tls: &Security,
        owner: &Arc<dyn Owner>,
    ) -> Result<Endpoint, TransportError> {
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
        endpoint.logins = self.provider.clone().map(|provider| {
            let owner = owner.clone();
            let on_failure = move |server: &str, error: Option<&(dyn Error + 'static)>| {
                owner.notify(&match error {
                    Some(error) => Event::NoCredentials { server, error },
                    None => Event::LoginRejected { server },
                });
            };
            Logins { provider, on_failure: Arc::new(on_failure) }
        });
        with_password(endpoint)
    }

    fn security(&self, urls: &[Url]) -> Result<Security, TransportError> {
        Security::new(self.tls.as_ref(), None, urls)
    }
}

/// Rejects a user without a password, because Redis would log in the user `default`.
fn with_password(endpoint: Endpoint) -> Result<Endpoint, TransportError> {
    let Endpoint { login, logins, .. } = &endpoint;
    let place = endpoint.name();
    match login.username() {
        Some(_) if login.password().is_none() && logins.is_none() => {
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
    /// `own` makes all connections use TLS. `other` is for the settings that `own` does not have.
    fn new(
        own: Option<&TlsSettings>,
        other: Option<&TlsSettings>,
        urls: &[Url],
    ) -> Result<Self, TransportError> {
        let is_for_all = own.is_some();
        let is_used = is_for_all || urls.iter().any(|url| url.is_tls);
        let connector = is_used.then(|| connector(own, other)).transpose()?;
        Ok(Self { connector, is_for_all })
    }
}

impl fmt::Debug for TransportConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let places = |urls: &[Url]| -> Vec<String> {
            urls.iter().map(|url| url.place.to_string()).collect()
        };
        let mut text = f.debug_struct("TransportConfig");
        match &self.topology {
            Topology::Server(url) => text.field("server", &url.place.to_string()),
            Topology::Sentinels { sentinels, name, .. } => {
                text.field("sentinels", &places(sentinels)).field("master", name)
            }
            Topology::Cluster(urls) => text.field("cluster", &places(urls)),
            Topology::Connection(_) => &mut text,
        };
        text.field("connections", &self.connections).finish_non_exhaustive()
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
