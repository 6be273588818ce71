//! `StoreError`, without knowledge of the backend: its text and sources are those of the backend's
//! error.

use std::{error::Error, fmt, sync::Arc};

/// The failure of a store.
#[derive(Clone)]
pub struct StoreError {
    kind: Kind,
    /// True if the call may have changed the store.
    #[cfg_attr(
        not(feature = "redisson"),
        allow(dead_code, reason = "the transport repeats the rest")
    )]
    may_have_run: bool,
    cause: Arc<dyn Error + Send + Sync>,
}

/// The distinctions that callers can make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "redis"), allow(dead_code, reason = "only calls can time out"))]
pub(crate) enum Kind {
    Full,
    Timeout,
    Interrupted,
    Other,
}

/// The store is full, and all of its keys are in use.
#[derive(Debug)]
struct Full {
    max_keys: usize,
}

impl fmt::Display for Full {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { max_keys } = self;
        write!(
            f,
            "no room for a new key: the store holds {max_keys} keys that are in use; raise \
             `max_keys`"
        )
    }
}

impl Error for Full {}

/// The settings of a store are invalid.
#[derive(Debug)]
struct Config(String);

impl fmt::Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for Config {}

impl StoreError {
    /// Returns the error of a store that is full, with `max_keys` keys in use.
    pub(crate) fn full(max_keys: usize) -> Self {
        let cause = Arc::new(Full { max_keys });
        Self { kind: Kind::Full, may_have_run: false, cause }
    }

    /// Returns the error of invalid settings.
    pub(crate) fn config(text: String) -> Self {
        Self { kind: Kind::Other, may_have_run: false, cause: Arc::new(Config(text)) }
    }

    /// Returns the error of a backend.
    #[cfg(feature = "redis")]
    pub(crate) fn new(
        kind: Kind,
        may_have_run: bool,
        cause: impl Error + Send + Sync + 'static,
    ) -> Self {
        Self { kind, may_have_run, cause: Arc::new(cause) }
    }

    /// Returns whether the call may have changed the store: it must not be repeated then.
    #[cfg_attr(not(feature = "redisson"), allow(dead_code))]
    pub(crate) fn may_have_run(&self) -> bool {
        self.may_have_run
    }

    /// Returns whether the deadline passed; the cost may have been spent.
    #[must_use]
    pub fn is_timeout(&self) -> bool {
        self.kind == Kind::Timeout
    }

    /// Returns whether the connection ended during the call; the cost may have been spent.
    #[must_use]
    pub fn is_interrupted(&self) -> bool {
        self.kind == Kind::Interrupted
    }

    /// Returns whether the store has no room for another key.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.kind == Kind::Full
    }
}

/// Includes the source, because `main` prints errors in this form.
impl fmt::Debug for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self.source() {
            Some(source) => format!("{self}: {source}"),
            None => self.to_string(),
        };
        f.debug_tuple("StoreError").field(&text).finish()
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
