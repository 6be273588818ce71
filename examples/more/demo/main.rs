//! Two replicas of a service, one Redis, load, and a page with a switch that breaks Redis.
//!
//! ```text
//! make demo
//! cargo run -p more-examples --example demo
//! ```
//!
//! Then open the address that it prints. The replicas are processes of their own. A client sends
//! 200 requests per second, 7 of 10 to the first replica. The limit is 50 per second.

#[path = "../playground/own_page.rs"]
mod own_page;
#[allow(dead_code, reason = "the playground uses the rest")]
#[path = "../playground/redis_server.rs"]
mod redis_server;
#[path = "../../support/mod.rs"]
mod support;

use std::{
    collections::VecDeque,
    io::Read,
    net::SocketAddr,
    process::{ExitCode, Stdio},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use axum::{
    Json, Router,
    extract::State,
    http::{HeaderMap, StatusCode, header},
    response::{Html, IntoResponse},
    routing::{get, post},
};
use clap::Parser;
use own_page::is_own_page;
use redis_server::Redis;
use serde::Serialize;
use support::{Context, Failure, exit_code};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    net::TcpListener,
    process::{Child, Command},
    signal::unix::{SignalKind, signal},
    time::interval,
};
use tower_ratelimit::{Algorithm, FailurePolicy, Limiter, Quota, RateLimitLayer, key, store};

const PAGE: &str = include_str!("page.html");
const POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; \
                      connect-src 'self'; base-uri 'none'; form-action 'none'";

const QUOTA: Quota = Quota::per_second(50).burst(10);
/// The requests of each step of the load, and the steps of a second.
const REQUESTS: usize = 2;
const STEP: Duration = Duration::from_millis(10);
/// The seconds that the page shows.
const SHOWN: usize = 60;

/// Shows two replicas that share a limit in Redis, and what they do when it breaks
#[derive(Parser)]
#[command(name = "demo")]
struct Flags {
    /// Address to listen on; port 0 takes a free one
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:3000")]
    listen: SocketAddr,

    /// Runs as a replica over this Redis, until the standard input ends
    #[arg(long, value_name = "URL", hide = true)]
    replica: Option<String>,
}

/// What happened to the requests of a replica in a second.
#[derive(Clone, Copy, Default, Serialize)]
struct Counts {
    admitted: u32,
    denied: u32,
    failed: u32,
}

struct Demo {
    redis: Redis,
    /// The latest second is the last.
    seconds: Mutex<VecDeque<[Counts; 2]>>,
    is_local: bool,
}

impl Demo {
    fn seconds(&self) -> MutexGuard<'_, VecDeque<[Counts; 2]>> {
        self.seconds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count(&self, replica: usize, status: Option<StatusCode>) {
        let mut seconds = self.seconds();
        let Some(counts) = seconds.back_mut().map(|second| &mut second[replica]) else { return };
        match status {
            Some(StatusCode::OK) => counts.admitted += 1,
            Some(StatusCode::TOO_MANY_REQUESTS) => counts.denied += 1,
            _ => counts.failed += 1,
        }
    }

    fn next_second(&self) {
        let mut seconds = self.seconds();
        seconds.push_back(Default::default());
        if seconds.len() > SHOWN + 1 {
            seconds.pop_front();
        }
    }
}

/// The service: what a reader would write.
async fn replica(url: &str) -> Result<(), Failure> {
    let limiter = Limiter::new("demo", store::lazy(url)?, Algorithm::token_bucket(), QUOTA);
    // While Redis is broken, each of the two replicas enforces its half.
    let layer =
        RateLimitLayer::new(limiter, key::header("x-client")).on_failure(FailurePolicy::local(0.5));
    let app = Router::new().route("/", get(async || "hello\n")).layer(layer);
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    println!("{}", listener.local_addr()?);
    // If the program ends, however it does, its replicas end.
    let end = tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut vec![]));
    tokio::select! {
        end = axum::serve(listener, app) => Ok(end?),
        _ = end => std::process::exit(0),
    }
}

/// Starts a replica. Returns its process and its URL.
async fn start_replica(redis: &str) -> Result<(Child, String), Failure> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["--replica", redis]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut process = command.kill_on_drop(true).spawn().context("cannot start a replica")?;
    let output = process.stdout.take().ok_or_else(|| Failure::new("a replica has no output"))?;
    let line = BufReader::new(output).lines().next_line().await?;
    let address = line.ok_or_else(|| Failure::new("a replica ended at its start"))?;
    Ok((process, format!("http://{address}/")))
}

/// Sends the load until it is dropped.
async fn load(demo: Arc<Demo>, urls: [String; 2]) -> Result<(), Failure> {
    let client = reqwest::Client::builder().timeout(Duration::from_secs(2)).build()?;
    let mut steps = interval(STEP);
    for number in 0_usize.. {
        if number.is_multiple_of(100 * REQUESTS) {
            demo.next_second();
        }
        if number.is_multiple_of(REQUESTS) {
            steps.tick().await;
        }
        let replica = usize::from(number % 10 >= 7);
        let request = client.get(&urls[replica]).header("x-client", "shop");
        let demo = demo.clone();
        tokio::spawn(async move {
            let response = request.send().await;
            demo.count(replica, response.ok().map(|response| response.status()));
        });
    }
    Ok(())
}

async fn page() -> impl IntoResponse {
    ([(header::CONTENT_SECURITY_POLICY, POLICY), (header::CACHE_CONTROL, "no-store")], Html(PAGE))
}

async fn numbers(State(demo): State<Arc<Demo>>) -> impl IntoResponse {
    let numbers = serde_json::json!({
        "limit": QUOTA.limit(),
        "redis": demo.redis.is_running(),
        "seconds": *demo.seconds(),
    });
    ([(header::CACHE_CONTROL, "no-store")], Json(numbers))
}

/// Breaks or repairs Redis.
async fn switch(State(demo): State<Arc<Demo>>, headers: HeaderMap, body: String) -> StatusCode {
    if !is_own_page(&headers, demo.is_local) {
        return StatusCode::FORBIDDEN;
    }
    let done = tokio::task::spawn_blocking(move || match body.as_str() {
        "break" => {
            demo.redis.kill();
            Ok(())
        }
        _ => demo.redis.revive(),
    });
    match done.await {
        Ok(Ok(())) => StatusCode::NO_CONTENT,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

async fn run(flags: Flags) -> Result<(), Failure> {
    if let Some(url) = flags.replica {
        return replica(&url).await;
    }
    let mut terminate = signal(SignalKind::terminate())?;
    let redis = Redis::start()?;
    let (_first, first) = start_replica(redis.url()).await?;
    let (_second, second) = start_replica(redis.url()).await?;
    let listener = TcpListener::bind(flags.listen)
        .await
        .context(format_args!("cannot listen on {}", flags.listen))?;
    println!("listening on http://{}", listener.local_addr()?);
    println!("replicas: {first} and {second}, {QUOTA} together");
    let is_local = flags.listen.ip().is_loopback();
    let demo = Arc::new(Demo { redis, seconds: Mutex::default(), is_local });
    let app = Router::new()
        .route("/", get(page))
        .route("/numbers", get(numbers))
        .route("/redis", post(switch))
        .with_state(demo.clone());
    // The end of the program drops the server and the replicas, and so ends them.
    tokio::select! {
        end = axum::serve(listener, app) => Ok(end?),
        end = load(demo, [first, second]) => end,
        _ = tokio::signal::ctrl_c() => Ok(()),
        _ = terminate.recv() => Ok(()),
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    exit_code(run(Flags::parse()).await)
}
