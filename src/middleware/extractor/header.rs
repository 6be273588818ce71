//! The value of a header as a key.

use http::{HeaderName, request::Parts};

use super::{Key, KeyExtractor};
use crate::{error::RequestError, keys::Scope};

/// The value of a header field, such as an API key.
///
/// An empty value is a missing key, and a field that comes twice is an invalid request. Two services
/// that read different fields never share a key: it is `header:name=value`.
///
/// The value is the key as it is: limit by it only where something else checks that it is real, or
/// clients get a fresh quota with every value that they make up.
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
    scope: Scope,
}

impl Header {
    /// Takes the value of the field of this name.
    ///
    /// # Panics
    ///
    /// If the name is not a valid field name. For names that are not literals there is
    /// [`from_name`](Header::from_name).
    #[must_use]
    #[track_caller]
    pub fn new(name: &str) -> Self {
        match HeaderName::try_from(name) {
            Ok(name) => Self::from_name(name),
            Err(_) => panic!("{name:?} is not the name of a header field"),
        }
    }

    /// Takes the value of the field of this name.
    #[must_use]
    pub fn from_name(name: HeaderName) -> Self {
        let scope = Scope::new(&format!("header:{name}"));
        Self { name, scope }
    }
}

impl KeyExtractor<Parts> for Header {
    fn extract(&self, head: &Parts) -> Result<Key<'static>, RequestError> {
        let mut values = head.headers.get_all(&self.name).iter();
        let value = values.next().filter(|value| !value.is_empty()).ok_or_else(|| {
            RequestError::missing_key(format!("the field {} is missing or empty", self.name))
        })?;
        if values.next().is_some() {
            return Err(RequestError::invalid(format!("the field {} comes twice", self.name)));
        }
        Ok(self.scope.key(value.as_bytes()))
    }
}
