//! The events of limiters and layers for the crate `tracing`. Without the feature they are empty
//! functions. The events about connections are in `store/redis/events.rs`.
#![cfg_attr(not(feature = "tracing"), allow(unused_variables))]

use std::{
    fmt,
    io::{self, Write},
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use super::event::Event;
#[cfg(feature = "serde")]
use crate::error::ConfigError;
use crate::{
    algorithm::Algorithm,
    decision::Decision,
    error::{Error, StoreError},
    keys::Key,
    quota::Quota,
    sync::lock,
};

/// The time for which there is at most one event about a misconfigured service.
const PERIOD: Duration = Duration::from_secs(10);

/// Returns whether the events of denials are recorded.
#[inline]
pub(crate) fn records_denials() -> bool {
    #[cfg(feature = "tracing")]
    return tracing::enabled!(target: "tower_ratelimit", tracing::Level::DEBUG);
    #[cfg(not(feature = "tracing"))]
    false
}

/// Reports a denial. Only logs of the level `trace` contain the key, which can be an address or a
/// name.
#[cold]
pub(crate) fn denied(decision: &Decision, key: Option<&Key<'_>>) {
    #[cfg(feature = "tracing")]
    {
        let is_trace = tracing::enabled!(target: "tower_ratelimit", tracing::Level::TRACE);
        tracing::debug!(
            target: "tower_ratelimit",
            limiter = decision.limiter(),
            key = key.filter(|_| is_trace).map(|key| key.as_str()),
            blocked = decision.is_blocked(),
            retry_after = decision.retry_after().map(tracing::field::debug),
            source = ?decision.source(),
            "request denied"
        );
    }
}

/// Reports a key that was blocked, unblocked or reset. Only logs of the level `trace` contain the
/// key.
pub(crate) fn key_changed(event: &Event<'_>) {
    #[cfg(feature = "tracing")]
    {
        let (change, limiter, key, duration) = match *event {
            Event::Blocked { limiter, key, duration } => ("blocked", limiter, key, Some(duration)),
            Event::Unblocked { limiter, key } => ("unblocked", limiter, key, None),
            Event::Reset { limiter, key } => ("reset", limiter, key, None),
            _ => return,
        };
        let is_trace = tracing::enabled!(target: "tower_ratelimit", tracing::Level::TRACE);
        let key = Some(key).filter(|_| is_trace).map(|key| key.as_str());
        let duration = duration.map(tracing::field::debug);
        tracing::info!(target: "tower_ratelimit", limiter, key, duration, "key {change}");
    }
}

/// Reports other settings of a limiter, such as `login: 5/min -> 50/min`.
pub(crate) fn settings_changed(limiter: &str, from: (Algorithm, Quota), to: (Algorithm, Quota)) {
    #[cfg(feature = "tracing")]
    {
        let ((before, old), (after, new)) = (from, to);
        let change = match (before == after, before.name() == after.name()) {
            (true, _) => format!("{old} -> {new}"),
            (_, true) => format!("{old}, {before:?} -> {new}, {after:?}"),
            _ => format!("{old}, {before} -> {new}, {after}"),
        };
        tracing::info!(target: "tower_ratelimit", limiter, "limit changed: {limiter}: {change}");
    }
}

/// Reports that new limits apply, or that they were rejected.
#[cfg(feature = "serde")]
pub(crate) fn reloaded(error: Option<&ConfigError>) {
    #[cfg(feature = "tracing")]
    match error {
        None => tracing::info!(target: "tower_ratelimit", "limits reloaded"),
        Some(error) => tracing::error!(
            target: "tower_ratelimit",
            "new limits rejected: {error}"
        ),
    }
}

/// Reports that the service is set up wrong: at most one event in [`PERIOD`], with the number of
/// requests since the last one.
pub(crate) fn misconfigured(throttle: &Throttle, error: &str) {
    let Some(requests) = throttle.next(PERIOD) else { return };
    #[cfg(feature = "tracing")]
    tracing::error!(
        target: "tower_ratelimit",
        requests,
        error,
        "the service is misconfigured: requests cannot be counted"
    );
    print_unrecorded(format_args!(
        "the service is misconfigured, and requests cannot be counted: {error}"
    ));
}

/// Reports that a setting may be a mistake.
pub(crate) fn suspected(mistake: &str) {
    #[cfg(feature = "tracing")]
    tracing::warn!(target: "tower_ratelimit", "{mistake}");
    print_unrecorded(format_args!("{mistake}"));
}

/// Reports that what a response has used is of no limiter of the request: at most one event in
/// [`PERIOD`], with the number of requests since the last one.
pub(crate) fn unsettled(throttle: &Throttle, error: &Error) {
    let Some(requests) = throttle.next(PERIOD) else { return };
    #[cfg(feature = "tracing")]
    tracing::warn!(
        target: "tower_ratelimit",
        requests,
        "the estimate of a request counts: {error}"
    );
    print_unrecorded(format_args!("the estimate of a request counts: {error}"));
}

/// Prints a failure of the store that a response, a wait or a failure policy hides: at most one in
/// [`PERIOD`]. The store itself reports each to subscribers.
#[cold]
pub(crate) fn hidden(error: &StoreError) {
    static HIDDEN: Throttle = Throttle::new();
    if is_unrecorded() && HIDDEN.next(PERIOD).is_some() {
        IS_FAILING.store(true, Relaxed);
        print(format_args!("decisions failed: {error:?}"));
    }
}

/// True between a line of [`hidden`] and the next one of [`decides_again`].
static IS_FAILING: AtomicBool = AtomicBool::new(false);

/// Prints the end of an outage, if [`hidden`] has printed a failure.
#[cfg(feature = "redis")]
pub(crate) fn decides_again(server: &str, outage: Duration) {
    if IS_FAILING.swap(false, Relaxed) {
        let at = if server.is_empty() { "" } else { " at " };
        print_unrecorded(format_args!("Redis{at}{server} decides again after {outage:.1?}"));
    }
}

/// Prints what no subscriber gets, so that a new user finds the mistake: responses do not name it.
fn print_unrecorded(text: fmt::Arguments<'_>) {
    if is_unrecorded() {
        print(text);
    }
}

fn print(text: fmt::Arguments<'_>) {
    // Unlike `eprintln!`, no panic if stderr is closed.
    let _ = writeln!(io::stderr(), "tower-ratelimit: {text}");
}

/// Returns whether no subscriber gets the events.
fn is_unrecorded() -> bool {
    #[cfg(feature = "tracing")]
    return tracing::dispatcher::get_default(|it| it.is::<tracing::subscriber::NoSubscriber>());
    #[cfg(not(feature = "tracing"))]
    true
}

/// Limits the rate of an event that each request would cause.
#[derive(Debug, Default)]
pub(crate) struct Throttle(Mutex<Throttled>);

#[derive(Debug, Default)]
struct Throttled {
    last: Option<Instant>,
    /// The occurrences since the last event.
    count: u64,
}

impl Throttle {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(Throttled { last: None, count: 0 }))
    }

    /// Counts an occurrence. Returns the number since the last event, if another event is due.
    pub(crate) fn next(&self, period: Duration) -> Option<u64> {
        let Throttled { last, count } = &mut *lock(&self.0);
        *count += 1;
        if last.is_some_and(|last| last.elapsed() < period) {
            return None;
        }
        *last = Some(Instant::now());
        Some(std::mem::take(count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_has_the_number_of_occurrences_since_the_last_one() {
        let throttle = Throttle::default();
        let hour = Duration::from_secs(3_600);
        let counts = [hour, hour, hour, Duration::ZERO, hour].map(|period| throttle.next(period));
        assert_eq!(counts, [Some(1), None, None, Some(3), None]);
    }
}
