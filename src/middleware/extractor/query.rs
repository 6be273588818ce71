//! The value of a query parameter as a key.

use super::value::{Place, Value};

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
    let scope = format!("query:{name}");
    Value::new(format_args!("parameter {name}"), &scope, Place::Query(name.into()))
}
