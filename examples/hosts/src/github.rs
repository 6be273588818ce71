//! octocrab: GitHub allows 5,000 requests per hour and token, and counts searches apart. All jobs
//! that use the token share a quota for each of these resources, and wait for their turn. If GitHub
//! rejects a request, the requests for its resource wait until GitHub accepts them again; after a
//! rejection by a secondary limit, the requests for all resources.

use std::{sync::Arc, time::Duration};

use http::{
    Uri,
    header::{RETRY_AFTER, USER_AGENT},
    request::Parts,
};
use hyper_util::{client::legacy, rt::TokioExecutor};
use octocrab::{
    AuthState, OctoBody, Octocrab, OctocrabBuilder,
    service::middleware::{base_uri::BaseUriLayer, extra_headers::ExtraHeadersLayer},
};
use tower_ratelimit::{FailurePolicy, Limiter, Quota, RateLimitLayer, VendorState};

/// 4,800 per hour and a burst of 100: at most 4,900 in any hour. The rest is the margin.
pub const QUOTA: Quota = Quota::per_hour(4_800).burst(100);

/// For all resources. It is generous: the secondary limits depend on more than numbers of requests.
const ACCOUNT: Quota = Quota::per_minute(800).burst(80);

/// The quotas of the other resources. The quota of `core` is the limiter's own.
const OTHERS: [(&str, Quota); 3] = [
    ("search", Quota::per_minute(28).burst(1)),
    ("code_search", Quota::per_minute(8).burst(1)),
    ("graphql", QUOTA),
];

/// Returns the resource that GitHub counts a request for, as `x-ratelimit-resource` names it.
fn resource(head: &Parts) -> &'static str {
    match head.uri.path() {
        "/graphql" => "graphql",
        "/search/code" => "code_search",
        path if path.starts_with("/search/") => "search",
        _ => "core",
    }
}

/// Returns the layer of one resource. The requests for others cost nothing, and their responses
/// teach it nothing.
fn layer(limiter: Limiter, of: &'static str) -> RateLimitLayer {
    RateLimitLayer::new(limiter, move |_: &Parts| of)
        .cost(move |head: &Parts| u64::from(resource(head) == of))
        .max_wait(Duration::from_secs(60))
        .on_failure(FailurePolicy::Wait)
        .learn(move |status, headers| VendorState::from_response(status, headers).of_resource(of))
}

/// Returns the layer of all resources. It learns only from rejections with `Retry-After`, which are
/// about the account: a used-up budget of one resource has none.
fn account(limiter: Limiter) -> RateLimitLayer {
    RateLimitLayer::new(limiter, |_: &Parts| "account")
        .max_wait(Duration::from_secs(60))
        .on_failure(FailurePolicy::Wait)
        .learn(|status, headers| match !status.is_success() && headers.contains_key(RETRY_AFTER) {
            true => VendorState::from_response(status, headers),
            false => VendorState::default(),
        })
}

/// Returns a client for plain HTTP. For `https`, use the connector of hyper-rustls.
pub fn client(api: Uri, limiter: Limiter) -> Octocrab {
    let http = legacy::Client::builder(TokioExecutor::new()).build_http::<OctoBody>();
    let [search, code_search, graphql] = OTHERS.map(|(resource, quota)| {
        layer(limiter.with_quota(quota).expect("the algorithm supports the quota"), resource)
    });
    let account = account(limiter.with_quota(ACCOUNT).expect("the algorithm supports the quota"));
    let agent = vec![(USER_AGENT, "jobs".parse().expect("a header"))];
    let client = OctocrabBuilder::new_empty()
        .with_service(http)
        // The inner one, so that requests that wait for their resource hear of a block.
        .with_layer(&account)
        .with_layer(&layer(limiter, "core"))
        .with_layer(&search)
        .with_layer(&code_search)
        .with_layer(&graphql)
        .with_layer(&BaseUriLayer::new(api))
        .with_layer(&ExtraHeadersLayer::new(Arc::new(agent)))
        .with_auth(AuthState::None)
        .build();
    client.unwrap_or_else(|never| match never {})
}
