//! Key extractors, one per file: they extract the key from the head of a request.
//!
//! The key itself, [`Key`], and its escaping are below the middleware, in `keys.rs`.

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
pub use crate::keys::Key;
use crate::middleware::rejection::RequestError;

/// An extractor of the key from the head of a request (`H`, for HTTP [`http::request::Parts`]).
///
/// The module [`key`](crate::key) contains extractors, and closures are extractors, too. A pair of
/// extractors combines both keys into one: `(key::PeerIp, key::Route)`.
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
///     let quota = Quota::per_second(10);
///     let limiter = Limiter::new(MemoryStore::new(), Algorithm::token_bucket(), quota);
///     let user = |head: &Parts| head.extensions.get::<UserId>().map(|user| user.0);
///     RateLimitLayer::new(limiter, (user, key::PeerIp))
/// }
/// # per_user_and_address();
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not extract a key from the head `{H}`",
    note = "use an extractor of the module `key`, a pair of extractors, or a closure from `&{H}` \
            to `Key`, `String`, `&'static str`, `IpAddr`, `u64`, or an `Option` or `Result` of \
            them",
    note = "write the type of the closure's parameter: `|head: &{H}| ..`"
)]
pub trait KeyExtractor<H>: Send + Sync + 'static {
    /// Extracts the key.
    ///
    /// # Errors
    ///
    /// [`RequestError::MissingKey`] if the request has no key, and the other errors if the request
    /// is invalid or the service is misconfigured.
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
    RequestError::missing_key("the request has no rate limit key")
}

/// A type that a closure can return as a key; `None` or empty text means that the key is missing.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be used as a key",
    note = "return a `Key`, `String`, `&'static str`, `IpAddr`, `u64`, or an `Option` or `Result` \
            of them; `Key::from` converts other text and bytes"
)]
pub trait IntoKey {
    /// Converts the value into a key.
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
