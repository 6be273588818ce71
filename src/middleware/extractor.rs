//! Key extractors, one per file: they extract the key from the head of a request.
//!
//! The key itself, [`Key`], and its escaping are below the middleware, in `keys.rs`.

mod bearer;
mod client_ip;
mod cookie;
mod forwarded;
mod global;
mod header;
mod into_key;
mod networks;
mod peer_ip;
mod query;
#[cfg(feature = "axum")]
mod route;
mod value;

#[cfg(feature = "axum")]
pub use self::route::Route;
pub use self::{
    bearer::Bearer,
    client_ip::{ClientIp, ProxyHeader},
    cookie::Cookie,
    global::Global,
    header::Header,
    into_key::IntoKey,
    peer_ip::{PeerIp, PeerIpFrom},
    query::Query,
};
pub use crate::keys::Key;
use crate::middleware::rejection::RequestError;

/// An extractor of the key from the head of a request (`H`, for HTTP [`http::request::Parts`]).
///
/// The module [`key`](crate::key) contains extractors, and closures are extractors, too. A tuple of
/// up to four extractors combines their keys into one: `(key::PeerIp, key::Route)`.
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
    label = "not a key extractor",
    note = "use an extractor of the module `key`, a tuple of up to four extractors, or a closure \
            from `&{H}` to text, bytes, an integer, an address, a tuple of them, or an `Option` or \
            `Result` of one",
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

/// One key of all: `a|b|c`.
macro_rules! tuple {
    ($($first:ident $($rest:ident)*),*) => {$(
        impl<H, $first: KeyExtractor<H>, $($rest: KeyExtractor<H>),*> KeyExtractor<H>
            for ($first, $($rest),*)
        {
            #[allow(non_snake_case)]
            fn extract(&self, head: &H) -> Result<Key<'static>, RequestError> {
                let ($first, $($rest),*) = self;
                Ok($first.extract(head)?$(.and(&$rest.extract(head)?))*)
            }
        }
    )*};
}

tuple!(A B, A B C, A B C D);
