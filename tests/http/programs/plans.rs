//! `copy-one-of-these.md`: plans by API key.

use axum::{
    Router,
    http::{StatusCode, request::Parts},
    routing::get,
};
use std::collections::HashMap;
use tower_ratelimit::{
    Algorithm, Charge, Limiter, Quota, RateLimitLayer,
    layer::RequestError,
    store::{self, AnyStore},
};

pub fn app(store: &AnyStore) -> Router {
    let plan = |name, quota| Limiter::new(name, store.clone(), Algorithm::sliding_log(), quota);
    let free = plan("free", Quota::per_minute(10));
    let pro = plan("pro", Quota::per_minute(100));
    let plans = HashMap::from([
        ("key-1", ("ada", free.clone())),
        ("key-2", ("bob", free)),
        ("key-3", ("eve", pro)),
    ]);
    let unauthorized = || RequestError::with_status(StatusCode::UNAUTHORIZED, "unknown API key");
    let layer = RateLimitLayer::by_rule(move |head: &Parts| {
        let key = head.headers.get("x-api-key").and_then(|key| key.to_str().ok());
        let key = key.ok_or_else(unauthorized)?;
        let (customer, plan) = plans.get(key).ok_or_else(unauthorized)?;
        Ok(Charge::new(plan, *customer)) // not by the key, which is a secret
    });
    Router::new().route("/", get(async || "hello\n")).layer(layer)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::var("RATE_LIMIT_STORE").unwrap_or_else(|_| "memory:".to_owned());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    Ok(axum::serve(listener, app(&store::lazy(&url)?)).await?)
}
