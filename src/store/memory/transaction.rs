//! Several limits at once: their shards are locked together, and all of their keys find room, or
//! none.

use std::sync::MutexGuard;

use super::{Clock, Entry, MemoryStore, Search, Shard, Slot};
use crate::{
    algorithm::{Action, Combined, EngineReply, EngineRequest, PerLimit, combine},
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
        let mut slots = PerLimit::new();
        loop {
            let mut transaction = Transaction::new(self);
            transaction.lock(request.limits);
            let now = transaction.instant(&self.0.clock);
            let requests = transaction.requests(request, now);
            if request.action.commits() && !transaction.take_slots(&mut slots) {
                // A denied request needs no room.
                if request.action == Action::Check
                    && let Some(denial) = transaction.denial(request, &requests)
                {
                    return Ok(denial);
                }
                let mut search = self.search(now, request.limits);
                if !transaction.evict(&mut slots, &mut search) {
                    let searched = transaction.unlock();
                    // Then from the beginning, as the keys may change meanwhile. Each round finds a
                    // slot, or fails.
                    slots.push(self.evict_elsewhere(&searched, &mut search)?);
                    continue;
                }
            }
            let combined = transaction.combine(request, &requests);
            transaction.insert_fresh(slots, now);
            drop(transaction);
            self.report_keys(); // not while the shards are locked
            return Ok(outcome(request, &combined));
        }
    }
}

fn outcome(request: &StoreRequest<'_>, combined: &Combined) -> Outcome {
    let StoreRequest { action, limits, counts, .. } = *request;
    let policies = limits.iter().map(LimitRequest::policy);
    Outcome::of_several(policies, &combined.replies, combined.binding, counts, action, 0.0)
}

/// The keys of several limits, with their shards locked.
struct Transaction<'a> {
    store: &'a MemoryStore,
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
        Self { store, keys: PerLimit::new(), fresh: PerLimit::new(), shards: PerLimit::new() }
    }

    /// Locks the shards of the keys, and finds the keys.
    fn lock(&mut self, limits: &'a [LimitRequest<'a>]) {
        let mut indices: PerLimit<usize> = PerLimit::new();
        for limit in limits {
            let hash = self.store.hash(limit.settings, limit.key.as_bytes());
            let shard = self.store.shard_index(hash);
            self.keys.push(LockedKey { limit, hash, shard, place: KeyPlace::Fresh(0) });
            indices.push(shard);
        }
        indices.sort_unstable();
        indices.dedup();
        for &index in &indices {
            self.shards.push((index, lock(&self.store.0.shards[index].0)));
        }
        for LockedKey { limit, hash, shard, place } in &mut self.keys {
            let (settings, key) = (limit.settings, limit.key.as_bytes());
            *shard = indices.partition_point(|index| index < shard);
            *place = match self.shards[*shard].1.find_bucket(*hash, settings, key) {
                Some(bucket) => KeyPlace::Bucket(bucket),
                None => {
                    self.fresh.push(Entry::new(settings, key));
                    KeyPlace::Fresh(self.fresh.len() - 1)
                }
            };
        }
    }

    /// Returns the latest instant of all shards, which each of them has from then on.
    fn instant(&mut self, clock: &Clock) -> i64 {
        let mut instant = clock.now();
        for (_, shard) in &mut self.shards {
            instant = shard.instant(instant, clock).max(instant);
        }
        self.shards.iter_mut().for_each(|(_, shard)| shard.latest = instant);
        instant
    }

    /// Returns the requests to the engine.
    fn requests(&mut self, request: &StoreRequest<'_>, now: i64) -> PerLimit<EngineRequest> {
        let mut requests = PerLimit::new();
        for LockedKey { limit, shard, .. } in &self.keys {
            requests.push(self.shards[*shard].1.request(request, limit, now));
        }
        requests
    }

    fn combine(&mut self, request: &StoreRequest<'_>, requests: &[EngineRequest]) -> Combined {
        let notes = request.action == Action::Check;
        combine(requests, |limit, request| self.step(limit, request, notes))
    }

    /// Steps one limit. A check `notes` a denial by this limit itself.
    fn step(&mut self, limit: usize, request: &EngineRequest, notes: bool) -> EngineReply {
        let LockedKey { limit, shard, place, .. } = self.keys[limit];
        let entry = match place {
            KeyPlace::Bucket(bucket) => self.shards[shard].1.entry(bucket),
            KeyPlace::Fresh(index) => &mut self.fresh[index],
        };
        let reply = entry.decide(limit.settings, request);
        if notes && request.admission.is_none() && !reply.admitted {
            entry.note_denial(request.now, reply.wait);
        }
        reply
    }

    /// Decides without committing. Returns the outcome, if it is a denial.
    fn denial(
        &mut self,
        request: &StoreRequest<'_>,
        requests: &[EngineRequest],
    ) -> Option<Outcome> {
        let peek = |request: &EngineRequest| EngineRequest { action: Action::Peek, ..*request };
        let peeks: PerLimit<EngineRequest> = requests.iter().map(peek).collect();
        let peeked = self.combine(request, &peeks);
        let denied = !peeked.replies[peeked.binding].admitted;
        denied.then(|| outcome(request, &peeked))
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

    fn insert_fresh(&mut self, mut slots: PerLimit<Slot<'_>>, now: i64) {
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
                shard.sweep(now, &inner.slots.0);
                shard.insert(*hash, entry, &inner.hasher, slot);
            }
        }
    }
}
