//! An axum server that reads its limits from a file: one for each group of routes, and one for all
//! routes. It reads the file again when its text changes, without a restart. Counts are kept.
//!
//! ```text
//! cargo run -p examples --example configured -- --check     # prints the limits of the file
//! cargo run -p examples --example configured
//! curl -i -X POST http://127.0.0.1:3000/login   # six times: the sixth response is a 429
//! sed -i 's|5/min|10/min|' examples/limits.toml # in another terminal: five more
//! ```
//!
//! With `--features metrics` and `-- --metrics 127.0.0.1:9100` it serves metrics and the keys that
//! are denied most, as the example `server` does.

#[path = "support/observed.rs"]
mod observed;
#[path = "support/shutdown.rs"]
mod shutdown;
mod support;

use std::{net::SocketAddr, path::PathBuf, process::ExitCode, time::Duration};

use axum::{
    Router,
    routing::{get, post},
};
use clap::Parser;
use observed::observed;
use serde::Deserialize;
use shutdown::stopping;
use support::{Context, Failure, exit_code};
use tokio::{fs, net::TcpListener, time::sleep};
use tower_ratelimit::{
    RateLimitLayer,
    config::{Limiters, Limits},
    key,
    store::{self, AnyStore},
};

/// The limits that the routes use.
const NAMES: [&str; 3] = ["all", "api", "login"];

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

    /// Serve metrics for Prometheus at /metrics of this address, the keys that
    /// are denied most at /top-denied (DELETE begins anew), and the state of
    /// the store at /health; needs --features metrics
    #[arg(long, value_name = "ADDR", verbatim_doc_comment)]
    metrics: Option<SocketAddr>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    listen: SocketAddr,
    limits: Limits,
}

/// Reads the text of the file. A mistake is reported with its line and setting.
fn parse(text: &str) -> Result<Config, Failure> {
    let config: Config = toml::from_str(text)?;
    if let Some((name, _)) = config.limits.iter().find(|(name, _)| !NAMES.contains(name)) {
        return Err(Failure::new(format!(
            "[limits.{name}] limits no route: remove it, or name it all, api or login"
        )));
    }
    Ok(config)
}

fn app(limiters: &Limiters) -> Result<Router, Failure> {
    let limit = |name| Ok::<_, Failure>(RateLimitLayer::new(limiters.get(name)?, key::PeerIp));
    let api = Router::new()
        .route("/api/users", get(async || "ada, ben\n"))
        .route("/api/orders", get(async || "none\n"))
        .route_layer(limit("api")?);
    let login =
        Router::new().route("/login", post(async || "welcome\n")).route_layer(limit("login")?);
    // `layer` also limits requests without a route (404); `route_layer` does not.
    Ok(api.merge(login).layer(limit("all")?))
}

/// Applies the file whenever its text has changed. A file with a mistake changes nothing.
async fn watch(file: PathBuf, mut text: String, listen: SocketAddr, limiters: Limiters) {
    loop {
        sleep(Duration::from_secs(1)).await;
        // While an editor replaces the file, it may be missing for a moment.
        let Ok(new) = fs::read_to_string(&file).await else { continue };
        if new == text {
            continue;
        }
        text = new;
        match parse(&text).and_then(|config| apply(&config, listen, &limiters)) {
            Ok(()) => println!("the limits have changed"),
            Err(error) => {
                let (file, error) = (file.display(), error.to_string());
                eprintln!("{file}: {}\nthe limits stay as they were", error.trim_end());
            }
        }
    }
}

fn apply(config: &Config, listen: SocketAddr, limiters: &Limiters) -> Result<(), Failure> {
    if config.listen != listen {
        return Err(Failure::new("listen: another address takes a restart"));
    }
    limiters.reload(&config.limits)?;
    print_limits(&config.limits);
    Ok(())
}

fn print_limits(limits: &Limits) {
    for (name, limit) in limits {
        println!("{name}: {}, {}", limit.quota(), limit.algorithm());
    }
}

async fn serve(
    listen: SocketAddr,
    limits: &Limits,
    app: Router,
    store: AnyStore,
) -> Result<(), Failure> {
    let stopping = stopping()?;
    let listener =
        TcpListener::bind(listen).await.context(format_args!("cannot listen on {listen}"))?;
    let url = format!("http://{}", listener.local_addr()?);
    println!("listening on {url}");
    print_limits(limits);
    let curl = format!("curl -s -o /dev/null -w '%{{http_code}}\\n' -X POST {url}/login");
    println!("try it: for i in $(seq 7); do {curl}; done");
    Ok(shutdown::serve(listener, app, store, stopping).await?)
}

async fn run(flags: Flags) -> Result<(), Failure> {
    let file = flags.file.display();
    let text = fs::read_to_string(&flags.file).await;
    let text = text.context("cannot read the file").context(&file)?;
    let Config { listen, limits } = parse(&text).context(&file)?;
    let metrics = flags.metrics.filter(|_| !flags.check);
    let store = observed(store::lazy("memory:")?, metrics).await?;
    let limiters = limits.limiters(&store)?;
    let app = app(&limiters).context(&file)?;
    if flags.check {
        print_limits(&limits);
        return Ok(());
    }
    tokio::spawn(watch(flags.file, text, listen, limiters));
    serve(listen, &limits, app, store).await
}

#[tokio::main]
async fn main() -> ExitCode {
    // Each change of a limit is an event, such as "login: 5/min -> 10/min".
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    exit_code(run(Flags::parse()).await)
}
