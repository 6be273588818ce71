//! Several limits at once.

use std::{mem, sync::MutexGuard};

use super::{Entry, MemoryStore, Shard};
use crate::{
    algorithm::{Action, Ask, Verdict, together},
    decision::Decision,
    error::StoreError,
    store::{Call, Demand, lock},
};

impl MemoryStore {
    pub(super) fn decide_together(&self, call: &Call<'_>) -> Result<Decision, StoreError> {
        let demands = call.demands;
        let mut held = Held::new(self, demands);
        let now = self.now();
        let asks: Vec<Ask> = demands.iter().map(|demand| call.ask(demand, now)).collect();
        if call.action.commits() && !held.have_room() {
            if call.action == Action::Check {
                // A denied request needs no room.
                let peek = |ask: &Ask| Ask { action: Action::Peek, ..*ask };
                let peeks: Vec<Ask> = asks.iter().map(peek).collect();
                let (verdict, binding) = together(&peeks, |place, ask| held.ask(place, ask));
                if !verdict.admitted {
                    return Ok(Decision::new(demands[binding].policy(), verdict, 0.0));
                }
            }
            held.make_room(now)?;
        }
        let (verdict, binding) = together(&asks, |place, ask| match call.action {
            Action::Check => held.ask(place, ask),
            _ => held.step(place, ask),
        });
        held.insert_fresh(now);
        Ok(Decision::new(demands[binding].policy(), verdict, 0.0))
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
    fn ask(&mut self, demand: usize, ask: &Ask) -> Verdict {
        let verdict = self.step(demand, ask);
        if ask.outcome.is_none() && !verdict.admitted {
            self.entry(demand).note_denial(ask.now + verdict.wait);
        }
        verdict
    }

    fn step(&mut self, demand: usize, ask: &Ask) -> Verdict {
        let settings = self.demands[demand].settings;
        self.entry(demand).step(settings, ask)
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
        // One of its own keys may be as if never seen, be dropped, and need room then, too.
        for _ in 0..=self.demands.len() {
            self.drop_others(now);
            if self.have_room() {
                return Ok(());
            }
        }
        Err(StoreError::full(self.store.0.max_keys))
    }

    fn drop_others(&mut self, now: f64) {
        let known: Vec<usize> =
            (0..self.demands.len()).filter(|&i| self.fresh[i].is_none()).collect();
        let until: Vec<u32> =
            known.iter().map(|&i| mem::replace(self.entry(i).denied_until(), u32::MAX)).collect();
        for i in 0..self.shards.len() {
            let most = self.shards[i].max_keys.saturating_sub(self.coming_to(i));
            self.shards[i].shrink(most, now);
        }
        for (i, until) in known.into_iter().zip(until) {
            match self.find(i) {
                Some(entry) => *entry.denied_until() = until,
                None => {
                    self.fresh[i] =
                        Some(Entry::new(self.demands[i].settings, self.demands[i].key.as_bytes()))
                }
            }
        }
    }

    fn insert_fresh(&mut self, now: f64) {
        for i in 0..self.demands.len() {
            if let Some(entry) = self.fresh[i].take_if(|entry| !entry.is_never_seen()) {
                let (shard, hasher) = (self.shard_of(i), &self.store.0.hasher);
                self.shards[shard].insert(self.hashes[i], entry, now, hasher);
            }
        }
    }
}
