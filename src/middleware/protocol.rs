//! What is particular to a kind of request: where its key comes from, and how it is refused.

use std::{fmt, mem, sync::Arc, time::Duration};

use crate::{
    decision::Decision,
    error::{Error, RequestError},
    keys::Key,
    limiter::Turn,
    limiter::{AnyLimiter, Charge},
    middleware::extractor::KeyExtractor,
    middleware::rule::{AnyRule, Rule, Ruling},
    store::StoreError,
};

/// What a layer knows about its requests: [`Http`](crate::Http) or [`Custom`](crate::Custom).
pub trait Protocol: Clone {
    /// The part of a request that decides about its key and its cost.
    type Head: 'static;

    #[doc(hidden)]
    fn charging(&self) -> &Charging<Self::Head>;

    #[doc(hidden)]
    fn charging_mut(&mut self) -> &mut Charging<Self::Head>;

    /// Whether the charge of a request that goes on is needed then.
    #[doc(hidden)]
    fn keeps_charge(&self) -> bool {
        false
    }

    /// How long the client waits for its answer, if it says so.
    #[doc(hidden)]
    fn timeout(_head: &Self::Head) -> Option<Duration> {
        None
    }
}

/// A [`Protocol`] for these requests and responses.
pub trait Exchange<Req, Res>: Protocol {
    /// What the layered service answers with.
    type Response;

    #[doc(hidden)]
    type Rest;

    #[doc(hidden)]
    fn split(request: Req) -> (Self::Head, Self::Rest);

    #[doc(hidden)]
    fn join(head: Self::Head, rest: Self::Rest) -> Req;

    /// Tells the inner service what is charged.
    #[doc(hidden)]
    fn mark(&self, head: &mut Self::Head, charged: &mut Charged);

    /// Makes the response of the layered service's, and gives back the charge if that response is not charged.
    #[doc(hidden)]
    fn respond(&self, response: Res, charged: &mut Charged) -> Self::Response;

    #[doc(hidden)]
    fn refuse(&self, rejection: Rejection, head: Self::Head, charge: &Charge) -> Self::Response;
}

/// What a request is charged, and what came of it.
#[derive(Debug)]
pub struct Charged {
    /// Exempt, too, if nobody needs it: see [`Shared::start_by_key`](crate::middleware::admission::Shared::start_by_key).
    pub(crate) charge: Charge,
    /// None before there is one, and if nobody decided.
    pub(crate) decision: Option<Decision>,
}

impl Charged {
    pub(crate) fn nothing() -> Self {
        Self { charge: Charge::exempt(), decision: None }
    }

    pub(crate) fn take(&mut self) -> Charge {
        mem::replace(&mut self.charge, Charge::exempt())
    }

    /// Lets the charge know what it has spent. Returns whether it has spent anything.
    pub(crate) fn bind(&mut self) -> bool {
        let charge = self.take();
        let spent = self.decision.as_ref().filter(|decision| decision.is_allowed());
        self.charge = match spent {
            Some(decision) => charge.decided(decision),
            None => charge,
        };
        spent.is_some()
    }

    /// Takes what is to be released if the request does not go on after all.
    pub(crate) fn hold(&mut self) -> Option<Box<Turn>> {
        let decision = self.decision.as_ref().filter(|it| it.is_allowed()).cloned()?;
        Some(Box::new(Turn::admitted(self.take(), decision)))
    }
}

/// What the layer does with a request that has no key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum MissingKey {
    /// It is refused, by default with 400.
    #[default]
    Refuse,
    /// It goes on, and is not counted.
    Exempt,
    /// All such requests share one key. With [`by_rule`](crate::RateLimitLayer::by_rule) it is an error (500): a rule
    /// names such a key itself.
    Share,
}

/// Why the layer answered instead of the service.
///
/// It is in the extensions of a refusal.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Rejection {
    /// The quota is used up: 429.
    Denied(Decision),
    /// The request costs more than the quota can ever grant: 429, without `Retry-After`.
    #[non_exhaustive]
    CostAboveQuota {
        /// The name of the limiter.
        limiter: &'static str,
        /// What the request would cost.
        cost: u32,
        /// The most that the quota can grant to one request.
        most: u32,
    },
    /// The request cannot be charged to anybody: 400, or 500 if the service is set up wrong.
    Request(RequestError),
    /// The store gave no answer, and the [policy](crate::FailurePolicy) lets nothing go on then: 503.
    Store(StoreError),
}

impl Rejection {
    /// The time after which it is worth trying again; `None` if it never is.
    pub(crate) fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Denied(decision) => decision.retry_after(),
            Self::Store(_) => Some(STORE_RETRY_AFTER),
            Self::CostAboveQuota { .. } | Self::Request(_) => None,
        }
    }
}

impl fmt::Display for Rejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Denied(decision) => {
                let retry_after = decision.retry_after().unwrap_or_default();
                write!(f, "the quota is used up, try again in {retry_after:?}")
            }
            Self::CostAboveQuota { cost, most, .. } => write!(
                f,
                "the request costs {cost}, and the quota never grants more than {most} at once"
            ),
            Self::Request(error) => write!(f, "{error}"),
            Self::Store(_) => f.write_str("requests cannot be counted at the moment"),
        }
    }
}

impl std::error::Error for Rejection {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Store(error) => Some(error),
            _ => None,
        }
    }
}

