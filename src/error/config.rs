//! Errors of settings: of limiters, configuration files and networks. Errors of quotas and
//! algorithms are in `quota/error.rs`.

use std::{borrow::Cow, error::Error as StdError, fmt};

use crate::quota::QuotaError;

/// Invalid settings.
///
/// # Examples
///
/// ```
/// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, config::ConfigError};
///
/// let quota = Quota::per_second(1);
/// match Limiter::try_new("a b", MemoryStore::new(), Algorithm::token_bucket(), quota) {
///     Err(ConfigError::Name { limiter, .. }) => println!("{limiter:?} is no name"),
///     Err(error) => println!("{error}"),
///     Ok(_) => {}
/// }
/// ```
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConfigError {
    /// Another limiter over the same store uses the name: their counts would mix.
    #[non_exhaustive]
    NameTaken {
        /// The name of the limiter.
        limiter: Cow<'static, str>,
    },
    /// The name is invalid: it must be 1 to 64 of the characters `A-Z a-z 0-9 - _ . /`.
    #[non_exhaustive]
    Name {
        /// The name of the limiter.
        limiter: Cow<'static, str>,
    },
    /// The configuration has no limit of this name.
    #[non_exhaustive]
    MissingLimit {
        /// The name of the limit, and of its limiter.
        limiter: Cow<'static, str>,
    },
    /// The new configuration lacks limits of the previous one, which limiters use. Nothing was
    /// changed.
    #[non_exhaustive]
    LimitsRemoved {
        /// The names of all limits that were removed, in their order.
        names: Vec<String>,
    },
    /// A quota or an algorithm is invalid, or they do not fit each other.
    Quota(QuotaError),
    /// A network is not an address, with or without a prefix length: `10.0.0.0/8`.
    #[non_exhaustive]
    Network {
        /// The text that was given.
        network: String,
    },
    /// The networks of the trusted proxies contain all public addresses of one version: every
    /// client would be a trusted proxy, and could choose its key.
    #[non_exhaustive]
    AllTrusted {
        /// `IPv4` or `IPv6`.
        version: &'static str,
    },
}

/// The text: a `main` that returns the error prints it so.
impl fmt::Debug for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NameTaken { limiter } => write!(
                f,
                "limiter name {limiter:?}: the store already has a limiter of this name; choose \
                 another name, or clone the first limiter to share its counts"
            ),
            Self::Name { limiter } => write!(
                f,
                "limiter name {limiter:?}: use 1 to 64 of the characters A-Z a-z 0-9 - _ . /"
            ),
            Self::MissingLimit { limiter } => {
                write!(f, "limit {limiter:?} is missing: add it to the configuration")
            }
            Self::LimitsRemoved { names } => removed_limits(names, f),
            Self::Quota(error) => error.fmt(f),
            Self::Network { network } => {
                write!(
                    f,
                    "network {network:?}: use an address, or one with a prefix length, such as \
                     10.0.0.0/8"
                )
            }
            Self::AllTrusted { version } => write!(
                f,
                "trusted proxies: every client with {version} would be one, and could choose its \
                 key; name only the networks of the proxies, such as 10.0.0.0/8"
            ),
        }
    }
}

impl ConfigError {
    /// Returns the name of the limiter, if the error concerns the name of one.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    ///
    /// let quota = Quota::per_second(1);
    /// let algorithm = Algorithm::token_bucket();
    /// let error = Limiter::try_new("a b", MemoryStore::new(), algorithm, quota).err();
    /// assert_eq!(error.as_ref().and_then(|error| error.limiter()), Some("a b"));
    /// ```
    #[must_use]
    pub fn limiter(&self) -> Option<&str> {
        match self {
            Self::NameTaken { limiter }
            | Self::Name { limiter }
            | Self::MissingLimit { limiter } => Some(limiter),
            _ => None,
        }
    }

    /// Returns the text for a panic, which names quotas and algorithms as code does.
    pub(crate) fn in_code(&self) -> String {
        match self {
            Self::Quota(error) => crate::quota::in_code(error),
            _ => self.to_string(),
        }
    }
}

fn removed_limits(names: &[String], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let (noun, uses, pronoun) = match names.len() {
        1 => ("limit", "was removed, but a limiter uses it", "it"),
        _ => ("limits", "were removed, but limiters use them", "them"),
    };
    let names: Vec<_> = names.iter().map(|name| format!("{name:?}")).collect();
    write!(
        f,
        "the {noun} {} {uses}; nothing changed: restore {pronoun}, or call \
         `reload_keeping_removed`",
        names.join(", ")
    )
}

impl From<QuotaError> for ConfigError {
    fn from(error: QuotaError) -> Self {
        Self::Quota(error)
    }
}

impl StdError for ConfigError {}
