//! Key extractors: where the key of a request comes from.

mod client_ip;
mod forwarded;
mod global;
mod header;
mod peer_ip;
#[cfg(feature = "axum")]
mod route;

use std::net::IpAddr;

#[cfg(feature = "axum")]
pub use self::route::Route;
pub use self::{
    client_ip::{ClientIp, ProxyHeader},
    global::Global,
    header::Header,
    peer_ip::{PeerIp, PeerIpFrom},
};
use crate::error::RequestError;
pub use crate::keys::Key;

/// Finds the key of a request, from its head (`H`, for HTTP [`http::request::Parts`]).
///
/// The module [`key`](crate::key) has some; closures are extractors too. A pair of extractors makes one
/// key of both: `(key::PeerIp, key::Route)`.
///
/// # Examples
///
/// ```
/// use http::request::Parts;
/// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key};
///
/// #[derive(Clone)]
/// struct UserId(u64);
///
/// fn per_user_and_address() -> RateLimitLayer {
///     let limiter = Limiter::new(MemoryStore::new(), Algorithm::token_bucket(), Quota::per_second(10));
///     let user = |head: &Parts| head.extensions.get::<UserId>().map(|user| user.0);
///     RateLimitLayer::new(limiter, (user, key::PeerIp))
/// }
/// # per_user_and_address();
/// ```
pub trait KeyExtractor<H>: Send + Sync + 'static {
    /// Finds the key.
    ///
    /// # Errors
    ///
    /// [`RequestError::MissingKey`] if the request has none, and the other errors if it is wrong, or the
    /// service is set up wrong.
    fn extract(&self, head: &H) -> Result<Key<'static>, RequestError>;
}

impl<H, F, T> KeyExtractor<H> for F
where
    F: Fn(&H) -> T + Send + Sync + 'static,
    T: IntoKey,
{
    fn extract(&self, head: &H) -> Result<Key<'static>, RequestError> {
        self(head).into_key()
    }
}

impl<H, A: KeyExtractor<H>, B: KeyExtractor<H>> KeyExtractor<H> for (A, B) {
    fn extract(&self, head: &H) -> Result<Key<'static>, RequestError> {
        Ok(self.0.extract(head)?.and(&self.1.extract(head)?))
    }
}

fn missing() -> RequestError {
    RequestError::missing_key("the request does not say who it is from")
}

/// What a closure may return as a key; `None` and empty text are a missing key.
pub trait IntoKey {
    /// Converts into a key.
    ///
    /// # Errors
    ///
    /// Those of [`KeyExtractor::extract`].
    fn into_key(self) -> Result<Key<'static>, RequestError>;
}

impl IntoKey for Key<'static> {
    fn into_key(self) -> Result<Key<'static>, RequestError> {
        if self.as_bytes().is_empty() { Err(missing()) } else { Ok(self) }
    }
}

macro_rules! into_key {
    ($($type:ty),*) => {$(
        impl IntoKey for $type {
            fn into_key(self) -> Result<Key<'static>, RequestError> {
                Key::from(self).into_key()
            }
        }
    )*};
}

into_key!(String, &'static str, IpAddr, u64);

impl<T: IntoKey> IntoKey for Option<T> {
    fn into_key(self) -> Result<Key<'static>, RequestError> {
        self.ok_or_else(missing)?.into_key()
    }
}

impl<T: IntoKey> IntoKey for Result<T, RequestError> {
    fn into_key(self) -> Result<Key<'static>, RequestError> {
        self?.into_key()
    }
}
