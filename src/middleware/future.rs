//! The path of a request through the layer: its charge, the decision, the readiness of the service,
//! the call. Each state has a method that determines the next step by the rules of `admission.rs`.

use std::{
    fmt,
    marker::PhantomData,
    ops::ControlFlow::{self, Break, Continue},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use pin_project_lite::pin_project;
use tower_service::Service;

use crate::{
    decision::{Decision, Outcome},
    error::Error,
    limiter::{Charge, Learning, Waiter},
    middleware::{
        admission::{Admitted, Next, Shared},
        pricing::{ChargeSource, ChargeState, poll_or},
        protocol::{Protocol, ProtocolBase, Rejected},
        rejection::{Rejection, RequestError},
        rule::{DynRule, Lookup},
    },
};

pin_project! {
    /// The response of [`RateLimit`](crate::layer::RateLimit), whose docs describe it.
    pub struct ResponseFuture<S, P, Req>
    where
        S: Service<Req>,
        P: Protocol<Req, S::Response>,
    {
        call: Call<S, P, Req>,
        #[pin]
        state: State<S::Future, P::Head, P::Rest, P::Rejecting, P::Response>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<F, H, R, J, T> {
        Starting { request: Option<(H, R)> },
        Calling { #[pin] future: F },
        Other { state: Box<Other<H, R, J, T>> },
    }
}

/// The states of few requests.
enum Other<H, R, J, T> {
    Resolving { lookup: Lookup<H>, rest: Option<R> },
    Waiting(Option<Kept<Box<Waiter>, H, R>>),
    Readying(Option<Kept<Option<Box<Waiter>>, H, R>>),
    Learning(Option<(Learning, T)>),
    Rejecting(J),
}

/// A request, and what keeps it from the service.
type Kept<A, H, R> = (A, (H, R));

/// The data that all states use.
struct Call<S, P, Req> {
    shared: Arc<Shared<P>>,
    inner: S,
    charge: ChargeState,
    request: PhantomData<fn(Req)>,
}

/// The step of a request that is not passed to the service now. Small, as denied requests move it:
/// it holds no response.
enum Step<H, E> {
    Resolve(Arc<dyn DynRule<H>>),
    Wait(Box<Waiter>),
    /// The service is not ready. A `Waiter`, if there is one, releases the charge if it
    /// is dropped.
    AwaitReadiness(Option<Box<Waiter>>),
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
        let charge = ChargeState::new();
        let call = Call { shared, inner, charge, request: PhantomData };
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
            match state.as_mut().project() {
                // Most requests go from here to the call. Until then they stay in their place: each
                // move takes a few ns.
                StateProj::Starting { request } => {
                    let (head, _) = request.as_mut().expect(TAKEN);
                    let step = match call.start(cx, head) {
                        Ok(()) => {
                            call.begin(head);
                            let (head, rest) = take(request);
                            let future = call.inner.call(P::join(head, rest));
                            state.set(State::Calling { future });
                            continue;
                        }
                        Err(step) => step,
                    };
                    if let Step::Reject(rejection) = step {
                        let rejected = call.reject(rejection, head);
                        *request = None;
                        match rejected {
                            Rejected::Now(response) => return Poll::Ready(Ok(response)),
                            Rejected::Later(rejecting) => {
                                state.set(State::other(Other::Rejecting(rejecting)));
                            }
                        }
                        continue;
                    }
                    let (head, rest) = take(request);
                    if let Break(result) = Self::follow(call, &mut state, Err(step), head, rest) {
                        return result;
                    }
                }
                StateProj::Calling { future } => {
                    let response = match ready!(future.poll(cx)) {
                        Ok(response) if call.shared.protocol.learns() => {
                            let (learning, response) = Self::learn(call, response);
                            let Some(learning) = learning else {
                                return Poll::Ready(Ok(response));
                            };
                            state.set(State::other(Other::Learning(Some((learning, response)))));
                            continue;
                        }
                        Ok(response) => response,
                        // A request that fails ends what it holds, as used.
                        Err(error) => {
                            drop(call.charge.holds.take());
                            return Poll::Ready(Err(error));
                        }
                    };
                    let response = call.shared.protocol.respond(response, &mut call.charge);
                    return Poll::Ready(Ok(response));
                }
                StateProj::Other { .. } => {
                    if let Break(result) = Self::poll_other(call, &mut state, cx) {
                        return result;
                    }
                }
            }
        }
    }
}

type StateOf<S, P, Req> = State<
    <S as Service<Req>>::Future,
    <P as ProtocolBase>::Head,
    <P as Protocol<Req, <S as Service<Req>>::Response>>::Rest,
    <P as Protocol<Req, <S as Service<Req>>::Response>>::Rejecting,
    <P as Protocol<Req, <S as Service<Req>>::Response>>::Response,
>;

/// The steps of few requests, out of the way of the others.
impl<S, P, Req> ResponseFuture<S, P, Req>
where
    S: Service<Req> + Clone,
    P: Protocol<Req, S::Response>,
{
    #[inline(never)]
    fn poll_other(
        call: &mut Call<S, P, Req>,
        state: &mut Pin<&mut StateOf<S, P, Req>>,
        cx: &mut Context<'_>,
    ) -> ControlFlow<Poll<<Self as Future>::Output>> {
        let StateProj::Other { state: other } = state.as_mut().project() else {
            return Continue(());
        };
        let (step, (head, rest)) = match &mut **other {
            Other::Resolving { lookup, rest } => {
                let Poll::Ready((head, charge)) = lookup.as_mut().poll(cx) else {
                    return Break(Poll::Pending);
                };
                (call.resolved(cx, &head, charge), (head, take(rest)))
            }
            Other::Waiting(waiting) => {
                let (waiter, _) = waiting.as_mut().expect(TAKEN);
                let Poll::Ready(result) = waiter.poll(cx) else { return Break(Poll::Pending) };
                let (waiter, request) = take(waiting);
                (call.waited(cx, &request.0, waiter, result), request)
            }
            // After the decision: a denied request never waits for the service, and a request
            // that waits for its quota does not hold a place that `poll_ready` has reserved.
            Other::Readying(admitted) => {
                let Poll::Ready(readiness) = call.inner.poll_ready(cx) else {
                    return Break(Poll::Pending);
                };
                let (waiter, request) = take(admitted);
                (call.proceed(waiter, Poll::Ready(readiness)), request)
            }
            // The response arrives after the block, which then holds for a retry.
            Other::Learning(learning) => {
                let polled = learning.as_mut().expect(TAKEN).0.as_mut().poll(cx);
                return Break(polled.map(|()| Ok(take(learning).1)));
            }
            Other::Rejecting(rejecting) => return Break(Pin::new(rejecting).poll(cx).map(Ok)),
        };
        Self::follow(call, state, step, head, rest)
    }

    /// Goes on with the step of a request: `Ok` if it proceeds to the service.
    #[inline(never)]
    fn follow(
        call: &mut Call<S, P, Req>,
        state: &mut Pin<&mut StateOf<S, P, Req>>,
        step: Result<(), StepOf<S, P, Req>>,
        mut head: P::Head,
        rest: P::Rest,
    ) -> ControlFlow<Poll<<Self as Future>::Output>> {
        let next = match step {
            Ok(()) => {
                call.begin(&mut head);
                State::Calling { future: call.inner.call(P::join(head, rest)) }
            }
            Err(Step::Resolve(rule)) => {
                State::other(Other::Resolving { lookup: rule.look_up(head), rest: Some(rest) })
            }
            Err(Step::Wait(waiter)) => State::other(Other::Waiting(Some((waiter, (head, rest))))),
            Err(Step::AwaitReadiness(waiter)) => {
                let admitted = Some((waiter, (head, rest)));
                state.set(State::other(Other::Readying(admitted)));
                return Break(Poll::Pending);
            }
            Err(Step::Reject(rejection)) => match call.reject(rejection, &head) {
                Rejected::Now(response) => return Break(Poll::Ready(Ok(response))),
                Rejected::Later(rejecting) => State::other(Other::Rejecting(rejecting)),
            },
            Err(Step::Fail(error)) => return Break(Poll::Ready(Err(error))),
        };
        state.set(next);
        Continue(())
    }

    /// Converts the response of the service. Also returns the call by which the limit adopts what
    /// the response says, if it says anything new.
    #[inline(never)]
    fn learn(call: &mut Call<S, P, Req>, response: S::Response) -> (Option<Learning>, P::Response) {
        let learning = call.shared.protocol.learned(&response).and_then(|state| {
            let remaining = call.charge.decision.as_ref()?.remaining();
            call.charge.charge.learn(state, remaining)
        });
        (learning, call.shared.protocol.respond(response, &mut call.charge))
    }
}

impl<F, H, R, J, T> State<F, H, R, J, T> {
    fn other(state: Other<H, R, J, T>) -> Self {
        Self::Other { state: Box::new(state) }
    }
}

impl<S, P, Req> Call<S, P, Req>
where
    S: Service<Req>,
    P: Protocol<Req, S::Response>,
{
    /// Resolves the charge, and decides about it if it needs no lookup.
    #[inline]
    fn start(&mut self, cx: &mut Context<'_>, head: &P::Head) -> Result<(), StepOf<S, P, Req>> {
        let Self { shared, inner, charge: state, .. } = self;
        let pricing = shared.protocol.pricing();
        if pricing.has_lists()
            && let Some(charge) = pricing.listed(head)
        {
            let next = shared.admit(head, charge, state);
            return self.step(cx, next, None);
        }
        let (limiter, extractor) = match pricing.source() {
            ChargeSource::Key(limiter, extractor) => (limiter, &**extractor),
            ChargeSource::Rule(rule) => match rule.charge_now(head) {
                Some(charge) => return self.resolved(cx, head, charge),
                None => return Err(Step::Resolve(rule.clone())),
            },
        };
        let keyed = match shared.check_by_key(head, limiter, extractor) {
            Ok(Admitted { key, cost, outcome: Outcome { decision, receipts } }) => {
                // A charge is made only if the service is not ready, which saves copies.
                let charge = |key| Charge::of_units(limiter, key, cost);
                let release = || charge(key.clone()).release_in_background(&receipts);
                let readiness = poll_or(release, || inner.poll_ready(cx));
                if let Poll::Ready(Ok(())) = readiness {
                    if shared.reports {
                        state.decision = Some(decision);
                    }
                    return Ok(());
                }
                state.keep(charge(key), Outcome { decision, receipts });
                return self.proceed(None, readiness);
            }
            Err(keyed) => keyed,
        };
        let mut readiness = None;
        let is_ready = || {
            let polled = readiness.insert(inner.poll_ready(cx));
            matches!(polled, Poll::Ready(Ok(())))
        };
        let next = shared.admit_by_key(head, limiter, keyed, state, is_ready);
        self.step(cx, next, readiness)
    }

    /// Decides about the charge that a rule has returned.
    #[inline(never)]
    fn resolved(
        &mut self,
        cx: &mut Context<'_>,
        head: &P::Head,
        charge: Result<Charge, RequestError>,
    ) -> Result<(), StepOf<S, P, Req>> {
        let charge = self.shared.protocol.pricing().complete(head, charge);
        let next = self.shared.admit(head, charge, &mut self.charge);
        self.step(cx, next, None)
    }

    fn waited(
        &mut self,
        cx: &mut Context<'_>,
        head: &P::Head,
        waiter: Box<Waiter>,
        result: Result<Decision, Error>,
    ) -> Result<(), StepOf<S, P, Req>> {
        let next = self.shared.after_wait(head, waiter, result, &mut self.charge);
        self.step(cx, next, None)
    }

    #[inline]
    fn step(
        &mut self,
        cx: &mut Context<'_>,
        next: Next,
        readiness: Option<Poll<Result<(), S::Error>>>,
    ) -> Result<(), StepOf<S, P, Req>> {
        match next {
            Next::Proceed(waiter) => {
                let Self { inner, charge, .. } = self;
                // A `Waiter` releases its charge by itself.
                let release = || drop(charge.take_waiter());
                let poll = || poll_or(release, || inner.poll_ready(cx));
                let readiness = readiness.unwrap_or_else(poll);
                self.proceed(waiter, readiness)
            }
            Next::Wait(waiter) => Err(Step::Wait(waiter)),
            Next::Reject(rejection) => Err(Step::Reject(rejection)),
        }
    }

    #[inline]
    fn proceed(
        &mut self,
        waiter: Option<Box<Waiter>>,
        readiness: Poll<Result<(), S::Error>>,
    ) -> Result<(), StepOf<S, P, Req>> {
        match readiness {
            Poll::Ready(Ok(())) => {
                if let Some(waiter) = waiter {
                    self.charge.take_over(waiter);
                }
                Ok(())
            }
            Poll::Ready(Err(error)) => {
                drop(waiter.or_else(|| self.charge.take_waiter()));
                Err(Step::Fail(error))
            }
            Poll::Pending => {
                let mut waiter = waiter.or_else(|| self.charge.take_waiter());
                waiter.iter_mut().for_each(|waiter| waiter.keep_holds());
                Err(Step::AwaitReadiness(waiter))
            }
        }
    }

    /// Prepares the call of the service. From here on the cost stays spent: the service may do its
    /// work.
    #[inline]
    fn begin(&mut self, head: &mut P::Head) {
        self.charge.begin_holds(self.shared.protocol.shares_holds());
        self.shared.protocol.annotate(head, &mut self.charge);
    }

    fn reject(&self, rejection: Rejection, head: &P::Head) -> Rejected<P::Response, P::Rejecting> {
        self.shared.protocol.reject(rejection, head, &self.charge.charge)
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
