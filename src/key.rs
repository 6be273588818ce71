//! Who a request is charged to.

mod client_ip;
mod global;
mod header;
mod peer_ip;
#[cfg(feature = "axum")]
mod route;

use std::{borrow::Cow, fmt, net::IpAddr};

use sha2::{Digest, Sha256};

pub use client_ip::{ClientIp, ProxyHeader};
pub use global::Global;
pub use header::Header;
pub use peer_ip::{PeerIp, PeerIpFrom};
#[cfg(feature = "axum")]
pub use route::Route;

use crate::error::RequestError;

/// Longer keys are replaced by their hash, so that a client cannot fill the store with a few of them.
const LONGEST: usize = 128;

/// Who a request is charged to.
///
/// A key is text that a person can read: of the bytes that it is made from, all but printable ASCII, and
/// the characters `% { } = |`, are written as `%XX`. A key of more than 128 bytes becomes
/// `sha256=` and its hash. So a key may come from a client as it is: whatever it holds, it cannot be
/// taken for a [scoped](Key::scoped) key, and it cannot choose its slot in a Redis Cluster.
///
/// # Examples
///
/// ```
/// use tower_ratelimit::Key;
///
/// assert_eq!(Key::from("alice").as_str(), "alice");
/// assert_eq!(Key::from("a b=c").as_str(), "a%20b%3Dc");
///
/// let ip = Key::from("192.0.2.1".parse::<std::net::IpAddr>().unwrap());
/// assert_eq!(ip.as_str(), "ip=192.0.2.1");
/// assert_ne!(ip, Key::from("ip=192.0.2.1"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Key<'a>(Cow<'a, str>);

impl<'a> Key<'a> {
    /// A key that no key of another scope is equal to: `scope=value`.
    #[must_use]
    pub fn scoped(scope: &str, value: impl AsRef<[u8]>) -> Key<'static> {
        Scope::new(scope).key(value.as_ref())
    }

    /// A key for both together: `this|other`.
    #[must_use]
    pub fn and(self, other: &Key<'_>) -> Key<'static> {
        Key(bounded(Cow::Owned([self.as_str(), "|", other.as_str()].concat())))
    }

    /// The key as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The key with a copy of what it borrows.
    #[must_use]
    pub fn into_owned(self) -> Key<'static> {
        Key(Cow::Owned(self.0.into_owned()))
    }
}

/// A scope, ready to be put in front of values.
#[derive(Clone, Debug)]
struct Scope(Box<str>);

impl Scope {
    fn new(scope: &str) -> Self {
        let mut text = String::with_capacity(scope.len() + 1);
        escape_into(&mut text, scope.as_bytes());
        text.push('=');
        Self(text.into())
    }

    fn key(&self, value: &[u8]) -> Key<'static> {
        let mut text = String::with_capacity(self.0.len() + value.len());
        text.push_str(&self.0);
        escape_into(&mut text, value);
        Key(bounded(Cow::Owned(text)))
    }
}

/// The bytes that stand for themselves.
const PLAIN: [bool; 256] = {
    let mut plain = [false; 256];
    let mut byte = b'!';
    while byte <= b'~' {
        plain[byte as usize] = !matches!(byte, b'%' | b'{' | b'}' | b'=' | b'|');
        byte += 1;
    }
    plain
};

fn is_plain(byte: u8) -> bool {
    PLAIN[usize::from(byte)]
}

/// Most text is plain to its end, so that it would take longer to stop early.
#[inline]
fn all_plain(bytes: &[u8]) -> bool {
    let (chunks, rest) = bytes.as_chunks::<4>();
    let plain = chunks.iter().fold(true, |plain, &[a, b, c, d]| {
        plain & is_plain(a) & is_plain(b) & is_plain(c) & is_plain(d)
    });
    rest.iter().fold(plain, |plain, &byte| plain & is_plain(byte))
}

fn escape_into(text: &mut String, bytes: &[u8]) {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    if let Ok(plain) = std::str::from_utf8(bytes)
        && all_plain(bytes)
    {
        return text.push_str(plain);
    }
    for &byte in bytes {
        if is_plain(byte) {
            text.push(byte.into());
        } else {
            text.push('%');
            text.push(DIGITS[usize::from(byte >> 4)].into());
            text.push(DIGITS[usize::from(byte & 15)].into());
        }
    }
}

