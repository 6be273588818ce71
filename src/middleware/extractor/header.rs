//! The value of a header as a key.

use http::HeaderName;

use super::value::{Place, Value};

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
    let (text, scope) = (format!("header {name}"), format!("header:{name}"));
    Value::new(text, &scope, Place::Header(name))
}
