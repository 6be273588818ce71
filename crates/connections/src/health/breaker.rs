//! Circuit breaker: fails fast while Redis does not answer within the deadlines of its callers. It
//! knows the state of one node, and tells its owner; a node sends the probes.
//!
//! The deadlines of callers differ: those of requests are short, and those of pings and of queries
//! for the slots of a cluster are a second. A server that answers after 200 ms is down for the
//! former and works for the latter. So the breaker is open up to a deadline,
//! [`open_for`](Breaker::open_for).

use std::{
    mem,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use super::{
    super::link::{ServerState, TransportError},
    outbox::Outbox,
    owner::{Event, Owner},
    rejections::{Rejection, Rejections},
    reports::{Reports, ServerChange},
};
use crate::sync::lock;

/// The number of calls in a row without an answer that opens the breaker; they must also take at
/// least one deadline. A single lost call should not open it, and each further one costs a caller
/// its deadline. The number is chosen, not measured.
const MAX_FAILURES: u32 = 5;

/// The time between two events about the same cause of an outage. It is that of
/// [`Reports`](super::reports), so that the log has one rate.
const EXPLAINED_AFTER: Duration = Duration::from_secs(10);

/// The time between two reminders of an outage.
const REMIND_AFTER: Duration = Duration::from_secs(60);

/// The state of a node.
///
/// The atomics are for callers, which read them for each call without a lock. All orders are
/// `Relaxed`: no other memory depends on their values. A caller that sees an old value is one that
/// came a moment earlier: it makes one more call, or one fewer. What must not be lost or counted
/// twice, the change from closed to open and back, is made under `changing`.
pub(crate) struct Breaker {
    made: Instant,
    /// The time of the last reply, in microseconds since `made`.
    last_reply: AtomicU64,
    /// Its latency, in microseconds. It is stored before `last_reply`. A reader that sees only one
    /// of the two judges a failure by the reply before, which counts as many calls wrong as a reply
    /// that came in between: one.
    last_latency: AtomicU64,
    /// The longest deadline within which Redis does not answer, in microseconds plus 1; 0 while the
    /// breaker is closed.
    open_for: AtomicU64,
    /// The shortest deadline that has opened the breaker, in microseconds plus 1.
    open_from: AtomicU64,
    /// The state of the server while the breaker is open.
    cause: Mutex<ServerState>,
    /// The last event about a cause that was found out, and its time.
    explained: Mutex<Option<(ServerState, Instant)>>,
    /// True while a task probes. It is set and read by callers, of which one starts the task; no
    /// other memory depends on it.
    is_probing: AtomicBool,
    failures: Mutex<Failures>,
    owner: Arc<dyn Owner>,
    /// The address of the server, or the name of the master.
    server: Arc<str>,
    reports: Arc<Reports>,
    /// The time of the last reminder.
    reminded: Mutex<Option<((), Instant)>>,
    /// Locked while the state changes, and until the change is in `notices`.
    changing: Mutex<()>,
    rejections: Mutex<Rejections>,
    /// True if an executed script may change `rejections`, whose lock the others do not need. It is
    /// set under that lock; a script that does not see it yet was executed before the rejection.
    has_rejected: AtomicBool,
    rejection_reports: Arc<Reports>,
    notices: Outbox<Notice>,
}

/// What the owner is to hear, in the order of the changes.
enum Notice {
    /// The breaker is open or closed.
    State(bool),
    /// The answer to [`Breaker::tell`].
    Asked(bool, Arc<Tell>),
    Availability(ServerChange),
    Rejection(ServerChange),
    StillRejects(TransportError, Duration),
}

/// Gets the name of a server, and whether its breaker is open.
pub type Tell = dyn Fn(&str, bool) + Send + Sync;

/// The state of one or several nodes.
#[derive(Debug)]
pub struct NodeHealth {
    pub state: ServerState,
    pub is_available: bool,
    pub consecutive_failures: u32,
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

impl Breaker {
    /// Makes the breaker of a node. `server` is its address, or the name of the master.
    pub(crate) fn new(server: Arc<str>, owner: Arc<dyn Owner>) -> Self {
        let made = Instant::now();
        let reports = || Arc::new(Reports::new(server.clone(), owner.clone()));
        Self {
            made,
            last_reply: AtomicU64::new(0),
            last_latency: AtomicU64::new(0),
            open_for: AtomicU64::new(0),
            open_from: AtomicU64::new(u64::MAX),
            cause: Mutex::new(ServerState::Unavailable),
            explained: Mutex::new(None),
            is_probing: AtomicBool::new(false),
            failures: Mutex::new(Failures { count: 0, since: made, within: Duration::ZERO }),
            reports: reports(),
            reminded: Mutex::new(None),
            changing: Mutex::new(()),
            rejections: Mutex::new(Rejections::new(made)),
            has_rejected: AtomicBool::new(false),
            rejection_reports: reports(),
            notices: Outbox::default(),
            owner,
            server,
        }
    }

    pub(crate) fn health(&self, deadline: Duration) -> NodeHealth {
        let is_available = !self.is_open_for(deadline);
        let consecutive_failures = self.consecutive_failures();
        NodeHealth { state: self.state(deadline), is_available, consecutive_failures }
    }

    /// Returns the state of the server for callers with this deadline.
    fn state(&self, deadline: Duration) -> ServerState {
        match () {
            () if self.is_open_for(deadline) => *lock(&self.cause),
            () if lock(&self.rejections).is_rejecting() => ServerState::Rejecting,
            () if self.last_reply.load(Relaxed) == 0 => ServerState::Unknown,
            () => ServerState::Ready,
        }
    }

    /// Returns whether it is unknown why the server does not answer.
    pub(crate) fn is_unexplained(&self) -> bool {
        self.is_open() && *lock(&self.cause) == ServerState::Unavailable
    }

    /// Records why the server does not answer, and reports it.
    pub(crate) fn explain(&self, cause: ServerState) {
        let known = mem::replace(&mut *lock(&self.cause), cause);
        if self.is_open() && cause != known && is_due(&self.explained, cause, EXPLAINED_AFTER) {
            self.owner.notify(&Event::Explained { server: &self.server, cause });
        }
    }

    fn consecutive_failures(&self) -> u32 {
        let Failures { count, since, within } = *lock(&self.failures);
        if self.has_replied(since, within) { 0 } else { count }
    }

    /// Returns the longest deadline of the failed calls.
    pub(crate) fn failed_within(&self) -> Duration {
        lock(&self.failures).within
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

    /// Tells the state, in order with its changes.
    pub(crate) fn tell(&self, tell: Arc<Tell>) {
        {
            let _changing = lock(&self.changing);
            self.notices.add(Notice::Asked(self.is_open(), tell));
        }
        self.deliver();
    }

    /// Reports the state of a new node.
    pub(crate) fn announce(&self) {
        {
            let _changing = lock(&self.changing);
            self.notices.add(Notice::State(self.is_open()));
        }
        self.deliver();
    }

    /// Reports the changes, with no lock held: an owner may call the application.
    fn deliver(&self) {
        let server = &*self.server;
        self.notices.deliver(|notice| match notice {
            Notice::State(is_open) => {
                self.owner.notify(&Event::BreakerChanged { server, is_open });
            }
            Notice::Asked(is_open, tell) => tell(server, is_open),
            Notice::Availability(change) => self.reports.change(change),
            Notice::Rejection(change) => self.rejection_reports.change(change),
            Notice::StillRejects(error, outage) => {
                self.owner.notify(&Event::StillRejects { server, outage, error: &error });
            }
        });
    }

    /// Reports, once in [`REMIND_AFTER`], that an outage lasts. `error` is that of a probe.
    pub(crate) fn remind(&self, error: &TransportError) {
        let outage = lock(&self.failures).since.elapsed();
        if outage >= REMIND_AFTER && is_due(&self.reminded, (), REMIND_AFTER) {
            let (server, cause) = (&*self.server, *lock(&self.cause));
            self.owner.notify(&Event::StillUnavailable { server, cause, outage, error });
        }
    }

    /// Records that the server replied to a script with an error.
    pub(crate) fn record_rejection(&self, error: &TransportError) {
        {
            let mut rejections = lock(&self.rejections);
            // Under the lock, so that an execution that empties the list does not undo it.
            self.has_rejected.store(true, Relaxed);
            self.notices.add(match rejections.reject(Instant::now()) {
                Rejection::Begins => Notice::Rejection(ServerChange::Rejects(error.clone())),
                Rejection::Lasts(outage) => Notice::StillRejects(error.clone(), outage),
                Rejection::Known => return,
            });
        }
        self.deliver();
    }

    /// Records that the server executed a script. Returns true if it may execute all again: the
    /// caller asks it for a proof then, because other scripts may need what it still rejects.
    pub(crate) fn record_execution(&self) -> bool {
        if !self.has_rejected.load(Relaxed) {
            return false;
        }
        // Executed scripts take the lock only while some are rejected, which is seldom.
        let mut rejections = lock(&self.rejections);
        let is_proof_due = rejections.execute(Instant::now());
        self.has_rejected.store(!rejections.is_empty(), Relaxed);
        is_proof_due
    }

    /// Records that the proof has succeeded: the server executes all scripts.
    pub(crate) fn record_proof(&self) {
        {
            let mut rejections = lock(&self.rejections);
            if let Some(outage) = rejections.prove(Instant::now()) {
                self.notices.add(Notice::Rejection(ServerChange::Executes(outage)));
            }
            self.has_rejected.store(!rejections.is_empty(), Relaxed);
        }
        self.deliver();
    }

    /// Records the reply to a script. `is_proof` means that Redis can execute the scripts of the
    /// owner: it replies to other commands even if it rejects writes.
    pub(crate) fn record_reply(&self, at: Instant, latency: Duration, is_proof: bool) {
        let latency = micros(latency);
        self.last_latency.store(latency, Relaxed);
        self.last_reply.store(micros(at.saturating_duration_since(self.made)), Relaxed);
        // A reply that is too late for the callers proves nothing: they would time out again. While
        // the breaker is closed, this is the only test, so that a reply takes no lock.
        if !is_proof || latency >= self.open_for.load(Relaxed) {
            return;
        }
        {
            let _changing = lock(&self.changing);
            if latency >= self.open_for.load(Relaxed) {
                return; // another reply closed the breaker
            }
            if latency >= self.open_from.load(Relaxed) {
                self.open_for.store(latency, Relaxed);
            } else if self.close() {
                let since = lock(&self.failures).since;
                let available = ServerChange::Available(since.elapsed());
                self.notices.add(Notice::Availability(available));
                self.notices.add(Notice::State(false));
            }
        }
        self.deliver();
    }

    /// Closes the breaker. Returns whether it was open. The caller holds the lock.
    fn close(&self) -> bool {
        self.open_from.store(u64::MAX, Relaxed);
        self.open_for.swap(0, Relaxed) > 0
    }

    /// Records that the node has left the cluster: it gets no more calls.
    pub(crate) fn retire(&self) {
        {
            let _changing = lock(&self.changing);
            if self.close() {
                self.notices.add(Notice::Availability(ServerChange::Retired));
                self.notices.add(Notice::State(false));
            }
        }
        self.deliver();
    }

    /// Records a call that began at `start` and got no reply. Returns whether this opens the
    /// breaker.
    pub(crate) fn record_failure(
        &self,
        start: Instant,
        deadline: Duration,
        error: &TransportError,
    ) -> bool {
        let open_for = micros(deadline) + 1;
        if self.failing_for(start, deadline) < deadline {
            return false;
        }
        let opens = {
            let _changing = lock(&self.changing);
            // `fetch_max`: a caller with a shorter deadline must not shorten an outage that one
            // with a longer deadline has found.
            let opened_for = self.open_for.fetch_max(open_for, Relaxed);
            let opens = opened_for < open_for;
            if opens {
                self.open_from.fetch_min(open_for, Relaxed);
            }
            if opened_for == 0 {
                let cause = error.server_state();
                *lock(&self.cause) = cause;
                let unavailable = ServerChange::Unavailable(cause, error.clone());
                self.notices.add(Notice::Availability(unavailable));
                self.notices.add(Notice::State(true));
            }
            opens
        };
        self.deliver();
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

    /// Returns true if the caller is to start the task that probes, which ends with
    /// [`end_probing`](Self::end_probing).
    pub(crate) fn begin_probing(&self) -> bool {
        !self.is_probing.swap(true, Relaxed)
    }

    pub(crate) fn end_probing(&self) {
        self.is_probing.store(false, Relaxed);
    }
}

/// Returns whether an event is not the same as the last one, or comes so long after it. It is the
/// last one then.
fn is_due<T: Copy + PartialEq>(
    last: &Mutex<Option<(T, Instant)>>,
    event: T,
    after: Duration,
) -> bool {
    let last = &mut *lock(last);
    let is_due = last.is_none_or(|(old, at)| old != event || at.elapsed() >= after);
    if is_due {
        *last = Some((event, Instant::now()));
    }
    is_due
}

fn micros(time: Duration) -> u64 {
    time.as_micros().min(u128::from(u64::MAX - 1)) as u64
}

#[cfg(test)]
mod tests {
    use std::thread;

    use redis::RedisError;

    use super::{super::owner::Probe, *};

    const DEADLINE: Duration = Duration::from_millis(100);

    /// Records the changes of the breaker, and the outages in reminders.
    #[derive(Default)]
    struct Changes(Mutex<Vec<bool>>, Mutex<Vec<Duration>>);

    impl Owner for Changes {
        fn notify(&self, event: &Event<'_>) {
            match event {
                Event::BreakerChanged { is_open, .. } => {
                    thread::yield_now();
                    lock(&self.0).push(*is_open);
                }
                Event::StillUnavailable { outage, .. } => lock(&self.1).push(*outage),
                _ => {}
            }
        }

        fn is_of_one_key(&self, _: &RedisError) -> bool {
            false
        }

        fn ping(&self, _: &str) -> Probe {
            unreachable!("a breaker sends nothing")
        }

        fn probe(&self, _: &[u8]) -> Probe {
            unreachable!("a breaker sends nothing")
        }

        fn proof(&self, _: &[u8]) -> Probe {
            unreachable!("a breaker sends nothing")
        }
    }

    fn an_hour_old() -> (Breaker, Arc<Changes>) {
        let made = Instant::now() - Duration::from_secs(3_600);
        let changes = Arc::<Changes>::default();
        (Breaker { made, ..Breaker::new("".into(), changes.clone()) }, changes)
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
        let (breaker, changes) = an_hour_old();
        let is_open = |deadline| breaker.is_open_for(deadline);
        fail(&breaker, DEADLINE);
        assert!(is_open(DEADLINE) && is_open(DEADLINE / 2) && !is_open(2 * DEADLINE));
        fail(&breaker, 2 * DEADLINE);
        assert!(is_open(2 * DEADLINE) && !is_open(3 * DEADLINE));
        breaker.record_reply(Instant::now(), 3 * DEADLINE, true);
        assert!(is_open(2 * DEADLINE), "the reply was too late");
        assert_eq!(breaker.consecutive_failures(), 10);
        breaker.record_reply(Instant::now(), 3 * DEADLINE / 2, true);
        assert!(!is_open(2 * DEADLINE) && is_open(DEADLINE), "the reply was too late for some");
        breaker.record_reply(Instant::now(), DEADLINE, false);
        assert!(is_open(DEADLINE), "the reply proved nothing");
        breaker.record_reply(Instant::now(), DEADLINE, true);
        assert!(!breaker.is_open());
        assert_eq!(breaker.consecutive_failures(), 0);
        assert_eq!(*lock(&changes.0), [true, false], "it was open all the time");
    }

    #[test]
    fn each_change_is_reported_once_and_in_order() {
        const SHORT: Duration = Duration::from_nanos(1);
        let (breaker, changes) = an_hour_old();
        let error = TransportError::timeout(SHORT);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..5_000 {
                        breaker.record_failure(Instant::now(), SHORT, &error);
                    }
                });
                scope.spawn(|| {
                    (0..5_000).for_each(|_| breaker.record_reply(Instant::now(), SHORT, true))
                });
            }
        });
        let changes = lock(&changes.0);
        assert!(changes.len() > 1, "{changes:?}");
        assert!(changes.iter().enumerate().all(|(i, is_open)| *is_open == (i % 2 == 0)));
        assert_eq!(changes.last(), Some(&breaker.is_open()));
    }

    #[test]
    fn a_long_outage_is_reported_again() {
        let (breaker, changes) = an_hour_old();
        fail(&breaker, DEADLINE); // over a minute
        let error = TransportError::timeout(DEADLINE);
        (0..2).for_each(|_| breaker.remind(&error));
        let outages = lock(&changes.1);
        assert_eq!(outages.len(), 1, "the last reminder was a moment ago");
        assert!(outages[0] >= REMIND_AFTER);
    }

    #[test]
    fn a_failure_does_not_count_if_another_call_got_a_reply_in_time() {
        let (breaker, _) = an_hour_old();
        let start = Instant::now() - DEADLINE;
        breaker.record_reply(Instant::now(), DEADLINE, true);
        breaker.record_failure(start, DEADLINE, &TransportError::timeout(DEADLINE));
        assert_eq!(breaker.consecutive_failures(), 0);
        breaker.record_reply(Instant::now(), 2 * DEADLINE, true);
        breaker.record_failure(start, DEADLINE, &TransportError::timeout(DEADLINE));
        assert_eq!(breaker.consecutive_failures(), 1, "the reply was too late");
    }
}
