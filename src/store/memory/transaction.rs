//! Several limits at once: their shards are locked together, and all of their keys find room, or
//! none.

use std::{mem, sync::MutexGuard};

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
        let (mut slots, mut combined) = (PerLimit::new(), Combined::default());
        let is_new = loop {
            let mut transaction = Transaction::new(self);
            transaction.lock(request);
            let has_room = !action.commits() || transaction.take_slots(&mut slots);
            let (keys, shards) = (transaction.keys.iter_mut(), &mut transaction.shards[..]);
            let admission = combined.look(keys, action.can_be_denied(), |key, may_decide| {
                key.look(shards, has_room && may_decide)
            });
            // A denied request needs no room.
            if admission.admitted && !has_room {
                let mut search = self.search(transaction.now, limits);
                if !transaction.evict(&mut slots, &mut search) {
                    let searched = transaction.unlock();
                    // Then from the beginning, as the keys may change meanwhile. Each round finds a
                    // slot, or fails.
                    match self.evict_elsewhere(&searched, &mut search) {
                        Ok(slot) => slots.push(slot),
                        Err(error) => return StoreFuture::ready(Err(error.into())),
                    }
                    continue;
                }
            }
            let (keys, shards) = (transaction.keys.iter_mut(), &mut transaction.shards[..]);
            combined.commit(keys, admission, |key, reply| key.follow(shards, admission, reply));
            let is_new = transaction.missing > 0;
            if is_new {
                transaction.insert_missing(slots);
            }
            break is_new;
        };
        self.report_after(request, is_new);
        let policies = limits.iter().map(LimitRequest::policy);
        let Combined { replies, binding } = &combined;
        Outcome::of_several(policies, replies, *binding, counts, action, 0.0).into()
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
    /// The number of keys that are not in the store.
    missing: usize,
    /// In the order of their indices: a fixed lock order prevents deadlock.
    shards: PerLimit<TakenShard<'a>>,
}

/// A locked shard, and its index.
type TakenShard<'a> = (usize, MutexGuard<'a, Shard>);

/// The key of a limit.
struct LockedKey<'a> {
    limit: &'a LimitRequest<'a>,
    request: EngineRequest,
    is_last: bool,
    hash: u64,
    /// The index of its shard, at last among the locked shards.
    shard: usize,
    place: KeyPlace,
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
enum KeyPlace {
    /// The bucket in the table of its shard.
    Bucket(usize),
    /// The entry is not in the store.
    Missing(Entry),
}

