//! What goes through the stages with a request: a `Bill` until the service is called, then the
//! `ChargeState`.

use std::mem;

use super::settle::RequestHolds;
use crate::{
    algorithm::Action,
    decision::{Decision, Outcome, Receipt, Receipts},
    error::Error,
    keys::Key,
    limiter::{AnyLimiter, Charge, Holds, Learning, MaxWait, VendorState, Waiter},
    store::StoreFuture,
};

/// What a request is charged, the decision, and what the request has taken. The drop returns that:
/// the service was not called.
#[derive(Debug)]
pub(super) struct Bill<'a> {
    /// The units of one key. A charge is made of them only if it is needed, which saves copies.
    units: Option<(&'a AnyLimiter, Key<'static>, u64)>,
    charge: Charge,
    /// `None` before the decision, and if the request proceeds without one.
    pub(super) decision: Option<Decision>,
    /// Of an allowed request.
    receipts: Option<Receipts>,
    /// What has been kept for a service that was not ready, or for its call.
    holds: Option<Box<RequestHolds>>,
}

impl<'a> Bill<'a> {
    #[inline(always)]
    pub(super) fn exempt() -> Self {
        Self { units: None, charge: Charge::exempt(), decision: None, receipts: None, holds: None }
    }

    /// A request with a cost of 0 stays exempt.
    #[inline]
    pub(super) fn charge_key(&mut self, limiter: &'a AnyLimiter, key: Key<'static>, cost: u64) {
        if cost > 0 {
            self.units = Some((limiter, key, cost));
        }
    }

    pub(super) fn set_charge(&mut self, charge: Charge) {
        self.charge = charge;
    }

    #[inline]
    pub(super) fn is_exempt(&self) -> bool {
        self.units.is_none() && self.charge.is_exempt()
    }

    /// Returns the limiter and the key of a request that is charged by its key.
    #[inline]
    pub(super) fn units(&self) -> Option<(&'a AnyLimiter, &Key<'static>)> {
        self.units.as_ref().map(|(limiter, key, _)| (*limiter, key))
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

    /// Returns the charge if it was made; otherwise an exempt one.
    pub(super) fn made_charge(&self) -> &Charge {
        &self.charge
    }

    /// Makes all costs estimates, which are held.
    #[inline(never)]
    pub(super) fn estimate_all(&mut self) -> Result<(), Error> {
        self.charge = self.take_charge().estimate_all()?;
        Ok(())
    }

    /// Returns the first limiter.
    pub(super) fn limiter(&self) -> Option<&AnyLimiter> {
        self.units().map(|(limiter, _)| limiter).or_else(|| self.charge.limiters().next())
    }

    /// Resolves a wait in microseconds.
    #[inline]
    pub(super) fn resolve(&self, max_wait: MaxWait) -> f64 {
        match self.units() {
            Some((limiter, _)) => limiter.resolve(max_wait),
            None => self.charge.resolve(max_wait),
        }
    }

    pub(super) fn holds_units(&self) -> bool {
        match self.units() {
            Some((limiter, _)) => limiter.only_holds(),
            None => self.charge.holds_units(),
        }
    }

    /// Asks the limiters for a decision.
    #[inline]
    pub(super) fn decide(&self, max_wait: MaxWait) -> StoreFuture<Outcome> {
        match &self.units {
            Some((limiter, key, cost)) if limiter.only_holds() => {
                limiter.hold(key, *cost, limiter.resolve(max_wait) > 0.0)
            }
            Some((limiter, key, cost)) => limiter.decide(Action::Check, key, *cost, max_wait),
            None => self.charge.decide(Action::Check, max_wait),
        }
    }

    /// Records what an allowed request has taken.
    #[inline]
    pub(super) fn allow(&mut self, Outcome { decision, receipts }: Outcome) {
        (self.decision, self.receipts) = (Some(decision), Some(receipts));
    }

    /// Takes the charge and the receipts of an allowed or denied request that has waited.
    pub(super) fn take_over(&mut self, mut waiter: Box<Waiter>) -> Receipts {
        let (charge, receipts) = waiter.disarm();
        self.charge = charge;
        receipts
    }

    /// Returns a bill that can be kept while the service is not ready. What is held is renewed.
    #[inline(never)]
    pub(super) fn keep(mut self) -> Box<Bill<'static>> {
        self.charge();
        self.hold(false);
        Box::new(Bill {
            units: None,
            charge: self.take_charge(),
            decision: self.decision.take(),
            receipts: self.receipts.take(),
            holds: self.holds.take(),
        })
    }

