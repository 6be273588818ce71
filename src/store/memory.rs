//! The store in process memory: its shards, and decisions about one key. Several limits at once are
//! in `transaction`, the counts of a key in `entry`, the time in `clock`.

mod clock;
mod entry;
mod shard;
mod slots;
#[cfg(test)]
mod tests;
mod transaction;
mod when_full;

use std::{
    fmt,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::{Context, Waker},
};

use foldhash::fast::RandomState;
use tokio::time::Instant;

pub use self::when_full::WhenFull;
use self::{
    clock::Clock,
    entry::Entry,
    shard::{Search, Shard},
    slots::{Slot, Slots},
};
use super::{
    AnyStore, EndedHold, LimitRequest, Names, Offer, Reporting, Sealed, Settings, Store,
    StoreCalls, StoreFuture, StoreRequest, Task,
};
use crate::{
    algorithm::{Action, EngineReply, EngineRequest, Release},
    decision::Outcome,
    error::{Error, StoreError},
    keys::Key,
    observe::{Event, Observer, Observers},
    sync::lock,
};

/// In 8 to 22 MB, without states that need more.
const DEFAULT_MAX_KEYS: usize = 100_000;

/// Each shard has a lock: of 16 requests at the same instant, one in five meets another one.
const MAX_SHARDS: usize = 64;
/// A full store looks for a key to evict in the shard of the new key first, at up to 32 keys. With
/// fewer keys per shard, it would go on to other shards, and take their locks, more often.
const MIN_KEYS_PER_SHARD: usize = 1_024;

/// Counts in the memory of the process: one count per process, nothing to install.
///
/// Clones share their counts. The clock is `tokio::time::Instant`, which a test with paused time
/// controls. No background task removes keys. While requests [wait in a
/// line](crate::guide::waiting#in-a-line), a small one runs in the runtime of one of them.
///
/// # The clock of the processor
///
/// Reading the clock of the system takes up to half of a check. With the feature `cpu-counter`,
/// which is on by default, the store reads the counter of the processor instead, where the kernel
/// does so itself: on x86-64, with Linux, if its clock source is `tsc`. Elsewhere the store reads
/// tokio's clock. So it does in a program that enables tokio's feature `test-util`, whose tests can
/// pause the time.
///
/// The store compares the counter with tokio's clock every 100 ms, and corrects its rate. The two
/// differ by microseconds, however long the program runs. Until the rate is known, and compared
/// once, the store reads tokio's clock: for the first 10 ms of its use, and in any case for the
/// first 20 ms after the first store of the process was made.
///
/// If the counter leaves tokio's clock by 1 in 1,000, the store reads tokio's clock from then on.
/// That happens after the machine was suspended, where the time stands still for both clocks or
/// leaps for the counter alone. It also happens where the counters of two processors differ, or
/// where the clock of the system is slewed that fast, as by chrony after a start. Until the store
/// notices, a leap ahead grants up to 100 ms of a quota early, and nothing in all. A step back
/// grants nothing, and delays a refill by up to 100 ms. A virtual machine that moves to another
/// host keeps its counter, or is such a case.
///
/// Switch the feature off by `default-features = false` where a program must not read the counter:
/// in a sandbox that forbids the instruction, or under a recorder of executions.
///
/// # Memory
///
/// A store holds at most `max_keys` keys, 100,000 by default: see
/// [`with_max_keys`](MemoryStore::with_max_keys). A key of up to 30 bytes costs 75 to 150 bytes,
/// depending on how full the tables are, and up to 215 after many keys of a full store were
/// replaced; a longer key costs its length in addition. The state of a key costs, in addition:
///
/// * in a sliding window 136 bytes and 8 per bucket, and 104 and 8 per bucket more while requests
///   wait
/// * in a sliding log 128 bytes, and 16 to 32 for each request in the log
/// * with another algorithm nothing, and 190 to 225 bytes while requests wait
///
/// Where nothing is listed, a key costs 128 bytes from its first block, wait or hold of units of a
/// rate on, until it is removed.
///
/// Each request that waits costs another 16 to 32 bytes. The first one of a key costs 64, which are
/// enough for four. The first one in a log costs 128, which are enough for eight, or 16 for each
/// unit of a smaller limit. What the allocator adds is not included.
///
/// A key that is back in its initial state is removed when new keys are inserted, after a second at
/// the earliest; a key under a limit on concurrency, at once.
///
/// A store never holds more than `max_keys` keys, even if threads race for the last ones. An
/// insertion into a full store looks at the next keys, at most 32, or 64 if no room is found, until
/// it finds four that are not in use, so that it takes bounded time. The new key takes the place of
/// the first of these:
///
/// 1. A key that is back in its initial state, or that is not in use and has used a single unit:
///    the insertion looks no further.
/// 2. The key with the most of its quota left, of the four keys that are not in use. Its usage is
///    forgotten, so it gets its quota once more.
/// 3. With [`WhenFull::EvictSoonest`], if all 32 keys are in use, the key whose quota is restored
///    soonest.
///
/// If there is none, the new key gets [`ErrorKind::Full`](crate::store::ErrorKind::Full), and the
/// layer responds with 503.
///
/// A key is in use while nothing is left of its quota, while it is
/// [blocked](crate::Limiter::block), or until the `retry_after` of a denied request has passed. A
/// key for which a request waits is never evicted; neither is a key of the request that is being
/// decided.
///
/// A charge fails if there is no room for all of its new keys. A charge that finds room for only
/// some of its keys may still evict a key.
///
/// The choice is a sample, except in a store of at most four keys: when nearly all keys of a large
/// store are in use, a new one may be rejected although a key outside the sample could be evicted.
///
/// By default, a client that can invent keys can fill the store and lock out new clients. That
/// takes `max_keys x burst` units, or `2 x max_keys` requests if the client chooses their cost.
/// [`WhenFull`] describes the arithmetic and the countermeasures.
///
/// # Examples
///
/// ```
/// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
///
/// let quota = Quota::per_second(10);
/// let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::token_bucket(), quota);
/// # let _ = limiter;
/// ```
#[derive(Clone)]
pub struct MemoryStore(Arc<Inner>);

