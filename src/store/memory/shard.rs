//! A shard: a part of the keys behind one lock. Finds, inserts and evicts keys; does not decide.

use std::sync::Arc;

use foldhash::fast::RandomState;
use hashbrown::HashTable;

use super::{
    WhenFull,
    clock::Clock,
    entry::{Entry, Usage},
    slots::{Slot, Slots},
};
use crate::{
    algorithm::{Action, EngineRequest, Lifetime},
    store::{EndedHold, LimitRequest, Settings, StoreRequest},
};

/// The buckets in which an insertion looks for expired keys while the store has room.
const SWEPT_BUCKETS: usize = 4;
/// The keys that are not in use that an insertion into a full store compares, to evict the one with
/// the least usage, unless it finds one with a single unit. Each is a cache line that is rarely in
/// a cache, and costs 20 to 100 ns.
const MAX_CANDIDATES: usize = 4;
/// The keys that it looks at to find these.
const MAX_KEYS_LOOKED_AT: usize = 32;
/// The buckets in which it looks for these keys: a table that was much fuller before is sparse.
const MAX_BUCKETS_LOOKED_AT: usize = 512;
/// The time for which an expired key is kept while there is room, in microseconds: its next request
/// is likely to come soon.
const KEPT: i64 = 1_000_000;

/// The difference between the clocks of two threads up to which the later one holds, in
/// microseconds: no unit is refilled twice. A clock that steps back further has another origin, and
/// must not stand still until then.
const LONGEST_DIFFERENCE: i64 = 1_000_000;

pub(super) struct Shard {
    table: HashTable<Entry>,
    /// The bucket at which the next sweep continues.
    cursor: usize,
    /// The latest instant at which something was decided.
    pub(super) latest: i64,
    /// The epoch of the newest hold. Each hold has a later one, as a `reset` may take no time, and
    /// must not confuse the holds before it with those behind it.
    last_epoch: i64,
}

/// A search for a key to evict. It is bounded, and may extend over several shards.
pub(super) struct Search<'a> {
    now: i64,
    when_full: WhenFull,
    /// The keys of the current decision, which are not evicted.
    kept: &'a [LimitRequest<'a>],
    candidates_left: usize,
    keys_left: usize,
    buckets_left: usize,
}

impl<'a> Search<'a> {
    pub(super) fn new(now: i64, when_full: WhenFull, kept: &'a [LimitRequest<'a>]) -> Self {
        Self {
            now,
            when_full,
            kept,
            candidates_left: MAX_CANDIDATES,
            keys_left: MAX_KEYS_LOOKED_AT,
            buckets_left: MAX_BUCKETS_LOOKED_AT,
        }
    }

    /// Restarts the search, for another slot.
    pub(super) fn renew(&mut self) {
        *self = Self::new(self.now, self.when_full, self.kept);
    }

    pub(super) fn is_over(&self) -> bool {
        self.candidates_left == 0 || self.keys_left == 0 || self.buckets_left == 0
    }

    fn keeps(&self, entry: &Entry) -> bool {
        self.kept.iter().any(|limit| entry.is(limit.settings, limit.key.as_bytes()))
    }
}

impl Shard {
    pub(super) fn new() -> Self {
        Self { table: HashTable::new(), cursor: 0, latest: 0, last_epoch: 0 }
    }

    /// Returns the instant of a `reading` of the clock, or a later one that another thread has read
    /// before this thread locked the shard.
    #[inline]
    pub(super) fn instant(&mut self, reading: i64, clock: &Clock) -> i64 {
        if reading < self.latest {
            self.latest = self.instant_again(clock.now());
        } else {
            self.latest = reading;
        }
        self.latest
    }

    /// Returns the instant of a reading while the shard is locked. It is older than the latest one
    /// if the counter was corrected or given up, if the counters of two processors differ, or if
    /// another runtime of a test has advanced its paused time.
    #[cold]
    fn instant_again(&self, reading: i64) -> i64 {
        if self.latest - reading > LONGEST_DIFFERENCE { reading } else { reading.max(self.latest) }
    }

    #[cfg(test)]
    pub(super) fn key_count(&self) -> usize {
        self.table.len()
    }

    #[inline]
    pub(super) fn find(
        &mut self,
        hash: u64,
        settings: &Arc<Settings>,
        key: &[u8],
    ) -> Option<&mut Entry> {
        self.table.find_mut(hash, |entry| entry.is(settings, key))
    }

