//! A hold that a store keeps for its permit: units that were taken, until it is known how many of
//! them are used. It knows no permits: these are in `limiter/permit.rs`.

use std::{fmt, sync::Arc, time::Duration};

use super::Settings;
use crate::{
    algorithm::{HoldAction, HoldChange, HoldReceipt, units},
    keys::Key,
    observe::Observers,
};

/// The units of a key that an admitted request holds.
#[derive(Clone, Debug)]
pub struct Hold {
    /// Those of the decision.
    pub(crate) settings: Arc<Settings>,
    #[cfg_attr(not(feature = "redis"), allow(dead_code))]
    pub(crate) latest: LatestSettings,
    /// The observers of the limiter.
    pub(crate) observers: Observers,
    pub(crate) key: Key<'static>,
    pub(crate) units: u64,
    /// The time after which the units count as used, if no renewal arrives.
    #[cfg_attr(not(feature = "redis"), allow(dead_code))]
    pub(crate) lifetime: Duration,
    pub(crate) receipt: HoldReceipt,
}

/// Returns the settings that the limiter has now: with those of the decision, a change of a hold
/// would undo a change of the quota.
#[derive(Clone)]
pub struct LatestSettings(
    #[cfg_attr(not(feature = "redis"), allow(dead_code))]
    pub(crate)  Arc<dyn Fn() -> Arc<Settings> + Send + Sync>,
);

impl fmt::Debug for LatestSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LatestSettings")
    }
}

impl Hold {
    /// Takes the settings of now, unless another algorithm counts now.
    #[cfg(feature = "redis")]
    pub(crate) fn update_settings(&mut self) {
        let latest = (self.latest.0)();
        if latest.params.kind() == self.settings.params.kind() {
            self.settings = latest;
        }
    }

    /// Returns the end of the hold, with `used` units.
    pub(crate) fn end(&self, used: u64) -> HoldChange {
        let action = HoldAction::End { used: units(used) };
        HoldChange { receipt: self.receipt, units: units(self.units), action }
    }
}

/// A hold that its store keeps: it is renewed until it ends. The units of a guard that is dropped
/// count as used when the hold expires.
pub trait HoldGuard: fmt::Debug + Send + Sync {
    /// Ends the hold: `used` of its units were used, perhaps more than it has. It does not wait,
    /// and cannot fail: the store sends the end in the background.
    fn end(self: Box<Self>, used: u64);

    /// Returns whether the units count as used already, because no renewal arrived in time.
    fn is_expired(&self) -> bool;
}
