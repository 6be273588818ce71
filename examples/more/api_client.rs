//! Three callers use a vendor's API with reqwest. They share a rate and a number of places for each
//! host. If the vendor answers `429`, all callers wait for its `Retry-After`.
//!
//! ```text
//! cargo run -p more-examples --example api_client
//! cargo run -p more-examples --example api_client -- --redis redis://127.0.0.1/
//! ```
//!
//! The code that a client of a real vendor needs is in `client.rs`.

mod client;
#[path = "../support/mod.rs"]
mod support;
mod vendor;

use std::{process::ExitCode, time::Duration};

use clap::Parser;
use client::ApiClient;
use reqwest::{Method, Request, Url};
use support::{Context, Failure, exit_code};
use tokio::{task::JoinSet, time::Instant};
use tower_ratelimit::{Quota, layer::Rejection, store};
use vendor::Vendor;

const CALLERS: u32 = 3;

/// Three callers of a vendor's API share its limits, and respect its Retry-After
#[derive(Parser)]
#[command(name = "api_client")]
struct Flags {
    /// The rate of the callers for each host
    #[arg(long, value_name = "QUOTA", default_value = "10/s burst 1")]
    quota: Quota,

    /// The requests to a host at a time
    #[arg(long, value_name = "N", default_value_t = 5)]
    places: u64,

    /// The requests of each caller
    #[arg(long, value_name = "N", default_value_t = 12)]
    requests: u32,

    /// The longest wait of a request for its place, and for its instant, in
    /// seconds
    #[arg(long, value_name = "N", default_value_t = 10, verbatim_doc_comment)]
    max_wait: u64,

    /// Keep the counts in the Redis server at this URL, such as
    /// redis://127.0.0.1/, so that other runs share them
    #[arg(long, value_name = "URL", default_value = "memory:", verbatim_doc_comment)]
    redis: String,

    /// Call the vendor at this URL
    #[arg(long, hide = true)]
    vendor: Option<Url>,
}

async fn run(flags: Flags) -> Result<(), Failure> {
    let store = store::connect(&flags.redis).await.context("cannot use the store at --redis")?;
    let (vendor, url) = match flags.vendor {
        Some(url) => (None, url),
        None => {
            let (vendor, url) = Vendor::start(20, Duration::from_secs(2)).await?;
            println!("vendor: bans the callers for 2 s after 20 requests");
            (Some(vendor), Url::parse(&url).context("the URL of the vendor")?)
        }
    };
    let max_wait = Duration::from_secs(flags.max_wait);
    let client = ApiClient::new(store, flags.quota, flags.places, max_wait);
    println!("callers: {CALLERS}, which share {} per host, and all wait during a ban", flags.quota);

    let start = Instant::now();
    let mut callers = JoinSet::new();
    for caller in 1..=CALLERS {
        let (client, url) = (client.clone(), url.clone());
        callers.spawn(async move {
            for _ in 0..flags.requests {
                let outcome = match client.send(Request::new(Method::GET, url.clone())).await {
                    Ok(response) => match response.extensions().get::<Rejection>() {
                        Some(rejection) => format!("rejected here: {rejection}"),
                        None => response.status().to_string(),
                    },
                    Err(error) => format!("failed: {error}"),
                };
                println!("{:4.1} s, caller {caller}: {outcome}", start.elapsed().as_secs_f64());
            }
        });
    }
    callers.join_all().await;
    client.flush().await;
    if let Some(vendor) = vendor {
        let counts = vendor.lock().unwrap().counts;
        println!(
            "vendor: {} accepted, bans: {}, requests during a ban: {}",
            counts.accepted, counts.bans, counts.banned
        );
    }
    Ok(())
}

#[tokio::main]
async fn main() -> ExitCode {
    exit_code(run(Flags::parse()).await)
}
