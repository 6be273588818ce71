//! kube: the QPS and burst of client-go, which kube does not have. Renewals of leases have
//! priority: they do not wait behind bulk calls, and are not counted. Other calls also wait for a
//! store that fails. The default stack of kube is
//! a `BoxService`, which cannot be cloned, so a `BufferLayer` is inside of the limit.

use std::time::Duration;

use http::{Request, request::Parts};
use kube::{
    Client, Config,
    client::{Body, ClientBuilder},
};
use tower::buffer::BufferLayer;
use tower_ratelimit::{FailurePolicy, Limiter, Quota, RateLimitLayer, key};

/// The defaults of client-go.
pub const QUOTA: Quota = Quota::per_second(5).burst(10);

/// Returns a client whose requests wait for the limit for up to a minute, unless they are urgent.
///
/// # Errors
///
/// If the configuration is invalid.
pub fn client(config: Config, limiter: Limiter) -> Result<Client, kube::Error> {
    let limit = RateLimitLayer::new(limiter, key::Global)
        .max_wait(Duration::from_secs(60))
        .on_failure(FailurePolicy::Wait)
        .exempt(is_urgent);
    let client = ClientBuilder::try_from(config)?
        .with_layer(&BufferLayer::<Request<Body>>::new(1_024))
        .with_layer(&limit)
        .build();
    Ok(client)
}

/// Returns whether a request reads or renews a lease: a few per minute, and late is too late.
fn is_urgent(head: &Parts) -> bool {
    head.uri.path().starts_with("/apis/coordination.k8s.io/")
}
