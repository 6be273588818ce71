//! The second stage, admission: calls the limiters, and determines whether the request proceeds,
//! waits or is rejected.

use std::{mem, sync::Arc, time::Duration};

use super::price::{Bill, Step, TAKEN};
use crate::{
    algorithm::Action,
    decision::Outcome,
    limiter::{
        AnyLimiter, Charge, DEFAULT_MAX_LATENESS, FailurePolicy, MaxWait, WaitQueue, WaitSlot,
        Waiter,
    },
    middleware::{
        protocol::ProtocolBase,
        rejection::{Rejection, RequestError},
    },
    observe::{
        Observers,
        log::{self, Throttle},
    },
    store::StoreFuture,
    time::random_fraction,
};

/// The state that all services of a layer share.
#[derive(Clone, Debug)]
pub(crate) struct Shared<P> {
    pub(crate) protocol: P,
    pub(crate) max_wait: MaxWait,
    pub(crate) max_lateness: Duration,
    pub(crate) wait_queue: WaitQueue,
    pub(crate) dry_run: bool,
    pub(crate) on_failure: FailurePolicy,
    /// The largest part of its retry-after by which a denial adds to it.
    pub(crate) retry_jitter: f64,
    /// The observers that were added to the layer.
    pub(crate) observers: Observers,
    misconfigured: Arc<Throttle>,
}

/// The result of admission: nothing if the request proceeds, a `Waiter` if it waits, or the reason
/// of its rejection.
pub(super) type Verdict = Result<Option<Box<Waiter>>, Reason>;

/// Why a request is rejected; `None` if it is denied: the bill has the decision. Boxed, because a
/// verdict is moved with each request.
pub(super) type Reason = Option<Box<Rejection>>;

pub(super) fn reason(rejection: Rejection) -> Reason {
    Some(Box::new(rejection))
}

impl<P: ProtocolBase> Shared<P> {
    pub(crate) fn new(protocol: P) -> Self {
        Self {
            protocol,
            max_wait: MaxWait::DEFAULT,
            max_lateness: DEFAULT_MAX_LATENESS,
            wait_queue: WaitQueue::new(),
            dry_run: false,
            on_failure: FailurePolicy::Closed,
            retry_jitter: 0.0,
            observers: Observers::default(),
            misconfigured: Arc::default(),
        }
    }

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

    /// Asks the limiters for a decision. Writes an outcome that is there at once into the bill,
    /// else returns the answer.
    #[inline]
    pub(super) fn ask(&self, max_wait: MaxWait, bill: &mut Bill) -> Option<StoreFuture<Outcome>> {
        let Bill { units, charge, outcome, .. } = bill;
        match (self.limiter(), units) {
            (Some(limiter), Some((key, cost))) => limiter.admit(key, *cost, max_wait, outcome),
            _ => charge.decide(Action::Check, max_wait).unless_ready(outcome),
        }
    }

    /// Admits or denies a request that arrives; `None` if it waits.
    #[inline(always)]
    pub(super) fn arrive(
        &self,
        head: &mut Option<P::Head>,
        step: &mut Step<P::Head>,
        bill: &mut Bill,
    ) -> Option<Result<(), Reason>> {
        let Step::Arrived = step else { return None };
        let pricing = self.protocol.pricing();
        let found = head.as_ref().expect(TAKEN);
        let verdict = match pricing.price(found, bill) {
            Ok(true) => self.admit(found, bill),
            Ok(false) => {
                let found = head.take().expect(TAKEN);
                *step = Step::Pricing(pricing.look_up(found));
                return None;
            }
            Err(error) => Err(reason(Rejection::Request(error))),
        };
        match verdict {
            Ok(None) => Some(Ok(())),
            Ok(Some(waiter)) => {
                *step = Step::Waiting(waiter);
                None
            }
            Err(reason) => Some(Err(reason)),
        }
    }

    /// Admits or denies a request that is priced.
    #[inline]
    pub(super) fn admit(&self, head: &P::Head, bill: &mut Bill) -> Verdict {
        if self.protocol.holds_costs() {
            let charge = mem::replace(self.charge(bill), Charge::exempt());
            bill.charge = charge.estimate_all().map_err(|error| reason(error.into()))?;
        }
        if bill.is_exempt() {
            return Ok(None);
        }
        self.decide(head, self.max_wait, bill)
    }

    #[inline]
    pub(super) fn decide(&self, head: &P::Head, max_wait: MaxWait, bill: &mut Bill) -> Verdict {
        if self.dry_run || self.resolve(max_wait, bill) == 0 {
            return self.decide_now(bill);
        }
        // After the timeout of the caller, a reservation would pass unused.
        let max_wait = P::timeout(head).map_or(max_wait, |timeout| max_wait.at_most(timeout));
        self.decide_or_wait(max_wait, bill)
    }

    /// Decides about a request that may not wait for units.
    #[inline]
    fn decide_now(&self, bill: &mut Bill) -> Verdict {
        if let Some(answer) = self.ask(MaxWait::NONE, bill) {
            return self.wait(bill, answer, MaxWait::NONE, None);
        }
        let outcome = bill.outcome.as_ref();
        let is_allowed = outcome.is_some_and(|outcome| outcome.decision.is_allowed());
        if is_allowed { Ok(None) } else { Err(None) }
    }

    /// Decides about a request that waits for up to `max_wait`, if there is room for it.
    #[inline(never)]
    fn decide_or_wait(&self, max_wait: MaxWait, bill: &mut Bill) -> Verdict {
        let slot = match (self.limiter(), &bill.units) {
            // Most requests of a limiter in memory need not wait. Those that have to wait take a
            // slot afterwards.
            (Some(limiter), Some((key, _)))
                if limiter.is_immediate() && !(limiter.only_holds() && limiter.is_waited_for()) =>
            {
                if !self.wait_queue.has_room(limiter, key) {
                    return self.decide_now(bill);
                }
                None
            }
            _ => {
                let Some(slot) = self.wait_queue.enter(self.charge(bill)) else {
                    return self.decide_without_room(max_wait, bill);
                };
                if bill.charge.is_waited_for(max_wait) {
                    let charge = mem::replace(&mut bill.charge, Charge::exempt());
                    return self.begin_wait(Waiter::begin(charge, max_wait, false), Some(slot));
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
        if !self.charge(bill).is_waited_for(max_wait) {
            return self.decide_now(bill);
        }
        let charge = mem::replace(&mut bill.charge, Charge::exempt());
        self.begin_wait(Waiter::begin_without_room(charge), None)
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
        bill.charge.release_in_background(&outcome.receipts);
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
        let charge = mem::replace(self.charge(bill), Charge::exempt());
        self.begin_wait(Waiter::new(charge, answer, max_wait), slot)
    }

    fn begin_wait(&self, waiter: Waiter, slot: Option<WaitSlot>) -> Verdict {
        let waits_for_store = self.on_failure == FailurePolicy::Wait;
        let waiter = waiter.max_lateness(self.max_lateness).wait_for_store(waits_for_store);
        Ok(Some(Box::new(waiter.wait_slot(slot))))
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
        let limiter = bill.charge.limiters().next().or(self.limiter());
        let inherited = limiter.map(|limiter| &limiter.observers().added);
        inherited.iter().for_each(|all| all.report(&event));
        let is_inherited = |observer: &_| inherited.is_some_and(|all| all.contains(observer));
        let added = self.observers.iter().filter(|observer| !is_inherited(observer));
        added.for_each(|observer| observer.on_event(&event));
    }
}
