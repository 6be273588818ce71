//! The second stage, admission: calls the limiters, and determines whether the request proceeds,
//! waits or is rejected. A request that proceeds takes its holds. If the service is not called, all
//! that it has taken returns.

use std::mem;

use super::{
    Reason, Shared, Verdict,
    price::{Bill, Price},
    reason,
    settle::RequestHolds,
};
use crate::{
    algorithm::Action,
    decision::{Decision, Outcome},
    error::Error,
    limiter::{AnyLimiter, Charge, FailurePolicy, Holds, MaxWait, Recovery, WaitSlot, Waiter},
    middleware::{
        protocol::ProtocolBase,
        rejection::{Rejection, RequestError},
    },
    observe::log,
    store::StoreFuture,
    time::random_fraction,
};

impl<P: ProtocolBase> Shared<P> {
    /// Returns the limiter of a layer with a key extractor.
    #[inline]
    pub(super) fn limiter(&self) -> Option<&AnyLimiter> {
        self.protocol.pricing().limiter()
    }

    /// Returns the charge of a bill, which is made now if it was not needed before.
    pub(super) fn charge<'a>(&self, bill: &'a mut Bill) -> &'a mut Charge {
        bill.price = Price::Charge(self.take_charge(bill));
        let Price::Charge(charge) = &mut bill.price else { unreachable!("it is a charge") };
        charge
    }

    /// Takes the charge of a bill for a request that waits.
    fn take_charge(&self, bill: &mut Bill) -> Charge {
        match (self.limiter(), mem::replace(&mut bill.price, Price::Exempt)) {
            (Some(limiter), Price::Units(key, cost)) => Charge::of_units(limiter, key, cost),
            (_, Price::Charge(charge)) => charge,
            (..) => Charge::exempt(),
        }
    }

    /// Asks the limiters for a decision, and writes an outcome that is there at once into the bill.
    /// Returns an answer that comes later.
    #[inline]
    fn ask(&self, max_wait: MaxWait, bill: &mut Bill) -> Option<StoreFuture<Outcome>> {
        match (self.limiter(), &bill.price) {
            (Some(limiter), Price::Units(key, cost)) => {
                limiter.admit(key, *cost, max_wait, &mut bill.outcome)
            }
            _ => self.ask_all(max_wait, bill),
        }
    }

    /// Asks the limiters of a charge.
    #[inline(never)]
    fn ask_all(&self, max_wait: MaxWait, bill: &mut Bill) -> Option<StoreFuture<Outcome>> {
        let answer = self.charge(bill).decide(Action::HOLD, max_wait);
        answer.put_in(&mut bill.outcome)
    }

    /// Returns whether a request may wait.
    #[inline]
    fn may_wait(&self, max_wait: MaxWait, bill: &mut Bill) -> bool {
        let wait = match (self.limiter(), &bill.price) {
            (Some(limiter), Price::Units(..)) => limiter.resolve(max_wait),
            _ => self.charge(bill).resolve(max_wait),
        };
        wait > 0
    }

    /// Admits or denies a request that is priced.
    #[inline(always)]
    pub(super) fn admit(&self, head: &P::Head, bill: &mut Bill) -> Verdict {
        if matches!(bill.price, Price::Exempt) {
            return Ok(None);
        }
        if self.protocol.holds_costs() {
            let charge = self.take_charge(bill).estimate_all();
            bill.price = Price::Charge(charge.map_err(|error| reason(error.into()))?);
        }
        self.decide(head, self.max_wait, bill)
    }

    #[inline(always)]
    fn decide(&self, head: &P::Head, max_wait: MaxWait, bill: &mut Bill) -> Verdict {
        if self.dry_run || !self.may_wait(max_wait, bill) {
            return self.decide_at_once(bill);
        }
        // After the timeout of the caller, a reservation would pass unused.
        let timeout = P::timeout(head);
        let max_wait = timeout.map_or(max_wait, |timeout| max_wait.at_most(timeout));
        self.decide_or_wait(max_wait, bill)
    }

    /// Decides about a request that may not wait for units.
    #[inline]
    fn decide_at_once(&self, bill: &mut Bill) -> Verdict {
        match self.ask(MaxWait::NONE, bill) {
            Some(answer) => self.wait(bill, answer, MaxWait::NONE, None),
            None if bill.decision().is_some_and(Decision::is_allowed) => Ok(None),
            None => Err(None),
        }
    }

    /// Decides about a request that waits for up to `max_wait`, if there is room for it.
    #[inline(never)]
    fn decide_or_wait(&self, max_wait: MaxWait, bill: &mut Bill) -> Verdict {
        let slot = match (self.limiter(), &bill.price) {
            // Most requests of a limiter in memory need not wait. Those that have to wait take a
            // slot afterwards.
            (Some(limiter), Price::Units(key, _))
                if limiter.is_immediate()
                    && !(limiter.only_holds() && limiter.store_has_lines()) =>
            {
                if !self.wait_queue.has_room(limiter, key) {
                    return self.decide_without_room(max_wait, bill);
                }
                None
            }
            _ => {
                let charge = self.charge(bill);
                let Some(slot) = self.wait_queue.enter(charge) else {
                    return self.decide_without_room(max_wait, bill);
                };
                if charge.would_queue(max_wait) {
                    let charge = self.take_charge(bill);
                    let waiter = Waiter::begin(Action::HOLD, charge, max_wait, false);
                    return self.waits(waiter, Some(slot));
                }
                Some(slot)
            }
        };
        if let Some(answer) = self.ask(max_wait, bill) {
            return self.wait(bill, answer, max_wait, slot);
        }
        match bill.outcome.take_if(|outcome| !outcome.decision.proceeds_immediately()) {
            None => Ok(None),
            Some(outcome) => self.wait_in_slot(bill, outcome, max_wait, slot),
        }
    }

    /// Decides about a request that could wait if there were room. It overtakes none that waits.
    fn decide_without_room(&self, max_wait: MaxWait, bill: &mut Bill) -> Verdict {
        if self.charge(bill).would_queue(max_wait) {
            return self.waits(Waiter::begin_without_room(self.take_charge(bill)), None);
        }
        self.decide_at_once(bill)
    }

    /// Lets a request wait for its reservation, or for the end of holds or of a block, if there is
    /// a slot.
    fn wait_in_slot(
        &self,
        bill: &mut Bill,
        outcome: Outcome,
        max_wait: MaxWait,
        slot: Option<WaitSlot>,
    ) -> Verdict {
        let decision = &outcome.decision;
        // A reservation knows of a block; a hold tries again when it ends.
        let waits = slot.is_some()
            || decision.is_allowed()
            || decision.waits_for_holds()
            || decision.is_blocked() && self.charge(bill).holds_units();
        if !waits {
            bill.outcome = Some(outcome);
            return Err(None);
        }
        let slot = slot.or_else(|| self.wait_queue.enter(self.charge(bill)));
        if slot.is_some() {
            return self.wait(bill, StoreFuture::from(outcome), max_wait, slot);
        }
        // Other requests have taken the last slots since.
        self.charge(bill).release_in_background(&outcome.receipts);
        self.decide_without_room(max_wait, bill)
    }

    #[inline(never)]
    fn wait(
        &self,
        bill: &mut Bill,
        answer: StoreFuture<Outcome>,
        max_wait: MaxWait,
        slot: Option<WaitSlot>,
    ) -> Verdict {
        let waiter = Waiter::new(Action::HOLD, self.take_charge(bill), answer, max_wait);
        self.waits(waiter, slot)
    }

    fn waits(&self, waiter: Waiter, slot: Option<WaitSlot>) -> Verdict {
        let waits_for_store = self.on_failure == FailurePolicy::Wait;
        let waiter = waiter.max_lateness(self.max_lateness).wait_for_store(waits_for_store);
        Ok(Some(Box::new(waiter.wait_slot(slot))))
    }

    /// Admits or denies a request that has waited. If the store does not decide, applies the
    /// failure policy.
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

    /// Returns the rejection of a request; `None` in a dry run, in which it proceeds.
    pub(super) fn rejection(&self, reason: Reason, bill: &mut Bill) -> Option<Rejection> {
        if let Some(Rejection::Request(RequestError::Misconfigured { message })) = reason.as_deref()
        {
            log::misconfigured(&self.misconfigured, message);
        }
        if self.dry_run {
            return None;
        }
        let mut rejection = match reason {
            Some(reason) => *reason,
            None => Rejection::Denied(bill.outcome.take().expect("a denial").decision),
        };
        self.report(&rejection, bill);
        if let Rejection::Denied(decision) = &mut rejection
            && self.retry_jitter > 0.0
        {
            decision.delay_retry(self.retry_jitter * random_fraction());
        }
        Some(rejection)
    }

    /// Reports a rejection to the observers of the limiter and of the layer.
    fn report(&self, rejection: &Rejection, bill: &Bill) {
        let event = rejection.event();
        let limiter = bill.charge().and_then(|charge| charge.limiters().next()).or(self.limiter());
        let mut observers =
            limiter.map(|limiter| limiter.observers().added.clone()).unwrap_or_default();
        for observer in self.observers.iter() {
            observers.add(observer.clone());
        }
        observers.report(&event);
    }

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
