//! A tonic server whose calls are limited per peer, and a client that shows how it refuses them.
//!
//! ```text
//! cargo run --example grpc                      # the server, 5 calls in 10 seconds
//! cargo run --example grpc -- --call 7          # in another terminal: the last 2 are refused
//! ```
//!
//! The service is gRPC's own health check, so that no code has to be generated: any other is limited in the
//! same way.

use std::{net::SocketAddr, process::ExitCode};

use clap::Parser;
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

/// Serves grpc.health.v1.Health over plain HTTP/2, as often as the quota allows each peer; or calls it.
#[derive(Parser)]
#[command(name = "grpc", after_help = "Try it:  cargo run --example grpc -- --call 7")]
struct Flags {
    /// Address to listen on; port 0 takes a free one
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:50051")]
    #[arg(conflicts_with = "call")]
    listen: SocketAddr,

    /// How many calls each peer address may make, such as 10/s, "100/min burst 20" or 5/10s
    #[arg(long, value_name = "QUOTA", default_value = "5/10s", conflicts_with = "call")]
    quota: Quota,

    /// Be a client: make N calls, one after the other, and print how each ends
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    call: Option<u32>,

    /// The server to call
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:50051", requires = "call")]
    server: Endpoint,
}

async fn serve(listen: SocketAddr, quota: Quota) -> Result<(), String> {
    let limiter = Limiter::try_named("grpc", MemoryStore::new(), Algorithm::token_bucket(), quota)
        .map_err(|error| error.to_string())?;
    let listener = TcpListener::bind(listen)
        .await
        .map_err(|error| format!("cannot listen on {listen}: {error}"))?;
    let address = listener.local_addr().map_err(|error| error.to_string())?;
    println!("listening on http://{address}");
    let peer_ip = key::PeerIp.peer_addr(|it| it.get::<TcpConnectInfo>()?.remote_addr());
    let (_reporter, health) = health_reporter();
    Server::builder()
        .layer(RateLimitLayer::new(limiter, peer_ip))
        .add_service(health)
        .serve_with_incoming(TcpIncoming::from(listener))
        .await
        .map_err(|error| with_sources(&error))
}

async fn call(server: Endpoint, calls: u32) -> Result<(), String> {
    let channel = server
        .connect()
        .await
        .map_err(|error| format!("cannot connect to {}: {}", server.uri(), with_sources(&error)))?;
    let mut client = HealthClient::new(channel);
    for number in 1..=calls {
        match client.check(HealthCheckRequest::default()).await {
            Ok(_) => println!("{number}: Ok"),
            Err(status) => println!("{number}: {}", outcome(&status)),
        }
    }
    Ok(())
}

/// What a client learns: a call over the quota says when to come back.
fn outcome(status: &Status) -> String {
    let code = status.code();
    match status.get_details_retry_info().and_then(|info| info.retry_delay) {
        Some(delay) => format!("{code:?}, retry in {:.3} s", delay.as_secs_f64()),
        None => format!("{code:?}, {}", status.message()),
    }
}

fn with_sources(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(&format!(": {error}"));
        source = error.source();
    }
    text
}

#[tokio::main]
async fn main() -> ExitCode {
    let flags = Flags::parse();
    let end = match flags.call {
        Some(calls) => call(flags.server, calls).await,
        None => serve(flags.listen, flags.quota).await,
    };
    match end {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
