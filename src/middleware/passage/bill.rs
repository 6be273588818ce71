//! `Bill`: what goes with a request from its pricing to its response.

use std::mem;

use super::{admit::Shared, settle::RequestHolds};
use crate::{
    algorithm::Action,
    decision::{Decision, Outcome, Receipt},
    keys::Key,
    limiter::{AnyLimiter, Charge, Holds, Learning, MaxWait, VendorState},
    middleware::protocol::ProtocolBase,
    store::StoreFuture,
};

/// What a request is charged, the decision, and what the request has taken.
#[derive(Debug)]
pub struct Bill {
    /// The units of one key of the layer's limiter. A charge is made of them only if it is needed,
    /// which saves copies.
    pub(super) units: Option<(Key<'static>, u64)>,
    /// Exempt if it was not made of the units.
    pub(super) charge: Charge,
    /// `None` before the decision, and if the request proceeds without one.
    pub(super) outcome: Option<Outcome>,
    /// What the request holds. The drop ends it, as used.
    pub(crate) holds: Option<Box<RequestHolds>>,
}

impl Bill {
    #[inline(always)]
    pub(super) fn exempt() -> Self {
        Self { units: None, charge: Charge::exempt(), outcome: None, holds: None }
    }

    #[inline]
    pub(super) fn is_exempt(&self) -> bool {
        self.units.is_none() && self.charge.is_exempt()
    }

    /// Returns the decision, and the charge if it was made: the limiter of a layer is known without
    /// it.
    #[inline]
    pub(crate) fn counted(&self) -> Option<(&Decision, &Charge)> {
        self.outcome.as_ref().map(|outcome| (&outcome.decision, &self.charge))
    }

    /// Returns the call by which the limit adopts what a response says, if that is new.
    pub(super) fn learn(&self, vendor: VendorState) -> Option<Learning> {
        let (decision, charge) = self.counted()?;
        charge.learn(vendor, decision.remaining())
    }

    /// Returns false if the request holds nothing, like most requests by key.
    #[inline]
    fn may_hold(&self) -> bool {
        let is_held = |outcome: &Outcome| matches!(outcome.receipts.get(0), Receipt::Hold(..));
        !self.charge.is_exempt() || self.outcome.as_ref().is_some_and(is_held)
    }
}

impl<P: ProtocolBase> Shared<P> {
    /// Returns the limiter of a layer with a key extractor.
    #[inline]
    pub(super) fn limiter(&self) -> Option<&AnyLimiter> {
        self.protocol.pricing().limiter()
    }

    /// Returns the charge of a bill, which is made now if it was not needed before.
    pub(super) fn charge<'a>(&self, bill: &'a mut Bill) -> &'a mut Charge {
        if let (Some(limiter), Some((key, cost))) = (self.limiter(), bill.units.take()) {
            bill.charge = Charge::of_units(limiter, key, cost);
        }
        &mut bill.charge
    }

    /// Resolves a wait in microseconds.
    #[inline]
    pub(super) fn resolve(&self, max_wait: MaxWait, bill: &Bill) -> u64 {
        match (self.limiter(), &bill.units) {
            (Some(limiter), Some(_)) => limiter.resolve(max_wait),
            _ => bill.charge.resolve(max_wait),
        }
    }

    /// Asks the limiters for a decision. Writes an outcome that is there at once into the bill, else
    /// returns the answer.
    #[inline]
    pub(super) fn ask(&self, max_wait: MaxWait, bill: &mut Bill) -> Option<StoreFuture<Outcome>> {
        let answer = match (self.limiter(), &bill.units) {
            (Some(limiter), Some((key, cost))) => limiter.admit(key, *cost, max_wait),
            _ => bill.charge.decide(Action::Check, max_wait),
        };
        match answer {
            StoreFuture::Ready(Some(Ok(outcome))) => {
                // Not assigned, as the drop of the value before, which is none, takes another copy.
                mem::forget(bill.outcome.replace(outcome));
                None
            }
            answer => Some(answer),
        }
    }

    /// Takes what the request holds for the service, which is called now.
    #[inline]
    pub(super) fn begin(&self, bill: &mut Bill) {
        if self.protocol.shares_holds() || self.protocol.learns() || bill.may_hold() {
            self.hold(bill);
        }
    }

    /// Keeps a bill while the service is not ready. What is held is renewed.
    #[inline(never)]
    pub(super) fn keep(&self, bill: &mut Bill) {
        self.charge(bill);
        self.hold(bill);
    }

    /// Takes what an allowed request holds, if anything.
    #[inline(never)]
    fn hold(&self, bill: &mut Bill) {
        if self.protocol.learns() {
            self.charge(bill);
        }
        let holds = match (&bill.outcome, self.limiter(), bill.units.take()) {
            (Some(outcome), Some(limiter), Some((key, cost))) => {
                limiter.holds(key, cost, &outcome.receipts)
            }
            (Some(outcome), ..) => bill.charge.holds(&outcome.receipts),
            (None, ..) => Holds::default(),
        };
        bill.outcome.iter_mut().for_each(|outcome| outcome.receipts.remove_holds());
        // The service can settle even if there is nothing.
        if bill.holds.is_none() && (self.protocol.shares_holds() || !holds.is_empty()) {
            bill.holds = Some(RequestHolds::new(holds));
        }
    }

    /// Returns what a request has taken: the service was not called.
    #[inline(never)]
    pub(super) fn release(&self, bill: &mut Bill) {
        if let Some(mut holds) = bill.holds.take() {
            holds.release();
        }
        if let Some(outcome) = bill.outcome.take() {
            self.charge(bill).release_in_background(&outcome.receipts);
        }
    }
}
