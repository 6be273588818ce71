//! `Key`: escaped text of bounded length, which identifies a count in a store, and conversions into
//! keys. Those of HTTP types, and extractors, are in `middleware`.

use std::{
    borrow::Cow,
    fmt,
    hash::{Hash, Hasher},
    io::Write,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    str,
    sync::Arc,
};

use bytes::Bytes;
use hmac_sha256::HMAC;
use percent_encoding::{AsciiSet, CONTROLS, percent_decode, percent_encode};

/// Longer keys are replaced by their hash, so that a client cannot fill the store with a few keys.
const LONGEST: usize = 128;

/// The prefix of the hash of a long key. A hashed value has `==` behind its scope, too, but fewer
/// digits.
const HASHED: &str = "sha256==";

/// The bytes of a hash that a key contains. A client that forges values would have to try about
/// 2^64 of them until two have the same key.
const HASH_BYTES: usize = 16;

/// What is not plain: see [`is_plain`].
const ESCAPED: &AsciiSet = &CONTROLS.add(b' ').add(b'%').add(b'=').add(b'{').add(b'|').add(b'}');

/// The key that a request is charged to, such as a user or an address.
///
/// A key is readable text. Bytes that are not printable ASCII, and the characters `% { } = |`, are
/// written as `%XX`. A key of more than 128 bytes is replaced by `sha256==` and its hash, which no
/// shorter key equals.
///
/// So it is safe if a client chooses the text of a key: the client cannot forge a
/// [scoped](Key::scoped) key, and cannot choose the slot of the key in a Redis Cluster by braces.
/// (By trying many values, a client can still find keys that share a slot.)
///
/// # Examples
///
/// ```
/// use tower_ratelimit::Key;
///
/// assert_eq!(Key::from("alice").as_str(), "alice");
/// assert_eq!(Key::from("a b=c").as_str(), "a%20b%3Dc");
///
/// let ip = Key::from(std::net::IpAddr::from([192, 0, 2, 1]));
/// assert_eq!(ip.as_str(), "ip=192.0.2.1");
/// assert_ne!(ip, Key::from("ip=192.0.2.1"));
/// ```
#[derive(Clone)]
pub struct Key<'a>(Repr<'a>);

/// The bytes of a key, which are all ASCII.
#[derive(Clone)]
enum Repr<'a> {
    Borrowed(&'a [u8]),
    Owned(Text),
}

