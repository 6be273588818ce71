//! `copy-one-of-these.md`: a limit for each method of tonic.

use axum::http::request::Parts;
use tonic::transport::{Server, server::TcpConnectInfo};
use tower_ratelimit::{
    Algorithm, Charge, Limiter, Quota, RateLimitLayer,
    key::{self, KeyExtractor},
    store::{self, AnyStore},
};

pub fn per_method(store: &AnyStore) -> RateLimitLayer {
    let limiter = |name, quota| Limiter::new(name, store.clone(), Algorithm::token_bucket(), quota);
    let check = limiter("check", Quota::per_minute(2));
    let other = limiter("other", Quota::per_minute(100));
    let peer_ip = key::PeerIp.peer_addr(|it| it.get::<TcpConnectInfo>()?.remote_addr());
    RateLimitLayer::by_rule(move |head: &Parts| {
        let limiter = match head.uri.path() {
            "/grpc.health.v1.Health/Check" => &check,
            _ => &other, // clients can invent paths
        };
        Ok(Charge::new(limiter, peer_ip.extract(head)?))
    })
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::var("RATE_LIMIT_STORE").unwrap_or_else(|_| "memory:".to_owned());
    let (_reporter, health) = tonic_health::server::health_reporter();
    let server = Server::builder().layer(per_method(&store::lazy(&url)?)).add_service(health);
    Ok(server.serve("127.0.0.1:3000".parse()?).await?)
}
