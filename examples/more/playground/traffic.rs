//! The traffic: when the requests of a page come. All patterns are parts with a length and a number
//! of requests, and repeat.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::settings::Settings;

const MAX_RATE: u64 = 2_000;

/// After a longer stall of the program, the traffic goes on from there.
const MAX_LATE: Duration = Duration::from_millis(500);

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Traffic {
    /// None, except for the button.
    Off,
    Steady {
        rate: u64,
    },
    Bursts {
        size: u64,
        every_ms: u64,
    },
    /// A burst above the quota, then the rate of the quota, then nothing.
    AfterIdling,
    /// 10, 10, 980, 900 and 100 requests in five thirds of a window with a limit of 1,000.
    Boundary,
    /// A client that opens a window, and spends two limits around the end of that window.
    Aimed,
    /// Requests per second, by column.
    Drawn {
        rates: Vec<u64>,
        period_ms: u64,
    },
}

/// Requests that are evenly spaced over a time.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Part {
    length: Duration,
    requests: u64,
}

const fn part(length: Duration, requests: u64) -> Part {
    Part { length, requests }
}

const fn at_once(requests: u64) -> Part {
    part(Duration::ZERO, requests)
}

const fn pause(length: Duration) -> Part {
    part(length, 0)
}

impl Traffic {
    /// Returns the parts, which repeat.
    fn parts(&self, settings: &Settings) -> Vec<Part> {
        let (limit, window) = (settings.limit, settings.window());
        match *self {
            Self::Off => vec![],
            Self::Steady { rate } => vec![part(Duration::from_secs(1), rate.min(MAX_RATE))],
            Self::Bursts { size, every_ms } => {
                let every = Duration::from_millis(every_ms.clamp(100, 60_000));
                vec![at_once(size.min(MAX_RATE)), pause(every)]
            }
            Self::AfterIdling => {
                let burst = limit.max(settings.burst) * 3 / 2;
                vec![at_once(burst), part(window, limit), pause(window * 3 / 2)]
            }
            Self::Boundary => {
                let third = window / 3;
                let shares = [10, 10, 980, 900, 100].map(|n| (n * limit).div_ceil(1_000));
                let mut parts = Vec::new();
                for (i, requests) in shares.into_iter().enumerate() {
                    // The first request opens the window. The others keep away from the edges, so
                    // that one that is late, as on a busy machine, does not come after its third.
                    let early = if i == 0 { Duration::ZERO } else { third / 10 };
                    parts.push(pause(early));
                    parts.push(part(third * 6 / 10, requests));
                    parts.push(pause(third * 4 / 10 - early));
                }
                parts.push(pause(third * 4));
                parts
            }
            Self::Aimed => {
                let (before, after) = (window / 8, window / 20);
                vec![
                    at_once(1),
                    pause(window - before),
                    at_once(limit.saturating_sub(1)),
                    pause(before + after),
                    at_once(limit),
                    pause(window * 2),
                ]
            }
            Self::Drawn { ref rates, period_ms } => {
                let period = Duration::from_millis(period_ms.clamp(1_000, 60_000));
                let columns = rates.len().clamp(1, 100);
                let column = period / columns as u32;
                let requests =
                    |rate: u64| (rate.min(MAX_RATE) as f64 * column.as_secs_f64()).round() as u64;
                rates.iter().take(columns).map(|&rate| part(column, requests(rate))).collect()
            }
        }
    }
}

/// The requests to come.
pub struct Arrivals {
    parts: Vec<Part>,
    /// The part that runs, since when, and how many of its requests have come.
    index: usize,
    began: Duration,
    sent: u64,
}

impl Arrivals {
    pub fn new(traffic: &Traffic, settings: &Settings, now: Duration) -> Self {
        let mut parts = traffic.parts(settings);
        if parts.iter().all(|part| part.length.is_zero()) {
            parts.clear();
        }
        Self { parts, index: 0, began: now, sent: 0 }
    }

    /// Returns the number of requests that have come since the last call.
    pub fn due(&mut self, now: Duration) -> u64 {
        let mut due = 0;
        let Some(mut part) = self.parts.get(self.index).copied() else { return 0 };
        let end = self.began + part.length;
        if now > end + MAX_LATE {
            self.began = now.saturating_sub(part.length);
        }
        loop {
            let elapsed = now.saturating_sub(self.began);
            if elapsed < part.length {
                let share = elapsed.as_secs_f64() / part.length.as_secs_f64();
                // The first request comes at the beginning.
                let come = match part.requests {
                    0 => 0,
                    requests => ((requests as f64 * share) as u64 + 1).min(requests),
                };
                due += come.saturating_sub(self.sent);
                self.sent = self.sent.max(come);
                return due;
            }
            due += part.requests - self.sent;
            self.began += part.length;
            self.sent = 0;
            self.index = (self.index + 1) % self.parts.len();
            part = self.parts[self.index];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::{Counts, Policy};

    #[test]
    fn the_traffic_at_the_boundary_has_its_five_numbers_in_five_seconds() {
        let settings = Settings {
            limit: 1_000,
            window_ms: 3_000,
            burst: 1_000,
            max_wait_ms: 0,
            duration_ms: 1_000,
            in_flight: 500,
            holds: false,
            used_percent: 100,
            replicas: 1,
            store: Counts::Memory,
            policy: Policy::Closed,
            lanes: vec![],
        };
        let mut arrivals = Arrivals::new(&Traffic::Boundary, &settings, Duration::ZERO);
        let mut seconds = [0; 10];
        for tick in 0..1_000 {
            seconds[tick / 100] += arrivals.due(Duration::from_millis(10 * tick as u64));
        }
        // The tenth second is the first of the next turn.
        assert_eq!(seconds, [10, 10, 980, 900, 100, 0, 0, 0, 0, 10]);
    }
}
