//! The counts of one algorithm, as the page shows them. `Most` finds the most requests that
//! proceeded in any time of the length of the window. It decides nothing.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap, VecDeque},
    time::Duration,
};

use serde::Serialize;

/// The length of a tick, the finest time that the page shows.
pub const TICK: Duration = Duration::from_millis(20);

pub fn tick(at: Duration) -> u64 {
    (at.as_millis() / TICK.as_millis()) as u64
}

/// The sums since the start.
#[derive(Clone, Copy, Default, Serialize)]
pub struct Totals {
    pub arrived: u64,
    pub admitted: u64,
    pub waited: u64,
    pub denied: u64,
    pub failed: u64,
    /// Denied by the process, which remembers that Redis would deny.
    pub remembered: u64,
    /// Decided by the process, because Redis fails.
    pub local: u64,
    /// Admitted without a count, because Redis fails.
    pub uncounted: u64,
}

/// The requests in one tick: admitted, told to wait, denied, failed, and those whose wait ended.
pub type Tick = [u64; 5];

pub const ADMITTED: usize = 0;
pub const WAITING: usize = 1;
pub const DENIED: usize = 2;
pub const FAILED: usize = 3;
pub const DEPARTED: usize = 4;

/// When a store decided that a request proceeds: between the call and the answer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Admission {
    latest: Duration,
    earliest: Duration,
}

/// The most requests that proceeded in any time of the length of the window. A request counts as in
/// the window only if it certainly was, so the number is never too large.
pub struct Most {
    window: Duration,
    admissions: VecDeque<Admission>,
    /// Those that wait.
    later: BinaryHeap<Reverse<Admission>>,
    pub most: u64,
    pub at: Duration,
}

impl Most {
    pub fn new(window: Duration) -> Self {
        let (admissions, later) = (VecDeque::new(), BinaryHeap::new());
        Self { window, admissions, later, most: 0, at: Duration::ZERO }
    }

    pub fn add(&mut self, earliest: Duration, latest: Duration) {
        self.later.push(Reverse(Admission { latest, earliest }));
    }

    /// Counts the requests that have proceeded by now, and returns the number of those in the
    /// window that ends now.
    pub fn advance(&mut self, now: Duration) -> usize {
        while let Some(&Reverse(next)) = self.later.peek()
            && next.latest <= now
        {
            self.later.pop();
            self.forget(next.latest);
            // Earlier calls that were answered later: the queue stays in order, and the counts are
            // at most too small.
            let disordered = |other: &&mut Admission| other.earliest > next.earliest;
            for other in self.admissions.iter_mut().rev().take_while(disordered) {
                other.earliest = next.earliest;
            }
            self.admissions.push_back(next);
            if self.admissions.len() as u64 > self.most {
                (self.most, self.at) = (self.admissions.len() as u64, next.latest);
            }
        }
        self.forget(now);
        self.admissions.len()
    }

    fn forget(&mut self, now: Duration) {
        let Some(begin) = now.checked_sub(self.window) else { return };
        while self.admissions.front().is_some_and(|first| first.earliest <= begin) {
            self.admissions.pop_front();
        }
    }

    /// Begins again, with requests that wait already.
    pub fn restart(&mut self, window: Duration) {
        self.window = window;
        self.admissions.clear();
        self.most = 0;
    }
}

/// What happened since the last message to the page.
#[derive(Default)]
pub struct Fresh {
    ticks: BTreeMap<u64, Tick>,
    /// How many requests were in the window, at the end of each tick.
    pub curve: Vec<(u64, usize)>,
}

impl Fresh {
    pub fn add(&mut self, at: Duration, what: usize) {
        self.ticks.entry(tick(at)).or_default()[what] += 1;
    }

    /// Takes all of it.
    pub fn take(&mut self) -> Self {
        std::mem::take(self)
    }

    /// The ticks in order.
    pub fn ticks(&self) -> Vec<(&u64, &Tick)> {
        self.ticks.iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn a_request_one_window_ago_has_left_the_window() {
        let mut most = Most::new(at(1_000));
        for ms in [0, 10, 1_000, 1_005, 1_011] {
            most.add(at(ms), at(ms));
            most.advance(at(ms));
        }
        assert_eq!((most.most, most.at), (3, at(1_005)));
        assert_eq!(most.advance(at(2_000)), 2);
    }

    #[test]
    fn a_request_that_waits_counts_when_it_proceeds() {
        let mut most = Most::new(at(1_000));
        most.add(at(2_500), at(2_500));
        most.add(at(0), at(2));
        assert_eq!(most.advance(at(100)), 1);
        assert_eq!(most.advance(at(2_499)), 0);
        assert_eq!(most.advance(at(2_500)), 1);
        assert_eq!(most.most, 1);
    }

    #[test]
    fn a_request_that_may_have_left_does_not_count() {
        let mut most = Most::new(at(1_000));
        most.add(at(0), at(20));
        most.add(at(1_001), at(1_010));
        most.advance(at(1_010));
        assert_eq!(most.most, 1);
    }
}