    /// Keeps what an allowed request holds, if anything. `shares`: the service can settle it, even
    /// if there is nothing.
    #[inline(never)]
    fn hold(&mut self, shares: bool) {
        if self.holds.is_some() {
            return;
        }
        let holds = match (&mut self.receipts, self.units.take()) {
            (Some(receipts), Some((limiter, key, cost))) => limiter.holds(key, cost, receipts),
            (Some(receipts), None) => self.charge.holds(receipts),
            (None, _) => Holds::default(),
        };
        if let Some(receipts) = &mut self.receipts {
            receipts.remove_holds();
        }
        if shares || !holds.is_empty() {
            self.holds = Some(RequestHolds::new(holds));
        }
    }

    /// Passes on what the response needs. From here on the cost stays spent: the service may do
    /// its work. `reports`: the decision is needed. `learns`: so is the charge.
    #[inline]
    pub(super) fn begin(
        &mut self,
        state: &mut ChargeState,
        reports: bool,
        learns: bool,
        shares: bool,
    ) {
        if learns {
            self.charge();
        }
        let may_hold = match &self.receipts {
            // Most requests hold nothing.
            Some(receipts) if self.units.is_some() => {
                matches!(receipts.get(0), Receipt::Hold(..))
            }
            _ => !self.charge.is_exempt(),
        };
        if shares || may_hold {
            self.hold(shares);
        }
        self.receipts = None;
        let charge = mem::replace(&mut self.charge, Charge::exempt());
        let counted = self.decision.take().filter(|_| reports || learns);
        *state = match (self.holds.take(), counted) {
            (Some(holds), counted) => {
                ChargeState::Held { holds, counted: counted.map(|decision| (decision, charge)) }
            }
            (None, Some(decision)) => ChargeState::Counted(decision, charge),
            (None, None) => ChargeState::Exempt,
        };
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

/// What the response to a request needs, from the call of the service on.
#[derive(Debug)]
pub enum ChargeState {
    /// Nothing: the request is exempt or proceeds without a decision, or nothing reports it.
    Exempt,
    /// The decision, and the charge if it was made: the limiter of a layer is known without it.
    Counted(Decision, Charge),
    /// The same, and what the request holds. The drop ends that, as used.
    Held {
        /// `None` if the request is not counted, but its service has a handle.
        counted: Option<(Decision, Charge)>,
        holds: Box<RequestHolds>,
    },
}

impl ChargeState {
    /// Returns the decision, and the charge if it was made.
    #[inline]
    pub(crate) fn counted(&self) -> Option<(&Decision, &Charge)> {
        match self {
            Self::Counted(decision, charge) => Some((decision, charge)),
            Self::Held { counted, .. } => {
                counted.as_ref().map(|(decision, charge)| (decision, charge))
            }
            Self::Exempt => None,
        }
    }

    #[inline]
    pub(crate) fn holds(&mut self) -> Option<&mut RequestHolds> {
        match self {
            Self::Held { holds, .. } => Some(holds),
            Self::Exempt | Self::Counted(..) => None,
        }
    }

    /// Takes what the request holds, and forgets the rest.
    pub(crate) fn take_holds(&mut self) -> Option<Box<RequestHolds>> {
        match mem::replace(self, Self::Exempt) {
            Self::Held { holds, .. } => Some(holds),
            Self::Exempt | Self::Counted(..) => None,
        }
    }

    /// Returns the call by which the limit adopts what a response says, if that is new.
    pub(super) fn learn(&self, vendor: VendorState) -> Option<Learning> {
        let (decision, charge) = self.counted()?;
        charge.learn(vendor, decision.remaining())
    }
}
