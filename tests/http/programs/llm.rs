//! `copy-one-of-these.md`: tokens of a language model.

use axum::{
    Router,
    http::{header::CONTENT_TYPE, request::Parts},
    response::IntoResponse,
    routing::post,
};
use tower_ratelimit::{
    Algorithm, Charge, Limiter, Quota, RateLimitLayer,
    key::{self, KeyExtractor},
    layer::{TokenMeter, Usage},
    store::{self, AnyStore},
};

/// Forward the request to your model, and return its answer, streamed or not.
async fn model() -> impl IntoResponse {
    let answer = r#"{"usage":{"prompt_tokens":900,"completion_tokens":100}}"#;
    ([(CONTENT_TYPE, "application/json")], answer)
}

pub fn app(store: &AnyStore) -> Router {
    let quota = Quota::per_hour(10_000);
    let tokens = Limiter::new("tokens", store.clone(), Algorithm::token_bucket(), quota);
    let layer = RateLimitLayer::by_rule(move |head: &Parts| {
        Ok(Charge::new(&tokens, key::header("x-user").extract(head)?).estimate(4_000))
    })
    .settle_by(|head| TokenMeter::new(head, |used| Usage::of("tokens", used.input + used.output)));
    Router::new().route("/chat", post(model)).layer(layer)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::var("RATE_LIMIT_STORE").unwrap_or_else(|_| "memory:".to_owned());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    Ok(axum::serve(listener, app(&store::lazy(&url)?)).await?)
}
