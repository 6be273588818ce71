//! octocrab: GitHub allows 5,000 requests per hour and token. All jobs that use the token share one
//! quota, and wait for their turn. If GitHub rejects a request, also by a secondary limit, all of
//! them wait until it accepts requests again.

use std::{sync::Arc, time::Duration};

use http::{Uri, header::USER_AGENT};
use hyper_util::{client::legacy, rt::TokioExecutor};
use octocrab::{
    AuthState, OctoBody, Octocrab, OctocrabBuilder,
    service::middleware::{base_uri::BaseUriLayer, extra_headers::ExtraHeadersLayer},
};
use tower_ratelimit::{Limiter, Quota, RateLimitLayer, http::VendorState, key};

/// 4,800 per hour and a burst of 100: at most 4,900 in any hour. The rest is the margin.
pub const QUOTA: Quota = Quota::per_hour(4_800).burst(100);

/// Returns a client for plain HTTP. For `https`, use the connector of hyper-rustls.
pub fn client(api: Uri, limiter: Limiter) -> Octocrab {
    let http = legacy::Client::builder(TokioExecutor::new()).build_http::<OctoBody>();
    let limit = RateLimitLayer::new(limiter, key::Global)
        .max_wait(Duration::from_secs(60))
        .learn(VendorState::from_response);
    let agent = vec![(USER_AGENT, "jobs".parse().expect("a header"))];
    let client = OctocrabBuilder::new_empty()
        .with_service(http)
        .with_layer(&limit)
        .with_layer(&BaseUriLayer::new(api))
        .with_layer(&ExtraHeadersLayer::new(Arc::new(agent)))
        .with_auth(AuthState::None)
        .build();
    client.unwrap_or_else(|never| match never {})
}
