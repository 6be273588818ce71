use std::{
    fmt,
    hash::BuildHasher,
    mem,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard},
    task::{Context, Waker},
};

use foldhash::fast::RandomState;
use hashbrown::HashTable;
use tokio::time::Instant;

use super::{Answer, Backend, Call, Demand, Names, Rule, Store, lock};
use crate::{
    algorithm::{Action, Ask, State, Verdict, together},
    decision::Decision,
    error::{Error, StoreError},
};

const DEFAULT_MAX_KEYS: usize = 100_000;

const MOST_SHARDS: usize = 64;
const FEWEST_KEYS_PER_SHARD: usize = 1_024;

/// The longest key that lies in its entry.
const SHORT: usize = 30;

/// The buckets that an insertion looks at for keys that may go.
const SWEEP: usize = 4;
/// The keys that it looks at if the shard is full, in however many buckets.
const SWEEP_WHEN_FULL: usize = 32;

/// Counts in the memory of the process: one count per process, nothing to install.
///
/// Clones share their counts. Time is [`tokio::time::Instant`], so that a test with paused time can
/// script it. There is no background task.
///
/// # Memory
///
/// A store holds at most `max_keys` keys, 100,000 unless [`with_max_keys`](MemoryStore::with_max_keys)
/// says otherwise. A key of up to 30 bytes costs 140 to 280 bytes, as full as the tables happen to be; a sliding
/// window 80 more and 4 per bucket, a sliding log 150 more and 16 to 32 per request that it remembers. Each
/// request that waits costs about 60 bytes more, in a sliding window 100 and 4 per bucket.
///
/// Keys that have returned to their first state are dropped as new ones come. When the store is full, a
/// new key takes the place of one that has much of its quota left, out of some that are looked at. A key
/// that has no request left, or that was denied one, is never dropped before it could be allowed again: if
/// a flood of new keys finds no other to replace, they get [`StoreError::is_full`], and the layer answers
/// 503.
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
        elapsed.as_secs() as f64 * 1e6 + f64::from(elapsed.subsec_micros())
    }

    fn ask(&self, call: &Call<'_>, demand: &Demand<'_>) -> Result<Decision, StoreError> {
        let Demand { rule, key, .. } = *demand;
        let hash = self.hash(rule, key);
        let mut shard = self.shard(hash);
        let ask = call.ask(demand, self.now());
        let step = |entry: &mut Entry| {
            let verdict = entry.step(rule, &ask);
            if ask.action.commits() {
                entry.note_denial(verdict, ask.now);
            }
            verdict
        };
        let verdict = match shard.find(hash, rule, key) {
            Some(entry) => step(entry),
            None => {
                let mut entry = Entry::new(rule, key);
                let verdict = step(&mut entry);
                if !entry.state.is_never_seen()
                    && !shard.insert(hash, entry, ask.now, &self.0.hasher)
                {
                    return Err(StoreError::full(self.0.max_keys));
                }
                verdict
            }
        };
        Ok(Decision::new(demand.policy(), verdict, 0.0))
    }

    fn ask_all(&self, call: &Call<'_>) -> Result<Decision, StoreError> {
        let demands = call.demands;
        let mut held = Held::new(self, demands);
        let now = self.now();
        let asks: Vec<Ask> = demands.iter().map(|demand| call.ask(demand, now)).collect();
        if call.action.commits() && !held.have_room() {
            if call.action == Action::Check {
                // A denied request needs no room.
                let peek = |ask: &Ask| Ask { action: Action::Peek, ..*ask };
                let peeks: Vec<Ask> = asks.iter().map(peek).collect();
                let (verdict, binding) = together(&peeks, |place, ask| held.step(place, ask));
                if !verdict.admitted {
                    return Ok(Decision::new(demands[binding].policy(), verdict, 0.0));
                }
            }
            held.make_room(now)?;
        }
        let (verdict, binding) = together(&asks, |place, ask| {
            let verdict = held.step(place, ask);
            let is_own = ask.outcome.is_none() || verdict.admitted;
            if call.action.commits() && is_own {
                held.entry(place).note_denial(verdict, now);
            }
            verdict
        });
        held.insert_fresh(now);
        Ok(Decision::new(demands[binding].policy(), verdict, 0.0))
    }

    fn hash(&self, rule: &Rule, key: &str) -> u64 {
        hash_of(&self.0.hasher, Limiter::of(rule), key.as_bytes())
    }

    fn place(&self, hash: u64) -> usize {
        // The table takes the lowest and the highest bits.
        (hash >> 32) as usize & (self.0.shards.len() - 1)
    }

    fn shard(&self, hash: u64) -> MutexGuard<'_, Shard> {
        lock(&self.0.shards[self.place(hash)].0)
    }
}

