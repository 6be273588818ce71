//! A limit that is tried on the traffic, and what it does to it.

use std::time::Duration;

use tower_ratelimit::{
    Algorithm, Error, Key, Limiter, MemoryStore, Quota,
    config::ConfigError,
    store::{ErrorKind, WhenFull},
};

use super::counts::{Distinct, Distribution, HasSize, Series, Table};

/// What a limit did to a key.
#[derive(Clone, Copy, Default)]
pub struct Suffered {
    pub denied: u64,
    pub waited: u64,
}

impl HasSize for Suffered {
    fn size(&self) -> u64 {
        // Denials first.
        self.denied.saturating_mul(1 << 32).saturating_add(self.waited)
    }
}

pub struct Candidate {
    pub quota: Quota,
    pub algorithm: Algorithm,
    limiter: Limiter,
    store: MemoryStore,
    max_keys: usize,
    max_wait: Duration,
    pub allowed: u64,
    pub denied: u64,
    pub waits: Distribution,
    /// The keys of denied requests.
    pub denied_keys: Distinct,
    pub keys: Table<Suffered>,
    pub series: Series,
    /// True if the store had no room for a key.
    pub was_full: bool,
    pub undecided: u64,
}

impl Candidate {
    pub fn new(
        quota: Quota,
        algorithm: Algorithm,
        max_keys: usize,
        max_wait: Duration,
    ) -> Result<Self, ConfigError> {
        let store = MemoryStore::with_max_keys(max_keys);
        store.set_when_full(WhenFull::EvictSoonest);
        Ok(Self {
            quota,
            algorithm,
            limiter: Limiter::try_new("replay", store.clone(), algorithm, quota)?,
            store,
            max_keys,
            max_wait,
            allowed: 0,
            denied: 0,
            waits: Distribution::new(),
            denied_keys: Distinct::new(max_keys),
            keys: Table::new(max_keys),
            series: Series::new(),
            was_full: false,
            undecided: 0,
        })
    }

    /// Decides about a request, at the current time of the runtime.
    pub async fn decide(&mut self, key: &Key<'_>, hash: u64, second: u64) -> Result<(), Error> {
        let decided = match self.max_wait.is_zero() {
            true => self.limiter.check(key).now(),
            // Kept: the request of the log waits, not this program.
            false => self.limiter.reserve(key, 1, self.max_wait).await.map(|it| it.keep()),
        };
        let decision = match decided {
            Err(Error::Store(error)) if error.kind() == ErrorKind::Full => {
                self.undecided += 1;
                self.was_full = true;
                return Ok(());
            }
            decided => decided?,
        };
        self.was_full |= self.store.key_count() >= self.max_keys;
        if !decision.is_allowed() {
            self.denied += 1;
            self.denied_keys.add(hash);
            self.series.add(second);
            self.keys.get(hash, key.as_str(), drop).denied += 1;
        } else {
            self.allowed += 1;
            let delay = decision.delay();
            if !delay.is_zero() {
                self.waits.add(delay.as_micros() as u64);
                self.keys.get(hash, key.as_str(), drop).waited += 1;
            }
        }
        Ok(())
    }
}