struct Inner {
    shards: Box<[CachePadded<Mutex<Shard>>]>,
    slots: CachePadded<Slots>,
    evicts: AtomicBool,
    hasher: RandomState,
    clock: Clock,
    names: Names,
    observers: Mutex<Observers>,
    is_observed: AtomicBool,
    /// The number of keys that was reported last.
    reported_keys: AtomicUsize,
}

/// The locked shard of a key, at an instant.
pub(super) struct LockedShard<'a> {
    shard: MutexGuard<'a, Shard>,
    hash: u64,
    now: i64,
    /// Whether the number of keys has changed, so that it is to be reported.
    count_changed: bool,
}

/// In a cache line of its own, so that threads disturb each other only over one shard.
#[repr(align(64))]
struct CachePadded<T>(T);

impl MemoryStore {
    /// Makes an empty store for at most 100,000 keys.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::MemoryStore;
    ///
    /// let store = MemoryStore::new();
    /// assert_eq!(store.key_count(), 0);
    /// ```
    #[must_use]
    pub fn new() -> Self {
        Self::with_max_keys(DEFAULT_MAX_KEYS)
    }

    /// Makes an empty store for at most `max_keys` keys.
    ///
    /// Large stores divide the keys among up to 64 parts, each with a lock of its own.
    ///
    /// # Panics
    ///
    /// If `max_keys` is 0.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::MemoryStore;
    ///
    /// let store = MemoryStore::with_max_keys(1_000_000); // about 140 MB, if all are in use
    /// # let _ = store;
    /// ```
    #[must_use]
    #[track_caller]
    pub fn with_max_keys(max_keys: usize) -> Self {
        Self::with_clock(max_keys, Clock::new())
    }

    /// Makes a store that reads the number as it reads the counter of the processor where tests
    /// cannot pause the time.
    #[cfg(test)]
    pub(crate) fn with_counter(counter: &Arc<std::sync::atomic::AtomicU64>) -> Self {
        Self::with_clock(DEFAULT_MAX_KEYS, Clock::of_number(counter))
    }

