//! The way of a request through the layer: its charge, the decision, the readiness of the service, the call.

use std::{
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use pin_project_lite::pin_project;
use tower_service::Service;

use crate::{
    limiter::Turn,
    middleware::admission::{Shared, Start},
    middleware::protocol::{Charged, Exchange, Protocol, Rejection},
    middleware::rule::{Lookup, Ruling},
};

pin_project! {
    /// The response of [`RateLimit`](crate::RateLimit).
    ///
    /// It resolves to the response or the error of the service, to an error of the service's `poll_ready`, or to
    /// a rejection. A rejection never waits for the service.
    ///
    /// # Cancel safety
    ///
    /// Dropping it before its first poll spends nothing. If it is dropped before the service is called, or if
    /// the service fails to become ready, what the request has spent or reserved is released exactly once;
    /// requests queued behind it keep their reservations. In memory the release happens in the drop, with Redis
    /// in the background: see [there](crate::operation#requests-that-vanish). Dropping it
    /// after the service is called spends the cost.
    pub struct ResponseFuture<S, P, Req>
    where
        S: Service<Req>,
        P: Exchange<Req, S::Response>,
    {
        shared: Arc<Shared<P>>,
        inner: S,
        // What is released if the request does not go on. In a box, as with a store in memory most requests need
        // none, and a small future is moved about faster.
        turn: Option<Box<Turn>>,
        // Of a request without a turn.
        charged: Charged,
        #[pin]
        state: State<Req, S::Future, <P as Protocol>::Head, P::Rest>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<Req, F, H, R> {
        Starting { request: Option<Req> },
        LookingUp { charge: Lookup<H>, rest: Option<R> },
        Asking { request: Option<Req> },
        Readying { request: Option<Req> },
        Calling { #[pin] future: F },
    }
}

impl<S, P, Req> ResponseFuture<S, P, Req>
where
    S: Service<Req>,
    P: Exchange<Req, S::Response>,
{
    pub(crate) fn new(inner: S, shared: Arc<Shared<P>>, request: Req) -> Self {
        Self {
            shared,
            inner,
            turn: None,
            charged: Charged::nothing(),
            state: State::Starting { request: Some(request) },
        }
    }

    fn take_apart(request: &mut Option<Req>) -> (P::Head, P::Rest) {
        P::split(request.take().expect("the request was taken"))
    }
}

impl<S, P, Req> Future for ResponseFuture<S, P, Req>
where
    S: Service<Req> + Clone,
    P: Exchange<Req, S::Response>,
{
    type Output = Result<P::Response, S::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        let protocol = &this.shared.protocol;
        loop {
            let (mut head, rest);
            let mut readiness = None;
            let start = match this.state.as_mut().project() {
                StateProj::Starting { request } => {
                    (head, rest) = Self::take_apart(request);
                    match protocol.charging().charge(&head) {
                        Ruling::Key(limiter, extractor) => {
                            let inner = &mut *this.inner;
                            let readiness = &mut readiness;
                            let is_ready = || {
                                let polled = readiness.insert(inner.poll_ready(cx));
                                matches!(polled, Poll::Ready(Ok(())))
                            };
                            let charged = &mut *this.charged;
                            this.shared.start_by_key(&head, limiter, extractor, charged, is_ready)
                        }
                        Ruling::Now(charge) => this.shared.start(&head, charge, this.charged),
                        Ruling::Later(rule) => {
                            let (charge, rest) = (rule.later(head), Some(rest));
                            this.state.set(State::LookingUp { charge, rest });
                            continue;
                        }
                    }
                }
                StateProj::LookingUp { charge, rest: kept } => {
                    let (looked_at, charge) = ready!(charge.as_mut().poll(cx));
                    (head, rest) = (looked_at, kept.take().expect("the request was taken"));
                    let charge = protocol.charging().complete(&head, charge);
                    this.shared.start(&head, charge, this.charged)
                }
                StateProj::Asking { request } => {
                    let mut turn = this.turn.take().expect("the turn was taken");
                    let Poll::Ready(answer) = turn.poll(cx) else {
                        *this.turn = Some(turn);
                        return Poll::Pending;
                    };
                    (head, rest) = Self::take_apart(request);
                    match answer {
                        Ok(decision) if decision.is_allowed() => {
                            this.charged.decision = Some(decision);
                            *this.turn = Some(turn);
                            Start::Go
                        }
                        Ok(decision) => {
                            this.charged.charge = turn.go();
                            Start::Refused(Rejection::Denied(decision))
                        }
                        Err(error) => {
                            let left = turn.left();
                            this.charged.charge = turn.go();
                            this.shared.undecided(&head, error, this.charged, left)
                        }
                    }
                }
                StateProj::Readying { request } => {
                    readiness = Some(Poll::Ready(ready!(this.inner.poll_ready(cx))));
                    (head, rest) = Self::take_apart(request);
                    Start::Go
                }
                StateProj::Calling { future } => {
                    let response = ready!(future.poll(cx))?;
                    return Poll::Ready(Ok(protocol.respond(response, this.charged)));
                }
            };
            match start {
                Start::Go => {}
                Start::EngineRequest(turn) => {
                    let request = Some(P::join(head, rest));
                    *this.turn = Some(turn);
                    this.state.set(State::Asking { request });
                    continue;
                }
                Start::Refused(Rejection::Denied(decision)) if this.shared.dry_run => {
                    this.charged.decision = Some(decision);
                }
                Start::Refused(_) if this.shared.dry_run => {}
                Start::Refused(rejection) => {
                    let charge = &this.charged.charge;
                    return Poll::Ready(Ok(protocol.refuse(rejection, head, charge)));
                }
            }
            match readiness.unwrap_or_else(|| this.inner.poll_ready(cx)) {
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(error)) => {
                    drop(this.turn.take().or_else(|| this.charged.hold()));
                    return Poll::Ready(Err(error));
                }
                Poll::Pending => {
                    *this.turn = this.turn.take().or_else(|| this.charged.hold());
                    let request = Some(P::join(head, rest));
                    this.state.set(State::Readying { request });
                    return Poll::Pending;
                }
            }
            if let Some(mut turn) = this.turn.take() {
                this.charged.charge = turn.go();
            }
            protocol.mark(&mut head, this.charged);
            let future = this.inner.call(P::join(head, rest));
            this.state.set(State::Calling { future });
        }
    }
}

impl<S, P, Req> fmt::Debug for ResponseFuture<S, P, Req>
where
    S: Service<Req>,
    P: Exchange<Req, S::Response>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}
