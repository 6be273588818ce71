//! Opens connections to one address of a Redis server or Sentinel: name resolution, TCP or a unix
//! socket, TLS, and the login. The choice of the address and the retries are elsewhere.

use std::{fmt, io, net::SocketAddr, path::PathBuf, pin::Pin, sync::Arc, time::Duration};

use redis::{
    AsyncConnectionConfig, ErrorKind, ProtocolVersion, RedisConnectionInfo, RedisError,
    aio::{AsyncPushSender, MultiplexedConnection},
};
use tokio::{
    net::{TcpStream, lookup_host},
    task::JoinSet,
    time::{Instant, timeout_at},
};

use super::{
    error::cannot,
    login::{Credentials, Logins},
    session::{Driver, Session},
    tls::{self, Connector},
    traffic::{Stream, Traffic, Watched, boxed},
};

/// The deadline of commands that no caller waits for with a deadline of its own, such as queries
/// for slots. A healthy server answers them within milliseconds.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
/// The time limit for opening a connection and logging in. It is below the deadline of a ping, so
/// that the error of a ping contains the reason.
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_millis(900);

/// The remedy if a server cannot be connected to.
const CHECK_SERVER: &str = "; start the server, or correct its address";

/// A host and a port.
pub(crate) type Address = (String, u16);

/// Maps an address that a Sentinel or a node of a cluster names to the address to connect to.
pub(crate) type Mapping = Arc<dyn Fn(&str, u16) -> Address + Send + Sync>;

pub(crate) type Pushes = Arc<dyn AsyncPushSender>;

/// An address, with the settings for the login there.
#[derive(Clone)]
pub(crate) struct Endpoint {
    place: Place,
    /// The text of `place`, for errors.
    name: Arc<str>,
    pub(crate) login: RedisConnectionInfo,
    /// Their credentials replace the user and the password of the login.
    pub(crate) logins: Option<Logins>,
    tls: Option<Connector>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Place {
    Tcp(Address),
    Unix(PathBuf),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp((host, port)) if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp((host, port)) => write!(f, "{host}:{port}"),
            Self::Unix(path) => path.display().fmt(f),
        }
    }
}

impl Endpoint {
    pub(crate) fn new(place: Place, login: RedisConnectionInfo, tls: Option<Connector>) -> Self {
        let name = place.to_string().into();
        Self { place, name, login, logins: None, tls }
    }

    pub(crate) fn place(&self) -> &Place {
        &self.place
    }

    /// Returns the address, for errors.
    pub(crate) fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// Returns the same settings for another address.
    pub(crate) fn at(&self, address: Address) -> Self {
        let place = Place::Tcp(address);
        Self { name: place.to_string().into(), place, ..self.clone() }
    }

    /// Opens a connection within a time. `answers_within` is the time limit of its commands, if
    /// there is one. `pushes` receives the messages that are no replies.
    pub(crate) async fn open(
        &self,
        within: Duration,
        answers_within: Option<Duration>,
        pushes: Option<Pushes>,
    ) -> Result<Session, RedisError> {
        let ends = Instant::now() + within;
        // The time limit is `ends`. That of the crate would hide the stage.
        let config = AsyncConnectionConfig::new()
            .set_response_timeout(answers_within)
            .set_connection_timeout(None);
        let mut login = self.login.clone();
        if let Some(logins) = &self.logins {
            let first = before(ends, logins.first()).await.map_err(|error| {
                cannot("get the credentials", &error, within, "; check their provider")
            })?;
            login = login.set_username(first.user()).set_password(first.password());
        }
        let mut was_cut = false;
        loop {
            let config = match &pushes {
                Some(pushes) if login.protocol() != ProtocolVersion::RESP2 => {
                    config.clone().set_push_sender(pushes.clone())
                }
                _ => config.clone(),
            };
            match self.log_in(&login, config, within, ends).await {
                Err(failure) if knows_no_hello(&failure.error) => {
                    login = login.set_protocol(ProtocolVersion::RESP2);
                }
                // One more attempt: no command was under way, so the callers need not fail.
                Err(failure) if failure.is_cut && !was_cut => was_cut = true,
                result => return result.map_err(|failure| failure.error),
            }
        }
    }