fn hash_of(hasher: &RandomState, limiter: Limiter, key: &[u8]) -> u64 {
    hasher.hash_one((limiter, key))
}

/// The second in which an instant lies, from 1 on, rounded up.
fn second(instant: f64) -> u32 {
    (instant / 1e6) as u32 + 1
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

impl Backend for MemoryStore {
    fn call(&self, call: &Call<'_>) -> Answer<Decision> {
        match call.demands {
            [demand] => Answer::ready(self.ask(call, demand).map_err(Error::from)),
            _ => Answer::ready(self.ask_all(call).map_err(Error::from)),
        }
    }

    fn detach(&self, mut task: Pin<Box<dyn Future<Output = ()> + Send>>) {
        // Its answers are ready at once.
        let _ = task.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    }

    fn reset(&self, rule: &Rule, key: &str) -> Answer<()> {
        let hash = self.hash(rule, key);
        self.shard(hash).forget(hash, rule, key);
        Answer::ready(Ok(()))
    }

    fn names(&self) -> &Names {
        &self.0.names
    }
}

/// The keys of several limits, with their shards locked.
struct Held<'a> {
    store: &'a MemoryStore,
    demands: &'a [Demand<'a>],
    hashes: Vec<u64>,
    /// Sorted, so that nobody waits for one who waits for him.
    places: Vec<usize>,
    shards: Vec<MutexGuard<'a, Shard>>,
    /// Of the keys that are not in the store.
    fresh: Vec<Option<Entry>>,
}

impl<'a> Held<'a> {
    fn new(store: &'a MemoryStore, demands: &'a [Demand<'a>]) -> Self {
        let hashes: Vec<u64> = demands.iter().map(|it| store.hash(it.rule, it.key)).collect();
        let mut places: Vec<usize> = hashes.iter().map(|&hash| store.place(hash)).collect();
        places.sort_unstable();
        places.dedup();
        let shards = places.iter().map(|&place| lock(&store.0.shards[place].0)).collect();
        let mut held = Self { store, demands, hashes, places, shards, fresh: vec![] };
        let entry = |demand: &Demand<'_>| Entry::new(demand.rule, demand.key);
        for (i, demand) in demands.iter().enumerate() {
            let known = held.find(i).is_some();
            held.fresh.push((!known).then(|| entry(demand)));
        }
        held
    }

    /// The number of the shard, among those that are held.
    fn shard_of(&self, demand: usize) -> usize {
        let place = self.store.place(self.hashes[demand]);
        self.places.partition_point(|&it| it < place)
    }

    fn find(&mut self, demand: usize) -> Option<&mut Entry> {
        let shard = self.shard_of(demand);
        let Demand { rule, key, .. } = self.demands[demand];
        self.shards[shard].find(self.hashes[demand], rule, key)
    }

    fn entry(&mut self, demand: usize) -> &mut Entry {
        if self.fresh[demand].is_some() {
            return self.fresh[demand].as_mut().expect("it is fresh");
        }
        self.find(demand).expect("it is in the store")
    }

    fn step(&mut self, demand: usize, ask: &Ask) -> Verdict {
        let rule = self.demands[demand].rule;
        self.entry(demand).step(rule, ask)
    }

    /// How many keys come to a shard.
    fn coming_to(&self, shard: usize) -> usize {
        let comes = |&i: &usize| self.fresh[i].is_some() && self.shard_of(i) == shard;
        (0..self.demands.len()).filter(comes).count()
    }

    fn have_room(&self) -> bool {
        let mut shards = self.shards.iter().enumerate();
        shards.all(|(i, shard)| shard.table.len() + self.coming_to(i) <= shard.max_keys)
    }

    /// Drops others for those that come.
    fn make_room(&mut self, now: f64) -> Result<(), StoreError> {
        let known: Vec<usize> =
            (0..self.demands.len()).filter(|&i| self.fresh[i].is_none()).collect();
        let until: Vec<u32> = known
            .iter()
            .map(|&i| mem::replace(&mut self.entry(i).denied_until, u32::MAX))
            .collect();
        for i in 0..self.shards.len() {
            let most = self.shards[i].max_keys.saturating_sub(self.coming_to(i));
            self.shards[i].shrink(most, now);
        }
        for (i, until) in known.into_iter().zip(until) {
            match self.find(i) {
                Some(entry) => entry.denied_until = until,
                None => self.fresh[i] = Some(Entry::new(self.demands[i].rule, self.demands[i].key)),
            }
        }
        if self.have_room() { Ok(()) } else { Err(StoreError::full(self.store.0.max_keys)) }
    }

    fn insert_fresh(&mut self, now: f64) {
        for i in 0..self.demands.len() {
            if let Some(entry) = self.fresh[i].take_if(|entry| !entry.state.is_never_seen()) {
                let (shard, hasher) = (self.shard_of(i), &self.store.0.hasher);
                self.shards[shard].insert(self.hashes[i], entry, now, hasher);
            }
        }
    }
}

/// A limiter's name: of each there is one copy, whose address will do.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Limiter(usize);

impl Limiter {
    fn of(rule: &Rule) -> Self {
        Self(rule.name.as_ptr() as usize)
    }
}

/// A key, next to its counts if it is short enough, as most are.
enum Text {
    Short(u8, [u8; SHORT]),
    Long(Box<[u8]>),
}

impl Text {
    fn new(text: &str) -> Self {
        if text.len() > SHORT {
            return Self::Long(text.as_bytes().into());
        }
        let mut bytes = [0; SHORT];
        bytes[..text.len()].copy_from_slice(text.as_bytes());
        Self::Short(text.len() as u8, bytes)
    }

