//! What an operator reads: `GET /metrics` for Prometheus, and `GET /top-denied`, the keys that are
//! denied most, on a listener of their own.

use std::{fmt::Write, net::SocketAddr, sync::Arc, time::Duration};

use axum::{Router, routing::get};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use tokio::{net::TcpListener, time::sleep};
use tower_ratelimit::{
    observe::{Metrics, TopDenied},
    store::AnyStore,
};

use crate::support::{Context, Failure};

/// The limits between the buckets of times, in seconds.
const SECONDS: [f64; 12] =
    [0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 1.0, 10.0];
const CHECKS: [f64; 8] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 512.0];

pub struct Admin {
    exporter: PrometheusHandle,
    denied: Arc<TopDenied>,
}

impl Admin {
    pub fn install() -> Result<Self, Failure> {
        let exporter = PrometheusBuilder::new()
            .set_buckets_for_metric(Matcher::Suffix(String::from("_seconds")), &SECONDS)?
            .set_buckets_for_metric(Matcher::Suffix(String::from("_checks")), &CHECKS)?
            .install_recorder()?;
        Ok(Self { exporter, denied: Arc::new(TopDenied::new(1_000)) })
    }

    pub fn observe(&self, store: AnyStore) -> AnyStore {
        store.observe(Arc::new(Metrics::new())).observe(self.denied.clone())
    }

    /// Listens, and returns the address.
    pub async fn serve(self, address: SocketAddr) -> Result<SocketAddr, Failure> {
        let Self { exporter, denied } = self;
        let upkeep = exporter.clone();
        tokio::spawn(async move {
            loop {
                sleep(Duration::from_secs(5)).await;
                upkeep.run_upkeep(); // bounds the memory of histograms
            }
        });
        let metrics = get(async move || exporter.render());
        let top = get(async move || table(&denied));
        let app = Router::new().route("/metrics", metrics).route("/top-denied", top);
        let listener = TcpListener::bind(address)
            .await
            .context(format_args!("cannot listen on {address}, of --metrics"))?;
        let address = listener.local_addr()?;
        tokio::spawn(axum::serve(listener, app).into_future());
        Ok(address)
    }
}

/// The keys that are denied most, and how much each count can be too large.
fn table(denied: &TopDenied) -> String {
    let mut text = String::from("denied max-error limiter key\n");
    for it in denied.top(20) {
        let _ = writeln!(text, "{} {} {} {}", it.count, it.max_error, it.limiter, it.key);
    }
    text
}
