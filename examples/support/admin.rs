//! What an operator reads, on a listener of its own: `GET /metrics` for Prometheus, `GET /health`,
//! and `GET /top-denied`, the keys that are denied most. `DELETE /top-denied` begins anew.

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, SystemTime},
};

use axum::{Router, routing::get};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use tokio::{net::TcpListener, time::sleep};
use tower_ratelimit::{
    observe::{self, TopDenied},
    store::AnyStore,
};

use crate::support::{Context, Failure};

/// The limits between the buckets of times, in seconds: of decisions, most of them below 0.01, and
/// of waits. Quantiles are guessed within a bucket.
const SECONDS: [f64; 16] = [
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
    5.0, 10.0,
];
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

    pub fn observe(&self, store: &AnyStore) {
        store.add_observer(Arc::new(observe::metrics()));
        store.add_observer(self.denied.clone());
    }

    /// Listens, and returns the address.
    pub async fn serve(self, store: AnyStore, address: SocketAddr) -> Result<SocketAddr, Failure> {
        let Self { exporter, denied } = self;
        let upkeep = exporter.clone();
        tokio::spawn(async move {
            loop {
                sleep(Duration::from_secs(5)).await;
                upkeep.run_upkeep(); // bounds the memory of histograms
            }
        });
        let metrics = get(async move || exporter.render());
        let health = get(async move || format!("{}\n", store.health()));
        let cleared = denied.clone();
        let top = get(async move || table(&denied)).delete(async move || {
            cleared.clear();
            "cleared\n"
        });
        let app = Router::new()
            .route("/metrics", metrics)
            .route("/health", health)
            .route("/top-denied", top);
        let listener = TcpListener::bind(address)
            .await
            .context(format_args!("cannot listen on {address}, of --metrics"))?;
        let address = listener.local_addr()?;
        tokio::spawn(axum::serve(listener, app).into_future());
        Ok(address)
    }
}

/// The keys that are denied most, in columns, and how much each count can be too large.
fn table(denied: &TopDenied) -> String {
    let (total, since) = (denied.total(), age(denied.since()));
    let mut rows =
        vec![["denied", "max-error", "last", "blocked", "limiter", "key"].map(String::from)];
    rows.extend(denied.top(20).into_iter().map(|it| {
        let is_blocked = if it.is_blocked { "yes" } else { "no" };
        let (count, max_error) = (it.count.to_string(), it.max_error.to_string());
        let last = format!("{} ago", age(it.last_denied));
        [count, max_error, last, is_blocked.into(), it.limiter.into(), it.key.to_string()]
    }));
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let widths = [0, 1, 2, 3, 4].map(width);
    let mut text = format!("{total} denials in {since}\n");
    for row in &rows {
        for (cell, width) in row.iter().zip(widths) {
            text += &format!("{cell:width$}  ");
        }
        text += &format!("{}\n", row[5]);
    }
    text
}

/// The time since then, in its largest unit.
fn age(time: SystemTime) -> String {
    let seconds = time.elapsed().unwrap_or_default().as_secs();
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7_200 => format!("{} min", seconds / 60),
        _ => format!("{} h", seconds / 3_600),
    }
}
