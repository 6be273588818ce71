//! An axum server that reads its limits from a file: one for each group of routes, and one for all
//! routes.
//!
//! ```text
//! cargo run --example configured -- --check     # prints the limits in the file and exits
//! cargo run --example configured
//! curl -i -X POST http://127.0.0.1:3000/login   # six times: the sixth response is a 429
//! ```

mod support;

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::ExitCode,
};

use axum::{
    Router,
    routing::{get, post},
};
use clap::Parser;
use serde::Deserialize;
use support::{Context, Failure, exit_code};
use tokio::net::TcpListener;
use tower_ratelimit::{Limits, MemoryStore, RateLimitLayer, key};

/// Serves GET /api/users, GET /api/orders and POST /login, limited per client address
#[derive(Parser)]
#[command(name = "configured")]
#[command(after_help = "Try it:  curl -i -X POST http://127.0.0.1:3000/login")]
struct Flags {
    /// The configuration file, with the limits `all`, `api` and `login`
    /// [default: examples/limits.toml]
    #[arg(value_name = "FILE", verbatim_doc_comment, hide_default_value = true)]
    #[arg(default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/limits.toml"))]
    file: PathBuf,

    /// Read the file, print its limits or its errors, and exit
    #[arg(long)]
    check: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    listen: SocketAddr,
    limits: Limits,
}

fn read(file: &Path) -> Result<Config, Failure> {
    let text = fs::read_to_string(file).context("cannot read the file")?;
    Ok(toml::from_str(&text)?)
}

fn app(limits: &Limits) -> Result<Router, Failure> {
    let mut limiters = limits.limiters(&MemoryStore::new())?;
    let mut limit = |name| match limiters.remove(name) {
        Some(limiter) => Ok(RateLimitLayer::new(limiter, key::PeerIp)),
        None => Err(Failure::new(format!("there is no [limits.{name}]: add it"))),
    };
    let api = Router::new()
        .route("/api/users", get(async || "ada, ben\n"))
        .route("/api/orders", get(async || "none\n"))
        .route_layer(limit("api")?);
    let login =
        Router::new().route("/login", post(async || "welcome\n")).route_layer(limit("login")?);
    // `layer` also limits requests without a route (404); `route_layer` does not.
    let app = api.merge(login).layer(limit("all")?);
    match limiters.keys().next() {
        Some(name) => Err(Failure::new(format!(
            "[limits.{name}] limits no route: remove it, or name it all, api or login"
        ))),
        None => Ok(app),
    }
}

fn print_limits(limits: &Limits) {
    for (name, limit) in limits.iter() {
        println!("{name}: {}, {}", limit.quota(), limit.algorithm());
    }
}

async fn serve(config: &Config, app: Router) -> Result<(), Failure> {
    let listen = config.listen;
    let listener =
        TcpListener::bind(listen).await.context(format_args!("cannot listen on {listen}"))?;
    let url = format!("http://{}", listener.local_addr()?);
    println!("listening on {url}");
    print_limits(&config.limits);
    let curl = format!("curl -s -o /dev/null -w '%{{http_code}}\\n' -X POST {url}/login");
    println!("try it: for i in $(seq 7); do {curl}; done");
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}

async fn run(flags: Flags) -> Result<(), Failure> {
    let file = flags.file.display();
    let config = read(&flags.file).context(&file)?;
    let app = app(&config.limits).context(&file)?;
    if flags.check {
        print_limits(&config.limits);
        return Ok(());
    }
    serve(&config, app).await
}

#[tokio::main]
async fn main() -> ExitCode {
    exit_code(run(Flags::parse()).await)
}
