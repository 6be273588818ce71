//! Three callers share the quota of a vendor's API, which bans them for 5 s if they exceed it. To
//! compare, three others call a second vendor with the same rules, without the layer: they are
//! banned again and again.
//!
//! ```text
//! cargo run -p examples --example outbound                               # the callers are tasks
//! cargo run -p examples --example outbound -- --redis redis://127.0.0.1/ # they are processes
//! cargo run -p examples --example outbound -- --quota 60/2s              # too much: bans
//! ```
//!
//! If the vendor answers 429 nevertheless, its `Retry-After` blocks all callers. The code that a
//! client of a real vendor needs is in `QUOTA`, `limiter`, `client` and `call`. It holds no places,
//! and so has nothing to give back when it ends: see `flush` in `more/client.rs`.

mod support;

use std::{
    collections::VecDeque,
    io::{IsTerminal, Write, stdout},
    net::SocketAddr,
    process::ExitCode,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{
    Router,
    body::{Body, to_bytes},
    response::IntoResponse,
};
use clap::Parser;
use http::{Request, Response, StatusCode, Uri, header::RETRY_AFTER};
use hyper_util::{client::legacy, rt::TokioExecutor};
use support::{Context, Failure, exit_code};
use tokio::{
    net::TcpListener,
    process::Command,
    task::JoinSet,
    time::{Instant, sleep, sleep_until},
};
use tower::{BoxError, ServiceBuilder, ServiceExt, util::BoxCloneService};
use tower_ratelimit::{
    Algorithm, FailurePolicy, Limiter, MemoryStore, Quota, RateLimitLayer, RedisStore, VendorState,
    key, layer::Rejection, store::RedisConfig,
};

const CALLERS: usize = 3;
const IN_FLIGHT_PER_CALLER: usize = 4;

// The vendor's rule: `LIMIT` requests in any `WINDOW`; more than that is a `BAN`.
const LIMIT: usize = 240;
const WINDOW: Duration = Duration::from_secs(12);
const BAN: Duration = Duration::from_secs(5);

/// At most 1 + 234 requests leave in any 12 s, evenly spaced: a token bucket with a burst of 1. The
/// vendor counts arrivals, and some are late. The margin of 5 requests covers 250 ms of delay, or a
/// caller that stalls with 4 requests in flight.
const QUOTA: Quota = Quota::new(39, Duration::from_secs(2)).burst(1);

/// Callers use a vendor's API, which bans them if they exceed its quota: with the layer and without
#[derive(Parser)]
#[command(name = "outbound")]
struct Flags {
    /// Run each caller as a process, with the counts in the Redis server at
    /// this URL, such as redis://127.0.0.1/, instead of as a task, with the
    /// counts in memory
    #[arg(long, value_name = "URL", verbatim_doc_comment)]
    redis: Option<String>,

    /// The quota that the callers share
    #[arg(long, value_name = "QUOTA", default_value_t = QUOTA)]
    quota: Quota,

    /// The duration of the run, in seconds
    #[arg(long, value_name = "N", default_value_t = 30)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    seconds: u32,

    /// Run as a caller of the vendor at this address
    #[arg(long, hide = true)]
    call: Option<Uri>,

    /// The prefix of the keys in Redis
    #[arg(long, hide = true, default_value = "outbound")]
    prefix: String,
}

type Client = BoxCloneService<Request<Body>, Response<Body>, BoxError>;

async fn limiter(flags: &Flags) -> Result<Limiter, Failure> {
    let Some(url) = &flags.redis else {
        return Ok(Limiter::new("api", MemoryStore::new(), Algorithm::token_bucket(), flags.quota));
    };
    let config = RedisConfig::from_url(url)?.prefix(&flags.prefix);
    let store = RedisStore::new(config.deadline(Duration::from_secs(1)))?;
    store.ping().await.context("cannot use the Redis server at --redis")?;
    Ok(Limiter::new("api", store, Algorithm::token_bucket(), flags.quota))
}

fn client(limiter: Option<Limiter>) -> Client {
    let http = legacy::Client::builder(TokioExecutor::new()).build_http::<Body>();
    let Some(limiter) = limiter else {
        let service = ServiceBuilder::new().and_then(async |response: Response<_>| {
            if response.status() == StatusCode::TOO_MANY_REQUESTS {
                sleep(BAN).await; // each call by itself
            }
            Ok::<_, BoxError>(response)
        });
        return service.service(http).map_response(IntoResponse::into_response).boxed_clone();
    };
    // The layer rejects requests that would have to wait longer. They never reach the vendor.
    let layer = RateLimitLayer::new(limiter, key::Global)
        .max_wait(Duration::from_secs(2))
        .on_failure(FailurePolicy::Wait)
        .learn(VendorState::from_response)
        .extensions(true);
    let service = ServiceBuilder::new().map_err(BoxError::from).layer(layer).service(http);
    service.map_response(IntoResponse::into_response).boxed_clone()
}

/// Sends requests, one after the other, until one fails.
async fn call(client: Client, vendor: Uri) -> Result<(), Failure> {
    loop {
        let request = Request::get(vendor.clone()).body(Body::empty()).expect("the URI is valid");
        let response = client.clone().oneshot(request).await;
        let response = response.map_err(|error| Failure::new(error.to_string()))?;
        let pause = match response.extensions().get::<Rejection>() {
            // The 429 of the layer.
            Some(rejection @ Rejection::Denied(_)) => rejection.retry_after().unwrap_or_default(),
            Some(rejection) => return Err(rejection.clone()).context("a request was not sent"),
            // The response of the vendor. After a 429, the layer lets no request pass.
            None => Duration::ZERO,
        };
        // The client reuses a connection only after the body was read to its end.
        to_bytes(response.into_body(), usize::MAX).await?;
        sleep(pause).await;
    }
}

/// Keeps a few requests in flight, until one fails.
async fn run_caller(limiter: Option<Limiter>, vendor: Uri) -> Result<(), Failure> {
    let client = client(limiter);
    let calls = (0..IN_FLIGHT_PER_CALLER).map(|_| call(client.clone(), vendor.clone()));
    let mut calls = calls.collect::<JoinSet<_>>();
    calls.join_next().await.expect("there are calls").expect("a call does not panic")
}

async fn start_caller(
    url: String,
    quota: Quota,
    vendor: Uri,
    prefix: String,
) -> Result<(), Failure> {
    let status = Command::new(std::env::current_exe()?)
        .args(["--redis", &url, "--quota", &quota.to_string()])
        .args(["--call", &vendor.to_string(), "--prefix", &prefix])
        .kill_on_drop(true)
        .status()
        .await?;
    Err(Failure::new(format!("a caller ended: {status}")))
}

/// A vendor that counts exactly, in a sliding window.
#[derive(Default)]
struct Vendor {
    recent: VecDeque<Instant>,
    banned_until: Option<Instant>,
    accepted: usize,
    rejected: usize,
    bans: usize,
}

impl Vendor {
    fn forget(&mut self, now: Instant) {
        while self.recent.front().is_some_and(|at| now - *at >= WINDOW) {
            self.recent.pop_front();
        }
    }

    fn answer(&mut self, now: Instant) -> Response<Body> {
        self.forget(now);
        let banned = self.banned_until.is_some_and(|end| now < end);
        if !banned && self.recent.len() < LIMIT {
            self.recent.push_back(now);
            self.accepted += 1;
            return StatusCode::OK.into_response();
        }
        if !banned {
            self.banned_until = Some(now + BAN);
            self.bans += 1;
        }
        self.rejected += 1;
        (StatusCode::TOO_MANY_REQUESTS, [(RETRY_AFTER, BAN.as_secs())]).into_response()
    }

    /// Starts a vendor. Returns its address.
    async fn start() -> std::io::Result<(Arc<Mutex<Self>>, SocketAddr)> {
        let vendor = Arc::<Mutex<Self>>::default();
        let answer = {
            let vendor = vendor.clone();
            async move || vendor.lock().unwrap().answer(Instant::now())
        };
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        tokio::spawn(axum::serve(listener, Router::new().fallback(answer)).into_future());
        Ok((vendor, address))
    }

    fn progress(&self) -> String {
        format!("{:4} accepted, bans: {}", self.accepted, self.bans)
    }

    fn summary(&self, seconds: u32) -> String {
        let allowed = LIMIT as f64 * f64::from(seconds) / WINDOW.as_secs_f64();
        let used = 100.0 * self.accepted as f64 / allowed;
        format!("bans: {}, rejected: {}, quota used: {used:.1} %", self.bans, self.rejected)
    }
}

fn print_rules(flags: &Flags) {
    println!(
        "vendor: allows {LIMIT} requests in any {} s, and bans the callers for {} s if they exceed \
         that",
        WINDOW.as_secs(),
        BAN.as_secs()
    );
    println!(
        "with the layer: {CALLERS} {}, each with up to {IN_FLIGHT_PER_CALLER} requests in flight; \
         they share {} requests per {} s, evenly spaced",
        if flags.redis.is_some() { "processes" } else { "tasks" },
        flags.quota.limit(),
        flags.quota.window().as_secs()
    );
    println!("without it: as many tasks, which call a second vendor");
}

/// Starts the callers with the layer, and those without it. Returns the vendor of each.
async fn start_callers(
    flags: &Flags,
    limiter: Limiter,
    callers: &mut JoinSet<Result<(), Failure>>,
) -> Result<[Arc<Mutex<Vendor>>; 2], Failure> {
    let uri =
        |address| Uri::try_from(format!("http://{address}/")).expect("an address makes a URI");
    let (vendor, address) = Vendor::start().await?;
    // A prefix for this run alone, so that runs at the same time share no counts.
    let prefix = format!("outbound-{}-{}", std::process::id(), address.port());
    let (other_vendor, other_address) = Vendor::start().await?;
    for _ in 0..CALLERS {
        let vendor = uri(address);
        match flags.redis.clone() {
            None => callers.spawn(run_caller(Some(limiter.clone()), vendor)),
            Some(url) => callers.spawn(start_caller(url, flags.quota, vendor, prefix.clone())),
        };
        callers.spawn(run_caller(None, uri(other_address)));
    }
    Ok([vendor, other_vendor])
}

async fn run(flags: Flags) -> Result<(), Failure> {
    // The parent connects to Redis as well, so that a wrong URL is reported once.
    let limiter = limiter(&flags).await?;
    if let Some(vendor) = flags.call {
        return run_caller(Some(limiter), vendor).await;
    }

    print_rules(&flags);
    let mut callers = JoinSet::new();
    let [with, without] = start_callers(&flags, limiter, &mut callers).await?;
    let start = Instant::now();
    let terminal = stdout().is_terminal();
    for second in 1..=flags.seconds {
        tokio::select! {
            _ = sleep_until(start + Duration::from_secs(second.into())) => {}
            Some(end) = callers.join_next() => return end.expect("a caller does not panic"),
        }
        let [with, without] = [&with, &without].map(|vendor| vendor.lock().unwrap().progress());
        let end = if terminal && second < flags.seconds { '\r' } else { '\n' };
        print!("{second:3} s | with the layer: {with} | without it: {without}{end}");
        let _ = stdout().flush();
    }
    for (name, vendor) in [("with the layer", &with), ("without it", &without)] {
        println!("{name}: {}", vendor.lock().unwrap().summary(flags.seconds));
    }
    callers.shutdown().await;
    Ok(())
}

#[tokio::main]
async fn main() -> ExitCode {
    exit_code(run(Flags::parse()).await)
}
