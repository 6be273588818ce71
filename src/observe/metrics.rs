//! `Metrics`: the observer that counts for the crate `metrics`. A test compares the names with
//! those in `docs/operation.md` and `docs/grafana.json`.

use std::{
    fmt,
    sync::{Arc, OnceLock},
    time::Duration,
};

use metrics::{
    Counter, Gauge, Histogram, Label, SharedString, Unit, counter, describe_counter,
    describe_gauge, describe_histogram, gauge, histogram,
};

use super::{
    BatchSent, BreakerChanged, Decided, KeyChange, KeyChanged, KeysHeld, Observer, Operation,
    Outcome, Reason, Rejected, Released, Reloaded, SettingsChanged, StoreFailed, WaitBegan,
    WaitEnded,
};
use crate::{decision::Source, error::ErrorKind};

const DECISIONS: &str = "tower_ratelimit_decisions_total";
const DECISION_DURATION: &str = "tower_ratelimit_decision_duration_seconds";
const REJECTIONS: &str = "tower_ratelimit_rejections_total";
const WAITING: &str = "tower_ratelimit_waiting_requests";
const WAIT_DURATION: &str = "tower_ratelimit_wait_duration_seconds";
const RELEASED: &str = "tower_ratelimit_released_units_total";
const KEY_CHANGES: &str = "tower_ratelimit_key_changes_total";
const SETTINGS_CHANGES: &str = "tower_ratelimit_settings_changes_total";
const RELOADS: &str = "tower_ratelimit_reloads_total";
const STORE_ERRORS: &str = "tower_ratelimit_store_errors_total";
const BATCH_CHECKS: &str = "tower_ratelimit_batch_checks";
const KEYS: &str = "tower_ratelimit_keys";
const KEYS_LIMIT: &str = "tower_ratelimit_keys_limit";
const CIRCUIT_OPEN: &str = "tower_ratelimit_circuit_open";

/// The observer that counts for the crate [`metrics`](https://docs.rs/metrics), for Prometheus and
/// other systems.
///
/// The page on [operation](crate::guide::operation#metrics-events-dashboards) lists the metrics and
/// recommends alerts. No label contains a key. The number of series depends on the number of
/// limiters and servers only.
///
/// Install the recorder of an exporter before the first request: a metric that is used before stays
/// without effect. In exporters for Prometheus, set the buckets of the histograms.
///
/// # Examples
///
/// ```
/// use std::sync::Arc;
/// use metrics_exporter_prometheus::PrometheusBuilder;
/// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, observe::Metrics};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let exporter = PrometheusBuilder::new().install_recorder()?;
/// let store = MemoryStore::new().observe(Arc::new(Metrics::new()));
/// let limiter = Limiter::new("api", store, Algorithm::token_bucket(), Quota::per_second(10));
/// limiter.check("alice").await?;
/// let allowed = r#"decisions_total{limiter="api",outcome="allowed",source="store"} 1"#;
/// assert!(exporter.render().contains(allowed));
/// # Ok(())
/// # }
/// ```
#[derive(Default)]
pub struct Metrics(Arc<Shared>);

/// The metrics that are not of one limiter.
#[derive(Default)]
struct Shared {
    /// The label of the store.
    store: Option<SharedString>,
    /// By [`Reason::ALL`].
    rejections: OnceLock<[Counter; Reason::ALL.len()]>,
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
    allowed: Counter,
    waited: Counter,
    denied: Counter,
    denied_cached: Counter,
    blocked: Counter,
    blocked_cached: Counter,
    allowed_local: Counter,
    waited_local: Counter,
    denied_local: Counter,
    allowed_open: Counter,
    duration: Histogram,
    waiting: Gauge,
    wait_duration: Histogram,
    released: Counter,
    keys_blocked: Counter,
    keys_unblocked: Counter,
    keys_reset: Counter,
    settings_changes: Counter,
    /// Those of checks, by [`ErrorKind::ALL`]. Other operations are registered when they fail.
    store_errors: [Counter; ErrorKind::ALL.len()],
    batch_checks: Histogram,
}

