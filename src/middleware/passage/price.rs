//! The first stage: the key and the price of a request, from its head. Rules and key extractors are
//! in `rule.rs` and `extractor.rs`.

use std::{fmt, sync::Arc};

use super::bill::Bill;
use crate::{
    keys::Key,
    limiter::{AnyLimiter, Charge, IntoLimiter},
    middleware::{
        extractor::KeyExtractor,
        rejection::{MissingKey, RequestError},
        rule::{DynRule, Lookup, Rule},
        watch::watched,
    },
};

const SHARE_WITH_RULE: &str = "`MissingKey::Share` is for layers with a key extractor; return a \
     charge for requests without a key from the rule";

type Cost<H> = Arc<dyn Fn(&H) -> u64 + Send + Sync>;
type Matcher<H> = Arc<dyn Fn(&H) -> Result<bool, RequestError> + Send + Sync>;

/// The key extractor or rule of a layer, and its other settings for charges.
pub struct Pricing<H> {
    source: Source<H>,
    cost: Option<Cost<H>>,
    forbidden: Vec<Matcher<H>>,
    exempt: Vec<Matcher<H>>,
    pub(crate) missing_key: MissingKey,
}

/// The origin of charges.
enum Source<H> {
    Key(AnyLimiter, Arc<dyn KeyExtractor<H>>),
    Rule(Arc<dyn DynRule<H>>),
}

impl<H: 'static> Pricing<H> {
    pub(crate) fn by_key(limiter: impl IntoLimiter, key: impl KeyExtractor<H>) -> Self {
        Self::new(Source::Key(limiter.into_limiter(), watched(key)))
    }

    pub(crate) fn by_rule(rule: impl Rule<H>) -> Self
    where
        H: Send + Sync,
    {
        Self::new(Source::Rule(Arc::new(rule)))
    }

    fn new(source: Source<H>) -> Self {
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

    pub(crate) fn set_cost(&mut self, cost: impl Fn(&H) -> u64 + Send + Sync + 'static) {
        self.cost = Some(Arc::new(cost));
    }

    /// Returns the limiter of a layer with a key extractor.
    pub(crate) fn limiter(&self) -> Option<&AnyLimiter> {
        match &self.source {
            Source::Key(limiter, _) => Some(limiter),
            Source::Rule(_) => None,
        }
    }

    /// Writes the bill of a request; `None` if the rule has to [look the charge up](Self::look_up).
    #[inline]
    pub(super) fn price<'a>(
        &'a self,
        head: &H,
        bill: &mut Bill<'a>,
    ) -> Option<Result<(), RequestError>> {
        match self.is_exempt(head) {
            Ok(false) => {}
            listed => return Some(listed.map(drop)),
        }
        Some(match &self.source {
            Source::Key(limiter, extractor) => match extractor.extract(head) {
                Ok(key) => Ok(bill.charge_key(limiter, key, self.cost(head))),
                Err(error) => self.price_without_key(head, error, bill),
            },
            Source::Rule(rule) => self.price_charge(head, rule.charge_now(head)?, bill),
        })
    }

    /// Looks up the charge of a request by the rule.
    pub(super) fn look_up(&self, head: H) -> Lookup<H> {
        match &self.source {
            Source::Rule(rule) => rule.clone().look_up(head),
            Source::Key(..) => unreachable!("a key is extracted at once"),
        }
    }

    /// Writes the bill of a request by the charge that the rule has returned.
    pub(super) fn price_charge<'a>(
        &'a self,
        head: &H,
        charge: Result<Charge, RequestError>,
        bill: &mut Bill<'a>,
    ) -> Result<(), RequestError> {
        let charge = match (charge, &self.cost) {
            (Ok(charge), Some(cost)) if !charge.is_exempt() => charge.or_cost(cost(head)),
            (Ok(charge), _) => charge,
            (Err(error), _) => return self.price_without_key(head, error, bill),
        };
        bill.set_charge(charge.without_free_limits());
        Ok(())
    }

    #[inline(never)]
    fn price_without_key<'a>(
        &'a self,
        head: &H,
        error: RequestError,
        bill: &mut Bill<'a>,
    ) -> Result<(), RequestError> {
        if !matches!(error, RequestError::MissingKey { .. }) {
            return Err(error);
        }
        match (self.missing_key, &self.source) {
            (MissingKey::Reject, _) => Err(error),
            (MissingKey::RejectWith(status), _) => {
                let (message, reason) = (error.to_string().into(), "missing_key");
                Err(RequestError::WithStatus { status, message, reason })
            }
            (MissingKey::Exempt, _) => Ok(()),
            (MissingKey::Share, Source::Key(limiter, _)) => {
                bill.charge_key(limiter, Key::scoped("anonymous", ""), self.cost(head));
                Ok(())
            }
            (MissingKey::Share, Source::Rule(_)) => {
                Err(RequestError::misconfigured(SHARE_WITH_RULE))
            }
        }
    }

    /// Returns whether a list exempts the request; an error if a list forbids it, which is asked
    /// first.
    #[inline]
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

    #[inline]
    fn cost(&self, head: &H) -> u64 {
        self.cost.as_ref().map_or(1, |cost| cost(head))
    }
}

impl<H> Clone for Source<H> {
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
