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
    fmt, mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use pin_project_lite::pin_project;
use tower_service::Service;

use self::bill::Bill;
pub use self::settle::Settle;
pub(crate) use self::{
    admit::Shared,
    price::{IntoMatch, Pricing, matcher},
    settle::{ChargeState, Expects, RequestHolds},
};
use crate::{
    limiter::{Charge, Learning, Waiter},
    middleware::{
        protocol::{Protocol, ProtocolBase, Rejected},
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
        shared: Arc<Shared<P>>,
        inner: S,
        state: ChargeState,
        #[pin]
        stage: Stage<S::Future, P::Head, P::Rest, P::Rejecting, P::Response>,
    }
}

pin_project! {
    /// Where a request is.
    #[project = StageProj]
    enum Stage<F, H, R, J, T> {
        Arrived { request: Option<(H, R)> },
        /// The rule looks up the charge.
        Pricing { lookup: Lookup<H>, rest: Option<R> },
        Waiting { waiter: Option<Box<Waiter>>, request: Option<(H, R)> },
        /// The request is admitted, but the service is not ready.
        Readying { bill: Option<Box<Bill<'static>>>, request: Option<(H, R)> },
        Calling { #[pin] future: F },
        /// The response is there. It arrives after the block that it asks for, which then holds for
        /// a retry.
        Learning { learning: Learning, response: Option<T> },
        Rejecting { response: J },
    }
}

impl<S, P, Req> ResponseFuture<S, P, Req>
where
    S: Service<Req>,
    P: Protocol<Req, S::Response>,
{
    pub(crate) fn new(inner: S, shared: Arc<Shared<P>>, request: Req) -> Self {
        let stage = Stage::Arrived { request: Some(P::split(request)) };
        Self { shared, inner, state: ChargeState::Exempt, stage }
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
        let (shared, state) = (&**this.shared, this.state);
        let (pricing, protocol) = (shared.protocol.pricing(), &shared.protocol);
        let mut bill = Bill::exempt();
        loop {
            // Most requests go from here to the call in one turn. Until then they stay in their
            // place: each move takes a few ns.
            let (mut found, verdict);
            let request = match this.stage.as_mut().project() {
                StageProj::Arrived { request } => {
                    let (head, _) = request.as_ref().expect(TAKEN);
                    let priced = pricing.price(head, &mut bill);
                    if matches!(priced, Ok(false)) {
                        let (head, rest) = take(request);
                        let (lookup, rest) = (pricing.look_up(head), Some(rest));
                        this.stage.set(Stage::Pricing { lookup, rest });
                        continue;
                    }
                    verdict = shared.admit(head, priced.map(drop), &mut bill);
                    request
                }
                StageProj::Pricing { lookup, rest } => {
                    let (head, charge) = ready!(lookup.as_mut().poll(cx));
                    verdict = shared.admit_charge(&head, charge, &mut bill);
                    found = Some((head, take(rest)));
                    &mut found
                }
                StageProj::Waiting { waiter, request } => {
                    let decided = ready!(waiter.as_mut().expect(TAKEN).poll(cx));
                    let (head, _) = request.as_ref().expect(TAKEN);
                    verdict = shared.admit_after_wait(head, take(waiter), decided, &mut bill);
                    request
                }
                StageProj::Readying { bill: kept, request } => {
                    (bill, verdict) = (*take(kept), Ok(None));
                    request
                }
                StageProj::Calling { future } => {
                    let response = match ready!(future.poll(cx)) {
                        Ok(response) => response,
                        // A request that fails ends what it holds, as used.
                        Err(error) => {
                            *state = ChargeState::Exempt;
                            return Poll::Ready(Err(error));
                        }
                    };
                    let learned =
                        if protocol.learns() { protocol.learned(&response) } else { None };
                    let Some(learning) = learned.and_then(|vendor| state.learn(vendor)) else {
                        return Poll::Ready(Ok(protocol.respond(response, state)));
                    };
                    let response = Some(protocol.respond(response, state));
                    this.stage.set(Stage::Learning { learning, response });
                    continue;
                }
                StageProj::Learning { learning, response } => {
                    ready!(learning.as_mut().poll(cx));
                    return Poll::Ready(Ok(take(response)));
                }
                StageProj::Rejecting { response } => return Pin::new(response).poll(cx).map(Ok),
            };
            let rejection = match verdict {
                Ok(None) => None,
                Ok(Some(waiter)) => {
                    let (waiter, request) = (Some(waiter), request.take());
                    this.stage.set(Stage::Waiting { waiter, request });
                    continue;
                }
                Err(rejection) => shared.reject(rejection, &mut bill),
            };
            if let Some(rejection) = rejection {
                let (head, _) = request.as_ref().expect(TAKEN);
                let rejected = protocol.reject(rejection, head, &bill.charge);
                *request = None;
                match rejected {
                    Rejected::Now(response) => return Poll::Ready(Ok(response)),
                    Rejected::Later(response) => this.stage.set(Stage::Rejecting { response }),
                }
                continue;
            }
            // After the decision: a denied request never waits for the service, and a request that
            // waits for its quota does not hold a place that `poll_ready` has reserved.
            match this.inner.poll_ready(cx) {
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => {
                    let (bill, request) = (Some(bill.keep()), request.take());
                    this.stage.set(Stage::Readying { bill, request });
                    return Poll::Pending;
                }
            }
            shared.begin(&mut bill, state);
            protocol.annotate(&mut request.as_mut().expect(TAKEN).0, state);
            let (head, rest) = take(request);
            let future = this.inner.call(P::join(head, rest));
            this.stage.set(Stage::Calling { future });
        }
    }
}

impl<P: ProtocolBase> Shared<P> {
    /// Keeps what the response needs of a request whose service is called now.
    #[inline]
    fn begin(&self, bill: &mut Bill<'_>, state: &mut ChargeState) {
        if self.protocol.shares_holds() || self.protocol.learns() || bill.may_hold() {
            *state = self.begin_with_charge(bill);
        } else if let Some(decision) = bill.end()
            && self.protocol.reports()
        {
            *state = ChargeState::Counted(decision, Charge::exempt());
        }
    }

    #[inline(never)]
    fn begin_with_charge(&self, bill: &mut Bill<'_>) -> ChargeState {
        let (shares, learns) = (self.protocol.shares_holds(), self.protocol.learns());
        if learns {
            bill.charge();
        }
        let holds = bill.hold(shares);
        let decision = bill.end().filter(|_| learns || self.protocol.reports());
        let charge = mem::replace(&mut bill.charge, Charge::exempt());
        match (decision.map(|decision| (decision, charge)), holds) {
            (counted, Some(holds)) => ChargeState::Held(counted, holds),
            (Some((decision, charge)), None) => ChargeState::Counted(decision, charge),
            (None, None) => ChargeState::Exempt,
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
