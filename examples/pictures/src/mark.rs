//! The mark of the crate: the requests of four seconds, of which a limiter admits three per second.

use std::fmt::Write;

use tokio::time::{Duration, advance};
use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};

/// The requests of each second.
const REQUESTS: [u32; 4] = [1, 2, 3, 5];

pub async fn mark() -> String {
    let (quota, algorithm) = (Quota::per_second(3), Algorithm::fixed_window());
    let limiter = Limiter::new("mark", MemoryStore::new(), algorithm, quota);
    let (mut admitted, mut denied) = (String::new(), String::new());
    for (second, requests) in REQUESTS.into_iter().enumerate() {
        let x = 10 + 12 * second;
        for request in 0..requests {
            let decision = limiter.check("client").await.expect("memory decides");
            let (path, y) = match decision.is_allowed() {
                true => (&mut admitted, 48 - 9 * request),
                false => (&mut denied, 44 - 9 * request), // above the line
            };
            let _ = write!(path, "M{x} {y}h8");
        }
        advance(Duration::from_secs(1)).await;
    }
    format!(
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 64 64' stroke-width='6'>\
         <rect width='64' height='64' rx='14' fill='#0a5fb4'/><path stroke='#fff' d='{admitted}'/>\
         <path stroke='#ffb454' d='{denied}'/>\
         <path d='M8 23.5h48' stroke='#fff' stroke-width='2' stroke-dasharray='4 3'/></svg>"
    )
}
