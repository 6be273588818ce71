//! `Metrics`: the observer that counts for the crate `metrics`. A test compares the names with
//! those in `docs/monitoring.md` and `docs/grafana.json`.

use std::{
    fmt,
    sync::{Arc, OnceLock},
};

use metrics::{
    Counter, Gauge, Histogram, Label, SharedString, Unit, counter, describe_counter,
    describe_gauge, describe_histogram, gauge, histogram,
};

use super::{event::Event, observer::Observer};
use crate::{
    decision::{Decision, Source},
    error::ErrorKind,
};

const DECISIONS: &str = "tower_ratelimit_decisions_total";
const DECISION_DURATION: &str = "tower_ratelimit_decision_duration_seconds";
const REJECTIONS: &str = "tower_ratelimit_rejections_total";
const WAITING: &str = "tower_ratelimit_waiting_requests";
const WAIT_DURATION: &str = "tower_ratelimit_wait_duration_seconds";
const RELEASED: &str = "tower_ratelimit_released_units_total";
const HELD: &str = "tower_ratelimit_held_units";
const SETTLED: &str = "tower_ratelimit_settled_units_total";
const HOLDS_EXPIRED: &str = "tower_ratelimit_expired_holds_total";
const HOLDS_LOST: &str = "tower_ratelimit_lost_holds_total";
const HOLDS_UNSETTLED: &str = "tower_ratelimit_unsettled_holds_total";
const DIFFERENCES: &str = "tower_ratelimit_different_decisions_total";
const KEY_CHANGES: &str = "tower_ratelimit_key_changes_total";
const SETTINGS_CHANGES: &str = "tower_ratelimit_settings_changes_total";
const RELOADS: &str = "tower_ratelimit_reloads_total";
const STORE_ERRORS: &str = "tower_ratelimit_store_errors_total";
const BATCH_CHECKS: &str = "tower_ratelimit_batch_checks";
const KEYS: &str = "tower_ratelimit_keys";
const KEYS_LIMIT: &str = "tower_ratelimit_keys_limit";
const CIRCUIT_OPEN: &str = "tower_ratelimit_circuit_open";

/// The outcomes of decisions.
const OUTCOMES: [&str; 4] = ["allowed", "waited", "denied", "blocked"];

/// The reasons of [`Event::Rejected`].
const REASONS: [&str; 7] =
    ["denied", "cost_above_quota", "missing_key", "invalid", "forbidden", "misconfigured", "store"];

/// Returns an observer that counts for the crate [`metrics`](https://docs.rs/metrics), for Prometheus and
/// other systems.
///
/// The page on [monitoring](crate::guide::monitoring#metrics) lists the metrics and recommends
/// alerts. No label contains a key. The number of series depends on the number of limiters and
/// servers only.
///
/// Install the recorder of an exporter before the first request: a metric that is used before stays
/// without effect. In exporters for Prometheus, set the buckets of the histograms.
///
/// # Examples
///
/// ```
/// use std::sync::Arc;
/// use metrics_exporter_prometheus::PrometheusBuilder;
/// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, observe};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let exporter = PrometheusBuilder::new().install_recorder()?;
/// let store = MemoryStore::new();
/// store.add_observer(Arc::new(observe::metrics()));
/// let limiter = Limiter::new("api", store, Algorithm::token_bucket(), Quota::per_second(10));
/// limiter.check("alice").await?;
/// let allowed = r#"decisions_total{limiter="api",outcome="allowed",source="store"} 1"#;
/// assert!(exporter.render().contains(allowed));
/// # Ok(())
/// # }
/// ```
#[must_use]
pub fn metrics() -> impl Observer {
    Metrics::default()
}

/// Returns an observer as [`metrics`](fn@metrics) does, whose metrics have a label `store` with
/// this name: for several stores in one process.
///
/// # Examples
///
/// ```
/// use std::sync::Arc;
/// use tower_ratelimit::{MemoryStore, observe};
///
/// let (keys, addresses) = (MemoryStore::new(), MemoryStore::new());
/// keys.add_observer(Arc::new(observe::metrics_of("keys")));
/// addresses.add_observer(Arc::new(observe::metrics_of("addresses")));
/// ```
#[must_use]
pub fn metrics_of(store: &str) -> impl Observer {
    Metrics(Arc::new(Shared { store: Some(store.to_owned().into()), ..Shared::default() }))
}

#[derive(Default)]
struct Metrics(Arc<Shared>);

/// The metrics that are not of one limiter.
#[derive(Default)]
struct Shared {
    /// The label of the store.
    store: Option<SharedString>,
    /// By [`REASONS`].
    rejections: OnceLock<[Counter; REASONS.len()]>,
    keys: OnceLock<Keys>,
    /// Of configurations: applied and rejected.
    reloads: OnceLock<[Counter; 2]>,
}

/// The metrics of a store in memory.
struct Keys {
    held: Gauge,
    limit: Gauge,
}

/// The metrics of one limiter.
struct OfLimiter {
    shared: Arc<Shared>,
    limiter: SharedString,
    handles: OnceLock<LimiterHandles>,
}

