//! An axum server that keeps limiting while Redis is down. Each replica then has a share of the
//! quota. `GET /health` shows the health of the Redis store.
//!
//! ```text
//! redis-server --port 7000 --save '' --daemonize yes
//! cargo run -p examples --example failover -- --redis redis://127.0.0.1:7000
//! ```
//!
//! It prints whether Redis answers, and commands to paste into another terminal: requests while
//! Redis runs, while it is stopped, and after a restart. The events of the crate go to stderr.

#[path = "support/shutdown.rs"]
mod shutdown;
mod support;

use std::{env, net::SocketAddr, process::ExitCode, str::FromStr, time::Duration};

use axum::{Extension, Router, routing::get};
use clap::Parser;
use http::{HeaderValue, header::CONTENT_TYPE};
use redis::{Client, ConnectionAddr};
use shutdown::{serve, stopping};
use support::{Context, Failure, exit_code};
use tokio::net::TcpListener;
use tower_ratelimit::{
    Algorithm, Decision, FailurePolicy, Limiter, Quota, RateLimitLayer, RedisStore, key,
    layer::Rejection,
    store::{Health, RedisConfig, Source, Store},
};

/// Answers GET / until the quota is used up, also while Redis is down, and GET /health always
#[derive(Parser)]
#[command(name = "failover")]
#[command(
    after_help = "Try it:  curl -i http://127.0.0.1:3000/; curl http://127.0.0.1:3000/health"
)]
struct Flags {
    /// Address to listen on; port 0 takes a free one
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:3000")]
    listen: SocketAddr,

    /// The Redis server; with --sentinel, the host is the name of the
    /// master [default: redis://127.0.0.1/]
    #[arg(long, value_name = "URL", default_value = "redis://127.0.0.1/")]
    #[arg(verbatim_doc_comment, hide_default_value = true)]
    redis: String,

    /// A Redis Sentinel; can be repeated
    #[arg(long, value_name = "URL")]
    sentinel: Vec<String>,

    /// The deadline of a decision by Redis, in milliseconds
    #[arg(long, value_name = "MS", default_value = "100")]
    deadline: u64,

    /// Requests per client address
    #[arg(long, value_name = "QUOTA", default_value = "100/min burst 20")]
    quota: Quota,

    /// The failure policy while Redis is down: closed rejects requests,
    /// open allows them, local:SHARE checks them against that share of the
    /// quota in the memory of this process
    #[arg(long, value_name = "POLICY", default_value = "local:0.5", verbatim_doc_comment)]
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
                Ok(Self(FailurePolicy::local(share)))
            }
            _ => Err(String::from("use closed, open, or local:SHARE with a share up to 1")),
        }
    }
}

fn store(flags: &Flags) -> Result<RedisStore, Failure> {
    let config = match &flags.sentinel[..] {
        [] => RedisConfig::from_url(&flags.redis),
        sentinels => RedisConfig::sentinels(sentinels, &flags.redis),
    };
    Ok(RedisStore::new(config?.deadline(Duration::from_millis(flags.deadline)))?)
}

fn app(store: RedisStore, quota: Quota, policy: FailurePolicy) -> Router {
    let limiter = Limiter::new("api", store.clone(), Algorithm::token_bucket(), quota);
    let layer = RateLimitLayer::new(limiter, key::PeerIp)
        .extensions(true)
        .on_failure(policy)
        .map_rejection(|rejection, _head, mut response| {
            response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain"));
            response.map(|_| explain(rejection))
        });
    Router::new()
        .route("/", get(hello).layer(layer))
        .route("/health", get(async move || describe(store.health())))
}

async fn hello(Extension(decision): Extension<Decision>) -> String {
    let left = decision.remaining();
    match decision.source() {
        Source::Open => String::from("allowed without a limit, because Redis gave no answer\n"),
        source => {
            format!("allowed by {}: {left} left of {}\n", decided_by(source), decision.quota())
        }
    }
}

