//! The token of the header `Authorization` as a key.

use http::{header::AUTHORIZATION, request::Parts};

use super::{
    Key, KeyExtractor,
    value::{ValueKey, value_methods},
};
use crate::middleware::rejection::RequestError;

const NAME: &str = "the bearer token in header authorization";

/// The bearer token of the header `Authorization` (RFC 6750): `Bearer TOKEN`.
///
/// Without the header, and with another scheme such as `Basic`, the key is missing. A header that
/// occurs twice is an invalid request. The key is `bearer=TOKEN`; keep the token out of the store
/// with [`hashed`](Bearer::hashed).
///
/// Clients can forge tokens: check them before the limit, or every forged token gets a full quota.
///
/// # Examples
///
/// ```
/// use http::StatusCode;
/// use tower_ratelimit::{
///     Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, http::MissingKey, key,
/// };
///
/// # let quota = Quota::per_second(10);
/// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::token_bucket(), quota);
/// let secret = "the same random text on all replicas"; // from the configuration
/// let layer = RateLimitLayer::new(limiter, key::Bearer::new().hashed(secret))
///     .missing_key(MissingKey::reject_with(StatusCode::UNAUTHORIZED));
/// # let _ = layer;
/// ```
#[derive(Clone, Debug)]
pub struct Bearer {
    value: ValueKey,
}

impl Bearer {
    /// Uses the bearer token.
    #[must_use]
    pub fn new() -> Self {
        Self { value: ValueKey::new(NAME, "bearer") }
    }
}

impl Default for Bearer {
    fn default() -> Self {
        Self::new()
    }
}

value_methods!(Bearer, "key::Bearer::new()");

impl KeyExtractor<Parts> for Bearer {
    fn extract(&self, head: &Parts) -> Result<Key<'static>, RequestError> {
        let values = head.headers.get_all(AUTHORIZATION).iter();
        self.value.key_of(values.map(|value| token(value.as_bytes()).unwrap_or_default()))
    }
}

/// Returns the credentials behind `Bearer`, in any case, and spaces.
fn token(value: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = value.split_at_checked("bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| token.trim_ascii())
}