struct LimiterHandles {
    /// By source and outcome.
    decisions: [[Counter; OUTCOMES.len()]; Source::ALL.len()],
    duration: Histogram,
    waiting: Gauge,
    wait_duration: Histogram,
    released: Counter,
    held: Gauge,
    settled_held: Counter,
    settled_used: Counter,
    holds_expired: Counter,
    holds_lost: Counter,
    holds_unsettled: Counter,
    differences: Counter,
    keys_blocked: Counter,
    keys_unblocked: Counter,
    keys_reset: Counter,
    settings_changes: Counter,
    /// Those of checks, by [`ErrorKind::ALL`]. Other operations are registered when they fail.
    store_errors: [Counter; ErrorKind::ALL.len()],
    batch_checks: Histogram,
}

impl Shared {
    fn labels<const N: usize>(&self, labels: [(&'static str, SharedString); N]) -> Vec<Label> {
        let store = self.store.iter().map(|store| ("store", store.clone()));
        store.chain(labels).map(|(name, value)| Label::new(name, value)).collect()
    }

    fn rejections(&self) -> &[Counter; REASONS.len()] {
        self.rejections.get_or_init(|| {
            describe_counter!(REJECTIONS, Unit::Count, "Requests rejected by a layer, by reason");
            REASONS.map(|reason| counter!(REJECTIONS, self.labels([("reason", reason.into())])))
        })
    }

    fn reloads(&self) -> &[Counter; 2] {
        self.reloads.get_or_init(|| {
            describe_counter!(RELOADS, Unit::Count, "Reloads of the limits, by result");
            ["applied", "rejected"]
                .map(|result| counter!(RELOADS, self.labels([("result", result.into())])))
        })
    }

    fn keys(&self) -> &Keys {
        self.keys.get_or_init(|| {
            describe_gauge!(KEYS, Unit::Count, "Keys in the store in memory");
            describe_gauge!(KEYS_LIMIT, Unit::Count, "Maximum number of keys in memory");
            Keys { held: gauge!(KEYS, self.labels([])), limit: gauge!(KEYS_LIMIT, self.labels([])) }
        })
    }
}

impl OfLimiter {
    fn new(shared: &Arc<Shared>, limiter: SharedString) -> Self {
        Self { shared: shared.clone(), limiter, handles: OnceLock::new() }
    }

    fn labels<const N: usize>(&self, labels: [(&'static str, SharedString); N]) -> Vec<Label> {
        let mut all = self.shared.labels([("limiter", self.limiter.clone())]);
        all.extend(labels.map(|(name, value)| Label::new(name, value)));
        all
    }

    fn handles(&self) -> &LimiterHandles {
        self.handles.get_or_init(|| self.register())
    }

    fn store_errors(&self, operation: &'static str, kind: ErrorKind) -> Counter {
        let labels = [("operation", operation.into()), ("kind", kind.as_str().into())];
        counter!(STORE_ERRORS, self.labels(labels))
    }

    fn register(&self) -> LimiterHandles {
        // So that their rates include the first one.
        self.shared.rejections();
        self.shared.reloads();
        describe_counter!(DECISIONS, Unit::Count, "Decided checks, by limiter, outcome and source");
        describe_histogram!(DECISION_DURATION, Unit::Seconds, "Time until Redis has decided");
        describe_gauge!(WAITING, Unit::Count, "Requests that wait for quota");
        describe_histogram!(WAIT_DURATION, Unit::Seconds, "Time that requests waited for quota");
        describe_counter!(RELEASED, Unit::Count, "Units that requests returned");
        describe_gauge!(HELD, Unit::Count, "Units that permits of this process hold");
        describe_counter!(SETTLED, Unit::Count, "Units of ended permits: held, and used");
        describe_counter!(HOLDS_EXPIRED, Unit::Count, "Holds that were not renewed in time");
        describe_counter!(HOLDS_LOST, Unit::Count, "Holds that the store has lost");
        describe_counter!(HOLDS_UNSETTLED, Unit::Count, "Holds whose end had no effect in time");
        describe_counter!(DIFFERENCES, Unit::Count, "Decisions that a process computes otherwise");
        describe_counter!(KEY_CHANGES, Unit::Count, "Keys blocked, unblocked or reset");
        describe_counter!(SETTINGS_CHANGES, Unit::Count, "Changes of a quota or an algorithm");
        describe_counter!(
            STORE_ERRORS,
            Unit::Count,
            "Calls that the store could not execute, by operation and kind"
        );
        describe_histogram!(BATCH_CHECKS, Unit::Count, "Checks in a call to Redis");
        let decisions = |source: Source| {
            OUTCOMES.map(|outcome| match (source, outcome) {
                // They do not occur.
                (Source::Cached, "allowed" | "waited")
                | (Source::Open, "waited" | "denied" | "blocked") => Counter::noop(),
                _ => {
                    let labels = [("outcome", outcome.into()), ("source", source.as_str().into())];
                    counter!(DECISIONS, self.labels(labels))
                }
            })
        };
        let settled =
            |units: &'static str| counter!(SETTLED, self.labels([("units", units.into())]));
        let key_changes =
            |change: &'static str| counter!(KEY_CHANGES, self.labels([("change", change.into())]));
        LimiterHandles {
            decisions: Source::ALL.map(decisions),
            duration: histogram!(DECISION_DURATION, self.labels([])),
            waiting: gauge!(WAITING, self.labels([])),
            wait_duration: histogram!(WAIT_DURATION, self.labels([])),
            released: counter!(RELEASED, self.labels([])),
            held: gauge!(HELD, self.labels([])),
            settled_held: settled("held"),
            settled_used: settled("used"),
            holds_expired: counter!(HOLDS_EXPIRED, self.labels([])),
            holds_lost: counter!(HOLDS_LOST, self.labels([])),
            holds_unsettled: counter!(HOLDS_UNSETTLED, self.labels([])),
            differences: counter!(DIFFERENCES, self.labels([])),
            keys_blocked: key_changes("blocked"),
            keys_unblocked: key_changes("unblocked"),
            keys_reset: key_changes("reset"),
            settings_changes: counter!(SETTINGS_CHANGES, self.labels([])),
            store_errors: ErrorKind::ALL.map(|kind| self.store_errors("check", kind)),
            batch_checks: histogram!(BATCH_CHECKS, self.labels([])),
        }
    }
}

impl LimiterHandles {
    fn decisions(&self, decision: &Decision) -> &Counter {
        let outcome = match decision.is_allowed() {
            true => usize::from(!decision.delay().is_zero()),
            false => 2 + usize::from(decision.is_blocked()),
        };
        &self.decisions[decision.source() as usize][outcome]
    }
}

impl Observer for OfLimiter {
    fn on_event(&self, event: &Event<'_>) {
        let handles = self.handles();
        match *event {
            Event::Decided { decision, duration, .. } => {
                handles.decisions(decision).increment(1);
                if let Some(duration) = duration {
                    handles.duration.record(duration);
                }
            }
            Event::WaitBegan { .. } => handles.waiting.increment(1),
            Event::WaitEnded { duration, .. } => {
                handles.waiting.decrement(1);
                handles.wait_duration.record(duration);
            }
            Event::Released { units, .. } => handles.released.increment(units),
            Event::HoldBegan { held, .. } => handles.held.increment(held as f64),
            Event::HoldEnded { held, used, .. } => {
                handles.held.decrement(held as f64);
                handles.settled_held.increment(held);
                handles.settled_used.increment(used);
            }
            Event::HoldExpired { .. } => handles.holds_expired.increment(1),
            Event::HoldLost { .. } => handles.holds_lost.increment(1),
            Event::HoldUnsettled { .. } => handles.holds_unsettled.increment(1),
            Event::DecisionDiffered { .. } => handles.differences.increment(1),
            Event::Blocked { .. } => handles.keys_blocked.increment(1),
            Event::Unblocked { .. } => handles.keys_unblocked.increment(1),
            Event::Reset { .. } => handles.keys_reset.increment(1),
            Event::SettingsChanged { .. } => handles.settings_changes.increment(1),
            Event::StoreFailed { operation: "check", error, .. } => {
                handles.store_errors[error.kind() as usize].increment(1);
            }
            Event::StoreFailed { operation, error, .. } => {
                self.store_errors(operation, error.kind()).increment(1);
            }
            Event::BatchSent { checks, .. } => handles.batch_checks.record(checks as f64),
            Event::Rejected { .. }
            | Event::Reloaded { .. }
            | Event::KeysHeld { .. }
            | Event::BreakerChanged { .. } => {}
        }
    }
}

impl Observer for Metrics {
    fn on_event(&self, event: &Event<'_>) {
        match *event {
            Event::Rejected { reason, .. } => {
                if let Some(index) = REASONS.iter().position(|known| *known == reason) {
                    self.0.rejections()[index].increment(1);
                }
            }
            Event::Reloaded { error, .. } => {
                let [applied, rejected] = self.0.reloads();
                let counter = if error.is_none() { applied } else { rejected };
                counter.increment(1);
            }
            Event::KeysHeld { keys, max_keys, .. } => {
                let Keys { held, limit } = self.0.keys();
                held.set(keys as f64);
                limit.set(max_keys as f64);
            }
            Event::BreakerChanged { server, is_open, .. } => {
                let help = "1 while the circuit breaker of a server is open, otherwise 0";
                describe_gauge!(CIRCUIT_OPEN, Unit::Count, help);
                let labels = self.0.labels([("server", server.to_owned().into())]);
                gauge!(CIRCUIT_OPEN, labels).set(u8::from(is_open));
            }
            // Another observer has passed it on: it was not passed to the one of its limiter.
            _ => {
                if let Some(limiter) = event.limiter() {
                    OfLimiter::new(&self.0, limiter.to_owned().into()).on_event(event);
                }
            }
        }
    }

    fn of_limiter(&self, limiter: &'static str) -> Option<Arc<dyn Observer>> {
        Some(Arc::new(OfLimiter::new(&self.0, limiter.into())))
    }
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").field("store", &self.0.store).finish()
    }
}
