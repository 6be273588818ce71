//! The passage of a request through the layer, stage by stage.
//!
//! | stage | file |
//! |---|---|
//! | its key and price, from its head | `price.rs` |
//! | admission: the limiters decide, or a `Waiter` is made; holds | `admit.rs` |
//! | the wait for its price, the decision, or a reserved instant | here |
//! | the readiness of the service, and its call | here |
//! | the response, and the end of what the request holds | `settle.rs`; `http.rs`, `custom.rs` |
//!
//! The request takes a `Bill` along.

mod admit;
mod price;
mod settle;

use std::{
    fmt,
    ops::ControlFlow,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use pin_project_lite::pin_project;
use tower_service::Service;

pub use self::{price::Bill, settle::Settle};
pub(crate) use self::{
    price::{IntoMatch, Pricing, matcher},
    settle::{Expects, RequestHolds},
};
use crate::{
    limiter::{DEFAULT_MAX_LATENESS, FailurePolicy, MaxWait, VendorState, WaitQueue, Waiter},
    middleware::{
        http::Http,
        protocol::{Protocol, ProtocolBase},
        rejection::Rejection,
        rule::Lookup,
    },
    observe::{Observers, log::Throttle},
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
            stage: Stage::Admitting {
                head: Some(head),
                rest: Some(rest),
                step: Step::Pricing(None),
            },
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

/// The way of a request to the service.
enum Step<H> {
    /// The lookup of the charge by the rule, if it takes one.
    Pricing(Option<Lookup<H>>),
    Waiting(Box<Waiter>),
    /// The request is admitted, but the service was not ready.
    Admitted,
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
            if let Err(reason) = ready!(shared.admission(cx, head, step, bill))
                && let Some(rejection) = shared.rejection(reason, bill)
            {
                let found = head.as_ref().expect(POLLED);
                let rejected = shared.protocol.reject(rejection, found, bill.charge());
                this.stage.set(Stage::Done);
                let mut response = match rejected {
                    ControlFlow::Break(response) => return Poll::Ready(Ok(response)),
                    ControlFlow::Continue(response) => response,
                };
                let polled = Pin::new(&mut response).poll(cx);
                this.stage.set(Stage::Rejecting { response });
                return polled.map(|response| Ok(P::rejected(response)));
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
            // The head last: nothing can panic while it moves, so that it moves once.
            let rest = take(rest);
            let future = this.inner.call(P::join(take(head), rest));
            this.stage.set(Stage::Calling { future });
        }
        if let StageProj::Calling { future } = this.stage.as_mut().project() {
            let answer = ready!(future.poll(cx));
            let response = answer.as_ref().ok();
            let learned = response.and_then(|response| shared.protocol.learned(response));
            // Before the end of what the request holds.
            this.stage.set(Stage::Done);
            match answer {
                Ok(response) => {
                    let Some(learning) = learned.and_then(|vendor| shared.learn(vendor, bill))
                    else {
                        return Poll::Ready(Ok(shared.protocol.respond(response, bill)));
                    };
                    let response = Some(shared.protocol.respond(response, bill));
                    this.stage.set(Stage::Learning { learning, response });
                }
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
            StageProj::Rejecting { response } => {
                Poll::Ready(Ok(P::rejected(ready!(Pin::new(response).poll(cx)))))
            }
            _ => panic!("{POLLED}"),
        }
    }
}

/// The state that all services of a layer share.
#[derive(Clone, Debug)]
pub(crate) struct Shared<P> {
    pub(crate) protocol: P,
    pub(crate) max_wait: MaxWait,
    pub(crate) max_lateness: Duration,
    pub(crate) wait_queue: WaitQueue,
    pub(crate) dry_run: bool,
    pub(crate) on_failure: FailurePolicy,
    /// The largest part of its retry-after by which a denial adds to it.
    pub(crate) retry_jitter: f64,
    /// The observers that were added to the layer.
    pub(crate) observers: Observers,
    misconfigured: Arc<Throttle>,
}

/// The result of admission: nothing if the request proceeds, a `Waiter` if it waits, or the reason
/// of its rejection.
type Verdict = Result<Option<Box<Waiter>>, Reason>;

/// Why a request is rejected; `None` if it is denied: the bill has the decision. Boxed, because a
/// verdict is moved with each request.
type Reason = Option<Box<Rejection>>;

fn reason(rejection: Rejection) -> Reason {
    Some(Box::new(rejection))
}

impl<P: ProtocolBase> Shared<P> {
    pub(crate) fn new(protocol: P) -> Self {
        Self {
            protocol,
            max_wait: MaxWait::DEFAULT,
            max_lateness: DEFAULT_MAX_LATENESS,
            wait_queue: WaitQueue::new(),
            dry_run: false,
            on_failure: FailurePolicy::Closed,
            retry_jitter: 0.0,
            observers: Observers::default(),
            misconfigured: Arc::default(),
        }
    }

    /// Takes a request to its admission or the reason of its rejection. Until then it stays in its
    /// place: each move takes a few ns.
    fn admission(
        &self,
        cx: &mut Context<'_>,
        head: &mut Option<P::Head>,
        step: &mut Step<P::Head>,
        bill: &mut Bill,
    ) -> Poll<Result<(), Reason>> {
        loop {
            let verdict = match step {
                Step::Pricing(lookup) => {
                    let pricing = self.protocol.pricing();
                    match ready!(pricing.price(cx, head, lookup, bill)) {
                        Ok(()) => self.admit(head.as_ref().expect(POLLED), bill),
                        Err(error) => Err(reason(Rejection::Request(error))),
                    }
                }
                Step::Waiting(waiter) => {
                    let decided = ready!(waiter.poll(cx));
                    self.admit_after_wait(head.as_ref().expect(POLLED), waiter, decided, bill)
                }
                Step::Admitted => Ok(None),
            };
            match verdict {
                Ok(Some(waiter)) => *step = Step::Waiting(waiter),
                Ok(None) => return Poll::Ready(Ok(())),
                Err(reason) => return Poll::Ready(Err(reason)),
            }
        }
    }

    /// Returns the call by which the limit adopts what a response says, if that is new.
    #[inline(never)]
    fn learn(&self, vendor: VendorState, bill: &mut Bill) -> Option<Task> {
        let remaining = bill.decision()?.remaining();
        self.charge(bill).learn(vendor, remaining)
    }

    /// Takes what the request holds for the service, which is called now.
    #[inline]
    fn begin(&self, bill: &mut Bill) {
        let outcome = bill.outcome.as_ref();
        let may_hold = || outcome.is_some_and(|outcome| outcome.receipts.may_hold());
        if self.protocol.shares_holds() || may_hold() {
            self.hold(bill);
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
