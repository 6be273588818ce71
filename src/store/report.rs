//! Reports the answers to requests, to the observers of their limiters and to the log: each answer
//! once, after the store has decided, without a lock. It changes no answer.

use std::{
    mem,
    time::{Duration, Instant},
};

use super::{LimitRequest, Reporting, StoreFuture, StoreRequest};
use crate::{
    algorithm::Action,
    decision::{Decision, Outcome},
    error::Error,
    keys::Key,
    observe::{Event, Observers, log},
};

/// A limit of a request: the name of the limiter, its observers and the key.
type ReportedLimit<'a> = (&'a str, &'a Observers, &'a Key<'a>);

/// Returns whether an answer may be reported. One that is not there yet is none that allows.
#[inline(always)]
pub(super) fn is_reported(request: &StoreRequest<'_>, is_allowed: bool) -> bool {
    request.reporting != Reporting::Nothing
        && (request.limits.iter().any(|limit| !limit.observers.is_empty())
            || !is_allowed && log::records_denials())
}

/// Reports the answer to a request, now or when it comes.
#[inline(never)]
pub(super) fn report(request: &StoreRequest<'_>, answer: &mut StoreFuture<Outcome>) {
    let is_allowed = answer.now().is_some_and(|outcome| outcome.decision.is_allowed());
    if !is_reported(request, is_allowed) {
        return;
    }
    let StoreRequest { action, limits, reporting, .. } = *request;
    if let Some(result) = answer.arrived() {
        let result = result.map(|outcome| &outcome.decision);
        let limits = limits.iter().map(|it| (it.settings.name, it.observers, it.key));
        return report_answer(action, reporting, limits, result, None);
    }
    let start = Instant::now();
    let owned = |limit: &LimitRequest<'_>| {
        (limit.settings.name, limit.observers.clone(), limit.key.clone().into_owned())
    };
    let limits: Vec<_> = limits.iter().map(owned).collect();
    let later = mem::replace(answer, StoreFuture::Ready(None));
    *answer = StoreFuture::pending(async move {
        let result = later.await;
        let limits = limits.iter().map(|(name, observers, key)| (*name, observers, key));
        let decided = result.as_ref().map(|outcome| &outcome.decision);
        report_answer(action, reporting, limits, decided, Some(start.elapsed()));
        result
    });
}

/// Reports the answer to a request to these limits.
pub(crate) fn report_answer<'a>(
    action: Action,
    reporting: Reporting,
    mut limits: impl Iterator<Item = ReportedLimit<'a>>,
    result: Result<&Decision, &Error>,
    duration: Option<Duration>,
) {
    match result {
        Ok(decision) if action == Action::Check && reporting.includes(decision) => {
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
