//! Sends allowed requests through a layer, for `request-path.sh`, which lists the files that they
//! go through. It prints nothing.
//!
//! ```text
//! request-path memory 200    # 200 requests, with the counts in memory
//! request-path redis 200     # the same over a private Redis
//! ```

#[allow(dead_code)]
#[path = "../support/server.rs"]
mod server;

use std::{convert::Infallible, env, error::Error, net::SocketAddr};

use axum::{
    body::Body,
    extract::ConnectInfo,
    http::{Request, Response, StatusCode},
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
    match &**store {
        "memory" => send(MemoryStore::new(), requests).await,
        "redis" => {
            let server = RedisServer::start();
            send(RedisStore::connect(&server.url()).await?, requests).await
        }
        other => Err(format!("no store {other}").into()),
    }
}

/// Sends requests one after the other. All are allowed.
async fn send(store: impl Store, requests: usize) -> Result<(), Box<dyn Error>> {
    let quota = Quota::per_hour(1_000_000);
    let limiter = Limiter::new("api", store, Algorithm::token_bucket(), quota);
    let layer = RateLimitLayer::new(limiter, key::PeerIp);
    // Not a `Router`, which would call the layer again for each request.
    let hello = async |_: Request<Body>| Ok::<_, Infallible>(Response::new(Body::from("hello")));
    let mut service = layer.layer(service_fn(hello));
    let peer = ConnectInfo(SocketAddr::from(([127, 0, 0, 1], 4_000)));
    for _ in 0..requests {
        let request = Request::get("/").extension(peer).body(Body::empty())?;
        let response = service.ready().await?.call(request).await?;
        assert_eq!(response.status(), StatusCode::OK);
    }
    Ok(())
}
