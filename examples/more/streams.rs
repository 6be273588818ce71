//! A server that streams events, in two replicas: each customer may have three streams at a time,
//! wherever they run. A stream that its client cuts off makes room at once.
//!
//! ```text
//! cargo run -p more-examples --example streams                               # in memory
//! cargo run -p more-examples --example streams -- --redis redis://127.0.0.1/ # counts in Redis
//! cargo run -p more-examples --example streams -- --listen 127.0.0.1:3000    # for curl -N
//! ```
//!
//! A replica is a router here. With Redis, each has connections of its own, as two processes have.
//! The code that a real server needs is in `replica`.

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
use support::{Context, Failure, exit_code};
use tokio::{net::TcpListener, time::sleep};
use tower_ratelimit::{
    Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, RedisStore, key,
    store::{AnyStore, Store},
};

/// The streams that a customer may have at a time.
const LIMIT: u64 = 3;
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
}

/// A replica. Its limiter has the name and the store of the other one, so both share the count.
fn replica(limiter: &Limiter) -> Router {
    let limit = RateLimitLayer::new(limiter, key::header("x-customer"))
        .max_wait(Duration::from_secs(2))
        .max_waiting_per_key(1);
    Router::new().route("/events", get(async || Sse::new(ten_events()))).layer(limit)
}

fn ten_events() -> impl Stream<Item = Result<Event, Infallible>> {
    stream::iter(1..=10).then(async |number| {
        sleep(PAUSE).await;
        Ok(Event::default().data(number.to_string()))
    })
}

/// The limiters of two replicas.
async fn limiters(redis: Option<&str>) -> Result<[Limiter; 2], Failure> {
    let limiter = |store: AnyStore| {
        Limiter::new("streams", store, Algorithm::concurrency(), Quota::concurrent(LIMIT))
    };
    let Some(url) = redis else {
        let limiter = limiter(MemoryStore::new().into_any());
        return Ok([limiter.clone(), limiter]);
    };
    let connect = async || RedisStore::connect(url).await.context(format!("--redis {url}"));
    let (one, two) = (connect().await?, connect().await?);
    Ok([limiter(one.into_any()), limiter(two.into_any())])
}

async fn serve(app: Router, address: SocketAddr) -> Result<SocketAddr, Failure> {
    let listener = TcpListener::bind(address).await.context(format!("--listen {address}"))?;
    let address = listener.local_addr().context("the address of the server")?;
    tokio::spawn(axum::serve(listener, app).into_future());
    Ok(address)
}

/// One request of the example.
struct Client {
    number: usize,
    replica: usize,
    url: String,
    start: Instant,
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
        let end = if seen < 10 { "cut off by the client" } else { "ends" };
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
    let limiters = limiters(flags.redis.as_deref()).await?;
    if let Some(address) = flags.listen {
        let address = serve(replica(&limiters[0]), address).await?;
        println!("try: curl -N -H 'x-customer: ada' http://{address}/events");
        tokio::signal::ctrl_c().await.context("waiting for Ctrl-C")?;
        return Ok(());
    }
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    let replicas =
        [serve(replica(&limiters[0]), any).await?, serve(replica(&limiters[1]), any).await?];
    println!(
        "{LIMIT} streams at a time for customer ada, over two replicas; one may wait in each\n"
    );
    let (start, mut clients) = (Instant::now(), vec![]);
    for (number, leaves_after) in [10, 4, 10, 10, 10, 10].into_iter().enumerate() {
        let replica = number % 2;
        let url = format!("http://{}/events", replicas[replica]);
        let client = Client { number, replica, url, start, leaves_after };
        clients.push(tokio::spawn(client.run(limiters[replica].clone())));
        sleep(PAUSE / 2).await;
    }
    for client in clients {
        client.await.context("a client")??;
    }
    Ok(())
}

#[tokio::main]
async fn main() -> ExitCode {
    exit_code(run(Flags::parse()).await)
}