    fn as_bytes(&self) -> &[u8] {
        match self {
            Self::Short(length, bytes) => &bytes[..usize::from(*length)],
            Self::Long(bytes) => bytes,
        }
    }
}

struct Entry {
    limiter: Limiter,
    key: Text,
    state: State,
    /// The second by which the state is as if never seen.
    expires: u32,
    /// The second until which a request like one that was seen would be denied.
    denied_until: u32,
    /// The part of the quota that was left.
    left: f32,
}

impl Entry {
    fn new(rule: &Rule, key: &str) -> Self {
        Self {
            limiter: Limiter::of(rule),
            key: Text::new(key),
            state: State::NeverSeen,
            expires: 0,
            denied_until: 0,
            left: 1.0,
        }
    }

    fn is(&self, rule: &Rule, key: &str) -> bool {
        self.key.as_bytes() == key.as_bytes() && self.limiter == Limiter::of(rule)
    }

    fn step(&mut self, rule: &Rule, ask: &Ask) -> Verdict {
        let verdict = rule.params.step(&mut self.state, ask);
        if ask.action != Action::Peek {
            self.expires = second(ask.now + verdict.reset);
            self.left = (verdict.remaining / f64::from(rule.quota.limit())) as f32;
        }
        verdict
    }

    fn note_denial(&mut self, verdict: Verdict, now: f64) {
        let denied = match verdict {
            Verdict { admitted: false, wait, .. } => wait,
            Verdict { remaining: 0.0, replenish, .. } => replenish,
            _ => 0.0,
        };
        if denied > 0.0 {
            self.denied_until = self.denied_until.max(second(now + denied));
        }
    }

    fn is_less_used(&self, left: f32, expires: u32) -> bool {
        self.left > left || self.left == left && self.expires < expires
    }

    fn hash(&self, hasher: &RandomState) -> u64 {
        hash_of(hasher, self.limiter, self.key.as_bytes())
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

    fn find(&mut self, hash: u64, rule: &Rule, key: &str) -> Option<&mut Entry> {
        self.table.find_mut(hash, |entry| entry.is(rule, key))
    }

    fn forget(&mut self, hash: u64, rule: &Rule, key: &str) {
        if let Ok(entry) = self.table.find_entry(hash, |entry| entry.is(rule, key)) {
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
        let now = (now / 1e6) as u32;
        let mut keys = 0;
        let mut victim: Option<(f32, u32, usize)> = None;
        for _ in 0..buckets.min(self.table.num_buckets()) {
            if keys == SWEEP_WHEN_FULL {
                break;
            }
            self.cursor = (self.cursor + 1) % self.table.num_buckets();
            let Some(entry) = self.table.get_bucket(self.cursor) else { continue };
            keys += 1;
            if entry.expires <= now {
                self.remove(self.cursor);
            } else if entry.denied_until <= now
                && victim.is_none_or(|(left, expires, _)| entry.is_less_used(left, expires))
            {
                victim = Some((entry.left, entry.expires, self.cursor));
            }
        }
        if let Some((.., bucket)) = victim
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
