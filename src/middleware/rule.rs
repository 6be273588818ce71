//! What a request is charged, looked up for each.

use std::{future::ready, pin::Pin, sync::Arc};

use crate::{
    error::RequestError,
    limiter::{AnyLimiter, Charge},
    middleware::extractor::KeyExtractor,
};

/// Says what a request is charged, from its head (`H`, for HTTP [`http::request::Parts`]): which limits, whose,
/// and how much; or that it is [exempt](Charge::exempt).
///
/// A closure that returns a [`Charge`] or a `Result<Charge, RequestError>` is a rule. A type can also look
/// something up that takes time. Bound that time: the request waits for it, but holds no readiness of the service
/// meanwhile.
///
/// # Cancel safety
///
/// The future is dropped if the client goes away.
///
/// # Examples
///
/// ```
/// use http::request::Parts;
/// use tower_ratelimit::{Charge, Limiter, RequestError, Rule};
///
/// # struct Accounts;
/// # impl Accounts { async fn plan(&self, _key: &[u8]) -> Plan { Plan::Free } }
/// enum Plan {
///     Free,
///     Pro,
/// }
///
/// struct ByPlan {
///     accounts: Accounts,
///     free: Limiter,
///     pro: Limiter,
/// }
///
/// impl Rule<Parts> for ByPlan {
///     async fn charge(&self, head: &Parts) -> Result<Charge, RequestError> {
///         let key = head.headers.get("x-api-key").filter(|key| !key.is_empty());
///         let key = key.ok_or_else(|| RequestError::missing_key("there is no x-api-key"))?;
///         Ok(match self.accounts.plan(key.as_bytes()).await {
///             Plan::Free => Charge::new(&self.free, key.as_bytes()),
///             Plan::Pro => Charge::new(&self.pro, key.as_bytes()),
///         })
///     }
/// }
/// ```
pub trait Rule<H>: Send + Sync + 'static {
    /// Says what the request is charged.
    ///
    /// # Errors
    ///
    /// [`RequestError::MissingKey`] if the request does not say who it is from, and the other errors if it
    /// is wrong, or the service is set up wrong.
    fn charge(&self, head: &H) -> impl Future<Output = Result<Charge, RequestError>> + Send;

    /// The charge, if it needs no waiting, and so no allocation.
    #[doc(hidden)]
    fn charge_now(&self, _head: &H) -> Option<Result<Charge, RequestError>> {
        None
    }
}

impl<H, F, T> Rule<H> for F
where
    F: Fn(&H) -> T + Send + Sync + 'static,
    T: IntoCharge,
{
    fn charge(&self, head: &H) -> impl Future<Output = Result<Charge, RequestError>> + Send {
        ready(self(head).into_charge())
    }

    fn charge_now(&self, head: &H) -> Option<Result<Charge, RequestError>> {
        Some(self(head).into_charge())
    }
}

/// What a closure may return as a charge.
pub trait IntoCharge {
    /// Converts into a charge.
    ///
    /// # Errors
    ///
    /// Those of [`Rule::charge`].
    fn into_charge(self) -> Result<Charge, RequestError>;
}

impl IntoCharge for Charge {
    fn into_charge(self) -> Result<Charge, RequestError> {
        Ok(self)
    }
}

impl IntoCharge for Result<Charge, RequestError> {
    fn into_charge(self) -> Result<Charge, RequestError> {
        self
    }
}

/// The charge, and the head that it was looked up for.
pub(crate) type Lookup<H> = Pin<Box<dyn Future<Output = (H, Result<Charge, RequestError>)> + Send>>;

/// What a request is charged, or what says so.
pub(crate) enum Ruling<'a, H> {
    /// One limit, whose key is to be extracted.
    Key(&'a AnyLimiter, &'a dyn KeyExtractor<H>),
    Now(Result<Charge, RequestError>),
    Later(Arc<dyn AnyRule<H>>),
}

/// A rule of any type.
pub(crate) trait AnyRule<H>: Send + Sync {
    fn now(&self, head: &H) -> Option<Result<Charge, RequestError>>;

    fn later(self: Arc<Self>, head: H) -> Lookup<H>;
}

impl<H: Send + Sync + 'static, R: Rule<H>> AnyRule<H> for R {
    fn now(&self, head: &H) -> Option<Result<Charge, RequestError>> {
        self.charge_now(head)
    }

    fn later(self: Arc<Self>, head: H) -> Lookup<H> {
        Box::pin(async move {
            let charge = self.charge(&head).await;
            (head, charge)
        })
    }
}
