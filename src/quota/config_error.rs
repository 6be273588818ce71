//! Errors of settings: of quotas, algorithms, limiters, configuration files and networks. They name
//! settings as a file does, and in a panic as code does.

use std::{borrow::Cow, error::Error as StdError, fmt};

use super::Quota;

/// Invalid settings.
///
/// # Examples
///
/// ```
/// use tower_ratelimit::Quota;
///
/// match "0/s".parse::<Quota>() {
///     Ok(quota) => println!("{quota}"),
///     Err(error) => println!("{error}"), // quota "0/s": the limit is 0, but must be at least 1
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
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
    /// The quota is invalid.
    #[non_exhaustive]
    Quota {
        /// The text or the number that is invalid, and the valid values.
        message: String,
    },
    /// No algorithm has this name.
    #[non_exhaustive]
    UnknownAlgorithm {
        /// The name.
        name: String,
    },
    /// The quota has a burst, but the algorithm is not a bucket.
    #[non_exhaustive]
    BurstWithoutBucket {
        /// The name of the algorithm.
        algorithm: &'static str,
        /// The quota with the burst.
        quota: Quota,
    },
    /// The algorithm counts units at a time, and the quota units per window, or the reverse.
    #[non_exhaustive]
    Concurrent {
        /// The name of the algorithm.
        algorithm: &'static str,
        /// The quota.
        quota: Quota,
    },
    /// The number of buckets of a sliding window is not 1 to 100.
    #[non_exhaustive]
    Buckets {
        /// The number of buckets.
        buckets: u32,
    },
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
    /// The sum of burst and overdraft is above 2^46, or takes more than 100 years to refill.
    #[non_exhaustive]
    Overdraft {
        /// The overdraft.
        overdraft: u64,
        /// The quota.
        quota: Quota,
    },
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
            Self::Quota { message } => f.write_str(message),
            Self::UnknownAlgorithm { name } => write!(
                f,
                "algorithm {name:?}: use fixed-window, sliding-window, sliding-log, token-bucket, \
                 leaky-bucket or concurrency"
            ),
            Self::BurstWithoutBucket { algorithm, quota } => write!(
                f,
                "quota \"{quota}\": a {algorithm} admits up to its limit at once and has no other \
                 burst; omit the burst, or use token-bucket or leaky-bucket"
            ),
            Self::Concurrent { algorithm, quota } if quota.is_concurrent() => write!(
                f,
                "quota \"{quota}\": a {algorithm} counts units per window; use the algorithm \
                 concurrency, or a quota such as 10/s"
            ),
            Self::Concurrent { quota, .. } => write!(
                f,
                "quota \"{quota}\": concurrency counts units at a time; use a quota such as \"10 \
                 concurrent\", or another algorithm"
            ),
            Self::Buckets { buckets } => {
                write!(f, "a sliding window has 1 to 100 buckets, not {buckets}")
            }
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
            Self::Overdraft { overdraft, quota } => write!(
                f,
                "an overdraft of {overdraft} is too large for the quota \"{quota}\": with the \
                 burst it must be at most 2^46 and refill within 100 years; use at most {}",
                quota.max_overdraft()
            ),
        }
    }
}

/// Returns the expression that makes an algorithm, by its name.
fn in_code(algorithm: &str) -> String {
    format!("Algorithm::{}()", algorithm.replace('-', "_"))
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
            Self::BurstWithoutBucket { algorithm, quota } => format!(
                "the quota `{}` does not fit `{}`: a window admits up to its limit at once and has \
                 no other burst; omit `burst`, or use `Algorithm::token_bucket()` or \
                 `Algorithm::leaky_bucket()`",
                quota.in_code(),
                in_code(algorithm)
            ),
            Self::Concurrent { algorithm, quota } if quota.is_concurrent() => format!(
                "the quota `{}` does not fit `{}`, which counts units per window; use \
                 `Algorithm::concurrency()`, or a quota such as `Quota::per_second(10)`",
                quota.in_code(),
                in_code(algorithm)
            ),
            Self::Concurrent { quota, .. } => format!(
                "the quota `{}` does not fit `Algorithm::concurrency()`, which counts units at a \
                 time; use a quota such as `Quota::concurrent(10)`, or another algorithm",
                quota.in_code()
            ),
            Self::Overdraft { quota, .. } => {
                self.to_string().replace(&format!("\"{quota}\""), &format!("`{}`", quota.in_code()))
            }
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

impl StdError for ConfigError {}
