//! The value of a header as a key.

use http::{HeaderName, request::Parts};

use super::{
    Key, KeyExtractor,
    value::{ValueKey, value_methods},
};
use crate::middleware::rejection::RequestError;

/// The value of a header, such as an API key.
///
/// An empty value is a missing key, and a header that occurs twice is an invalid request. The key
/// is `header:name=value`, so services that read different headers never share a key.
///
/// Clients can forge headers: use one as a key only if it is authenticated first. Otherwise every
/// forged value gets a full quota. If the value is a secret, such as an API key, keep it out of the
/// store with [`hashed`](Header::hashed).
///
/// # Examples
///
/// ```
/// use tower_ratelimit::key;
///
/// let api_key = key::Header::new("x-api-key");
/// # let _ = api_key;
/// ```
#[derive(Clone, Debug)]
pub struct Header {
    name: HeaderName,
    value: ValueKey,
}

impl Header {
    /// Uses the value of the header of this name.
    ///
    /// # Panics
    ///
    /// If the name is not a valid header name. For names that are not literals, use
    /// [`from_name`](Header::from_name).
    #[must_use]
    #[track_caller]
    pub fn new(name: &str) -> Self {
        match HeaderName::try_from(name) {
            Ok(name) => Self::from_name(name),
            Err(_) => panic!("{name:?} is not a valid header name"),
        }
    }

    /// Uses the value of the header of this name.
    #[must_use]
    pub fn from_name(name: HeaderName) -> Self {
        let value = ValueKey::new(format_args!("header {name}"), &format!("header:{name}"));
        Self { name, value }
    }
}

value_methods!(Header, "key::Header::new(\"x-api-key\")");

impl KeyExtractor<Parts> for Header {
    fn extract(&self, head: &Parts) -> Result<Key<'static>, RequestError> {
        self.value.key_of(head.headers.get_all(&self.name).iter())
    }
}