    /// Finds the bucket of a key, for [`entry`](Self::entry): until a key is inserted.
    #[inline]
    pub(super) fn find_bucket(
        &self,
        hash: u64,
        settings: &Arc<Settings>,
        key: &[u8],
    ) -> Option<usize> {
        self.table.find_bucket_index(hash, |entry| entry.is(settings, key))
    }

    #[inline]
    pub(super) fn entry(&mut self, bucket: usize) -> &mut Entry {
        self.table.get_bucket_mut(bucket).expect("the bucket of a key")
    }

    /// Finds the key of a hold.
    #[inline]
    pub(super) fn find_held(&mut self, hash: u64, hold: &EndedHold<'_>) -> Option<&mut Entry> {
        self.table.find_mut(hash, |entry| entry.holds(hold))
    }

    /// Returns the request to the engine.
    #[inline(always)]
    pub(super) fn request(
        &mut self,
        request: &StoreRequest<'_>,
        limit: &LimitRequest<'_>,
        now: i64,
    ) -> EngineRequest {
        let action = if limit.hold.is_some() { self.hold(now) } else { request.action };
        request.to_engine(limit, now, action)
    }

    /// Returns the action of a hold, with an epoch of its own.
    #[inline]
    pub(super) fn hold(&mut self, now: i64) -> Action {
        self.last_epoch = now.max(self.last_epoch + 1);
        Action::Hold { lifetime: Lifetime::ENDLESS, epoch: Some(self.last_epoch) }
    }

    pub(super) fn insert(&mut self, hash: u64, entry: Entry, hasher: &RandomState, slot: Slot<'_>) {
        self.table.insert_unique(hash, entry, |entry| entry.hash(hasher));
        slot.fill();
    }

    /// Removes a key, and returns its slot.
    pub(super) fn remove<'s>(
        &mut self,
        hash: u64,
        settings: &Arc<Settings>,
        key: &[u8],
        slots: &'s Slots,
    ) -> Option<Slot<'s>> {
        let entry = self.table.find_entry(hash, |entry| entry.is(settings, key)).ok()?;
        entry.remove();
        Some(slots.of_removed_key())
    }

    /// Removes the next keys, if they expired a while ago.
    pub(super) fn sweep(&mut self, now: i64, slots: &Slots) {
        let expired_at = now - KEPT;
        for _ in 0..SWEPT_BUCKETS.min(self.table.num_buckets()) {
            let bucket = self.next_bucket();
            let entry = self.table.get_bucket_mut(bucket);
            if entry.is_some_and(|entry| entry.usage(expired_at).reset <= expired_at) {
                drop(self.remove_bucket(bucket, slots));
            }
        }
    }

    /// Removes the next key that has expired or has used one unit, or the candidate with the least
    /// usage before it.
    /// Returns the slot if a key was removed.
    pub(super) fn evict<'s>(
        &mut self,
        search: &mut Search<'_>,
        slots: &'s Slots,
    ) -> Option<Slot<'s>> {
        let mut victim: Option<(Usage, usize)> = None;
        for _ in 0..self.table.num_buckets() {
            if search.is_over() {
                break;
            }
            let bucket = self.next_bucket();
            search.buckets_left -= 1;
            let Some(entry) = self.table.get_bucket_mut(bucket) else { continue };
            search.keys_left -= 1;
            if search.keeps(entry) {
                continue;
            }
            let usage = entry.usage(search.now);
            if usage.reset <= search.now || usage.is_least && !usage.in_use {
                victim = Some((usage, bucket));
                break;
            }
            if !usage.may_be_evicted(search.when_full) {
                continue;
            }
            // A key in use is evicted only if no other one is among all that may be looked at.
            search.candidates_left -= usize::from(!usage.in_use);
            if victim.as_ref().is_none_or(|(least, _)| usage < *least) {
                victim = Some((usage, bucket));
            }
        }
        self.remove_bucket(victim?.1, slots)
    }

    fn next_bucket(&mut self) -> usize {
        self.cursor += 1;
        if self.cursor >= self.table.num_buckets() {
            self.cursor = 0;
        }
        self.cursor
    }

    fn remove_bucket<'s>(&mut self, bucket: usize, slots: &'s Slots) -> Option<Slot<'s>> {
        self.table.get_bucket_entry(bucket).ok()?.remove();
        Some(slots.of_removed_key())
    }
}
