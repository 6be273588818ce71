//! Circuit breaker: fails fast while Redis does not answer within the deadlines of its callers. It
//! decides about the state, and counts; the probes are sent by `node.rs`.

use std::{
    mem,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use redis::RedisError;

use super::{
    error::TransportError,
    events,
    rejections::{Rejection, Rejections},
    reports::{Reports, State},
};
use crate::{
    observe::{BreakerChanged, Observer, Observers, log::Throttle},
    store::{Health, Status},
    sync::lock,
};

/// The longest time between two probes. If it is exceeded, their runtime does not run.
const MAX_PROBE: Duration = Duration::from_secs(3);

/// The number of calls in a row without an answer that opens the breaker.
const MAX_FAILURES: u32 = 5;

/// The time between two events about single decisions that failed.
const FAILED_AFTER: Duration = Duration::from_secs(10);

/// The time between two reminders of an outage.
const REMIND_AFTER: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(crate) struct Breaker {
    made: Instant,
    /// The time of the last reply, in microseconds since `made`.
    last_reply: AtomicU64,
    /// Its latency, in microseconds.
    last_latency: AtomicU64,
    /// The longest deadline within which Redis does not answer, in microseconds plus 1; 0 while the
    /// breaker is closed.
    open_for: AtomicU64,
    /// The shortest deadline that has opened the breaker, in microseconds plus 1.
    open_from: AtomicU64,
    /// The state of the server while the breaker is open.
    cause: Mutex<Status>,
    /// The last event about a cause that was found out, and its time.
    explained: Mutex<Option<(Status, Instant)>>,
    /// The time of the last probe, while a task probes.
    probed: Mutex<Option<Instant>>,
    failures: Mutex<Failures>,
    counters: Arc<Counters>,
    /// The address of the server, or the name of the master.
    server: Option<Arc<str>>,
    reports: Arc<Reports>,
    reminders: Throttle,
    /// Locked while the state changes and the change is reported, so that reports are in the order
    /// of the changes.
    changing: Mutex<()>,
    rejections: Mutex<Rejections>,
    /// True if an executed script may change the rejections.
    has_rejected: AtomicBool,
    rejection_reports: Arc<Reports>,
}

/// The calls in a row without an answer.
#[derive(Debug)]
struct Failures {
    count: u32,
    /// The start of the first of them.
    since: Instant,
    /// The longest of their deadlines.
    within: Duration,
}

/// The counters and the observers of a store. The nodes of a cluster share them.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    replies: AtomicU64,
    timeouts: AtomicU64,
    interrupted: AtomicU64,
    errors: AtomicU64,
    skipped: AtomicU64,
    outages: AtomicU64,
    last_error: Mutex<Option<TransportError>>,
    failed_decisions: Throttle,
    pings: Throttle,
    observers: Mutex<Observers>,
}

impl Counters {
    pub(crate) fn health(
        &self,
        status: Status,
        is_available: bool,
        consecutive_failures: u32,
    ) -> Health {
        let last_error = lock(&self.last_error).clone();
        Health {
            status,
            is_available,
            consecutive_failures,
            last_error: last_error.map(|error| text_of(&error).into()),
            answers: self.replies.load(Relaxed),
            timeouts: self.timeouts.load(Relaxed),
            interrupted: self.interrupted.load(Relaxed),
            errors: self.errors.load(Relaxed),
            skipped: self.skipped.load(Relaxed),
            outages: self.outages.load(Relaxed),
        }
    }

    pub(crate) fn observers(&self) -> Observers {
        lock(&self.observers).clone()
    }

    pub(crate) fn add_observer(&self, observer: Arc<dyn Observer>) {
        lock(&self.observers).add(observer);
    }

    /// Reports in the log, once in [`FAILED_AFTER`], that decisions fail. While the breaker is
    /// open, another event reports it.
    pub(crate) fn report_failed(&self, limiter: &str, error: &TransportError) {
        if cfg!(feature = "tracing")
            && !error.is_circuit_open()
            && let Some(requests) = self.failed_decisions.next(FAILED_AFTER)
        {
            events::decisions_failed(limiter, requests, error);
        }
    }

    /// Returns whether to find out by a ping, at most once in [`REMIND_AFTER`], which permission is
    /// missing.
    pub(crate) fn is_ping_due(&self) -> bool {
        self.pings.next(REMIND_AFTER).is_some()
    }

    fn count(&self, error: &TransportError) {
        let counter = match error {
            error if error.is_timeout() => &self.timeouts,
            error if error.redis().is_some_and(RedisError::is_timeout) => &self.timeouts,
            error if error.is_interrupted() => &self.interrupted,
            _ => &self.errors,
        };
        counter.fetch_add(1, Relaxed);
        *lock(&self.last_error) = Some(error.clone());
    }
}

