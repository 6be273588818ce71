//! The path of a request through the layer: its charge, the decision, the readiness of the service,
//! the call. Each state has a method that determines the next step by the rules of `admission.rs`.

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
    error::Error,
    limiter::{Acquire, Charge, Learning},
    middleware::{
        admission::{Next, Shared},
        pricing::{ChargeState, Resolved, poll_or},
        protocol::{Protocol, ProtocolBase, Rejected},
        rejection::{Rejection, RequestError},
        rule::{DynRule, Lookup},
    },
};

pin_project! {
    /// The response of [`RateLimit`](crate::layer::RateLimit).
    ///
    /// It resolves to the response or the error of the service, to an error of the service's
    /// `poll_ready`, or to a rejection. A rejection never waits for the service.
    ///
    /// # Cancel safety
    ///
    /// Dropping it before its first poll spends nothing. If it is dropped before the service is
    /// called, or if the service fails or panics instead of becoming ready, the units that the
    /// request has spent or reserved are released exactly once; requests queued behind it keep
    /// their reservations. In memory the release happens in the drop, with Redis in the background:
    /// see [dropped requests](crate::guide::redis_capacity#dropped-requests). If it is dropped
    /// after the service is called, the cost stays spent, and what the request holds counts as
    /// used.
    pub struct ResponseFuture<S, P, Req>
    where
        S: Service<Req>,
        P: Protocol<Req, S::Response>,
    {
        call: Call<S, P>,
        #[pin]
        state: State<S::Future, P::Head, P::Rest, P::Rejecting, P::Response>,
    }
}

