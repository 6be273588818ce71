//! Admission: calls the limiter for a request, and determines whether the request proceeds, waits
//! or is rejected. Polling, and the call of the service, are in `future.rs`.

use std::{sync::Arc, time::Duration};

use crate::{
    algorithm::Action,
    decision::{Decision, Outcome},
    error::Error,
    keys::Key,
    limiter::{
        AnyLimiter, Charge, DEFAULT_MAX_LATENESS, FailurePolicy, MaxWait, Recovery, WaitQueue,
        WaitSlot, Waiter,
    },
    middleware::{
        extractor::KeyExtractor,
        pricing::{ChargeState, poll_or},
        protocol::ProtocolBase,
        rejection::{Rejection, RequestError},
        settle::RequestHolds,
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
    /// To be changed by [`change`](Self::change).
    pub(crate) protocol: P,
    pub(crate) max_wait: MaxWait,
    pub(crate) max_lateness: Duration,
    pub(crate) wait_queue: WaitQueue,
    pub(crate) dry_run: bool,
    pub(crate) on_failure: FailurePolicy,
    /// The largest part of its retry-after by which a denial adds to it.
    pub(crate) retry_jitter: f64,
    /// Those that were added to the layer.
    pub(crate) observers: Observers,
    /// Whether the protocol keeps the charge of a request after the decision.
    keeps_charge: bool,
    /// Whether it reports the decision about a request that proceeds.
    pub(crate) reports: bool,
    misconfigured: Arc<Throttle>,
}

/// A request by key that is admitted, and does not wait.
pub(crate) struct Admitted {
    pub(crate) key: Key<'static>,
    pub(crate) cost: u64,
    pub(crate) outcome: Outcome,
}

/// A request by key that is not admitted, or not yet.
pub(crate) struct Keyed {
    key: Result<Key<'static>, RequestError>,
    cost: u64,
    /// The answer, if the request has checked already.
    answer: Option<StoreFuture<Outcome>>,
}

/// The next step of a request.
pub(crate) enum Next {
    /// The request proceeds. A `Waiter`, if there is one, releases what was spent if it is
    /// dropped.
    Proceed(Option<Box<Waiter>>),
    /// The request waits for a decision, or for a reserved instant.
    Wait(Box<Waiter>),
    Reject(Rejection),
}

impl<P: ProtocolBase> Shared<P> {
    pub(crate) fn new(protocol: P) -> Self {
        Self {
            keeps_charge: protocol.keeps_charge(),
            reports: protocol.reports(),
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

    /// Changes settings.
    pub(crate) fn change(&mut self, change: impl FnOnce(&mut Self)) {
        change(self);
        self.keeps_charge = self.protocol.keeps_charge();
        self.reports = self.protocol.reports();
    }

    /// Decides about a request by key, if it is one of the most common checks. No charge is made,
    /// which saves copies: the headers do not need it, as the policy of the limiter is known.
    #[inline]
    pub(crate) fn check_by_key(
        &self,
        head: &P::Head,
        limiter: &AnyLimiter,
        extractor: &dyn KeyExtractor<P::Head>,
    ) -> Result<Admitted, Keyed> {
        let key = match extractor.extract(head) {
            Ok(key) if !self.keeps_charge => key,
            key => return Err(Keyed { key, cost: 1, answer: None }),
        };
        let cost = self.protocol.pricing().cost(head);
        let can_wait = !self.dry_run && limiter.resolve(self.max_wait) > 0;
        if cost == 0 || can_wait || limiter.only_holds() {
            return Err(Keyed { key: Ok(key), cost, answer: None });
        }
        match limiter.decide(Action::Check, &key, cost, MaxWait::NONE) {
            StoreFuture::Ready(Some(Ok(outcome))) if outcome.decision.is_allowed() => {
                Ok(Admitted { key, cost, outcome })
            }
            answer => Err(Keyed { key: Ok(key), cost, answer: Some(answer) }),
        }
    }

    /// Decides about a request that [`check_by_key`](Self::check_by_key) has not admitted.
    #[inline(never)]
    pub(crate) fn admit_by_key(
        &self,
        head: &P::Head,
        limiter: &AnyLimiter,
        keyed: Keyed,
        state: &mut ChargeState,
        is_ready: impl FnOnce() -> bool,
    ) -> Next {
        let Keyed { key, cost, answer } = keyed;
        let key = match key {
            Ok(key) if !self.keeps_charge => key,
            extracted => {
                let charge = extracted.map(|key| Charge::new(limiter, key));
                return self.admit(head, self.protocol.pricing().complete(head, charge), state);
            }
        };
        if cost == 0 {
            return Next::Proceed(None);
        }
        match answer {
            // Without a charge, too: nothing has to be returned.
            Some(StoreFuture::Ready(Some(Ok(Outcome { decision, .. })))) => {
                return self.reject(Rejection::Denied(decision), state);
            }
            Some(answer) => {
                state.charge = Charge::of_units(limiter, key, cost);
                return self.evaluate(answer, MaxWait::NONE, None, state);
            }
            None => {}
        }
        let can_wait = !self.dry_run && limiter.resolve(self.max_wait) > 0;
        if can_wait && !limiter.is_immediate() {
            return self.admit(head, Ok(Charge::of_units(limiter, key, cost)), state);
        }
        let max_wait = match can_wait && self.wait_queue.has_room(limiter, &key) {
            true => self.bounded_wait(head, self.max_wait),
            false => MaxWait::NONE,
        };
        if limiter.only_holds() {
            if can_wait && limiter.is_waited_for() {
                return self.admit(head, Ok(Charge::of_units(limiter, key, cost)), state);
            }
            return self.hold_by_key(limiter, key, cost, max_wait, state, is_ready);
        }
        match limiter.decide(Action::Check, &key, cost, max_wait) {
            StoreFuture::Ready(Some(Ok(outcome))) if outcome.decision.proceeds_immediately() => {
                Self::proceed(limiter, key, cost, outcome, state, is_ready)
            }
            answer => {
                state.charge = Charge::of_units(limiter, key, cost);
                self.evaluate_wait(answer, max_wait, state)
            }
        }
    }

    /// Lets a request by key proceed. Makes a charge only if the service is not ready.
    fn proceed(
        limiter: &AnyLimiter,
        key: Key<'static>,
        cost: u64,
        outcome: Outcome,
        state: &mut ChargeState,
        is_ready: impl FnOnce() -> bool,
    ) -> Next {
        let charge = |key| Charge::of_units(limiter, key, cost);
        let release = || charge(key.clone()).release_in_background(&outcome.receipts);
        let is_ready = poll_or(release, is_ready);
        state.set_outcome(outcome);
        if !is_ready {
            state.charge = charge(key);
        }
        Next::Proceed(None)
    }

    /// Holds the units of a request by key that need not wait behind others. Like
    /// [`proceed`](Self::proceed), it makes a charge only if the service is not ready, or if the
    /// request does not proceed now.
    fn hold_by_key(
        &self,
        limiter: &AnyLimiter,
        key: Key<'static>,
        cost: u64,
        max_wait: MaxWait,
        state: &mut ChargeState,
        is_ready: impl FnOnce() -> bool,
    ) -> Next {
        let charge = |key| Charge::of_units(limiter, key, cost);
        let can_wait = limiter.resolve(max_wait) > 0;
        let outcome = match limiter.hold(&key, cost, can_wait) {
            StoreFuture::Ready(Some(Ok(outcome))) if outcome.decision.is_allowed() => outcome,
            answer => {
                state.charge = charge(key);
                return match can_wait {
                    true => self.evaluate_wait(answer, max_wait, state),
                    false => self.evaluate(answer, max_wait, None, state),
                };
            }
        };
        let release = || charge(key.clone()).release_in_background(&outcome.receipts);
        if poll_or(release, is_ready) {
            let holds = limiter.holds(key, cost, &outcome.receipts);
            state.holds = Some(RequestHolds::new(holds));
            state.decision = Some(outcome.decision);
        } else {
            state.set_outcome(outcome);
            state.charge = charge(key);
        }
        Next::Proceed(None)
    }

    /// Evaluates an immediate answer about one limit. A request that waits, for its reservation or
    /// for the end of holds or of a block, takes a slot.
    fn evaluate_wait(
        &self,
        answer: StoreFuture<Outcome>,
        max_wait: MaxWait,
        state: &mut ChargeState,
    ) -> Next {
        // A reservation knows of a block; a hold tries again when it ends.
        let holds = state.charge.holds_units();
        let waits = |Outcome { decision, .. }: &Outcome| {
            decision.is_allowed() || decision.waits_for_holds() || (holds && decision.is_blocked())
        };
        if !answer.now().is_some_and(waits) {
            return self.evaluate(answer, max_wait, None, state);
        }
        if let Some(slot) = self.wait_queue.enter(&state.charge) {
            let charge = state.take_charge();
            return Next::Wait(self.waiter(charge, answer, max_wait, Some(slot)));
        }
        // Other requests have taken the last slots since: the drop releases the reservation.
        drop(self.waiter(state.charge.clone(), answer, max_wait, None));
        let answer = state.charge.decide(Action::Check, MaxWait::NONE);
        self.evaluate(answer, MaxWait::NONE, None, state)
    }

    /// Decides about a request with a charge. Leaves the charge in `state`, unless a [`Waiter`]
    /// takes it, and the decision if the request proceeds.
    #[inline]
    pub(crate) fn admit(
        &self,
        head: &P::Head,
        charge: Result<Charge, RequestError>,
        state: &mut ChargeState,
    ) -> Next {
        match charge {
            Ok(charge) if self.protocol.holds_costs() => match charge.estimate_all() {
                Ok(charge) => state.charge = charge,
                Err(error) => return self.reject(error.into(), state),
            },
            Ok(charge) => state.charge = charge,
            Err(error) => return self.reject(Rejection::Request(error), state),
        }
        let charge = &state.charge;
        if charge.is_exempt() {
            return Next::Proceed(None);
        }
        let (max_wait, slot) = self.wait_budget(head, charge, self.max_wait);
        if slot.is_some() && charge.is_queued() {
            let waiter = Waiter::begin(state.take_charge(), max_wait);
            return Next::Wait(Box::new(self.prepare(waiter, slot)));
        }
        self.evaluate(charge.decide(Action::Check, max_wait), max_wait, slot, state)
    }

    fn evaluate(
        &self,
        answer: StoreFuture<Outcome>,
        max_wait: MaxWait,
        slot: Option<WaitSlot>,
        state: &mut ChargeState,
    ) -> Next {
        match answer {
            StoreFuture::Ready(Some(Ok(outcome))) if outcome.decision.proceeds_immediately() => {
                state.set_outcome(outcome);
                Next::Proceed(None)
            }
            // With a slot, the request may retry: a `Waiter` decides that.
            StoreFuture::Ready(Some(Ok(Outcome { decision, .. })))
                if !decision.is_allowed() && slot.is_none() =>
            {
                self.reject(Rejection::Denied(decision), state)
            }
            answer => Next::Wait(self.waiter(state.take_charge(), answer, max_wait, slot)),
        }
    }

    /// Determines the next step after a wait.
    pub(crate) fn after_wait(
        &self,
        head: &P::Head,
        waiter: Box<Waiter>,
        result: Result<Decision, Error>,
        state: &mut ChargeState,
    ) -> Next {
        match result {
            Ok(decision) if decision.is_allowed() => {
                state.decision = Some(decision);
                Next::Proceed(Some(waiter))
            }
            Ok(decision) => {
                state.take_over(waiter);
                self.reject(Rejection::Denied(decision), state)
            }
            Err(error) => {
                // What is left: the fallback must not begin the wait anew.
                let budget = waiter.remaining_wait();
                state.take_over(waiter);
                self.apply_failure_policy(head, error, budget, state)
            }
        }
    }

    /// Applies the failure policy to a request without a decision, whose charge is in `state` and
    /// which can still wait for `budget`. The charge is taken out of `state` if the
    /// request proceeds uncounted, or is charged to the local fallback.
    fn apply_failure_policy(
        &self,
        head: &P::Head,
        error: Error,
        budget: Duration,
        state: &mut ChargeState,
    ) -> Next {
        let Error::Store(error) = error else { return self.reject(error.into(), state) };
        let fallback = match state.charge.recover(self.on_failure, &error) {
            Recovery::Uncounted(decision) => {
                drop(state.take_charge());
                state.decision = decision;
                return Next::Proceed(None);
            }
            Recovery::Fallback(fallback) => fallback,
            Recovery::Fail => return self.reject(Rejection::Store(error), state),
        };
        let (max_wait, slot) = self.wait_budget(head, &fallback, self.max_wait.at_most(budget));
        let answer = fallback.decide(Action::Check, max_wait);
        drop(state.take_charge());
        Next::Wait(self.waiter(fallback, answer, max_wait, slot))
    }

    /// Rejects the request, unless this is a dry run.
    fn reject(&self, rejection: Rejection, state: &mut ChargeState) -> Next {
        if let Rejection::Request(RequestError::Misconfigured { message: error }) = &rejection {
            log::misconfigured(&self.misconfigured, error);
        }
        if !self.dry_run {
            self.report(&rejection, &state.charge);
            return Next::Reject(match rejection {
                Rejection::Denied(decision) if self.retry_jitter > 0.0 => {
                    Rejection::Denied(decision.later(self.retry_jitter * random_fraction()))
                }
                rejection => rejection,
            });
        }
        if let Rejection::Denied(decision) = rejection {
            state.decision = Some(decision);
        }
        Next::Proceed(None)
    }

    /// Reports a rejection to the observers of the limiter and of the layer.
    fn report(&self, rejection: &Rejection, charge: &Charge) {
        let event = rejection.event();
        let limiter = charge.limiters().next().or(self.protocol.pricing().limiter());
        let inherited = limiter.map(|limiter| &limiter.observers().added);
        inherited.iter().for_each(|all| all.report(&event));
        let is_inherited = |observer: &_| inherited.is_some_and(|all| all.contains(observer));
        let added = self.observers.iter().filter(|observer| !is_inherited(observer));
        added.for_each(|observer| observer.on_event(&event));
    }

    fn waiter(
        &self,
        charge: Charge,
        answer: StoreFuture<Outcome>,
        max_wait: MaxWait,
        slot: Option<WaitSlot>,
    ) -> Box<Waiter> {
        Box::new(self.prepare(Waiter::new(charge, answer, max_wait), slot))
    }

    fn prepare(&self, waiter: Waiter, slot: Option<WaitSlot>) -> Waiter {
        let waits_for_store = self.on_failure == FailurePolicy::Wait;
        waiter.max_lateness(self.max_lateness).wait_for_store(waits_for_store).wait_slot(slot)
    }

    /// Returns how long the request can wait, and its slot in the wait queue.
    fn wait_budget(
        &self,
        head: &P::Head,
        charge: &Charge,
        max_wait: MaxWait,
    ) -> (MaxWait, Option<WaitSlot>) {
        if self.dry_run || charge.resolve(max_wait) == 0 {
            return (MaxWait::NONE, None);
        }
        let Some(slot) = self.wait_queue.enter(charge) else { return (MaxWait::NONE, None) };
        (self.bounded_wait(head, max_wait), Some(slot))
    }

    /// Bounds the wait by the timeout of the caller, after which a reservation would pass unused.
    fn bounded_wait(&self, head: &P::Head, max_wait: MaxWait) -> MaxWait {
        P::timeout(head).map_or(max_wait, |timeout| max_wait.at_most(timeout))
    }
}
