//! Whether Redis answers at all, so that nobody waits for it while it does not.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use crate::{error::StoreError, store::lock};

/// A probe asks at least so often: if it does not, whoever runs it is not running.
const LONGEST_PROBE: Duration = Duration::from_secs(3);

/// After so many questions in a row without an answer, no more are asked.
const MOST_FAILURES: u32 = 5;

/// How a [`RedisStore`](crate::RedisStore) is doing. The numbers count from when it was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Health {
    /// Whether Redis answers. While it does not, decisions fail at once, and one question at a time finds out when
    /// it does again. What it answers can be errors, as when it is read-only: these are counted below. In a cluster, whether each node does that has keys: the decisions that fail are
    /// those about the keys of one that does not.
    pub is_available: bool,
    /// How often Redis answered, errors that it sent included.
    pub answers: u64,
    /// How often it gave no answer within the deadline.
    pub timeouts: u64,
    /// How often a connection failed, or Redis answered with an error, other than by sending on to another node.
    pub errors: u64,
    /// How often it was not asked, because it was not available.
    pub skipped: u64,
    /// How often it became unavailable.
    pub outages: u64,
}

#[derive(Debug)]
pub(super) struct Breaker {
    /// Which node of a cluster it is about.
    node: Option<String>,
    made: Instant,
    /// The time of the last answer, in microseconds since `made`.
    last_answer: AtomicU64,
    is_open: AtomicBool,
    /// When the probe, if there is one, has asked last.
    probed: Mutex<Option<Instant>>,
    /// The questions in a row without an answer, and when the first of them was asked.
    failures: Mutex<(u32, Instant)>,
    counters: Arc<Counters>,
}

/// The nodes of a cluster have them together.
#[derive(Debug, Default)]
pub(super) struct Counters {
    answers: AtomicU64,
    timeouts: AtomicU64,
    errors: AtomicU64,
    skipped: AtomicU64,
    outages: AtomicU64,
}

impl Counters {
    pub(super) fn health(&self, is_available: bool) -> Health {
        Health {
            is_available,
            answers: self.answers.load(Relaxed),
            timeouts: self.timeouts.load(Relaxed),
            errors: self.errors.load(Relaxed),
            skipped: self.skipped.load(Relaxed),
            outages: self.outages.load(Relaxed),
        }
    }
}

impl Breaker {
    pub(super) fn new() -> Self {
        Self::with(None, Arc::default())
    }

    pub(super) fn of_node(node: String, counters: Arc<Counters>) -> Self {
        Self::with(Some(node), counters)
    }

    fn with(node: Option<String>, counters: Arc<Counters>) -> Self {
        let made = Instant::now();
        Self {
            node,
            made,
            last_answer: AtomicU64::new(0),
            is_open: AtomicBool::new(false),
            probed: Mutex::new(None),
            failures: Mutex::new((0, made)),
            counters,
        }
    }

    pub(super) fn health(&self) -> Health {
        self.counters.health(!self.is_open())
    }

    pub(super) fn is_open(&self) -> bool {
        self.is_open.load(Relaxed)
    }

    pub(super) fn skipped(&self) {
        self.counters.skipped.fetch_add(1, Relaxed);
    }

    /// Redis has answered, if with an error.
    pub(super) fn answered(&self, is_error: bool) {
        self.counters.answers.fetch_add(1, Relaxed);
        if is_error {
            self.counters.errors.fetch_add(1, Relaxed);
        }
        self.last_answer.store(self.made.elapsed().as_micros() as u64, Relaxed);
        if self.is_open() && self.is_open.swap(false, Relaxed) {
            let since = lock(&self.failures).1;
            event::available(self.node.as_deref(), since.elapsed());
        }
    }

    /// A question that was asked then got no answer. Returns whether Redis is unavailable from now on.
    pub(super) fn failed(&self, asked: Instant, deadline: Duration, error: &StoreError) -> bool {
        let Counters { timeouts, errors, .. } = &*self.counters;
        if error.is_timeout() { timeouts } else { errors }.fetch_add(1, Relaxed);
        let opens = self.count(asked) >= deadline && !self.is_open.swap(true, Relaxed);
        if opens {
            self.counters.outages.fetch_add(1, Relaxed);
            event::unavailable(self.node.as_deref(), error);
        }
        opens
    }

    /// For how long enough questions have got no answer.
    fn count(&self, asked: Instant) -> Duration {
        let last_answer = self.made + Duration::from_micros(self.last_answer.load(Relaxed));
        let (failures, since) = &mut *lock(&self.failures);
        if *failures == 0 || last_answer > *since {
            (*failures, *since) = (0, asked);
        }
        if last_answer > asked {
            return Duration::ZERO; // others got one meanwhile
        }
        *failures += 1;
        if *failures >= MOST_FAILURES { since.elapsed() } else { Duration::ZERO }
    }

    /// What the caller does about finding out whether Redis is back.
    pub(super) fn duty(&self) -> Duty {
        let probed = &mut *lock(&self.probed);
        let duty = match probed {
            None => Duty::Probe,
            Some(at) if at.elapsed() > LONGEST_PROBE => Duty::Ask,
            Some(_) => return Duty::Nothing,
        };
        *probed = Some(Instant::now());
        duty
    }

    /// The probe asks now.
    pub(super) fn probes(&self) {
        *lock(&self.probed) = Some(Instant::now());
    }

    pub(super) fn end_probe(&self) {
        *lock(&self.probed) = None;
    }
}

pub(super) enum Duty {
    Nothing,
    /// Begins to probe, and says when that has [ended](Breaker::end_probe).
    Probe,
    /// Asks as if Redis were available: the probe's runtime does not run.
    Ask,
}

/// Told once per change, and not per request.
mod event {
    use std::time::Duration;

    use super::StoreError;

    #[cfg_attr(not(feature = "tracing"), allow(unused_variables))]
    pub(super) fn unavailable(node: Option<&str>, error: &StoreError) {
        #[cfg(feature = "tracing")]
        tracing::warn!(
            node,
            error = error as &dyn std::error::Error,
            "Redis does not answer, its decisions fail at once until it does"
        );
    }

    #[cfg_attr(not(feature = "tracing"), allow(unused_variables))]
    pub(super) fn available(node: Option<&str>, after: Duration) {
        #[cfg(feature = "tracing")]
        tracing::info!(node, ?after, "Redis answers again");
    }
}
