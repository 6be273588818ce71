//! The value of a header, a query parameter or a cookie, or a bearer token, as a key.

use std::{borrow::Cow, collections::HashSet, sync::Arc};

use http::{
    HeaderName, HeaderValue,
    header::{AUTHORIZATION, COOKIE},
    request::Parts,
};
use percent_encoding::percent_decode;

use super::{Key, KeyExtractor};
use crate::{keys::Scope, middleware::rejection::RequestError};

/// The value of a header, such as an API key.
///
/// An empty value is a missing key, and a header that occurs twice is an invalid request. Spaces
/// around the value are ignored. The key is `header:name=value`, so services that read different
/// headers never share a key.
///
/// Clients can forge headers: use one as a key only if it is authenticated first. Otherwise every
/// forged value gets a full quota. If the value is a secret, such as an API key, keep it out of the
/// store with [`hashed`](Value::hashed).
///
/// # Panics
///
/// If the name is not a valid header name. A [`HeaderName`] always is.
///
/// # Examples
///
/// ```
/// use tower_ratelimit::key;
///
/// let api_key = key::header("x-api-key");
/// # let _ = api_key;
/// ```
#[must_use]
#[track_caller]
pub fn header(name: impl AsRef<str>) -> Value {
    let name = name.as_ref();
    let Ok(name) = HeaderName::try_from(name) else {
        panic!("{name:?} is not a valid header name")
    };
    Value::new(format!("header {name}"), &format!("header:{name}"), Place::Header(name))
}

/// The value of a query parameter, such as `api_key` in `/search?q=rust&api_key=k1`. The name is
/// not encoded.
///
/// An empty value is a missing key, and a parameter that occurs twice is an invalid request. The
/// value is decoded: `%20` and `+` are spaces. The key is `query:name=value`; keep the value out of
/// the store with [`hashed`](Value::hashed).
///
/// Clients can forge parameters: use one as a key only if it is authenticated first.
///
/// # Examples
///
/// ```
/// use tower_ratelimit::key;
///
/// let api_key = key::query("api_key");
/// # let _ = api_key;
/// ```
#[must_use]
pub fn query(name: &str) -> Value {
    Value::new(format!("parameter {name}"), &format!("query:{name}"), Place::Query(name.into()))
}

/// The value of a cookie, such as a session. The name is compared with regard to case.
///
/// An empty value is a missing key. A cookie that occurs twice is an invalid request, because the
/// service may read the other one. Spaces around the name and the value, quotes around the value
/// and percent-encoding make no difference, as services accept a cookie in each of these forms. The
/// key is `cookie:name=value`, of the decoded value without quotes; keep the value out of the store
/// with [`hashed`](Value::hashed).
///
/// Clients can forge cookies: check the session before the limit, or every forged value gets a full
/// quota.
///
/// # Examples
///
/// ```
/// use tower_ratelimit::key;
///
/// let secret = "the same random text on all replicas"; // from the configuration
/// let session = key::cookie("session").hashed(secret);
/// # let _ = session;
/// ```
#[must_use]
pub fn cookie(name: &str) -> Value {
    Value::new(format!("cookie {name}"), &format!("cookie:{name}"), Place::Cookie(name.into()))
}

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
    let name = "the bearer token in header authorization";
    Value::new(name.to_owned(), "bearer", Place::Bearer)
}

/// The extractor of a value that requests contain, such as an API key: made by
/// [`header`](header()), [`query`](query()), [`cookie`](cookie()) or [`bearer`](bearer()).
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
    fn new(name: String, scope: &str, place: Place) -> Self {
        Self { name: name.into(), scope: Scope::new(scope), place }
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

    #[inline(never)]
    fn read(&self, head: &Parts) -> Result<Key<'static>, RequestError> {
        Ok(self.key(self.place.read(&self.name, head)?))
    }
}

impl KeyExtractor<Parts> for Value {
    fn extract(&self, head: &Parts) -> Result<Key<'static>, RequestError> {
        if let Some(value) = self.place.only_header(head)
            && let Some(key) = self.scope.plain_key(value)
        {
            return Ok(key);
        }
        self.read(head)
    }
}

#[derive(Clone, Debug)]
enum Place {
    Header(HeaderName),
    /// A parameter, by its decoded name.
    Query(Box<str>),
    Cookie(Box<str>),
    /// The header `Authorization`.
    Bearer,
}

