//! The text of a key, stored inline if it is short. Does not check or escape it.

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
    #[inline]
    pub(crate) fn join(head: &[u8], tail: &[u8]) -> Self {
        let length = head.len() + tail.len();
        if length > SHORT {
            return Self::Long([head, tail].concat().into());
        }
        let mut bytes = [0; SHORT];
        bytes[..head.len()].copy_from_slice(head);
        bytes[head.len()..length].copy_from_slice(tail);
        Self::Short(length as u8, bytes)
    }

    #[inline]
    pub(crate) fn as_bytes(&self) -> &[u8] {
        match self {
            Self::Short(length, bytes) => &bytes[..usize::from(*length)],
            Self::Long(bytes) => bytes,
        }
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
