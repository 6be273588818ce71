//! The first program of the README: an axum server that allows each client address five requests
//! per minute, and rejects more with a 429.
//!
//! ```text
//! cargo run -p quickstart                      # listens on 127.0.0.1:3000
//! cargo run -p quickstart -- 127.0.0.1:4000    # listens on another address
//! ```

use axum::{Router, routing::get};
use std::net::SocketAddr;
use tower_ratelimit::{Quota, RateLimitLayer};

#[tokio::main]
async fn main() -> std::io::Result<()> {
    let layer = RateLimitLayer::per_ip(Quota::per_minute(5));
    let app = Router::new().route("/", get("hello\n")).layer(layer);
    let address = std::env::args().nth(1).unwrap_or_else(|| String::from("127.0.0.1:3000"));
    let listener = tokio::net::TcpListener::bind(&address).await.unwrap_or_else(|error| {
        eprintln!("error: cannot listen on {address}: {error}; give another address as argument");
        std::process::exit(1)
    });
    let url = format!("http://{}", listener.local_addr()?);
    println!("listening on {url}");
    println!("limit: 5 requests per minute and client address, counts in memory");
    println!("try it: for i in $(seq 7); do curl -i {url}/; done");
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await
}
