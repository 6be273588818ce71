//! Requests and responses of any type, rejected by a closure.

use std::{convert::Infallible, fmt, future::Pending, ops::ControlFlow, sync::Arc};

use crate::{
    limiter::{Charge, VendorState},
    middleware::{
        http::Usage,
        passage::{Bill, Pricing},
        protocol::{Protocol, ProtocolBase},
        rejection::Rejection,
    },
};

type SettleBy<Res> = Arc<dyn Fn(&Res) -> Option<Usage> + Send + Sync>;
type Reject<Req, Res> = Arc<dyn Fn(&Rejection, &Req) -> Res + Send + Sync>;
type LearnResponse<Res> = Arc<dyn Fn(&Res) -> VendorState + Send + Sync>;

/// Requests of any type, rejected by a closure. See
/// [`RateLimitLayer::custom`](crate::RateLimitLayer::custom).
///
/// # Examples
///
/// ```
/// # use tower_ratelimit::{
/// #     Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key, layer::Custom,
/// # };
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let quota = Quota::per_hour(3);
/// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
/// let layer: RateLimitLayer<Custom<String, String>> =
///     RateLimitLayer::custom(limiter, key::Global, |rejection, _| rejection.to_string());
/// # let _ = layer;
/// # Ok(())
/// # }
/// ```
pub struct Custom<Req, Res> {
    pricing: Pricing<Req>,
    reject: Reject<Req, Res>,
    pub(crate) learn: Option<LearnResponse<Res>>,
    pub(crate) settle_by: Option<SettleBy<Res>>,
}

impl<Req: 'static, Res: 'static> Custom<Req, Res> {
    pub(crate) fn new(
        pricing: Pricing<Req>,
        reject: impl Fn(&Rejection, &Req) -> Res + Send + Sync + 'static,
    ) -> Self {
        Self { pricing, reject: Arc::new(reject), learn: None, settle_by: None }
    }
}

impl<Req, Res> Clone for Custom<Req, Res> {
    fn clone(&self) -> Self {
        Self {
            pricing: self.pricing.clone(),
            reject: self.reject.clone(),
            learn: self.learn.clone(),
            settle_by: self.settle_by.clone(),
        }
    }
}

impl<Req, Res> fmt::Debug for Custom<Req, Res> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Custom").field("pricing", &self.pricing).finish_non_exhaustive()
    }
}

impl<Req: 'static, Res> ProtocolBase for Custom<Req, Res> {
    type Head = Req;

    fn pricing(&self) -> &Pricing<Req> {
        &self.pricing
    }

    fn pricing_mut(&mut self) -> &mut Pricing<Req> {
        &mut self.pricing
    }

    fn holds_costs(&self) -> bool {
        // A rule says which costs are estimates.
        self.settle_by.is_some() && self.pricing.limiter().is_some()
    }
}

impl<Req: 'static, Res> Protocol<Req, Res> for Custom<Req, Res> {
    type Response = Res;
    type Rest = ();
    type Rejecting = Pending<Infallible>;

    fn split(request: Req) -> (Req, ()) {
        (request, ())
    }

    fn join(head: Req, (): ()) -> Req {
        head
    }

    fn annotate(&self, _: &mut Req, _: &mut Bill) {}

    fn learned(&self, response: &Res) -> Option<VendorState> {
        self.learn.as_ref().map(|learn| learn(response))
    }

    fn respond(&self, response: Res, bill: &mut Bill) -> Res {
        let mut holds = bill.holds.take();
        // After the holds: if the closure panics, what the request holds ends after its response.
        let response = response;
        // The drop ends what is not settled.
        if let Some(holds) = &mut holds
            && let Some(settle_by) = &self.settle_by
            && let Some(usage) = settle_by(&response)
        {
            usage.settle(holds);
        }
        response
    }

    fn reject(
        &self,
        rejection: Rejection,
        head: &Req,
        _: Option<&Charge>,
    ) -> ControlFlow<Res, Self::Rejecting> {
        ControlFlow::Break((self.reject)(&rejection, head))
    }

    fn rejected(never: Infallible) -> Res {
        match never {}
    }
}
