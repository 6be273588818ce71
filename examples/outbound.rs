//! Three callers share one quota for a vendor's API, which bans for 5 seconds whoever exceeds it.
//!
//! ```text
//! cargo run --example outbound                                  # the callers are tasks
//! cargo run --example outbound -- --redis redis://127.0.0.1/    # the callers are processes
//! cargo run --example outbound -- --without-limit               # shows the bans
//! ```
//!
//! What a client of a real vendor needs is in `QUOTA`, `limiter`, `client` and `call`.

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
use http::{Request, Response, StatusCode, Uri};
use hyper_util::{client::legacy, rt::TokioExecutor};
use tokio::{
    net::TcpListener,
    process::Command,
    task::JoinSet,
    time::{Instant, sleep, sleep_until},
};
use tower::{ServiceBuilder, ServiceExt, util::BoxCloneService};
use tower_ratelimit::{
    Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, RedisStore, Rejection, key,
};

const CALLERS: usize = 3;
const IN_FLIGHT_PER_CALLER: usize = 4;

// The vendor's terms.
const LIMIT: usize = 240;
const WINDOW: Duration = Duration::from_secs(12);
const BAN: Duration = Duration::from_secs(5);

/// 97.5 % of the vendor's rate. Requests leave evenly, but some arrive late, and the vendor counts
/// arrivals: the 6 requests in 12 seconds that are left out make up for 300 ms of delay, or for a
/// caller that stalls with 4 in flight.
///
/// The burst is how many may be in the bucket, where they wait: more than are ever in flight.
const QUOTA: Quota = Quota::new(39, Duration::from_secs(2)).burst(20);

/// Three callers make requests as fast as a vendor allows, and the layer keeps them from being banned.
#[derive(Parser)]
#[command(name = "outbound")]
struct Flags {
    /// Run each caller as a process, and share the quota in the Redis server at this URL, such as
    /// redis://127.0.0.1/; without it they are tasks that share it in memory
    #[arg(long, value_name = "URL", conflicts_with = "without_limit")]
    redis: Option<String>,

    /// How long to make requests
    #[arg(long, value_name = "N", default_value_t = 30)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    seconds: u32,

    /// Leave the layer out, to see the bans
    #[arg(long)]
    without_limit: bool,

    /// Be a caller of the vendor at this address
    #[arg(long, hide = true)]
    call: Option<Uri>,

    /// What the keys in Redis begin with
    #[arg(long, hide = true, default_value = "outbound")]
    prefix: String,
}

type Client = BoxCloneService<Request<Body>, Response<Body>, legacy::Error>;

async fn limiter(flags: &Flags) -> Result<Limiter, String> {
    let Some(url) = &flags.redis else {
        return Ok(Limiter::new(MemoryStore::new(), Algorithm::LeakyBucket, QUOTA));
    };
    let store = RedisStore::connect(url).await.map_err(|error| {
        format!("cannot use the Redis server at --redis: {}", with_sources(&error))
    })?;
    let store = store.prefix(&flags.prefix).deadline(Duration::from_secs(1));
    Ok(Limiter::new(store, Algorithm::LeakyBucket, QUOTA))
}

fn client(limiter: Option<Limiter>) -> Client {
    let http = legacy::Client::builder(TokioExecutor::new()).build_http::<Body>();
    let Some(limiter) = limiter else {
        return http.map_response(IntoResponse::into_response).boxed_clone();
    };
    // A request that would wait for longer is refused by the layer, and the vendor never sees it.
    let layer = RateLimitLayer::new(limiter, key::Global).max_wait(Duration::from_secs(2));
    let service = ServiceBuilder::new().layer(layer).service(http);
    service.map_response(IntoResponse::into_response).boxed_clone()
}

/// Makes requests, one after the other.
async fn call(client: Client, vendor: Uri) -> Result<(), String> {
    loop {
        let request = Request::get(vendor.clone()).body(Body::empty()).expect("the URI is valid");
        let answer = client.clone().oneshot(request).await;
        let response = answer.map_err(|error| with_sources(&error))?;
        let pause = match response.extensions().get::<Rejection>() {
            // The layer's own 429.
            Some(Rejection::Denied(decision)) => decision.retry_after().unwrap_or_default(),
            Some(rejection) => {
                return Err(format!("a request was not sent: {}", with_sources(rejection)));
            }
            // The vendor's.
            None if response.status() == StatusCode::TOO_MANY_REQUESTS => BAN,
            None => Duration::ZERO,
        };
        // A connection is used again only after a body that was read to its end.
        to_bytes(response.into_body(), usize::MAX).await.map_err(|error| with_sources(&error))?;
        sleep(pause).await;
    }
}

