//! Pricing: the settings of a layer that turn the head of a request into a charge. Rules and key
//! extractors are in `rule.rs` and `extractor.rs`; limiters are called in `admission.rs`.

use std::{fmt, mem, sync::Arc};

use crate::{
    decision::{Decision, Outcome, Receipts},
    keys::Key,
    limiter::{AnyLimiter, Charge, Holds, IntoLimiter, Waiter},
    middleware::{
        extractor::KeyExtractor,
        rejection::{MissingKey, RequestError},
        rule::{DynRule, Rule},
        settle::RequestHolds,
        watch::watched,
    },
};

const SHARE_WITH_RULE: &str = "`MissingKey::Share` is for layers with a key extractor; return a \
     charge for requests without a key from the rule";

type Cost<H> = Arc<dyn Fn(&H) -> u64 + Send + Sync>;
type Matcher<H> = Arc<dyn Fn(&H) -> Result<bool, RequestError> + Send + Sync>;

/// The key extractor or rule of a layer, and its other settings for charges.
pub struct Pricing<H> {
    source: ChargeSource<H>,
    cost: Option<Cost<H>>,
    forbidden: Vec<Matcher<H>>,
    exempt: Vec<Matcher<H>>,
    pub(crate) missing_key: MissingKey,
}

/// The origin of charges.
pub(crate) enum ChargeSource<H> {
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

    pub(crate) fn forbid<M: IntoMatch>(
        &mut self,
        matches: impl Fn(&H) -> M + Send + Sync + 'static,
    ) {
        self.forbidden.push(Arc::new(move |head| matches(head).into_match()));
    }

    pub(crate) fn exempt<M: IntoMatch>(
        &mut self,
        matches: impl Fn(&H) -> M + Send + Sync + 'static,
    ) {
        self.exempt.push(Arc::new(move |head| matches(head).into_match()));
    }

    /// Returns the limiter of a layer with a key extractor.
    pub(crate) fn limiter(&self) -> Option<&AnyLimiter> {
        match &self.source {
            ChargeSource::Key(limiter, _) => Some(limiter),
            ChargeSource::Rule(_) => None,
        }
    }

    pub(crate) fn set_cost(&mut self, cost: impl Fn(&H) -> u64 + Send + Sync + 'static) {
        self.cost = Some(Arc::new(cost));
    }

    #[inline]
    pub(crate) fn has_lists(&self) -> bool {
        !self.forbidden.is_empty() || !self.exempt.is_empty()
    }

    /// Returns the result for a request that is on a list. The lists of forbidden requests come
    /// first.
    pub(crate) fn listed(&self, head: &H) -> Option<Result<Charge, RequestError>> {
        let find = |list: &[Matcher<H>]| {
            list.iter().map(|matches| matches(head)).find(|it| *it != Ok(false))
        };
        let forbidden = find(&self.forbidden)
            .map(|matched| matched.and(Err(RequestError::forbidden("access is not allowed"))));
        forbidden.or_else(|| find(&self.exempt).map(|matched| matched.map(|_| Charge::exempt())))
    }

    #[inline]
    pub(crate) fn source(&self) -> &ChargeSource<H> {
        &self.source
    }

    /// Applies the settings for missing keys and for costs to the result of a key extractor or
    /// rule.
    #[inline]
    pub(crate) fn complete(
        &self,
        head: &H,
        charge: Result<Charge, RequestError>,
    ) -> Result<Charge, RequestError> {
        let charge = match charge {
            Err(error @ RequestError::MissingKey { .. }) => self.charge_without_key(error)?,
            charge => charge?,
        };
        Ok(match &self.cost {
            Some(cost) if !charge.is_exempt() => charge.or_cost(cost(head)),
            _ => charge,
        }
        .without_free_limits()
        .with_counts())
    }

    fn charge_without_key(&self, error: RequestError) -> Result<Charge, RequestError> {
        match (self.missing_key, &self.source) {
            (MissingKey::Reject, _) => Err(error),
            (MissingKey::RejectWith(status), _) => {
                let (message, reason) = (error.to_string().into(), "missing_key");
                Err(RequestError::WithStatus { status, message, reason })
            }
            (MissingKey::Exempt, _) => Ok(Charge::exempt()),
            (MissingKey::Share, ChargeSource::Key(limiter, _)) => {
                Ok(Charge::new(limiter, Key::scoped("anonymous", "")))
            }
            (MissingKey::Share, ChargeSource::Rule(_)) => {
                Err(RequestError::misconfigured(SHARE_WITH_RULE))
            }
        }
    }

