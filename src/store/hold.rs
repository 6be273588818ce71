//! A hold as a store needs it: units that were taken, until it is known how many of them are used.
//! It knows no permits: these are in `limiter/permit.rs`.

use std::{fmt, sync::Arc, time::Duration};

use super::Settings;
#[cfg(feature = "redis")]
use crate::algorithm::{HoldAction, HoldChange, units};
use crate::{
    algorithm::{HoldReceipt, Kind},
    keys::Key,
    observe::Observers,
};

/// The units of a key that an admitted request holds, for a store that renews them.
#[derive(Clone, Debug)]
#[cfg_attr(not(feature = "redis"), allow(dead_code))]
pub struct RenewableHold {
    /// Those at the begin of the hold; `update_settings` replaces them before each call.
    pub(crate) settings: Arc<Settings>,
    /// The observers of the limiter.
    pub(crate) observers: Observers,
    pub(crate) key: Key<'static>,
    pub(crate) units: u64,
    /// The time after which the hold expires, if no renewal arrives: the units count as used, or,
    /// in a limit on concurrency, are available again.
    pub(crate) lifetime: Duration,
    pub(crate) receipt: HoldReceipt,
    /// How long the units had been held when the answer arrived.
    pub(crate) age: Duration,
}

#[cfg(feature = "redis")]
impl RenewableHold {
    /// Takes the latest settings.
    pub(crate) fn update_settings(&mut self) {
        self.settings = self.settings.latest(self.settings.params.kind());
    }

    /// Returns the end of the hold, with `used` units.
    pub(crate) fn end(&self, used: u64) -> HoldChange {
        let action = HoldAction::End { used: units(used) };
        HoldChange { receipt: self.receipt, units: units(self.units), action }
    }
}

/// The end of a hold that its store has not kept. It borrows, and so copies no key.
#[derive(Clone, Copy, Debug)]
pub struct EndedHold<'a> {
    /// Those that the limiter has now.
    pub(crate) settings: &'a Arc<Settings>,
    /// The algorithm of the decision. Another one does not know the hold.
    pub(crate) algorithm: Kind,
    /// The observers of the limiter.
    pub(crate) observers: &'a Observers,
    pub(crate) key: &'a Key<'a>,
    pub(crate) receipt: HoldReceipt,
    /// The units of the hold.
    pub(crate) units: u64,
    /// The units of it that were used, or more.
    pub(crate) used: u64,
}

/// A hold that its store keeps: it is renewed until it ends. That of a guard that is dropped lasts
/// until it expires.
pub trait HoldGuard: fmt::Debug + Send + Sync {
    /// Ends the hold: `used` of its units were used, perhaps more than it has. It does not wait,
    /// and cannot fail: the store sends the end in the background.
    fn end(self: Box<Self>, used: u64);

    /// Returns whether the hold has expired, because no renewal arrived in time.
    fn is_expired(&self) -> bool;
}