/// Keeps a few requests in flight, until one fails.
async fn be_a_caller(limiter: Option<Limiter>, vendor: Uri) -> Result<(), String> {
    let client = client(limiter);
    let calls = (0..IN_FLIGHT_PER_CALLER).map(|_| call(client.clone(), vendor.clone()));
    let mut calls = calls.collect::<JoinSet<_>>();
    calls.join_next().await.expect("there are calls").expect("a call does not panic")
}

async fn start_a_caller(url: String, vendor: Uri, prefix: String) -> Result<(), String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let status = Command::new(program)
        .args(["--redis", &url, "--call", &vendor.to_string(), "--prefix", &prefix])
        .kill_on_drop(true)
        .status()
        .await;
    Err(status.map_or_else(|error| error.to_string(), |status| format!("a caller ended: {status}")))
}

/// Counts exactly, in a window that slides.
#[derive(Default)]
struct Vendor {
    recent: VecDeque<Instant>,
    banned_until: Option<Instant>,
    accepted: usize,
    refused: usize,
    bans: usize,
}

impl Vendor {
    fn forget(&mut self, now: Instant) {
        while self.recent.front().is_some_and(|at| now - *at >= WINDOW) {
            self.recent.pop_front();
        }
    }

    fn answer(&mut self, now: Instant) -> StatusCode {
        self.forget(now);
        let banned = self.banned_until.is_some_and(|end| now < end);
        if !banned && self.recent.len() < LIMIT {
            self.recent.push_back(now);
            self.accepted += 1;
            return StatusCode::OK;
        }
        if !banned {
            self.banned_until = Some(now + BAN);
            self.bans += 1;
        }
        self.refused += 1;
        StatusCode::TOO_MANY_REQUESTS
    }

    async fn serve(vendor: Arc<Mutex<Self>>) -> std::io::Result<SocketAddr> {
        let answer = async move || vendor.lock().unwrap().answer(Instant::now());
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        tokio::spawn(axum::serve(listener, Router::new().fallback(answer)).into_future());
        Ok(address)
    }
}

async fn run(flags: Flags) -> Result<(), String> {
    // Asked for by the parent, too, so that a wrong URL is reported once.
    let limiter = limiter(&flags).await?;
    let limiter = Some(limiter).filter(|_| !flags.without_limit);
    if let Some(vendor) = flags.call {
        return be_a_caller(limiter, vendor).await;
    }

    let vendor = Arc::<Mutex<Vendor>>::default();
    let address = Vendor::serve(vendor.clone()).await.map_err(|error| error.to_string())?;
    let uri = Uri::try_from(format!("http://{address}/")).expect("an address makes a URI");
    // Of this run alone.
    let prefix = format!("outbound-{}-{}", std::process::id(), address.port());
    let mut callers = JoinSet::new();
    for _ in 0..CALLERS {
        match flags.redis.clone() {
            None => callers.spawn(be_a_caller(limiter.clone(), uri.clone())),
            Some(url) => callers.spawn(start_a_caller(url, uri.clone(), prefix.clone())),
        };
    }

    let start = Instant::now();
    let terminal = stdout().is_terminal();
    for second in 1..=flags.seconds {
        tokio::select! {
            _ = sleep_until(start + Duration::from_secs(second.into())) => {}
            Some(end) = callers.join_next() => return end.expect("a caller does not panic"),
        }
        let mut vendor = vendor.lock().unwrap();
        vendor.forget(Instant::now());
        let Vendor { recent, accepted, refused, bans, .. } = &*vendor;
        let end = if terminal && second < flags.seconds { '\r' } else { '\n' };
        print!(
            "{second:3} s: {accepted} accepted, {:3} of {LIMIT} in the last {WINDOW:?}, {refused} refused, \
             bans: {bans}{end}",
            recent.len()
        );
        let _ = stdout().flush();
    }
    let Vendor { accepted, bans, .. } = *vendor.lock().unwrap();
    callers.shutdown().await;
    let allowed = LIMIT as f64 * f64::from(flags.seconds) / WINDOW.as_secs_f64();
    println!("bans: {bans}, quota used: {:.1} %", 100.0 * accepted as f64 / allowed);
    Ok(())
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
