//! Sends allowed requests through a layer, for `request-path.sh`, which lists the files that they
//! go through. It prints nothing.
//!
//! ```text
//! request-path memory 200       # 200 requests, with the counts in memory
//! request-path redis 200        # the same over a private Redis
//! request-path least 200        # in memory, with the key in a header, and no headers added
//! ```

#[allow(dead_code)]
#[path = "../support/server.rs"]
mod server;

use std::{convert::Infallible, env, error::Error, net::SocketAddr};

use axum::{
    body::Body,
    extract::ConnectInfo,
    http::{HeaderName, Request, Response, StatusCode},
};
use server::RedisServer;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_ratelimit::{
    Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, RedisStore, key, store::Store,
};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<_> = env::args().skip(1).collect();
    let [store, requests] = &arguments[..] else { return Err("arguments: STORE REQUESTS".into()) };
    let requests = requests.parse()?;
    let by_header = key::header(HeaderName::from_static("x-api-key"));
    match &**store {
        "memory" => send(RateLimitLayer::new(memory(), key::PeerIp), requests).await,
        "least" => send(RateLimitLayer::new(memory(), by_header).headers([]), requests).await,
        "redis" => {
            let server = RedisServer::start();
            let limiter = limiter(RedisStore::connect(&server.url()).await?);
            send(RateLimitLayer::new(limiter, key::PeerIp), requests).await
        }
        other => Err(format!("no store {other}").into()),
    }
}

fn memory() -> Limiter {
    limiter(MemoryStore::new())
}

fn limiter(store: impl Store) -> Limiter {
    Limiter::new("api", store, Algorithm::token_bucket(), Quota::per_hour(1_000_000))
}

/// Sends requests one after the other. All are allowed.
async fn send(layer: RateLimitLayer, requests: usize) -> Result<(), Box<dyn Error>> {
    // Not a `Router`, which would call the layer again for each request.
    let hello = async |_: Request<Body>| Ok::<_, Infallible>(Response::new(Body::from("hello")));
    let mut service = layer.layer(service_fn(hello));
    let peer = ConnectInfo(SocketAddr::from(([127, 0, 0, 1], 4_000)));
    for _ in 0..requests {
        let request = Request::get("/").header("x-api-key", "alice").extension(peer);
        let request = request.body(Body::empty())?;
        let response = service.ready().await?.call(request).await?;
        assert_eq!(response.status(), StatusCode::OK);
    }
    Ok(())
}
