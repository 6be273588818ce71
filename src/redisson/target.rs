//! The limiter as a charge and a layer reach it.

use tower_ratelimit_redisson::random;

use super::RateLimiter;
use crate::{
    algorithm::Action,
    decision::{Outcome, Receipt},
    error::{Error, RateLimiterError},
    keys::Key,
    limiter::{AnyLimiter, ForeignLimiter, IntoLimiter},
    observe::{Event, LimiterObservers},
    store::{StoreCalls, StoreFuture},
};

impl ForeignLimiter for RateLimiter {
    fn name(&self) -> &str {
        self.label
    }

    fn store(&self) -> &dyn StoreCalls {
        &self.store
    }

    fn observers(&self) -> &LimiterObservers {
        &self.observers
    }

    fn decide(&self, action: Action, key: &Key<'_>, cost: u64) -> StoreFuture<Outcome> {
        if action != Action::Check {
            let limiter = self.label.into();
            return StoreFuture::ready(Err(match action.holds() {
                true => Error::CannotHold { limiter },
                false => RateLimiterError::Unsupported { limiter }.into(),
            }));
        }
        let (limiter, deadline) = (self.for_key(key), self.store.start_deadline());
        StoreFuture::pending(async move { limiter?.attempt(deadline, cost, random()).await })
    }

    fn denial(&self, key: &Key<'_>, cost: u64) -> StoreFuture<Outcome> {
        let limiter = self.for_key(key);
        StoreFuture::pending(async move { limiter?.denial(cost).await })
    }

    fn release_in_background(&self, key: &Key<'_>, receipt: &Receipt, units: u64) {
        if let (Ok(limiter), Receipt::Id(id)) = (self.for_key(key), receipt) {
            let key = &limiter.key();
            self.observers.report(&Event::Released { limiter: self.label, key, units });
            limiter.release_later(units, units, *id);
        }
    }

    fn refund(&self, key: &Key<'_>, units: u64) -> StoreFuture<()> {
        let (limiter, deadline) = (self.for_key(key), self.store.start_deadline());
        StoreFuture::pending(async move {
            match limiter?.release_taken(deadline, units, 0, b"").await {
                // The permits were deleted together with the rate.
                Err(Error::Redisson(RateLimiterError::NoRate { .. })) => Ok(()),
                result => result,
            }
        })
    }

    fn line(&self, key: &Key<'_>) -> u64 {
        let limiter = self.for_key(key);
        let keys = limiter.as_ref().map_or(&self.keys, |limiter| &limiter.keys);
        // Another client can have permits when this one has none.
        self.store.names().lines().hash(("redisson", &keys.name, &keys.client_id))
    }
}

impl RateLimiter {
    /// Calls the first of the calls that wait for permits of this limiter.
    pub(super) fn call_line(&self) {
        self.store.names().lines().returned(self.line(&self.key()));
    }

    /// Calls the first of each line with the label of this limiter: a rate applies to all clients,
    /// and that of a template to all keys.
    pub(super) fn call_lines(&self) {
        self.store.names().lines().limiter_changed(self.label);
    }
}

impl IntoLimiter for RateLimiter {
    fn into_limiter(self) -> AnyLimiter {
        AnyLimiter::foreign(self)
    }
}

impl IntoLimiter for &RateLimiter {
    fn into_limiter(self) -> AnyLimiter {
        self.clone().into_limiter()
    }
}
