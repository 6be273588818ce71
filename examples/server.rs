//! An axum server that answers every path, limited as its flags say.
//!
//! ```text
//! cargo run --example server -- --quota "5/10s"
//! curl -i http://127.0.0.1:3000/          # six times: the sixth is a 429
//! ```

use std::{net::SocketAddr, process::ExitCode, time::Duration};

use axum::Router;
use clap::Parser;
use http::{HeaderName, request::Parts};
use tokio::net::TcpListener;
use tower_ratelimit::{
    Algorithm, Key, KeyExtractor, Limiter, MemoryStore, Quota, RateLimitLayer, RedisStore,
    RequestError, key,
};

/// Answers GET / (any path) with 200 and a short text, as often as the quota allows.
#[derive(Parser)]
#[command(name = "server", after_help = "Try it:  curl -i http://127.0.0.1:3000/")]
struct Flags {
    /// Address to listen on; port 0 takes a free one
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:3000")]
    listen: SocketAddr,

    /// Keep the counts in the Redis server at this URL, such as redis://127.0.0.1/, which has 5 s to
    /// answer before a request is refused; without it they are in memory
    #[arg(long, value_name = "URL")]
    redis: Option<String>,

    /// How requests are counted: fixed-window, sliding-window, sliding-log, token-bucket or
    /// leaky-bucket
    #[arg(long, value_name = "NAME", default_value = "token-bucket")]
    algorithm: Algorithm,

    /// How many are allowed, such as 10/s, "100/min burst 20" or 5/10s
    #[arg(long, value_name = "QUOTA", default_value = "10/s")]
    quota: Quota,

    /// Who is counted: peer-ip, global or header:NAME
    #[arg(long, value_name = "KEY", default_value = "peer-ip", value_parser = parse_key)]
    key: ClientKey,

    /// Request header that carries the request's cost, a positive integer; without it, and without
    /// this flag, a request costs 1
    #[arg(long, value_name = "NAME")]
    cost_header: Option<HeaderName>,
}

#[derive(Clone)]
enum ClientKey {
    PeerIp,
    Global,
    Header(key::Header),
}

fn parse_key(text: &str) -> Result<ClientKey, String> {
    match (text, text.strip_prefix("header:")) {
        ("peer-ip", _) => Ok(ClientKey::PeerIp),
        ("global", _) => Ok(ClientKey::Global),
        (_, Some(name)) => match HeaderName::try_from(name) {
            Ok(name) => Ok(ClientKey::Header(key::Header::from_name(name))),
            Err(_) => Err(format!("{name:?} is not the name of a header field")),
        },
        _ => Err(String::from("use peer-ip, global or header:NAME")),
    }
}

impl KeyExtractor<Parts> for ClientKey {
    fn extract(&self, head: &Parts) -> Result<Key<'static>, RequestError> {
        match self {
            Self::PeerIp => key::PeerIp.extract(head),
            Self::Global => key::Global.extract(head),
            Self::Header(header) => header.extract(head),
        }
    }
}

fn cost_of(head: &Parts, header: &HeaderName) -> Result<u32, RequestError> {
    let mut values = head.headers.get_all(header).iter();
    let cost = match (values.next(), values.next()) {
        (None, _) => return Ok(1),
        (Some(value), None) => value.to_str().unwrap_or_default().trim_start_matches('0'),
        _ => "",
    };
    match cost.bytes().all(|b| b.is_ascii_digit()) && !cost.is_empty() {
        // More than a number can hold is more than any quota grants.
        true => Ok(cost.parse().unwrap_or(u32::MAX)),
        false => {
            Err(RequestError::invalid(format!("the field {header} must be a positive integer")))
        }
    }
}

async fn limiter(flags: &Flags) -> Result<Limiter, String> {
    let limiter = match &flags.redis {
        None => Limiter::try_named("server", MemoryStore::new(), flags.algorithm, flags.quota),
        Some(url) => {
            let store = RedisStore::connect(url).await.map_err(|error| {
                format!("cannot use the Redis server at --redis: {}", with_sources(&error))
            })?;
            // Rather late than not: the server is for trying out, also with thousands of requests at once.
            let store = store.deadline(Duration::from_secs(5));
            Limiter::try_named("server", store, flags.algorithm, flags.quota)
        }
    };
    limiter.map_err(|error| error.to_string())
}

fn with_sources(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        // Some errors tell their source themselves.
        if !text.ends_with(&error.to_string()) {
            text.push_str(&format!(": {error}"));
        }
        source = error.source();
    }
    text
}

fn app(limiter: Limiter, flags: &Flags) -> Router {
    let mut layer = RateLimitLayer::new(limiter, flags.key.clone());
    if let Some(header) = flags.cost_header.clone() {
        layer = layer.cost(move |head: &Parts| cost_of(head, &header));
    }
    Router::new().fallback(async || "Hello! This request was within the quota.\n").layer(layer)
}

async fn run(flags: Flags) -> Result<(), String> {
    let app = app(limiter(&flags).await?, &flags);
    let listener = TcpListener::bind(flags.listen)
        .await
        .map_err(|error| format!("cannot listen on {}: {error}", flags.listen))?;
    let address = listener.local_addr().map_err(|error| error.to_string())?;
    println!("listening on http://{address}");
    let service = app.into_make_service_with_connect_info::<SocketAddr>();
    axum::serve(listener, service).await.map_err(|error| error.to_string())
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
