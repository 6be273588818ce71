use http::request::Parts;

use super::{Key, KeyExtractor};
use crate::error::RequestError;

/// The path of the request, as the limited service sees it; for a pair such as
/// `(key::PeerIp, key::Path)`.
///
/// The client chooses the path, and with it the key: use it only where paths are few, behind a router
/// that answers the others.
#[derive(Clone, Copy, Debug, Default)]
pub struct Path;

impl KeyExtractor<Parts> for Path {
    fn extract(&self, head: &Parts) -> Result<Key<'static>, RequestError> {
        Ok(Key::scoped("path", head.uri.path()))
    }
}
