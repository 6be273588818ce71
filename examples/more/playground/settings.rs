//! The settings and the messages that the page sends. Values are bounded here. What they lead to
//! is in `session.rs`.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tower_ratelimit::{FailurePolicy, Quota};

use crate::{algorithms::Shown, traffic::Traffic};

/// A message of the page.
#[derive(Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case")]
pub enum Request {
    /// Changes settings.
    Set(Settings),
    /// Changes the traffic.
    Traffic(Traffic),
    /// Sends requests at once.
    Burst { n: u64 },
    /// Forgets all counts, and begins the traffic again.
    Restart,
    /// Stops or starts the private Redis server.
    Redis { run: bool },
}

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Settings {
    pub limit: u64,
    pub window_ms: u64,
    pub burst: u64,
    pub max_wait_ms: u64,
    /// How long each request takes. Rates hold units for this time if `holds` is true.
    pub duration_ms: u64,
    /// The limit of the requests in flight.
    pub in_flight: u64,
    pub holds: bool,
    /// How many of 100 units that a rate holds are used.
    pub used_percent: u64,
    pub replicas: usize,
    pub store: Counts,
    pub policy: Policy,
    /// The algorithms that decide.
    pub lanes: Vec<String>,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Counts {
    Memory,
    Redis,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    Closed,
    Open,
    Local,
}

impl Settings {
    /// Returns the nearest settings that are allowed.
    pub fn bounded(self) -> Self {
        Self {
            limit: self.limit.clamp(1, 2_000),
            window_ms: self.window_ms.clamp(500, 20_000),
            burst: self.burst.clamp(1, 2_000),
            max_wait_ms: self.max_wait_ms.min(10_000),
            duration_ms: self.duration_ms.clamp(50, 10_000),
            in_flight: self.in_flight.clamp(1, 2_000),
            used_percent: self.used_percent.min(100),
            replicas: self.replicas.clamp(1, 4),
            ..self
        }
    }

    pub fn window(&self) -> Duration {
        Duration::from_millis(self.window_ms)
    }

    pub fn duration(&self) -> Duration {
        Duration::from_millis(self.duration_ms)
    }

    pub fn quota(&self, shown: &Shown) -> Result<Quota, String> {
        let quota = match shown.at_a_time {
            true => Quota::try_concurrent(self.in_flight),
            false => Quota::try_new(self.limit, self.window())
                .and_then(|quota| quota.try_burst(self.burst)),
        };
        quota.map_err(|error| error.to_string())
    }

    /// Returns whether the requests of an algorithm hold their units while they are in progress.
    pub fn holds(&self, shown: &Shown) -> bool {
        shown.at_a_time || (self.holds && shown.can_hold)
    }

    /// Returns the policy while Redis fails. The replicas share the quota.
    pub fn failure_policy(&self) -> FailurePolicy {
        match self.policy {
            Policy::Closed => FailurePolicy::Closed,
            Policy::Open => FailurePolicy::Open,
            Policy::Local => FailurePolicy::local(1.0 / self.replicas as f64),
        }
    }

    /// Returns whether a change needs new limiters, and so begins all counts again.
    pub fn needs_restart(&self, new: &Self) -> bool {
        let parts = |it: &Self| (it.replicas, it.store, it.holds);
        parts(self) != parts(new)
    }
}
