//! The value of a cookie as a key.

use super::value::{Place, Value};

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
    let scope = format!("cookie:{name}");
    Value::new(format_args!("cookie {name}"), &scope, Place::Cookie(name.into()))
}
