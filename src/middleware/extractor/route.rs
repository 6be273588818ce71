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
///
/// # Examples
///
/// ```
/// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key};
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let quota = Quota::per_hour(3);
/// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
/// let layer = RateLimitLayer::new(limiter, (key::PeerIp, key::Route)); // of each route
/// # let _ = layer;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct Route {}

/// The extractor [`Route`](struct@Route).
#[allow(non_upper_case_globals)]
pub const Route: Route = Route {};

impl Route {
    /// Returns the key of a route, as it is written in the router, for
    /// [`Limiter::peek`](crate::Limiter::peek), [`reset`](crate::Limiter::reset) and other calls.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, key};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// limiter.reset(key::Route.key("/users/{id}")).await?;
    /// # Ok(())
    /// # }
    /// ```
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
