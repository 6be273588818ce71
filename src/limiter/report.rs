//! Reports the events of limiters to their observers: decisions, failures of the store, waits and
//! releases. It changes no answer.

use std::time::{Duration, Instant};

use crate::{
    algorithm::{Action, Algorithm},
    decision::{Decision, Outcome},
    error::Error,
    keys::Key,
    observe::{Event, Observers, log},
    quota::Quota,
    store::{LimitRequest, StoreFuture, StoreRequest},
};

/// Returns whether an answer is to be passed through [`reported`].
#[inline]
pub(super) fn is_reported(request: &StoreRequest<'_>, answer: &StoreFuture<Outcome>) -> bool {
    let is_observed = request.limits.iter().any(|limit| !limit.observers.is_empty());
    is_observed
        || match answer {
            StoreFuture::Ready(Some(result)) => {
                is_logged(result.as_ref().map(|outcome| &outcome.decision))
            }
            _ => log::records_denials(),
        }
}

#[inline]
fn is_logged(result: Result<&Decision, &Error>) -> bool {
    !result.is_ok_and(Decision::is_allowed) && log::records_denials()
}

/// Reports an answer when it has arrived. If the request can wait for units that are held, a denial
/// because of them is not its decision: it checks again.
#[inline(never)]
pub(super) fn reported(
    request: &StoreRequest<'_>,
    answer: StoreFuture<Outcome>,
    can_wait: bool,
) -> StoreFuture<Outcome> {
    let result = match &answer {
        StoreFuture::Ready(Some(result)) => result.as_ref().map(|outcome| &outcome.decision),
        #[cfg(feature = "redis")]
        StoreFuture::Cached(Some(outcome)) => Ok(&outcome.decision),
        StoreFuture::Pending(_) => return reported_later(request, answer, can_wait),
        _ => return answer,
    };
    let limits = request.limits.iter();
    let limits = limits.map(|limit| (limit.settings.name, limit.observers, limit.key));
    if !result.is_ok_and(|decision| goes_on_waiting(decision, can_wait)) {
        report_result(request.action, limits, result, None);
    }
    answer
}

/// Returns whether a request with this decision waits until held units are returned.
pub(super) fn goes_on_waiting(decision: &Decision, can_wait: bool) -> bool {
    can_wait && decision.waits_for_holds()
}

fn reported_later(
    request: &StoreRequest<'_>,
    answer: StoreFuture<Outcome>,
    can_wait: bool,
) -> StoreFuture<Outcome> {
    let (action, start) = (request.action, Instant::now());
    let owned = |limit: &LimitRequest<'_>| {
        (limit.settings.name, limit.observers.clone(), limit.key.clone().into_owned())
    };
    let limits: Vec<_> = request.limits.iter().map(owned).collect();
    StoreFuture::pending(async move {
        let result = answer.await;
        let limits = limits.iter().map(|(name, observers, key)| (*name, observers, key));
        let decided = result.as_ref().map(|outcome| &outcome.decision);
        if !decided.is_ok_and(|decision| goes_on_waiting(decision, can_wait)) {
            report_result(action, limits, decided, Some(start));
        }
        result
    })
}

/// A limit of a request: the name of the limiter, its observers and the key.
type Limit<'a> = (&'static str, &'a Observers, &'a Key<'a>);

fn report_result<'a>(
    action: Action,
    mut limits: impl Iterator<Item = Limit<'a>>,
    result: Result<&Decision, &Error>,
    start: Option<Instant>,
) {
    let Some(first) = limits.next() else { return };
    match result {
        Ok(decision) if action == Action::Check => {
            let of_limiter = |(name, ..): &Limit<'_>| *name == decision.limiter();
            let mut of_limiter = [first].into_iter().chain(limits).filter(of_limiter);
            let (_, observers, key) = of_limiter.next().unwrap_or(first);
            // The decision names a limiter, but no key.
            let key = of_limiter.next().is_none().then_some(key);
            let duration = start.map(|start| start.elapsed());
            report_decided(observers, decision, key, duration);
        }
        Ok(_) => {}
        Err(error) => report_failed(first.1, first.0, action.operation(), error),
    }
}

/// Reports a decision about a check.
pub(crate) fn report_decided(
    observers: &Observers,
    decision: &Decision,
    key: Option<&Key<'_>>,
    duration: Option<Duration>,
) {
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

/// Reports another quota or algorithm of a limiter.
pub(super) fn report_settings(
    observers: &Observers,
    limiter: &str,
    from: (Algorithm, Quota),
    to: (Algorithm, Quota),
) {
    observers.report(&Event::SettingsChanged { limiter, from, to });
    log::settings_changed(limiter, from, to);
}

/// Reports that units of a key are returned.
pub(crate) fn report_released(observers: &Observers, limiter: &str, key: &Key<'_>, units: u64) {
    observers.report(&Event::Released { limiter, key, units });
}

/// Reports that units of a key are held.
pub(super) fn report_hold_began(observers: &Observers, limiter: &str, key: &Key<'_>, held: u64) {
    observers.report(&Event::HoldBegan { limiter, key, held });
}

/// Reports that a permit of units has ended, and how many of them were held and used.
pub(super) fn report_hold_ended(
    observers: &Observers,
    limiter: &str,
    key: &Key<'_>,
    [held, used]: [u64; 2],
) {
    observers.report(&Event::HoldEnded { limiter, key, held, used });
}

/// Reports that a call has blocked, unblocked or reset a key.
pub(super) fn report_key_changed(observers: &Observers, event: &Event<'_>) {
    observers.report(event);
    log::key_changed(event);
}

/// Reports the failure of a call that decides nothing.
pub(super) fn reported_failure(
    observers: &Observers,
    limiter: &'static str,
    operation: &'static str,
    answer: StoreFuture<()>,
) -> StoreFuture<()> {
    if observers.is_empty() || matches!(answer, StoreFuture::Ready(Some(Ok(())))) {
        return answer;
    }
    let observers = observers.clone();
    StoreFuture::pending(async move {
        let result = answer.await;
        if let Err(error) = &result {
            report_failed(&observers, limiter, operation, error);
        }
        result
    })
}

/// A wait that was reported. Its end is reported when it is dropped.
pub(crate) struct Wait {
    observers: Observers,
    limiter: &'static str,
    began: Instant,
}

impl Wait {
    /// Reports that a request waits for a limiter. Returns nothing if there is no observer.
    pub(crate) fn begin(observers: &Observers, limiter: &'static str) -> Option<Self> {
        if observers.is_empty() {
            return None;
        }
        observers.report(&Event::WaitBegan { limiter });
        Some(Self { observers: observers.clone(), limiter, began: Instant::now() })
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        let (limiter, duration) = (self.limiter, self.began.elapsed());
        self.observers.report(&Event::WaitEnded { limiter, duration });
    }
}