fn bounded(text: Cow<'_, str>) -> Cow<'_, str> {
    if text.len() <= LONGEST {
        return text;
    }
    let mut hashed = String::from("sha256=");
    for byte in Sha256::digest(text.as_bytes()) {
        hashed.push_str(&format!("{byte:02x}"));
    }
    Cow::Owned(hashed)
}

impl<'a> From<&'a str> for Key<'a> {
    #[inline]
    fn from(text: &'a str) -> Self {
        if text.len() <= LONGEST && all_plain(text.as_bytes()) {
            Key(Cow::Borrowed(text))
        } else {
            Key::from(text.as_bytes())
        }
    }
}

impl From<&[u8]> for Key<'static> {
    fn from(bytes: &[u8]) -> Self {
        let mut text = String::with_capacity(bytes.len());
        escape_into(&mut text, bytes);
        Key(bounded(Cow::Owned(text)))
    }
}

impl<'a> From<&'a String> for Key<'a> {
    #[inline]
    fn from(text: &'a String) -> Self {
        Key::from(text.as_str())
    }
}

impl From<String> for Key<'static> {
    fn from(text: String) -> Self {
        match Key::from(text.as_str()).0 {
            Cow::Borrowed(_) => Key(Cow::Owned(text)),
            Cow::Owned(escaped) => Key(Cow::Owned(escaped)),
        }
    }
}

impl From<IpAddr> for Key<'static> {
    /// An IPv4 address that is written as an IPv6 address is the IPv4 address.
    fn from(address: IpAddr) -> Self {
        Key(Cow::Owned(format!("ip={}", address.to_canonical())))
    }
}

impl From<u64> for Key<'static> {
    fn from(number: u64) -> Self {
        Key(Cow::Owned(number.to_string()))
    }
}

impl<'a> From<&'a Key<'_>> for Key<'a> {
    fn from(key: &'a Key<'_>) -> Self {
        Key(Cow::Borrowed(key.as_str()))
    }
}

impl fmt::Display for Key<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Finds the key of a request, from its head (`H`, for HTTP [`http::request::Parts`]).
///
/// The module [`key`](crate::key) has some; closures are extractors too. A pair of extractors makes one
/// key of both: `(key::PeerIp, key::Route)`.
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
///     let limiter = Limiter::new(MemoryStore::new(), Algorithm::token_bucket(), Quota::per_second(10));
///     let user = |head: &Parts| head.extensions.get::<UserId>().map(|user| user.0);
///     RateLimitLayer::new(limiter, (user, key::PeerIp))
/// }
/// # per_user_and_address();
/// ```
pub trait KeyExtractor<H>: Send + Sync + 'static {
    /// Finds the key.
    ///
    /// # Errors
    ///
    /// [`RequestError::MissingKey`] if the request has none, and the other errors if it is wrong, or the
    /// service is set up wrong.
    fn extract(&self, head: &H) -> Result<Key<'static>, RequestError>;
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

impl<H, A: KeyExtractor<H>, B: KeyExtractor<H>> KeyExtractor<H> for (A, B) {
    fn extract(&self, head: &H) -> Result<Key<'static>, RequestError> {
        Ok(self.0.extract(head)?.and(&self.1.extract(head)?))
    }
}

fn missing() -> RequestError {
    RequestError::missing_key("the request does not say who it is from")
}

/// What a closure may return as a key; `None` and empty text are a missing key.
pub trait IntoKey {
    /// Converts into a key.
    ///
    /// # Errors
    ///
    /// Those of [`KeyExtractor::extract`].
    fn into_key(self) -> Result<Key<'static>, RequestError>;
}

impl IntoKey for Key<'static> {
    fn into_key(self) -> Result<Key<'static>, RequestError> {
        if self.as_str().is_empty() { Err(missing()) } else { Ok(self) }
    }
}

macro_rules! into_key {
    ($($type:ty),*) => {$(
        impl IntoKey for $type {
            fn into_key(self) -> Result<Key<'static>, RequestError> {
                Key::from(self).into_key()
            }
        }
    )*};
}

into_key!(String, &'static str, IpAddr, u64);

impl<T: IntoKey> IntoKey for Option<T> {
    fn into_key(self) -> Result<Key<'static>, RequestError> {
        self.ok_or_else(missing)?.into_key()
    }
}

impl<T: IntoKey> IntoKey for Result<T, RequestError> {
    fn into_key(self) -> Result<Key<'static>, RequestError> {
        self?.into_key()
    }
}
