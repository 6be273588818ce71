//! An axum server whose limits are in a file: each group of routes has one of its own.
//!
//! ```text
//! cargo run --example configured -- --check     # reads the file, and prints the limits
//! cargo run --example configured
//! curl -i -X POST http://127.0.0.1:3000/login   # six times: the sixth is a 429
//! ```

use std::{fs, net::SocketAddr, path::PathBuf, process::ExitCode};

use axum::{
    Router,
    routing::{get, post},
};
use clap::Parser;
use serde::Deserialize;
use tokio::net::TcpListener;
use tower_ratelimit::{Limits, MemoryStore, RateLimitLayer, key};

/// Serves GET /api/users, GET /api/orders and POST /login, as often as the limits in a file allow each
/// peer address.
#[derive(Parser)]
#[command(name = "configured")]
#[command(after_help = "Try it:  curl -i -X POST http://127.0.0.1:3000/login")]
struct Flags {
    /// The configuration, which has the limits `all`, `api` and `login`
    #[arg(value_name = "FILE")]
    #[arg(default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/limits.toml"))]
    file: PathBuf,

    /// Read the file, print its limits or what is wrong with it, and end
    #[arg(long)]
    check: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    listen: SocketAddr,
    limits: Limits,
}

fn read(file: &PathBuf) -> Result<Config, String> {
    let text = fs::read_to_string(file).map_err(|error| format!("cannot read it: {error}"))?;
    toml::from_str(&text).map_err(|error| error.to_string())
}

fn app(limits: &Limits) -> Result<Router, String> {
    let limiters = limits.limiters(&MemoryStore::new());
    let mut limiters = limiters.map_err(|error| error.to_string())?;
    let mut limit = |name| match limiters.remove(name) {
        Some(limiter) => Ok(RateLimitLayer::new(limiter, key::PeerIp)),
        None => Err(format!("there is no [limits.{name}]")),
    };
    let api = Router::new()
        .route("/api/users", get(async || "ada, ben\n"))
        .route("/api/orders", get(async || "none\n"))
        .route_layer(limit("api")?);
    let login =
        Router::new().route("/login", post(async || "welcome\n")).route_layer(limit("login")?);
    // `route_layer` leaves what is not found to this one.
    let app = api.merge(login).layer(limit("all")?);
    match limiters.keys().next() {
        Some(name) => Err(format!("[limits.{name}] limits nothing: use all, api and login")),
        None => Ok(app),
    }
}

async fn serve(listen: SocketAddr, app: Router) -> Result<(), String> {
    let listener = TcpListener::bind(listen)
        .await
        .map_err(|error| format!("cannot listen on {listen}: {error}"))?;
    let address = listener.local_addr().map_err(|error| error.to_string())?;
    println!("listening on http://{address}");
    let service = app.into_make_service_with_connect_info::<SocketAddr>();
    axum::serve(listener, service).await.map_err(|error| error.to_string())
}

async fn run(flags: Flags) -> Result<(), String> {
    let explain = |error| format!("{}: {error}", flags.file.display());
    let config = read(&flags.file).map_err(explain)?;
    let app = app(&config.limits).map_err(explain)?;
    if !flags.check {
        return serve(config.listen, app).await;
    }
    for (name, limit) in config.limits.iter() {
        println!("{name}: {}, {}", limit.quota(), limit.algorithm());
    }
    Ok(())
}

#[tokio::main]
async fn main() -> ExitCode {
    match run(Flags::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", error.trim_end());
            ExitCode::FAILURE
        }
    }
}
