//! The flag `--metrics`: the store with its observers, and the listener for operators. Without the
//! feature `metrics`, the flag is an error.

#[cfg(feature = "metrics")]
#[path = "admin.rs"]
mod admin;

use std::net::SocketAddr;

use tower_ratelimit::store::AnyStore;

use crate::support::Failure;

/// Serves what operators need, if there is an address. Limiters are made over the returned store.
#[cfg(feature = "metrics")]
pub async fn observed(store: AnyStore, address: Option<SocketAddr>) -> Result<AnyStore, Failure> {
    let Some(address) = address else { return Ok(store) };
    let admin = admin::Admin::install()?;
    admin.observe(&store);
    let address = admin.serve(store.clone(), address).await?;
    println!(
        "metrics: http://{address}/metrics, denied keys: http://{address}/top-denied, state: \
         http://{address}/health"
    );
    Ok(store)
}

#[cfg(not(feature = "metrics"))]
pub async fn observed(store: AnyStore, address: Option<SocketAddr>) -> Result<AnyStore, Failure> {
    match address {
        None => Ok(store),
        Some(_) => Err(Failure::new(
            "cannot serve metrics: this program was built without them; build it with \
             `--features metrics`, for example `cargo run -p examples --example server --features \
             metrics`",
        )),
    }
}
