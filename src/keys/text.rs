//! The text of a key, stored inline if it is short, and hexadecimal digits. Does not check or
//! escape it.

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
