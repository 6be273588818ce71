//! The limiter as the target of a charge: the path from a layer to Redisson's limiter.

use super::RateLimiter;
use crate::{
    algorithm::Action,
    decision::{Decision, Receipt},
    error::Error,
    keys::Key,
    limiter::{AnyLimiter, ChargeTarget},
    store::{BackgroundTask, Store, StoreFuture},
};

impl ChargeTarget for RateLimiter {
    fn name(&self) -> &str {
        self.label
    }

    fn decide(
        &self,
        action: Action,
        key: &Key<'_>,
        cost: u32,
    ) -> Result<StoreFuture<Decision>, Error> {
        self.answer(action, key, cost)
    }

    fn release(&self, key: &Key<'_>, receipt: &Receipt, spent: u32, units: u32) -> StoreFuture<()> {
        self.release_for(key, receipt, spent, units)
    }

    fn release_in_background(&self, key: &Key<'_>, receipt: &Receipt, spent: u32, units: u32) {
        self.release_later_for(key, receipt, spent, units);
    }

    fn refund(&self, key: &Key<'_>, units: u32) -> StoreFuture<()> {
        let (limiter, key) = (self.clone(), key.clone().into_owned());
        StoreFuture::pending(async move { limiter.refund_for(&key, units).await })
    }

    fn spawn_background(&self, task: BackgroundTask) {
        self.store.spawn_background(task);
    }
}

impl From<RateLimiter> for AnyLimiter {
    fn from(limiter: RateLimiter) -> Self {
        Self::foreign(limiter)
    }
}

impl From<&RateLimiter> for AnyLimiter {
    fn from(limiter: &RateLimiter) -> Self {
        limiter.clone().into()
    }
}
