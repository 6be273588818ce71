//! Limits by name, as a configuration file contains them: an algorithm and a quota each. It makes
//! no limiters.

use std::{
    collections::{BTreeMap, btree_map},
    fmt, iter,
};

use serde::{Deserialize, Serialize};
use tower_ratelimit_engine::limit;

use crate::{
    algorithm::Algorithm,
    error::ConfigError,
    limiter::{Limiter, check_name},
    quota::{Quota, QuotaError},
    store::Store,
};

/// Limits by name, from a configuration file in TOML, JSON, or another format that `serde`
/// supports.
///
/// Use it as a field of your configuration struct; in the file it is a table of limits. A name is
/// 1 to 64 of the characters `A-Z a-z 0-9 - _ . /`, and becomes the name of a
/// [limiter](Limiter::new).
///
/// ```toml
/// [limits.api]
/// algorithm = "token-bucket"
/// quota = "10/s burst 20"
///
/// [limits.per-hour]
/// algorithm = "sliding-window"
/// quota = "1000/h"
/// buckets = 4
/// ```
///
/// | field | used by | value |
/// |---|---|---|
/// | `algorithm` | all limits | a [name](Algorithm::name), such as `"token-bucket"` |
/// | `quota` | all limits | a [`Quota`]: `"10/s"`, `"5/10s"`; for a bucket also `"10/s burst 20"`; for concurrency `"10 concurrent"` |
/// | `buckets` | sliding window | 1 to 100, 1 by default |
/// | `refill` | token bucket | `"continuous"` (the default) or `"interval"` |
/// | `overdraft` | token bucket | the tokens that a request may spend in advance, 0 by default |
///
/// The names are `"fixed-window"`, `"sliding-window"`, `"sliding-log"`, `"token-bucket"` (a good
/// default), `"leaky-bucket"` and `"concurrency"`. See [`Algorithm`] for their meaning and for the
/// settings.
///
/// Limits are also collected from an iterator of names and limits. The names are then checked by
/// [`limiters`](Limits::limiters) and [`Limiters::reload`](super::Limiters::reload).
///
/// # Errors
///
/// All errors in a limit are reported when the text is read:
///
/// * fields that are unknown, missing or duplicate
/// * numbers out of range
/// * settings that conflict
/// * names that are invalid or duplicate
///
/// TOML and JSON report the line: that of the field, of one of two conflicting fields, or of the
/// limit that lacks a field. (`#[serde(flatten)]` and `#[serde(untagged)]` around it lose the
/// line.)
///
/// # Examples
///
/// ```
/// use tower_ratelimit::{MemoryStore, RateLimitLayer, config::Limits, key};
///
/// #[derive(serde::Deserialize)]
/// struct Config {
///     limits: Limits,
/// }
///
/// let config: Config = toml::from_str(r#"
///     [limits.api]
///     algorithm = "token-bucket"
///     quota = "10/s burst 20"
///
///     [limits.login]
///     algorithm = "sliding-log"
///     quota = "5/min"
/// "#)?;
///
/// let limiters = config.limits.limiters(&MemoryStore::new())?;
/// let layer = RateLimitLayer::new(limiters.get("login")?, key::PeerIp);
/// # let _ = layer;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Example: a mistake
///
/// ```
/// use tower_ratelimit::config::Limits;
///
/// let error = toml::from_str::<Limits>(r#"
/// [api]
/// algorithm = "token-bucket"
/// quota = "10/fortnight"
/// "#).unwrap_err();
/// assert_eq!(error.to_string(), r#"TOML parse error at line 4, column 9
///   |
/// 4 | quota = "10/fortnight"
///   |         ^^^^^^^^^^^^^^
/// quota "10/fortnight": the unit "fortnight" is unknown; use us, ms, s, min, h, day or week
/// "#);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Limits(pub(super) BTreeMap<String, Limit>);

impl Limits {
    /// Adds a limit. Returns the limit of the same name that it replaces, if there is one.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Name`] if the name is not valid.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{Algorithm, Quota, config::{Limit, Limits}};
    ///
    /// # let text = "api = { algorithm = 'token-bucket', quota = '10/s' }";
    /// # let mut limits: Limits = toml::from_str(text)?;
    /// let login = Limit::try_new(Algorithm::sliding_log(), Quota::per_minute(5))?;
    /// assert_eq!(limits.insert("login", login)?, None);
    /// assert_eq!(limits.iter().count(), 2);
    /// # let _ = &mut limits;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn insert(&mut self, name: &str, limit: Limit) -> Result<Option<Limit>, ConfigError> {
        check_name(name)?;
        Ok(self.0.insert(name.to_owned(), limit))
    }

    /// Returns the limit of this name.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::config::Limits;
    ///
    /// # let text = "api = { algorithm = 'token-bucket', quota = '10/s' }";
    /// # let mut limits: Limits = toml::from_str(text)?;
    /// assert!(limits.get("api").is_some());
    /// assert!(limits.get("login").is_none());
    /// # let _ = &mut limits;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn get(&self, name: &str) -> Option<Limit> {
        self.0.get(name).copied()
    }

    /// Returns the limits with their names, in the order of the names.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::config::Limits;
    ///
    /// # let text = "api = { algorithm = 'token-bucket', quota = '10/s' }";
    /// # let mut limits: Limits = toml::from_str(text)?;
    /// for (name, limit) in limits.iter() {
    ///     println!("{name}: {}", limit.quota()); // api: 10/s
    /// }
    /// # let _ = &mut limits;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn iter(&self) -> impl Iterator<Item = (&str, Limit)> {
        self.into_iter()
    }
}

