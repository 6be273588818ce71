//! Several limits at once: their shards are locked together, and all of their keys find room, or
//! none.

use std::{ptr, sync::MutexGuard};

use super::{Entry, MAX_SHARDS, MemoryStore, Search, Shard, Slot};
use crate::{
    algorithm::{Action, Admission, Combined, Core, EngineReply, EngineRequest, PerLimit},
    decision::Outcome,
    store::{LimitRequest, StoreFuture, StoreRequest},
    sync::lock,
};

impl MemoryStore {
    /// Decides about several limits together: the request takes units of all of them, or of none.
    #[inline(never)]
    pub(super) fn decide_combined(&self, request: &StoreRequest<'_>) -> StoreFuture<Outcome> {
        let StoreRequest { action, limits, counts, .. } = *request;
        let (mut slots, mut combined) = (Vec::new(), Combined::default());
        let count_changed = loop {
            let (shards, missing) = (PerLimit::new(), Vec::new());
            let mut locked = Locked { store: self, now: 0, shards, missing };
            let mut keys = PerLimit::new();
            locked.lock(limits, &mut keys);
            let has_room = !action.commits() || locked.take_slots(&mut slots);
            let (each, can_be_denied) = (keys.iter_mut(), action.can_be_denied());
            let admission = combined.look(each, can_be_denied, |key, may_decide| {
                key.look(&mut locked, request, has_room && may_decide)
            });
            // A denied request needs no room.
            if admission.admitted && !has_room {
                let mut search = self.search(locked.now, limits);
                if !locked.evict(&mut slots, &mut search) {
                    let searched = locked.unlock();
                    // Then from the beginning, as the keys may change meanwhile. Each round finds a
                    // slot, or fails.
                    match self.evict_elsewhere(&searched, &mut search) {
                        Ok(slot) => slots.push(slot),
                        Err(error) => return StoreFuture::ready(Err(error.into())),
                    }
                    continue;
                }
            }
            combined.commit(keys.iter_mut(), admission, |key, reply| {
                key.follow(&mut locked, request, admission, reply);
            });
            let count_changed = !locked.missing.is_empty();
            if count_changed {
                locked.insert_missing(&keys, slots);
            }
            break count_changed;
        };
        self.report_after(request, count_changed);
        let policies = limits.iter().map(LimitRequest::policy);
        let Combined { replies, binding } = &combined;
        Outcome::of_several(policies, replies, *binding, counts, action, 0.0).into()
    }
}

// The shards of several keys are bits of a number.
const _: () = assert!(MAX_SHARDS <= u64::BITS as usize);

/// The shards of several keys.
struct Locked<'a> {
    store: &'a MemoryStore,
    /// The latest instant of all shards, which each of them has from then on.
    now: i64,
    /// In the order of their indices: a fixed lock order prevents deadlock.
    shards: PerLimit<(usize, MutexGuard<'a, Shard>)>,
    /// The entries of the keys that are not in the store, in the order of the keys.
    missing: Vec<Entry>,
}

/// The key of a limit.
struct LockedKey<'a> {
    limit: &'a LimitRequest<'a>,
    hash: u64,
    /// The index of its shard, at last among the locked shards.
    shard: usize,
    place: EntryPlace,
    decided: Decided,
}

/// Whether a key has been decided about while the keys were looked up.
enum Decided {
    No,
    /// The core before the decision: another limit may undo it.
    From(Core),
    /// The decision about the last key, which no other limit undoes.
    Last,
}

/// Where the entry of a key is.
#[derive(Clone, Copy)]
enum EntryPlace {
    /// The bucket in the table of its shard.
    Bucket(usize),
    /// The index among the entries that are not in the store.
    Missing(usize),
}

impl LockedKey<'_> {
    /// Decides if it `may_decide`, and the decision can be undone or is the last one. Else it only
    /// looks, and a check notes a denial by this limit itself.
    #[inline(always)]
    fn look(
        &mut self,
        locked: &mut Locked<'_>,
        request: &StoreRequest<'_>,
        may_decide: bool,
    ) -> EngineReply {
        let settings = self.limit.settings;
        let is_last = request.limits.last().is_some_and(|last| ptr::eq(last, self.limit));
        let (entry, request) = locked.find(self, request);
        if may_decide {
            if let Some((reply, core)) = entry.try_in_core(settings, &request) {
                self.decided = Decided::From(core);
                return reply;
            }
            if is_last {
                self.decided = Decided::Last;
                return entry.decide(settings, &EngineRequest { ..request });
            }
        }
        let reply = entry.decide(settings, &EngineRequest { action: Action::Peek, ..request });
        entry.note(&request, &reply);
        reply
    }

    /// Decides as all limits do, unless it has done so.
    #[inline(always)]
    fn follow(
        &mut self,
        locked: &mut Locked<'_>,
        request: &StoreRequest<'_>,
        admission: Admission,
        reply: &mut EngineReply,
    ) {
        let is_same = (reply.admitted, reply.wait) == (admission.admitted, admission.wait);
        if is_same && !matches!(self.decided, Decided::No) {
            return;
        }
        let (entry, mut request) = locked.find(self, request);
        request.admission = request.action.can_be_denied().then_some(admission);
        if let Decided::From(core) = self.decided {
            entry.undo(core);
        }
        *reply = entry.decide(self.limit.settings, &request);
    }
}

