use std::{
    fmt, mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use pin_project_lite::pin_project;
use tower_service::Service;

use crate::{
    charge::Charge,
    decision::Decision,
    layer::{Shared, Start},
    protocol::{Charged, Exchange, Protocol, Rejection},
    rule::{Lookup, Ruling},
    store::Answer,
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
        #[pin]
        state: State<S::Future, <P as Protocol>::Head, P::Rest>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<F, H, R> {
        // The head is away while the charge is looked up.
        Before { head: Option<H>, rest: Option<R>, phase: Phase<H> },
        Calling { charged: Charged, #[pin] future: F },
    }
}

/// What is small, so that little is moved about for a request that goes on at once.
enum Phase<H> {
    Starting,
    LookingUp(Lookup<H>),
    /// With the service that was ready, unless the request has waited.
    Asking {
        turn: Box<Turn>,
        ready: bool,
    },
    Readying {
        turn: Box<Turn>,
        decision: Option<Box<Decision>>,
    },
}

impl<H> Phase<H> {
    /// Goes on when the service is ready.
    fn ready_then(&mut self, decision: Option<Decision>) {
        if let Self::Asking { turn, .. } = mem::replace(self, Self::Starting) {
            *self = Self::Readying { turn, decision: decision.map(Box::new) };
        }
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
        let state = State::Before { head, rest, phase: Phase::Starting };
        Self { shared, inner: ready, state }
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
            let (head, rest, phase) = match this.state.as_mut().project() {
                StateProj::Before { head, rest, phase } => (head, rest, phase),
                StateProj::Calling { charged, future } => {
                    let (response, counts) = protocol.charges(ready!(future.poll(cx))?);
                    let response = protocol.respond(response, charged);
                    if !counts && let Some(decision) = charged.decision {
                        let charge = mem::replace(&mut charged.charge, Charge::exempt());
                        charge.give_back_later(Answer::ready(Ok(decision)), None);
                    }
                    return Poll::Ready(Ok(response));
                }
            };
            let start = match phase {
                Phase::Starting => {
                    let there = head.as_ref().expect("the head was taken");
                    match protocol.charging().charge(there) {
                        Ruling::Now(charge) => this.shared.start(there, charge),
                        Ruling::Later(rule) => {
                            let head = head.take().expect("the head was taken");
                            *phase = Phase::LookingUp(rule.later(head));
                            continue;
                        }
                    }
                }
                Phase::LookingUp(charge) => {
                    let (there, charge) = ready!(charge.as_mut().poll(cx));
                    let charge = protocol.charging().complete(&there, charge);
                    let start = this.shared.start(&there, charge);
                    *head = Some(there);
                    start
                }
                Phase::Asking { turn, ready } => match turn.poll(cx) {
                    Poll::Pending => {
                        if *ready && turn.is_waiting() {
                            *ready = false;
                            // The fresh clone is not ready, so that nobody waits for what this holds.
                            *this.inner = this.inner.clone();
                        }
                        return Poll::Pending;
                    }
                    Poll::Ready(Ok(decision)) if !decision.is_allowed() => {
                        Start::Refused(Rejection::Denied(decision), turn.go())
                    }
                    Poll::Ready(Ok(decision)) if *ready => {
                        Start::Go(Charged { charge: turn.go(), decision: Some(decision) })
                    }
                    Poll::Ready(Ok(decision)) => {
                        phase.ready_then(Some(decision));
                        continue;
                    }
                    Poll::Ready(Err(error)) => {
                        let (left, charge) = (turn.left(), turn.go());
                        let head = head.as_ref().expect("the head was taken");
                        match this.shared.undecided(head, error, charge, left) {
                            Start::Ask(share) => {
                                *turn = share;
                                continue;
                            }
                            Start::Go(Charged { decision, .. }) if !*ready => {
                                phase.ready_then(decision);
                                continue;
                            }
                            start => start,
                        }
                    }
                },
                Phase::Readying { turn, decision } => {
                    if let Err(error) = ready!(this.inner.poll_ready(cx)) {
                        *phase = Phase::Starting;
                        return Poll::Ready(Err(error));
                    }
                    Start::Go(Charged { charge: turn.go(), decision: decision.as_deref().copied() })
                }
            };
            let charged = match start {
                Start::Go(charged) => charged,
                Start::Ask(turn) => {
                    *phase = Phase::Asking { turn, ready: true };
                    continue;
                }
                Start::Refused(rejection, charge) if this.shared.dry_run => {
                    let decision = match rejection {
                        Rejection::Denied(decision) => Some(decision),
                        _ => None,
                    };
                    Charged { charge, decision }
                }
                Start::Refused(rejection, charge) => {
                    let head = head.take().expect("the head was taken");
                    return Poll::Ready(Ok(protocol.refuse(rejection, head, &charge)));
                }
            };
            let head = head.take().expect("the head was taken");
            let rest = rest.take().expect("the request was taken");
            let future = this.inner.call(protocol.join(head, rest, &charged));
            this.state.set(State::Calling { charged, future });
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
