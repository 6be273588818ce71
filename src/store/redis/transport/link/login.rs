//! The logins of connections whose credentials change: what provides these credentials, and the
//! task that logs an open connection in again.

use std::{error::Error, fmt, io, iter::successors, pin::Pin, sync::Arc, time::Duration};

use redis::{Cmd, aio::MultiplexedConnection};
use tokio::time::sleep;

use super::error::is_reply;

/// The time between two calls of a provider for one connection.
const PAUSE: Duration = Duration::from_secs(1);

/// A user and a password at Redis. The password can be a token that expires.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    user: String,
    password: String,
}

impl Credentials {
    /// Makes credentials. If Redis has only a password, the user is `default`.
    #[must_use]
    pub fn new(user: impl Into<String>, password: impl Into<String>) -> Self {
        Self { user: user.into(), password: password.into() }
    }

    /// Returns the name of the user.
    #[must_use]
    pub fn user(&self) -> &str {
        &self.user
    }

    /// Returns the password.
    #[must_use]
    pub fn password(&self) -> &str {
        &self.password
    }
}

/// Leaves the password out.
impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").field("user", &self.user).finish_non_exhaustive()
    }
}

/// A source of credentials that change, for `RedisConfig::credentials_provider`: passwords that are
/// rotated, or tokens that expire.
///
/// Closures from `Option<Credentials>` to a future are providers, too.
///
/// # Examples
///
/// A task of the application replaces the credentials by `sender.send(..)`:
///
/// ```
/// use std::error::Error;
/// use tokio::sync::watch;
/// use tower_ratelimit::{
///     RedisStore,
///     store::{Credentials, CredentialsProvider, RedisConfig},
/// };
///
/// struct Rotated(watch::Receiver<Credentials>);
///
/// impl CredentialsProvider for Rotated {
///     async fn credentials(
///         &self,
///         known: Option<Credentials>,
///     ) -> Result<Credentials, Box<dyn Error + Send + Sync>> {
///         let mut latest = self.0.clone();
///         Ok(latest.wait_for(|latest| known.as_ref() != Some(latest)).await?.clone())
///     }
/// }
///
/// # fn main() -> Result<(), Box<dyn Error>> {
/// let (sender, latest) = watch::channel(Credentials::new("shop", "secret"));
/// let config = RedisConfig::server("redis://redis.internal")?;
/// let store = RedisStore::new(config.credentials_provider(Rotated(latest)))?;
/// # let _ = (store, sender);
/// # Ok(())
/// # }
/// ```
pub trait CredentialsProvider: Send + Sync + 'static {
    /// Returns the credentials for a login.
    ///
    /// A new connection has no `known` credentials, and logs in with the result. The time limit of
    /// 900 ms for connecting includes this call. An open connection passes the credentials that it
    /// has used last: the future completes when there are others, and the connection logs in with
    /// them.
    ///
    /// After each answer, an open connection waits for a second before it calls again. So a
    /// provider may also return the known credentials. The future must not block its thread.
    ///
    /// # Errors
    ///
    /// A new connection fails. An open connection keeps its login, and the failure is an event of
    /// the feature `tracing`.
    fn credentials(
        &self,
        known: Option<Credentials>,
    ) -> impl Future<Output = Result<Credentials, Box<dyn Error + Send + Sync>>> + Send;
}

impl<F, R> CredentialsProvider for F
where
    F: Fn(Option<Credentials>) -> R + Send + Sync + 'static,
    R: Future<Output = Result<Credentials, Box<dyn Error + Send + Sync>>> + Send,
{
    fn credentials(
        &self,
        known: Option<Credentials>,
    ) -> impl Future<Output = Result<Credentials, Box<dyn Error + Send + Sync>>> + Send {
        self(known)
    }
}

type Provided =
    Pin<Box<dyn Future<Output = Result<Credentials, Box<dyn Error + Send + Sync>>> + Send>>;

/// A provider of any type.
pub(crate) type DynProvider = Arc<dyn Fn(Option<Credentials>) -> Provided + Send + Sync>;

pub(crate) fn erased(provider: impl CredentialsProvider) -> DynProvider {
    let provider = Arc::new(provider);
    Arc::new(move |known| {
        let provider = provider.clone();
        Box::pin(async move { provider.credentials(known).await })
    })
}

/// Called with the name of a server whose open connection keeps its old login. The error is the
/// error of the provider; without one, the server has rejected the credentials.
type OnFailure = dyn Fn(&str, Option<&(dyn Error + 'static)>) + Send + Sync;

/// The logins of all connections to a server.
#[derive(Clone)]
pub(crate) struct Logins {
    pub(crate) provider: DynProvider,
    pub(crate) on_failure: Arc<OnFailure>,
}

impl Logins {
    /// Returns the credentials of a new connection.
    pub(super) async fn first(&self) -> io::Result<Credentials> {
        (self.provider)(None).await.map_err(|error| {
            let causes = successors(error.source(), |&cause| cause.source());
            io::Error::other(
                causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}")),
            )
        })
    }

    /// Logs a connection in whenever there are other credentials than the known ones.
    pub(super) async fn renew(
        self,
        mut commands: MultiplexedConnection,
        server: Arc<str>,
        mut known: Credentials,
    ) {
        let mut has_failed = false;
        loop {
            sleep(PAUSE).await;
            let next = match (self.provider)(Some(known.clone())).await {
                Ok(next) => next,
                Err(error) => {
                    if !has_failed {
                        (self.on_failure)(&server, Some(&*error));
                    }
                    has_failed = true;
                    continue;
                }
            };
            has_failed = false;
            if next == known {
                continue;
            }
            let mut login = Cmd::new();
            login.arg("AUTH").arg(&next.user).arg(&next.password);
            match login.exec_async(&mut commands).await {
                Ok(()) => known = next,
                Err(error) if is_reply(&error) => {
                    (self.on_failure)(&server, None);
                    known = next;
                }
                Err(error) if error.is_connection_dropped() => return,
                Err(_) => {} // the server has not answered in time: once more
            }
        }
    }
}
