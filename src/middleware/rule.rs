//! `Rule`: computes the charge of each request, by a closure or an asynchronous lookup.

use std::{future::ready, pin::Pin, sync::Arc};

use crate::{limiter::Charge, middleware::rejection::RequestError};

/// A rule computes the charge of a request from its head (`H`, for HTTP [`http::request::Parts`]):
/// the limits, the keys and the costs. It can also [exempt](Charge::exempt) the request.
///
/// A closure that returns a `Result<Charge, RequestError>` is a rule. For an asynchronous lookup,
/// implement the trait for a type. Give the lookup a deadline: the request
/// waits for it, but holds no readiness of the service meanwhile.
///
/// # Cancel safety
///
/// If the client disconnects, the future is dropped.
///
/// # Examples
///
/// ```
/// use http::request::Parts;
/// use tower_ratelimit::{
///     Charge, Limiter,
///     layer::{RequestError, Rule},
/// };
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
///         let key = key.ok_or_else(|| RequestError::missing_key("header x-api-key is missing"))?;
///         Ok(match self.accounts.plan(key.as_bytes()).await {
///             Plan::Free => Charge::new(&self.free, key.as_bytes()),
///             Plan::Pro => Charge::new(&self.pro, key.as_bytes()),
///         })
///     }
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a rule for requests with the head `{H}`",
    label = "not a rule",
    note = "a rule is a closure from `&{H}` to `Result<Charge, RequestError>`, or a type that \
            implements `Rule`, for an asynchronous lookup",
    note = "write the type of the closure's parameter: `|head: &{H}| ..`"
)]
pub trait Rule<H>: Send + Sync + 'static {
    /// Computes the charge of a request.
    ///
    /// # Errors
    ///
    /// [`RequestError::MissingKey`] if the request has no key, and the other errors if the request
    /// is invalid or the service is misconfigured.
    ///
    /// # Examples
    ///
    /// ```
    /// use http::request::Parts;
    /// use tower_ratelimit::{Charge, Limiter, layer::{RequestError, Rule}};
    ///
    /// struct PerMethod(Limiter);
    ///
    /// impl Rule<Parts> for PerMethod {
    ///     async fn charge(&self, head: &Parts) -> Result<Charge, RequestError> {
    ///         Ok(Charge::new(&self.0, head.method.as_str()))
    ///     }
    /// }
    /// ```
    fn charge(&self, head: &H) -> impl Future<Output = Result<Charge, RequestError>> + Send;

    /// Returns the charge if the rule is synchronous, which avoids the allocation of a future.
    #[doc(hidden)]
    fn charge_now(&self, _head: &H) -> Option<Result<Charge, RequestError>> {
        None
    }
}

impl<H, F> Rule<H> for F
where
    F: Fn(&H) -> Result<Charge, RequestError> + Send + Sync + 'static,
{
    fn charge(&self, head: &H) -> impl Future<Output = Result<Charge, RequestError>> + Send {
        ready(self(head))
    }

    fn charge_now(&self, head: &H) -> Option<Result<Charge, RequestError>> {
        Some(self(head))
    }
}

/// Resolves to the head of the request and its charge.
pub(crate) type Lookup<H> = Pin<Box<dyn Future<Output = (H, Result<Charge, RequestError>)> + Send>>;

/// An object-safe [`Rule`].
pub(crate) trait DynRule<H>: Send + Sync {
    fn charge_now(&self, head: &H) -> Option<Result<Charge, RequestError>>;

    fn look_up(self: Arc<Self>, head: H) -> Lookup<H>;
}

impl<H: Send + Sync + 'static, R: Rule<H>> DynRule<H> for R {
    fn charge_now(&self, head: &H) -> Option<Result<Charge, RequestError>> {
        Rule::charge_now(self, head)
    }

    fn look_up(self: Arc<Self>, head: H) -> Lookup<H> {
        Box::pin(async move {
            let charge = self.charge(&head).await;
            (head, charge)
        })
    }
}
