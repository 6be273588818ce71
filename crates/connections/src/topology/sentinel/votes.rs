//! The reports of Sentinels, and the test whether more of them can change the result. The choice of
//! the master is in the parent.

use std::{collections::HashMap, time::Instant};

use redis::RedisError;

use super::super::super::link::Address;

/// The last answer of a Sentinel, and the instant at which the query was sent.
#[derive(Clone, Debug, Default)]
pub(super) enum Report {
    /// None yet, or none since its connection ended.
    #[default]
    Awaited,
    Named(Address, Instant),
    /// It knows no master of that name.
    Unknown(Instant),
    Failed(RedisError, Instant),
}

/// The time to wait for more answers.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Wait {
    /// More answers would change nothing.
    Over,
    Grace,
    /// Most Sentinels have not answered.
    LongGrace,
    Needed,
}

/// Returns how long to wait for more answers to queries that were sent at `asked` or later.
pub(super) fn wait(reports: &[Report], asked: impl Into<Option<Instant>>) -> Wait {
    let count = Count::of(reports, asked.into());
    if count.is_final() {
        Wait::Over
    } else if count.all_votes() == 0 {
        Wait::Needed
    } else if 2 * count.answers >= reports.len() {
        Wait::Grace
    } else {
        Wait::LongGrace
    }
}

#[derive(Default)]
struct Count<'a> {
    votes: HashMap<&'a Address, usize>,
    answers: usize,
    awaited: usize,
    /// The number of Sentinels whose last answer is old, and an error.
    failed_before: usize,
}

impl<'a> Count<'a> {
    fn of(reports: &'a [Report], asked: Option<Instant>) -> Self {
        let mut count = Self::default();
        let is_fresh = |at: &Instant| asked.is_none_or(|asked| *at >= asked);
        for report in reports {
            match report {
                Report::Named(address, at) if is_fresh(at) => {
                    count.answers += 1;
                    *count.votes.entry(address).or_default() += 1;
                }
                Report::Unknown(at) if is_fresh(at) => count.answers += 1,
                Report::Failed(_, at) if is_fresh(at) => {}
                // After a failure, the other Sentinels are believed without it.
                Report::Failed(..) => count.failed_before += 1,
                Report::Awaited | Report::Named(..) | Report::Unknown(_) => count.awaited += 1,
            }
        }
        count
    }

    fn all_votes(&self) -> usize {
        self.votes.values().sum()
    }

    /// Returns whether the awaited answers cannot change the result.
    fn is_final(&self) -> bool {
        let max = self.votes.values().max().copied().unwrap_or(0);
        let is_complete = self.awaited == 0 && (self.answers > 0 || self.failed_before == 0);
        is_complete || 2 * max > self.all_votes() + self.awaited
    }
}