/// Collects limits with their names; of two limits of one name, the last one. The names are checked
/// when the limiters are made.
impl<N: Into<String>> FromIterator<(N, Limit)> for Limits {
    fn from_iter<I: IntoIterator<Item = (N, Limit)>>(limits: I) -> Self {
        Self(limits.into_iter().map(|(name, limit)| (name.into(), limit)).collect())
    }
}

/// Adds limits, which replace those of the same names. The names are checked when the limiters are
/// made.
impl<N: Into<String>> Extend<(N, Limit)> for Limits {
    fn extend<I: IntoIterator<Item = (N, Limit)>>(&mut self, limits: I) {
        self.0.extend(limits.into_iter().map(|(name, limit)| (name.into(), limit)));
    }
}

/// Returns the limits with their names, in the order of the names.
impl IntoIterator for Limits {
    type Item = (String, Limit);
    type IntoIter = btree_map::IntoIter<String, Limit>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

type Entry<'a> = (&'a String, &'a Limit);

/// Returns the limits with their names, in the order of the names.
impl<'a> IntoIterator for &'a Limits {
    type Item = (&'a str, Limit);
    type IntoIter = iter::Map<btree_map::Iter<'a, String, Limit>, fn(Entry<'a>) -> Self::Item>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter().map(|(name, limit)| (name, *limit))
    }
}

/// One limit of a configuration file: an algorithm and a quota that fits it.
///
/// A pair of both can conflict. A `Limit` cannot, so what is made of it needs no other check.
///
/// The fields are those of [`Limits`]. If the names are known in advance, use a struct, so that a
/// missing limit is an error in the file:
///
/// ```
/// use tower_ratelimit::{MemoryStore, config::Limit};
///
/// #[derive(Debug, serde::Deserialize)]
/// struct Config {
///     api: Limit,
///     login: Limit,
/// }
///
/// let api = r#"{"api": {"algorithm": "token-bucket", "quota": "10/s"}}"#;
/// let error = serde_json::from_str::<Config>(api).unwrap_err();
/// assert_eq!(error.to_string(), "missing field `login` at line 1 column 55");
///
/// let config: Config = serde_json::from_str(r#"{
///     "api": {"algorithm": "token-bucket", "quota": "10/s burst 20"},
///     "login": {"algorithm": "sliding-log", "quota": "5/min"}
/// }"#)?;
/// let store = MemoryStore::new();
/// let api = config.api.limiter("api", store.clone())?;
/// let login = config.login.limiter("login", store)?;
/// # let _ = (api, login);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Limit(limit::Limit);

impl Limit {
    /// Combines an algorithm and a quota.
    ///
    /// # Errors
    ///
    /// If the settings of the algorithm and the quota conflict.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{Algorithm, Quota, config::Limit};
    ///
    /// let limit = Limit::try_new(Algorithm::sliding_log(), Quota::per_minute(5))?;
    /// assert_eq!(limit.quota().limit(), 5);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn try_new(algorithm: Algorithm, quota: Quota) -> Result<Self, QuotaError> {
        limit::Limit::try_new(algorithm, quota).map(Self)
    }

    /// Makes a limiter of the given name.
    ///
    /// # Errors
    ///
    /// If the name is invalid or taken, as for [`Limiter::try_new`].
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{MemoryStore, Quota, config::Limits};
    ///
    /// # let text = "api = { algorithm = 'token-bucket', quota = '10/s' }";
    /// # let mut limits: Limits = toml::from_str(text)?;
    /// let api = limits.get("api").ok_or("no limit")?;
    /// let limiter = api.limiter("api", MemoryStore::new())?;
    /// assert_eq!(limiter.quota(), Quota::per_second(10));
    /// # let _ = &mut limits;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn limiter(&self, name: &str, store: impl Store) -> Result<Limiter, ConfigError> {
        Limiter::try_new(name, store, self.algorithm(), self.quota())
    }

    /// Returns the algorithm.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{Algorithm, config::Limits};
    ///
    /// # let text = "api = { algorithm = 'token-bucket', quota = '10/s' }";
    /// # let mut limits: Limits = toml::from_str(text)?;
    /// let api = limits.get("api").ok_or("no limit")?;
    /// assert_eq!(api.algorithm(), Algorithm::token_bucket());
    /// # let _ = &mut limits;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn algorithm(&self) -> Algorithm {
        self.0.algorithm
    }

    /// Returns the quota.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{Quota, config::Limits};
    ///
    /// # let text = "api = { algorithm = 'token-bucket', quota = '10/s' }";
    /// # let mut limits: Limits = toml::from_str(text)?;
    /// let api = limits.get("api").ok_or("no limit")?;
    /// assert_eq!(api.quota(), Quota::per_second(10));
    /// # let _ = &mut limits;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn quota(&self) -> Quota {
        self.0.quota
    }
}

impl fmt::Debug for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
