//! The contract of the algorithms as tables.

use std::time::Duration;

use super::super::{Algorithm, EngineReply, Refill};
use crate::quota::Quota;

/// A request and its reply, with times in milliseconds: its time, cost and longest wait (`None`:
/// the default of the algorithm); its delay (`Ok`) or retry-after (`Err`), the remaining units, and
/// the time until the state is the initial one.
type Row = (u32, u32, Option<u32>, Result<f64, f64>, u32, f64);

pub struct Table {
    pub name: &'static str,
    pub algorithm: Algorithm,
    pub quota: Quota,
    rows: &'static [Row],
}

const TABLES: &[Table] = &[
    Table {
        name: "fixed window",
        algorithm: Algorithm::FixedWindow,
        quota: Quota::per_second(10),
        rows: &[
            (0, 4, None, Ok(0.0), 6, 1000.0),
            (300, 6, None, Ok(0.0), 0, 700.0),
            (300, 1, None, Err(700.0), 0, 700.0),
            (999, 1, None, Err(1.0), 0, 1.0),
            // The window opened at its first request, and ends a window later.
            (1000, 10, None, Ok(0.0), 0, 1000.0),
            // Later windows are reserved.
            (1500, 8, Some(500), Ok(500.0), 0, 1500.0),
            (1500, 2, Some(400), Err(100.0), 0, 1500.0),
            (1500, 3, Some(2000), Ok(1500.0), 0, 2500.0),
            (1500, 1, None, Err(1500.0), 0, 2500.0),
            (3000, 7, None, Ok(0.0), 0, 1000.0),
            (4000, 1, None, Ok(0.0), 9, 1000.0),
        ],
    },
    Table {
        name: "fixed window: 10, 10, 980, 900, 100 against 1000 per 3 s",
        algorithm: Algorithm::FixedWindow,
        quota: Quota::new(1000, Duration::from_secs(3)),
        rows: &[
            (0, 10, None, Ok(0.0), 990, 3000.0),
            (1000, 10, None, Ok(0.0), 980, 2000.0),
            (2000, 980, None, Ok(0.0), 0, 1000.0),
            (3000, 900, None, Ok(0.0), 100, 3000.0),
            (4000, 100, None, Ok(0.0), 0, 2000.0),
        ],
    },
    Table {
        name: "sliding log",
        algorithm: Algorithm::SlidingLog,
        quota: Quota::per_second(10),
        rows: &[
            (0, 4, None, Ok(0.0), 6, 1000.0),
            (300, 6, None, Ok(0.0), 0, 1000.0),
            (300, 1, None, Err(700.0), 0, 1000.0),
            (300, 5, None, Err(1000.0), 0, 1000.0),
            (999, 1, None, Err(1.0), 0, 301.0),
            // Requests that were admitted exactly one window ago do not count.
            (1000, 4, None, Ok(0.0), 0, 1000.0),
            (1000, 7, Some(1000), Ok(1000.0), 0, 2000.0),
            // First come, first served: behind the reservation.
            (1300, 1, None, Err(700.0), 0, 1700.0),
            (2000, 3, None, Ok(0.0), 0, 1000.0),
            (3000, 10, None, Ok(0.0), 0, 1000.0),
        ],
    },
    Table {
        name: "sliding window of two counters",
        algorithm: Algorithm::SlidingWindow { buckets: 1 },
        quota: Quota::per_second(10),
        rows: &[
            (0, 10, None, Ok(0.0), 0, 2000.0),
            (500, 1, None, Err(600.0), 0, 1500.0),
            (1000, 1, None, Err(100.0), 0, 1000.0),
            // The ten requests of the last window weigh nine now.
            (1100, 1, None, Ok(0.0), 0, 1900.0),
            (1100, 2, None, Err(200.0), 0, 1900.0),
            (1500, 4, None, Ok(0.0), 0, 1500.0),
            (1500, 4, Some(500), Ok(400.0), 0, 1500.0),
            (4000, 10, None, Ok(0.0), 0, 2000.0),
        ],
    },
    Table {
        name: "sliding window of four sub-windows",
        algorithm: Algorithm::SlidingWindow { buckets: 4 },
        quota: Quota::per_second(8),
        rows: &[
            (0, 4, None, Ok(0.0), 4, 1250.0),
            (250, 4, None, Ok(0.0), 0, 1250.0),
            (999, 1, None, Err(63.5), 0, 501.0),
            (1000, 4, None, Err(250.0), 0, 500.0),
            // The four requests of the first sub-window weigh two now.
            (1125, 2, None, Ok(0.0), 0, 1125.0),
            (1250, 2, None, Ok(0.0), 0, 1250.0),
            (3000, 8, None, Ok(0.0), 0, 1250.0),
        ],
    },
    Table {
        name: "token bucket",
        algorithm: Algorithm::TokenBucket { refill: Refill::Continuous, overdraft: 0 },
        quota: Quota::per_second(10).burst(20),
        rows: &[
            (0, 20, None, Ok(0.0), 0, 2000.0),
            (0, 1, None, Err(100.0), 0, 2000.0),
            (0, 5, None, Err(500.0), 0, 2000.0),
            (150, 1, None, Ok(0.0), 0, 1950.0),
            // The half token that was left over counts.
            (199, 1, None, Err(1.0), 0, 1901.0),
            (200, 1, None, Ok(0.0), 0, 2000.0),
            (200, 3, Some(300), Ok(300.0), 0, 2300.0),
            (400, 1, None, Err(200.0), 0, 2100.0),
            (5000, 1, None, Ok(0.0), 19, 100.0),
        ],
    },
    Table {
        name: "token bucket that may be overdrawn",
        algorithm: Algorithm::TokenBucket { refill: Refill::Continuous, overdraft: 5 },
        quota: Quota::per_second(10),
        rows: &[
            (0, 15, None, Ok(0.0), 0, 1500.0),
            // Later requests wait until the debt is repaid.
            (0, 1, None, Err(500.0), 0, 1500.0),
            (0, 6, None, Err(600.0), 0, 1500.0),
            (500, 5, None, Ok(0.0), 0, 1500.0),
            (1000, 1, None, Ok(0.0), 0, 1100.0),
            // A waiting request may also overdraw, once the debt is repaid.
            (1000, 3, Some(1000), Ok(100.0), 0, 1400.0),
            (1000, 1, Some(1000), Ok(400.0), 0, 1500.0),
        ],
    },
    Table {
        name: "token bucket that refills at once",
        algorithm: Algorithm::TokenBucket { refill: Refill::Interval, overdraft: 0 },
        quota: Quota::per_second(10).burst(25),
        rows: &[
            (500, 25, None, Ok(0.0), 0, 3000.0),
            (1400, 1, None, Err(100.0), 0, 2100.0),
            (1500, 5, None, Ok(0.0), 5, 2000.0),
            (1600, 6, None, Err(900.0), 5, 1900.0),
            (2500, 15, None, Ok(0.0), 0, 3000.0),
            (2600, 20, Some(2000), Ok(1900.0), 0, 4900.0),
        ],
    },
    Table {
        name: "leaky bucket",
        algorithm: Algorithm::LeakyBucket,
        quota: Quota::per_second(10).burst(3),
        rows: &[
            (0, 1, None, Ok(0.0), 2, 100.0),
            (0, 1, None, Ok(100.0), 1, 200.0),
            (0, 1, None, Ok(200.0), 0, 300.0),
            // The bucket is full.
            (0, 1, None, Err(100.0), 0, 300.0),
            (50, 1, None, Err(50.0), 0, 250.0),
            (100, 1, Some(100), Err(100.0), 1, 200.0),
            (100, 1, None, Ok(200.0), 0, 300.0),
            (400, 3, None, Ok(0.0), 0, 300.0),
            (600, 1, Some(0), Err(100.0), 2, 100.0),
            (600, 2, None, Ok(100.0), 0, 300.0),
        ],
    },
];

pub fn for_each_row(mut decide: impl FnMut(&Table, i64, u32, Option<i64>) -> EngineReply) {
    for table in TABLES {
        for (i, row) in table.rows.iter().enumerate() {
            let &(at, cost, max_wait, expected, remaining, reset) = row;
            let max_wait = max_wait.map(|wait| i64::from(wait) * 1_000);
            let reply = decide(table, i64::from(at) * 1_000, cost, max_wait);
            let millis = |micros: i64| micros as f64 / 1e3;
            let wait = millis(reply.known_wait());
            let got = if reply.admitted { Ok(wait) } else { Err(wait) };
            let got = (got, reply.remaining, millis(reply.reset));
            assert_eq!(got, (expected, remaining.into(), reset), "{}, row {}", table.name, i + 1);
        }
    }
}
