//! The pictures of the documentation, drawn from the real algorithms with scripted time. The
//! program writes them to `docs/pictures`; the test compares them with those files.

use base64::{Engine, prelude::BASE64_STANDARD};
use tower_ratelimit::Algorithm;

use algorithms::Setting;
pub use stored::record_failure;

mod algorithms;
mod arrivals;
pub mod dashboard;
mod holds;
mod mark;
mod motion;
mod request;
mod stored;
mod svg;
mod waiting;
mod wire;

/// Returns the name and the text of each file. The last one defines the links by which the pages in
/// rustdoc contain the pictures: docs.rs serves no other files.
///
/// The clock of the runtime must be paused.
pub async fn files() -> Vec<(String, String)> {
    let mut pictures = vec![];
    for (file, name, algorithm, setting) in [
        ("fixed-window", "Fixed window", Algorithm::fixed_window(), Setting::Nothing),
        ("sliding-log", "Sliding log", Algorithm::sliding_log(), Setting::Nothing),
        ("sliding-window", "Sliding window", Algorithm::sliding_window(), Setting::OneBucket),
        ("token-bucket", "Token bucket", Algorithm::token_bucket(), Setting::Burst),
        ("leaky-bucket", "Leaky bucket", Algorithm::leaky_bucket(), Setting::Burst),
    ] {
        pictures.push((file, algorithms::algorithm(name, algorithm, setting).await));
    }
    pictures.extend([
        ("boundary", algorithms::boundary().await),
        ("buckets", algorithms::buckets().await),
        ("balance", algorithms::balance().await),
        ("waiting", waiting::waiting().await),
        ("processes", waiting::processes().await),
        ("request", request::request()),
        ("batch", stored::batch().await),
        ("denials", stored::denials().await),
        ("failure", stored::failure()),
        ("settling", holds::settling().await),
        ("concurrency", holds::concurrency().await),
        ("permit", holds::permit()),
        ("dashboard", dashboard::dashboard()),
    ]);
    let links = pictures.iter().map(|(name, svg)| {
        format!("[picture-{name}]: data:image/svg+xml;base64,{}\n", BASE64_STANDARD.encode(svg))
    });
    let links = ("links.md".to_owned(), links.collect());
    // Those of the README alone.
    pictures.extend([("mark", mark::mark().await), ("motion", motion::motion().await)]);
    let svgs = pictures.into_iter().map(|(name, svg)| (format!("{name}.svg"), svg));
    svgs.chain([links]).collect()
}