    #[track_caller]
    fn with_clock(max_keys: usize, clock: Clock) -> Self {
        assert!(max_keys > 0, "a store must hold at least one key");
        let shards = (max_keys / MIN_KEYS_PER_SHARD).clamp(1, MAX_SHARDS);
        let shards = 1 << shards.ilog2();
        let shard = || CachePadded(Mutex::new(Shard::new()));
        Self(Arc::new(Inner {
            shards: std::iter::repeat_with(shard).take(shards).collect(),
            slots: CachePadded(Slots::new(max_keys)),
            evicts: AtomicBool::new(false),
            hasher: RandomState::default(),
            clock,
            names: Names::default(),
            observers: Mutex::default(),
            is_observed: AtomicBool::new(false),
            reported_keys: AtomicUsize::new(0),
        }))
    }

    /// Sets what happens to a new key when the store is full of keys that are in use. The default
    /// is [`WhenFull::RejectNewKeys`].
    ///
    /// Clones of the store share the setting, which can be changed while requests flow.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{MemoryStore, store::WhenFull};
    ///
    /// let store = MemoryStore::new();
    /// store.set_when_full(WhenFull::EvictSoonest); // new clients count more than denied ones
    /// ```
    pub fn set_when_full(&self, when_full: WhenFull) {
        let evicts = when_full == WhenFull::EvictSoonest;
        self.0.evicts.store(evicts, Ordering::Relaxed);
    }

    /// Adds an observer to the store and its clones: see [`observe`](crate::observe).
    ///
    /// It gets the events of the store, and of the limiters that are made over it from now on.
    /// Limiters that exist already keep their observers. Adding an observer again has no effect.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::sync::Arc;
    /// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, observe::TopDenied};
    ///
    /// let denied = Arc::new(TopDenied::new(100));
    /// let store = MemoryStore::new();
    /// store.add_observer(denied.clone());
    /// let quota = Quota::per_second(10);
    /// let limiter = Limiter::new("api", store, Algorithm::token_bucket(), quota);
    /// # let _ = limiter;
    /// ```
    pub fn add_observer(&self, observer: Arc<dyn Observer>) {
        lock(&self.0.observers).add(observer);
        self.0.is_observed.store(true, Ordering::Relaxed);
    }

