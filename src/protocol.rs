//! What is particular to a kind of request: where its key comes from, and how it is refused.

mod custom;
mod http;

use std::{fmt, sync::Arc, time::Duration};

pub use self::{custom::Custom, http::Http};
use crate::{
    decision::Decision,
    error::{Error, RequestError, StoreError},
    key::{Key, KeyExtractor},
};

/// What a layer knows about its requests: [`Http`] or [`Custom`].
pub trait Protocol: Clone {
    /// The part of a request that decides about its key and its cost.
    type Head: 'static;

    #[doc(hidden)]
    fn charging(&self) -> &Charging<Self::Head>;

    #[doc(hidden)]
    fn charging_mut(&mut self) -> &mut Charging<Self::Head>;

    /// How long the client waits for its answer, if it says so.
    #[doc(hidden)]
    fn timeout(_head: &Self::Head) -> Option<Duration> {
        None
    }

    /// Whether it depends on the response if a request is charged.
    #[doc(hidden)]
    fn charges_by_outcome(&self) -> bool {
        false
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

    /// Makes the request for the inner service. Without a decision it is exempt.
    #[doc(hidden)]
    fn join(&self, head: Self::Head, rest: Self::Rest, decision: Option<&Decision>) -> Req;

    /// Whether a request with this response is charged.
    #[doc(hidden)]
    fn charges(&self, response: Res) -> (Res, bool) {
        (response, true)
    }

    #[doc(hidden)]
    fn respond(&self, response: Res, decision: Option<&Decision>) -> Self::Response;

    #[doc(hidden)]
    fn refuse(&self, rejection: Rejection, head: Self::Head) -> Self::Response;
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
    /// All such requests share one key.
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
        /// What the request would cost.
        cost: u32,
        /// The most that the quota can grant to one request.
        most: u32,
    },
    /// The request cannot be charged to anybody: 400, or 500 if the service is set up wrong.
    Request(RequestError),
    /// The store gave no answer: 503.
    Store(StoreError),
}

impl fmt::Display for Rejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Denied(decision) => {
                let retry_after = decision.retry_after().unwrap_or_default();
                write!(f, "the quota is used up, try again in {retry_after:?}")
            }
            Self::CostAboveQuota { cost, most } => write!(
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
            Error::ZeroCost | Error::NoRate { .. } | Error::Config(_) => {
                Self::Request(RequestError::misconfigured(error.to_string()))
            }
            Error::CostAboveQuota { cost, most } => Self::CostAboveQuota { cost, most },
            Error::Store(error) => Self::Store(error),
        }
    }
}

type Cost<H> = Arc<dyn Fn(&H) -> Result<u32, RequestError> + Send + Sync>;
type Exempt<H> = Arc<dyn Fn(&H) -> bool + Send + Sync>;

/// Who a request is charged to, and how much.
pub struct Charging<H> {
    key: Arc<dyn KeyExtractor<H>>,
    cost: Option<Cost<H>>,
    exempt: Option<Exempt<H>>,
    pub(crate) missing_key: MissingKey,
}

/// What a request is charged.
pub(crate) enum Charge {
    Exempt,
    Spend { key: Key<'static>, cost: u32 },
}

impl<H: 'static> Charging<H> {
    fn new(key: impl KeyExtractor<H>) -> Self {
        Self { key: Arc::new(key), cost: None, exempt: None, missing_key: MissingKey::default() }
    }

    pub(crate) fn set_exempt(&mut self, exempt: impl Fn(&H) -> bool + Send + Sync + 'static) {
        self.exempt = Some(Arc::new(exempt));
    }

    pub(crate) fn set_cost<C: IntoCost>(&mut self, cost: impl Fn(&H) -> C + Send + Sync + 'static) {
        self.cost = Some(Arc::new(move |head| cost(head).into_cost()));
    }

    pub(crate) fn charge(&self, head: &H) -> Result<Charge, RequestError> {
        if self.exempt.as_ref().is_some_and(|exempt| exempt(head)) {
            return Ok(Charge::Exempt);
        }
        let key = match self.key.extract(head) {
            Err(error @ RequestError::MissingKey(_)) => match self.missing_key {
                MissingKey::Refuse => return Err(error),
                MissingKey::Exempt => return Ok(Charge::Exempt),
                MissingKey::Share => Key::scoped("anonymous", ""),
            },
            key => key?,
        };
        let cost = self.cost.as_ref().map_or(Ok(1), |cost| cost(head))?;
        Ok(Charge::Spend { key, cost })
    }
}

impl<H> Clone for Charging<H> {
    fn clone(&self) -> Self {
        let Self { key, cost, exempt, missing_key } = self;
        Self {
            key: key.clone(),
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
