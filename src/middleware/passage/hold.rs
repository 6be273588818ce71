//! What an admitted request takes: its holds. If the service is not called, all that the request
//! has taken returns.

use super::{
    Shared,
    price::{Bill, Price},
    settle::RequestHolds,
};
use crate::{limiter::Holds, middleware::protocol::ProtocolBase};

impl<P: ProtocolBase> Shared<P> {
    /// Keeps a bill while the service is not ready. What is held is renewed.
    #[inline(never)]
    pub(super) fn keep(&self, bill: &mut Bill) {
        self.charge(bill);
        self.hold(bill);
    }

    /// Takes what an allowed request holds, if anything.
    #[inline(never)]
    pub(super) fn hold(&self, bill: &mut Bill) {
        // In a dry run, a denied request proceeds, and is not counted.
        let allowed = bill.outcome.as_ref().filter(|outcome| outcome.decision.is_allowed());
        let holds = match (allowed, &bill.price, self.limiter()) {
            (Some(outcome), Price::Units(key, cost), Some(limiter)) => {
                let own = limiter.own();
                own.map(|own| Holds::of_one(own, key.clone(), *cost, outcome)).unwrap_or_default()
            }
            (Some(outcome), Price::Charge(charge), _) => charge.holds(outcome),
            _ => Holds::default(),
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
