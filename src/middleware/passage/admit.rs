//! The second stage, admission: calls the limiters, and determines whether the request proceeds,
//! waits or is rejected.

use std::{sync::Arc, time::Duration};

use super::bill::Bill;
use crate::{
    decision::Outcome,
    limiter::{Charge, DEFAULT_MAX_LATENESS, FailurePolicy, MaxWait, WaitQueue, WaitSlot, Waiter},
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
pub(super) type Verdict = Result<Option<Box<Waiter>>, Rejection>;

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

    /// Admits or denies a request that is priced.
    #[inline(always)]
    pub(super) fn admit(
        &self,
        head: &P::Head,
        priced: Result<(), RequestError>,
        bill: &mut Bill<'_>,
    ) -> Verdict {
        priced.map_err(Rejection::Request)?;
        if self.protocol.holds_costs() {
            bill.charge = bill.take_charge().estimate_all()?;
        }
        if bill.is_exempt() {
            return Ok(None);
        }
        self.decide(head, self.max_wait, bill)
    }

    /// Admits or denies a request whose charge the rule has looked up.
    #[inline(never)]
    pub(super) fn admit_charge(
        &self,
        head: &P::Head,
        charge: Result<Charge, RequestError>,
        bill: &mut Bill<'_>,
    ) -> Verdict {
        self.admit(head, self.protocol.pricing().price_charge(head, charge, bill), bill)
    }

    #[inline]
    pub(super) fn decide(&self, head: &P::Head, max_wait: MaxWait, bill: &mut Bill<'_>) -> Verdict {
        if self.dry_run || bill.resolve(max_wait) == 0 {
            return self.decide_now(bill);
        }
        // After the timeout of the caller, a reservation would pass unused.
        let max_wait = P::timeout(head).map_or(max_wait, |timeout| max_wait.at_most(timeout));
        self.decide_or_wait(max_wait, bill)
    }

    /// Decides about a request that may not wait for units.
    #[inline]
    fn decide_now(&self, bill: &mut Bill<'_>) -> Verdict {
        match bill.decide(MaxWait::NONE) {
            StoreFuture::Ready(Some(Ok(outcome))) if outcome.decision.is_allowed() => {
                bill.allow(outcome);
                Ok(None)
            }
            StoreFuture::Ready(Some(Ok(outcome))) => Err(Rejection::Denied(outcome.decision)),
            answer => self.wait(Waiter::new(bill.take_charge(), answer, MaxWait::NONE), None),
        }
    }

    /// Decides about a request that waits for up to `max_wait`, if there is room for it.
    #[inline(never)]
    fn decide_or_wait(&self, max_wait: MaxWait, bill: &mut Bill<'_>) -> Verdict {
        let slot = match &bill.units {
            // Most requests of a limiter in memory need not wait. Those that have to wait take a
            // slot afterwards.
            Some((limiter, key, _))
                if limiter.is_immediate() && !(limiter.only_holds() && limiter.is_waited_for()) =>
            {
                if !self.wait_queue.has_room(limiter, key) {
                    return self.decide_now(bill);
                }
                None
            }
            _ => {
                let Some(slot) = self.wait_queue.enter(bill.charge()) else {
                    return self.decide_now(bill);
                };
                if bill.charge.is_waited_for(max_wait) {
                    let waiter = Waiter::begin(bill.take_charge(), max_wait, false);
                    return self.wait(waiter, Some(slot));
                }
                Some(slot)
            }
        };
        match bill.decide(max_wait) {
            StoreFuture::Ready(Some(Ok(outcome))) if outcome.decision.proceeds_immediately() => {
                bill.allow(outcome);
                Ok(None)
            }
            StoreFuture::Ready(Some(Ok(outcome))) if slot.is_none() => {
                self.wait_in_slot(bill, outcome, max_wait)
            }
            answer => self.wait(Waiter::new(bill.take_charge(), answer, max_wait), slot),
        }
    }

    /// Lets a request wait for its reservation, or for the end of holds or of a block, if there is
    /// a slot.
    fn wait_in_slot(&self, bill: &mut Bill<'_>, outcome: Outcome, max_wait: MaxWait) -> Verdict {
        let decision = &outcome.decision;
        // A reservation knows of a block; a hold tries again when it ends.
        let waits = decision.is_allowed()
            || decision.waits_for_holds()
            || decision.is_blocked() && bill.charge().holds_units();
        if !waits {
            return Err(Rejection::Denied(outcome.decision));
        }
        let slot = self.wait_queue.enter(bill.charge());
        if slot.is_some() {
            let answer = StoreFuture::ready(Ok(outcome));
            return self.wait(Waiter::new(bill.take_charge(), answer, max_wait), slot);
        }
        // Other requests have taken the last slots since.
        bill.charge.release_in_background(&outcome.receipts);
        self.decide_now(bill)
    }

    #[inline(never)]
    fn wait(&self, waiter: Waiter, slot: Option<WaitSlot>) -> Verdict {
        let waits_for_store = self.on_failure == FailurePolicy::Wait;
        let waiter = waiter.max_lateness(self.max_lateness).wait_for_store(waits_for_store);
        Ok(Some(Box::new(waiter.wait_slot(slot))))
    }

    /// Returns the rejection of a request, unless this is a dry run: then the request proceeds.
    pub(super) fn reject(&self, rejection: Rejection, bill: &mut Bill<'_>) -> Option<Rejection> {
        if let Rejection::Request(RequestError::Misconfigured { message: error }) = &rejection {
            log::misconfigured(&self.misconfigured, error);
        }
        if self.dry_run {
            if let Rejection::Denied(decision) = rejection {
                bill.decision = Some(decision);
            }
            return None;
        }
        self.report(&rejection, bill);
        Some(match rejection {
            Rejection::Denied(decision) if self.retry_jitter > 0.0 => {
                Rejection::Denied(decision.later(self.retry_jitter * random_fraction()))
            }
            rejection => rejection,
        })
    }

    /// Reports a rejection to the observers of the limiter and of the layer.
    fn report(&self, rejection: &Rejection, bill: &Bill<'_>) {
        let event = rejection.event();
        let limiter = bill.limiter().or(self.protocol.pricing().limiter());
        let inherited = limiter.map(|limiter| &limiter.observers().added);
        inherited.iter().for_each(|all| all.report(&event));
        let is_inherited = |observer: &_| inherited.is_some_and(|all| all.contains(observer));
        let added = self.observers.iter().filter(|observer| !is_inherited(observer));
        added.for_each(|observer| observer.on_event(&event));
    }
}
