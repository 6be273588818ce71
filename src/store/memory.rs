mod entry;
mod held;

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard},
};

use foldhash::fast::RandomState;
use hashbrown::HashTable;
use tokio::time::Instant;

use self::entry::{Entry, Usage};
use super::{AnyStore, Call, Demand, Names, Settings, Store, lock};
use crate::{
    decision::Decision,
    error::{Error, StoreError},
    key::Key,
};

const DEFAULT_MAX_KEYS: usize = 100_000;

const MOST_SHARDS: usize = 64;
const FEWEST_KEYS_PER_SHARD: usize = 1_024;

/// The buckets that an insertion looks at for keys that may go.
const SWEEP: usize = 4;
/// The keys that it looks at if the shard is full, in however many buckets.
const SWEEP_WHEN_FULL: usize = 32;
/// How long a key that is as if never seen is kept while there is room, in microseconds: it may well come again.
const KEPT: f64 = 1e6;

/// Counts in the memory of the process: one count per process, nothing to install.
///
/// Clones share their counts. Time is [`tokio::time::Instant`], so that a test with paused time can
/// script it. There is no background task.
///
/// # Memory
///
/// A store holds at most `max_keys` keys, 100,000 unless [`with_max_keys`](MemoryStore::with_max_keys)
/// says otherwise. A key of up to 30 bytes costs 75 to 150 bytes, as full as the tables happen to be, and a longer one
/// its length more; a sliding window 100 more and 4 per bucket, a sliding log 160 more and 16 to 32 per request that
/// it remembers. While requests wait, their key costs 300 to 400 bytes more, and 50 to 130 for each beyond the
/// fourth, in a sliding window 100 to 200 and 4 per bucket.
///
/// Keys that have returned to their first state are dropped, a second later, as new ones come. When the store is full, a
/// new key takes the place of one that has much of its quota left, out of some that are looked at. A key
/// that has no request left, or that was denied one, is never dropped before it could be allowed again, nor
/// one for which a request waits: if a flood of new keys finds no other to replace, they get
/// [`StoreError::is_full`], and the layer answers 503.
///
/// # Examples
///
/// ```
/// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
///
/// let limiter = Limiter::new(MemoryStore::new(), Algorithm::token_bucket(), Quota::per_second(10));
/// # let _ = limiter;
/// ```
#[derive(Clone)]
pub struct MemoryStore(Arc<Inner>);

struct Inner {
    shards: Box<[Alone<Mutex<Shard>>]>,
    max_keys: usize,
    hasher: RandomState,
    epoch: Instant,
    names: Names,
}

/// In a cache line of its own, so that threads disturb each other only over one shard.
#[repr(align(64))]
struct Alone<T>(T);

impl MemoryStore {
    /// Makes an empty store for at most 100,000 keys.
    #[must_use]
    pub fn new() -> Self {
        Self::with_max_keys(DEFAULT_MAX_KEYS)
    }

    /// Makes an empty store for at most `max_keys` keys.
    ///
    /// Large stores divide the keys among up to 64 parts, each with its share of `max_keys`.
    ///
    /// # Panics
    ///
    /// If `max_keys` is 0.
    #[must_use]
    pub fn with_max_keys(max_keys: usize) -> Self {
        assert!(max_keys > 0, "a store must hold at least one key");
        let shards = (max_keys / FEWEST_KEYS_PER_SHARD).clamp(1, MOST_SHARDS);
        let shards = 1 << shards.ilog2();
        let shard = || Alone(Mutex::new(Shard::new(max_keys / shards)));
        Self(Arc::new(Inner {
            shards: std::iter::repeat_with(shard).take(shards).collect(),
            max_keys,
            hasher: RandomState::default(),
            epoch: Instant::now(),
            names: Names::default(),
        }))
    }

    /// The number of keys that are held now.
    #[must_use]
    pub fn key_count(&self) -> usize {
        self.0.shards.iter().map(|shard| lock(&shard.0).table.len()).sum()
    }

    /// Microseconds since the store was made.
    fn now(&self) -> f64 {
        let elapsed = self.0.epoch.elapsed();
        // Processors convert signed integers faster.
        (elapsed.as_secs() * 1_000_000 + u64::from(elapsed.subsec_micros())) as i64 as f64
    }

    /// Decides at once.
    pub(crate) fn decide(&self, call: &Call<'_>) -> Result<Decision, Error> {
        match call.demands {
            [demand] => self.decide_alone(call, demand),
            _ => Ok(self.decide_together(call)?),
        }
    }

