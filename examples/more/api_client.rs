//! Three callers use a vendor's API with reqwest. They share a quota for each host. If the vendor
//! answers `429`, all callers wait for its `Retry-After`.
//!
//! ```text
//! cargo run -p more-examples --example api_client
//! ```
//!
//! The code that a client of a real vendor needs is in `client.rs`.

mod client;
#[path = "../support/mod.rs"]
mod support;
mod vendor;

use std::{process::ExitCode, time::Duration};

use clap::Parser;
use reqwest::{Method, Request, Url};
use support::{Context, Failure, exit_code};
use tokio::{task::JoinSet, time::Instant};
use tower::ServiceExt;
use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, http::Rejection};
use vendor::Vendor;

const CALLERS: u32 = 3;

/// Three callers of a vendor's API share a quota, and respect its Retry-After
#[derive(Parser)]
#[command(name = "api_client")]
struct Flags {
    /// The quota of the callers for each host
    #[arg(long, value_name = "QUOTA", default_value = "10/s")]
    quota: Quota,

    /// The requests of each caller
    #[arg(long, value_name = "N", default_value_t = 12)]
    requests: u32,

    /// The longest time of a request and its retries, in seconds
    #[arg(long, value_name = "N", default_value_t = 10)]
    deadline: u64,
}

async fn run(flags: Flags) -> Result<(), Failure> {
    let (vendor, url) = Vendor::start(20, Duration::from_secs(2)).await?;
    let url = Url::parse(&url).context("the URL of the vendor")?;
    let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::token_bucket(), flags.quota);
    let client = client::client(limiter, Duration::from_secs(flags.deadline));
    println!("vendor: bans the callers for 2 s after 20 requests");
    println!("callers: {CALLERS}, which share {} per host, and all wait during a ban", flags.quota);

    let start = Instant::now();
    let mut callers = JoinSet::new();
    for caller in 1..=CALLERS {
        let (client, url) = (client.clone(), url.clone());
        callers.spawn(async move {
            for _ in 0..flags.requests {
                let request = Request::new(Method::GET, url.clone());
                let outcome = match client.clone().oneshot(request).await {
                    Ok(response) => match response.extensions().get::<Rejection>() {
                        Some(rejection) => format!("not sent: {rejection}"),
                        None => response.status().to_string(),
                    },
                    Err(error) => format!("failed: {error}"),
                };
                println!("{:4.1} s, caller {caller}: {outcome}", start.elapsed().as_secs_f64());
            }
        });
    }
    callers.join_all().await;
    let counts = vendor.lock().unwrap().counts;
    println!(
        "vendor: {} accepted, bans: {}, requests during a ban: {}",
        counts.accepted, counts.bans, counts.banned
    );
    Ok(())
}

#[tokio::main]
async fn main() -> ExitCode {
    exit_code(run(Flags::parse()).await)
}
