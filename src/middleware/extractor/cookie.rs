//! The value of a cookie as a key.

use http::{header::COOKIE, request::Parts};

use super::{
    Key, KeyExtractor,
    value::{ValueKey, value_methods},
};
use crate::middleware::rejection::RequestError;

/// The value of a cookie, such as a session.
///
/// An empty value is a missing key. A cookie that occurs twice is an invalid request, because the
/// service may read the other one. The value is compared as the client sends it, with quotes and
/// escapes. The key is `cookie:name=value`; keep the value out of the store with
/// [`hashed`](Cookie::hashed).
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
/// let session = key::Cookie::new("session").hashed(secret);
/// # let _ = session;
/// ```
#[derive(Clone, Debug)]
pub struct Cookie {
    name: Box<str>,
    value: ValueKey,
}

impl Cookie {
    /// Uses the value of the cookie of this name, in this case.
    #[must_use]
    pub fn new(name: &str) -> Self {
        let value = ValueKey::new(format_args!("cookie {name}"), &format!("cookie:{name}"));
        Self { name: name.into(), value }
    }
}

value_methods!(Cookie, "key::Cookie::new(\"session\")");

impl KeyExtractor<Parts> for Cookie {
    fn extract(&self, head: &Parts) -> Result<Key<'static>, RequestError> {
        // HTTP/2 can split the cookies into several headers.
        let lines = head.headers.get_all(COOKIE).iter();
        let pairs = lines.flat_map(|line| line.as_bytes().split(|&byte| byte == b';'));
        self.value.key_of(pairs.filter_map(|pair| {
            let value = pair.trim_ascii().strip_prefix(self.name.as_bytes())?;
            value.strip_prefix(b"=")
        }))
    }
}
