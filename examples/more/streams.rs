//! A server that streams events, in two replicas: each customer may have three streams at a time,
//! wherever they run. A stream that its client cuts off makes room at once.
//!
//! ```text
//! cargo run -p more-examples --example streams                               # in memory
//! cargo run -p more-examples --example streams -- --redis redis://127.0.0.1/ # counts in Redis
//! cargo run -p more-examples --example streams -- --listen 127.0.0.1:3000    # for curl -N
//! ```
//!
//! With `--features metrics` and `-- --listen .. --metrics 127.0.0.1:9100` it serves metrics, as
//! the example `server` does.
//!
//! A replica is a router here. With Redis, each has connections of its own, as two processes have.
//! The code that a real server needs is in `replica`.

#[path = "../support/observed.rs"]
mod observed;
#[path = "../support/shutdown.rs"]
mod shutdown;
#[path = "../support/mod.rs"]
mod support;

use std::{
    convert::Infallible,
    net::SocketAddr,
    process::ExitCode,
    time::{Duration, Instant},
};

use axum::{
    Router,
    response::sse::{Event, Sse},
    routing::get,
};
use clap::Parser;
use futures_util::{Stream, StreamExt, stream};
use observed::observed;
use shutdown::{serve, stopped, stopping};
use support::{Context, Failure, exit_code};
use tokio::{net::TcpListener, sync::watch, time::sleep};
use tower_ratelimit::{
    Algorithm, Limiter, Quota, RateLimitLayer, key,
    store::{self, AnyStore},
};

/// The streams that a customer may have at a time.
const LIMIT: u64 = 3;
/// The events after which a client leaves that stays until its stream ends.
const ALL: usize = usize::MAX;
/// The pause between two events of a stream.
const PAUSE: Duration = Duration::from_millis(100);

/// Streams of events from two replicas, at most three at a time
#[derive(Parser)]
#[command(name = "streams")]
struct Flags {
    /// Count in the Redis server at this URL, such as redis://127.0.0.1/,
    /// instead of in memory
    #[arg(long, value_name = "URL", verbatim_doc_comment)]
    redis: Option<String>,

    /// Serve one replica at this address, instead of the requests of the
    /// example
    #[arg(long, value_name = "ADDR", verbatim_doc_comment)]
    listen: Option<SocketAddr>,

    /// The number of events of a stream, ten per second
    #[arg(long, value_name = "COUNT", default_value_t = 10)]
    events: usize,

    /// Serve metrics for Prometheus at /metrics of this address, the keys that
    /// are denied most at /top-denied, and the state of the store at /health;
    /// needs --features metrics
    #[arg(long, value_name = "ADDR", requires = "listen", verbatim_doc_comment)]
    metrics: Option<SocketAddr>,
}

/// A replica. Its limiter has the name and the store of the other one, so both share the count.
fn replica(limiter: &Limiter, events: usize, stopping: watch::Receiver<bool>) -> Router {
    let limit = RateLimitLayer::new(limiter, key::header("x-customer"))
        .max_wait(Duration::from_secs(2))
        .max_waiting_per_key(1);
    // Without an end, a stream would keep the server from stopping.
    let stream = async move || Sse::new(counted(events).take_until(Box::pin(stopped(stopping))));
    Router::new().route("/events", get(stream)).layer(limit)
}

fn counted(events: usize) -> impl Stream<Item = Result<Event, Infallible>> {
    stream::iter(1..=events).then(async |number| {
        sleep(PAUSE).await;
        Ok(Event::default().data(number.to_string()))
    })
}

fn limiter(store: AnyStore) -> Limiter {
    Limiter::new("streams", store, Algorithm::concurrency(), Quota::concurrent(LIMIT))
}

async fn store(redis: Option<&str>) -> Result<AnyStore, Failure> {
    let url = redis.unwrap_or("memory:");
    store::connect(url).await.context(format!("--redis {url}"))
}

