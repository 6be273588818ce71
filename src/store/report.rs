//! Reports the answers to requests, to the observers of their limiters and to the log: each answer
//! once, after the store has decided, without a lock. It changes none.

use std::time::{Duration, Instant};

use super::{LimitRequest, StoreFuture, StoreRequest};
use crate::{
    algorithm::Action,
    decision::{Decision, Outcome},
    error::Error,
    keys::Key,
    observe::{Event, Observers, log},
};

/// The answers to a request that are reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reports {
    /// None: the call is no request, such as the spending of what a vendor has counted.
    Nothing,
    Each,
    /// The answer that ends the request. After a denial because of held units, it waits for them
    /// and checks again.
    Last,
}

impl Reports {
    /// Returns the reports of a request that waits for held units, or does not.
    #[inline]
    pub(crate) fn of_waiting(waits_for_holds: bool) -> Self {
        if waits_for_holds { Self::Last } else { Self::Each }
    }

    /// Returns whether a decision is reported.
    pub(crate) fn include(self, decision: &Decision) -> bool {
        match self {
            Self::Nothing => false,
            Self::Each => true,
            Self::Last => !decision.waits_for_holds(),
        }
    }
}

/// A limit of a request: the name of the limiter, its observers and the key.
type ReportedLimit<'a> = (&'a str, &'a Observers, &'a Key<'a>);

/// Reports the answer to a request, now or when it comes.
#[inline(always)]
pub(super) fn report(
    request: &StoreRequest<'_>,
    answer: StoreFuture<Outcome>,
) -> StoreFuture<Outcome> {
    let is_observed = || request.limits.iter().any(|limit| !limit.observers.is_empty());
    let can_be_logged = || !answer.now().is_some_and(|outcome| outcome.decision.is_allowed());
    if request.reports != Reports::Nothing
        && (is_observed() || can_be_logged() && log::records_denials())
    {
        return request.copied(|request| report_to_all(request, answer));
    }
    answer
}

#[inline(never)]
fn report_to_all(request: &StoreRequest<'_>, answer: StoreFuture<Outcome>) -> StoreFuture<Outcome> {
    let StoreRequest { action, limits, reports, .. } = *request;
    if let Some(result) = answer.arrived() {
        let result = result.map(|outcome| &outcome.decision);
        let limits = limits.iter().map(|it| (it.settings.name, it.observers, it.key));
        report_answer(action, reports, limits, result, None);
        return answer;
    }
    let start = Instant::now();
    let owned = |limit: &LimitRequest<'_>| {
        (limit.settings.name, limit.observers.clone(), limit.key.clone().into_owned())
    };
    let limits: Vec<_> = limits.iter().map(owned).collect();
    StoreFuture::pending(async move {
        let result = answer.await;
        let limits = limits.iter().map(|(name, observers, key)| (*name, observers, key));
        let decided = result.as_ref().map(|outcome| &outcome.decision);
        report_answer(action, reports, limits, decided, Some(start.elapsed()));
        result
    })
}

/// Reports the answer to a request to these limits.
pub(crate) fn report_answer<'a>(
    action: Action,
    reports: Reports,
    mut limits: impl Iterator<Item = ReportedLimit<'a>>,
    result: Result<&Decision, &Error>,
    duration: Option<Duration>,
) {
    match result {
        Ok(decision) if action == Action::Check && reports.include(decision) => {
            report_decided(limits, decision, duration);
        }
        Ok(_) => {}
        Err(error) => {
            if let Some((limiter, observers, _)) = limits.next() {
                report_failed(observers, limiter, action.operation(), error);
            }
        }
    }
}

/// Reports a decision about a check of these limits.
pub(crate) fn report_decided<'a>(
    limits: impl Iterator<Item = ReportedLimit<'a>>,
    decision: &Decision,
    duration: Option<Duration>,
) {
    let mut of_limiter = limits.filter(|(name, ..)| *name == decision.limiter());
    let Some((_, observers, key)) = of_limiter.next() else { return };
    // The decision names a limiter, but no key.
    let key = of_limiter.next().is_none().then_some(key);
    observers.report(&Event::Decided { decision, key, duration });
    if !decision.is_allowed() {
        log::denied(decision, key);
    }
}

/// Reports the failure of a store; other errors are not reported.
pub(crate) fn report_failed(
    observers: &Observers,
    limiter: &str,
    operation: &'static str,
    error: &Error,
) {
    if let Error::Store(error) = error {
        observers.report(&Event::StoreFailed { limiter, operation, error });
    }
}
