//! Circuit breaker: fails fast while Redis does not answer within the deadline of its callers.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use redis::RedisError;

use super::reports::{Reports, State};
use crate::{error::StoreError, store::lock};

/// The longest time between two probes: if it is longer, their runtime does not run.
const LONGEST_PROBE: Duration = Duration::from_secs(3);

/// After that many calls in a row without an answer, the breaker opens.
const MOST_FAILURES: u32 = 5;

/// The state of a [`RedisStore`](crate::RedisStore). The numbers count from when the store was
/// made; clones share them.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Health {
    /// Whether decisions are sent to Redis. While it is false, they fail at once, and one probe at
    /// a time finds out when Redis answers again.
    ///
    /// * It becomes false when five calls in a row, over at least a deadline, got no answer in
    ///   time.
    /// * It becomes true when Redis runs a script within the deadline of these calls: a probe that
    ///   would write, sent 100 ms after the one before, or a call of a clone with a longer deadline.
    ///   Errors such as LOADING, BUSY or READONLY do not count.
    ///
    /// Only calls can fail, so without traffic it stays true, whatever Redis does: to find out
    /// whether Redis answers now, call [`ping`](crate::RedisStore::ping). An error that Redis sends
    /// is an answer, as when it is read-only: `errors` and `last_error` report these. A clone with
    /// a longer deadline is available for as long as its own calls are answered. In a cluster it is
    /// true if it is true of each node that has keys; decisions fail for the keys of the other
    /// nodes.
    pub is_available: bool,
    /// The calls in a row that got no answer, 0 after an answer in time. Probes are not included, nor
    /// releases for requests that were dropped. With
    /// 5 or more, over at least a deadline, Redis becomes unavailable. In a cluster, those of the
    /// node with the most.
    pub consecutive_failures: u32,
    /// The text of the last error that `timeouts`, `interrupted` and `errors` count, if there was one. It stays
    /// when Redis answers again.
    pub last_error: Option<Arc<str>>,
    /// The number of answers from Redis, errors that it sent included.
    pub answers: u64,
    /// The number of calls without an answer within their deadlines, and of attempts to connect
    /// that took too long.
    pub timeouts: u64,
    /// The number of calls whose connection ended while they were under way. Redis may have counted
    /// them, so they are not repeated.
    pub interrupted: u64,
    /// The number of other attempts to connect that failed, and of errors that Redis sent, without
    /// redirections to other nodes.
    pub errors: u64,
    /// The number of calls that failed at once because Redis was unavailable.
    pub skipped: u64,
    /// The number of times that Redis became unavailable, for each deadline in use.
    pub outages: u64,
}

#[derive(Debug)]
pub(crate) struct Breaker {
    made: Instant,
    /// The time of the last answer, in microseconds since `made`, and how long it took.
    last_answer: AtomicU64,
    last_took: AtomicU64,
    /// The deadline, in microseconds and 1 more, within which Redis does not answer; 0 while it
    /// does.
    open_for: AtomicU64,
    /// The shortest deadline for which that was found out, in microseconds and 1 more.
    open_from: AtomicU64,
    /// When the probe, if there is one, has asked last.
    probed: Mutex<Option<Instant>>,
    failures: Mutex<Failures>,
    counters: Arc<Counters>,
    reports: Arc<Reports>,
}

/// The calls in a row without an answer.
#[derive(Debug)]
struct Failures {
    count: u32,
    /// When the first of them was asked.
    since: Instant,
    /// The longest of their deadlines.
    within: Duration,
}

/// The nodes of a cluster have them together.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    answers: AtomicU64,
    timeouts: AtomicU64,
    interrupted: AtomicU64,
    errors: AtomicU64,
    skipped: AtomicU64,
    outages: AtomicU64,
    last_error: Mutex<Option<StoreError>>,
}

impl Counters {
    pub(crate) fn health(&self, is_available: bool, consecutive_failures: u32) -> Health {
        let last_error = lock(&self.last_error).clone();
        Health {
            is_available,
            consecutive_failures,
            last_error: last_error.map(|error| text_of(&error).into()),
            answers: self.answers.load(Relaxed),
            timeouts: self.timeouts.load(Relaxed),
            interrupted: self.interrupted.load(Relaxed),
            errors: self.errors.load(Relaxed),
            skipped: self.skipped.load(Relaxed),
            outages: self.outages.load(Relaxed),
        }
    }