    /// Returns the number of keys in the store, at most `max_keys`.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let store = MemoryStore::new();
    /// let quota = Quota::per_hour(3);
    /// let limiter = Limiter::new("api", store.clone(), Algorithm::sliding_log(), quota);
    /// let _ = limiter.check("alice").await?;
    /// assert_eq!(store.key_count(), 1);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn key_count(&self) -> usize {
        self.0.slots.0.used()
    }

    /// Decides about a request to one limit.
    #[inline(always)]
    pub(super) fn decide_alone(
        &self,
        request: &StoreRequest<'_>,
        limit: &LimitRequest<'_>,
    ) -> Result<Outcome, StoreError> {
        let LimitRequest { settings, key, .. } = *limit;
        let (key, action) = (key.as_bytes(), request.action);
        let LockedShard { mut shard, hash, mut now, mut count_changed } =
            self.locked_shard(settings, key);
        let reply = loop {
            let to_engine = shard.request(request, limit, now);
            if let Some(entry) = shard.find(hash, settings, key) {
                if let Some(reply) = entry.decide_in_core(settings, &to_engine) {
                    return Ok(self.answer(request, limit, reply, shard, count_changed));
                }
                // A copy: the request itself stays in registers.
                break entry.decide_in_state(settings, &EngineRequest { ..to_engine });
            }
            if !action.commits() && !matches!(action, Action::Block { duration: 1.. }) {
                // Nothing of the key is stored: the request changes nothing.
                break Entry::new(settings, key).decide(settings, &EngineRequest { ..to_engine });
            }
            let locked = LockedShard { shard, hash, now, count_changed };
            LockedShard { shard, now, count_changed, .. } =
                self.with_new_key(locked, settings, key)?;
        };
        Ok(self.answer(request, limit, reply, shard, count_changed))
    }

    /// Unlocks the shard, and returns the answer of one limit.
    #[inline(always)]
    fn answer(
        &self,
        request: &StoreRequest<'_>,
        limit: &LimitRequest<'_>,
        reply: EngineReply,
        shard: MutexGuard<'_, Shard>,
        count_changed: bool,
    ) -> Outcome {
        drop(shard);
        self.report_after(request, count_changed);
        Outcome::new(limit.policy(), reply, request.action, 0.0)
    }

    /// Reports the number of keys if it has changed, and calls the lines of the keys after an
    /// action that can return units. Not while a shard is locked.
    #[inline(always)]
    fn report_after(&self, request: &StoreRequest<'_>, count_changed: bool) {
        if count_changed {
            self.report_keys();
        }
        if matches!(request.action, Action::Refund | Action::Unblock) {
            let lines = self.0.names.lines();
            request.limits.iter().for_each(|it| lines.key_returned(it.settings.name, it.key));
        }
    }

    /// Inserts a key that is not in its shard.
    #[inline(never)]
    fn with_new_key<'a>(
        &'a self,
        mut locked: LockedShard<'a>,
        settings: &Arc<Settings>,
        key: &[u8],
    ) -> Result<LockedShard<'a>, StoreError> {
        let (slots, hasher) = (&self.0.slots.0, &self.0.hasher);
        let LockedShard { shard, hash, now, .. } = &mut locked;
        let (hash, mut search) = (*hash, self.search(*now, &[]));
        let mut slot = slots.take();
        match slot {
            Some(_) => shard.sweep(*now, slots),
            None => slot = shard.evict(&mut search, slots),
        }
        let slot = match slot {
            Some(slot) => slot,
            None => {
                drop(locked);
                let slot = self.evict_elsewhere(&[self.shard_index(hash)], &mut search)?;
                locked = self.lock_shard(hash);
                if locked.shard.find(hash, settings, key).is_some() {
                    locked.count_changed = true; // another thread has inserted it: a slot is free
                    return Ok(locked);
                }
                slot
            }
        };
        locked.count_changed = true;
        locked.shard.insert(locked.hash, Entry::new(settings, key), hasher, slot);
        Ok(locked)
    }

    /// Returns units to a key.
    pub(crate) fn return_units(
        &self,
        settings: &Arc<Settings>,
        key: &Key<'_>,
        releases: &[Release],
    ) {
        let LockedShard { mut shard, hash, now, .. } = self.locked_shard(settings, key.as_bytes());
        if let Some(entry) = shard.find(hash, settings, key.as_bytes()) {
            entry.return_units(settings, now, releases);
        }
        drop(shard);
        self.0.names.lines().key_returned(settings.name, key);
    }

    /// Spends the used units of a hold whose key was reset. A store that is full of other keys
    /// cannot count them.
    fn spend_of_lost(&self, hold: &EndedHold<'_>) {
        let EndedHold { settings, observers, key, used: cost, .. } = *hold;
        if cost > 0 && settings.params.kind() == hold.algorithm {
            let (max_wait, hold) = (0, None);
            let limits = &[LimitRequest { settings, observers, key, cost, max_wait, hold }];
            let request = StoreRequest::new(Action::Spend, limits, Reporting::Nothing);
            drop(self.decide(&request));
        }
    }

    /// Reports the number of keys to the observers of the store, if it has changed.
    fn report_keys(&self) {
        let Inner { slots, reported_keys, is_observed, .. } = &*self.0;
        if !is_observed.load(Ordering::Relaxed) {
            return;
        }
        let (keys, max_keys) = (slots.0.used(), slots.0.max());
        if reported_keys.swap(keys, Ordering::Relaxed) != keys {
            // Copied, because an observer can use the store.
            let observers = lock(&self.0.observers).clone();
            observers.report(&Event::KeysHeld { keys, max_keys });
        }
    }

    fn search<'a>(&self, now: i64, kept: &'a [LimitRequest<'a>]) -> Search<'a> {
        let evicts = self.0.evicts.load(Ordering::Relaxed);
        let when_full = if evicts { WhenFull::EvictSoonest } else { WhenFull::RejectNewKeys };
        Search::new(now, when_full, kept)
    }

    /// Continues a search in the other shards, one after the other. The caller must hold no lock:
    /// so there is no order of locks to keep.
    fn evict_elsewhere(
        &self,
        searched: &[usize],
        search: &mut Search<'_>,
    ) -> Result<Slot<'_>, StoreError> {
        let (shards, slots) = (&self.0.shards, &self.0.slots.0);
        let first = searched.first().map_or(0, |index| index + 1);
        let indices = (first..first + shards.len()).map(|index| index % shards.len());
        for index in indices.filter(|index| !searched.contains(index)) {
            if search.is_over() {
                break;
            }
            if let Some(slot) = lock(&shards[index].0).evict(search, slots) {
                return Ok(slot);
            }
        }
        Err(StoreError::full(slots.max()))
    }

    #[inline]
    fn hash(&self, settings: &Settings, key: &[u8]) -> u64 {
        entry::hash(&self.0.hasher, settings, key)
    }

    fn shard_index(&self, hash: u64) -> usize {
        // The table takes the lowest and the highest bits.
        (hash >> 32) as usize & (self.0.shards.len() - 1)
    }

    /// Locks the shard of a key.
    #[inline(always)]
    fn locked_shard(&self, settings: &Settings, key: &[u8]) -> LockedShard<'_> {
        self.lock_shard(self.hash(settings, key))
    }

    #[inline(always)]
    fn lock_shard(&self, hash: u64) -> LockedShard<'_> {
        // Read under the lock, the clock would delay other threads, and the look-up of the key.
        let reading = self.0.clock.now();
        let mut shard = lock(&self.0.shards[self.shard_index(hash)].0);
        let now = shard.instant(reading, &self.0.clock);
        LockedShard { shard, hash, now, count_changed: false }
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStore")
            .field("max_keys", &self.0.slots.0.max())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