impl Place {
    /// Returns the value of a header, if no header occurs twice: by one look-up instead of an
    /// iterator. Spaces at its ends, which [`read`](Self::read) trims, are not plain.
    #[inline]
    fn only_header<'a>(&self, head: &'a Parts) -> Option<&'a [u8]> {
        let Self::Header(name) = self else { return None };
        let is_only = head.headers.len() == head.headers.keys_len();
        let value = if is_only { head.headers.get(name)?.as_bytes() } else { b"" };
        (!value.is_empty()).then_some(value)
    }

    /// Returns the value, which must be there once. `what` names it in an error.
    fn read<'a>(&self, what: &str, head: &'a Parts) -> Result<Cow<'a, [u8]>, RequestError> {
        let in_headers = |name| head.headers.get_all(name).iter().map(trimmed);
        match self {
            Self::Header(name) => only(what, in_headers(name).map(Cow::from)),
            Self::Query(name) => only(what, parameters(head, name)),
            Self::Cookie(name) => {
                // HTTP/2 can split the cookies into several headers.
                let pairs = in_headers(&COOKIE).flat_map(|line| line.split(|&byte| byte == b';'));
                only(what, pairs.filter_map(|pair| cookie_value(pair, name.as_bytes())))
            }
            Self::Bearer => {
                let tokens = in_headers(&AUTHORIZATION).map(|value| token(value).unwrap_or(b""));
                only(what, tokens.map(Cow::from))
            }
        }
    }
}

fn only<'a>(
    what: &str,
    mut values: impl Iterator<Item = Cow<'a, [u8]>>,
) -> Result<Cow<'a, [u8]>, RequestError> {
    match (values.next(), values.next()) {
        (_, Some(_)) => Err(RequestError::invalid(format!("{what} occurs more than once"))),
        (Some(value), None) if !value.is_empty() => Ok(value),
        _ => Err(RequestError::missing_key(format!("{what} is missing or empty"))),
    }
}

/// Returns the value of a header without the spaces around it, which belong to no value (RFC 9110).
/// HTTP/1 removes them; HTTP/2 does not, and a server behind a gateway would.
#[inline]
pub(super) fn trimmed(value: &HeaderValue) -> &[u8] {
    value.as_bytes().trim_ascii()
}

/// Returns the value of a cookie, if it has this name. Services accept several forms of one cookie,
/// which must have one key: spaces around the name and the value, quotes, and percent-encoding.
fn cookie_value<'a>(pair: &'a [u8], name: &[u8]) -> Option<Cow<'a, [u8]>> {
    let (found, value) = pair.split_at(pair.iter().position(|&byte| byte == b'=')?);
    let found = found.trim_ascii();
    if found != name && Cow::from(percent_decode(found)) != name {
        return None;
    }
    Some(match Cow::from(percent_decode(value[1..].trim_ascii())) {
        Cow::Borrowed(value) => Cow::Borrowed(unquoted(value)),
        Cow::Owned(value) => Cow::Owned(unquoted(&value).to_vec()),
    })
}

fn unquoted(value: &[u8]) -> &[u8] {
    value.strip_prefix(b"\"").and_then(|rest| rest.strip_suffix(b"\"")).unwrap_or(value)
}

/// Returns the values of a query parameter.
fn parameters<'a>(head: &'a Parts, name: &str) -> impl Iterator<Item = Cow<'a, [u8]>> {
    let pairs = head.uri.query().unwrap_or_default().split('&');
    let pairs = pairs.map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    let named = pairs.filter(move |(found, _)| *decoded(found) == *name.as_bytes());
    named.map(|(_, value)| decoded(value))
}

/// Decodes `application/x-www-form-urlencoded`.
fn decoded(text: &str) -> Cow<'_, [u8]> {
    match text.contains('+') {
        true => percent_decode(text.replace('+', " ").as_bytes()).collect::<Vec<_>>().into(),
        false => percent_decode(text.as_bytes()).into(),
    }
}

/// Returns the credentials behind `Bearer`, in any case, and spaces.
fn token(value: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = value.split_at_checked("bearer".len())?;
    let is_bearer = scheme.eq_ignore_ascii_case(b"bearer")
        && token.first().is_some_and(|byte| b" \t".contains(byte));
    is_bearer.then(|| token.trim_ascii())
}