impl<'a> Key<'a> {
    /// Makes a key that no key of another scope equals: `scope=value`.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::Key;
    ///
    /// let key = Key::scoped("user", "42"); // apart from the key "42"
    /// assert_eq!(key.as_str(), "user=42");
    /// ```
    #[must_use]
    pub fn scoped(scope: &str, value: impl AsRef<[u8]>) -> Key<'static> {
        Scope::new(scope).key(value.as_ref())
    }

    /// Makes a scoped key that does not contain the value, such as an API key: `scope==` and half
    /// of the HMAC-SHA-256 of the value, as 32 hexadecimal digits.
    ///
    /// The keys of a store are readable, in Redis also in the slow log. The value cannot be found
    /// from the key without the `secret`. All replicas need the same secret. With another
    /// secret, all counts begin anew.
    ///
    /// # Panics
    ///
    /// If the secret is empty.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::Key;
    ///
    /// let key = Key::hashed("api-key", "k1", "a long random text");
    /// assert_eq!(key.as_str(), "api-key==071dd2bb1e73fdc6805dfe7e37c0f6d9");
    /// ```
    ///
    /// A shell computes the same digits:
    /// `printf k1 | openssl dgst -sha256 -hmac "$SECRET" -r | cut -c 1-32`.
    #[must_use]
    #[track_caller]
    pub fn hashed(scope: &str, value: impl AsRef<[u8]>, secret: impl AsRef<[u8]>) -> Key<'static> {
        Scope::new(scope).hashed(secret.as_ref()).key(value.as_ref())
    }

    /// Combines two keys into one: `this|other`. A tuple of keys does the same.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::Key;
    ///
    /// let key = Key::from("alice").and(&Key::from("GET"));
    /// assert_ne!(key, Key::from("GET").and(&Key::from("alice")));
    /// ```
    #[must_use]
    pub fn and(self, other: &Key<'_>) -> Key<'static> {
        bounded([self.as_bytes(), b"|", other.as_bytes()].concat())
    }

    /// Returns the key that [`as_str`](Key::as_str) prints as this text, such as a key from a log,
    /// or from a list of denied keys; `None` if no key is printed so.
    ///
    /// For the value of a request, use `From` or the extractor of the layer: they escape it.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{Key, key};
    ///
    /// let key = Key::from_text("header:x-api-key=k%201|ip=192.0.2.1").expect("it is a key");
    /// let address = key::PeerIp.key([192, 0, 2, 1]);
    /// assert_eq!(key, key::header("x-api-key").key("k 1").and(&address));
    /// assert_eq!(Key::from_text("k 1"), None);
    /// ```
    #[must_use]
    pub fn from_text(text: &str) -> Option<Key<'static>> {
        let is_key = text.len() <= LONGEST && is_escaped(text.as_bytes());
        is_key.then(|| Key(Repr::Owned(text.as_bytes().into())))
    }

    /// Returns the key as text.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::Key;
    ///
    /// assert_eq!(Key::from("alice").as_str(), "alice");
    /// ```
    #[must_use]
    #[allow(clippy::missing_panics_doc, reason = "a key is ASCII")]
    pub fn as_str(&self) -> &str {
        str::from_utf8(self.as_bytes()).expect("a key is ASCII")
    }

    #[inline]
    pub(crate) fn as_bytes(&self) -> &[u8] {
        match &self.0 {
            Repr::Borrowed(bytes) => bytes,
            Repr::Owned(text) => text.as_bytes(),
        }
    }

    /// Copies the text if it is borrowed.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::Key;
    ///
    /// fn owned(name: &str) -> Key<'static> {
    ///     Key::from(name).into_owned()
    /// }
    /// assert_eq!(owned("alice"), Key::from("alice"));
    /// ```
    #[must_use]
    #[inline]
    pub fn into_owned(self) -> Key<'static> {
        match self.0 {
            Repr::Borrowed(bytes) => Key(Repr::Owned(bytes.into())),
            Repr::Owned(text) => Key(Repr::Owned(text)),
        }
    }
}

/// A scope, escaped, as the prefix of keys.
#[derive(Clone)]
pub(crate) struct Scope {
    prefix: Box<str>,
    /// Hashes the values, if there is one.
    secret: Option<Box<HMAC>>,
}

impl Scope {
    pub(crate) fn new(scope: &str) -> Self {
        Self { prefix: (escaped(scope.as_bytes()) + "=").into(), secret: None }
    }

    /// Sets that keys contain a hash instead of the value.
    #[track_caller]
    pub(crate) fn hashed(self, secret: &[u8]) -> Self {
        assert!(!secret.is_empty(), "the secret of a hashed key is empty; use 32 random bytes");
        Self { secret: Some(Box::new(HMAC::new(secret))), ..self }
    }

    pub(crate) fn key(&self, value: &[u8]) -> Key<'static> {
        let Some(secret) = &self.secret else { return behind(&self.prefix, value) };
        let mut hmac = (**secret).clone();
        hmac.update(value);
        let hash = hex(&hmac.finalize()[..HASH_BYTES]);
        // A value has no `=`, so no other key begins in this way.
        bounded([&*self.prefix, "=", &hash].concat())
    }

    /// Returns the key of a value that need not be hashed or escaped, as of most requests.
    #[inline(always)]
    pub(crate) fn plain_key(&self, value: &[u8]) -> Option<Key<'static>> {
        if self.secret.is_some() { None } else { plain_behind(&self.prefix, value) }
    }
}