fn text_of(error: &TransportError) -> String {
    match error.redis() {
        Some(_) => format!("{error}: {}", error.reason()),
        None => error.to_string(),
    }
}

impl Breaker {
    /// Makes the breaker of a store with one server.
    pub(crate) fn new(server: Option<Arc<str>>) -> Self {
        Self::with(server, Arc::default())
    }

    pub(crate) fn of_node(node: Arc<str>, counters: Arc<Counters>) -> Self {
        Self::with(Some(node), counters)
    }

    fn with(server: Option<Arc<str>>, counters: Arc<Counters>) -> Self {
        let made = Instant::now();
        Self {
            made,
            last_reply: AtomicU64::new(0),
            last_latency: AtomicU64::new(0),
            open_for: AtomicU64::new(0),
            open_from: AtomicU64::new(u64::MAX),
            cause: Mutex::new(Status::Unavailable),
            explained: Mutex::new(None),
            probed: Mutex::new(None),
            failures: Mutex::new(Failures { count: 0, since: made, within: Duration::ZERO }),
            counters,
            reports: Arc::new(Reports::new(server.clone())),
            reminders: Throttle::default(),
            changing: Mutex::new(()),
            rejections: Mutex::new(Rejections::new(made)),
            has_rejected: AtomicBool::new(false),
            rejection_reports: Arc::new(Reports::new(server.clone())),
            server,
        }
    }

    pub(crate) fn health(&self, deadline: Duration) -> Health {
        let is_available = !self.is_open_for(deadline);
        self.counters.health(self.status(deadline), is_available, self.consecutive_failures())
    }

    /// Returns the state of the server for callers with this deadline.
    pub(crate) fn status(&self, deadline: Duration) -> Status {
        match () {
            () if self.is_open_for(deadline) => *lock(&self.cause),
            () if lock(&self.rejections).is_rejecting() => Status::Rejecting,
            () if self.last_reply.load(Relaxed) == 0 => Status::Unknown,
            () => Status::Ready,
        }
    }

    /// Returns whether it is unknown why the server does not answer.
    pub(crate) fn is_unexplained(&self) -> bool {
        self.is_open() && *lock(&self.cause) == Status::Unavailable
    }

    /// Records why the server does not answer, and reports it in the log.
    pub(crate) fn explain(&self, cause: Status) {
        let known = mem::replace(&mut *lock(&self.cause), cause);
        if !self.is_open() || cause == known {
            return;
        }
        let last = &mut *lock(&self.explained);
        let is_repeated =
            |(old, at): (Status, Instant)| old == cause && at.elapsed() < FAILED_AFTER;
        if !last.is_some_and(is_repeated) {
            *last = Some((cause, Instant::now()));
            events::explained(self.server.as_deref(), cause);
        }
    }

    pub(crate) fn consecutive_failures(&self) -> u32 {
        let Failures { count, since, within } = *lock(&self.failures);
        if self.has_replied(since, within) { 0 } else { count }
    }

    /// Returns whether the breaker is open for any deadline.
    pub(crate) fn is_open(&self) -> bool {
        self.open_for.load(Relaxed) > 0
    }

    /// Returns whether the breaker is open for callers with this deadline. Redis may answer within
    /// a longer deadline.
    pub(crate) fn is_open_for(&self, deadline: Duration) -> bool {
        micros(deadline) < self.open_for.load(Relaxed)
    }

    pub(crate) fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Reports the state to an observer.
    pub(crate) fn report_to(&self, observer: &dyn Observer) {
        let _changing = lock(&self.changing);
        observer.breaker_changed(&self.event());
    }

    /// Reports a change of the state to the observers. The caller holds the lock.
    fn report(&self) {
        let event = self.event();
        self.counters.observers().each(|observer| observer.breaker_changed(&event));
    }

