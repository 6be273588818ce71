//! `Or`: another key for the requests that have none.

use super::{Key, KeyExtractor, Value};
use crate::middleware::rejection::RequestError;

/// The key of the first extractor, or of the second one for requests in which the first key is
/// missing: the API key, or else the address.
///
/// A missing header, an empty one, and a closure that returns `None` are a missing key. A request
/// whose first key is invalid, such as a header that occurs twice, is rejected as without the
/// second extractor.
///
/// Each key stays as its own extractor makes it, with its scope: `header:x-api-key=k1` or
/// `ip=192.0.2.1`. So no value of a header equals an address.
///
/// Every client can leave its first key out, and then has both quotas. A client that can also
/// invent one gets a full quota for each: check it before the limit.
///
/// # Examples
///
/// [`Value::or`] makes it for headers, tokens, cookies and parameters:
///
/// ```
/// use http::request::Parts;
/// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key};
///
/// #[derive(Clone)]
/// struct UserId(u64);
///
/// # let quota = Quota::per_second(10);
/// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::token_bucket(), quota);
/// let by_api_key = key::header("x-api-key").or(key::PeerIp);
/// let user = |head: &Parts| head.extensions.get::<UserId>().map(|user| user.0);
/// let by_user = key::Or(user, key::PeerIp);
/// let layers = [
///     RateLimitLayer::new(&limiter, by_api_key),
///     RateLimitLayer::new(&limiter, by_user),
/// ];
/// # let _ = layers;
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Or<A, B>(pub A, pub B);

impl<A, B> Or<A, B> {
    /// Adds a further extractor, for requests that have neither key.
    #[must_use]
    pub fn or<C>(self, other: C) -> Or<Self, C> {
        Or(self, other)
    }
}

impl Value {
    /// Takes the key of another extractor if the value is missing: see [`Or`].
    #[must_use]
    pub fn or<B>(self, other: B) -> Or<Self, B> {
        Or(self, other)
    }
}

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
