//! The number of failures in the last minute. It keeps neither errors nor their times.

use std::{
    sync::Mutex,
    time::{Duration, Instant},
};

use crate::sync::lock;

/// The parts of the minute: the count is exact to one of them.
const PARTS: usize = 6;
const PART: Duration = Duration::from_secs(10);

/// The failures in each part of the last minute.
#[derive(Debug)]
pub(super) struct RecentFailures {
    made: Instant,
    counts: Mutex<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    /// The number of the latest part, since the start.
    part: u64,
    of_parts: [u64; PARTS],
}

impl RecentFailures {
    pub(super) fn new(made: Instant) -> Self {
        Self { made, counts: Mutex::default() }
    }

    pub(super) fn add(&self, now: Instant) {
        let counts = &mut *lock(&self.counts);
        counts.move_to(self.part(now));
        counts.of_parts[counts.part as usize % PARTS] += 1;
    }

    pub(super) fn count(&self, now: Instant) -> u64 {
        let counts = &mut *lock(&self.counts);
        counts.move_to(self.part(now));
        counts.of_parts.iter().sum()
    }

    fn part(&self, now: Instant) -> u64 {
        (now - self.made).as_secs() / PART.as_secs()
    }
}

impl Counts {
    /// Empties the parts that begin between the latest one and `part`.
    fn move_to(&mut self, part: u64) {
        let first = self.part + 1;
        for new in first..=part.min(self.part + PARTS as u64) {
            self.of_parts[new as usize % PARTS] = 0;
        }
        self.part = self.part.max(part);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_counts_for_a_minute_to_ten_seconds() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let failures = RecentFailures::new(start);
        for seconds in [0, 9, 10, 59] {
            failures.add(at(seconds));
        }
        let counts = [59, 60, 69, 70, 109, 110, 119, 120].map(|at_| failures.count(at(at_)));
        assert_eq!(counts, [4, 2, 2, 1, 1, 0, 0, 0]);
        failures.add(at(100_003));
        assert_eq!(failures.count(at(100_004)), 1);
    }
}
