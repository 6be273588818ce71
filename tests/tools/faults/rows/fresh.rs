//! Pings and first decisions of stores that have just been made.

use std::{error::Error, time::Duration};

use tokio::runtime::Handle;
use tower_ratelimit::{Algorithm, Limiter, Quota, RedisStore};

use crate::{
    load::{now, reason},
    table::Row,
};

pub struct Fresh {
    pings: Tries,
    decisions: Tries,
}

#[derive(Default)]
struct Tries {
    made: usize,
    failed: usize,
    worst: Duration,
    reason: Option<String>,
}

impl Tries {
    fn make<E: Error>(&mut self, attempt: impl Future<Output = Result<(), E>>) {
        let start = now();
        let result = Handle::current().block_on(attempt);
        self.made += 1;
        self.worst = self.worst.max(now() - start);
        if let Err(error) = result {
            self.failed += 1;
            self.reason = Some(reason(&error));
        }
    }

    fn text(&self) -> String {
        let reason = self.reason.as_ref().map_or(String::new(), |reason| format!(", \"{reason}\""));
        let (failed, made, worst) = (self.failed, self.made, self.worst.as_millis());
        format!("{failed} of {made} failed, at worst after {worst} ms{reason}")
    }
}

impl Fresh {
    /// Pings with `count` new stores, and decides with as many others.
    pub fn start(
        count: usize,
        store: impl Fn() -> Result<RedisStore, Box<dyn Error>>,
    ) -> Result<Self, Box<dyn Error>> {
        let mut fresh = Self { pings: Tries::default(), decisions: Tries::default() };
        for number in 0..count {
            let store = (store()?, store()?);
            fresh.pings.make(store.0.ping());
            let limiter =
                Limiter::new("default", store.1, Algorithm::token_bucket(), Quota::per_day(100));
            fresh
                .decisions
                .make(async { limiter.check(format!("fresh-{number}")).await.map(|_| ()) });
        }
        Ok(fresh)
    }

    /// Adds the counts to a row, and expects that at most `max` attempts of a kind fail.
    pub fn add_to(&self, row: &mut Row, max: usize) {
        for (kind, tries) in [("pings", &self.pings), ("first decisions", &self.decisions)] {
            row.requests += tries.made;
            row.errors += tries.failed;
            row.worst = row.worst.max(tries.worst);
            row.remark(format!("{kind}: {}", tries.text()));
            row.expect(tries.failed <= max, || format!("{} {kind} failed", tries.failed));
        }
    }
}
