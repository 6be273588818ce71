use std::{
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use pin_project_lite::pin_project;
use tower_service::Service;

use crate::{
    decision::Decision,
    key::Key,
    layer::{Shared, Start},
    protocol::{Exchange, Protocol, Rejection},
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
        request: Option<(<P as Protocol>::Head, P::Rest)>,
        // Until the inner service is called.
        turn: Option<Turn>,
        #[pin]
        state: State<S::Future>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<F> {
        Starting,
        Checking,
        Waiting { decision: Decision },
        Readying { decision: Decision },
        Calling {
            decision: Option<Decision>,
            // If it depends on the response whether it is charged.
            key: Option<Key<'static>>,
            #[pin]
            future: F,
        },
    }
}

impl<S, P, Req> ResponseFuture<S, P, Req>
where
    S: Service<Req>,
    P: Exchange<Req, S::Response>,
{
    pub(crate) fn new(ready: S, shared: Arc<Shared<P>>, request: Req) -> Self {
        let request = Some(P::split(request));
        Self { shared, inner: ready, request, turn: None, state: State::Starting }
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
            let outcome = match this.state.as_mut().project() {
                StateProj::Starting => {
                    let (head, _) = this.request.as_ref().expect("the request was taken");
                    match this.shared.start(head) {
                        Ok(Start::Exempt) => Ok((None, None)),
                        Ok(Start::Go(decision, key)) => Ok((Some(decision), Some(key))),
                        Ok(Start::Ask(turn)) => {
                            *this.turn = Some(turn);
                            this.state.set(State::Checking);
                            continue;
                        }
                        Err(rejection) => Err(rejection),
                    }
                }
                StateProj::Checking => {
                    let turn = this.turn.as_mut().expect("the turn was taken");
                    match ready!(turn.poll_answer(cx)) {
                        Ok(decision) if !decision.is_allowed() => Err(Rejection::Denied(decision)),
                        Ok(decision) if decision.delay().is_zero() => Ok((Some(decision), None)),
                        Ok(decision) => {
                            // The fresh clone is not ready, so that nobody waits for what this holds.
                            *this.inner = this.inner.clone();
                            this.state.set(State::Waiting { decision });
                            continue;
                        }
                        Err(error) => Err(Rejection::Store(error)),
                    }
                }
                StateProj::Waiting { decision } => {
                    ready!(this.turn.as_mut().expect("the turn was taken").poll_sleep(cx));
                    let decision = *decision;
                    this.state.set(State::Readying { decision });
                    continue;
                }
                StateProj::Readying { decision } => {
                    if let Err(error) = ready!(this.inner.poll_ready(cx)) {
                        *this.turn = None;
                        return Poll::Ready(Err(error));
                    }
                    Ok((Some(*decision), None))
                }
                StateProj::Calling { decision, key, future } => {
                    let (response, charged) = protocol.charges(ready!(future.poll(cx))?);
                    if let (Some(key), Some(decision)) = (key.take(), *decision)
                        && !charged
                    {
                        let answer = Answer::ready(Ok(decision));
                        this.shared.limiter.give_back_later(key, answer, None);
                    }
                    return Poll::Ready(Ok(protocol.respond(response, decision.as_ref())));
                }
            };
            let (head, rest) = this.request.take().expect("the request was taken");
            let (decision, key) = match outcome {
                Ok(charged) => charged,
                Err(Rejection::Denied(decision)) if this.shared.dry_run => (Some(decision), None),
                Err(_) if this.shared.dry_run => (None, None),
                Err(rejection) => {
                    *this.turn = None;
                    return Poll::Ready(Ok(protocol.refuse(rejection, head)));
                }
            };
            let key = this.turn.take().and_then(Turn::go).or(key);
            let key = key.filter(|_| protocol.charges_by_outcome());
            let future = this.inner.call(protocol.join(head, rest, decision.as_ref()));
            this.state.set(State::Calling { decision, key, future });
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
