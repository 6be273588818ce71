//! kube: the QPS and burst of client-go, which kube does not have. The default stack of kube is a
//! `BoxService`, which cannot be cloned, so a `BufferLayer` is inside of the limit.

use std::time::Duration;

use http::Request;
use kube::{
    Client, Config,
    client::{Body, ClientBuilder},
};
use tower::buffer::BufferLayer;
use tower_ratelimit::{Limiter, Quota, RateLimitLayer, key};

/// The defaults of client-go.
pub const QUOTA: Quota = Quota::per_second(5).burst(10);

/// Returns a client whose requests wait for the limit for up to a minute.
///
/// # Errors
///
/// If the configuration is invalid.
pub fn client(config: Config, limiter: Limiter) -> Result<Client, kube::Error> {
    let limit = RateLimitLayer::new(limiter, key::Global).max_wait(Duration::from_secs(60));
    let client = ClientBuilder::try_from(config)?
        .with_layer(&BufferLayer::<Request<Body>>::new(1_024))
        .with_layer(&limit)
        .build();
    Ok(client)
}
