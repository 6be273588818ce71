//! The logins of connections whose credentials change: what provides these credentials, and the
//! task that logs an open connection in again.

use std::{error::Error, fmt, io, iter::successors, pin::Pin, sync::Arc, time::Duration};

use redis::{Cmd, aio::MultiplexedConnection};
use tokio::time::sleep;

use super::error::is_reply;

/// The time between two calls of a provider for one connection.
const PAUSE: Duration = Duration::from_secs(1);

/// A user and a password at Redis. The password can be a token that expires.
///
/// # Examples
///
/// ```
/// use tower_ratelimit::store::Credentials;
///
/// let credentials = Credentials::new("shop", "secret");
/// assert_eq!(credentials.user(), "shop");
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    user: String,
    password: String,
}

impl Credentials {
    /// Makes credentials. If Redis has only a password, the user is `default`.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::store::Credentials;
    ///
    /// let credentials = Credentials::new("", "secret"); // of the default user
    /// # let _ = credentials;
    /// ```
    #[must_use]
    pub fn new(user: impl Into<String>, password: impl Into<String>) -> Self {
        Self { user: user.into(), password: password.into() }
    }

    /// Returns the name of the user.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::store::Credentials;
    ///
    /// assert_eq!(Credentials::new("shop", "secret").user(), "shop");
    /// ```
    #[must_use]
    pub fn user(&self) -> &str {
        &self.user
    }

    /// Returns the password.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::store::Credentials;
    ///
    /// assert_eq!(Credentials::new("shop", "secret").password(), "secret");
    /// ```
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

type Provided =
    Pin<Box<dyn Future<Output = Result<Credentials, Box<dyn Error + Send + Sync>>> + Send>>;

/// A closure that returns credentials: see `RedisConfig::credentials_provider`.
pub(crate) type Provider = Arc<dyn Fn(Option<Credentials>) -> Provided + Send + Sync>;

pub fn login_provider<R>(
    provider: impl Fn(Option<Credentials>) -> R + Send + Sync + 'static,
) -> Provider
where
    R: Future<Output = Result<Credentials, Box<dyn Error + Send + Sync>>> + Send + 'static,
{
    Arc::new(move |known| Box::pin(provider(known)))
}

/// Called with the name of a server whose open connection keeps its old login. The error is the
/// error of the provider; without one, the server has rejected the credentials.
type OnFailure = dyn Fn(&str, Option<&(dyn Error + 'static)>) + Send + Sync;

/// The logins of all connections to a server.
#[derive(Clone)]
pub(crate) struct Logins {
    pub(crate) provider: Provider,
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
                Err(_) => {} // such as an error of the socket: once more
            }
        }
    }
}