    fn event(&self) -> BreakerChanged<'_> {
        let server = self.server.as_deref().unwrap_or_default();
        BreakerChanged { server, is_open: self.is_open() }
    }

    /// Reports in the log, once in [`REMIND_AFTER`], that an outage lasts. `error` is that of a
    /// probe.
    pub(crate) fn remind(&self, error: &TransportError) {
        if let Some(outage) = self.long_outage() {
            self.reports.remind(*lock(&self.cause), error, outage);
        }
    }

    /// Returns the length of the outage, if a reminder is due.
    fn long_outage(&self) -> Option<Duration> {
        let outage = lock(&self.failures).since.elapsed();
        let is_due = outage >= REMIND_AFTER && self.reminders.next(REMIND_AFTER).is_some();
        is_due.then_some(outage)
    }

    /// Records that the server replied to a script with an error.
    pub(crate) fn record_rejection(&self, error: &TransportError) {
        let mut rejections = lock(&self.rejections);
        self.has_rejected.store(true, Relaxed);
        match rejections.reject(Instant::now()) {
            Rejection::Begins => self.rejection_reports.change(State::Rejects(error.clone())),
            Rejection::Lasts(outage) => self.rejection_reports.remind_rejects(error, outage),
            Rejection::Known => {}
        }
    }

    /// Records that the server executed a script.
    pub(crate) fn record_execution(&self) {
        if !self.has_rejected.load(Relaxed) {
            return;
        }
        let mut rejections = lock(&self.rejections);
        if let Some(outage) = rejections.execute(Instant::now()) {
            self.rejection_reports.change(State::Decides(outage));
        }
        self.has_rejected.store(!rejections.is_empty(), Relaxed);
    }

    pub(crate) fn count_skipped(&self) {
        self.counters.skipped.fetch_add(1, Relaxed);
    }

    /// Records the reply to a script. `is_proof` means that Redis can decide: it replies to other
    /// commands even if it rejects writes.
    pub(crate) fn record_reply(&self, latency: Duration, is_proof: bool) {
        let latency = micros(latency);
        self.last_latency.store(latency, Relaxed);
        self.last_reply.store(micros(self.made.elapsed()), Relaxed);
        // A reply that is too late for the callers proves nothing: they would time out again.
        if !is_proof || latency >= self.open_for.load(Relaxed) {
            return;
        }
        let _changing = lock(&self.changing);
        if latency >= self.open_for.load(Relaxed) {
            return; // another reply closed the breaker
        }
        if latency >= self.open_from.load(Relaxed) {
            self.open_for.store(latency, Relaxed);
        } else if self.close() {
            let since = lock(&self.failures).since;
            self.reports.change(State::Available(since.elapsed()));
            self.report();
        }
    }

    /// Closes the breaker. Returns whether it was open. The caller holds the lock.
    fn close(&self) -> bool {
        self.open_from.store(u64::MAX, Relaxed);
        self.open_for.swap(0, Relaxed) > 0
    }

    /// Records that the node has left the cluster: it gets no more calls.
    pub(crate) fn retire(&self) {
        let _changing = lock(&self.changing);
        if self.close() {
            self.reports.change(State::Retired);
            self.report();
        }
    }

    pub(crate) fn count_reply(&self) {
        self.counters.replies.fetch_add(1, Relaxed);
    }

    /// Counts an error that says nothing about later calls: an error reply, a deadline that had
    /// passed before a command was sent, or a failed probe.
    pub(crate) fn count_error(&self, error: &TransportError) {
        self.counters.count(error);
    }

    /// Records a call that began at `start` and got no reply. Returns whether this opens the
    /// breaker.
    pub(crate) fn record_failure(
        &self,
        start: Instant,
        deadline: Duration,
        error: &TransportError,
    ) -> bool {
        self.counters.count(error);
        let open_for = micros(deadline) + 1;
        if self.failing_for(start, deadline) < deadline {
            return false;
        }
        let _changing = lock(&self.changing);
        let opened_for = self.open_for.fetch_max(open_for, Relaxed);
        let opens = opened_for < open_for;
        if opens {
            self.open_from.fetch_min(open_for, Relaxed);
        }
        if opened_for == 0 {
            let cause = error.status();
            *lock(&self.cause) = cause;
            self.counters.outages.fetch_add(1, Relaxed);
            self.reports.change(State::Unavailable(cause, error.clone()));
            self.report();
        }
        opens
    }

    /// Adds a failed call to those in a row. Returns the time since the first of these, if they are
    /// enough.
    fn failing_for(&self, start: Instant, deadline: Duration) -> Duration {
        let failures = &mut *lock(&self.failures);
        let within = failures.within.max(deadline);
        if failures.count == 0 || self.has_replied(failures.since, within) {
            *failures = Failures { count: 0, since: start, within: Duration::ZERO };
        }
        if self.has_replied(start, deadline) {
            return Duration::ZERO; // another call got a reply meanwhile
        }
        failures.count += 1;
        failures.within = failures.within.max(deadline);
        if failures.count >= MAX_FAILURES { failures.since.elapsed() } else { Duration::ZERO }
    }

    /// Returns whether the last reply came after `since`, and took no longer than `within`.
    fn has_replied(&self, since: Instant, within: Duration) -> bool {
        let last_reply = self.made + Duration::from_micros(self.last_reply.load(Relaxed));
        last_reply > since && self.last_latency.load(Relaxed) <= micros(within)
    }

    /// Assigns the caller its role in probing.
    pub(crate) fn probe_role(&self) -> ProbeRole {
        let probed = &mut *lock(&self.probed);
        let role = match probed {
            None => ProbeRole::StartTask,
            Some(at) if at.elapsed() > MAX_PROBE => ProbeRole::SendCall,
            Some(_) => return ProbeRole::None,
        };
        *probed = Some(Instant::now());
        role
    }

    /// Records that the task sends a probe now.
    pub(crate) fn begin_probe(&self) {
        *lock(&self.probed) = Some(Instant::now());
    }

    pub(crate) fn end_probing(&self) {
        *lock(&self.probed) = None;
    }
}