impl fmt::Debug for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let secret = self.secret.as_ref().map(|_| format_args!("Secret(..)"));
        f.debug_struct("Scope").field("prefix", &self.prefix).field("secret", &secret).finish()
    }
}

/// Returns whether a byte needs no escaping: printable ASCII, except `% { } = |`.
// Without a table and branches, so that many bytes are compared at once.
#[inline]
fn is_plain(byte: u8) -> bool {
    let between = byte.wrapping_sub(b'!') <= b'z' - b'!';
    (between & (byte != b'%') & (byte != b'=')) | (byte == b'~')
}

/// Does not stop early: most text is plain to its end, so that branches would cost more.
#[inline(always)]
fn all_plain(bytes: &[u8]) -> bool {
    #[inline]
    fn all<const N: usize>(bytes: &[u8; N]) -> bool {
        bytes.iter().fold(true, |plain, &byte| plain & is_plain(byte))
    }
    // The first and the last bytes overlap, instead of a rest byte by byte.
    let (chunks, _) = bytes.as_chunks::<16>();
    if let Some(last) = bytes.last_chunk::<16>() {
        return chunks.iter().fold(all(last), |plain, chunk| plain & all(chunk));
    }
    if let (Some(first), Some(last)) = (bytes.first_chunk::<8>(), bytes.last_chunk::<8>()) {
        return all(first) & all(last);
    }
    bytes.iter().fold(true, |plain, &byte| plain & is_plain(byte))
}

fn escaped(bytes: &[u8]) -> String {
    percent_encode(bytes, ESCAPED).to_string()
}

/// Returns whether a key can have this text: `%` only in the escapes that `escaped` writes.
fn is_escaped(text: &[u8]) -> bool {
    let mut parts = text.split(|byte| b"=|".contains(byte));
    parts.all(|part| escaped(&Cow::from(percent_decode(part))).as_bytes() == part)
}

/// Makes the key of a value behind a prefix that needs no escaping.
// A call would take a tenth of a check.
#[inline(always)]
fn behind(prefix: &str, value: &[u8]) -> Key<'static> {
    match plain_behind(prefix, value) {
        Some(key) => key,
        None => escaped_behind(prefix, value),
    }
}

#[inline(always)]
fn plain_behind(prefix: &str, value: &[u8]) -> Option<Key<'static>> {
    let is_plain = prefix.len() + value.len() <= LONGEST && all_plain(value);
    is_plain.then(|| Key(Repr::Owned(Text::join(prefix.as_bytes(), value))))
}

#[inline(never)]
fn escaped_behind(prefix: &str, value: &[u8]) -> Key<'static> {
    bounded([prefix, &escaped(value)].concat())
}

/// Makes the key of a short text that needs no escaping, without an allocation for the text.
pub(crate) fn written(text: fmt::Arguments<'_>) -> Key<'static> {
    let mut buffer = [0; LONGEST];
    let mut rest = &mut buffer[..];
    rest.write_fmt(text).expect("the text is short");
    let length = LONGEST - rest.len();
    Key(Repr::Owned(buffer[..length].into()))
}

/// Makes the key of a text that needs no escaping, or of its hash if it is long.
fn bounded(text: impl Into<Vec<u8>>) -> Key<'static> {
    let mut text = text.into();
    if text.len() > LONGEST {
        text = [HASHED, &hex(&hmac_sha256::Hash::hash(&text))].concat().into();
    }
    Key(Repr::Owned(text.into()))
}

impl PartialEq for Key<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.as_bytes() == other.as_bytes()
    }
}

impl Eq for Key<'_> {}

impl Hash for Key<'_> {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        self.as_bytes().hash(hasher);
    }
}

impl fmt::Debug for Key<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Key").field(&self.as_str()).finish()
    }
}

