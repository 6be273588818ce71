//! One key for all requests.

use super::{Key, KeyExtractor};
use crate::middleware::rejection::RequestError;

/// One key for all requests, which then share one quota.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct Global {}

/// The extractor [`Global`](struct@Global).
#[allow(non_upper_case_globals)]
pub const Global: Global = Global {};

impl Global {
    /// Returns the key, for [`Limiter::peek`](crate::Limiter::peek),
    /// [`reset`](crate::Limiter::reset) and other calls.
    #[must_use]
    pub fn key(&self) -> Key<'static> {
        Key::from("global")
    }
}

impl<H> KeyExtractor<H> for Global {
    fn extract(&self, _: &H) -> Result<Key<'static>, RequestError> {
        Ok(self.key())
    }
}
