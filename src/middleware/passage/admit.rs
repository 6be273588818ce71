//! The first two stages of a request: its key and price, from its head, for the `Bill`, which goes
//! with it to its response; and admission, which calls the limiters, and determines whether the
//! request proceeds, waits or is rejected. Rules and key extractors are in `rule.rs` and
//! `extractor.rs`.

use std::{fmt, mem, sync::Arc, time::Duration};

use super::settle::RequestHolds;
use crate::{
    algorithm::Action,
    decision::{Decision, Outcome},
    keys::Key,
    limiter::{
        AnyLimiter, Charge, DEFAULT_MAX_LATENESS, FailurePolicy, IntoLimiter, Learning, MaxWait,
        VendorState, WaitQueue, WaitSlot, Waiter,
    },
    middleware::{
        extractor::{KeyExtractor, watched},
        protocol::ProtocolBase,
        rejection::{MissingKey, Rejection, RequestError},
        rule::{DynRule, Lookup, Rule},
    },
    observe::{
        Observers,
        log::{self, Throttle},
    },
    store::StoreFuture,
    time::random_fraction,
};

pub(super) const TAKEN: &str = "polled after completion";

const SHARE_WITH_RULE: &str = "`MissingKey::Share` is for layers with a key extractor; return a \
     charge for requests without a key from the rule";

type Cost<H> = Arc<dyn Fn(&H) -> u64 + Send + Sync>;
type Matcher<H> = Arc<dyn Fn(&H) -> Result<bool, RequestError> + Send + Sync>;

pub(crate) fn matcher<H, M: IntoMatch>(
    matches: impl Fn(&H) -> M + Send + Sync + 'static,
) -> Matcher<H> {
    Arc::new(move |head| matches(head).into_match())
}

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
}

/// The key extractor or rule of a layer, and its other settings for charges.
pub struct Pricing<H> {
    source: ChargeSource<H>,
    pub(crate) cost: Option<Cost<H>>,
    pub(crate) forbidden: Vec<Matcher<H>>,
    pub(crate) exempt: Vec<Matcher<H>>,
    pub(crate) missing_key: MissingKey,
}

/// The origin of charges.
enum ChargeSource<H> {
    Key(AnyLimiter, Arc<dyn KeyExtractor<H>>),
    Rule(Arc<dyn DynRule<H>>),
}

