//! The token of the header `Authorization` as a key.

use super::value::{Place, Value};

/// The bearer token of the header `Authorization` (RFC 6750): `Bearer TOKEN`.
///
/// Without the header, and with another scheme such as `Basic`, the key is missing. A header that
/// occurs twice is an invalid request. The key is `bearer=TOKEN`; keep the token out of the store
/// with [`hashed`](Value::hashed).
///
/// Clients can forge tokens: check them before the limit, or every forged token gets a full quota.
///
/// # Examples
///
/// ```
/// use http::StatusCode;
/// use tower_ratelimit::{
///     Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key, layer::MissingKey,
/// };
///
/// # let quota = Quota::per_second(10);
/// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::token_bucket(), quota);
/// let secret = "the same random text on all replicas"; // from the configuration
/// let layer = RateLimitLayer::new(limiter, key::bearer().hashed(secret))
///     .missing_key(MissingKey::reject_with(StatusCode::UNAUTHORIZED));
/// # let _ = layer;
/// ```
#[must_use]
pub fn bearer() -> Value {
    Value::new("the bearer token in header authorization", "bearer", Place::Bearer)
}
