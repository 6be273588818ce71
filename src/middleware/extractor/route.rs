//! The route that axum matched as a key.

use axum::extract::MatchedPath;
use http::request::Parts;

use super::{Key, KeyExtractor};
use crate::middleware::rejection::RequestError;

/// The route that axum matched, such as `/users/{id}`, often as part of a pair:
/// `(key::PeerIp, key::Route)`.
///
/// Requests without a matching route, or without a router around the layer, count as one route.
#[derive(Clone, Copy, Debug, Default)]
pub struct Route;

impl Route {
    /// Returns the key of a route, as it is written in the router, for
    /// [`Limiter::peek`](crate::Limiter::peek), [`reset`](crate::Limiter::reset) and other calls.
    #[must_use]
    pub fn key(&self, route: &str) -> Key<'static> {
        Key::scoped("route", route)
    }
}

impl KeyExtractor<Parts> for Route {
    fn extract(&self, head: &Parts) -> Result<Key<'static>, RequestError> {
        let route = head.extensions.get::<MatchedPath>();
        Ok(self.key(route.map_or("", MatchedPath::as_str)))
    }
}
