//! The part that all extractors of a value in the request have in common: the scope of their keys,
//! and the errors of a value that is missing or occurs twice.

use std::{collections::HashSet, fmt, sync::Arc};

use super::Key;
use crate::{keys::Scope, middleware::rejection::RequestError};

/// A value of requests, such as a header, as it is named in messages.
#[derive(Clone, Debug)]
pub(super) struct ValueKey {
    name: Arc<str>,
    scope: Scope,
}

impl ValueKey {
    pub(super) fn new(name: impl fmt::Display, scope: &str) -> Self {
        Self { name: name.to_string().into(), scope: Scope::new(scope) }
    }

    #[track_caller]
    pub(super) fn hashed(self, secret: &[u8]) -> Self {
        Self { scope: self.scope.hashed(secret), ..self }
    }

    pub(super) fn key(&self, value: &[u8]) -> Key<'static> {
        self.scope.key(value)
    }

    /// Makes the key of the only value.
    pub(super) fn key_of<V: AsRef<[u8]>>(
        &self,
        mut values: impl Iterator<Item = V>,
    ) -> Result<Key<'static>, RequestError> {
        let Self { name, .. } = self;
        let value = values.next();
        if values.next().is_some() {
            return Err(RequestError::invalid(format!("{name} occurs more than once")));
        }
        match value.as_ref().map(AsRef::as_ref).filter(|value| !value.is_empty()) {
            Some(value) => Ok(self.key(value)),
            None => Err(RequestError::missing_key(format!("{name} is missing or empty"))),
        }
    }

    /// Returns the keys of a list of values.
    pub(super) fn keys<V: AsRef<[u8]>>(
        &self,
        values: impl IntoIterator<Item = V>,
    ) -> HashSet<Key<'static>> {
        values.into_iter().map(|value| self.key(value.as_ref())).collect()
    }
}

/// The methods that all extractors of a value have, whose field `value` is a [`ValueKey`].
macro_rules! value_methods {
    ($type:ident, $example:literal) => {
        impl $type {
            /// Returns the key of a value, for [`Limiter::peek`](crate::Limiter::peek),
            /// [`reset`](crate::Limiter::reset) and other calls.
            ///
            /// # Examples
            ///
            /// ```
            /// use tower_ratelimit::key;
            ///
            #[doc = concat!("let key = ", $example, ".key(\"k1\");")]
            /// # let _ = key;
            /// ```
            #[must_use]
            pub fn key(&self, value: impl AsRef<[u8]>) -> Key<'static> {
                self.value.key(value.as_ref())
            }

            /// Keeps the value itself out of the store: its key contains a hash by
            /// [`Key::hashed`](crate::Key::hashed). Use it for values that are secrets.
            ///
            /// # Panics
            ///
            /// If the secret is empty.
            #[must_use]
            #[track_caller]
            pub fn hashed(mut self, secret: impl AsRef<[u8]>) -> Self {
                self.value = self.value.hashed(secret.as_ref());
                self
            }

            /// Returns a closure that finds the requests with one of these values, for
            /// [`forbid`](crate::RateLimitLayer::forbid) and
            /// [`exempt`](crate::RateLimitLayer::exempt).
            ///
            /// A request without a value is none of them. A request in which the value occurs
            /// more than once is invalid.
            ///
            /// # Examples
            ///
            /// ```
            /// use tower_ratelimit::{Quota, RateLimitLayer, key};
            ///
            /// let layer = RateLimitLayer::per_ip(Quota::per_second(10))
            #[doc = concat!("    .forbid(", $example, ".one_of([\"k1\", \"k2\"]));")]
            /// # let _ = layer;
            /// ```
            pub fn one_of<V: AsRef<[u8]>>(
                self,
                values: impl IntoIterator<Item = V>,
            ) -> impl Fn(&Parts) -> Result<bool, RequestError> + Clone + Send + Sync + 'static {
                let keys = std::sync::Arc::new(self.value.keys(values));
                move |head: &Parts| match self.extract(head) {
                    Ok(key) => Ok(keys.contains(&key)),
                    Err(RequestError::MissingKey(_)) => Ok(false),
                    Err(error) => Err(error),
                }
            }
        }
    };
}

pub(super) use value_methods;
