//! Several limits at once: their shards are locked together, and all of their keys find room, or
//! none.

use std::sync::MutexGuard;

use super::{Entry, MAX_SHARDS, MemoryStore, Search, Shard, Slot};
use crate::{
    algorithm::{Action, Combined, EngineReply, EngineRequest, PerLimit},
    decision::Outcome,
    error::StoreError,
    store::{LimitRequest, StoreRequest},
    sync::lock,
};

impl MemoryStore {
    #[inline(never)]
    pub(super) fn decide_combined(
        &self,
        request: &StoreRequest<'_>,
    ) -> Result<Outcome, StoreError> {
        let StoreRequest { action, limits, counts, .. } = *request;
        let mut slots = PerLimit::new();
        let mut combined = Combined { replies: PerLimit::new(), binding: 0 };
        loop {
            combined.replies.clear();
            let mut transaction = Transaction::new(self);
            let mut requests = PerLimit::new();
            transaction.lock(request, &mut requests);
            let has_room = !action.commits() || transaction.take_slots(&mut slots);
            let step = |limit, it: &_| transaction.step(limit, it, action);
            let looked = combined.look(&requests, has_room, step);
            // A denied request needs no room.
            if looked.0.admitted && !has_room {
                let mut search = self.search(transaction.now, limits);
                if !transaction.evict(&mut slots, &mut search) {
                    let searched = transaction.unlock();
                    // Then from the beginning, as the keys may change meanwhile. Each round finds a
                    // slot, or fails.
                    slots.push(self.evict_elsewhere(&searched, &mut search)?);
                    continue;
                }
            }
            combined.commit(&requests, looked, |limit, it| transaction.step(limit, it, action));
            transaction.insert_fresh(slots);
            transaction.shards.clear();
            self.report_keys(); // not while the shards are locked
            let policies = limits.iter().map(LimitRequest::policy);
            let Combined { replies, binding } = &combined;
            return Ok(Outcome::of_several(policies, replies, *binding, counts, action, 0.0));
        }
    }
}

// The shards of a transaction are bits of a number.
const _: () = assert!(MAX_SHARDS <= u64::BITS as usize);

/// The keys of several limits, with their shards locked.
struct Transaction<'a> {
    store: &'a MemoryStore,
    /// The latest instant of all shards, which each of them has from then on.
    now: i64,
    keys: PerLimit<LockedKey<'a>>,
    /// The entries of the keys that are not in the store.
    fresh: PerLimit<Entry>,
    /// With their indices, by which they are sorted: a fixed lock order prevents deadlock.
    shards: PerLimit<(usize, MutexGuard<'a, Shard>)>,
}

/// The key of a limit.
#[derive(Clone, Copy)]
struct LockedKey<'a> {
    limit: &'a LimitRequest<'a>,
    hash: u64,
    /// The index of its shard, among the locked shards.
    shard: usize,
    place: KeyPlace,
}

/// Where the entry of a key is.
#[derive(Clone, Copy)]
enum KeyPlace {
    /// The bucket in the table of its shard.
    Bucket(usize),
    /// The index among the entries that are not in the store.
    Fresh(usize),
}

impl<'a> Transaction<'a> {
    fn new(store: &'a MemoryStore) -> Self {
        let (keys, fresh, shards) = (PerLimit::new(), PerLimit::new(), PerLimit::new());
        Self { store, now: 0, keys, fresh, shards }
    }

    /// Locks the shards of the keys, finds the keys, and writes the requests to the engine.
    fn lock(&mut self, request: &StoreRequest<'a>, requests: &mut PerLimit<EngineRequest>) {
        let Self { store, now, keys, fresh, shards } = self;
        let MemoryStore(inner) = *store;
        let mut wanted = 0_u64;
        for limit in request.limits {
            let hash = store.hash(limit.settings, limit.key.as_bytes());
            let (shard, place) = (store.shard_index(hash), KeyPlace::Fresh(0));
            wanted |= 1 << shard;
            keys.push(LockedKey { limit, hash, shard, place });
        }
        *now = inner.clock.now();
        let mut rest = wanted;
        while rest != 0 {
            let index = rest.trailing_zeros() as usize;
            rest &= rest - 1;
            let mut shard = lock(&inner.shards[index].0);
            *now = shard.instant(*now, &inner.clock).max(*now);
            shards.push((index, shard));
        }
        for LockedKey { limit, hash, shard, place } in keys.iter_mut() {
            let (settings, key) = (limit.settings, limit.key.as_bytes());
            // The locked shards before this one.
            *shard = (wanted & ((1 << *shard) - 1)).count_ones() as usize;
            let shard = &mut shards[*shard].1;
            shard.latest = *now;
            requests.push(shard.request(request, limit, *now));
            *place = match shard.find_bucket(*hash, settings, key) {
                Some(bucket) => KeyPlace::Bucket(bucket),
                None => {
                    fresh.push(Entry::new(settings, key));
                    KeyPlace::Fresh(fresh.len() - 1)
                }
            };
        }
    }

    /// Steps one limit. A check that only looks at it notes a denial, as its decision would.
    fn step(&mut self, limit: usize, request: &EngineRequest, action: Action) -> EngineReply {
        let LockedKey { limit, shard, place, .. } = self.keys[limit];
        let entry = match place {
            KeyPlace::Bucket(bucket) => self.shards[shard].1.entry(bucket),
            KeyPlace::Fresh(index) => &mut self.fresh[index],
        };
        let reply = entry.decide(limit.settings, request);
        if action == Action::Check && request.action == Action::Peek && !reply.admitted {
            entry.note_denial(request.now, reply.wait);
        }
        reply
    }

    /// Takes free slots for the keys that are not in the store. Returns whether there are enough.
    fn take_slots(&self, slots: &mut PerLimit<Slot<'a>>) -> bool {
        let needed = self.fresh.len();
        while slots.len() < needed {
            let Some(slot) = self.store.0.slots.0.take() else { return false };
            slots.push(slot);
        }
        true
    }

    /// Drops other keys of the shards that are locked. Returns whether there are enough slots then.
    fn evict(&mut self, slots: &mut PerLimit<Slot<'a>>, search: &mut Search<'_>) -> bool {
        let needed = self.fresh.len();
        for (_, shard) in &mut self.shards {
            while slots.len() < needed
                && let Some(slot) = shard.evict(search, &self.store.0.slots.0)
            {
                slots.push(slot);
                search.renew();
            }
        }
        slots.len() >= needed
    }

    /// Unlocks the shards, and returns their indices.
    fn unlock(self) -> PerLimit<usize> {
        self.shards.into_iter().map(|(index, _)| index).collect()
    }

    fn insert_fresh(&mut self, mut slots: PerLimit<Slot<'_>>) {
        if self.fresh.is_empty() {
            return;
        }
        let MemoryStore(inner) = self.store;
        let keys = self.keys.iter().filter(|key| matches!(key.place, KeyPlace::Fresh(_)));
        for (LockedKey { hash, shard, .. }, entry) in keys.zip(self.fresh.drain(..)) {
            if !entry.is_initial()
                && let Some(slot) = slots.pop()
            {
                let shard = &mut self.shards[*shard].1;
                shard.sweep(self.now, &inner.slots.0);
                shard.insert(*hash, entry, &inner.hasher, slot);
            }
        }
    }
}
