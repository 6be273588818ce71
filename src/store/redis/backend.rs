//! What the calls of a store share: its connections, the names of its keys, and the denials that it
//! remembers. It decides nothing.

use std::{sync::Arc, time::Duration};

use super::{
    holds::Keeper,
    key_name::key_name,
    monitor::Monitor,
    release,
    transport::{Client, TransportError},
};
use crate::{
    algorithm::{Release, units as count},
    decision::Receipt,
    error::Error,
    keys::Key,
    observe::{Event, Observers},
    store::{Hold, LatestSettings, Settings, denials::Denials},
};

/// The time for which the end of a hold is sent whose caller has gone, as for other jobs in the
/// background. An end that comes too late changes nothing.
const LATE_HOLD: Duration = Duration::from_secs(3_600);

#[derive(Clone)]
pub(super) struct Backend {
    pub(super) client: Client,
    pub(super) monitor: Arc<Monitor>,
    /// The prefix of all keys in Redis.
    pub(super) prefix: Arc<str>,
    pub(super) denials: Denials,
    pub(super) holds: Keeper,
}

impl Backend {
    /// Returns the name of a key in Redis.
    pub(super) fn key(&self, settings: &Settings, key: &Key<'_>) -> String {
        key_name(&self.prefix, settings, key)
    }

    /// Returns what reports the failure of a decision of a limiter, and makes its error.
    pub(super) fn failed(
        &self,
        limiter: &'static str,
    ) -> impl FnOnce(TransportError) -> Error + use<> {
        let (client, monitor) = (self.client.clone(), self.monitor.clone());
        move |error| monitor.failed(&client, limiter, error).into()
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
                let (observers, lifetime) = (Observers::default(), LATE_HOLD);
                let receipt = *receipt;
                let same = settings.clone();
                let latest = LatestSettings(Arc::new(move || same.clone()));
                let hold = Hold { settings, latest, observers, key, units, lifetime, receipt };
                self.holds.cancel(hold);
                return true;
            }
            Receipt::None | Receipt::Id(_) => return false,
        };
        let change = self.denials.begin_return(settings, key);
        let key = self.key(settings, key);
        let release = Release { instant: Some(instant as f64), units: count(units) };
        self.client.execute_later(release::job(&settings.params, &key, release, change));
        true
    }
}

/// Reports the units that are returned for a caller that has gone.
pub(super) fn report_released(observers: &Observers, limiter: &str, key: &Key<'_>, units: u64) {
    observers.report(&Event::Released { limiter, key, units });
}

/// Reports that a call is sent.
pub(super) fn report_sent(observers: &Observers, limiter: &str, checks: usize) {
    observers.report(&Event::BatchSent { limiter, checks });
}
