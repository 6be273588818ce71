//! Records the dashboard: a Prometheus scrapes three examples, over a private Redis, while
//! something happens to them, and answers the queries of `docs/grafana.json`. The package
//! `pictures` draws the record.
//!
//! ```text
//! make record-dashboard # takes five and a half minutes
//! ```

#![allow(missing_docs, unreachable_pub)]

#[allow(dead_code)]
#[path = "../../support/server.rs"]
mod server;

mod http;
mod programs;
mod prometheus;
mod story;

use std::{fs, io, path::Path, time::Duration};

use pictures::dashboard::{Record, Series, panels};
use programs::Programs;
use prometheus::Prometheus;

/// The time between two values, in seconds.
const STEP: u32 = 4;
/// What Grafana puts into `$__rate_interval`: four times the interval of the scrapes.
const RATE_INTERVAL: Duration = Duration::from_secs(4 * prometheus::SCRAPE_SECONDS);

fn main() -> io::Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize()?;
    let dashboard = fs::read_to_string(root.join("docs/grafana.json"))?;
    let mut record = Record { step: STEP, marks: story::marks(), panels: panels(&dashboard) };
    tokio::runtime::Runtime::new()?.block_on(async {
        let programs = Programs::start()?;
        let alerts = root.join("docs/alerts.yml");
        let prometheus = Prometheus::start(&programs.metrics(), &alerts).await?;
        println!("{} s", story::SECONDS + story::WARM_UP);
        let start = story::run(programs).await;
        for query in record.panels.iter_mut().flat_map(|panel| &mut panel.queries) {
            let text = query
                .text
                .replace("$limiter", ".*")
                .replace("$__rate_interval", &format!("{}s", RATE_INTERVAL.as_secs()));
            let found = prometheus.range(&text, start, story::SECONDS, STEP).await?;
            let series = found.into_iter().map(|(labels, values)| {
                let name = labels.iter().fold(query.legend.clone(), |name, (label, value)| {
                    name.replace(&format!("{{{{{label}}}}}"), value)
                });
                Series { name, values }
            });
            query.series = series.collect();
            query.series.sort_by(|a, b| a.name.cmp(&b.name));
        }
        for line in prometheus.alerts(start, story::SECONDS, STEP).await? {
            println!("{line}");
        }
        io::Result::Ok(())
    })?;
    let head = "# Recorded by `make record-dashboard`, and drawn by `cargo run -p pictures`.\n";
    fs::write(root.join("examples/pictures/src/dashboard.txt"), format!("{head}{record}"))
}
