//! The passage of a request through the layer, stage by stage.
//!
//! | stage | file |
//! |---|---|
//! | its key and price, from its head | `price.rs` |
//! | admission: the limiters decide | `admit.rs` |
//! | the wait for its price, the decision, or a reserved instant | `wait.rs` |
//! | the readiness of the service, and its call | here |
//! | the response, and the end of what the request holds | `settle.rs`; `http.rs`, `custom.rs` |
//!
//! The request takes a `Bill` along.

mod admit;
mod price;
mod settle;
mod wait;

use std::{
    fmt, mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use pin_project_lite::pin_project;
use tower_service::Service;

use self::price::{Price, Step};
pub(crate) use self::{
    admit::Shared,
    price::{IntoMatch, Pricing, matcher},
    settle::{Expects, RequestHolds},
};
pub use self::{price::Bill, settle::Settle};
use crate::{
    limiter::Holds,
    middleware::{
        http::Http,
        protocol::{Protocol, ProtocolBase, Rejected},
    },
    store::Task,
    sync::POLLED,
};

/// A service with limited requests. See [`RateLimitLayer`](crate::RateLimitLayer).
///
/// The service is always ready: the response future polls the readiness of the inner service after
/// the decision. The future resolves to the response or the error of the inner service, to an error
/// of its `poll_ready`, or to a rejection. A rejection never waits for the inner service.
///
/// # Cancel safety
///
/// Dropping the future before its first poll spends nothing. If it is dropped before the inner
/// service is called, or if that service fails or panics instead of becoming ready, the units that
/// the request has spent or reserved are released exactly once; requests queued behind it keep
/// their reservations. In memory the release happens in the drop, with Redis in the background: see
/// [dropped requests](crate::guide::redis_capacity#dropped-requests). If the future is dropped
/// after the inner service is called, the cost stays spent, and what the request holds counts as
/// used.
///
/// # Examples
///
/// ```
/// use tower::Layer;
/// use tower_ratelimit::{Quota, RateLimitLayer, layer::RateLimit};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let layer = RateLimitLayer::per_ip(Quota::per_second(10));
/// let service: RateLimit<axum::Router, _> = layer.layer(axum::Router::new());
/// # let _ = service;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct RateLimit<S, P = Http> {
    inner: S,
    shared: Arc<Shared<P>>,
}

impl<S, P> RateLimit<S, P> {
    pub(crate) fn new(inner: S, shared: Arc<Shared<P>>) -> Self {
        Self { inner, shared }
    }
}

impl<S: Clone, P> Clone for RateLimit<S, P> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), shared: self.shared.clone() }
    }
}

impl<S, P, Req> Service<Req> for RateLimit<S, P>
where
    S: Service<Req> + Clone,
    P: Protocol<Req, S::Response>,
{
    type Response = P::Response;
    type Error = S::Error;
    type Future = ResponseFuture<S, P, Req>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Req) -> Self::Future {
        let (head, rest) = P::split(request);
        ResponseFuture {
            stage: Stage::Admitting { head: Some(head), rest: Some(rest), step: Step::Arrived },
            inner: self.inner.clone(),
            bill: Bill::exempt(),
            shared: self.shared.clone(),
        }
    }
}

pin_project! {
    /// The response of [`RateLimit`](crate::layer::RateLimit), whose docs describe it.
    pub struct ResponseFuture<S, P, Req>
    where
        S: Service<Req>,
        P: Protocol<Req, S::Response>,
    {
        // Dropped in this order: a request counts until the service has dropped its work.
        #[pin]
        stage: Stage<S::Future, P::Head, P::Rest, P::Rejecting, P::Response>,
        inner: S,
        bill: Bill,
        shared: Arc<Shared<P>>,
    }

    impl<S, P, Req> PinnedDrop for ResponseFuture<S, P, Req>
    where
        S: Service<Req>,
        P: Protocol<Req, S::Response>,
    {
        fn drop(this: Pin<&mut Self>) {
            let this = this.project();
            // Once the service is called, it may do its work: the cost stays spent.
            if let StageProj::Admitting { head: Some(_), .. } = this.stage.project() {
                this.shared.release(this.bill);
            }
        }
    }
}

