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
        // Until the inner service is called.
        head: Option<<P as Protocol>::Head>,
        rest: Option<P::Rest>,
        // In a box, as with a store in memory most requests need none, and a small future is moved about faster.
        turn: Option<Box<Turn>>,
        // Of a request without a turn.
        charged: Charged,
        #[pin]
        state: State<S::Future, <P as Protocol>::Head>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<F, H> {
        Starting,
        LookingUp { charge: Lookup<H> },
        // With the service that was ready, unless the request has waited.
        Asking { ready: bool },
        Readying,
        Calling { #[pin] future: F },
    }
}

impl<S, P, Req> ResponseFuture<S, P, Req>
where
    S: Service<Req>,
    P: Exchange<Req, S::Response>,
{
    pub(crate) fn new(ready: S, shared: Arc<Shared<P>>, request: Req) -> Self {
        let (head, rest) = P::split(request);
        let (head, rest) = (Some(head), Some(rest));
        let charged = Charged::nothing();
        Self { shared, inner: ready, head, rest, turn: None, charged, state: State::Starting }
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
            let start = match this.state.as_mut().project() {
                StateProj::Starting => {
                    let head = this.head.as_ref().expect("the head was taken");
                    match protocol.charging().charge(head) {
                        Ruling::Now(charge) => this.shared.start(head, charge, this.charged),
                        Ruling::Later(rule) => {
                            let head = this.head.take().expect("the head was taken");
                            this.state.set(State::LookingUp { charge: rule.later(head) });
                            continue;
                        }
                    }
                }
                StateProj::LookingUp { charge } => {
                    let (head, charge) = ready!(charge.as_mut().poll(cx));
                    let charge = protocol.charging().complete(&head, charge);
                    let start = this.shared.start(&head, charge, this.charged);
                    *this.head = Some(head);
                    start
                }
                StateProj::Asking { ready } => {
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
                            Start::Refused(Rejection::Denied(decision))
                        }
                        Poll::Ready(Ok(decision)) => {
                            this.charged.decision = Some(decision);
                            if !*ready {
                                this.state.set(State::Readying);
                                continue;
                            }
                            this.charged.charge = turn.go();
                            Start::Go
                        }
                        Poll::Ready(Err(error)) => {
                            let left = turn.left();
                            this.charged.charge = turn.go();
                            let head = this.head.as_ref().expect("the head was taken");
                            match this.shared.undecided(head, error, this.charged, left) {
                                Start::Ask(share) => {
                                    *turn = share;
                                    continue;
                                }
                                Start::Go if !*ready => {
                                    *this.turn = None;
                                    this.state.set(State::Readying);
                                    continue;
                                }
                                start => start,
                            }
                        }
                    }
                }
                StateProj::Readying => {
                    if let Err(error) = ready!(this.inner.poll_ready(cx)) {
                        *this.turn = None;
                        return Poll::Ready(Err(error));
                    }
                    if let Some(turn) = this.turn {
                        this.charged.charge = turn.go();
                    }
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
                    *this.turn = Some(turn);
                    this.state.set(State::Asking { ready: true });
                    continue;
                }
                Start::Refused(Rejection::Denied(decision)) if this.shared.dry_run => {
                    this.charged.decision = Some(decision);
                }
                Start::Refused(_) if this.shared.dry_run => {}
                Start::Refused(rejection) => {
                    let head = this.head.take().expect("the head was taken");
                    let charge = &this.charged.charge;
                    return Poll::Ready(Ok(protocol.refuse(rejection, head, charge)));
                }
            }
            *this.turn = None;
            let head = this.head.take().expect("the head was taken");
            let rest = this.rest.take().expect("the request was taken");
            let future = this.inner.call(protocol.join(head, rest, this.charged));
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
