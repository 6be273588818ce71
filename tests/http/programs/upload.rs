//! `copy-one-of-these.md`: uploads.

use axum::{Router, body::Bytes, http::header::CONTENT_LENGTH, routing::post};
use std::net::SocketAddr;
use tower_ratelimit::{
    Algorithm, Limiter, Quota, RateLimitLayer, key,
    store::{self, AnyStore},
};

async fn upload(body: Bytes) -> String {
    format!("{} bytes\n", body.len())
}

pub fn app(store: &AnyStore) -> Router {
    let quota = Quota::per_hour(10_000_000).burst(1_000_000); // bytes
    let bytes = Limiter::new("upload", store.clone(), Algorithm::token_bucket(), quota);
    let client = key::ClientIp::new(key::ProxyHeader::XForwardedFor, ["10.0.0.0/8"]);
    let layer = RateLimitLayer::new(bytes, client).cost(|head| {
        let length = head.headers.get(CONTENT_LENGTH).and_then(|it| it.to_str().ok()?.parse().ok());
        length.unwrap_or(u64::MAX) // above the quota
    });
    Router::new().route("/", post(upload)).layer(layer)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::var("RATE_LIMIT_STORE").unwrap_or_else(|_| "memory:".to_owned());
    let app = app(&store::lazy(&url)?).into_make_service_with_connect_info::<SocketAddr>();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    Ok(axum::serve(listener, app).await?)
}
