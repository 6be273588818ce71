//! The third stage: what follows a wait for a decision, or for a reserved instant. The waiting
//! itself is in `limiter/waiter.rs`.

use super::{
    admit::{Shared, Verdict},
    bill::Bill,
};
use crate::{
    decision::{Decision, Outcome},
    error::Error,
    limiter::{Charge, Recovery, Waiter},
    middleware::{protocol::ProtocolBase, rejection::Rejection},
};

impl<P: ProtocolBase> Shared<P> {
    /// Admits or denies a request that has waited. If the store does not decide, applies the
    /// failure policy.
    #[inline(never)]
    pub(super) fn admit_after_wait(
        &self,
        head: &P::Head,
        waiter: &mut Waiter,
        decided: Result<Decision, Error>,
        bill: &mut Bill,
    ) -> Verdict {
        // What is left of the wait: the fallback must not begin it anew.
        let rest = self.max_wait.at_most(waiter.remaining_wait());
        let (charge, receipts) = waiter.disarm();
        bill.charge = charge;
        let error = match decided {
            Ok(decision) if decision.is_allowed() => {
                bill.outcome = Some(Outcome { decision, receipts });
                return Ok(None);
            }
            Ok(decision) => return Err(Rejection::Denied(decision)),
            Err(Error::Store(error)) => error,
            Err(error) => return Err(error.into()),
        };
        match bill.charge.recover(self.on_failure, &error) {
            Recovery::Uncounted(decision) => {
                bill.charge = Charge::exempt();
                bill.outcome = decision.map(Outcome::of_nothing);
                Ok(None)
            }
            Recovery::Fallback(charge) => {
                bill.charge = charge;
                self.decide(head, rest, bill)
            }
            Recovery::Fail => Err(Rejection::Store(error)),
        }
    }
}