impl fmt::Display for Key<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The longest inline text: with it, a key and its counts fill a cache line.
const SHORT: usize = 30;

/// Text that needs no allocation if it is short, as most keys are.
#[derive(Clone)]
pub(crate) enum Text {
    Short(u8, [u8; SHORT]),
    Long(Box<[u8]>),
}

impl Text {
    /// Joins two texts.
    #[inline(always)]
    pub(crate) fn join(head: &[u8], tail: &[u8]) -> Self {
        let length = head.len() + tail.len();
        if length > SHORT {
            return Self::long(head, tail);
        }
        let mut bytes = [0; SHORT];
        copy(&mut bytes[..head.len()], head);
        copy(&mut bytes[head.len()..length], tail);
        Self::Short(length as u8, bytes)
    }

    #[inline(never)]
    fn long(head: &[u8], tail: &[u8]) -> Self {
        Self::Long([head, tail].concat().into())
    }

    #[inline]
    pub(crate) fn as_bytes(&self) -> &[u8] {
        match self {
            Self::Short(length, bytes) => &bytes[..usize::from(*length)],
            Self::Long(bytes) => bytes,
        }
    }
}

/// Returns the hexadecimal digits of bytes.
pub(crate) fn hex(bytes: &[u8]) -> String {
    let digits = bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]);
    digits.map(|digit| char::from_digit(digit.into(), 16).expect("below 16")).collect()
}

/// Copies without a call if the text is short: by its first and its last bytes, which overlap.
#[inline(always)]
fn copy(to: &mut [u8], from: &[u8]) {
    #[inline]
    fn ends<const N: usize>(to: &mut [u8], from: &[u8]) -> bool {
        let (Some(first), Some(last)) = (from.first_chunk::<N>(), from.last_chunk::<N>()) else {
            return false;
        };
        let end = to.len() - N;
        to[..N].copy_from_slice(first);
        to[end..].copy_from_slice(last);
        true
    }
    if from.len() > 32 || !(ends::<16>(to, from) || ends::<8>(to, from) || ends::<4>(to, from)) {
        to.copy_from_slice(from);
    }
}

/// Returns whether two texts are equal, without a call if they are short.
#[inline]
pub(crate) fn are_same(a: &[u8], b: &[u8]) -> bool {
    #[inline]
    fn ends<const N: usize>(bytes: &[u8]) -> Option<(&[u8; N], &[u8; N])> {
        Some((bytes.first_chunk()?, bytes.last_chunk()?))
    }
    a.len() == b.len()
        && match a.len() {
            8..=16 => ends::<8>(a) == ends::<8>(b),
            17..=32 => ends::<16>(a) == ends::<16>(b),
            _ => a == b,
        }
}

impl From<&[u8]> for Text {
    #[inline]
    fn from(bytes: &[u8]) -> Self {
        Self::join(bytes, &[])
    }
}

impl From<Vec<u8>> for Text {
    fn from(bytes: Vec<u8>) -> Self {
        if bytes.len() > SHORT { Self::Long(bytes.into()) } else { Self::from(&*bytes) }
    }
}

impl<'a> From<&'a str> for Key<'a> {
    #[inline]
    fn from(text: &'a str) -> Self {
        if text.len() <= LONGEST && all_plain(text.as_bytes()) {
            Key(Repr::Borrowed(text.as_bytes()))
        } else {
            Key::from(text.as_bytes())
        }
    }
}

impl From<String> for Key<'static> {
    fn from(text: String) -> Self {
        if all_plain(text.as_bytes()) { bounded(text) } else { Key::from(text.as_bytes()) }
    }
}

impl<'a> From<Cow<'a, str>> for Key<'a> {
    fn from(text: Cow<'a, str>) -> Self {
        match text {
            Cow::Borrowed(text) => text.into(),
            Cow::Owned(text) => text.into(),
        }
    }
}

