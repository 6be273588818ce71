//! The first stage: the key and the price of a request, from its head, for the `Bill`, which goes
//! with it to its response. Rules and key extractors are in `rule.rs` and `extractor.rs`.

use std::{
    fmt,
    sync::Arc,
    task::{Context, Poll, ready},
};

use super::settle::RequestHolds;
use crate::{
    decision::{Decision, Outcome},
    keys::Key,
    limiter::{AnyLimiter, Charge, IntoLimiter},
    middleware::{
        extractor::{KeyExtractor, watched},
        rejection::{MissingKey, RequestError},
        rule::{DynRule, Lookup, Rule},
    },
    sync::POLLED,
};

const SHARE_WITH_RULE: &str = "`MissingKey::Share` is for layers with a key extractor; return a \
     charge for requests without a key from the rule";

type Cost<H> = Arc<dyn Fn(&H) -> u64 + Send + Sync>;
type Matcher<H> = Arc<dyn Fn(&H) -> Result<bool, RequestError> + Send + Sync>;

pub(crate) fn matcher<H, M: IntoMatch>(
    matches: impl Fn(&H) -> M + Send + Sync + 'static,
) -> Matcher<H> {
    Arc::new(move |head| matches(head).into_match())
}

/// What a request is charged, the decision, and what the request has taken.
#[derive(Debug)]
pub struct Bill {
    pub(super) price: Price,
    /// `None` before the decision, and if the request proceeds without one.
    pub(super) outcome: Option<Outcome>,
    /// What the request holds. The drop ends it, as used.
    pub(crate) holds: Option<Box<RequestHolds>>,
}

/// What a request is charged.
#[derive(Debug)]
pub(super) enum Price {
    Exempt,
    /// The units of one key of the layer's limiter. A charge is made of them only if it is needed,
    /// which saves copies.
    Units(Key<'static>, u64),
    Charge(Charge),
}

impl Bill {
    #[inline(always)]
    pub(super) fn exempt() -> Self {
        Self { price: Price::Exempt, outcome: None, holds: None }
    }

    /// Returns the charge, if it was made: the limiter of a layer is known without it.
    #[inline]
    pub(crate) fn charge(&self) -> Option<&Charge> {
        if let Price::Charge(charge) = &self.price { Some(charge) } else { None }
    }

    #[inline]
    pub(crate) fn decision(&self) -> Option<&Decision> {
        self.outcome.as_ref().map(|outcome| &outcome.decision)
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

    /// Writes the bill of a request. If the rule has to look up its charge, the lookup takes the
    /// head meanwhile.
    #[inline]
    pub(super) fn price(
        &self,
        cx: &mut Context<'_>,
        request: &mut Option<H>,
        lookup: &mut Option<Lookup<H>>,
        bill: &mut Bill,
    ) -> Poll<Result<(), RequestError>> {
        if let Some(head) = request {
            if (!self.forbidden.is_empty() || !self.exempt.is_empty()) && self.is_exempt(head)? {
                return Poll::Ready(Ok(()));
            }
            match &self.source {
                ChargeSource::Key(_, extractor) => {
                    bill.price = match extractor.extract(head) {
                        Ok(key) => self.price_key(head, key),
                        Err(error) => {
                            let shared = self.without_key(error)?;
                            shared.map_or(Price::Exempt, |key| self.price_key(head, key))
                        }
                    };
                    return Poll::Ready(Ok(()));
                }
                ChargeSource::Rule(rule) => match rule.charge_now(head) {
                    Some(charge) => return Poll::Ready(self.price_charge(head, charge, bill)),
                    None => *lookup = request.take().map(|head| rule.clone().look_up(head)),
                },
            }
        }
        let (head, charge) = ready!(lookup.as_mut().expect(POLLED).as_mut().poll(cx));
        Poll::Ready(self.price_charge(request.insert(head), charge, bill))
    }

    #[inline]
    fn price_key(&self, head: &H, key: Key<'static>) -> Price {
        match self.cost.as_ref().map_or(1, |cost| cost(head)) {
            0 => Price::Exempt,
            cost => Price::Units(key, cost),
        }
    }

    /// Writes the bill of a request by the charge that the rule has returned.
    fn price_charge(
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
        let charge = charge.without_free_limits().with_counts();
        if !charge.is_exempt() {
            bill.price = Price::Charge(charge);
        }
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
