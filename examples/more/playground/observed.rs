//! What the crate reports about the limiters of each page: decisions, and calls to Redis. The page
//! counts for itself, in `tally.rs`.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
};

use serde::Serialize;
use tower_ratelimit::observe::{Event, Observer};

use crate::{algorithms::SHOWN, flight::WAITS};

/// The counts of one limiter.
#[derive(Default)]
struct Counters {
    allowed: AtomicU64,
    denied: AtomicU64,
    calls: AtomicU64,
    checks: AtomicU64,
}

/// The counts of the limiters of one page.
#[derive(Default)]
pub struct Observed([Counters; SHOWN.len()]);

impl Observed {
    /// Returns the calls to Redis about a limiter, and the checks in these calls.
    pub fn calls(&self, lane: usize) -> (u64, u64) {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        self.0.get(lane).map_or((0, 0), |counters| (load(&counters.calls), load(&counters.checks)))
    }
}

impl Observer for Observed {
    fn on_event(&self, event: &Event<'_>) {
        let named = SHOWN.iter().zip(&self.0).find(|(shown, _)| event.limiter() == Some(shown.id));
        let Some((_, counters)) = named else { return };
        match *event {
            Event::Decided { decision, .. } if decision.is_allowed() => add(&counters.allowed, 1),
            Event::Decided { .. } => add(&counters.denied, 1),
            Event::BatchSent { checks, .. } => {
                add(&counters.calls, 1);
                add(&counters.checks, checks as u64);
            }
            // In the task of the request.
            Event::WaitBegan { .. } => {
                let _ = WAITS.try_with(|waits| waits.set(true));
            }
            _ => {}
        }
    }
}

fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

/// The counts of all open pages.
#[derive(Default)]
pub struct Sessions(Mutex<Vec<Weak<Observed>>>);

#[derive(Default, Serialize)]
pub struct Counts {
    allowed: u64,
    denied: u64,
}

impl Sessions {
    pub fn add(&self, observed: &Arc<Observed>) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|observed| observed.strong_count() > 0);
        all.push(Arc::downgrade(observed));
    }

    /// Returns the decisions of each algorithm, on all pages.
    pub fn counts(&self) -> BTreeMap<&'static str, Counts> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut counts = BTreeMap::<_, Counts>::new();
        for observed in all.iter().filter_map(Weak::upgrade) {
            for (shown, counters) in SHOWN.iter().zip(&observed.0) {
                let sum = counts.entry(shown.id).or_default();
                sum.allowed += counters.allowed.load(Ordering::Relaxed);
                sum.denied += counters.denied.load(Ordering::Relaxed);
            }
        }
        counts
    }
}