pin_project! {
    /// Where a request is.
    #[project = StageProj]
    enum Stage<F, H, R, J, T> {
        Admitting { head: Option<H>, rest: Option<R>, step: Step<H> },
        Calling { #[pin] future: F },
        /// The response is there. It arrives after the block that it asks for, which then holds for
        /// a retry.
        Learning { learning: Task, response: Option<T> },
        Rejecting { response: J },
        Done,
    }
}

fn take<T>(option: &mut Option<T>) -> T {
    option.take().expect(POLLED)
}

impl<S, P, Req> Future for ResponseFuture<S, P, Req>
where
    S: Service<Req> + Clone,
    P: Protocol<Req, S::Response>,
{
    type Output = Result<P::Response, S::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        let (shared, bill) = (&**this.shared, this.bill);
        if let StageProj::Admitting { head, rest, step } = this.stage.as_mut().project() {
            // Most requests are admitted or denied in one turn. Until then they stay in their
            // place: each move takes a few ns.
            let verdict = match shared.arrive(head, step, bill) {
                Some(verdict) => verdict,
                None => ready!(shared.go_on(cx, head, step, bill)),
            };
            if let Err(reason) = verdict
                && let Some(rejection) = shared.rejection(reason, bill)
            {
                let found = head.as_ref().expect(POLLED);
                let rejected = shared.protocol.reject(rejection, found, bill.charge());
                this.stage.set(Stage::Done);
                let mut response = match rejected {
                    Rejected::Now(response) => return Poll::Ready(Ok(response)),
                    Rejected::Later(response) => response,
                };
                let polled = Pin::new(&mut response).poll(cx);
                this.stage.set(Stage::Rejecting { response });
                return polled.map(Ok);
            }
            // After the decision: a denied request never waits for the service, and a request that
            // waits for its quota does not hold a place that `poll_ready` has reserved.
            match this.inner.poll_ready(cx) {
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(error)) => {
                    this.stage.set(Stage::Done);
                    shared.release(bill);
                    return Poll::Ready(Err(error));
                }
                Poll::Pending => {
                    *step = Step::Admitted;
                    shared.keep(bill);
                    return Poll::Pending;
                }
            }
            shared.begin(bill);
            shared.protocol.annotate(head.as_mut().expect(POLLED), bill);
            let future = this.inner.call(P::join(take(head), take(rest)));
            this.stage.set(Stage::Calling { future });
        }
        if let StageProj::Calling { future } = this.stage.as_mut().project() {
            let answer = ready!(future.poll(cx));
            // Before the end of what the request holds.
            this.stage.set(Stage::Done);
            match answer {
                Ok(response) if shared.protocol.learns() => {
                    let learned = shared.protocol.learned(&response);
                    let learning = learned.and_then(|vendor| bill.learn(vendor));
                    let response = shared.protocol.respond(response, bill);
                    let Some(learning) = learning else { return Poll::Ready(Ok(response)) };
                    this.stage.set(Stage::Learning { learning, response: Some(response) });
                }
                Ok(response) => return Poll::Ready(Ok(shared.protocol.respond(response, bill))),
                Err(error) => {
                    bill.holds = None; // as used
                    return Poll::Ready(Err(error));
                }
            }
        }
        match this.stage.project() {
            StageProj::Learning { learning, response } => {
                ready!(learning.as_mut().poll(cx));
                Poll::Ready(Ok(take(response)))
            }
            StageProj::Rejecting { response } => Pin::new(response).poll(cx).map(Ok),
            _ => panic!("{POLLED}"),
        }
    }
}

impl<P: ProtocolBase> Shared<P> {
    /// Takes what the request holds for the service, which is called now.
    #[inline]
    fn begin(&self, bill: &mut Bill) {
        let outcome = bill.outcome.as_ref();
        let may_hold = || outcome.is_some_and(|outcome| outcome.receipts.may_hold());
        if self.protocol.shares_holds() || self.protocol.learns() || may_hold() {
            self.hold(bill);
        }
    }

    /// Keeps a bill while the service is not ready. What is held is renewed.
    #[inline(never)]
    fn keep(&self, bill: &mut Bill) {
        self.charge(bill);
        self.hold(bill);
    }

    /// Takes what an allowed request holds, if anything.
    #[inline(never)]
    fn hold(&self, bill: &mut Bill) {
        if self.protocol.learns() {
            self.charge(bill);
        }
        // In a dry run, a denied request proceeds, and is not counted.
        let allowed = bill.outcome.as_ref().filter(|outcome| outcome.decision.is_allowed());
        let holds = match (allowed, mem::replace(&mut bill.price, Price::Exempt), self.limiter()) {
            (Some(outcome), Price::Units(key, cost), Some(limiter)) => {
                let own = limiter.own().map(|own| Holds::of_one(own, key, cost, outcome));
                own.unwrap_or_default() // a foreign limiter holds nothing
            }
            (allowed, Price::Charge(charge), _) => {
                let holds = allowed.map(|outcome| charge.holds(outcome)).unwrap_or_default();
                bill.price = Price::Charge(charge);
                holds
            }
            _ => Holds::default(),
        };
        bill.outcome.iter_mut().for_each(|outcome| outcome.receipts.remove_holds());
        // The service can settle even if there is nothing.
        if bill.holds.is_none() && (self.protocol.shares_holds() || !holds.is_empty()) {
            bill.holds = Some(RequestHolds::new(holds));
        }
    }

    /// Returns what a request has taken: the service was not called.
    #[inline(never)]
    fn release(&self, bill: &mut Bill) {
        if let Some(mut holds) = bill.holds.take() {
            holds.release();
        }
        if let Some(outcome) = bill.outcome.take() {
            self.charge(bill).release_in_background(&outcome.receipts);
        }
    }
}

impl<S, P, Req> fmt::Debug for ResponseFuture<S, P, Req>
where
    S: Service<Req>,
    P: Protocol<Req, S::Response>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}
