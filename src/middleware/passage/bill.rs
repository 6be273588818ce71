//! `Bill`: what goes with a request from its pricing to the call of the service.

use std::mem;

use super::settle::RequestHolds;
use crate::{
    algorithm::Action,
    decision::{Decision, Outcome, Receipt, Receipts},
    keys::Key,
    limiter::{AnyLimiter, Charge, Holds, MaxWait},
    store::StoreFuture,
};

/// What a request is charged, the decision, and what the request has taken. The drop returns what
/// it has taken: the service was not called.
#[derive(Debug)]
pub(super) struct Bill<'a> {
    /// The units of one key. A charge is made of them only if it is needed, which saves copies.
    pub(super) units: Option<(&'a AnyLimiter, Key<'static>, u64)>,
    /// Exempt if it was not made of the units.
    pub(super) charge: Charge,
    /// `None` before the decision, and if the request proceeds without one.
    pub(super) decision: Option<Decision>,
    /// The receipts of an allowed request.
    receipts: Option<Receipts>,
    /// What has been kept for a service that was not ready.
    holds: Option<Box<RequestHolds>>,
}

impl Bill<'_> {
    #[inline(always)]
    pub(super) fn exempt() -> Self {
        Self { units: None, charge: Charge::exempt(), decision: None, receipts: None, holds: None }
    }

    #[inline]
    pub(super) fn is_exempt(&self) -> bool {
        self.units.is_none() && self.charge.is_exempt()
    }

    /// Returns the charge, which is made now if it was not needed before.
    pub(super) fn charge(&mut self) -> &Charge {
        if let Some((limiter, key, cost)) = self.units.take() {
            self.charge = Charge::of_units(limiter, key, cost);
        }
        &self.charge
    }

    pub(super) fn take_charge(&mut self) -> Charge {
        self.charge();
        mem::replace(&mut self.charge, Charge::exempt())
    }

    /// Returns the first limiter.
    pub(super) fn limiter(&self) -> Option<&AnyLimiter> {
        let of_key = self.units.as_ref().map(|(limiter, ..)| *limiter);
        of_key.or_else(|| self.charge.limiters().next())
    }

    /// Resolves a wait in microseconds.
    #[inline]
    pub(super) fn resolve(&self, max_wait: MaxWait) -> u64 {
        match &self.units {
            Some((limiter, ..)) => limiter.resolve(max_wait),
            None => self.charge.resolve(max_wait),
        }
    }

    /// Asks the limiters for a decision.
    #[inline]
    pub(super) fn decide(&self, max_wait: MaxWait) -> StoreFuture<Outcome> {
        match &self.units {
            Some((limiter, key, cost)) => {
                let action = if limiter.only_holds() { Action::HOLD } else { Action::Check };
                limiter.decide(action, key, *cost, max_wait)
            }
            None => self.charge.decide(Action::Check, max_wait),
        }
    }

    /// Records what an allowed request has taken.
    #[inline]
    pub(super) fn allow(&mut self, Outcome { decision, receipts }: Outcome) {
        (self.decision, self.receipts) = (Some(decision), Some(receipts));
    }

    /// Returns a bill that can be kept while the service is not ready. What is held is renewed.
    #[inline(never)]
    pub(super) fn keep(&mut self) -> Box<Bill<'static>> {
        self.charge();
        let (holds, charge) = (self.hold(false), self.take_charge());
        let (decision, receipts) = (self.decision.take(), self.receipts.take());
        Box::new(Bill { units: None, charge, decision, receipts, holds })
    }

    /// Returns false if the request holds nothing, like most requests by key.
    #[inline]
    pub(super) fn may_hold(&self) -> bool {
        let is_held = |receipts: &Receipts| matches!(receipts.get(0), Receipt::Hold(..));
        !self.charge.is_exempt() || self.receipts.as_ref().is_some_and(is_held)
    }

    /// Takes what an allowed request holds, if anything. `shares`: the service can settle it, even
    /// if there is nothing.
    #[inline(never)]
    pub(super) fn hold(&mut self, shares: bool) -> Option<Box<RequestHolds>> {
        if self.holds.is_some() {
            return self.holds.take();
        }
        let holds = match (&self.receipts, self.units.take()) {
            (Some(receipts), Some((limiter, key, cost))) => limiter.holds(key, cost, receipts),
            (Some(receipts), None) => self.charge.holds(receipts),
            (None, _) => Holds::default(),
        };
        self.receipts.iter_mut().for_each(Receipts::remove_holds);
        (shares || !holds.is_empty()).then(|| RequestHolds::new(holds))
    }

    /// Ends the bill with the call of the service, which may do its work: the cost stays spent.
    #[inline]
    pub(super) fn end(&mut self) -> Option<Decision> {
        self.receipts = None;
        self.decision.take()
    }

    #[inline(never)]
    fn release(&mut self) {
        if let Some(mut holds) = self.holds.take() {
            holds.release();
        }
        if let Some(receipts) = self.receipts.take() {
            self.charge().release_in_background(&receipts);
        }
    }
}

impl Drop for Bill<'_> {
    #[inline]
    fn drop(&mut self) {
        // Law 12: a drop releases once.
        if self.receipts.is_some() || self.holds.is_some() {
            self.release();
        }
    }
}
