//! The types that a closure can return as a key, and the conversions of HTTP types into keys.

use std::{
    borrow::Cow,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

use bytes::Bytes;
use http::HeaderValue;

use super::{Key, value::trimmed};
use crate::middleware::rejection::RequestError;

/// A type that a closure can return as a key. It is not exported: a closure converts its own types
/// into one of these. `None` or empty text means that the key is missing.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be used as a key",
    label = "not a key",
    note = "return a `Key`, text, bytes, an integer, an `IpAddr`, a `HeaderValue`, a tuple of up \
            to four of them, or an `Option` or `Result<_, RequestError>` of one; a `Uuid` needs \
            the feature `uuid`",
    note = "the key must own its text: return `head.headers.get(..).cloned()`, or a `String`"
)]
pub trait IntoKey {
    /// Converts the value into a key.
    ///
    /// # Errors
    ///
    /// Those of [`KeyExtractor::extract`](super::KeyExtractor::extract).
    fn into_key(self) -> Result<Key<'static>, RequestError>;
}

fn missing() -> RequestError {
    RequestError::missing_key("the request does not identify its client")
}

impl IntoKey for Key<'static> {
    fn into_key(self) -> Result<Key<'static>, RequestError> {
        if self.as_bytes().is_empty() { Err(missing()) } else { Ok(self) }
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

into_key!(String, Arc<str>, Box<str>, Cow<'static, str>, &'static str);
into_key!(Vec<u8>, Bytes, HeaderValue, &'static [u8]);
into_key!(u8, u16, u32, u64, u128, usize, i8, i16, i32, i64, i128, isize);
into_key!(IpAddr, Ipv4Addr, Ipv6Addr);
#[cfg(feature = "uuid")]
into_key!(uuid::Uuid);

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

/// One key of all parts: `a|b|c`. Without one of them, the key is missing.
macro_rules! tuple {
    ($($first:ident $($rest:ident)*),*) => {$(
        impl<$first: IntoKey, $($rest: IntoKey),*> IntoKey for ($first, $($rest),*) {
            #[allow(non_snake_case)]
            fn into_key(self) -> Result<Key<'static>, RequestError> {
                let ($first, $($rest),*) = self;
                Ok($first.into_key()?$(.and(&$rest.into_key()?))*)
            }
        }
    )*};
}

tuple!(A B, A B C, A B C D);

impl From<HeaderValue> for Key<'static> {
    fn from(value: HeaderValue) -> Self {
        Key::from(&value)
    }
}

impl From<&HeaderValue> for Key<'static> {
    fn from(value: &HeaderValue) -> Self {
        trimmed(value).into()
    }
}
