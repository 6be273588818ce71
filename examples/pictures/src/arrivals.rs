//! Sequences of requests, and what a limiter with scripted time makes of them.

use std::time::Duration;

use tokio::time::{Instant, sleep_until};
use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};

/// A sequence of requests under one quota. Times are in seconds.
pub struct Scenario {
    pub title: &'static str,
    pub quota: Quota,
    /// The length of the window, and its name.
    pub window: (f64, &'static str),
    pub seconds: f64,
    pub times: Vec<f64>,
}

fn spread(from: f64, seconds: f64, count: usize) -> impl Iterator<Item = f64> {
    (0..count).map(move |i| from + seconds * i as f64 / count as f64)
}

fn at_once(at: f64, count: usize) -> impl Iterator<Item = f64> {
    std::iter::repeat_n(at, count)
}

pub fn scenarios() -> [Scenario; 4] {
    let per_second = |title, times: Vec<f64>| Scenario {
        title,
        quota: Quota::per_second(10),
        window: (1.0, "1 s"),
        seconds: 5.0,
        times,
    };
    let mut counts = vec![];
    for (second, count) in [10, 10, 980, 900, 100].into_iter().enumerate() {
        counts.extend(spread(second as f64, 1.0, count));
    }
    [
        per_second("20 requests per second, evenly", spread(0.0, 5.0, 100).collect()),
        per_second(
            "30 at once after idling, then 10 per second",
            at_once(1.0, 30).chain(spread(2.0, 3.0, 30)).collect(),
        ),
        per_second("A client that aims at the boundary", {
            let mut times = vec![0.0];
            times.extend(at_once(0.97, 9));
            for second in 1..5 {
                times.extend(at_once(second as f64 + 0.02, 10));
                times.extend(at_once(second as f64 + 0.95, 10));
            }
            times
        }),
        Scenario {
            title: "10, 10, 980, 900, 100 per s",
            quota: Quota::new(1_000, Duration::from_secs(3)),
            window: (3.0, "3 s"),
            seconds: 5.0,
            times: counts,
        },
    ]
}

/// What became of a request: when it proceeded, and when it arrived.
#[derive(Clone, Copy)]
pub enum Fate {
    Admitted(f64),
    Waited(f64),
    Denied(f64),
}

pub struct Outcome {
    pub fates: Vec<Fate>,
    /// In seconds.
    pub longest_delay: f64,
}

impl Outcome {
    /// Sends the requests of a scenario to a limiter in memory, by the paused clock.
    pub async fn of(scenario: &Scenario, algorithm: Algorithm) -> Self {
        let limiter = Limiter::new("api", MemoryStore::new(), algorithm, scenario.quota);
        let start = Instant::now();
        let (mut fates, mut longest_delay) = (vec![], 0.0_f64);
        for &at in &scenario.times {
            sleep_until(start + Duration::from_secs_f64(at)).await;
            let at = start.elapsed().as_secs_f64(); // in whole milliseconds, as tokio's timers
            let decision = limiter.check("client").await.expect("memory decides");
            let delay = decision.delay().as_secs_f64();
            longest_delay = longest_delay.max(delay);
            fates.push(if !decision.is_allowed() {
                Fate::Denied(at)
            } else if decision.delay().is_zero() {
                Fate::Admitted(at)
            } else {
                Fate::Waited(at + delay)
            });
        }
        Self { fates, longest_delay }
    }

    pub fn count(&self, is: fn(&Fate) -> bool) -> usize {
        self.fates.iter().filter(|fate| is(fate)).count()
    }

    /// Returns the largest number of requests that proceeded within one window, and its beginning.
    pub fn most_within(&self, window: f64) -> (usize, f64) {
        let mut times = vec![];
        for fate in &self.fates {
            if let Fate::Admitted(at) | Fate::Waited(at) = fate {
                times.push(*at);
            }
        }
        times.sort_by(f64::total_cmp);
        let end = |from: f64| times.partition_point(|at| *at < from + window - 1e-6);
        let counts = times.iter().enumerate().map(|(i, from)| (end(*from) - i, *from));
        counts.rev().max_by_key(|(count, _)| *count).unwrap_or((0, 0.0)) // the first of the largest
    }
}
