//! `copy-one-of-these.md`: a search.

use axum::{Router, routing::get};
use std::net::SocketAddr;
use tower_ratelimit::{
    Algorithm, Limiter, Quota, RateLimitLayer, key,
    store::{self, AnyStore},
};

pub fn app(store: &AnyStore) -> Router {
    let quota = Quota::per_minute(6).burst(3);
    let rate = Limiter::new("search", store.clone(), Algorithm::token_bucket(), quota);
    let (algorithm, quota) = (Algorithm::concurrency(), Quota::concurrent(20));
    let running = Limiter::new("searches", store.clone(), algorithm, quota);
    let client = key::ClientIp::new(key::ProxyHeader::XForwardedFor, ["10.0.0.0/8"]);
    Router::new()
        .route("/search", get(async || "found\n"))
        .layer(RateLimitLayer::new(running, key::Global)) // of all clients
        .layer(RateLimitLayer::new(rate, client)) // outside, so it is first
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::var("RATE_LIMIT_STORE").unwrap_or_else(|_| "memory:".to_owned());
    let app = app(&store::lazy(&url)?).into_make_service_with_connect_info::<SocketAddr>();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    Ok(axum::serve(listener, app).await?)
}