fn micros(time: Duration) -> u64 {
    time.as_micros().min(u128::from(u64::MAX - 1)) as u64
}

/// The part of a caller in probing, while the breaker is open.
pub(crate) enum ProbeRole {
    /// Another task probes.
    None,
    /// Starts the task that probes, which ends with [`end_probing`](Breaker::end_probing).
    StartTask,
    /// Sends its own command as the probe, because the runtime of the task does not run.
    SendCall,
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    const DEADLINE: Duration = Duration::from_millis(100);

    fn an_hour_old() -> Breaker {
        let made = Instant::now() - Duration::from_secs(3_600);
        Breaker { made, ..Breaker::new(None) }
    }

    /// Records five failed calls with a deadline, over a minute.
    fn fail(breaker: &Breaker, deadline: Duration) {
        let error = TransportError::timeout(deadline);
        for _ in 0..MAX_FAILURES {
            breaker.record_failure(Instant::now() - Duration::from_secs(60), deadline, &error);
        }
    }

    #[test]
    fn it_closes_with_a_reply_within_the_deadline_of_the_failed_calls() {
        let breaker = an_hour_old();
        let is_open = |deadline| breaker.is_open_for(deadline);
        fail(&breaker, DEADLINE);
        assert!(is_open(DEADLINE) && is_open(DEADLINE / 2) && !is_open(2 * DEADLINE));
        fail(&breaker, 2 * DEADLINE);
        assert!(is_open(2 * DEADLINE) && !is_open(3 * DEADLINE));
        breaker.record_reply(3 * DEADLINE, true);
        assert!(is_open(2 * DEADLINE), "the reply was too late");
        assert_eq!(breaker.consecutive_failures(), 10);
        breaker.record_reply(3 * DEADLINE / 2, true);
        assert!(!is_open(2 * DEADLINE) && is_open(DEADLINE), "the reply was too late for some");
        breaker.record_reply(DEADLINE, false);
        assert!(is_open(DEADLINE), "the reply proved nothing");
        breaker.record_reply(DEADLINE, true);
        assert!(!breaker.is_open());
        assert_eq!(breaker.consecutive_failures(), 0);
        assert_eq!(breaker.health(DEADLINE).outages, 1, "it was open all the time");
    }

    #[test]
    fn each_change_is_reported_once_and_in_order() {
        #[derive(Default)]
        struct Changes(Mutex<Vec<bool>>);

        impl Observer for Changes {
            fn breaker_changed(&self, event: &BreakerChanged<'_>) {
                thread::yield_now();
                lock(&self.0).push(event.is_open);
            }
        }

        const SHORT: Duration = Duration::from_nanos(1);
        let (breaker, changes) = (an_hour_old(), Arc::new(Changes::default()));
        breaker.counters().add_observer(changes.clone());
        let error = TransportError::timeout(SHORT);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..5_000 {
                        breaker.record_failure(Instant::now(), SHORT, &error);
                    }
                });
                scope.spawn(|| (0..5_000).for_each(|_| breaker.record_reply(SHORT, true)));
            }
        });
        let changes = lock(&changes.0);
        assert!(changes.len() > 1, "{changes:?}");
        assert!(changes.iter().enumerate().all(|(i, is_open)| *is_open == (i % 2 == 0)));
        assert_eq!(changes.last(), Some(&breaker.is_open()));
    }

    #[test]
    fn a_long_outage_is_reported_again() {
        let breaker = an_hour_old();
        fail(&breaker, DEADLINE); // over a minute
        assert!(breaker.long_outage().is_some_and(|outage| outage >= REMIND_AFTER));
        assert!(breaker.long_outage().is_none(), "the last reminder was a moment ago");
    }

    #[test]
    fn a_failure_does_not_count_if_another_call_got_a_reply_in_time() {
        let breaker = an_hour_old();
        let start = Instant::now() - DEADLINE;
        breaker.record_reply(DEADLINE, true);
        breaker.record_failure(start, DEADLINE, &TransportError::timeout(DEADLINE));
        assert_eq!(breaker.consecutive_failures(), 0);
        breaker.record_reply(2 * DEADLINE, true);
        breaker.record_failure(start, DEADLINE, &TransportError::timeout(DEADLINE));
        assert_eq!(breaker.consecutive_failures(), 1, "the reply was too late");
        assert_eq!(breaker.health(DEADLINE).timeouts, 2);
    }
}
