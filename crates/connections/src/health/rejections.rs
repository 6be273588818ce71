//! The scripts that a server rejects with errors, while it answers: when that begins, lasts and
//! ends. The owner words the events.

use std::time::{Duration, Instant};

/// The number of rejected scripts in a row after which a server counts as one that rejects: as many
/// as calls without an answer make an outage. One rejected script can be a failover that has just
/// begun, whose first `READONLY` moves the connections.
const MAX_REJECTED: u32 = 5;

/// The time without a rejected script after which a proof is due that a server executes all again.
/// It can reject some scripts and not others, for example those that need one command, or those
/// that write: with the end at the first executed script, a server with full memory began and ended
/// to reject with each request. Without the proof, a missing permission seemed to be granted as
/// soon as no request needed it for a while.
const QUIET: Duration = Duration::from_secs(5);

/// The time between two reminders.
const REMIND_AFTER: Duration = Duration::from_secs(60);

/// The rejected scripts in a row, or, once there were [`MAX_REJECTED`], since then.
#[derive(Debug)]
pub(super) struct Rejections {
    count: u32,
    since: Instant,
    last: Instant,
    reminded: Instant,
    /// The time at which a proof was last asked for.
    asked: Instant,
}

/// What a rejected script means for the log.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Rejection {
    /// The server begins to reject.
    Begins,
    /// It has rejected for this time.
    Lasts(Duration),
    /// Nothing new.
    Known,
}

impl Rejections {
    pub(super) fn new(now: Instant) -> Self {
        Self { count: 0, since: now, last: now, reminded: now, asked: now }
    }

    /// Adds a rejected script.
    pub(super) fn reject(&mut self, now: Instant) -> Rejection {
        if self.count == 0 {
            (self.since, self.reminded) = (now, now);
        }
        self.count = self.count.saturating_add(1);
        self.last = now;
        if self.count == MAX_REJECTED {
            return Rejection::Begins;
        }
        if self.count > MAX_REJECTED && now - self.reminded >= REMIND_AFTER {
            self.reminded = now;
            return Rejection::Lasts(now - self.since);
        }
        Rejection::Known
    }

    /// Adds an executed script. Returns true if the server may execute all again: a proof is to be
    /// asked for.
    pub(super) fn execute(&mut self, now: Instant) -> bool {
        if self.count < MAX_REJECTED {
            self.count = 0;
            return false;
        }
        let is_due = now - self.last >= QUIET && now - self.asked >= QUIET;
        if is_due {
            self.asked = now;
        }
        is_due
    }

    /// Adds a successful proof. Returns the time for which the server has rejected scripts, if it
    /// executes them again.
    pub(super) fn prove(&mut self, now: Instant) -> Option<Duration> {
        let is_over = self.is_rejecting() && now - self.last >= QUIET;
        is_over.then(|| {
            self.count = 0;
            self.last - self.since
        })
    }

    /// Returns whether the server counts as one that rejects.
    pub(super) fn is_rejecting(&self) -> bool {
        self.count >= MAX_REJECTED
    }

    /// Returns whether an executed script changes nothing.
    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }
}

#[cfg(test)]
mod tests {
    use super::{Rejection::*, *};

    #[test]
    fn a_server_that_rejects_some_scripts_rejects_until_it_executes_all_for_a_while() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut rejections = Rejections::new(start);
        assert_eq!([0, 1, 2, 3].map(|ms| rejections.reject(at(ms))), [Known, Known, Known, Known]);
        assert!(!rejections.execute(at(4)));
        assert!(rejections.is_empty(), "the scripts are not in a row");
        let rejected = [10, 11, 12, 13, 14, 15].map(|ms| rejections.reject(at(ms)));
        assert_eq!(rejected, [Known, Known, Known, Known, Begins, Known]);
        for ms in (100..60_000).step_by(1_000) {
            assert!(!rejections.execute(at(ms)));
            assert_eq!(rejections.reject(at(ms + 1)), Known);
        }
        assert_eq!(rejections.reject(at(60_010)), Lasts(Duration::from_secs(60)));
        assert_eq!(rejections.reject(at(61_010)), Known);
        assert!(!rejections.execute(at(66_009)));
        assert!(rejections.execute(at(66_010)));
        assert_eq!(rejections.prove(at(66_011)), Some(Duration::from_secs(61)));
        assert!(rejections.is_empty());
        assert_eq!(rejections.reject(at(66_012)), Known);
    }

    #[test]
    fn only_a_proof_ends_the_rejections_and_few_are_asked_for() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut rejections = Rejections::new(start);
        (0..5).for_each(|_| _ = rejections.reject(at(0)));
        let due = [4_999, 5_000, 5_001, 9_999].map(|ms| rejections.execute(at(ms)));
        assert_eq!(due, [false, true, false, false], "one proof at a time");
        assert_eq!(rejections.reject(at(10_000)), Known, "the proof failed");
        assert_eq!(rejections.prove(at(10_001)), None);
        let due = [10_001, 14_999, 15_000].map(|ms| rejections.execute(at(ms)));
        assert_eq!(due, [false, false, true]);
        assert_eq!(rejections.prove(at(15_001)), Some(Duration::from_secs(10)));
    }
}
