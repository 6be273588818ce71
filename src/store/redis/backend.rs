//! What the calls of a store share: its connections, the names of its keys, and what it remembers.
//! It decides nothing.

use std::sync::{Arc, Mutex, atomic::AtomicBool};

use tokio::{
    sync::{Notify, OwnedSemaphorePermit, Semaphore},
    time::Instant,
};

use super::{
    connections::{Client, TransportError},
    ends::{Ends, OpenEnds},
    holds::HoldTable,
    monitor::Monitor,
};
use crate::{
    decision::Outcome,
    error::Error,
    keys::Key,
    store::{
        LimitRequest, Lines, Settings,
        denials::{Denials, Undecided},
        tally::{Open, Tally},
    },
};

/// The number of calls of a store that are awaited after their deadlines. Each holds a task, its
/// command and its keys, some kilobytes, for up to 30 s. Without a bound, a Redis that hangs for 30
/// s under 1,000 calls per second would hold 30,000 of them. What is spent by calls beyond the
/// bound stays counted, as it does for checks that may not wait.
const MAX_LATE_CALLS: usize = 1_000;

pub(super) struct Backend {
    pub(super) client: Client,
    pub(super) monitor: Arc<Monitor>,
    /// The prefix of all keys in Redis.
    pub(super) prefix: Arc<str>,
    pub(super) denials: Denials,
    /// The requests of the process that wait for units.
    pub(super) lines: Arc<Lines>,
    pub(super) holds: Mutex<HoldTable>,
    /// Notified when the holds have changed.
    pub(super) holds_changed: Notify,
    pub(super) ends: Ends,
    /// True if the server rejects calls whose keys are in several slots. It is found out once, and
    /// a call that reads an old value is rejected and repeated by key: so `Relaxed` suffices.
    pub(super) is_clustered: AtomicBool,
    /// The calls that are awaited after their deadlines: at most [`MAX_LATE_CALLS`].
    late_calls: Arc<Semaphore>,
    /// The calls whose answers may return units.
    pub(super) calls: Tally,
}

impl Backend {
    pub(super) fn new(
        client: Client,
        monitor: Arc<Monitor>,
        prefix: Arc<str>,
        denials: Denials,
        lines: Arc<Lines>,
    ) -> Arc<Self> {
        Arc::new(Self {
            is_clustered: AtomicBool::new(client.is_cluster()),
            client,
            monitor,
            prefix,
            denials,
            ends: Ends::new(lines.clone()),
            lines,
            holds: Mutex::default(),
            holds_changed: Notify::new(),
            late_calls: Arc::new(Semaphore::new(MAX_LATE_CALLS)),
            calls: Tally::default(),
        })
    }

    /// Returns the name of a key in Redis.
    pub(super) fn key(&self, settings: &Settings, key: &Key<'_>) -> String {
        let Settings { name, algorithm, .. } = settings;
        // Empty braces would not determine the slot. No other key has this form.
        let key = Some(key.as_str()).filter(|key| !key.is_empty()).unwrap_or("%");
        [&self.prefix, ":", name, ":", algorithm.name(), ":{", key, "}"].concat()
    }

    /// Begins a call that is awaited after its deadline, if there are not too many. A flush waits
    /// for what its answer returns.
    pub(super) fn begin_late_call(&self) -> Option<(OwnedSemaphorePermit, Open)> {
        let permit = self.late_calls.clone().try_acquire_owned().ok()?;
        Some((permit, self.calls.begin()))
    }

    /// Returns the ends of holds that Redis may not know yet, of the keys of which a request holds
    /// units.
    pub(super) fn open_ends(&self, limits: &[LimitRequest<'_>]) -> OpenEnds {
        let held = limits.iter().filter(|limit| limit.hold.is_some());
        let keys = held.map(|LimitRequest { settings, key, .. }| {
            (settings.name, self.lines.line_of(settings.name, key))
        });
        self.ends.open(keys.collect())
    }

    /// Reports the failure of a decision, or ends the changes of a request that is decided and
    /// remembers its denial.
    pub(super) fn resolve(
        &self,
        limiter: &str,
        mut undecided: Undecided,
        result: Result<Outcome, TransportError>,
    ) -> Result<Outcome, Error> {
        let failed = |error| self.monitor.failed(&self.client, limiter, error, true);
        let outcome = result.map_err(failed)?;
        undecided.resolve(&self.denials, &outcome.decision, Instant::now);
        Ok(outcome)
    }
}
