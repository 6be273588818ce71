//! The requests of one algorithm that hold units, or wait for them, and their checks. A request
//! ends when its duration is over. What the page shows of the ends is in `session.rs`.

use std::{
    cell::Cell,
    collections::{BTreeMap, btree_map::Entry},
    time::Duration,
};

use tower_ratelimit::{Admission, Decision, Error, Limiter, Permit};

use crate::tally::tick;

tokio::task_local! {
    /// Set when the crate reports that the request of the task waits.
    pub static WAITS: Cell<bool>;
}

/// The result of a check.
pub struct Checked {
    pub decision: Decision,
    /// If the request was to hold its unit, and was admitted.
    pub permit: Option<Permit>,
    /// True if the request has waited. A delay of the decision is still to come.
    pub has_waited: bool,
}

/// Checks one request. Without a wait, a limiter delays only where its algorithm does.
pub async fn spend(limiter: &Limiter, key: String, max_wait: Duration) -> Result<Checked, Error> {
    let decision = match max_wait.is_zero() {
        true => limiter.check(key).await?,
        // The page shows the wait; there is no request to hold back.
        false => limiter.reserve(key, 1, max_wait).await?.keep(),
    };
    Ok(Checked { decision, permit: None, has_waited: false })
}

/// Holds one unit, and waits until it is free. A hold reserves no instant.
pub async fn hold(limiter: &Limiter, key: String, max_wait: Duration) -> Result<Checked, Error> {
    let held = async {
        let held = match max_wait.is_zero() {
            true => limiter.hold(key, 1).await,
            false => limiter.hold(key, 1).max_wait(max_wait).await,
        };
        (held, WAITS.with(Cell::get))
    };
    let (held, has_waited) = WAITS.scope(Cell::new(false), held).await;
    Ok(match held? {
        Admission::Admitted(permit) => {
            Checked { decision: permit.decision().clone(), permit: Some(permit), has_waited }
        }
        Admission::Denied(decision) => Checked { decision, permit: None, has_waited },
    })
}

/// The requests in progress.
#[derive(Default)]
pub struct Flight {
    /// By the end of the request, and the order of the answers.
    permits: BTreeMap<(Duration, u64), Permit>,
    begun: u64,
    settled: u64,
    /// The requests without an answer, by the tick of their arrival.
    pending: BTreeMap<u64, u64>,
}

impl Flight {
    /// Returns the number of requests that hold a unit: those that certainly do, because a store
    /// holds a unit before its answer, and until it is told the end.
    pub fn len(&self) -> usize {
        self.permits.len()
    }

    pub fn begin(&mut self, permit: Permit, end: Duration) {
        self.begun += 1;
        self.permits.insert((end, self.begun), permit);
    }

    /// Takes a request whose duration is over.
    pub fn ended(&mut self, now: Duration) -> Option<Permit> {
        let first = self.permits.first_entry().filter(|first| first.key().0 <= now)?;
        Some(first.remove())
    }

    /// Returns the units that the next request has used: of 100 requests, as many as the percentage
    /// says use their unit, evenly spread.
    pub fn used(&mut self, percent: u64) -> u64 {
        let before = self.settled * percent / 100;
        self.settled += 1;
        self.settled * percent / 100 - before
    }

    pub fn sent(&mut self, at: Duration) {
        *self.pending.entry(tick(at)).or_default() += 1;
    }

    pub fn answered(&mut self, at: Duration) {
        let Entry::Occupied(mut pending) = self.pending.entry(tick(at)) else { return };
        *pending.get_mut() -= 1;
        if *pending.get() == 0 {
            pending.remove();
        }
    }

    /// Returns the requests that came before `at` and have no answer yet.
    pub fn pending(&self, at: Duration) -> Vec<(u64, u64)> {
        self.pending.range(..tick(at)).map(|(tick, requests)| (*tick, *requests)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_of_used_units_is_exact() {
        for (percent, expected) in [(0, 0), (1, 1), (50, 50), (70, 70), (100, 100)] {
            let mut flight = Flight::default();
            let used: u64 = (0..100).map(|_| flight.used(percent)).sum();
            assert_eq!(used, expected, "{percent} %");
        }
    }

    #[test]
    fn a_request_is_pending_until_its_answer() {
        let at = Duration::from_millis;
        let mut flight = Flight::default();
        flight.sent(at(100));
        flight.sent(at(119));
        flight.sent(at(500));
        assert_eq!(flight.pending(at(400)), [(5, 2)]);
        flight.answered(at(100));
        assert_eq!(flight.pending(at(400)), [(5, 1)]);
        flight.answered(at(119));
        assert_eq!(flight.pending(at(400)), []);
    }
}
