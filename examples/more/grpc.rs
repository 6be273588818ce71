//! A tonic server that limits the calls per peer, and a client that prints the result of each call.
//!
//! ```text
//! cargo run -p more-examples --example grpc                 # the server, 5 calls per 10 s
//! cargo run -p more-examples --example grpc -- --call 7     # elsewhere: the last 2 are denied
//! ```
//!
//! The service is gRPC's standard health check, which needs no generated code. Other services are
//! limited in the same way.

#[allow(dead_code, reason = "`serve` is for axum")]
#[path = "../support/shutdown.rs"]
mod shutdown;
#[path = "../support/mod.rs"]
mod support;

use std::{net::SocketAddr, process::ExitCode};

use clap::Parser;
use shutdown::{stopped, stopping};
use support::{Context, Failure, exit_code};
use tokio::net::TcpListener;
use tonic::{
    Status,
    transport::{
        Endpoint, Server,
        server::{TcpConnectInfo, TcpIncoming},
    },
};
use tonic_health::{
    pb::{HealthCheckRequest, health_client::HealthClient},
    server::health_reporter,
};
use tonic_types::StatusExt;
use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key};

/// Serves grpc.health.v1.Health over plain HTTP/2 with a limit per peer address, or calls it
#[derive(Parser)]
#[command(
    name = "grpc",
    after_help = "Try it:  cargo run -p more-examples --example grpc -- --call 7"
)]
struct Flags {
    /// Address to listen on; port 0 takes a free one
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:50051")]
    #[arg(conflicts_with = "call")]
    listen: SocketAddr,

    /// Calls per peer address, such as 10/s or "100/min burst 20"
    #[arg(long, value_name = "QUOTA", default_value = "5/10s", conflicts_with = "call")]
    quota: Quota,

    /// Run as a client: make N calls, one after the other, and print their results
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    call: Option<u32>,

    /// The server to call
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:50051", requires = "call")]
    server: Endpoint,
}

async fn serve(listen: SocketAddr, quota: Quota) -> Result<(), Failure> {
    let limiter = Limiter::try_new("grpc", MemoryStore::new(), Algorithm::token_bucket(), quota)?;
    let stopping = stopping()?;
    let listener =
        TcpListener::bind(listen).await.context(format_args!("cannot listen on {listen}"))?;
    let url = format!("http://{}", listener.local_addr()?);
    println!("listening on {url}");
    println!("limit: {quota} per peer address, counts in memory");
    let calls = quota.burst_size().saturating_add(2);
    println!("try it: cargo run -p more-examples --example grpc -- --server {url} --call {calls}");
    let peer_ip = key::PeerIp.peer_addr(|it| it.get::<TcpConnectInfo>()?.remote_addr());
    let (_reporter, health) = health_reporter();
    Server::builder()
        .layer(RateLimitLayer::new(limiter, peer_ip))
        .add_service(health)
        .serve_with_incoming_shutdown(TcpIncoming::from(listener), stopped(stopping))
        .await?;
    Ok(())
}

async fn call(server: Endpoint, calls: u32) -> Result<(), Failure> {
    let channel =
        server.connect().await.context(format_args!("cannot connect to {}", server.uri()))?;
    let mut client = HealthClient::new(channel);
    for number in 1..=calls {
        match client.check(HealthCheckRequest::default()).await {
            Ok(_) => println!("{number}: Ok"),
            Err(status) => println!("{number}: {}", outcome(&status)),
        }
    }
    Ok(())
}

/// Describes the status of a failed call. For a denied call, it contains the time to wait.
fn outcome(status: &Status) -> String {
    let code = status.code();
    match status.get_details_retry_info().and_then(|info| info.retry_delay) {
        Some(delay) => format!("{code:?}, retry in {:.3} s", delay.as_secs_f64()),
        None => format!("{code:?}, {}", status.message()),
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    let flags = Flags::parse();
    exit_code(match flags.call {
        Some(calls) => call(flags.server, calls).await,
        None => serve(flags.listen, flags.quota).await,
    })
}
