//! Several limits at once: their shards are locked together, and all of their keys find room, or
//! none.

use std::sync::MutexGuard;

use super::{Clock, Entry, MemoryStore, Search, Shard, Slot};
use crate::{
    algorithm::{Action, EngineReply, EngineRequest, PerLimit, combine},
    decision::Outcome,
    error::{Error, StoreError},
    store::{LimitRequest, StoreFuture, StoreRequest},
    sync::lock,
};

impl MemoryStore {
    #[inline(never)]
    pub(super) fn decide_combined(&self, request: &StoreRequest<'_>) -> StoreFuture<Outcome> {
        let outcome = self.transact(request);
        self.report_keys();
        StoreFuture::ready(outcome.map_err(Error::from))
    }

    fn transact(&self, request: &StoreRequest<'_>) -> Result<Outcome, StoreError> {
        let mut slots = PerLimit::new();
        loop {
            let mut transaction = Transaction::new(self, request.limits);
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
            let (replies, binding) =
                combine(&requests, |index, engine_request| match request.action {
                    Action::Check => transaction.step_noting(index, engine_request),
                    _ => transaction.step(index, engine_request),
                });
            transaction.insert_fresh(slots, now);
            return Ok(outcome(request, &replies, binding));
        }
    }
}

fn outcome(request: &StoreRequest<'_>, replies: &[EngineReply], binding: usize) -> Outcome {
    let StoreRequest { action, limits, counts, .. } = *request;
    let policies = limits.iter().map(LimitRequest::policy);
    Outcome::of_several(policies, replies, binding, counts, action, 0.0)
}

/// The keys of several limits, with their shards locked.
struct Transaction<'a> {
    store: &'a MemoryStore,
    keys: PerLimit<LockedKey<'a>>,
    /// The entries of the keys that are not in the store.
    fresh: PerLimit<Entry>,
    /// Sorted: a fixed lock order prevents deadlock.
    shard_indices: PerLimit<usize>,
    shards: PerLimit<MutexGuard<'a, Shard>>,
}

/// The key of a limit.
#[derive(Clone, Copy)]
struct LockedKey<'a> {
    limit: &'a LimitRequest<'a>,
    hash: u64,
    /// The index of its shard, among the locked shards.
    shard: usize,
    /// The index of its entry, if the key is not in the store.
    fresh: Option<usize>,
}

impl<'a> Transaction<'a> {
    fn new(store: &'a MemoryStore, limits: &'a [LimitRequest<'a>]) -> Self {
        let hash = |limit: &LimitRequest<'_>| store.hash(limit.settings, limit.key.as_bytes());
        let hashes: PerLimit<u64> = limits.iter().map(hash).collect();
        let mut shard_indices: PerLimit<usize> =
            hashes.iter().map(|&hash| store.shard_index(hash)).collect();
        shard_indices.sort_unstable();
        shard_indices.dedup();
        let mut shards: PerLimit<MutexGuard<'_, Shard>> =
            shard_indices.iter().map(|&index| lock(&store.0.shards[index].0)).collect();
        let mut fresh = PerLimit::new();
        let locked = |(limit, hash): (&'a LimitRequest<'a>, u64)| {
            let (index, key) = (store.shard_index(hash), limit.key.as_bytes());
            let shard = shard_indices.partition_point(|&other| other < index);
            let is_known = shards[shard].find(hash, limit.settings, key).is_some();
            let index = (!is_known).then(|| {
                fresh.push(Entry::new(limit.settings, key));
                fresh.len() - 1
            });
            LockedKey { limit, hash, shard, fresh: index }
        };
        let keys = limits.iter().zip(hashes).map(locked).collect();
        Self { store, keys, fresh, shard_indices, shards }
    }

    /// Returns the latest instant of all shards, which each of them has from then on.
    fn instant(&mut self, clock: &Clock) -> i64 {
        let shards = &mut self.shards;
        let instant = shards
            .iter_mut()
            .fold(clock.now(), |latest, shard| shard.instant(latest, clock).max(latest));
        shards.iter_mut().for_each(|shard| shard.latest = instant);
        instant
    }

    /// Returns the requests to the engine.
    fn requests(&mut self, request: &StoreRequest<'_>, now: i64) -> PerLimit<EngineRequest> {
        let Self { keys, shards, .. } = self;
        let request = |LockedKey { limit, shard, .. }: &LockedKey<'_>| {
            shards[*shard].request(request, limit, now)
        };
        keys.iter().map(request).collect()
    }

    fn entry(&mut self, limit: usize) -> &mut Entry {
        let LockedKey { limit, hash, shard, fresh } = self.keys[limit];
        match fresh {
            Some(index) => &mut self.fresh[index],
            None => {
                let known = self.shards[shard].find(hash, limit.settings, limit.key.as_bytes());
                known.expect("the key is in the store")
            }
        }
    }

    /// Steps for a check, and remembers a denial by this limit itself.
    fn step_noting(&mut self, limit: usize, request: &EngineRequest) -> EngineReply {
        let reply = self.step(limit, request);
        if request.admission.is_none() && !reply.admitted {
            self.entry(limit).note_denial(request.now, reply.wait);
        }
        reply
    }

    fn step(&mut self, limit: usize, request: &EngineRequest) -> EngineReply {
        let settings = self.keys[limit].limit.settings;
        self.entry(limit).decide(settings, request)
    }

    /// Decides without committing. Returns the outcome, if it is a denial.
    fn denial(
        &mut self,
        request: &StoreRequest<'_>,
        requests: &[EngineRequest],
    ) -> Option<Outcome> {
        let peek = |request: &EngineRequest| EngineRequest { action: Action::Peek, ..*request };
        let peeks: PerLimit<EngineRequest> = requests.iter().map(peek).collect();
        let (replies, binding) = combine(&peeks, |index, request| self.step_noting(index, request));
        let denied = !replies[binding].admitted;
        denied.then(|| outcome(request, &replies, binding))
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
        for shard in &mut self.shards {
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
        self.shard_indices
    }

    fn insert_fresh(self, mut slots: PerLimit<Slot<'_>>, now: i64) {
        let Self { store, keys, fresh, mut shards, .. } = self;
        let keys = keys.iter().filter(|key| key.fresh.is_some());
        for (LockedKey { hash, shard, .. }, entry) in keys.zip(fresh) {
            if !entry.is_initial()
                && let Some(slot) = slots.pop()
            {
                let shard = &mut shards[*shard];
                shard.sweep(now, &store.0.slots.0);
                shard.insert(*hash, entry, &store.0.hasher, slot);
            }
        }
    }
}
