//! Conversions into a [`Key`]: text, bytes, numbers, addresses and tuples. Those of HTTP types are
//! in `middleware/extractor/into_key.rs`.

use std::{
    borrow::Cow,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

use bytes::Bytes;

use super::{Key, LONGEST, Repr, all_plain, behind, bounded, written};

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