impl<H: 'static> Pricing<H> {
    pub(crate) fn by_key(limiter: impl IntoLimiter, key: impl KeyExtractor<H>) -> Self {
        Self::new(ChargeSource::Key(limiter.into_limiter(), watched(key)))
    }

    pub(crate) fn by_rule(rule: impl Rule<H>) -> Self
    where
        H: Send + Sync,
    {
        Self::new(ChargeSource::Rule(Arc::new(rule)))
    }

    fn new(source: ChargeSource<H>) -> Self {
        let missing_key = MissingKey::default();
        Self { source, cost: None, forbidden: vec![], exempt: vec![], missing_key }
    }

    /// Returns the limiter of a layer with a key extractor.
    pub(crate) fn limiter(&self) -> Option<&AnyLimiter> {
        match &self.source {
            ChargeSource::Key(limiter, _) => Some(limiter),
            ChargeSource::Rule(_) => None,
        }
    }

    /// Writes the bill of a request. Returns false if the rule has to [look up](Self::look_up) its
    /// charge.
    #[inline]
    pub(super) fn price(&self, head: &H, bill: &mut Bill) -> Result<bool, RequestError> {
        if (!self.forbidden.is_empty() || !self.exempt.is_empty()) && self.is_exempt(head)? {
            return Ok(true);
        }
        match &self.source {
            ChargeSource::Key(_, extractor) => {
                let key = match extractor.extract(head) {
                    Ok(key) => key,
                    Err(error) => match self.without_key(error)? {
                        Some(key) => key,
                        None => return Ok(true),
                    },
                };
                let cost = self.cost.as_ref().map_or(1, |cost| cost(head));
                if cost > 0 {
                    bill.units = Some((key, cost));
                }
            }
            ChargeSource::Rule(rule) => match rule.charge_now(head) {
                Some(charge) => self.price_charge(head, charge, bill)?,
                None => return Ok(false),
            },
        }
        Ok(true)
    }

    /// Looks up the charge of a request by the rule.
    pub(super) fn look_up(&self, head: H) -> Lookup<H> {
        match &self.source {
            ChargeSource::Rule(rule) => rule.clone().look_up(head),
            ChargeSource::Key(..) => unreachable!("a key is extracted at once"),
        }
    }

    /// Writes the bill of a request by the charge that the rule has returned.
    pub(super) fn price_charge(
        &self,
        head: &H,
        charge: Result<Charge, RequestError>,
        bill: &mut Bill,
    ) -> Result<(), RequestError> {
        let charge = match (charge, &self.cost) {
            (Ok(charge), Some(cost)) if !charge.is_exempt() => charge.or_cost(cost(head)),
            (Ok(charge), _) => charge,
            (Err(error), _) => return self.without_key(error).map(drop),
        };
        bill.charge = charge.without_free_limits().with_counts();
        Ok(())
    }

    /// Returns the key of a request that has none; `None` if the request is exempt.
    #[inline(never)]
    fn without_key(&self, error: RequestError) -> Result<Option<Key<'static>>, RequestError> {
        match (self.missing_key, &self.source) {
            _ if !matches!(error, RequestError::MissingKey { .. }) => Err(error),
            (MissingKey::Reject, _) => Err(error),
            (MissingKey::RejectWith(status), _) => {
                let (message, reason) = (error.to_string().into(), "missing_key");
                Err(RequestError::WithStatus { status, message, reason })
            }
            (MissingKey::Exempt, _) => Ok(None),
            (MissingKey::Share, ChargeSource::Key(..)) => Ok(Some(Key::scoped("anonymous", ""))),
            (MissingKey::Share, ChargeSource::Rule(_)) => {
                Err(RequestError::misconfigured(SHARE_WITH_RULE))
            }
        }
    }

    /// Returns whether a list exempts the request. Lists that forbid come first: then it is an
    /// error.
    #[inline(never)]
    fn is_exempt(&self, head: &H) -> Result<bool, RequestError> {
        let is_on = |list: &[Matcher<H>]| {
            let found = list.iter().map(|matches| matches(head)).find(|found| *found != Ok(false));
            found.unwrap_or(Ok(false))
        };
        if is_on(&self.forbidden)? {
            return Err(RequestError::forbidden("access is not allowed"));
        }
        is_on(&self.exempt)
    }
}

impl<H> Clone for ChargeSource<H> {
    fn clone(&self) -> Self {
        match self {
            Self::Key(limiter, key) => Self::Key(limiter.clone(), key.clone()),
            Self::Rule(rule) => Self::Rule(rule.clone()),
        }
    }
}

impl<H> Clone for Pricing<H> {
    fn clone(&self) -> Self {
        let Self { source, cost, forbidden, exempt, missing_key } = self;
        Self {
            source: source.clone(),
            cost: cost.clone(),
            forbidden: forbidden.clone(),
            exempt: exempt.clone(),
            missing_key: *missing_key,
        }
    }
}

impl<H> fmt::Debug for Pricing<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pricing").field("missing_key", &self.missing_key).finish_non_exhaustive()
    }
}

/// A type by which a closure reports that a request matches: a `bool`, or the `Result` of a list of
/// addresses, which must reject a request without an address. `false` would let each client of a
/// misconfigured service pass such a list.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not report whether a request matches",
    label = "not a `bool`",
    note = "return a `bool` or a `Result<bool, RequestError>` from the closure"
)]
pub trait IntoMatch {
    /// Converts the value into `true` if the request matches.
    ///
    /// # Errors
    ///
    /// If the request is invalid, or the service is misconfigured.
    fn into_match(self) -> Result<bool, RequestError>;
}

impl IntoMatch for bool {
    fn into_match(self) -> Result<bool, RequestError> {
        Ok(self)
    }
}

impl IntoMatch for Result<bool, RequestError> {
    fn into_match(self) -> Result<bool, RequestError> {
        self
    }
}

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
