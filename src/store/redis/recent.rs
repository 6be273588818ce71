//! The number of failures in the last minute. It keeps neither errors nor their times.

use std::{
    collections::VecDeque,
    sync::{Mutex, MutexGuard},
    time::{Duration, Instant},
};

use crate::sync::lock;

const MINUTE: Duration = Duration::from_secs(60);
/// The failures within this time are one entry: the count is exact to it.
const PART: Duration = Duration::from_secs(10);

/// The failures of the last minute: the first instant of each part, and their number.
#[derive(Debug, Default)]
pub(super) struct RecentFailures(Mutex<VecDeque<(Instant, u64)>>);

impl RecentFailures {
    pub(super) fn add(&self, now: Instant) {
        let mut parts = self.parts(now);
        match parts.back_mut() {
            Some((first, count)) if now - *first < PART => *count += 1,
            _ => parts.push_back((now, 1)),
        }
    }

    pub(super) fn count(&self, now: Instant) -> u64 {
        self.parts(now).iter().map(|(_, count)| count).sum()
    }

    /// Returns the parts that began in the last minute.
    fn parts(&self, now: Instant) -> MutexGuard<'_, VecDeque<(Instant, u64)>> {
        let mut parts = lock(&self.0);
        parts.retain(|(first, _)| now - *first < MINUTE);
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_counts_for_a_minute_to_ten_seconds() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let failures = RecentFailures::default();
        for seconds in [0, 9, 10, 59] {
            failures.add(at(seconds));
        }
        let counts = [59, 60, 69, 70, 109, 110, 119, 120].map(|at_| failures.count(at(at_)));
        assert_eq!(counts, [4, 2, 2, 1, 1, 1, 0, 0]);
        failures.add(at(100_003));
        assert_eq!(failures.count(at(100_004)), 1);
    }
}
