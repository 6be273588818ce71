//! The third stage: the waits of a request, for the lookup of its charge, for a decision, or for a
//! reserved instant, and what follows them. The waiting itself is in `limiter/waiter.rs`.

use std::task::{Context, Poll, ready};

use super::{
    admit::{Reason, Shared, Verdict, reason},
    price::{Bill, Price, Step},
};
use crate::{
    decision::{Decision, Outcome},
    error::Error,
    limiter::{Recovery, Waiter},
    middleware::{protocol::ProtocolBase, rejection::Rejection},
    sync::POLLED,
};

impl<P: ProtocolBase> Shared<P> {
    /// Goes on with a request that has not been admitted or denied when it arrived.
    #[inline(never)]
    pub(super) fn go_on(
        &self,
        cx: &mut Context<'_>,
        head: &mut Option<P::Head>,
        step: &mut Step<P::Head>,
        bill: &mut Bill,
    ) -> Poll<Result<(), Reason>> {
        loop {
            let verdict = match step {
                Step::Arrived | Step::Admitted => Ok(None),
                Step::Pricing(lookup) => {
                    let (found, charge) = ready!(lookup.as_mut().poll(cx));
                    let found = head.insert(found);
                    match self.protocol.pricing().price_charge(found, charge, bill) {
                        Ok(()) => self.admit(found, bill),
                        Err(error) => Err(reason(Rejection::Request(error))),
                    }
                }
                Step::Waiting(waiter) => {
                    let decided = ready!(waiter.poll(cx));
                    self.admit_after_wait(head.as_ref().expect(POLLED), waiter, decided, bill)
                }
            };
            match verdict {
                Ok(Some(waiter)) => *step = Step::Waiting(waiter),
                Ok(None) => return Poll::Ready(Ok(())),
                Err(reason) => return Poll::Ready(Err(reason)),
            }
        }
    }

    /// Admits or denies a request that has waited. If the store does not decide, applies the
    /// failure policy.
    fn admit_after_wait(
        &self,
        head: &P::Head,
        waiter: &mut Waiter,
        decided: Result<Decision, Error>,
        bill: &mut Bill,
    ) -> Verdict {
        // What is left of the wait: the fallback must not begin it anew.
        let rest = self.max_wait.at_most(waiter.remaining_wait());
        let (charge, receipts) = waiter.disarm();
        bill.price = Price::Charge(charge);
        let error = match decided {
            Ok(decision) => {
                let is_allowed = decision.is_allowed();
                bill.outcome = Some(Outcome { decision, receipts });
                return if is_allowed { Ok(None) } else { Err(None) };
            }
            Err(error) => error,
        };
        match self.charge(bill).recover(self.on_failure, error) {
            Ok(Recovery::Uncounted(decision)) => {
                bill.price = Price::Exempt;
                bill.outcome = decision.map(Outcome::of_nothing);
                Ok(None)
            }
            Ok(Recovery::Fallback(charge)) => {
                bill.price = Price::Charge(charge);
                self.decide(head, rest, bill)
            }
            Err(error) => Err(reason(error.into())),
        }
    }
}
