//! One key for all requests.

use super::{Key, KeyExtractor};
use crate::middleware::rejection::RequestError;

/// One key for all requests, which then share one quota.
#[derive(Clone, Copy, Debug, Default)]
pub struct Global;

impl<H> KeyExtractor<H> for Global {
    fn extract(&self, _: &H) -> Result<Key<'static>, RequestError> {
        Ok(Key::from("global"))
    }
}
