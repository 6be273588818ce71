//! The targets of a charge: limiters of this crate, and limiters in a foreign format, which the
//! rest of the crate reaches through [`ChargeTarget`] alone. It knows no charges.

use std::{fmt, mem, sync::Arc};

use super::{
    handle::{DEFAULT_MAX_PER_KEY, Limiter},
    max_wait::MaxWait,
};
use crate::{
    algorithm::Action,
    decision::{Outcome, Receipt},
    error::Error,
    keys::Key,
    observe::LimiterObservers,
    quota::Quota,
    store::{BackgroundTask, Lines, Offer, Released, StoreFuture},
};

/// A hundred years, in microseconds.
const LONGEST_WAIT: u64 = 36_525 * 86_400 * 1_000_000;

/// A limiter in a foreign format. It reserves no instants, and shares no charge with other
/// limiters.
pub trait ChargeTarget: fmt::Debug + Send + Sync {
    /// Returns the name, as clients see it.
    fn name(&self) -> &str;

    fn decide(&self, action: Action, key: &Key<'_>, cost: u64) -> StoreFuture<Outcome>;

    /// Returns the denial of a request that others have kept from a check.
    fn denial(&self, key: &Key<'_>, cost: u64) -> StoreFuture<Outcome>;

    /// Returns units that a request of the key has spent, in the background, if possible.
    fn release_in_background(&self, key: &Key<'_>, receipt: &Receipt, units: u64);

    /// Returns units of the key, of whatever request.
    fn refund(&self, key: &Key<'_>, units: u64) -> StoreFuture<()>;

    fn spawn_background(&self, task: BackgroundTask);

    fn observers(&self) -> &LimiterObservers;

    /// Returns the lines of requests that wait, and the line of the key.
    fn line(&self, key: &Key<'_>) -> (Arc<Lines>, u64);
}

/// A limiter that can be charged: a [`Limiter`], or a `redisson::RateLimiter` (feature `redisson`).
#[derive(Clone, Debug)]
pub struct AnyLimiter(Kind);

#[derive(Clone, Debug)]
enum Kind {
    Own(Limiter),
    Foreign(Arc<dyn ChargeTarget>),
}

impl AnyLimiter {
    #[doc(hidden)]
    pub fn foreign(target: impl ChargeTarget + 'static) -> Self {
        Self(Kind::Foreign(Arc::new(target)))
    }

    /// Returns the name, as clients see it.
    pub(crate) fn name(&self) -> &str {
        match &self.0 {
            Kind::Own(limiter) => limiter.name(),
            Kind::Foreign(target) => target.name(),
        }
    }

    pub(crate) fn observers(&self) -> &LimiterObservers {
        match &self.0 {
            Kind::Own(limiter) => limiter.observers(),
            Kind::Foreign(target) => target.observers(),
        }
    }

    /// Returns the quota, if it is known before a decision.
    pub(crate) fn quota(&self) -> Option<Quota> {
        self.own().ok().map(Limiter::quota)
    }

    /// Returns the limiter, if its store can decide about several limiters together.
    pub(super) fn own(&self) -> Result<&Limiter, Error> {
        match &self.0 {
            Kind::Own(limiter) => Ok(limiter),
            Kind::Foreign(_) => Err(Error::DifferentStores),
        }
    }

    pub(super) fn as_foreign(&self) -> Option<&dyn ChargeTarget> {
        match &self.0 {
            Kind::Own(_) => None,
            Kind::Foreign(target) => Some(&**target),
        }
    }

    /// Decides about a key.
    #[inline]
    pub(crate) fn decide(
        &self,
        action: Action,
        key: &Key<'_>,
        cost: u64,
        max_wait: MaxWait,
    ) -> StoreFuture<Outcome> {
        match &self.0 {
            Kind::Own(limiter) => limiter.decide(action, key, cost, max_wait),
            Kind::Foreign(target) if action.holds() => {
                let limiter = target.name().to_owned().into();
                StoreFuture::ready(Err(Error::CannotHold { limiter }))
            }
            Kind::Foreign(target) => target.decide(action, key, cost),
        }
    }

    /// Decides about a request, whose units are held if the limiter only holds units, else spent.
    // One copy: the future of each layer would have its own.
    #[inline(never)]
    pub(crate) fn admit(
        &self,
        key: &Key<'_>,
        cost: u64,
        max_wait: MaxWait,
        outcome: &mut Option<Outcome>,
    ) -> Option<StoreFuture<Outcome>> {
        match &self.0 {
            // With a constant action, most of a decision is left out.
            Kind::Own(limiter) if !limiter.only_holds() => {
                let done = |decided| {
                    // Not assigned: the drop of the value before, which is none, takes a copy.
                    mem::forget(outcome.replace(decided));
                    None
                };
                let later = limiter.decide_then(Action::Check, key, cost, max_wait, done, Some);
                later?.unless_ready(outcome)
            }
            _ => {
                let action = if self.only_holds() { Action::HOLD } else { Action::Check };
                self.decide(action, key, cost, max_wait).unless_ready(outcome)
            }
        }
    }

    /// Returns units that a request of the key has spent, reserved or held, in the background, if
    /// possible, unless other requests take an offer before.
    pub(super) fn release_in_background(
        &self,
        key: &Key<'_>,
        receipt: &Receipt,
        units: u64,
        offer: Option<&Arc<Offer>>,
    ) -> Option<Released> {
        match &self.0 {
            Kind::Own(limiter) => limiter.release_in_background(key, receipt, units, offer),
            Kind::Foreign(target) => {
                target.release_in_background(key, receipt, units);
                None
            }
        }
    }

    /// Returns whether a request of this process may wait to check again, for whatever key.
    #[inline]
    pub(crate) fn is_waited_for(&self) -> bool {
        self.own().map_or(true, |limiter| !limiter.lines().is_empty())
    }

    /// Returns whether each answer is there at once.
    #[inline]
    pub(crate) fn is_immediate(&self) -> bool {
        matches!(&self.0, Kind::Own(limiter) if limiter.store().is_immediate())
    }

    /// Returns whether units can be held.
    pub(super) fn can_hold(&self) -> bool {
        matches!(&self.0, Kind::Own(limiter) if limiter.params().can_hold())
    }

    /// Returns whether units are only held.
    #[inline]
    pub(crate) fn only_holds(&self) -> bool {
        matches!(&self.0, Kind::Own(limiter) if limiter.only_holds())
    }

    /// Resolves a wait in microseconds: at most the longest that is possible.
    #[inline]
    pub(crate) fn resolve(&self, max_wait: MaxWait) -> u64 {
        match &self.0 {
            Kind::Own(limiter) => limiter.resolve(max_wait),
            Kind::Foreign(_) => max_wait.resolve(0, LONGEST_WAIT),
        }
    }

    /// Returns the default number of requests of a key that can wait.
    pub(super) fn default_max_waiting(&self) -> usize {
        self.own().map_or(DEFAULT_MAX_PER_KEY, Limiter::default_max_waiting)
    }

    pub(crate) fn spawn_background(&self, task: BackgroundTask) {
        match &self.0 {
            Kind::Own(limiter) => limiter.store().as_dyn().spawn_background(task),
            Kind::Foreign(target) => target.spawn_background(task),
        }
    }
}

/// A limiter as an argument. The trait is not exported, which seals it; it is one of its own
/// because the compiler would explain a missing `Into<AnyLimiter>` by a name that users cannot use.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a limiter",
    label = "not a limiter",
    note = "pass a `Limiter` or a `&Limiter`, made by `Limiter::new(name, store, algorithm, \
            quota)`; with the feature `redisson`, also a `redisson::RateLimiter`"
)]
pub trait IntoLimiter {
    fn into_limiter(self) -> AnyLimiter;
}

impl IntoLimiter for Limiter {
    fn into_limiter(self) -> AnyLimiter {
        AnyLimiter(Kind::Own(self))
    }
}

impl IntoLimiter for &Limiter {
    fn into_limiter(self) -> AnyLimiter {
        self.clone().into_limiter()
    }
}

#[diagnostic::do_not_recommend]
impl IntoLimiter for &AnyLimiter {
    fn into_limiter(self) -> AnyLimiter {
        self.clone()
    }
}
