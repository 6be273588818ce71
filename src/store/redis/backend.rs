//! What the calls of a store share: its connections, the names of its keys, and the denials that it
//! remembers. It decides nothing.

use std::{
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::Instant,
};
use tower_ratelimit_engine::script::Difference;

use super::{
    connections::{Client, TransportError},
    keeper::Keeper,
    key_name::key_name,
    monitor::Monitor,
    release,
};
use crate::{
    algorithm::{Release, units as count},
    decision::{Outcome, Receipt},
    error::Error,
    keys::Key,
    observe::{Event, Observers},
    store::{
        Hold, LatestSettings, Settings,
        denials::{Denials, Undecided},
        tally::{Open, Tally},
    },
};

/// The time for which the end of a hold is sent whose caller has gone, as for other jobs in the
/// background. An end that comes too late changes nothing.
const LATE_HOLD: Duration = Duration::from_secs(3_600);

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
    pub(super) holds: Keeper,
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
        holds: Keeper,
    ) -> Arc<Self> {
        let is_clustered = AtomicBool::new(client.is_cluster());
        let late_calls = Arc::new(Semaphore::new(MAX_LATE_CALLS));
        let calls = Tally::default();
        Arc::new(Self { client, monitor, prefix, denials, holds, is_clustered, late_calls, calls })
    }

    /// Returns the name of a key in Redis.
    pub(super) fn key(&self, settings: &Settings, key: &Key<'_>) -> String {
        key_name(&self.prefix, settings, key)
    }

    /// Begins a call that is awaited after its deadline, if there are not too many. A flush waits
    /// for what its answer returns.
    pub(super) fn begin_late_call(&self) -> Option<(OwnedSemaphorePermit, Open)> {
        let permit = self.late_calls.clone().try_acquire_owned().ok()?;
        Some((permit, self.calls.begin()))
    }

    /// Reports the failure of a decision, or ends the changes of a request that is decided and
    /// remembers its denial.
    pub(super) fn resolve(
        &self,
        limiter: &str,
        mut undecided: Undecided,
        result: Result<Outcome, TransportError>,
    ) -> Result<Outcome, Error> {
        let outcome = result.map_err(|error| self.monitor.failed(&self.client, limiter, error))?;
        undecided.resolve(&self.denials, &outcome.decision, Instant::now);
        Ok(outcome)
    }

    /// Releases in the background the units that a decision has spent for one limit: its caller has
    /// gone. Returns whether it has spent any.
    pub(super) fn release_late(
        &self,
        settings: &Arc<Settings>,
        key: &Key<'_>,
        units: u64,
        of: &Receipt,
    ) -> bool {
        let instant = match of {
            Receipt::At(instant, _) => *instant,
            Receipt::Hold(receipt, _) => {
                let (settings, key) = (settings.clone(), key.clone().into_owned());
                let (observers, lifetime, age) = (Observers::default(), LATE_HOLD, Duration::ZERO);
                let receipt = *receipt;
                let same = settings.clone();
                let latest = LatestSettings(Arc::new(move || same.clone()));
                let hold = Hold { settings, latest, observers, key, units, lifetime, receipt, age };
                self.holds.cancel(hold);
                return true;
            }
            Receipt::None | Receipt::Id(_) => return false,
        };
        let change = self.denials.begin_return(settings, key);
        let key = self.key(settings, key);
        let release = Release { instant: Some(instant as i64), units: count(units) };
        self.client.execute_later(release::job(
            &settings.params,
            &key,
            release,
            None,
            change,
            || (),
        ));
        true
    }

    /// Reports that the script has decided about a key in Redis otherwise than this process has
    /// computed.
    #[cold]
    pub(super) fn report_difference(
        &self,
        observers: &Observers,
        limiter: &str,
        key: &str,
        Difference { admitted, .. }: Difference,
    ) {
        self.monitor.differs(limiter, key, admitted);
        observers.report(&Event::DecisionDiffered { limiter, key, admitted });
    }
}

/// Reports the units that are returned for a caller that has gone.
pub(super) fn report_released(observers: &Observers, limiter: &str, key: &Key<'_>, units: u64) {
    observers.report(&Event::Released { limiter, key, units });
}
