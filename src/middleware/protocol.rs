//! `Protocol`: the part of the layer that depends on the kind of request. `http.rs` and `custom.rs`
//! implement it.

use std::{ops::ControlFlow, time::Duration};

use crate::{
    limiter::{Charge, VendorState},
    middleware::{
        passage::{Bill, Pricing},
        rejection::Rejection,
    },
};

/// A kind of request that a layer can limit: HTTP, or [`Custom`](crate::layer::Custom).
#[diagnostic::on_unimplemented(
    message = "a rate limit for `{Self}` cannot be applied to a service with requests `{Req}` and \
               responses `{Res}`",
    note = "`RateLimitLayer::new` and `by_rule` limit services from `http::Request<_>` to \
            `http::Response<_>`; for other services, use `RateLimitLayer::custom`"
)]
pub trait Protocol<Req, Res>: ProtocolBase {
    /// The response of the layered service.
    type Response;

    #[doc(hidden)]
    type Rest;

    /// A response to a rejected request that is not complete yet.
    #[doc(hidden)]
    type Rejecting: Future + Unpin;

    #[doc(hidden)]
    fn split(request: Req) -> (Self::Head, Self::Rest);

    #[doc(hidden)]
    fn join(head: Self::Head, rest: Self::Rest) -> Req;

    /// Adds the decision and the handle of the holds to the head of a request that proceeds.
    #[doc(hidden)]
    fn annotate(&self, head: &mut Self::Head, bill: &mut Bill);

    /// Returns what a response says about the limit of the vendor that sent it, if the layer learns
    /// from responses.
    #[doc(hidden)]
    fn learned(&self, response: &Res) -> Option<VendorState>;

    /// Converts the response of the inner service, and ends what the request holds.
    #[doc(hidden)]
    fn respond(&self, response: Res, bill: &mut Bill) -> Self::Response;

    /// Breaks with the response to a rejected request, or continues with one that is not complete.
    #[doc(hidden)]
    fn reject(
        &self,
        rejection: Rejection,
        head: &Self::Head,
        charge: Option<&Charge>,
    ) -> ControlFlow<Self::Response, Self::Rejecting>;

    /// Converts the response to a rejected request, once it is complete.
    #[doc(hidden)]
    fn rejected(response: <Self::Rejecting as Future>::Output) -> Self::Response;
}

/// The part of [`Protocol`] that the settings of a layer need, which know only the head of a
/// request: a layer is configured before the types of its requests and responses are known. The
/// trait is not exported, which seals `Protocol`.
pub trait ProtocolBase: Clone {
    /// The part of a request that determines its key and its cost.
    type Head: 'static;

    fn pricing(&self) -> &Pricing<Self::Head>;

    fn pricing_mut(&mut self) -> &mut Pricing<Self::Head>;

    /// Returns whether all costs are held until the response.
    fn holds_costs(&self) -> bool;

    /// Returns whether the service gets a handle to settle what its request holds.
    fn shares_holds(&self) -> bool {
        false
    }

    /// Returns the deadline of the client, if the request has one.
    fn timeout(_head: &Self::Head) -> Option<Duration> {
        None
    }
}
