//! `Secret`: hashes values of which keys must not contain the text, such as API keys.

use std::fmt;

use hmac_sha256::HMAC;

use super::text::hex;

/// The bytes of a hash that a key contains. A client that forges values would have to try about
/// 2^64 of them until two have the same key.
const LENGTH: usize = 16;

/// The secret of a keyed hash, prepared for values.
#[derive(Clone)]
pub(crate) struct Secret(HMAC);

impl Secret {
    #[track_caller]
    pub(crate) fn new(secret: &[u8]) -> Self {
        assert!(!secret.is_empty(), "the secret of a hashed key is empty; use 32 random bytes");
        Self(HMAC::new(secret))
    }

    /// Returns hexadecimal digits.
    pub(crate) fn hash(&self, value: &[u8]) -> String {
        let mut hmac = self.0.clone();
        hmac.update(value);
        hex(&hmac.finalize()[..LENGTH])
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}