impl From<Error> for Rejection {
    fn from(error: Error) -> Self {
        match error {
            Error::CostAboveQuota { limiter, cost, most } => {
                Self::CostAboveQuota { limiter, cost, most }
            }
            Error::Store(error) => Self::Store(error),
            // Its name in Redis is nobody else's business.
            Error::NoRate { .. } => {
                Self::Request(RequestError::misconfigured("the rate limiter has no rate in Redis"))
            }
            _ => Self::Request(RequestError::misconfigured(error.to_string())),
        }
    }
}

const STORE_RETRY_AFTER: Duration = Duration::from_secs(1);

type Cost<H> = Arc<dyn Fn(&H) -> Result<u32, RequestError> + Send + Sync>;
type Exempt<H> = Arc<dyn Fn(&H) -> bool + Send + Sync>;

/// Who a request is charged to, and how much.
pub struct Charging<H> {
    rule: Basis<H>,
    cost: Option<Cost<H>>,
    exempt: Option<Exempt<H>>,
    pub(crate) missing_key: MissingKey,
}

/// Where a charge comes from.
enum Basis<H> {
    Key(AnyLimiter, Arc<dyn KeyExtractor<H>>),
    Rule(Arc<dyn AnyRule<H>>),
}

impl<H: 'static> Charging<H> {
    pub(crate) fn by_key(limiter: AnyLimiter, key: impl KeyExtractor<H>) -> Self {
        Self::new(Basis::Key(limiter, Arc::new(key)))
    }

    pub(crate) fn by_rule(rule: impl Rule<H>) -> Self
    where
        H: Send + Sync,
    {
        Self::new(Basis::Rule(Arc::new(rule)))
    }

    fn new(rule: Basis<H>) -> Self {
        Self { rule, cost: None, exempt: None, missing_key: MissingKey::default() }
    }

    pub(crate) fn set_exempt(&mut self, exempt: impl Fn(&H) -> bool + Send + Sync + 'static) {
        self.exempt = Some(Arc::new(exempt));
    }

    pub(crate) fn set_cost<C: IntoCost>(&mut self, cost: impl Fn(&H) -> C + Send + Sync + 'static) {
        self.cost = Some(Arc::new(move |head| cost(head).into_cost()));
    }

    #[inline]
    pub(crate) fn charge(&self, head: &H) -> Ruling<'_, H> {
        if self.exempt.as_ref().is_some_and(|exempt| exempt(head)) {
            return Ruling::Now(Ok(Charge::exempt()));
        }
        let charge = match &self.rule {
            Basis::Key(limiter, extractor) => return Ruling::Key(limiter, &**extractor),
            Basis::Rule(rule) => match rule.now(head) {
                Some(charge) => charge,
                None => return Ruling::Later(rule.clone()),
            },
        };
        Ruling::Now(self.complete(head, charge))
    }

    /// Adds what the layer says to what its rule says.
    #[inline]
    pub(crate) fn complete(
        &self,
        head: &H,
        charge: Result<Charge, RequestError>,
    ) -> Result<Charge, RequestError> {
        let charge = match (charge, self.missing_key, &self.rule) {
            (Ok(charge), ..) => charge,
            (Err(RequestError::MissingKey(_)), MissingKey::Exempt, _) => {
                return Ok(Charge::exempt());
            }
            (Err(RequestError::MissingKey(_)), MissingKey::Share, Basis::Key(limiter, _)) => {
                Charge::new(limiter, Key::scoped("anonymous", ""))
            }
            (Err(RequestError::MissingKey(_)), MissingKey::Share, Basis::Rule(_)) => {
                return Err(RequestError::misconfigured(NOTHING_TO_SHARE));
            }
            (Err(error), ..) => return Err(error),
        };
        match &self.cost {
            Some(cost) if !charge.is_exempt() => Ok(charge.or_cost(cost(head)?)),
            _ => Ok(charge),
        }
    }

    /// What a request by key costs.
    pub(crate) fn cost(&self, head: &H) -> Result<u32, RequestError> {
        self.cost.as_ref().map_or(Ok(1), |cost| cost(head))
    }
}

const NOTHING_TO_SHARE: &str = "`MissingKey::Share` is for layers with a key; a rule says itself what \
     requests without a key are charged";

impl<H> Clone for Basis<H> {
    fn clone(&self) -> Self {
        match self {
            Self::Key(limiter, key) => Self::Key(limiter.clone(), key.clone()),
            Self::Rule(rule) => Self::Rule(rule.clone()),
        }
    }
}

impl<H> Clone for Charging<H> {
    fn clone(&self) -> Self {
        let Self { rule, cost, exempt, missing_key } = self;
        Self {
            rule: rule.clone(),
            cost: cost.clone(),
            exempt: exempt.clone(),
            missing_key: *missing_key,
        }
    }
}

impl<H> fmt::Debug for Charging<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Charging").field("missing_key", &self.missing_key).finish_non_exhaustive()
    }
}

/// What a closure may return as a cost.
pub trait IntoCost {
    /// Converts into a cost.
    ///
    /// # Errors
    ///
    /// If the request is wrong, or the service is set up wrong.
    fn into_cost(self) -> Result<u32, RequestError>;
}

impl IntoCost for u32 {
    fn into_cost(self) -> Result<u32, RequestError> {
        Ok(self)
    }
}

impl IntoCost for Result<u32, RequestError> {
    fn into_cost(self) -> Result<u32, RequestError> {
        self
    }
}