impl MemoryStore {
    /// Decides, as a store in memory does at once.
    pub(crate) fn decide_now(&self, request: &StoreRequest<'_>) -> Result<Outcome, crate::Error> {
        let StoreFuture::Ready(Some(answer)) = self.decide(request) else { unreachable!() };
        answer
    }
}

impl Sealed for MemoryStore {}

impl Store for MemoryStore {
    fn into_any(self) -> AnyStore {
        AnyStore::Memory(self)
    }
}

impl StoreCalls for MemoryStore {
    fn decide(&self, request: &StoreRequest<'_>) -> StoreFuture<Outcome> {
        match request.limits {
            [limit] => StoreFuture::ready(self.decide_alone(request, limit).map_err(Error::from)),
            _ => self.decide_combined(request),
        }
    }

    fn release_in_background(
        &self,
        settings: &Arc<Settings>,
        key: &Key<'_>,
        release: Release,
        offer: Option<Arc<Offer>>,
    ) -> Option<Task> {
        if offer.is_none_or(|offer| offer.end()) {
            self.return_units(settings, key, &[release]);
        }
        None
    }

    #[inline]
    fn end_hold(&self, hold: &EndedHold<'_>) {
        let EndedHold { settings, observers, key, units, .. } = *hold;
        let found = {
            let LockedShard { mut shard, hash, now, .. } =
                self.locked_shard(settings, key.as_bytes());
            shard.find_held(hash, hold).map(|entry| entry.end_hold(hold, now))
        };
        if found.is_none() {
            self.spend_of_lost(hold);
        }
        self.0.names.lines().key_returned(settings.name, key);
        if found != Some(true) {
            observers.report(&Event::HoldLost { limiter: settings.name, key, held: units });
        }
    }

    fn reset(&self, settings: &Arc<Settings>, key: &Key<'_>) -> StoreFuture<()> {
        let LockedShard { mut shard, hash, .. } = self.locked_shard(settings, key.as_bytes());
        drop(shard.remove(hash, settings, key.as_bytes(), &self.0.slots.0));
        drop(shard);
        self.0.names.lines().key_returned(settings.name, key);
        self.report_keys();
        StoreFuture::ready(Ok(()))
    }

    fn blocked_until(&self, settings: &Arc<Settings>, key: &Key<'_>) -> Option<Instant> {
        let key = key.as_bytes();
        let LockedShard { mut shard, hash, .. } = self.locked_shard(settings, key);
        let ends = shard.find(hash, settings, key)?.blocked_until()?;
        Some(self.0.clock.instant(ends))
    }

    fn spawn_background(&self, mut task: Task) {
        // The answers of this store are ready immediately.
        let _ = task.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    }

    fn names(&self) -> &Names {
        &self.0.names
    }

    fn observers(&self) -> Observers {
        lock(&self.0.observers).clone()
    }

    fn add_observer(&self, observer: Arc<dyn Observer>) {
        self.add_observer(observer);
    }
}