    /// Returns the cost of a request by key.
    #[inline]
    pub(crate) fn cost(&self, head: &H) -> u64 {
        self.cost.as_ref().map_or(1, |cost| cost(head))
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

/// The charge of a request, and the decision about it, while the request passes through the layer.
#[derive(Debug)]
pub struct ChargeState {
    /// Also exempt if nothing needs the charge of a counted request: see
    /// [`Shared::check_by_key`](crate::middleware::admission::Shared::check_by_key).
    pub(crate) charge: Charge,
    /// `None` before the decision, and if the request proceeds without one.
    pub(crate) decision: Option<Decision>,
    /// Those of an allowed request with a charge.
    receipts: Option<Receipts>,
    /// What the request holds, from the call of the service on. Before that, a [`Waiter`] has it.
    pub(crate) holds: Option<Box<RequestHolds>>,
}

impl ChargeState {
    #[inline(always)]
    pub(crate) fn new() -> Self {
        Self { charge: Charge::exempt(), decision: None, receipts: None, holds: None }
    }

    pub(crate) fn take_charge(&mut self) -> Charge {
        mem::replace(&mut self.charge, Charge::exempt())
    }

    /// Sets the decision and the receipts of a request that was allowed.
    #[inline]
    pub(crate) fn set_outcome(&mut self, outcome: Outcome) {
        self.receipts = Some(outcome.receipts);
        self.decision = Some(outcome.decision);
    }

    /// Keeps the charge and the outcome of an allowed request.
    #[inline(never)]
    pub(crate) fn keep(&mut self, charge: Charge, outcome: Outcome) {
        self.charge = charge;
        self.set_outcome(outcome);
    }

    /// Takes over the charge and the receipts of a request that has waited.
    pub(crate) fn take_over(&mut self, mut waiter: Box<Waiter>) {
        self.holds = waiter.take_holds().map(RequestHolds::new);
        let (charge, receipts) = waiter.disarm();
        (self.charge, self.receipts) = (charge, Some(receipts));
    }

    /// Keeps what the request holds from now on, if anything. The drop of the state ends it.
    /// `shares`: the service can settle it, even if there is nothing.
    #[inline]
    pub(crate) fn begin_holds(&mut self, shares: bool) {
        // Most requests have no charge here.
        if shares || !self.charge.is_exempt() {
            self.hold(shares);
        }
    }

    #[inline(never)]
    fn hold(&mut self, shares: bool) {
        let are_kept = self.holds.is_some(); // since the service was not ready
        if are_kept || !shares && !self.charge.holds_units() {
            return;
        }
        let is_allowed = self.decision.as_ref().is_some_and(Decision::is_allowed);
        let holds = match &self.receipts {
            Some(receipts) if is_allowed && !self.charge.is_exempt() => self.charge.holds(receipts),
            _ => Holds::default(),
        };
        if shares || !holds.is_empty() {
            self.holds = Some(RequestHolds::new(holds));
        }
    }

    /// Takes the charge of an allowed request as a [`Waiter`], whose drop releases the units that
    /// were taken.
    pub(crate) fn take_waiter(&mut self) -> Option<Box<Waiter>> {
        let decision = self.decision.as_ref().filter(|it| it.is_allowed()).cloned()?;
        let receipts = self.receipts.take().unwrap_or(Receipts::NONE);
        let outcome = Outcome { decision, receipts };
        Some(Box::new(Waiter::admitted(self.take_charge(), outcome)))
    }
}

/// Calls its function when it is dropped: if the service panics while it is polled.
struct OnUnwind<F: FnMut()>(F);

impl<F: FnMut()> Drop for OnUnwind<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// Polls a service. If it panics, calls `release` before the panic goes on.
#[inline]
pub(crate) fn poll_or<T>(release: impl FnMut(), poll: impl FnOnce() -> T) -> T {
    let on_unwind = OnUnwind(release);
    let polled = poll();
    mem::forget(on_unwind);
    polled
}
