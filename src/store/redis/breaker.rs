//! Whether Redis answers at all, so that nobody waits for it while it does not.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use crate::store::lock;

/// After so many questions in a row without an answer, no more are asked.
const MOST_FAILURES: u32 = 5;

/// How a [`RedisStore`](crate::RedisStore) is doing. The numbers count from when it was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Health {
    /// Whether Redis answers. While it does not, decisions fail at once, and one question every 100 ms finds
    /// out when it does again. In a cluster, whether each node does that has keys: the decisions that fail are
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
    is_probing: AtomicBool,
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
            is_probing: AtomicBool::new(false),
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
            let (_, since) = *lock(&self.failures);
            event::available(self.node.as_deref(), since.elapsed());
        }
    }

    /// A question that was asked then got no answer. Returns whether Redis is unavailable from now on.
    pub(super) fn failed(&self, asked: Instant, deadline: Duration, is_timeout: bool) -> bool {
        let counters = &self.counters;
        if is_timeout { &counters.timeouts } else { &counters.errors }.fetch_add(1, Relaxed);
        let last_answer = self.made + Duration::from_micros(self.last_answer.load(Relaxed));
        let (failures, since) = &mut *lock(&self.failures);
        if last_answer > *since {
            (*failures, *since) = (0, asked);
        }
        if last_answer > asked {
            return false; // others got one meanwhile
        }
        *failures += 1;
        let opens = *failures >= MOST_FAILURES && since.elapsed() >= deadline;
        if opens && !self.is_open.swap(true, Relaxed) {
            self.counters.outages.fetch_add(1, Relaxed);
            event::unavailable(self.node.as_deref());
            return true;
        }
        false
    }

    /// Whether the caller is the one who probes now; then he says when he has [ended](Breaker::end_probe).
    pub(super) fn begin_probe(&self) -> bool {
        !self.is_probing.swap(true, Relaxed)
    }

    pub(super) fn end_probe(&self) {
        self.is_probing.store(false, Relaxed);
    }
}

/// Told once per change, and not per request.
#[cfg(feature = "tracing")]
mod event {
    use std::time::Duration;

    pub(super) fn unavailable(node: Option<&str>) {
        tracing::warn!(node, "Redis does not answer, its decisions fail at once until it does");
    }

    pub(super) fn available(node: Option<&str>, after: Duration) {
        tracing::info!(node, ?after, "Redis answers again");
    }
}

#[cfg(not(feature = "tracing"))]
mod event {
    use std::time::Duration;

    pub(super) fn unavailable(_node: Option<&str>) {}

    pub(super) fn available(_node: Option<&str>, _after: Duration) {}
}
