//! An axum server with a limit, set by flags: it answers every path and prints a line per request.
//!
//! ```text
//! cargo run -p examples --example server
//! ```
//!
//! It prints a `curl` loop to paste into another terminal: five requests are allowed, the sixth is
//! a 429. The code that uses the crate is in `ClientKey`, `app` and `run`.

#[path = "support/observed.rs"]
mod observed;
#[path = "support/request_log.rs"]
mod request_log;
#[path = "support/shutdown.rs"]
mod shutdown;
mod support;

use std::{net::SocketAddr, process::ExitCode, time::Duration};

use axum::{
    Router,
    extract::{Request, State},
    middleware::{self, Next},
    response::Response,
};
use clap::Parser;
use http::{HeaderName, request::Parts};
use observed::observed;
use request_log::{Outcome, RequestLog, request_log};
use shutdown::{serve, stopping};
use support::{Context, Failure, exit_code};
use tokio::net::TcpListener;
use tower_ratelimit::{
    Algorithm, Charge, Decision, Key, Limiter, Quota, RateLimitLayer,
    key::{self, KeyExtractor},
    layer::{Rejection, RequestError},
    store,
};
use tracing_subscriber::filter::LevelFilter;

/// Answers requests to any path with 200 and a short text, until the quota is used up
#[derive(Parser)]
#[command(name = "server")]
#[command(
    after_help = "Try it:  curl -i http://127.0.0.1:3000/ (the sixth in quick succession is a 429)"
)]
struct Flags {
    /// Address to listen on; port 0 takes a free one
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:3000")]
    listen: SocketAddr,

    /// Keep the counts in Redis at this URL, such as redis://127.0.0.1/,
    /// instead of in memory; if Redis does not answer within 100 ms, or the
    /// deadline in the URL, as in ?deadline=1s, the request is rejected
    #[arg(long, value_name = "URL", verbatim_doc_comment)]
    redis: Option<String>,

    /// The algorithm: fixed-window, sliding-window, sliding-log,
    /// token-bucket or leaky-bucket
    #[arg(long, value_name = "NAME", default_value = "token-bucket", verbatim_doc_comment)]
    algorithm: Algorithm,

    /// Requests per key, such as 10/s or "100/min burst 20"
    #[arg(long, value_name = "QUOTA", default_value = "5/10s")]
    quota: Quota,

    /// The key of a request: peer-ip, global or header:NAME
    #[arg(long, value_name = "KEY", default_value = "peer-ip", value_parser = parse_key)]
    key: ClientKey,

    /// The header with the cost of a request, a positive integer; a request
    /// without the header costs 1
    #[arg(long, value_name = "NAME", verbatim_doc_comment)]
    cost_header: Option<HeaderName>,

    /// Serve metrics for Prometheus at /metrics of this address, the keys that
    /// are denied most at /top-denied (DELETE begins anew), and the state of
    /// the store at /health; needs --features metrics
    #[arg(long, value_name = "ADDR", verbatim_doc_comment)]
    metrics: Option<SocketAddr>,

    /// The events on the standard error output: error, warn, info, debug (with
    /// denials) or trace (with their keys)
    #[arg(long, value_name = "LEVEL", default_value = "info", verbatim_doc_comment)]
    log: LevelFilter,

    /// Print no line per request
    #[arg(long)]
    quiet: bool,
}

#[derive(Clone)]
enum ClientKey {
    PeerIp,
    Global,
    Header(HeaderName, key::Value),
}

fn parse_key(text: &str) -> Result<ClientKey, String> {
    match (text, text.strip_prefix("header:")) {
        ("peer-ip", _) => Ok(ClientKey::PeerIp),
        ("global", _) => Ok(ClientKey::Global),
        (_, Some(name)) => match HeaderName::try_from(name) {
            Ok(name) => Ok(ClientKey::Header(name.clone(), key::header(name))),
            Err(_) => Err(format!("{name:?} is not a valid header name")),
        },
        _ => Err(String::from("use peer-ip, global or header:NAME")),
    }
}

impl KeyExtractor<Parts> for ClientKey {
    fn extract(&self, head: &Parts) -> Result<Key<'static>, RequestError> {
        match self {
            Self::PeerIp => key::PeerIp.extract(head),
            Self::Global => key::Global.extract(head),
            Self::Header(_, header) => header.extract(head),
        }
    }
}

fn cost_of(head: &Parts, header: &HeaderName) -> Result<u64, RequestError> {
    let mut values = head.headers.get_all(header).iter();
    let cost = match (values.next(), values.next()) {
        (None, _) => return Ok(1),
        (Some(value), None) => value.to_str().unwrap_or_default().trim_start_matches('0'),
        _ => "",
    };
    match cost.bytes().all(|b| b.is_ascii_digit()) && !cost.is_empty() {
        // A cost that does not fit into a u64 is above every quota, so it is rejected.
        true => Ok(cost.parse().unwrap_or(u64::MAX)),
        false => Err(RequestError::invalid(format!("header {header} must be a positive integer"))),
    }
}

fn app(limiter: Limiter, flags: &Flags) -> Router {
    let key = flags.key.clone();
    let layer = match flags.cost_header.clone() {
        None => RateLimitLayer::new(limiter, key),
        // A rule, because it can reject a request.
        Some(header) => RateLimitLayer::by_rule(move |head: &Parts| {
            Ok(Charge::new(&limiter, key.extract(head)?).cost(cost_of(head, &header)?))
        }),
    };
    // The log reads the decisions.
    let layer = layer.extensions(true);
    Router::new().fallback(async || "Hello! This request was within the quota.\n").layer(layer)
}

