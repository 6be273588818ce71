//! One type for the limiters that a charge can have, ours and that of Redisson.

use std::pin::Pin;

#[cfg(feature = "redis")]
use crate::redisson::RateLimiter;
use crate::{
    algorithm::Action,
    decision::{Decision, Receipt},
    error::Error,
    keys::Key,
    limiter::{Limiter, MaxWait},
    quota::Quota,
    store::Answer,
};

/// A hundred years, in microseconds.
#[cfg(feature = "redis")]
const LONGEST_WAIT: f64 = 36_525.0 * 86_400e6;

/// What can be charged: a [`Limiter`], or a `redisson::RateLimiter` (feature `redis`).
#[derive(Clone, Debug)]
pub struct AnyLimiter(pub(super) Kind);

#[derive(Clone, Debug)]
pub(super) enum Kind {
    Own(Limiter),
    // In a box, as a charge is moved about with each request.
    #[cfg(feature = "redis")]
    Redisson(Box<RateLimiter>),
}

impl AnyLimiter {
    /// The name, as clients see it.
    pub(crate) fn name(&self) -> &str {
        match &self.0 {
            Kind::Own(limiter) => limiter.name(),
            #[cfg(feature = "redis")]
            Kind::Redisson(limiter) => limiter.label,
        }
    }

    /// The quota, if it is known before a decision.
    pub(crate) fn quota(&self) -> Option<Quota> {
        match &self.0 {
            Kind::Own(limiter) => Some(limiter.quota()),
            #[cfg(feature = "redis")]
            Kind::Redisson(_) => None,
        }
    }

    /// The limiter, if its store can decide about several together.
    pub(super) fn own(&self) -> Result<&Limiter, Error> {
        match &self.0 {
            Kind::Own(limiter) => Ok(limiter),
            #[cfg(feature = "redis")]
            Kind::Redisson(_) => Err(Error::DifferentStores),
        }
    }

    /// Asks it alone.
    #[inline]
    pub(crate) fn call(
        &self,
        action: Action,
        key: &Key<'_>,
        cost: u32,
        max_wait: MaxWait,
    ) -> Result<Answer<Decision>, Error> {
        match &self.0 {
            Kind::Own(limiter) => limiter.call(action, key, cost, max_wait),
            #[cfg(feature = "redis")]
            Kind::Redisson(limiter) => limiter.answer(action, key, cost),
        }
    }

    /// Returns `units` of those that a decision about the key has `spent`.
    pub(super) fn release(
        &self,
        key: &Key<'_>,
        receipt: &Receipt,
        spent: u32,
        units: u32,
    ) -> Answer<()> {
        match &self.0 {
            Kind::Own(limiter) => limiter.release(key, receipt, spent, units),
            #[cfg(feature = "redis")]
            Kind::Redisson(limiter) => limiter.release_for(key, receipt, spent, units),
        }
    }

    /// The same in the background, as far as that is possible.
    pub(super) fn release_later(&self, key: &Key<'_>, receipt: &Receipt, spent: u32, units: u32) {
        match &self.0 {
            Kind::Own(limiter) => limiter.release_later(key, receipt, spent, units),
            #[cfg(feature = "redis")]
            Kind::Redisson(limiter) => limiter.release_later_for(key, receipt, spent, units),
        }
    }

    /// Whether turns can be booked.
    pub(super) fn books(&self) -> bool {
        matches!(self.0, Kind::Own(_))
    }

    /// The wait, in microseconds: not longer than it can be.
    pub(crate) fn cut(&self, max_wait: MaxWait) -> f64 {
        match &self.0 {
            Kind::Own(limiter) => limiter.cut(max_wait),
            #[cfg(feature = "redis")]
            Kind::Redisson(_) => max_wait.cut(0.0, LONGEST_WAIT),
        }
    }

    /// Returns the default number of requests of a key that can wait.
    pub(super) fn default_max_waiting(&self) -> usize {
        match &self.0 {
            Kind::Own(limiter) => limiter.default_max_waiting(),
            #[cfg(feature = "redis")]
            Kind::Redisson(_) => crate::limiter::DEFAULT_MAX_PER_KEY,
        }
    }

    /// Runs a task in the background.
    pub(crate) fn spawn_background(&self, task: Pin<Box<dyn Future<Output = ()> + Send>>) {
        match &self.0 {
            Kind::Own(limiter) => limiter.store().spawn_background(task),
            #[cfg(feature = "redis")]
            Kind::Redisson(limiter) => limiter.spawn_background(task),
        }
    }
}

impl From<Limiter> for AnyLimiter {
    fn from(limiter: Limiter) -> Self {
        Self(Kind::Own(limiter))
    }
}

impl From<&Limiter> for AnyLimiter {
    fn from(limiter: &Limiter) -> Self {
        limiter.clone().into()
    }
}

impl From<&Self> for AnyLimiter {
    fn from(limiter: &Self) -> Self {
        limiter.clone()
    }
}

#[cfg(feature = "redis")]
impl From<RateLimiter> for AnyLimiter {
    fn from(limiter: RateLimiter) -> Self {
        Self(Kind::Redisson(Box::new(limiter)))
    }
}

#[cfg(feature = "redis")]
impl From<&RateLimiter> for AnyLimiter {
    fn from(limiter: &RateLimiter) -> Self {
        limiter.clone().into()
    }
}