pin_project! {
    // An `Acquire` is boxed, because most requests to a store in memory have none, and a small
    // future is moved faster.
    #[project = StateProj]
    enum State<F, H, R, J, T> {
        Starting { request: Option<(H, R)> },
        Resolving { lookup: Lookup<H>, rest: Option<R> },
        Waiting { waiting: Option<(Box<Acquire>, (H, R))> },
        Readying { admitted: Option<(Option<Box<Acquire>>, (H, R))> },
        Calling { #[pin] future: F },
        Learning { learning: Option<Box<(Learning, T)>> },
        Rejecting { rejecting: J },
    }
}

/// The data that all states use.
struct Call<S, P> {
    shared: Arc<Shared<P>>,
    inner: S,
    charge: ChargeState,
}

/// The step from one state to the next. Small, as each request moves it: it holds no response.
enum Step<H, E> {
    Resolve(Arc<dyn DynRule<H>>),
    Wait(Box<Acquire>),
    /// The service is not ready. An `Acquire`, if there is one, releases the charge if it
    /// is dropped.
    AwaitReadiness(Option<Box<Acquire>>),
    Call,
    Reject(Rejection),
    Fail(E),
}

type StepOf<S, P, Req> = Step<<P as ProtocolBase>::Head, <S as Service<Req>>::Error>;

impl<S, P, Req> ResponseFuture<S, P, Req>
where
    S: Service<Req>,
    P: Protocol<Req, S::Response>,
{
    pub(crate) fn new(inner: S, shared: Arc<Shared<P>>, request: Req) -> Self {
        let call = Call { shared, inner, charge: ChargeState::new() };
        Self { call, state: State::Starting { request: Some(P::split(request)) } }
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
        let this = self.project();
        let (call, mut state) = (this.call, this.state);
        loop {
            // Only this function moves the head and the rest. Methods that take them by value cost
            // about 20 ns per request.
            let (mut head, rest);
            let step: StepOf<S, P, Req> = match state.as_mut().project() {
                StateProj::Starting { request } => {
                    let step = call.start(cx, &request.as_ref().expect(TAKEN).0);
                    (head, rest) = take(request);
                    step
                }
                StateProj::Resolving { lookup, rest: kept } => {
                    let charge;
                    (head, charge) = ready!(lookup.as_mut().poll(cx));
                    rest = take(kept);
                    call.resolved(cx, &head, charge)
                }
                StateProj::Waiting { waiting } => {
                    let result = ready!(waiting.as_mut().expect(TAKEN).0.poll(cx));
                    let acquire;
                    (acquire, (head, rest)) = take(waiting);
                    call.waited(cx, &head, acquire, result)
                }
                // After the decision: a denied request never waits for the service, and a request
                // that waits for its quota does not hold a place that `poll_ready` has reserved.
                StateProj::Readying { admitted } => {
                    let readiness = ready!(call.inner.poll_ready(cx));
                    let acquire;
                    (acquire, (head, rest)) = take(admitted);
                    call.proceed(acquire, Poll::Ready(readiness))
                }
                StateProj::Calling { future } => {
                    let result = ready!(future.poll(cx));
                    let learning = result.as_ref().ok().and_then(|it| call.learn::<Req>(it));
                    let result = call.respond::<Req>(result);
                    let (Some(learning), true) = (learning, result.is_ok()) else {
                        return Poll::Ready(result);
                    };
                    let learning = result.ok().map(|response| Box::new((learning, response)));
                    state.set(State::Learning { learning });
                    continue;
                }
                // The response arrives after the block, which then holds for a retry.
                StateProj::Learning { learning } => {
                    ready!(learning.as_mut().expect(TAKEN).0.as_mut().poll(cx));
                    return Poll::Ready(Ok(take(learning).1));
                }
                StateProj::Rejecting { rejecting } => return Pin::new(rejecting).poll(cx).map(Ok),
            };
            match step {
                Step::Resolve(rule) => {
                    let (lookup, rest) = (rule.look_up(head), Some(rest));
                    state.set(State::Resolving { lookup, rest });
                }
                Step::Wait(acquire) => {
                    let waiting = Some((acquire, (head, rest)));
                    state.set(State::Waiting { waiting });
                }
                Step::AwaitReadiness(acquire) => {
                    let admitted = Some((acquire, (head, rest)));
                    state.set(State::Readying { admitted });
                    return Poll::Pending;
                }
                Step::Call => {
                    // From here on the cost stays spent: the service may do its work.
                    call.charge.begin_holds(call.shared.protocol.shares_holds());
                    call.shared.protocol.annotate(&mut head, &mut call.charge);
                    let future = call.inner.call(P::join(head, rest));
                    state.set(State::Calling { future });
                }
                Step::Reject(rejection) => {
                    let (protocol, charge) = (&call.shared.protocol, &call.charge.charge);
                    match protocol.reject(rejection, &head, charge) {
                        Rejected::Now(response) => return Poll::Ready(Ok(response)),
                        Rejected::Later(rejecting) => state.set(State::Rejecting { rejecting }),
                    }
                }
                Step::Fail(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl<S, P> Call<S, P> {
    /// Resolves the charge, and decides about it if it needs no lookup.
    #[inline]
    fn start<Req>(&mut self, cx: &mut Context<'_>, head: &P::Head) -> StepOf<S, P, Req>
    where
        S: Service<Req>,
        P: Protocol<Req, S::Response>,
    {
        let Self { shared, inner, charge: state } = self;
        let mut readiness = None;
        let next = match shared.protocol.pricing().resolve(head) {
            Resolved::Key(limiter, extractor) => {
                let is_ready = || {
                    let polled = readiness.insert(inner.poll_ready(cx));
                    matches!(polled, Poll::Ready(Ok(())))
                };
                shared.admit_by_key(head, limiter, extractor, state, is_ready)
            }
            Resolved::Charge(charge) => shared.admit(head, charge, state),
            Resolved::Lookup(rule) => return Step::Resolve(rule),
        };
        self.follow(cx, next, readiness)
    }

    fn resolved<Req>(
        &mut self,
        cx: &mut Context<'_>,
        head: &P::Head,
        charge: Result<Charge, RequestError>,
    ) -> StepOf<S, P, Req>
    where
        S: Service<Req>,
        P: Protocol<Req, S::Response>,
    {
        let charge = self.shared.protocol.pricing().complete(head, charge);
        let next = self.shared.admit(head, charge, &mut self.charge);
        self.follow(cx, next, None)
    }

    fn waited<Req>(
        &mut self,
        cx: &mut Context<'_>,
        head: &P::Head,
        acquire: Box<Acquire>,
        result: Result<Decision, Error>,
    ) -> StepOf<S, P, Req>
    where
        S: Service<Req>,
        P: Protocol<Req, S::Response>,
    {
        let next = self.shared.after_wait(head, acquire, result, &mut self.charge);
        self.follow(cx, next, None)
    }

    #[inline]
    fn follow<Req>(
        &mut self,
        cx: &mut Context<'_>,
        next: Next,
        readiness: Option<Poll<Result<(), S::Error>>>,
    ) -> StepOf<S, P, Req>
    where
        S: Service<Req>,
        P: Protocol<Req, S::Response>,
    {
        match next {
            Next::Proceed(acquire) => {
                let Self { inner, charge, .. } = self;
                // An `Acquire` releases its charge by itself.
                let release = || drop(charge.take_acquire());
                let poll = || poll_or(release, || inner.poll_ready(cx));
                let readiness = readiness.unwrap_or_else(poll);
                self.proceed(acquire, readiness)
            }
            Next::Wait(acquire) => Step::Wait(acquire),
            Next::Reject(rejection) => Step::Reject(rejection),
        }
    }

    #[inline]
    fn proceed<Req>(
        &mut self,
        acquire: Option<Box<Acquire>>,
        readiness: Poll<Result<(), S::Error>>,
    ) -> StepOf<S, P, Req>
    where
        S: Service<Req>,
        P: Protocol<Req, S::Response>,
    {
        match readiness {
            Poll::Ready(Ok(())) => {
                if let Some(acquire) = acquire {
                    self.charge.take_over(acquire);
                }
                Step::Call
            }
            Poll::Ready(Err(error)) => {
                drop(acquire.or_else(|| self.charge.take_acquire()));
                Step::Fail(error)
            }
            Poll::Pending => {
                let mut acquire = acquire.or_else(|| self.charge.take_acquire());
                acquire.iter_mut().for_each(|acquire| acquire.keep_holds());
                Step::AwaitReadiness(acquire)
            }
        }
    }

    /// Returns the call by which the limit adopts what a response says, if it says anything new.
    #[inline]
    fn learn<Req>(&self, response: &S::Response) -> Option<Learning>
    where
        S: Service<Req>,
        P: Protocol<Req, S::Response>,
    {
        let state = self.shared.protocol.learned(response)?;
        let remaining = self.charge.decision.as_ref()?.remaining();
        self.charge.charge.learn(state, remaining)
    }

    /// Converts the response of the service. A request that fails ends what it holds, as used.
    #[inline]
    fn respond<Req>(
        &mut self,
        result: Result<S::Response, S::Error>,
    ) -> Result<P::Response, S::Error>
    where
        S: Service<Req>,
        P: Protocol<Req, S::Response>,
    {
        match result {
            Ok(response) => Ok(self.shared.protocol.respond(response, &mut self.charge)),
            Err(error) => {
                drop(self.charge.holds.take());
                Err(error)
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