impl Metrics {
    /// Makes the observer. Its metrics are registered when they are first used.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the label `store` with this value to each metric. It distinguishes several stores of a
    /// process that have limiters of the same name.
    #[must_use]
    pub fn store(self, name: &str) -> Self {
        let store = Some(name.to_owned().into());
        Self(Arc::new(Shared { store, ..Shared::default() }))
    }

    /// Returns the metrics of a limiter for one event, if the event was not passed to the observer
    /// of that limiter.
    fn limiter(&self, name: &str) -> OfLimiter {
        OfLimiter::new(&self.0, name.to_owned().into())
    }
}

impl Shared {
    fn labels<const N: usize>(&self, labels: [(&'static str, SharedString); N]) -> Vec<Label> {
        let store = self.store.iter().map(|store| ("store", store.clone()));
        store.chain(labels).map(|(name, value)| Label::new(name, value)).collect()
    }

    fn rejections(&self) -> &[Counter; Reason::ALL.len()] {
        self.rejections.get_or_init(|| {
            describe_counter!(REJECTIONS, Unit::Count, "Requests rejected by a layer, by reason");
            Reason::ALL.map(|reason| {
                counter!(REJECTIONS, self.labels([("reason", reason.as_str().into())]))
            })
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

    fn store_errors(&self, operation: Operation, kind: ErrorKind) -> Counter {
        let labels = [("operation", operation.as_str().into()), ("kind", kind.as_str().into())];
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
        describe_counter!(KEY_CHANGES, Unit::Count, "Keys blocked, unblocked or reset");
        describe_counter!(SETTINGS_CHANGES, Unit::Count, "Changes of a quota or an algorithm");
        describe_counter!(
            STORE_ERRORS,
            Unit::Count,
            "Calls that the store could not execute, by operation and kind"
        );
        describe_histogram!(BATCH_CHECKS, Unit::Count, "Checks in a call to Redis");
        let decisions = |outcome: &'static str, source: &'static str| {
            let labels = [("outcome", outcome.into()), ("source", source.into())];
            counter!(DECISIONS, self.labels(labels))
        };
        let key_changes = |change: KeyChange| {
            counter!(KEY_CHANGES, self.labels([("change", change.as_str().into())]))
        };
        LimiterHandles {
            allowed: decisions("allowed", "store"),
            waited: decisions("waited", "store"),
            denied: decisions("denied", "store"),
            denied_cached: decisions("denied", "cached"),
            blocked: decisions("blocked", "store"),
            blocked_cached: decisions("blocked", "cached"),
            allowed_local: decisions("allowed", "local"),
            waited_local: decisions("waited", "local"),
            denied_local: decisions("denied", "local"),
            allowed_open: decisions("allowed", "open"),
            duration: histogram!(DECISION_DURATION, self.labels([])),
            waiting: gauge!(WAITING, self.labels([])),
            wait_duration: histogram!(WAIT_DURATION, self.labels([])),
            released: counter!(RELEASED, self.labels([])),
            keys_blocked: key_changes(KeyChange::Blocked(Duration::ZERO)),
            keys_unblocked: key_changes(KeyChange::Unblocked),
            keys_reset: key_changes(KeyChange::Reset),
            settings_changes: counter!(SETTINGS_CHANGES, self.labels([])),
            store_errors: ErrorKind::ALL.map(|kind| self.store_errors(Operation::Check, kind)),
            batch_checks: histogram!(BATCH_CHECKS, self.labels([])),
        }
    }
}

impl Observer for OfLimiter {
    fn decided(&self, event: &Decided<'_>) {
        let handles = self.handles();
        let counter = match (event.outcome(), event.decision.source()) {
            (Outcome::Allowed, Source::Store | Source::Cached) => &handles.allowed,
            (Outcome::Waited, Source::Store | Source::Cached) => &handles.waited,
            (Outcome::Denied, Source::Store) => &handles.denied,
            (Outcome::Denied, Source::Cached) => &handles.denied_cached,
            (Outcome::Blocked, Source::Cached) => &handles.blocked_cached,
            (Outcome::Blocked, _) => &handles.blocked,
            (Outcome::Allowed, Source::Local) => &handles.allowed_local,
            (Outcome::Waited, Source::Local) => &handles.waited_local,
            (Outcome::Denied, Source::Local) => &handles.denied_local,
            (_, Source::Open) => &handles.allowed_open,
        };
        counter.increment(1);
        if let Some(duration) = event.duration {
            handles.duration.record(duration);
        }
    }

    fn wait_began(&self, _: &WaitBegan<'_>) {
        self.handles().waiting.increment(1);
    }

    fn wait_ended(&self, event: &WaitEnded<'_>) {
        self.handles().waiting.decrement(1);
        self.handles().wait_duration.record(event.duration);
    }

    fn released(&self, event: &Released<'_>) {
        self.handles().released.increment(event.units);
    }

    fn key_changed(&self, event: &KeyChanged<'_>) {
        let handles = self.handles();
        let counter = match event.change {
            KeyChange::Blocked(_) => &handles.keys_blocked,
            KeyChange::Unblocked => &handles.keys_unblocked,
            KeyChange::Reset => &handles.keys_reset,
        };
        counter.increment(1);
    }

    fn settings_changed(&self, _: &SettingsChanged<'_>) {
        self.handles().settings_changes.increment(1);
    }

    fn store_failed(&self, event: &StoreFailed<'_>) {
        let of_checks = &self.handles().store_errors;
        match event.operation {
            Operation::Check => of_checks[event.kind as usize].increment(1),
            operation => self.store_errors(operation, event.kind).increment(1),
        }
    }

    fn batch_sent(&self, event: &BatchSent<'_>) {
        self.handles().batch_checks.record(event.checks as f64);
    }
}

impl Observer for Metrics {
    fn of_limiter(&self, limiter: &'static str) -> Option<Arc<dyn Observer>> {
        Some(Arc::new(OfLimiter::new(&self.0, limiter.into())))
    }

    fn rejected(&self, event: &Rejected<'_>) {
        self.0.rejections()[event.reason as usize].increment(1);
    }

    fn breaker_changed(&self, event: &BreakerChanged<'_>) {
        let help = "1 while the circuit breaker of a server is open, otherwise 0";
        describe_gauge!(CIRCUIT_OPEN, Unit::Count, help);
        let labels = self.0.labels([("server", event.server.to_owned().into())]);
        gauge!(CIRCUIT_OPEN, labels).set(u8::from(event.is_open));
    }

    fn decided(&self, event: &Decided<'_>) {
        self.limiter(event.decision.limiter()).decided(event);
    }

    fn wait_began(&self, event: &WaitBegan<'_>) {
        self.limiter(event.limiter).wait_began(event);
    }

    fn wait_ended(&self, event: &WaitEnded<'_>) {
        self.limiter(event.limiter).wait_ended(event);
    }

    fn released(&self, event: &Released<'_>) {
        self.limiter(event.limiter).released(event);
    }

    fn key_changed(&self, event: &KeyChanged<'_>) {
        self.limiter(event.limiter).key_changed(event);
    }

    fn settings_changed(&self, event: &SettingsChanged<'_>) {
        self.limiter(event.limiter).settings_changed(event);
    }

    fn reloaded(&self, event: &Reloaded<'_>) {
        let [applied, rejected] = self.0.reloads();
        let counter = if event.error.is_none() { applied } else { rejected };
        counter.increment(1);
    }

    fn store_failed(&self, event: &StoreFailed<'_>) {
        self.limiter(event.limiter).store_failed(event);
    }

    fn batch_sent(&self, event: &BatchSent<'_>) {
        self.limiter(event.limiter).batch_sent(event);
    }

    fn keys_held(&self, event: &KeysHeld) {
        let Keys { held, limit } = self.0.keys();
        held.set(event.keys as f64);
        limit.set(event.max_keys as f64);
    }
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").field("store", &self.0.store).finish()
    }
}