    async fn log_in(
        &self,
        login: &RedisConnectionInfo,
        config: AsyncConnectionConfig,
        within: Duration,
        ends: Instant,
    ) -> Result<Session, LoginFailure> {
        let (host, port) = match &self.place {
            Place::Tcp((host, port)) => (host, *port),
            #[cfg(unix)]
            Place::Unix(path) => {
                let stream = before(ends, tokio::net::UnixStream::connect(path)).await;
                let stream = stream.map_err(|it| cannot("connect", &it, within, CHECK_SERVER))?;
                let stream = boxed(stream);
                return self.log_in_over(stream, login, config, within, ends, "").await;
            }
            #[cfg(not(unix))]
            Place::Unix(_) => {
                return Err(RedisError::from(io::Error::from(io::ErrorKind::Unsupported)).into());
            }
        };
        let addresses = before(ends, lookup_host((&**host, port))).await;
        let addresses =
            addresses.map_err(|it| cannot("resolve the name", &it, within, "; check it"))?;
        // All addresses of the name in parallel: the first login that succeeds counts.
        let mut attempts = JoinSet::new();
        for address in addresses {
            let (endpoint, host, login, config) =
                (self.clone(), host.clone(), login.clone(), config.clone());
            attempts.spawn(async move {
                let stream = endpoint.connect(address, &host, within, ends).await?;
                let hint = match endpoint.tls {
                    None => "; if the port expects TLS, write rediss:// instead of redis://",
                    Some(_) => tls::CHECK_CLIENT,
                };
                endpoint.log_in_over(stream, &login, config, within, ends, hint).await
            });
        }
        let mut failure = None;
        while let Some(attempt) = attempts.join_next().await {
            match attempt
                .unwrap_or_else(|error| Err(RedisError::from(io::Error::other(error)).into()))
            {
                Ok(session) => return Ok(session),
                Err(error) => failure = Some(error),
            }
        }
        let none = io::Error::other("the name has no address");
        let none = || cannot("connect", &none, within, "; check it");
        Err(failure.unwrap_or_else(|| none().into()))
    }

    async fn connect(
        &self,
        address: SocketAddr,
        host: &str,
        within: Duration,
        ends: Instant,
    ) -> Result<Pin<Box<dyn Stream>>, RedisError> {
        let tcp = before(ends, TcpStream::connect(address)).await;
        let tcp = tcp.map_err(|it| cannot("connect", &it, within, CHECK_SERVER))?;
        tcp.set_nodelay(true)?;
        let Some(connector) = &self.tls else { return Ok(boxed(tcp)) };
        let stream = before(ends, tls::begin(connector, host, tcp)).await;
        stream.map_err(|it| cannot("begin TLS", &it, within, tls::remedy(&it)))
    }

    /// Logs in over a stream. The hint is for a server that does not understand the login.
    async fn log_in_over(
        &self,
        stream: Pin<Box<dyn Stream>>,
        login: &RedisConnectionInfo,
        config: AsyncConnectionConfig,
        within: Duration,
        ends: Instant,
        hint: &str,
    ) -> Result<Session, LoginFailure> {
        let traffic = Arc::<Traffic>::default();
        let stream = Watched { stream, traffic: traffic.clone() };
        let opened = MultiplexedConnection::new_with_config(login, stream, config);
        let cannot_log_in = |cause: io::Error| cannot("log in", &cause, within, hint);
        let (commands, driver) = match timeout_at(ends, opened).await {
            Ok(Err(error)) if error.is_connection_dropped() => {
                let error = cannot_log_in(io::Error::other("the server closed the connection"));
                return Err(LoginFailure { error, is_cut: true });
            }
            Ok(Err(error)) if error.kind() == ErrorKind::Parse || error.is_io_error() => {
                return Err(cannot_log_in(io::Error::other(error)).into());
            }
            Ok(result) => result?,
            Err(_) => {
                let late = io::ErrorKind::TimedOut.into();
                return Err(
                    cannot("log in", &late, within, "; see if `redis-cli PING` answers").into()
                );
            }
        };
        let renewal = self.logins.clone().map(|logins| {
            let [user, password] =
                [login.username(), login.password()].map(Option::unwrap_or_default);
            let known = Credentials::new(user, password);
            logins.renew(commands.clone(), self.name.clone(), known)
        });
        let driver = Arc::new(Driver::spawn(driver, renewal, traffic.clone()));
        Ok(Session { driver, commands, traffic })
    }
}

async fn before<T>(ends: Instant, stage: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    timeout_at(ends, stage).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

/// The reason of a failed attempt.
struct LoginFailure {
    error: RedisError,
    /// True if the server closed the connection during the login.
    is_cut: bool,
}

impl From<RedisError> for LoginFailure {
    fn from(error: RedisError) -> Self {
        Self { error, is_cut: false }
    }
}

/// Returns whether the server, or a proxy in front of it, does not know RESP3.
fn knows_no_hello(error: &RedisError) -> bool {
    error.kind() == ErrorKind::RESP3NotSupported
        || error.code() == Some("NOPROTO")
        || error.detail().is_some_and(|it| it.contains("unknown command") && it.contains("HELLO"))
}