impl<'a> Locked<'a> {
    /// Locks the shards of the keys, and finds the keys.
    #[inline(always)]
    fn lock(&mut self, limits: &'a [LimitRequest<'a>], keys: &mut PerLimit<LockedKey<'a>>) {
        let Self { store, now, shards, missing } = self;
        let (MemoryStore(inner), mut wanted) = (*store, 0_u64);
        for limit in limits {
            let hash = store.hash(limit.settings, limit.key.as_bytes());
            let (shard, place, decided) =
                (store.shard_index(hash), EntryPlace::Bucket(0), Decided::No);
            wanted |= 1 << shard;
            keys.push(LockedKey { limit, hash, shard, place, decided });
        }
        let mut latest = inner.clock.now();
        while wanted != 0 {
            let index = wanted.trailing_zeros() as usize;
            wanted &= wanted - 1;
            let mut shard = lock(&inner.shards[index].0);
            latest = shard.instant(latest, &inner.clock).max(latest);
            shards.push((index, shard));
        }
        *now = latest;
        let shards = &mut shards[..];
        for key in &mut keys[..] {
            let index = shards.iter().position(|(index, _)| *index == key.shard);
            key.shard = index.expect("each shard is locked");
            let shard = &mut shards[key.shard].1;
            shard.latest = latest;
            let (settings, text) = (key.limit.settings, key.limit.key.as_bytes());
            key.place = match shard.find_bucket(key.hash, settings, text) {
                Some(bucket) => EntryPlace::Bucket(bucket),
                None => {
                    missing.push(Entry::new(settings, text));
                    EntryPlace::Missing(missing.len() - 1)
                }
            };
        }
    }

    /// Returns the entry of a key, and the request to it.
    #[inline(always)]
    fn find(
        &mut self,
        key: &LockedKey<'_>,
        request: &StoreRequest<'_>,
    ) -> (&mut Entry, EngineRequest) {
        let shard = &mut self.shards[key.shard].1;
        let request = shard.request(request, key.limit, self.now);
        let entry = match key.place {
            EntryPlace::Bucket(bucket) => shard.entry(bucket),
            EntryPlace::Missing(index) => &mut self.missing[index],
        };
        (entry, request)
    }

    /// Takes free slots for the keys that are not in the store. Returns whether there are enough.
    fn take_slots(&self, slots: &mut Vec<Slot<'a>>) -> bool {
        while slots.len() < self.missing.len() {
            let Some(slot) = self.store.0.slots.0.take() else { return false };
            slots.push(slot);
        }
        true
    }

    /// Drops other keys of the shards that are locked. Returns whether there are enough slots then.
    fn evict(&mut self, slots: &mut Vec<Slot<'a>>, search: &mut Search<'_>) -> bool {
        for (_, shard) in &mut self.shards {
            while slots.len() < self.missing.len()
                && let Some(slot) = shard.evict(search, &self.store.0.slots.0)
            {
                slots.push(slot);
                search.renew();
            }
        }
        slots.len() >= self.missing.len()
    }

    /// Unlocks the shards, and returns their indices.
    fn unlock(self) -> PerLimit<usize> {
        self.shards.into_iter().map(|(index, _)| index).collect()
    }

    /// Inserts the keys that are not in the store and have a state now.
    #[inline(never)]
    fn insert_missing(&mut self, keys: &[LockedKey<'_>], mut slots: Vec<Slot<'_>>) {
        let MemoryStore(inner) = self.store;
        let missing = keys.iter().filter(|key| matches!(key.place, EntryPlace::Missing(_)));
        for (key, entry) in missing.zip(self.missing.drain(..)) {
            if !entry.is_initial()
                && let Some(slot) = slots.pop()
            {
                let shard = &mut self.shards[key.shard].1;
                shard.sweep(self.now, &inner.slots.0);
                shard.insert(key.hash, entry, &inner.hasher, slot);
            }
        }
    }
}
