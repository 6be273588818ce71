//! The value of a query parameter as a key.

use std::borrow::Cow;

use http::request::Parts;
use percent_encoding::percent_decode;

use super::{
    Key, KeyExtractor,
    value::{ValueKey, value_methods},
};
use crate::middleware::rejection::RequestError;

/// The value of a query parameter, such as `api_key` in `/search?q=rust&api_key=k1`.
///
/// An empty value is a missing key, and a parameter that occurs twice is an invalid request. The
/// value is decoded: `%20` and `+` are spaces. The key is `query:name=value`; keep the value out of
/// the store with [`hashed`](Query::hashed).
///
/// Clients can forge parameters: use one as a key only if it is authenticated first.
///
/// # Examples
///
/// ```
/// use tower_ratelimit::key;
///
/// let api_key = key::Query::new("api_key");
/// # let _ = api_key;
/// ```
#[derive(Clone, Debug)]
pub struct Query {
    name: Box<str>,
    value: ValueKey,
}

impl Query {
    /// Uses the value of the parameter of this name, which is not encoded.
    #[must_use]
    pub fn new(name: &str) -> Self {
        let value = ValueKey::new(format_args!("parameter {name}"), &format!("query:{name}"));
        Self { name: name.into(), value }
    }
}

value_methods!(Query, "key::Query::new(\"api_key\")");

impl KeyExtractor<Parts> for Query {
    fn extract(&self, head: &Parts) -> Result<Key<'static>, RequestError> {
        let pairs = head.uri.query().unwrap_or_default().split('&');
        let pairs = pairs.map(|pair| pair.split_once('=').unwrap_or((pair, "")));
        let named = pairs.filter(|(name, _)| *decoded(name) == *self.name.as_bytes());
        self.value.key_of(named.map(|(_, value)| decoded(value)))
    }
}

/// Decodes `application/x-www-form-urlencoded`.
fn decoded(text: &str) -> Cow<'_, [u8]> {
    match text.contains('+') {
        true => percent_decode(text.replace('+', " ").as_bytes()).collect::<Vec<_>>().into(),
        false => percent_decode(text.as_bytes()).into(),
    }
}
