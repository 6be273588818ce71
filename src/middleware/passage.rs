//! The passage of a request through the layer, as a loop over its stages.
//!
//! | stage | file |
//! |---|---|
//! | its key and price, from its head | `price.rs` |
//! | admission: the limiters decide | `admit.rs` |
//! | the wait for the decision, or for a reserved instant | `wait.rs` |
//! | the readiness of the service, and its call | here |
//! | the response, and the end of what the request holds | `settle.rs`; `http.rs`, `custom.rs` |
//!
//! The request takes a `Bill` (`bill.rs`) along.

mod admit;
mod bill;
mod price;
mod settle;
mod wait;

use std::{
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use pin_project_lite::pin_project;
use tower_service::Service;

pub(crate) use self::{
    admit::Shared,
    price::{IntoMatch, Pricing, matcher},
    settle::{Expects, RequestHolds},
};
pub use self::{bill::Bill, settle::Settle};
use crate::{
    limiter::{Learning, Waiter},
    middleware::{
        protocol::{Protocol, Rejected},
        rule::Lookup,
    },
};

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
            if let StageProj::Admitting { step, .. } = this.stage.project()
                && !matches!(step, Step::Called)
            {
                this.shared.release(this.bill);
            }
        }
    }
}

pin_project! {
    /// Where a request is.
    #[project = StageProj]
    enum Stage<F, H, R, J, T> {
        // Most requests go from here to the call in one turn. Until then they stay in their place:
        // each move takes a few ns.
        Admitting { head: Option<H>, rest: Option<R>, step: Step<H> },
        Calling { #[pin] future: F },
        /// The response is there. It arrives after the block that it asks for, which then holds for
        /// a retry.
        Learning { learning: Learning, response: Option<T> },
        Rejecting { response: J },
        Done,
    }
}

/// The way of a request to the service.
enum Step<H> {
    Arrived,
    /// The rule looks up the charge of the head.
    Pricing(Lookup<H>),
    Waiting(Box<Waiter>),
    /// The request is admitted, but the service was not ready.
    Admitted,
    Called,
}

impl<S, P, Req> ResponseFuture<S, P, Req>
where
    S: Service<Req>,
    P: Protocol<Req, S::Response>,
{
    pub(crate) fn new(inner: S, shared: Arc<Shared<P>>, request: Req) -> Self {
        let (head, rest) = P::split(request);
        let (head, rest, step) = (Some(head), Some(rest), Step::Arrived);
        Self { stage: Stage::Admitting { head, rest, step }, inner, bill: Bill::exempt(), shared }
    }
}

const TAKEN: &str = "polled after completion";

fn take<T>(option: &mut Option<T>) -> T {
    option.take().expect(TAKEN)
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
        let (pricing, protocol) = (shared.protocol.pricing(), &shared.protocol);
        loop {
            match this.stage.as_mut().project() {
                StageProj::Admitting { head, rest, step } => {
                    let verdict = match step {
                        Step::Arrived => {
                            let found = head.as_ref().expect(TAKEN);
                            let priced = pricing.price(found, bill);
                            if matches!(priced, Ok(false)) {
                                *step = Step::Pricing(pricing.look_up(take(head)));
                                continue;
                            }
                            shared.admit(found, priced.map(drop), bill)
                        }
                        Step::Pricing(lookup) => {
                            let (found, charge) = ready!(lookup.as_mut().poll(cx));
                            shared.admit_charge(head.insert(found), charge, bill)
                        }
                        Step::Waiting(waiter) => {
                            let decided = ready!(waiter.poll(cx));
                            let found = head.as_ref().expect(TAKEN);
                            shared.admit_after_wait(found, waiter, decided, bill)
                        }
                        Step::Admitted => Ok(None),
                        Step::Called => panic!("{TAKEN}"),
                    };
                    match verdict {
                        Ok(None) => {}
                        Ok(Some(waiter)) => {
                            *step = Step::Waiting(waiter);
                            continue;
                        }
                        Err(mut rejection) => {
                            if shared.rejects(&mut rejection, bill) {
                                let found = head.as_ref().expect(TAKEN);
                                let rejected = protocol.reject(rejection, found, &bill.charge);
                                this.stage.set(Stage::Done);
                                match rejected {
                                    Rejected::Now(response) => return Poll::Ready(Ok(response)),
                                    Rejected::Later(response) => {
                                        this.stage.set(Stage::Rejecting { response });
                                    }
                                }
                                continue;
                            }
                        }
                    }
                    // After the decision: a denied request never waits for the service, and a
                    // request that waits for its quota does not hold a place that `poll_ready` has
                    // reserved.
                    match this.inner.poll_ready(cx) {
                        Poll::Ready(Ok(())) => {}
                        Poll::Ready(Err(error)) => {
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
                    protocol.annotate(head.as_mut().expect(TAKEN), bill);
                    *step = Step::Called;
                    let future = this.inner.call(P::join(take(head), take(rest)));
                    this.stage.set(Stage::Calling { future });
                }
                StageProj::Calling { future } => {
                    let answer = ready!(future.poll(cx));
                    // Before the end of what the request holds.
                    this.stage.set(Stage::Done);
                    let response = match answer {
                        Ok(response) => response,
                        Err(error) => {
                            bill.holds = None; // as used
                            return Poll::Ready(Err(error));
                        }
                    };
                    let learned =
                        if protocol.learns() { protocol.learned(&response) } else { None };
                    let learning = learned.and_then(|vendor| bill.learn(vendor));
                    let response = protocol.respond(response, bill);
                    let Some(learning) = learning else { return Poll::Ready(Ok(response)) };
                    this.stage.set(Stage::Learning { learning, response: Some(response) });
                }
                StageProj::Learning { learning, response } => {
                    ready!(learning.as_mut().poll(cx));
                    return Poll::Ready(Ok(take(response)));
                }
                StageProj::Rejecting { response } => return Pin::new(response).poll(cx).map(Ok),
                StageProj::Done => panic!("{TAKEN}"),
            }
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
