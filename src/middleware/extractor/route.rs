//! The route that axum matched as a key.

use axum::extract::{MatchedPath, OriginalUri};
use http::request::Parts;

use super::{Key, KeyExtractor};
use crate::middleware::rejection::RequestError;

/// The route that axum matched, such as `/users/{id}`, often as part of a pair:
/// `(key::PeerIp, key::Route)`.
///
/// Requests without a matching route count as one route. So do those to a service of
/// `nest_service`.
///
/// The router must be one of axum 0.8, around the layer: `Router::layer` or `route_layer`. Without
/// it, no request has a route, and all are rejected with 500.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct Route {}

/// The extractor [`Route`](struct@Route).
#[allow(non_upper_case_globals)]
pub const Route: Route = Route {};

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
        match head.extensions.get::<MatchedPath>() {
            Some(route) => Ok(self.key(route.as_str())),
            // The router adds it to each request, also to one without a route.
            None if head.extensions.get::<OriginalUri>().is_some() => Ok(self.key("")),
            None => Err(RequestError::misconfigured(NO_ROUTER)),
        }
    }
}

const NO_ROUTER: &str = "the request has passed no router of axum 0.8, so its route is unknown: \
     add the layer by `Router::layer` or `route_layer` of axum 0.8, not around the router";
