//! async-openai: all requests of a client wait for one quota, also the repetitions of its retry
//! layer, because the limit is inside of that. If OpenAI answers 429, all clients wait.

use std::time::Duration;

use async_openai::{
    Client,
    config::OpenAIConfig,
    error::OpenAIError,
    middleware::{HttpRequestFactory, ReqwestService, retry::OpenAIRetryLayer},
};
use tower::ServiceBuilder;
use tower_ratelimit::{FailurePolicy, Limiter, RateLimitLayer, VendorState, key};

/// Returns a client whose requests wait for up to a minute, also for a store that fails. A request
/// that would have to wait for longer gets a `429` of the layer. To the retry layer it is like a
/// `429` of the vendor; the `Rejection` in its extensions tells them apart.
pub fn client(config: OpenAIConfig, limiter: Limiter) -> Client<OpenAIConfig> {
    let limit =
        RateLimitLayer::custom(limiter, key::Global, |rejection, _: &HttpRequestFactory| {
            Ok::<reqwest::Response, OpenAIError>(
                rejection.to_response().map(|body| body.into_bytes()).into(),
            )
        })
        .learn(|result| match result {
            Ok(response) => VendorState::from_response(response.status(), response.headers()),
            Err(_) => VendorState::default(),
        });
    let service = ServiceBuilder::new()
        .layer(OpenAIRetryLayer::default())
        .map_result(|result: Result<Result<_, OpenAIError>, OpenAIError>| result?)
        .layer(limit.max_wait(Duration::from_secs(60)).on_failure(FailurePolicy::Wait))
        .map_response(Ok::<reqwest::Response, OpenAIError>)
        .service(ReqwestService::new(reqwest::Client::new()));
    Client::with_config(config).with_http_service(service)
}
