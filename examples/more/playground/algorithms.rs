//! The algorithms that the page shows, and what each promises. Another algorithm is another entry.

use serde::Serialize;
use tower_ratelimit::{Algorithm, Quota};

/// An algorithm, as the page describes it.
#[derive(Serialize)]
pub struct Shown {
    /// The name of its limiter, and of its lane on the page.
    pub id: &'static str,
    name: &'static str,
    /// What it does, in a sentence.
    about: &'static str,
    /// What it promises about any time of the length of the window, or about any instant: `{}` is
    /// the number of `most`.
    promise: &'static str,
    /// True if it counts requests at a time, and not per window.
    pub at_a_time: bool,
    /// True if a request can hold a unit, and report later whether it is used.
    pub can_hold: bool,
    /// True if the burst of the quota applies.
    pub has_burst: bool,
    /// True if a key is reset when its window ends.
    #[serde(skip)]
    pub has_windows: bool,
    #[serde(skip)]
    pub algorithm: fn() -> Algorithm,
    /// The most units that it lets proceed in any time of the length of the window, or at a time.
    #[serde(skip)]
    pub most: fn(Quota) -> u64,
}

pub const SHOWN: [Shown; 6] = [
    Shown {
        id: "fixed-window",
        name: "Fixed window",
        about: "Counts in windows. Each opens at its first request, and begins at zero.",
        promise: "up to {} at a boundary",
        at_a_time: false,
        can_hold: true,
        has_burst: false,
        has_windows: true,
        algorithm: Algorithm::fixed_window,
        most: |quota| 2 * quota.limit(),
    },
    Shown {
        id: "sliding-log",
        name: "Sliding log",
        about: "Remembers the time of each request. Never above the limit in any window.",
        promise: "never more than {}",
        at_a_time: false,
        can_hold: true,
        has_burst: false,
        has_windows: false,
        algorithm: Algorithm::sliding_log,
        most: |quota| quota.limit(),
    },
    Shown {
        id: "sliding-window",
        name: "Sliding window",
        about: "Estimates the log from two counters: close to it, in a few bytes.",
        promise: "up to {} if aimed at",
        at_a_time: false,
        can_hold: true,
        has_burst: false,
        has_windows: false,
        algorithm: Algorithm::sliding_window,
        most: |quota| 2 * quota.limit(),
    },
    Shown {
        id: "token-bucket",
        name: "Token bucket",
        about: "Starts with a full burst of tokens, and refills steadily.",
        promise: "up to {}: burst + refill",
        at_a_time: false,
        can_hold: true,
        has_burst: true,
        has_windows: false,
        algorithm: Algorithm::token_bucket,
        most: |quota| quota.burst_size() + quota.limit(),
    },
    Shown {
        id: "leaky-bucket",
        name: "Leaky bucket",
        about: "Lets requests leave evenly spaced. They wait, and overflow is denied.",
        promise: "up to {}, evenly",
        at_a_time: false,
        can_hold: false,
        has_burst: true,
        has_windows: false,
        algorithm: Algorithm::leaky_bucket,
        most: |quota| quota.limit(),
    },
    Shown {
        id: "concurrency",
        name: "Concurrency",
        about: "Counts requests in flight. The place of a request is free again when it ends.",
        promise: "at most {} at a time",
        at_a_time: true,
        can_hold: true,
        has_burst: false,
        has_windows: false,
        algorithm: Algorithm::concurrency,
        most: |quota| quota.limit(),
    },
];
