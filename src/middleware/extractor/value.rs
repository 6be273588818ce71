//! `Value`: a value of requests as a key. `place` reads it.

use std::{collections::HashSet, fmt, sync::Arc};

use http::request::Parts;

use super::{
    Key, KeyExtractor,
    place::{Found, Place},
};
use crate::{keys::Scope, middleware::rejection::RequestError};

/// The extractor of a value that requests contain, such as an API key: made by
/// [`header`](super::header()), [`query`](super::query()), [`cookie`](super::cookie()) or
/// [`bearer`](super::bearer()).
///
/// # Examples
///
/// ```
/// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key};
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let quota = Quota::per_hour(3);
/// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
/// let layer = RateLimitLayer::new(limiter, key::cookie("session"));
/// # let _ = layer;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Value {
    /// As it is named in messages.
    name: Arc<str>,
    scope: Scope,
    place: Place,
}

impl Value {
    pub(super) fn new(name: impl fmt::Display, scope: &str, place: Place) -> Self {
        Self { name: name.to_string().into(), scope: Scope::new(scope), place }
    }

    /// Returns the key of a value, for [`Limiter::peek`](crate::Limiter::peek),
    /// [`reset`](crate::Limiter::reset) and other calls.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::key;
    ///
    /// let key = key::header("x-api-key").key("k1");
    /// # let _ = key;
    /// ```
    #[must_use]
    pub fn key(&self, value: impl AsRef<[u8]>) -> Key<'static> {
        self.scope.key(value.as_ref())
    }

    /// Keeps the value itself out of the store: its key contains a hash by
    /// [`Key::hashed`](crate::Key::hashed). Use it for values that are secrets.
    ///
    /// # Panics
    ///
    /// If the secret is empty.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// let secret = "of the configuration"; // the same in all replicas
    /// let layer = RateLimitLayer::new(limiter, key::bearer().hashed(secret));
    /// # let _ = layer;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    #[track_caller]
    pub fn hashed(mut self, secret: impl AsRef<[u8]>) -> Self {
        self.scope = self.scope.hashed(secret.as_ref());
        self
    }

    /// Returns a closure that finds the requests with one of these values, for
    /// [`forbid`](crate::RateLimitLayer::forbid) and [`exempt`](crate::RateLimitLayer::exempt).
    ///
    /// A request without a value is none of them. A request in which the value occurs more than
    /// once is invalid.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{Quota, RateLimitLayer, key};
    ///
    /// let layer = RateLimitLayer::per_ip(Quota::per_second(10))
    ///     .forbid(key::header("x-api-key").one_of(["k1", "k2"]));
    /// # let _ = layer;
    /// ```
    pub fn one_of<V: AsRef<[u8]>>(
        self,
        values: impl IntoIterator<Item = V>,
    ) -> impl Fn(&Parts) -> Result<bool, RequestError> + Clone + Send + Sync + 'static {
        let keys: HashSet<_> = values.into_iter().map(|value| self.key(value)).collect();
        let keys = Arc::new(keys);
        move |head: &Parts| match self.extract(head) {
            Ok(key) => Ok(keys.contains(&key)),
            Err(RequestError::MissingKey { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

impl Value {
    #[inline(never)]
    fn read(&self, head: &Parts) -> Result<Key<'static>, RequestError> {
        let Self { name, place, .. } = self;
        match place.read(head) {
            Found::One(value) => Ok(self.key(value)),
            Found::Nothing => Err(RequestError::missing_key(format!("{name} is missing or empty"))),
            Found::Several => Err(RequestError::invalid(format!("{name} occurs more than once"))),
        }
    }
}

impl KeyExtractor<Parts> for Value {
    fn extract(&self, head: &Parts) -> Result<Key<'static>, RequestError> {
        if let Some(value) = self.place.only_header(head) {
            return Ok(self.scope.key(value));
        }
        self.read(head)
    }
}