impl LockedKey<'_> {
    /// Decides if it `may_decide`, and the decision can be undone or is the last one. Else it only
    /// looks, and a check notes a denial by this limit itself.
    #[inline(always)]
    fn look(&mut self, shards: &mut [TakenShard<'_>], may_decide: bool) -> EngineReply {
        let Self { limit: LimitRequest { settings, .. }, request, is_last, .. } = *self;
        let (entry, decided) = self.entry(shards);
        if may_decide {
            if let Some((reply, core)) = entry.try_in_core(settings, &request) {
                *decided = Decided::From(core);
                return reply;
            }
            if is_last {
                *decided = Decided::Last;
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
        shards: &mut [TakenShard<'_>],
        admission: Admission,
        reply: &mut EngineReply,
    ) {
        let is_same = (reply.admitted, reply.wait) == (admission.admitted, admission.wait);
        if is_same && !matches!(self.decided, Decided::No) {
            return;
        }
        let (settings, mut request) = (self.limit.settings, self.request);
        request.admission = request.action.can_be_denied().then_some(admission);
        let (entry, decided) = self.entry(shards);
        if let Decided::From(core) = *decided {
            entry.undo(core);
        }
        *reply = entry.decide(settings, &request);
    }

    #[inline(always)]
    fn entry<'k>(
        &'k mut self,
        shards: &'k mut [TakenShard<'_>],
    ) -> (&'k mut Entry, &'k mut Decided) {
        let entry = match &mut self.place {
            KeyPlace::Bucket(bucket) => shards[self.shard].1.entry(*bucket),
            KeyPlace::Missing(entry) => entry,
        };
        (entry, &mut self.decided)
    }
}

impl<'a> Transaction<'a> {
    #[inline(always)]
    fn new(store: &'a MemoryStore) -> Self {
        Self { store, now: 0, keys: PerLimit::new(), missing: 0, shards: PerLimit::new() }
    }

    /// Locks the shards of the keys, and finds the keys.
    #[inline(always)]
    fn lock(&mut self, request: &StoreRequest<'a>) {
        let Self { store, now, keys, missing, shards } = self;
        let (MemoryStore(inner), mut wanted) = (*store, 0_u64);
        for (index, limit) in request.limits.iter().enumerate() {
            let (is_last, decided) = (index + 1 == request.limits.len(), Decided::No);
            let hash = store.hash(limit.settings, limit.key.as_bytes());
            let (shard, place) = (store.shard_index(hash), KeyPlace::Bucket(0));
            wanted |= 1 << shard;
            let request = request.to_engine(limit, 0, request.action);
            keys.push(LockedKey { limit, request, is_last, hash, shard, place, decided });
        }
        let mut latest = inner.clock.now();
        while wanted != 0 {
            let index = wanted.trailing_zeros() as usize;
            wanted &= wanted - 1;
            let mut shard = lock(&inner.shards[index].0);
            latest = shard.instant(latest, &inner.clock).max(latest);
            shards.push((index, shard));
        }
        let shards = &mut shards[..];
        for key in &mut keys[..] {
            let index = shards.iter().position(|(index, _)| *index == key.shard);
            key.shard = index.expect("each shard is locked");
            let shard = &mut shards[key.shard].1;
            shard.latest = latest;
            key.request.now = latest;
            if key.limit.hold.is_some() {
                key.request.action = shard.hold(latest);
            }
            let (settings, text) = (key.limit.settings, key.limit.key.as_bytes());
            match shard.find_bucket(key.hash, settings, text) {
                Some(bucket) => key.place = KeyPlace::Bucket(bucket),
                None => {
                    *missing += 1;
                    key.place = KeyPlace::Missing(Entry::new(settings, text));
                }
            }
        }
        *now = latest;
    }

    /// Takes free slots for the keys that are not in the store. Returns whether there are enough.
    fn take_slots(&self, slots: &mut PerLimit<Slot<'a>>) -> bool {
        while slots.len() < self.missing {
            let Some(slot) = self.store.0.slots.0.take() else { return false };
            slots.push(slot);
        }
        true
    }

    /// Drops other keys of the shards that are locked. Returns whether there are enough slots then.
    fn evict(&mut self, slots: &mut PerLimit<Slot<'a>>, search: &mut Search<'_>) -> bool {
        for (_, shard) in &mut self.shards {
            while slots.len() < self.missing
                && let Some(slot) = shard.evict(search, &self.store.0.slots.0)
            {
                slots.push(slot);
                search.renew();
            }
        }
        slots.len() >= self.missing
    }

    /// Unlocks the shards, and returns their indices.
    fn unlock(self) -> PerLimit<usize> {
        self.shards.into_iter().map(|(index, _)| index).collect()
    }

    /// Inserts the keys that are not in the store and have a state now.
    #[inline(never)]
    fn insert_missing(&mut self, mut slots: PerLimit<Slot<'_>>) {
        let MemoryStore(inner) = self.store;
        for LockedKey { hash, shard, place, .. } in &mut self.keys {
            if let KeyPlace::Missing(entry) = mem::replace(place, KeyPlace::Bucket(0))
                && !entry.is_initial()
                && let Some(slot) = slots.pop()
            {
                let shard = &mut self.shards[*shard].1;
                shard.sweep(self.now, &inner.slots.0);
                shard.insert(*hash, entry, &inner.hasher, slot);
            }
        }
    }
}