fn explain(rejection: &Rejection) -> String {
    match rejection {
        Rejection::Denied(decision) => format!(
            "denied by {}: retry in {:.1} s\n",
            decided_by(decision.source()),
            decision.retry_after().unwrap_or_default().as_secs_f64()
        ),
        Rejection::Store(_) => String::from("rejected, because Redis gave no answer\n"),
        rejection => format!("rejected: {rejection}\n"),
    }
}

fn decided_by(source: Source) -> &'static str {
    match source {
        Source::Store => "Redis",
        _ => "this process, because Redis gave no answer",
    }
}

/// Describes the counters of the store. Redis stays available after a single failure: an outage
/// begins after several in a row.
fn describe(health: Health) -> String {
    let calls = match health.is_available {
        true => "each decision calls Redis",
        false => "no decision calls Redis until a probe gets an answer",
    };
    let Health { answers, timeouts, errors, skipped, outages, .. } = health;
    format!(
        "available: {}, {calls}\n\
         calls answered by Redis, probes included: {answers}\n\
         calls that timed out: {timeouts}\n\
         connection failures and error replies: {errors}\n\
         decisions without a call: {skipped}\n\
         outages: {outages}\n",
        health.is_available
    )
}

/// Says whether Redis answers, and if it does not, how to get one.
async fn redis_state(store: &RedisStore) -> String {
    let Err(error) = store.ping().await else { return String::from("Redis: answers") };
    let start = "redis-server --port 7000 --save '' --daemonize yes";
    let advice = match is_installed("redis-server") {
        true => format!("to start one:\n  {start}"),
        false => format!(
            "redis-server is not installed here: install it with `make redis-server`, \
             `apt-get install redis-server` or `brew install redis`, then start it:\n  {start}"
        ),
    };
    format!(
        "Redis: NO ANSWER, so the failure policy decides: {}\n{advice}\n\
         then start this program again with --redis redis://127.0.0.1:7000",
        Failure::from(error)
    )
}

fn is_installed(program: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

/// The commands that stop and start the Redis server. They lose its data, so they are printed only
/// for a server on this machine that does not use the default port.
fn stop_and_start(flags: &Flags) -> (String, String) {
    let client = Client::open(&*flags.redis);
    let address = client.as_ref().map(|client| client.get_connection_info().addr());
    match address {
        Ok(ConnectionAddr::Tcp(host, port))
            if flags.sentinel.is_empty() && host == "127.0.0.1" && *port != 6379 =>
        {
            (
                format!("redis-cli -p {port} shutdown nosave"),
                format!("redis-server --port {port} --save '' --daemonize yes"),
            )
        }
        _ => (String::from("# stop Redis"), String::from("# start Redis")),
    }
}

fn print_hints(flags: &Flags, url: &str) {
    let (stop, start) = stop_and_start(flags);
    let curl = format!("for i in $(seq 10); do curl -s {url}/; sleep 0.1; done");
    println!("try it, one line after the other:");
    for line in [&*curl, &stop, &curl, &format!("curl -s {url}/health"), &start, "sleep 1", &curl] {
        println!("  {line}");
    }
}

async fn run(flags: Flags) -> Result<(), Failure> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_target(false).init();
    let store = store(&flags)?;
    let app = app(store.clone(), flags.quota, flags.policy.0);
    let stopping = stopping()?;
    let listener = TcpListener::bind(flags.listen)
        .await
        .context(format_args!("cannot listen on {}", flags.listen))?;
    let url = format!("http://{}", listener.local_addr()?);
    println!("listening on {url}");
    println!("limit: {} per client address, counts in Redis", flags.quota);
    println!("{}", redis_state(&store).await);
    print_hints(&flags, &url);
    Ok(serve(listener, app, store.into_any(), stopping).await?)
}

#[tokio::main]
async fn main() -> ExitCode {
    exit_code(run(Flags::parse()).await)
}