    fn failed(&self, error: &StoreError) {
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

fn text_of(error: &StoreError) -> String {
    match error.redis() {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}

impl Breaker {
    pub(crate) fn new() -> Self {
        Self::with(None, Arc::default())
    }

    pub(crate) fn of_node(node: String, counters: Arc<Counters>) -> Self {
        Self::with(Some(node), counters)
    }

    fn with(node: Option<String>, counters: Arc<Counters>) -> Self {
        let made = Instant::now();
        Self {
            made,
            last_answer: AtomicU64::new(0),
            last_took: AtomicU64::new(0),
            open_for: AtomicU64::new(0),
            open_from: AtomicU64::new(u64::MAX),
            probed: Mutex::new(None),
            failures: Mutex::new(Failures { count: 0, since: made, within: Duration::ZERO }),
            counters,
            reports: Arc::new(Reports::new(node)),
        }
    }

    pub(crate) fn health(&self, deadline: Duration) -> Health {
        self.counters.health(!self.is_open_for(deadline), self.consecutive_failures())
    }

    pub(crate) fn consecutive_failures(&self) -> u32 {
        let Failures { count, since, within } = *lock(&self.failures);
        if self.has_answered(since, within) { 0 } else { count }
    }

    /// Whether there is a deadline within which Redis does not answer.
    pub(crate) fn is_open(&self) -> bool {
        self.open_for.load(Relaxed) > 0
    }

    /// Whether callers with this deadline get no answers. Those with a longer one may.
    pub(crate) fn is_open_for(&self, deadline: Duration) -> bool {
        micros(deadline) < self.open_for.load(Relaxed)
    }

    pub(crate) fn skipped(&self) {
        self.counters.skipped.fetch_add(1, Relaxed);
    }

    /// Records that Redis has answered a script after this time, and whether that proves that it
    /// can decide. Answers to other commands prove less: a Redis that may not write answers them.
    pub(crate) fn answered(&self, took: Duration, proves: bool) {
        let took = micros(took);
        self.last_took.store(took, Relaxed);
        self.last_answer.store(micros(self.made.elapsed()), Relaxed);
        // An answer that is too late for the callers proves nothing: they would time out again.
        if !proves || took >= self.open_for.load(Relaxed) {
            return;
        }
        if took >= self.open_from.load(Relaxed) {
            self.open_for.store(took, Relaxed);
        } else if self.close() {
            let since = lock(&self.failures).since;
            self.reports.change(State::Available(since.elapsed()));
        }
    }

    /// Returns whether it was open.
    fn close(&self) -> bool {
        self.open_from.store(u64::MAX, Relaxed);
        self.open_for.swap(0, Relaxed) > 0
    }

    /// Redis is not called any more.
    pub(crate) fn leave(&self) {
        if self.close() {
            self.reports.change(State::Left);
        }
    }

    pub(crate) fn count_answer(&self) {
        self.counters.answers.fetch_add(1, Relaxed);
    }

    /// Counts a failure after which Redis may still answer callers in time: it sent an error, the
    /// deadline had passed before a command was sent, or a probe failed.
    pub(crate) fn noticed(&self, error: &StoreError) {
        self.counters.failed(error);
    }

    /// A call that was asked then got no answer. Returns whether Redis is unavailable from now on.
    pub(crate) fn failed(&self, asked: Instant, deadline: Duration, error: &StoreError) -> bool {
        self.counters.failed(error);
        let open_for = micros(deadline) + 1;
        let opens = self.count(asked, deadline) >= deadline
            && self.open_for.fetch_max(open_for, Relaxed) < open_for;
        if opens {
            self.open_from.fetch_min(open_for, Relaxed);
            self.counters.outages.fetch_add(1, Relaxed);
            self.reports.change(State::Unavailable(error.clone()));
        }
        opens
    }

    /// For how long enough calls have got no answer.
    fn count(&self, asked: Instant, deadline: Duration) -> Duration {
        let failures = &mut *lock(&self.failures);
        let within = failures.within.max(deadline);
        if failures.count == 0 || self.has_answered(failures.since, within) {
            *failures = Failures { count: 0, since: asked, within: Duration::ZERO };
        }
        if self.has_answered(asked, deadline) {
            return Duration::ZERO; // others got one meanwhile
        }
        failures.count += 1;
        failures.within = failures.within.max(deadline);
        if failures.count >= MOST_FAILURES { failures.since.elapsed() } else { Duration::ZERO }
    }

    /// Whether the last answer came after that instant, and within so long.
    fn has_answered(&self, since: Instant, within: Duration) -> bool {
        let last_answer = self.made + Duration::from_micros(self.last_answer.load(Relaxed));
        last_answer > since && self.last_took.load(Relaxed) <= micros(within)
    }

    /// What the caller does about finding out whether Redis is back.
    pub(crate) fn duty(&self) -> Duty {
        let probed = &mut *lock(&self.probed);
        let duty = match probed {
            None => Duty::Probe,
            Some(at) if at.elapsed() > LONGEST_PROBE => Duty::EngineRequest,
            Some(_) => return Duty::Nothing,
        };
        *probed = Some(Instant::now());
        duty
    }

    /// The probe asks now.
    pub(crate) fn probes(&self) {
        *lock(&self.probed) = Some(Instant::now());
    }

    pub(crate) fn end_probe(&self) {
        *lock(&self.probed) = None;
    }
}

fn micros(time: Duration) -> u64 {
    time.as_micros().min(u128::from(u64::MAX - 1)) as u64
}

pub(crate) enum Duty {
    Nothing,
    /// Begins to probe, and says when that has [ended](Breaker::end_probe).
    Probe,
    /// Asks as if Redis were available: the probe's runtime does not run.
    EngineRequest,
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEADLINE: Duration = Duration::from_millis(100);

    fn an_hour_old() -> Breaker {
        let made = Instant::now() - Duration::from_secs(3_600);
        Breaker { made, ..Breaker::new() }
    }

    /// Five calls with a deadline have failed, a minute ago and since.
    fn fail(breaker: &Breaker, deadline: Duration) {
        let error = StoreError::timeout(deadline);
        for _ in 0..MOST_FAILURES {
            breaker.failed(Instant::now() - Duration::from_secs(60), deadline, &error);
        }
    }

    #[test]
    fn it_closes_with_an_answer_within_the_deadline_of_those_that_failed() {
        let breaker = an_hour_old();
        let is_open = |deadline| breaker.is_open_for(deadline);
        fail(&breaker, DEADLINE);
        assert!(is_open(DEADLINE) && is_open(DEADLINE / 2) && !is_open(2 * DEADLINE));
        fail(&breaker, 2 * DEADLINE);
        assert!(is_open(2 * DEADLINE) && !is_open(3 * DEADLINE));
        breaker.answered(3 * DEADLINE, true);
        assert!(is_open(2 * DEADLINE), "that answer was too late");
        assert_eq!(breaker.consecutive_failures(), 10);
        breaker.answered(3 * DEADLINE / 2, true);
        assert!(!is_open(2 * DEADLINE) && is_open(DEADLINE), "that answer was too late for some");
        breaker.answered(DEADLINE, false);
        assert!(is_open(DEADLINE), "that answer proved nothing");
        breaker.answered(DEADLINE, true);
        assert!(!breaker.is_open());
        assert_eq!(breaker.consecutive_failures(), 0);
        assert_eq!(breaker.health(DEADLINE).outages, 2);
    }

    #[test]
    fn an_answer_that_others_got_in_time_is_no_failure_in_a_row() {
        let breaker = an_hour_old();
        let asked = Instant::now() - DEADLINE;
        breaker.answered(DEADLINE, true);
        breaker.failed(asked, DEADLINE, &StoreError::timeout(DEADLINE));
        assert_eq!(breaker.consecutive_failures(), 0);
        breaker.answered(2 * DEADLINE, true);
        breaker.failed(asked, DEADLINE, &StoreError::timeout(DEADLINE));
        assert_eq!(breaker.consecutive_failures(), 1, "that answer was too late");
        assert_eq!(breaker.health(DEADLINE).timeouts, 2);
    }
}
