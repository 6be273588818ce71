//! `Bill`: what goes with a request from its pricing to its response.

use super::settle::RequestHolds;
use crate::{
    decision::{Decision, Outcome, Receipt},
    keys::Key,
    limiter::{Charge, Learning, VendorState, Waiter},
    middleware::rule::Lookup,
};

pub(super) const TAKEN: &str = "polled after completion";

/// The way of a request to the service.
pub enum Step<H> {
    Arrived,
    /// The rule looks up the charge of the head.
    Pricing(Lookup<H>),
    Waiting(Box<Waiter>),
    /// The request is admitted, but the service was not ready.
    Admitted,
}

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
    pub(super) fn may_hold(&self) -> bool {
        let is_held = |outcome: &Outcome| matches!(outcome.receipts.get(0), Receipt::Hold(..));
        !self.charge.is_exempt() || self.outcome.as_ref().is_some_and(is_held)
    }
}
