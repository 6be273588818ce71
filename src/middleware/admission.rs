//! What all services of a layer share, and how it asks about a request.

use std::time::Duration;

use crate::{
    algorithm::{Action, micros},
    decision::Decision,
    error::{Error, RequestError},
    limiter::MaxWait,
    limiter::{AnyLimiter, Charge},
    limiter::{DEFAULT_MAX_LATENESS, Turn},
    limiter::{Place, Waiters},
    middleware::extractor::KeyExtractor,
    middleware::failure_policy::FailurePolicy,
    middleware::protocol::{Charged, Protocol, Rejection},
    store::Answer,
};

/// What all services of a layer share.
#[derive(Clone, Debug)]
pub(crate) struct Shared<P> {
    pub(crate) protocol: P,
    pub(crate) max_wait: MaxWait,
    pub(crate) max_lateness: Duration,
    pub(crate) waiters: Waiters,
    pub(crate) dry_run: bool,
    pub(crate) on_failure: FailurePolicy,
}

/// How a request sets out.
pub(crate) enum Start {
    Go,
    EngineRequest(Box<Turn>),
    Refused(Rejection),
}

impl<P: Protocol> Shared<P> {
    pub(crate) fn new(protocol: P) -> Self {
        Self {
            protocol,
            max_wait: MaxWait::OWN,
            max_lateness: DEFAULT_MAX_LATENESS,
            waiters: Waiters::new(),
            dry_run: false,
            on_failure: FailurePolicy::Closed,
        }
    }

    /// Asks about a request by key. Most of these just go on, and their charge is not made then, unless the protocol
    /// keeps it or the service is not ready: the header fields of a limiter that answers at once need none, as its
    /// policy is known.
    #[inline]
    pub(crate) fn start_by_key(
        &self,
        head: &P::Head,
        limiter: &AnyLimiter,
        extractor: &dyn KeyExtractor<P::Head>,
        charged: &mut Charged,
        is_ready: impl FnOnce() -> bool,
    ) -> Start {
        let charging = self.protocol.charging();
        let may_wait = !self.dry_run && limiter.cut(self.max_wait) > 0.0;
        let key = match extractor.extract(head) {
            Ok(key) if !may_wait && !self.protocol.keeps_charge() => key,
            extracted => {
                let charge = extracted.map(|key| Charge::new(limiter, key));
                return self.start(head, charging.complete(head, charge), charged);
            }
        };
        let cost = match charging.cost(head) {
            Ok(cost) => cost,
            Err(error) => return Start::Refused(Rejection::Request(error)),
        };
        let answer = limiter.call(Action::Check, &key, cost, MaxWait::NONE);
        match answer {
            Ok(Answer::Ready(Some(Ok(decision)))) if decision.goes_on_at_once() => {
                charged.decision = Some(decision);
                if !is_ready() {
                    charged.charge = Charge::new(limiter, key).cost(cost);
                }
                return Start::Go;
            }
            _ => charged.charge = Charge::new(limiter, key).cost(cost),
        }
        self.answered(answer, MaxWait::NONE, None, charged)
    }

    /// Asks about a request. Leaves its charge in `charged`, unless a turn takes it along, and the decision if it
    /// goes on.
    #[inline]
    pub(crate) fn start(
        &self,
        head: &P::Head,
        charge: Result<Charge, RequestError>,
        charged: &mut Charged,
    ) -> Start {
        match charge {
            Ok(charge) => charged.charge = charge,
            Err(error) => return Start::Refused(Rejection::Request(error)),
        }
        let charge = &charged.charge;
        if charge.is_exempt() {
            return Start::Go;
        }
        let (max_wait, place) = self.patience(head, charge, self.max_wait);
        self.answered(charge.ask(max_wait), max_wait, place, charged)
    }

    fn answered(
        &self,
        answer: Result<Answer<Decision>, Error>,
        max_wait: MaxWait,
        place: Option<Place>,
        charged: &mut Charged,
    ) -> Start {
        match answer {
            Ok(Answer::Ready(Some(Ok(decision)))) if decision.goes_on_at_once() => {
                charged.decision = Some(decision);
                Start::Go
            }
            Ok(Answer::Ready(Some(Ok(decision)))) if !decision.is_allowed() && place.is_none() => {
                Start::Refused(Rejection::Denied(decision))
            }
            Ok(answer) => Start::EngineRequest(self.turn(charged.take(), answer, max_wait, place)),
            Err(error) => Start::Refused(error.into()),
        }
    }

    /// What becomes of a request that got no decision, and of whose wait so much is left. `charged` has what was asked
    /// for; nothing is left of it if the request goes on uncounted, or asks for a share.
    pub(crate) fn undecided(
        &self,
        head: &P::Head,
        error: Error,
        charged: &mut Charged,
        left: f64,
    ) -> Start {
        let Error::Store(error) = error else { return Start::Refused(error.into()) };
        let share = match self.on_failure {
            FailurePolicy::Open => {
                charged.decision = charged.take().open();
                return Start::Go;
            }
            // A store in memory that is full is as good as another.
            FailurePolicy::Local { share } if !error.is_full() => charged.charge.to_share(share),
            _ => None,
        };
        let Some(share) = share else { return Start::Refused(Rejection::Store(error)) };
        let (max_wait, place) = self.patience(head, &share, self.max_wait.at_most(left));
        match share.ask(max_wait) {
            Ok(answer) => {
                drop(charged.take());
                Start::EngineRequest(self.turn(share, answer, max_wait, place))
            }
            // It is the share that is too small.
            Err(_) => Start::Refused(Rejection::Store(error)),
        }
    }

    fn turn(
        &self,
        charge: Charge,
        answer: Answer<Decision>,
        max_wait: MaxWait,
        place: Option<Place>,
    ) -> Box<Turn> {
        let turn = Turn::new(charge, answer, max_wait).max_lateness(self.max_lateness);
        Box::new(turn.place(place))
    }

    /// How long a request may wait, and its place among those who do.
    fn patience(
        &self,
        head: &P::Head,
        charge: &Charge,
        max_wait: MaxWait,
    ) -> (MaxWait, Option<Place>) {
        if self.dry_run || charge.longest_wait(max_wait) == 0.0 {
            return (MaxWait::NONE, None);
        }
        let Some(place) = self.waiters.enter(charge) else { return (MaxWait::NONE, None) };
        let timeout = P::timeout(head).map_or(f64::INFINITY, micros);
        (max_wait.at_most(timeout), Some(place))
    }
}
