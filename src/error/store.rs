//! `StoreError`, without knowledge of the backend: its text and sources are those of the backend's
//! error.

use std::{error::Error, fmt, sync::Arc};

use super::write_with_causes;

/// The failure of a store.
///
/// Two failures are equal if their [kinds](StoreError::kind) are: the texts are those of servers
/// and systems.
///
/// # Examples
///
/// ```
/// use tower_ratelimit::store;
///
/// if let Err(error) = store::lazy("http://127.0.0.1") {
///     println!("{error}"); // says which URLs there are
/// }
/// ```
#[derive(Clone)]
pub struct StoreError {
    kind: ErrorKind,
    /// True if the call may have changed the store.
    #[cfg_attr(
        not(feature = "redisson"),
        allow(dead_code, reason = "the connections repeat the rest")
    )]
    may_have_run: bool,
    /// The name of the limiter whose call has failed.
    limiter: Option<Arc<str>>,
    cause: Arc<dyn Error + Send + Sync>,
}

/// The kind of a failure of a store.
///
/// # Examples
///
/// ```
/// use tower_ratelimit::store::{ErrorKind, StoreError};
///
/// fn is_a_mistake(error: &StoreError) -> bool {
///     !matches!(error.kind(), ErrorKind::Timeout | ErrorKind::CircuitOpen | ErrorKind::Full)
/// }
/// # let _ = is_a_mistake;
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// There was no answer within the deadline. The cost may have been spent.
    Timeout,
    /// The connection ended before the answer. The cost may have been spent.
    Interrupted,
    /// The circuit breaker is open: no call was made.
    CircuitOpen,
    /// The server answered with an error, such as a rejected login.
    ErrorReply,
    /// Another version of this crate has written the state of the key, in a form that this version
    /// does not know. Nothing was changed. It lasts until all processes run one version, or until
    /// the state of an older one expires.
    OtherVersion,
    /// Redis has admitted a request that holds units or waits, and this process has computed that
    /// it is denied: a mistake in this crate, or another program has changed the script. The units
    /// count until they expire. A request does not ask again.
    Different,
    /// The store in memory has no room for another key.
    Full,
    /// Another failure: most often, the server cannot be reached, or rejects a login with RESP2.
    Other,
}

impl ErrorKind {
    #[cfg(feature = "metrics")]
    pub(crate) const ALL: [Self; 8] = [
        Self::Timeout,
        Self::Interrupted,
        Self::CircuitOpen,
        Self::ErrorReply,
        Self::OtherVersion,
        Self::Different,
        Self::Full,
        Self::Other,
    ];

    /// Returns the name, as in a label: `timeout`, `interrupted`, `circuit_open`, `error_reply`,
    /// `other_version`, `different`, `full` or `other`.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::store::ErrorKind;
    ///
    /// assert_eq!(ErrorKind::Timeout.as_str(), "timeout");
    /// ```
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Timeout => "timeout",
            Self::Interrupted => "interrupted",
            Self::CircuitOpen => "circuit_open",
            Self::ErrorReply => "error_reply",
            Self::OtherVersion => "other_version",
            Self::Different => "different",
            Self::Full => "full",
            Self::Other => "other",
        }
    }
}

impl StoreError {
    /// Returns the error of a store that is full, with `max_keys` keys in use.
    pub(crate) fn full(max_keys: usize) -> Self {
        let text = format!(
            "no room for a new key: `max_keys` is {max_keys}, and all keys are in use; raise it"
        );
        Self { kind: ErrorKind::Full, ..Self::config(text) }
    }

    /// Returns the error of invalid settings.
    pub(crate) fn config(text: String) -> Self {
        let cause = Box::<dyn Error + Send + Sync>::from(text).into();
        Self { kind: ErrorKind::Other, may_have_run: false, limiter: None, cause }
    }

    /// Returns the error of a backend.
    #[cfg(feature = "redis")]
    pub(crate) fn new(
        kind: ErrorKind,
        may_have_run: bool,
        cause: impl Error + Send + Sync + 'static,
    ) -> Self {
        Self { kind, may_have_run, limiter: None, cause: Arc::new(cause) }
    }

    /// Adds the name of the limiter whose call has failed.
    pub(crate) fn of_limiter(self, name: &str) -> Self {
        Self { limiter: Some(name.into()), ..self }
    }

    /// Returns the name of the limiter whose decision has failed, if it is known; of several
    /// limiters, of the first.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::store;
    ///
    /// if let Err(error) = store::lazy("http://127.0.0.1") {
    ///     assert_eq!(error.limiter(), None); // a mistake of no limiter
    /// }
    /// ```
    #[must_use]
    pub fn limiter(&self) -> Option<&str> {
        self.limiter.as_deref()
    }

    /// Returns whether the call may have changed the store: it must not be repeated then.
    #[cfg_attr(not(feature = "redisson"), allow(dead_code))]
    pub(crate) fn may_have_run(&self) -> bool {
        self.may_have_run
    }

    /// Returns the kind of the failure.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{Algorithm, Error, Limiter, MemoryStore, Quota, store::ErrorKind};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Error> {
    /// let store = MemoryStore::with_max_keys(1);
    /// let limiter = Limiter::new("api", store, Algorithm::sliding_log(), Quota::per_hour(1));
    /// assert!(limiter.check("alice").await?.is_allowed());
    /// match limiter.check("ben").await {
    ///     Err(Error::Store(error)) => assert_eq!(error.kind(), ErrorKind::Full),
    ///     other => panic!("{other:?}"),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub const fn kind(&self) -> ErrorKind {
        self.kind
    }
}

impl PartialEq for StoreError {
    fn eq(&self, other: &Self) -> bool {
        self.kind == other.kind
    }
}

impl Eq for StoreError {}

/// Writes the name, as in a label.
impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_str().fmt(f)
    }
}

/// The text with its causes: a `main` that returns the error prints it so.
impl fmt::Debug for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_with_causes(self, f)
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.cause, f)
    }
}

impl Error for StoreError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.cause.source()
    }
}
