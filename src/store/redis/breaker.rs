//! Whether Redis answers at all, so that nobody waits for it while it does not.

use std::{
    sync::{
        Mutex,
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
    /// out when it does again.
    pub is_available: bool,
    /// How often Redis answered, errors that it sent included.
    pub answers: u64,
    /// How often it gave no answer within the deadline.
    pub timeouts: u64,
    /// How often a connection failed, or Redis answered with an error.
    pub errors: u64,
    /// How often it was not asked, because it was not available.
    pub skipped: u64,
    /// How often it became unavailable.
    pub outages: u64,
}

#[derive(Debug)]
pub(super) struct Breaker {
    made: Instant,
    /// The time of the last answer, in microseconds since `made`.
    last_answer: AtomicU64,
    is_open: AtomicBool,
    is_probing: AtomicBool,
    /// The questions in a row without an answer, and when the first of them was asked.
    failures: Mutex<(u32, Instant)>,
    answers: AtomicU64,
    timeouts: AtomicU64,
    errors: AtomicU64,
    skipped: AtomicU64,
    outages: AtomicU64,
}

impl Breaker {
    pub(super) fn new() -> Self {
        let made = Instant::now();
        Self {
            made,
            last_answer: AtomicU64::new(0),
            is_open: AtomicBool::new(false),
            is_probing: AtomicBool::new(false),
            failures: Mutex::new((0, made)),
            answers: AtomicU64::new(0),
            timeouts: AtomicU64::new(0),
            errors: AtomicU64::new(0),
            skipped: AtomicU64::new(0),
            outages: AtomicU64::new(0),
        }
    }

    pub(super) fn health(&self) -> Health {
        Health {
            is_available: !self.is_open(),
            answers: self.answers.load(Relaxed),
            timeouts: self.timeouts.load(Relaxed),
            errors: self.errors.load(Relaxed),
            skipped: self.skipped.load(Relaxed),
            outages: self.outages.load(Relaxed),
        }
    }

    pub(super) fn is_open(&self) -> bool {
        self.is_open.load(Relaxed)
    }

    pub(super) fn skipped(&self) {
        self.skipped.fetch_add(1, Relaxed);
    }

    /// Redis has answered, if with an error.
    pub(super) fn answered(&self, is_error: bool) {
        self.answers.fetch_add(1, Relaxed);
        if is_error {
            self.errors.fetch_add(1, Relaxed);
        }
        self.last_answer.store(self.made.elapsed().as_micros() as u64, Relaxed);
        if self.is_open() && self.is_open.swap(false, Relaxed) {
            let (_, since) = *lock(&self.failures);
            event::available(since.elapsed());
        }
    }

    /// A question that was asked then got no answer. Returns whether Redis is unavailable from now on.
    pub(super) fn failed(&self, asked: Instant, deadline: Duration, is_timeout: bool) -> bool {
        if is_timeout { &self.timeouts } else { &self.errors }.fetch_add(1, Relaxed);
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
            self.outages.fetch_add(1, Relaxed);
            event::unavailable();
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

    pub(super) fn unavailable() {
        tracing::warn!("Redis does not answer, its decisions fail at once until it does");
    }

    pub(super) fn available(after: Duration) {
        tracing::info!(?after, "Redis answers again");
    }
}

#[cfg(not(feature = "tracing"))]
mod event {
    use std::time::Duration;

    pub(super) fn unavailable() {}

    pub(super) fn available(_after: Duration) {}
}