/// Prints a line per request. The last layer of a router is the outermost, so this one also sees
/// the responses of the limiter.
fn with_log(app: Router, key: ClientKey) -> Router {
    let (log, printer) = request_log();
    tokio::spawn(printer.print(tokio::io::stdout()));
    app.layer(middleware::from_fn_with_state((key, log), log_request))
}

async fn log_request(
    State((key, log)): State<(ClientKey, RequestLog)>,
    request: Request,
    next: Next,
) -> Response {
    let (head, body) = request.into_parts();
    // Cheap copies: most requests of a load test get no line.
    let (method, uri, client) = (head.method.clone(), head.uri.clone(), client(&key, &head));
    let response = next.run(Request::from_parts(head, body)).await;
    log.record(outcome(&response), || {
        let request = printable(&format!("{method} {}", uri.path()));
        format!("{request} from {}: {}", name(client), verdict(&response))
    });
    response
}

/// The key of the client, or its address if all clients share a key or the request has none.
fn client(key: &ClientKey, head: &Parts) -> Option<Key<'static>> {
    let key = match key {
        ClientKey::Header(_, header) => header.extract(head),
        ClientKey::PeerIp | ClientKey::Global => key::PeerIp.extract(head),
    };
    key.or_else(|_| key::PeerIp.extract(head)).ok()
}

fn name(client: Option<Key<'_>>) -> String {
    let Some(key) = client else { return String::from("an unknown client") };
    let key = key.as_str();
    key.strip_prefix("ip=").or_else(|| key.strip_prefix("header:")).unwrap_or(key).to_owned()
}

fn outcome(response: &Response) -> Outcome {
    match response.extensions().get::<Rejection>() {
        None => Outcome::Allowed,
        Some(Rejection::Denied(_)) => Outcome::Denied,
        Some(_) => Outcome::Rejected,
    }
}

/// Describes the decision of the limiter, from the extensions of the response.
fn verdict(response: &Response) -> String {
    let extensions = response.extensions();
    match (extensions.get::<Rejection>(), extensions.get::<Decision>()) {
        (Some(Rejection::Denied(decision)), _) => {
            format!("denied, retry in {}", seconds(decision.retry_after().unwrap_or_default()))
        }
        (Some(rejection), _) => {
            let (status, why) = (response.status().as_u16(), Failure::from(rejection.clone()));
            format!("rejected with {status}: {why}")
        }
        (None, Some(decision)) if decision.delay().is_zero() => {
            format!("allowed, {} left", decision.remaining())
        }
        (None, Some(decision)) => {
            let delay = seconds(decision.delay());
            format!("allowed after a wait of {delay}, {} left", decision.remaining())
        }
        (None, None) => String::from("allowed"),
    }
}

/// Rounds up to a tenth: after the printed time a request is allowed.
fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_micros().div_ceil(100_000) as f64 / 10.0)
}

/// Removes control characters and limits the length, because the client chooses the text.
fn printable(text: &str) -> String {
    text.chars().take(80).map(|char| if char.is_control() { '?' } else { char }).collect()
}

/// Prints the limit, and a command that reaches it.
fn print_hints(flags: &Flags, url: &str) {
    let (key, header) = match &flags.key {
        ClientKey::PeerIp => ("per client address".to_owned(), String::new()),
        ClientKey::Global => ("for all clients together".to_owned(), String::new()),
        ClientKey::Header(name, _) => {
            (format!("per value of header {name}"), format!("-H '{name}: ada' "))
        }
    };
    let place = if flags.redis.is_some() { "Redis" } else { "memory" };
    println!("limit: {} {key}, {}, counts in {place}", flags.quota, flags.algorithm);

    let burst = flags.quota.burst_size();
    let per_second = flags.quota.limit() as f64 / flags.quota.window().as_secs_f64();
    let codes = format!("{header}-o /dev/null -w '%{{http_code}}\\n'");
    if flags.algorithm == Algorithm::LeakyBucket {
        // In parallel: in sequence, each request would wait, and none would be denied.
        let count = burst.saturating_mul(2).min(300);
        let curl = format!("curl -Z --parallel-max 300 --no-progress-meter {codes}");
        println!("try it: {curl} '{url}/[1-{count}]' | sort | uniq -c");
    } else if burst > 20 || per_second > 10.0 {
        // Over one connection: a process per request is slower than the quota refills.
        let count = burst.saturating_mul(2).min(10_000);
        println!("try it: curl -s {codes} '{url}/[1-{count}]' | sort | uniq -c");
    } else {
        // The burst, the units that a second refills, and two more.
        let count = burst + per_second as u64 + 2;
        println!("try it: for i in $(seq {count}); do curl -s {codes} {url}/; done");
    }
}

async fn run(flags: Flags) -> Result<(), Failure> {
    let url = flags.redis.as_deref().unwrap_or("memory:");
    let store = store::connect(url).await.context("cannot use the Redis server at --redis")?;
    let store = observed(store, flags.metrics).await?;
    let limiter = Limiter::try_new("server", store.clone(), flags.algorithm, flags.quota)?;
    let mut app = app(limiter, &flags);
    if !flags.quiet {
        app = with_log(app, flags.key.clone());
    }
    let stopping = stopping()?;
    let listener = TcpListener::bind(flags.listen)
        .await
        .context(format_args!("cannot listen on {}", flags.listen))?;
    let url = format!("http://{}", listener.local_addr()?);
    println!("listening on {url}");
    print_hints(&flags, &url);
    Ok(serve(listener, app, store, stopping).await?)
}

#[tokio::main]
async fn main() -> ExitCode {
    let flags = Flags::parse();
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_max_level(flags.log).init();
    exit_code(run(flags).await)
}
