//! `copy-one-of-these.md`: webhooks.

use axum::{Router, http::request::Parts, routing::post};
use std::time::Duration;
use tower_ratelimit::{
    Algorithm, Limiter, Quota, RateLimitLayer,
    store::{self, AnyStore},
};

const SENDERS: [&str; 2] = ["github", "stripe"];

pub fn app(store: &AnyStore) -> Router {
    let quota = Quota::per_second(5).burst(1);
    let hooks = Limiter::new("hooks", store.clone(), Algorithm::token_bucket(), quota);
    let sender = |head: &Parts| {
        let name = head.uri.path().trim_start_matches("/hooks/");
        SENDERS.into_iter().find(|sender| *sender == name)
    };
    let layer = RateLimitLayer::new(hooks, sender)
        .max_wait(Duration::from_secs(5))
        .max_waiting_per_key(25);
    Router::new().route("/hooks/{sender}", post(async || "done\n")).layer(layer)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::var("RATE_LIMIT_STORE").unwrap_or_else(|_| "memory:".to_owned());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    Ok(axum::serve(listener, app(&store::lazy(&url)?)).await?)
}
