use std::{
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use pin_project_lite::pin_project;
use tokio::time::{Sleep, sleep};
use tower_service::Service;

use crate::{
    algorithm::Action,
    decision::Decision,
    layer::Shared,
    protocol::{Charge, Exchange, Protocol, Rejection},
    store::Answer,
};

pin_project! {
    /// The response of [`RateLimit`](crate::RateLimit).
    ///
    /// # Cancel safety
    ///
    /// Dropping it before its first poll spends nothing. After that the request may have been charged;
    /// dropping it while it waits leaves its turn unused.
    pub struct ResponseFuture<S, P, Req>
    where
        S: Service<Req>,
        P: Exchange<Req, S::Response>,
    {
        shared: Arc<Shared<P>>,
        inner: S,
        request: Option<(<P as Protocol>::Head, P::Rest)>,
        #[pin]
        state: State<S::Future>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<F> {
        Starting,
        Checking { answer: Answer<Decision> },
        Waiting { decision: Decision, #[pin] sleep: Sleep },
        Readying { decision: Decision },
        Calling { decision: Option<Decision>, #[pin] future: F },
    }
}

impl<S, P, Req> ResponseFuture<S, P, Req>
where
    S: Service<Req>,
    P: Exchange<Req, S::Response>,
{
    pub(crate) fn new(ready: S, shared: Arc<Shared<P>>, request: Req) -> Self {
        let request = Some(P::split(request));
        Self { shared, inner: ready, request, state: State::Starting }
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
            let admitted = match this.state.as_mut().project() {
                StateProj::Starting => {
                    let (head, _) = this.request.as_ref().expect("the request was taken");
                    let answer = match protocol.charging().charge(head) {
                        Ok(Charge::Exempt) => None,
                        Ok(Charge::Spend { key, cost }) => {
                            let answer = this.shared.limiter.start(Action::Check, &key, cost);
                            Some(answer.map_err(Rejection::from))
                        }
                        Err(error) => Some(Err(Rejection::Request(error))),
                    };
                    match answer {
                        None => None,
                        Some(Ok(answer)) => {
                            this.state.set(State::Checking { answer });
                            continue;
                        }
                        Some(Err(rejection)) => {
                            return refuse::<P, _, _, _>(protocol, rejection, this.request);
                        }
                    }
                }
                StateProj::Checking { answer } => {
                    let decision = match ready!(Pin::new(answer).poll(cx)) {
                        Ok(decision) if decision.is_allowed() => decision,
                        Ok(denied) => {
                            let rejection = Rejection::Denied(denied);
                            return refuse::<P, _, _, _>(protocol, rejection, this.request);
                        }
                        Err(error) => {
                            let rejection = Rejection::Store(error);
                            return refuse::<P, _, _, _>(protocol, rejection, this.request);
                        }
                    };
                    if !decision.delay().is_zero() {
                        // The fresh clone is not ready, so that nobody waits for what this holds.
                        *this.inner = this.inner.clone();
                        let sleep = sleep(decision.delay());
                        this.state.set(State::Waiting { decision, sleep });
                        continue;
                    }
                    Some(decision)
                }
                StateProj::Waiting { decision, sleep } => {
                    ready!(sleep.poll(cx));
                    let decision = *decision;
                    this.state.set(State::Readying { decision });
                    continue;
                }
                StateProj::Readying { decision } => {
                    ready!(this.inner.poll_ready(cx))?;
                    Some(*decision)
                }
                StateProj::Calling { decision, future } => {
                    let response = ready!(future.poll(cx))?;
                    return Poll::Ready(Ok(protocol.respond(response, decision.as_ref())));
                }
            };
            let (head, rest) = this.request.take().expect("the request was taken");
            let request = protocol.join(head, rest, admitted.as_ref());
            let future = this.inner.call(request);
            this.state.set(State::Calling { decision: admitted, future });
        }
    }
}

fn refuse<P, Req, Res, E>(
    protocol: &P,
    rejection: Rejection,
    request: &mut Option<(P::Head, P::Rest)>,
) -> Poll<Result<P::Response, E>>
where
    P: Exchange<Req, Res>,
{
    let (head, _) = request.take().expect("the request was taken");
    Poll::Ready(Ok(protocol.refuse(rejection, head)))
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