async fn listen(address: SocketAddr) -> Result<(TcpListener, SocketAddr), Failure> {
    let listener = TcpListener::bind(address).await.context(format!("--listen {address}"))?;
    let address = listener.local_addr().context("the address of the server")?;
    Ok((listener, address))
}

/// One request of the example.
struct Client {
    number: usize,
    replica: usize,
    url: String,
    start: Instant,
    /// The number of events of a stream.
    events: usize,
    /// The number of events after which it leaves.
    leaves_after: usize,
}

impl Client {
    async fn run(self, limiter: Limiter) -> Result<(), Failure> {
        let client = reqwest::Client::new();
        let request = client.get(&self.url).header("x-customer", "ada");
        let mut response = request.send().await.context("a request")?;
        if !response.status().is_success() {
            let policy = response.headers().get("ratelimit-policy");
            let policy = policy.and_then(|policy| policy.to_str().ok()).unwrap_or_default();
            self.print(&limiter, &format!("{}, {policy}", response.status())).await?;
            return Ok(());
        }
        self.print(&limiter, "begins").await?;
        let mut seen = 0;
        while seen < self.leaves_after && response.chunk().await.context("an event")?.is_some() {
            seen += 1;
        }
        drop(response);
        sleep(PAUSE / 2).await; // the server notices
        let end = if seen < self.events { "cut off by the client" } else { "ends" };
        self.print(&limiter, &format!("{end} after {seen} events")).await
    }

    async fn print(&self, limiter: &Limiter, event: &str) -> Result<(), Failure> {
        let key = key::header("x-customer").key("ada");
        let in_flight = limiter.peek(key).await.context("the limiter")?.held();
        println!(
            "{:4.1} s  replica {}  stream {}  {event:<45} {in_flight} in flight",
            self.start.elapsed().as_secs_f64(),
            self.replica + 1,
            self.number + 1,
        );
        Ok(())
    }
}

async fn run(flags: Flags) -> Result<(), Failure> {
    let redis = flags.redis.as_deref();
    let one = observed(store(redis).await?, flags.metrics).await?;
    let stopping = stopping()?;
    if let Some(address) = flags.listen {
        let (listener, address) = listen(address).await?;
        println!("try: curl -N -H 'x-customer: ada' http://{address}/events");
        let app = replica(&limiter(one.clone()), flags.events, stopping.clone());
        return Ok(serve(listener, app, one, stopping).await?);
    }
    // In memory, the replicas share the limiter.
    let (stores, limiters) = if redis.is_some() {
        let two = store(redis).await?;
        ([one.clone(), two.clone()], [limiter(one), limiter(two)])
    } else {
        let limiter = limiter(one.clone());
        ([one.clone(), one], [limiter.clone(), limiter])
    };
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    let mut replicas = vec![];
    for (limiter, store) in limiters.iter().zip(&stores) {
        let (listener, address) = listen(any).await?;
        let app = replica(limiter, flags.events, stopping.clone());
        tokio::spawn(serve(listener, app, store.clone(), stopping.clone()));
        replicas.push(address);
    }
    println!(
        "{LIMIT} streams at a time for customer ada, over two replicas; one may wait in each\n"
    );
    let (start, mut clients) = (Instant::now(), vec![]);
    for (number, leaves_after) in [ALL, 4, ALL, ALL, ALL, ALL].into_iter().enumerate() {
        let replica = number % 2;
        let url = format!("http://{}/events", replicas[replica]);
        let events = flags.events;
        let client = Client { number, replica, url, start, events, leaves_after };
        clients.push(tokio::spawn(client.run(limiters[replica].clone())));
        sleep(PAUSE / 2).await;
    }
    for client in clients {
        client.await.context("a client")??;
    }
    // The ends of the streams are sent in the background.
    for store in &stores {
        store.flush().await;
    }
    Ok(())
}

#[tokio::main]
async fn main() -> ExitCode {
    exit_code(run(Flags::parse()).await)
}
