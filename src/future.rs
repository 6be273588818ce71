use std::{
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use pin_project_lite::pin_project;
use tower_service::Service;

use crate::{
    protocol::{Charged, Exchange, Protocol, Rejection},
    rule::{Lookup, Ruling},
    shared::{Shared, Start},
    turn::Turn,
};

pin_project! {
    /// The response of [`RateLimit`](crate::RateLimit).
    ///
    /// # Cancel safety
    ///
    /// Dropping it before its first poll spends nothing. Dropping it before the service is called, while it
    /// asks the store, waits for its turn or for the service to be ready, gives back what the request has
    /// spent or booked, once, and the requests behind it keep their turns: in memory in the drop, in Redis by
    /// a task on the runtime. If that is shutting down, the turn passes unused. Dropping it later spends the
    /// cost.
    pub struct ResponseFuture<S, P, Req>
    where
        S: Service<Req>,
        P: Exchange<Req, S::Response>,
    {
        shared: Arc<Shared<P>>,
        inner: S,
        // In a box, as with a store in memory most requests need none, and a small future is moved about faster.
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
        // With the service that was ready, unless the request has waited.
        Asking { request: Option<Req>, ready: bool },
        Readying { request: Option<Req> },
        Calling { #[pin] future: F },
    }
}

impl<S, P, Req> ResponseFuture<S, P, Req>
where
    S: Service<Req>,
    P: Exchange<Req, S::Response>,
{
    pub(crate) fn new(ready: S, shared: Arc<Shared<P>>, request: Req) -> Self {
        Self {
            shared,
            inner: ready,
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
            let start = match this.state.as_mut().project() {
                StateProj::Starting { request } => {
                    (head, rest) = Self::take_apart(request);
                    match protocol.charging().charge(&head) {
                        Ruling::Key(limiter, extractor) => {
                            this.shared.start_by_key(&head, limiter, extractor, this.charged)
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
                StateProj::Asking { request, ready } => {
                    let turn = this.turn.as_mut().expect("the turn was taken");
                    match turn.poll(cx) {
                        Poll::Pending => {
                            if *ready && turn.is_waiting() {
                                *ready = false;
                                // The fresh clone is not ready, so that nobody waits for what this holds.
                                *this.inner = this.inner.clone();
                            }
                            return Poll::Pending;
                        }
                        Poll::Ready(Ok(decision)) if !decision.is_allowed() => {
                            this.charged.charge = turn.go();
                            (head, rest) = Self::take_apart(request);
                            Start::Refused(Rejection::Denied(decision))
                        }
                        Poll::Ready(Ok(decision)) => {
                            this.charged.decision = Some(decision);
                            if !*ready {
                                let request = request.take();
                                this.state.set(State::Readying { request });
                                continue;
                            }
                            this.charged.charge = turn.go();
                            (head, rest) = Self::take_apart(request);
                            Start::Go
                        }
                        Poll::Ready(Err(error)) => {
                            let left = turn.left();
                            this.charged.charge = turn.go();
                            (head, rest) = Self::take_apart(request);
                            match this.shared.undecided(&head, error, this.charged, left) {
                                Start::Ask(share) => {
                                    *turn = share;
                                    *request = Some(P::join(head, rest));
                                    continue;
                                }
                                Start::Go if !*ready => {
                                    *this.turn = None;
                                    let request = Some(P::join(head, rest));
                                    this.state.set(State::Readying { request });
                                    continue;
                                }
                                start => start,
                            }
                        }
                    }
                }
                StateProj::Readying { request } => {
                    if let Err(error) = ready!(this.inner.poll_ready(cx)) {
                        *this.turn = None;
                        return Poll::Ready(Err(error));
                    }
                    if let Some(turn) = this.turn {
                        this.charged.charge = turn.go();
                    }
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
                Start::Ask(turn) => {
                    let request = Some(P::join(head, rest));
                    *this.turn = Some(turn);
                    this.state.set(State::Asking { request, ready: true });
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
            *this.turn = None;
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
