//! `copy-one-of-these.md`: behind a proxy.

use axum::{Router, http::HeaderName, routing::get};
use std::net::SocketAddr;
use tower_ratelimit::{
    Algorithm, Limiter, Quota, RateLimitLayer,
    config::ConfigError,
    key::{ClientIp, ProxyHeader},
    store::{self, AnyStore},
};

pub fn client(proxy: &str, networks: &str) -> Result<ClientIp, ConfigError> {
    let header = match proxy {
        "nginx" => ProxyHeader::Single(HeaderName::from_static("x-real-ip")),
        "cloudflare" => ProxyHeader::Single(HeaderName::from_static("cf-connecting-ip")),
        _ => ProxyHeader::XForwardedFor, // load balancers of AWS, Google and Kubernetes
    };
    ClientIp::try_new(header, networks.split(','))
}

pub fn app(store: &AnyStore, client: ClientIp) -> Router {
    let quota = Quota::per_minute(2);
    let limiter = Limiter::new("api", store.clone(), Algorithm::token_bucket(), quota);
    let layer = RateLimitLayer::new(limiter, client);
    Router::new().route("/", get(async || "hello\n")).layer(layer)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::var("RATE_LIMIT_STORE").unwrap_or_else(|_| "memory:".to_owned());
    let client = client(&std::env::var("PROXY")?, &std::env::var("PROXY_NETWORKS")?)?;
    let app = app(&store::lazy(&url)?, client);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    Ok(axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?)
}
