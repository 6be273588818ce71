//! What the calls of a store share: its connections, the names of its keys, and the denials that it
//! remembers. It decides nothing.

use std::{fmt, sync::Arc};

use super::{monitor::Monitor, release, transport::Client};
use crate::{
    algorithm::{HoldReceipt, Release, units as count},
    decision::Receipt,
    keys::Key,
    observe::{Event, Observers},
    store::{Hold, HoldGuard, Settings, denials::Denials},
};

#[derive(Clone)]
pub(super) struct Backend {
    pub(super) client: Client,
    pub(super) monitor: Arc<Monitor>,
    /// The prefix of all keys in Redis.
    pub(super) prefix: Arc<str>,
    pub(super) denials: Denials,
}

impl Backend {
    /// Returns the name of a key in Redis.
    pub(super) fn key(&self, settings: &Settings, key: &Key<'_>) -> String {
        let Settings { name, algorithm, .. } = settings;
        // Empty braces would not determine the slot. No other key has this form.
        let key = Some(key.as_str()).filter(|key| !key.is_empty()).unwrap_or("%");
        [&self.prefix, ":", name, ":", algorithm.name(), ":{", key, "}"].concat()
    }

    /// Keeps a hold until it ends.
    pub(super) fn keep_hold(&self, hold: Hold) -> Box<dyn HoldGuard> {
        Box::new(RedisHold { backend: self.clone(), hold })
    }

    /// Ends a hold in the background.
    fn end_hold(
        &self,
        settings: &Settings,
        key: &Key<'_>,
        units: u64,
        receipt: &HoldReceipt,
        used: u64,
    ) {
        let _ = (&self.client, settings, key, units, receipt, used);
    }

    /// Releases in the background the units that a decision has spent for one limit: its caller has
    /// gone. Returns whether it has spent any.
    pub(super) fn release_late(
        &self,
        settings: &Settings,
        key: &Key<'_>,
        units: u64,
        of: &Receipt,
    ) -> bool {
        let instant = match of {
            Receipt::At(instant, _) => *instant,
            Receipt::Hold(receipt) => {
                self.end_hold(settings, key, units, receipt, 0);
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

/// A hold that the store keeps.
struct RedisHold {
    backend: Backend,
    hold: Hold,
}

impl fmt::Debug for RedisHold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisHold").field("hold", &self.hold).finish_non_exhaustive()
    }
}

impl HoldGuard for RedisHold {
    fn end(self: Box<Self>, used: u64) {
        let Hold { settings, key, units, receipt, .. } = &self.hold;
        self.backend.end_hold(settings, key, *units, receipt, used);
    }

    fn is_expired(&self) -> bool {
        false
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
