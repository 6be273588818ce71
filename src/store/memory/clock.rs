//! The clock of the store, in whole microseconds: tokio's, or, with the feature `cpu-counter`, the
//! counter of the processor, corrected by tokio's. Shards clamp its readings.

mod counter;

use std::{sync::OnceLock, time::Duration};

use tokio::time::Instant;

use self::counter::{Counter, Ticks, micros};

/// Counts microseconds since it was made; by a counter, since the first clock of the process was:
/// the later ones measure its rate at once.
pub(super) struct Clock {
    epoch: Instant,
    counter: Option<Counter>,
}

impl Clock {
    pub(super) fn new() -> Self {
        static START: OnceLock<(u64, Instant)> = OnceLock::new();
        match Ticks::of_processor() {
            Some(ticks) => {
                let start = *START.get_or_init(|| ticks.beside_instant());
                Self::of_ticks(ticks, start)
            }
            None => Self { epoch: Instant::now(), counter: None },
        }
    }

    fn of_ticks(ticks: Ticks, (start, epoch): (u64, Instant)) -> Self {
        Self { epoch, counter: Some(Counter::new(ticks, start)) }
    }

    /// Returns a clock whose counter is a number.
    #[cfg(test)]
    pub(super) fn of_number(number: &std::sync::Arc<std::sync::atomic::AtomicU64>) -> Self {
        let ticks = Ticks(number.clone());
        let start = ticks.beside_instant();
        Self::of_ticks(ticks, start)
    }

    /// Readings of two threads can be out of order: a shard clamps them.
    #[inline]
    pub(super) fn now(&self) -> i64 {
        match &self.counter {
            Some(counter) => counter.now().unwrap_or_else(|| counter.correct(self.epoch)),
            None => micros(self.epoch.elapsed()),
        }
    }

    /// Returns the instant of a reading.
    pub(super) fn instant(&self, reading: i64) -> Instant {
        self.epoch + Duration::from_micros(reading as u64)
    }
}
