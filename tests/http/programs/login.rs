//! `copy-one-of-these.md`: logins.

use axum::{
    Router,
    http::{HeaderMap, StatusCode},
    routing::post,
};
use std::net::SocketAddr;
use tower_ratelimit::{
    Algorithm, Limiter, Quota, RateLimitLayer, key,
    store::{self, AnyStore},
};

async fn login(headers: HeaderMap) -> StatusCode {
    let is_right = headers.get("x-password").is_some_and(|password| password == "secret");
    if is_right { StatusCode::OK } else { StatusCode::UNAUTHORIZED }
}

pub fn app(store: &AnyStore) -> Router {
    let quota = Quota::per_minute(5);
    let failures = Limiter::new("login", store.clone(), Algorithm::sliding_log(), quota);
    let client = key::ClientIp::new(key::ProxyHeader::XForwardedFor, ["10.0.0.0/8"]);
    let layer = RateLimitLayer::new(failures, client)
        .charge_when(|response| response.status == StatusCode::UNAUTHORIZED);
    Router::new().route("/login", post(login).layer(layer))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::var("RATE_LIMIT_STORE").unwrap_or_else(|_| "memory:".to_owned());
    let app = app(&store::lazy(&url)?).into_make_service_with_connect_info::<SocketAddr>();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    Ok(axum::serve(listener, app).await?)
}
