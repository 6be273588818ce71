//! Key extractors: which client a request is counted for.
//!
//! | key | extractor |
//! |---|---|
//! | the address of the peer, or of the client behind proxies | [`PeerIp`], [`ClientIp`] |
//! | an API key or another header, a bearer token, a cookie | [`header()`], [`bearer()`], [`cookie()`] |
//! | a parameter of the query | [`query()`] |
//! | the route of axum, with the feature `axum` | `Route` |
//! | all requests together | [`Global`](struct@Global) |
//! | several of them, combined into one key | a tuple: `(key::PeerIp, key::Global)` |
//! | the first of two that a request has | [`or`](KeyExtractor::or): `key::header("x-api-key").or(key::PeerIp)` |
//! | anything else, such as the user of the session | a closure over the head of the request |
//!
//! Each extractor has a method `key`, which makes the [`Key`] that a layer counts for a client: use
//! it to peek, reset or block one client. [The page on keys](crate::guide::keys) compares the
//! extractors, and says which of them clients can choose.
//!
//! # Examples
//!
//! ```
//! use std::net::IpAddr;
//! use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let quota = Quota::per_second(10);
//! let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::token_bucket(), quota);
//! let layer = RateLimitLayer::new(&limiter, key::PeerIp);
//! # let _ = layer;
//!
//! let address: IpAddr = "198.51.100.7".parse()?;
//! limiter.reset(key::PeerIp.key(address)).await?;
//! # Ok(())
//! # }
//! ```
// `value.rs` reads the values of requests. The key itself, and its
// escaping, are below the middleware, in `keys.rs`.

mod client_ip;
mod forwarded;
mod global;
mod into_key;
#[cfg(feature = "axum")]
mod route;
mod value;

#[cfg(feature = "axum")]
pub use self::route::Route;
pub(crate) use self::{client_ip::watched, into_key::IntoKey};
pub use self::{
    client_ip::{ClientIp, PeerIp, ProxyHeader},
    global::Global,
    value::{Value, bearer, cookie, header, query},
};
pub use crate::keys::Key;
use crate::middleware::rejection::RequestError;

/// An extractor of the key from the head of a request (`H`, for HTTP [`http::request::Parts`]).
///
/// The module [`key`](crate::key) contains extractors. A tuple of up to four extractors combines
/// their keys into one: `(key::PeerIp, key::Route)`.
///
/// A closure over the head is an extractor, too. It returns a [`Key`], text, bytes, an integer, an
/// address, a [`HeaderValue`](http::HeaderValue), a `Uuid` (feature `uuid`), a tuple of up to four
/// of them, or an `Option` or `Result<_, RequestError>` of one. With `None` or empty text, the key
/// is missing. A closure converts other types into one of these.
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
///     let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::token_bucket(), quota);
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
    ///
    /// # Examples
    ///
    /// ```
    /// use http::request::Parts;
    /// use tower_ratelimit::{
    ///     Key,
    ///     key::{self, KeyExtractor},
    ///     layer::RequestError,
    /// };
    ///
    /// fn user(head: &Parts) -> Result<Key<'static>, RequestError> {
    ///     key::header("x-api-key").or(key::PeerIp).extract(head)
    /// }
    /// # let _ = user;
    /// ```
    fn extract(&self, head: &H) -> Result<Key<'static>, RequestError>;

    /// Adds another extractor, for the requests in which this key is missing: the API key, or else
    /// the address.
    ///
    /// A missing header, an empty one, and a closure that returns `None` are a missing key. A
    /// request whose first key is invalid, such as a header that occurs twice, is rejected as
    /// without the second extractor.
    ///
    /// Each key stays as its own extractor makes it, with its scope: `header:x-api-key=k1` or
    /// `ip=192.0.2.1`. So no value of a header equals an address.
    ///
    /// Every client can leave its first key out, and then has both quotas. A client that can also
    /// invent one gets a full quota for each: check it before the limit.
    ///
    /// # Examples
    ///
    /// ```
    /// use http::request::Parts;
    /// use tower_ratelimit::{
    ///     Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer,
    ///     key::{self, KeyExtractor},
    /// };
    ///
    /// #[derive(Clone)]
    /// struct UserId(u64);
    ///
    /// # let quota = Quota::per_second(10);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::token_bucket(), quota);
    /// let by_api_key = key::header("x-api-key").or(key::PeerIp);
    /// let user = |head: &Parts| head.extensions.get::<UserId>().map(|user| user.0);
    /// let by_user = user.or(key::PeerIp);
    /// let layers = [
    ///     RateLimitLayer::new(&limiter, by_api_key),
    ///     RateLimitLayer::new(&limiter, by_user),
    /// ];
    /// # let _ = layers;
    /// ```
    #[must_use]
    fn or(self, other: impl KeyExtractor<H>) -> impl KeyExtractor<H>
    where
        Self: Sized,
    {
        Or(self, other)
    }

    /// Returns whether the extractor can be mistaken in the client.
    #[doc(hidden)]
    fn can_mistake(&self) -> bool {
        false
    }

    /// Returns the mistake in the set-up of the service because of which many requests have the key
    /// of this one.
    #[doc(hidden)]
    fn mistake(&self, _head: &H) -> Option<String> {
        None
    }
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

            #[allow(non_snake_case)]
            fn can_mistake(&self) -> bool {
                let ($first, $($rest),*) = self;
                $first.can_mistake()$( || $rest.can_mistake())*
            }

            #[allow(non_snake_case)]
            fn mistake(&self, head: &H) -> Option<String> {
                let ($first, $($rest),*) = self;
                $first.mistake(head)$(.or_else(|| $rest.mistake(head)))*
            }
        }
    )*};
}

tuple!(A B, A B C, A B C D);

/// The key of the first extractor, or of the second one if the first key is missing.
struct Or<A, B>(A, B);

impl<H, A: KeyExtractor<H>, B: KeyExtractor<H>> KeyExtractor<H> for Or<A, B> {
    fn extract(&self, head: &H) -> Result<Key<'static>, RequestError> {
        match self.0.extract(head) {
            Err(RequestError::MissingKey { .. }) => self.1.extract(head),
            result => result,
        }
    }

    fn can_mistake(&self) -> bool {
        self.0.can_mistake() || self.1.can_mistake()
    }

    fn mistake(&self, head: &H) -> Option<String> {
        match self.0.extract(head) {
            Err(RequestError::MissingKey { .. }) => self.1.mistake(head),
            _ => self.0.mistake(head),
        }
    }
}
