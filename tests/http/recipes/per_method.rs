//! `recipes.md`: a quota for each method of a gRPC service.

use axum::http::request::Parts;
use tonic::transport::server::TcpConnectInfo;
use tower_ratelimit::{
    Charge, Limiter, RateLimitLayer,
    key::{self, KeyExtractor},
};

fn per_method(check: Limiter, watch: Limiter, other: Limiter) -> RateLimitLayer {
    let peer_ip = key::PeerIp.peer_addr(|it| it.get::<TcpConnectInfo>()?.remote_addr());
    RateLimitLayer::by_rule(move |head: &Parts| {
        let limiter = match head.uri.path() {
            "/grpc.health.v1.Health/Check" => &check,
            "/grpc.health.v1.Health/Watch" => &watch,
            _ => &other, // one count for all: clients can invent paths
        };
        Ok(Charge::new(limiter, peer_ip.extract(head)?))
    })
}

mod tests {
    use tokio::net::TcpListener;
    use tonic::{
        Code,
        transport::{Endpoint, Server, server::TcpIncoming},
    };
    use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};
    use tonic_types::StatusExt;
    use tower_ratelimit::{Algorithm, MemoryStore, Quota};

    use super::*;

    #[tokio::test]
    async fn each_method_has_a_quota_and_the_status_names_it() {
        let store = MemoryStore::new();
        let limiter = |name, limit| {
            let quota = Quota::per_hour(limit);
            Limiter::new(name, store.clone(), Algorithm::token_bucket(), quota)
        };
        let layer = per_method(limiter("check", 2), limiter("watch", 1), limiter("other", 1));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let health = tonic_health::server::health_reporter().1;
        let server = Server::builder().layer(layer).add_service(health);
        tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
        let endpoint = Endpoint::from_shared(url).unwrap();
        let mut client = HealthClient::new(endpoint.connect().await.unwrap());
        let request = HealthCheckRequest::default;

        client.check(request()).await.unwrap();
        client.check(request()).await.unwrap();
        client.watch(request()).await.unwrap();
        let denied = [
            client.check(request()).await.unwrap_err(),
            client.watch(request()).await.unwrap_err(),
        ];
        for (status, [limiter, quota]) in denied.iter().zip([["check", "2/h"], ["watch", "1/h"]]) {
            assert_eq!(status.code(), Code::ResourceExhausted);
            let failure = status.get_details_quota_failure().unwrap();
            assert_eq!(failure.violations[0].subject, limiter);
            assert_eq!(failure.violations[0].description, quota);
        }
    }
}
