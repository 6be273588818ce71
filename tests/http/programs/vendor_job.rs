//! `copy-one-of-these.md`: a job that calls a vendor.

use tower_ratelimit::{
    Algorithm, Error, FailurePolicy, Limiter, Quota,
    store::{self, AnyStore},
};

/// The vendor allows 10 calls per second, to all of our processes together.
pub fn vendor(store: &AnyStore) -> Limiter {
    let quota = Quota::per_second(8).burst(1); // at most 8 + 1 in any second
    Limiter::new("vendor", store.clone(), Algorithm::token_bucket(), quota)
        .on_failure(FailurePolicy::Wait)
}

pub async fn job(vendor: &Limiter, pages: u64) -> Result<(), Error> {
    for page in 1..=pages {
        let _ = vendor.acquire("vendor", 1).await?; // waits for its turn
        println!("GET https://api.example.com/items?page={page}");
    }
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::var("RATE_LIMIT_STORE")?;
    Ok(job(&vendor(&store::connect(&url).await?), 40).await?)
}
