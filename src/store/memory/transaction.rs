//! Several limits at once: their shards are locked together, and all of their keys find room, or
//! none.

use std::sync::MutexGuard;

use super::{Clock, Entry, MemoryStore, Search, Shard, Slot};
use crate::{
    algorithm::{Action, EngineReply, EngineRequest, combine},
    decision::Outcome,
    error::StoreError,
    store::{LimitRequest, StoreRequest},
    sync::lock,
};

impl MemoryStore {
    pub(super) fn decide_combined(
        &self,
        request: &StoreRequest<'_>,
    ) -> Result<Outcome, StoreError> {
        let limits = request.limits;
        let mut slots = vec![];
        loop {
            let mut transaction = Transaction::new(self, limits);
            let now = transaction.instant(&self.0.clock);
            let requests = transaction.requests(request, now);
            if request.action.commits() && !transaction.take_slots(&mut slots) {
                // A denied request needs no room.
                if request.action == Action::Check
                    && let Some(denial) = transaction.denial(&requests)
                {
                    return Ok(denial);
                }
                let mut search = self.search(now, limits);
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
            drop(transaction);
            return Ok(outcome(limits, request.action, &replies, binding));
        }
    }
}

fn outcome(
    limits: &[LimitRequest<'_>],
    action: Action,
    replies: &[EngineReply],
    binding: usize,
) -> Outcome {
    let policies = limits.iter().map(LimitRequest::policy);
    Outcome::of_several(policies, replies, binding, action, 0.0)
}

/// The keys of several limits, with their shards locked.
struct Transaction<'a> {
    store: &'a MemoryStore,
    limits: &'a [LimitRequest<'a>],
    hashes: Vec<u64>,
    /// Sorted: a fixed lock order prevents deadlock.
    shard_indices: Vec<usize>,
    shards: Vec<MutexGuard<'a, Shard>>,
    /// Of the keys that are not in the store.
    fresh: Vec<Option<Entry>>,
}

impl<'a> Transaction<'a> {
    fn new(store: &'a MemoryStore, limits: &'a [LimitRequest<'a>]) -> Self {
        let hashes: Vec<u64> =
            limits.iter().map(|limit| store.hash(limit.settings, limit.key.as_bytes())).collect();
        let mut shard_indices: Vec<usize> =
            hashes.iter().map(|&hash| store.shard_index(hash)).collect();
        shard_indices.sort_unstable();
        shard_indices.dedup();
        let shards = shard_indices.iter().map(|&index| lock(&store.0.shards[index].0)).collect();
        let mut transaction = Self { store, limits, hashes, shard_indices, shards, fresh: vec![] };
        let entry = |limit: &LimitRequest<'_>| Entry::new(limit.settings, limit.key.as_bytes());
        for (i, limit) in limits.iter().enumerate() {
            let known = transaction.find(i).is_some();
            transaction.fresh.push((!known).then(|| entry(limit)));
        }
        transaction
    }

    /// Returns the latest instant of all shards, which is then that of each.
    fn instant(&mut self, clock: &Clock) -> i64 {
        let shards = &mut self.shards;
        let instant = shards
            .iter_mut()
            .fold(clock.now(), |latest, shard| shard.instant(latest, clock).max(latest));
        shards.iter_mut().for_each(|shard| shard.latest = instant);
        instant
    }

    /// Returns the index of the shard, among the locked shards.
    fn shard_of(&self, limit: usize) -> usize {
        let index = self.store.shard_index(self.hashes[limit]);
        self.shard_indices.partition_point(|&other| other < index)
    }

    /// Returns the requests to the engine.
    fn requests(&mut self, request: &StoreRequest<'_>, now: i64) -> Vec<EngineRequest> {
        let limits = self.limits.iter().enumerate();
        limits.map(|(i, limit)| request.at(limit, now, || self.shard(i).new_hold(now))).collect()
    }

    fn shard(&mut self, limit: usize) -> &mut Shard {
        let shard = self.shard_of(limit);
        &mut self.shards[shard]
    }

    fn find(&mut self, limit: usize) -> Option<&mut Entry> {
        let LimitRequest { settings, key, .. } = self.limits[limit];
        let hash = self.hashes[limit];
        self.shard(limit).find(hash, settings, key.as_bytes())
    }

    fn entry(&mut self, limit: usize) -> &mut Entry {
        if self.fresh[limit].is_some() {
            return self.fresh[limit].as_mut().expect("the key is new");
        }
        self.find(limit).expect("the key is in the store")
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
        let settings = self.limits[limit].settings;
        self.entry(limit).step(settings, request)
    }

    /// Decides without committing. Returns the outcome, if it is a denial.
    fn denial(&mut self, requests: &[EngineRequest]) -> Option<Outcome> {
        let peek = |request: &EngineRequest| EngineRequest { action: Action::Peek, ..*request };
        let peeks: Vec<EngineRequest> = requests.iter().map(peek).collect();
        let (replies, binding) = combine(&peeks, |index, request| self.step_noting(index, request));
        let denied = !replies[binding].admitted;
        denied.then(|| outcome(self.limits, Action::Check, &replies, binding))
    }

    fn fresh_count(&self) -> usize {
        self.fresh.iter().flatten().count()
    }

    /// Takes free slots for the keys that are not in the store. Returns whether there are enough.
    fn take_slots(&self, slots: &mut Vec<Slot<'a>>) -> bool {
        let needed = self.fresh_count();
        while slots.len() < needed {
            let Some(slot) = self.store.0.slots.0.take() else { return false };
            slots.push(slot);
        }
        true
    }

    /// Drops other keys of the shards that are locked. Returns whether there are enough slots then.
    fn evict(&mut self, slots: &mut Vec<Slot<'a>>, search: &mut Search<'_>) -> bool {
        let needed = self.fresh_count();
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
    fn unlock(self) -> Vec<usize> {
        self.shard_indices
    }

    fn insert_fresh(&mut self, mut slots: Vec<Slot<'_>>, now: i64) {
        for i in 0..self.limits.len() {
            if let Some(entry) = self.fresh[i].take_if(|entry| !entry.is_initial())
                && let Some(slot) = slots.pop()
            {
                let (hash, store) = (self.hashes[i], self.store);
                let shard = self.shard(i);
                shard.sweep(now, &store.0.slots.0);
                shard.insert(hash, entry, &store.0.hasher, slot);
            }
        }
    }
}
