//! Several limits at once: their shards are locked combine, and all of their keys find room, or
//! none.

use std::sync::MutexGuard;

use super::{Entry, MemoryStore, Search, Shard, Slot};
use crate::{
    algorithm::{Action, EngineReply, EngineRequest, combine},
    decision::Decision,
    store::{Call, Demand, StoreError, lock},
};

impl MemoryStore {
    pub(super) fn decide_combined(&self, call: &Call<'_>) -> Result<Decision, StoreError> {
        let demands = call.demands;
        let mut slots = vec![];
        loop {
            let mut held = Held::new(self, demands);
            let now = self.now();
            let requests: Vec<EngineRequest> =
                demands.iter().map(|demand| call.ask(demand, now)).collect();
            if call.action.commits() && !held.take_slots(&mut slots) {
                // A denied request needs no room.
                if call.action == Action::Check
                    && let Some(denial) = held.denial(&requests)
                {
                    return Ok(denial);
                }
                let mut search = self.search(now, demands);
                if !held.evict(&mut slots, &mut search) {
                    let searched = held.unlock();
                    // Then from the beginning, as the keys may change meanwhile. Each round finds a
                    // slot, or fails.
                    slots.push(self.evict_elsewhere(&searched, &mut search)?);
                    continue;
                }
            }
            let (reply, binding) = combine(&requests, |place, request| match call.action {
                Action::Check => held.ask(place, request),
                _ => held.step(place, request),
            });
            held.insert_fresh(slots, now);
            return Ok(Decision::new(demands[binding].policy(), reply, call.action, 0.0));
        }
    }
}

/// The keys of several limits, with their shards locked.
struct Held<'a> {
    store: &'a MemoryStore,
    demands: &'a [Demand<'a>],
    hashes: Vec<u64>,
    /// Sorted: a fixed lock order prevents deadlock.
    places: Vec<usize>,
    shards: Vec<MutexGuard<'a, Shard>>,
    /// Of the keys that are not in the store.
    fresh: Vec<Option<Entry>>,
}

impl<'a> Held<'a> {
    fn new(store: &'a MemoryStore, demands: &'a [Demand<'a>]) -> Self {
        let hashes: Vec<u64> =
            demands.iter().map(|it| store.hash(it.settings, it.key.as_bytes())).collect();
        let mut places: Vec<usize> = hashes.iter().map(|&hash| store.place(hash)).collect();
        places.sort_unstable();
        places.dedup();
        let shards = places.iter().map(|&place| lock(&store.0.shards[place].0)).collect();
        let mut held = Self { store, demands, hashes, places, shards, fresh: vec![] };
        let entry = |demand: &Demand<'_>| Entry::new(demand.settings, demand.key.as_bytes());
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
        let Demand { settings, key, .. } = self.demands[demand];
        self.shards[shard].find(self.hashes[demand], settings, key.as_bytes())
    }

    fn entry(&mut self, demand: usize) -> &mut Entry {
        if self.fresh[demand].is_some() {
            return self.fresh[demand].as_mut().expect("it is fresh");
        }
        self.find(demand).expect("it is in the store")
    }

    /// Steps for a check, and remembers a denial by this limit itself.
    fn ask(&mut self, demand: usize, request: &EngineRequest) -> EngineReply {
        let reply = self.step(demand, request);
        if request.admission.is_none() && !reply.admitted {
            self.entry(demand).note_denial(request.now + reply.wait);
        }
        reply
    }

    fn step(&mut self, demand: usize, request: &EngineRequest) -> EngineReply {
        let settings = self.demands[demand].settings;
        self.entry(demand).step(settings, request)
    }

    /// Decides without committing. Returns the decision, if it is a denial.
    fn denial(&mut self, requests: &[EngineRequest]) -> Option<Decision> {
        let peek = |request: &EngineRequest| EngineRequest { action: Action::Peek, ..*request };
        let peeks: Vec<EngineRequest> = requests.iter().map(peek).collect();
        let (reply, binding) = combine(&peeks, |place, request| self.ask(place, request));
        let denied = !reply.admitted;
        denied.then(|| Decision::new(self.demands[binding].policy(), reply, Action::Check, 0.0))
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

    /// Unlocks the shards, and returns their places.
    fn unlock(self) -> Vec<usize> {
        self.places
    }

    fn insert_fresh(&mut self, mut slots: Vec<Slot<'_>>, now: f64) {
        for i in 0..self.demands.len() {
            if let Some(entry) = self.fresh[i].take_if(|entry| !entry.is_initial())
                && let Some(slot) = slots.pop()
            {
                let shard = self.shard_of(i);
                let shard = &mut self.shards[shard];
                shard.sweep(now, &self.store.0.slots.0);
                shard.insert(self.hashes[i], entry, &self.store.0.hasher, slot);
            }
        }
    }
}