    fn decide_alone(&self, call: &Call<'_>, demand: &Demand<'_>) -> Result<Decision, Error> {
        let Demand { settings, key, .. } = *demand;
        let key = key.as_bytes();
        let hash = self.hash(settings, key);
        let mut shard = self.shard(hash);
        let found = shard.find(hash, settings, key);
        let ask = call.ask(demand, self.now());
        let verdict = match found {
            Some(entry) => match entry.check_quickly(settings, &ask) {
                Some(checked) => {
                    drop(shard);
                    checked.verdict()
                }
                None => entry.check(settings, &ask),
            },
            None => {
                let mut entry = Entry::new(settings, key);
                let verdict = entry.check(settings, &ask);
                if !entry.is_never_seen() && !shard.insert(hash, entry, ask.now, &self.0.hasher) {
                    return Err(StoreError::full(self.0.max_keys).into());
                }
                verdict
            }
        };
        Ok(Decision::new(demand.policy(), verdict, 0.0))
    }

    pub(super) fn reset(&self, settings: &Arc<Settings>, key: &Key<'_>) {
        let key = key.as_bytes();
        let hash = self.hash(settings, key);
        self.shard(hash).forget(hash, settings, key);
    }

    pub(super) fn names(&self) -> &Names {
        &self.0.names
    }

    fn hash(&self, settings: &Settings, key: &[u8]) -> u64 {
        entry::hash(&self.0.hasher, settings, key)
    }

    fn place(&self, hash: u64) -> usize {
        // The table takes the lowest and the highest bits.
        (hash >> 32) as usize & (self.0.shards.len() - 1)
    }

    fn shard(&self, hash: u64) -> MutexGuard<'_, Shard> {
        lock(&self.0.shards[self.place(hash)].0)
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStore").field("max_keys", &self.0.max_keys).finish_non_exhaustive()
    }
}

impl Store for MemoryStore {}

impl From<MemoryStore> for AnyStore {
    fn from(store: MemoryStore) -> Self {
        Self::Memory(store)
    }
}

struct Shard {
    table: HashTable<Entry>,
    max_keys: usize,
    /// The bucket from which the next sweep goes on.
    cursor: usize,
}

impl Shard {
    fn new(max_keys: usize) -> Self {
        Self { table: HashTable::new(), max_keys, cursor: 0 }
    }

    #[inline]
    fn find(&mut self, hash: u64, settings: &Arc<Settings>, key: &[u8]) -> Option<&mut Entry> {
        self.table.find_mut(hash, |entry| entry.is(settings, key))
    }

    fn forget(&mut self, hash: u64, settings: &Arc<Settings>, key: &[u8]) {
        if let Ok(entry) = self.table.find_entry(hash, |entry| entry.is(settings, key)) {
            entry.remove();
        }
    }

    /// Returns whether there was room for it.
    fn insert(&mut self, hash: u64, entry: Entry, now: f64, hasher: &RandomState) -> bool {
        self.sweep(now, self.max_keys - 1);
        if self.table.len() >= self.max_keys {
            return false;
        }
        self.table.insert_unique(hash, entry, |entry| entry.hash(hasher));
        true
    }

    /// Drops keys until so many are left, as far as it can.
    fn shrink(&mut self, most: usize, now: f64) {
        let mut keys = self.table.len() + 1;
        while self.table.len() > most && self.table.len() < keys {
            keys = self.table.len();
            self.sweep(now, most);
        }
    }

    /// Drops the next keys that are as if never seen; if the shard stays full, then the one of them that has
    /// most of its quota left, and of several the one that expires soonest.
    fn sweep(&mut self, now: f64, most: usize) {
        let full = self.table.len() > most;
        let buckets = if full { self.table.num_buckets() } else { SWEEP };
        let mut keys = 0;
        let mut victim: Option<(Usage, usize)> = None;
        for _ in 0..buckets.min(self.table.num_buckets()) {
            if keys == SWEEP_WHEN_FULL {
                break;
            }
            self.cursor = (self.cursor + 1) % self.table.num_buckets();
            let Some(entry) = self.table.get_bucket(self.cursor) else { continue };
            keys += 1;
            let usage = entry.usage(now);
            if usage.reset <= now {
                if full || entry.usage(now - KEPT).reset <= now - KEPT {
                    self.remove(self.cursor);
                }
            } else if full
                && !usage.in_use
                && victim.as_ref().is_none_or(|(least, _)| usage.is_less_than(least))
            {
                victim = Some((usage, self.cursor));
            }
        }
        if let Some((_, bucket)) = victim
            && self.table.len() > most
        {
            self.remove(bucket);
        }
    }

    fn remove(&mut self, bucket: usize) {
        if let Ok(entry) = self.table.get_bucket_entry(bucket) {
            entry.remove();
        }
    }
}
