//! An axum server that goes on limiting while Redis is away, each replica with its share of the quota, and tells
//! how Redis is doing.
//!
//! ```text
//! redis-server --port 7000 --save '' &
//! cargo run --example failover -- --redis redis://127.0.0.1:7000
//! curl http://127.0.0.1:3000/              # "decided by Store"
//! kill %1
//! curl http://127.0.0.1:3000/              # "decided by Local"
//! curl http://127.0.0.1:3000/health
//! ```

use std::{net::SocketAddr, process::ExitCode, str::FromStr, time::Duration};

use axum::{Extension, Router, routing::get};
use clap::Parser;
use tokio::net::TcpListener;
use tower_ratelimit::{
    Algorithm, Decision, FailurePolicy, Limiter, Quota, RateLimitLayer, RedisStore, key,
};

/// Answers GET / as often as the quota allows, and GET /health always.
#[derive(Parser)]
#[command(name = "failover")]
#[command(
    after_help = "Try it:  curl -i http://127.0.0.1:3000/; curl http://127.0.0.1:3000/health"
)]
struct Flags {
    /// Address to listen on; port 0 takes a free one
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:3000")]
    listen: SocketAddr,

    /// The Redis server; the URL of a master behind Sentinels has its name in place of a host
    #[arg(long, value_name = "URL", default_value = "redis://127.0.0.1/")]
    redis: String,

    /// A Redis Sentinel, once for each
    #[arg(long, value_name = "URL")]
    sentinel: Vec<String>,

    /// The time that Redis has for a decision, in milliseconds
    #[arg(long, value_name = "MS", default_value = "100")]
    deadline: u64,

    /// Requests per client address
    #[arg(long, value_name = "QUOTA", default_value = "100/min burst 20")]
    quota: Quota,

    /// While Redis is away: closed, open, or local:SHARE of the quota
    #[arg(long, value_name = "POLICY", default_value = "local:0.5")]
    policy: Policy,
}

#[derive(Clone)]
struct Policy(FailurePolicy);

impl FromStr for Policy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let share = |text: &str| text.parse().ok().filter(|share| *share > 0.0 && *share <= 1.0);
        match text.split_once(':') {
            None if text == "closed" => Ok(Self(FailurePolicy::Closed)),
            None if text == "open" => Ok(Self(FailurePolicy::Open)),
            Some(("local", text)) if share(text).is_some() => {
                let share = share(text).unwrap_or(1.0);
                Ok(Self(FailurePolicy::Local { share }))
            }
            _ => Err(String::from("use closed, open, or local:SHARE with a share up to 1")),
        }
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    match run(Flags::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(flags: Flags) -> Result<(), String> {
    let store = match &flags.sentinel[..] {
        [] => RedisStore::lazy(&flags.redis),
        sentinels => RedisStore::sentinel(sentinels, &flags.redis),
    };
    let store = store.map_err(|error| with_sources(&error))?;
    let store = store.deadline(Duration::from_millis(flags.deadline));
    let limiter = Limiter::new(store.clone(), Algorithm::token_bucket(), flags.quota);
    let layer = RateLimitLayer::new(limiter, key::PeerIp).on_failure(flags.policy.0);
    let hello = async |Extension(decision): Extension<Decision>| {
        format!("decided by {:?}, {} left\n", decision.source(), decision.remaining())
    };
    let app = Router::new()
        .route("/", get(hello).layer(layer))
        .route("/health", get(async move || format!("{:#?}\n", store.health())));

    let listener = TcpListener::bind(flags.listen).await.map_err(|error| error.to_string())?;
    let address = listener.local_addr().map_err(|error| error.to_string())?;
    println!("listening on http://{address}");
    let app = app.into_make_service_with_connect_info::<SocketAddr>();
    axum::serve(listener, app).await.map_err(|error| error.to_string())
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