impl From<&[u8]> for Key<'static> {
    fn from(bytes: &[u8]) -> Self {
        behind("", bytes)
    }
}

impl<const N: usize> From<&[u8; N]> for Key<'static> {
    fn from(bytes: &[u8; N]) -> Self {
        bytes.as_slice().into()
    }
}

/// Text or bytes behind a pointer: the key of what it points to.
macro_rules! from_pointer {
    ($($type:ty => $target:ty),*) => {$(
        impl From<$type> for Key<'static> {
            fn from(value: $type) -> Self {
                Key::from(<$type as AsRef<$target>>::as_ref(&value)).into_owned()
            }
        }
    )*};
}

from_pointer!(Arc<str> => str, Box<str> => str, Vec<u8> => [u8], Bytes => [u8]);

/// Text behind a pointer that is borrowed.
macro_rules! from_borrowed {
    ($($type:ty),*) => {$(
        impl<'a> From<&'a $type> for Key<'a> {
            #[inline]
            fn from(text: &'a $type) -> Self {
                Key::from(&**text)
            }
        }
    )*};
}

from_borrowed!(String, Arc<str>, Box<str>, Cow<'_, str>);

impl From<IpAddr> for Key<'static> {
    /// Makes the same key of an IPv4 address and of the IPv6 address that it is mapped to.
    fn from(address: IpAddr) -> Self {
        written(format_args!("ip={}", address.to_canonical()))
    }
}

impl From<Ipv4Addr> for Key<'static> {
    fn from(address: Ipv4Addr) -> Self {
        IpAddr::V4(address).into()
    }
}

impl From<Ipv6Addr> for Key<'static> {
    /// Makes the same key as of an [`IpAddr`].
    fn from(address: Ipv6Addr) -> Self {
        IpAddr::V6(address).into()
    }
}

/// Values that are printed as plain text.
macro_rules! from_printed {
    ($($type:ty),*) => {$(
        impl From<$type> for Key<'static> {
            fn from(value: $type) -> Self {
                written(format_args!("{value}"))
            }
        }
    )*};
}

from_printed!(u8, u16, u32, u64, u128, usize, i8, i16, i32, i64, i128, isize);
#[cfg(feature = "uuid")]
from_printed!(uuid::Uuid);

impl<'a> From<&'a Key<'_>> for Key<'a> {
    #[inline]
    fn from(key: &'a Key<'_>) -> Self {
        Key(Repr::Borrowed(key.as_bytes()))
    }
}

/// One key of all: `a|b|c`.
macro_rules! from_tuple {
    ($($first:ident $($rest:ident)*),*) => {$(
        impl<'a, $first: Into<Key<'a>>, $($rest: Into<Key<'a>>),*> From<($first, $($rest),*)>
            for Key<'a>
        {
            #[allow(non_snake_case)]
            fn from(($first, $($rest),*): ($first, $($rest),*)) -> Self {
                $first.into()$(.and(&$rest.into()))*
            }
        }
    )*};
}

from_tuple!(A B, A B C, A B C D);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_plain_is_escaped() {
        for byte in 0..=u8::MAX {
            assert_eq!(escaped(&[byte]).len() == 1, is_plain(byte), "{byte}");
        }
    }

    #[test]
    fn the_text_of_every_key_is_read_as_that_key() {
        let long = "a".repeat(200);
        let secret = Key::hashed("api-key", "k1", "secret");
        for key in [
            Key::from(""),
            Key::from("alice"),
            Key::from("a b=c|d{e}%"),
            Key::from("\u{e9}\0").and(&secret),
            Key::from(&*long),
            Key::scoped("a=b", "c"),
        ] {
            assert_eq!(Key::from_text(key.as_str()), Some(key));
        }
        for text in ["a b", "{a}", "%", "%4", "%41", "%2f", "%7b", "\u{e9}", &long] {
            assert_eq!(Key::from_text(text), None, "{text}");
        }
    }
}
