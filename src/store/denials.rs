//! Denials that are remembered. While a key is certain to be denied again, a check gets its last
//! denial, and no call is made. It knows no Redis, and it never allows a request.
//!
//! A denial with a wait `w` that was sent at `t` holds until `t + w`: other requests only delay the
//! instant at which a request is allowed, in all algorithms. It holds for the same limiter and
//! quota, for at least the same cost, and for at most the same longest wait. Three changes can end
//! it earlier: units are returned, the key is reset, or another quota is applied to it. If this
//! process makes the change, the denial is dropped. A change by another process, or one whose
//! answer was lost, is seen when the TTL of the denial is over.

#[cfg(test)]
mod tests;

use std::{
    fmt,
    hash::BuildHasher,
    mem, ptr,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use foldhash::fast::RandomState;
use hashbrown::HashTable;
use tokio::time::Instant;

use super::{LimitRequest, Settings, StoreRequest};
use crate::{
    algorithm::{Action, Algorithm},
    decision::Decision,
    keys::Key,
    sync::lock,
};

const SHARDS: usize = 64;
/// The entries of a generation, which fill a table of 512 buckets.
const MAX_YOUNG: usize = 448;

/// The denials of a store. Clones share them: one request can have limits of several clones.
#[derive(Clone)]
pub(crate) struct Denials {
    memory: Arc<Memory>,
    ttl: Duration,
}

struct Memory {
    shards: Box<[Mutex<Shard>]>,
    hasher: RandomState,
}

/// Entries in two generations. When the young one is full, or older than the TTL, it becomes the
/// old one, and the old one is dropped. So no entry is looked at to make room.
#[derive(Default)]
struct Shard {
    young: HashTable<Entry>,
    old: HashTable<Entry>,
    young_since: Option<Instant>,
    /// The number of changes. A denial that was sent before a change is not remembered after it.
    changes: u64,
}

struct Entry {
    key: Key<'static>,
    algorithm: Algorithm,
    /// In microseconds.
    max_wait: f64,
    denial: Decision,
    received: Instant,
    until: Instant,
}

/// The result of a lookup.
pub(crate) enum Lookup {
    Denied(Decision),
    /// The store must decide.
    Undecided(Undecided),
}

/// A request that the store decides.
#[derive(Default)]
pub(crate) struct Undecided {
    check: Option<Check>,
    /// Ended when the request is dropped.
    changes: Vec<Change>,
}

/// A check whose denial can be remembered.
struct Check {
    memory: Arc<Memory>,
    ttl: Duration,
    hash: u64,
    key: Key<'static>,
    algorithm: Algorithm,
    max_wait: f64,
    sent: Instant,
    /// The number of changes in the shard when it was sent.
    changes: u64,
}

/// A change that may end a denial early. It drops the denial of the key twice: now, and when the
/// change itself is dropped, because its call has been executed. Denials that the store decided in
/// between may or may not be older than the change.
pub(crate) struct Change {
    memory: Arc<Memory>,
    hash: u64,
    limiter: &'static str,
    key: Key<'static>,
}

impl Denials {
    /// Remembers denials for at most `ttl`; none if it is zero.
    pub(crate) fn new(ttl: Duration) -> Self {
        let shards = (0..SHARDS).map(|_| Mutex::default()).collect();
        Self { memory: Arc::new(Memory { shards, hasher: RandomState::default() }), ttl }
    }

    /// Returns an empty memory with the same TTL.
    pub(crate) fn renewed(&self) -> Self {
        Self::new(self.ttl)
    }

    /// Returns the same memory with another TTL for later denials.
    pub(crate) fn with_ttl(self, ttl: Duration) -> Self {
        Self { ttl, ..self }
    }

    /// Finds a denial that holds for the request. Otherwise the request is to be sent after this.
    pub(crate) fn look_up(
        &self,
        request: &StoreRequest<'_>,
        now: impl FnOnce() -> Instant,
    ) -> Lookup {
        let Self { memory, ttl } = self;
        let undecided = |changes| Lookup::Undecided(Undecided { check: None, changes });
        match (request.action, request.limits) {
            (Action::Check | Action::Spend | Action::Peek, _) if ttl.is_zero() => {
                return undecided(vec![]);
            }
            (Action::Check, [limit]) => return memory.look_up(limit, *ttl, now()),
            _ => {}
        }
        let is_change = |limit: &&LimitRequest<'_>| match request.action {
            Action::Refund => true,
            Action::Check | Action::Spend => memory.has_other_quota(limit),
            Action::Peek => false,
        };
        let changes = request.limits.iter().filter(is_change);
        let changes = changes.map(|limit| memory.change(limit.settings, limit.key)).collect();
        undecided(changes)
    }

    /// Begins a change that may allow the key earlier.
    pub(crate) fn change(&self, settings: &Settings, key: &Key<'_>) -> Change {
        self.memory.change(settings, key)
    }
}

impl Memory {
    fn hash(&self, limiter: &'static str, key: &Key<'_>) -> u64 {
        self.hasher.hash_one((limiter.as_ptr(), key.as_bytes()))
    }

    fn shard(&self, hash: u64) -> MutexGuard<'_, Shard> {
        // The table takes the lowest and the highest bits.
        lock(&self.shards[(hash >> 32) as usize % SHARDS])
    }

    fn look_up(self: &Arc<Self>, limit: &LimitRequest<'_>, ttl: Duration, now: Instant) -> Lookup {
        let LimitRequest { settings, key, cost, max_wait } = *limit;
        let hash = self.hash(settings.name, key);
        let shard = self.shard(hash);
        let found = shard.find(hash, settings.name, key);
        if found.is_some_and(|entry| !entry.is_of(settings)) {
            drop(shard);
            let changes = vec![self.change(settings, key)];
            return Lookup::Undecided(Undecided { check: None, changes });
        }
        if let Some(Entry { denial, received, .. }) =
            found.filter(|entry| entry.holds_for(limit, now))
        {
            return Lookup::Denied(denial.aged(now.saturating_duration_since(*received), cost));
        }
        let changes = shard.changes;
        drop(shard);
        let (memory, key) = (self.clone(), key.clone().into_owned());
        let algorithm = settings.algorithm;
        let check = Check { memory, ttl, hash, key, algorithm, max_wait, sent: now, changes };
        Lookup::Undecided(Undecided { check: Some(check), changes: vec![] })
    }

    fn change(self: &Arc<Self>, settings: &Settings, key: &Key<'_>) -> Change {
        let (memory, limiter) = (self.clone(), settings.name);
        let hash = self.hash(limiter, key);
        let change = Change { memory, hash, limiter, key: key.clone().into_owned() };
        change.apply();
        change
    }

    /// Returns whether a denial of the key is remembered that another quota made.
    fn has_other_quota(&self, limit: &LimitRequest<'_>) -> bool {
        let LimitRequest { settings, key, .. } = *limit;
        let hash = self.hash(settings.name, key);
        let shard = self.shard(hash);
        shard.find(hash, settings.name, key).is_some_and(|entry| !entry.is_of(settings))
    }
}

impl Shard {
    fn find(&self, hash: u64, limiter: &'static str, key: &Key<'_>) -> Option<&Entry> {
        let is_it = |entry: &Entry| entry.is(limiter, key);
        self.young.find(hash, is_it).or_else(|| self.old.find(hash, is_it))
    }

    fn remove(&mut self, hash: u64, limiter: &'static str, key: &Key<'_>) {
        for entries in [&mut self.young, &mut self.old] {
            if let Ok(entry) = entries.find_entry(hash, |entry| entry.is(limiter, key)) {
                entry.remove();
            }
        }
    }

    fn insert(&mut self, hash: u64, entry: Entry, memory: &Memory, ttl: Duration) {
        self.remove(hash, entry.denial.limiter(), &entry.key);
        let now = entry.received;
        let since = *self.young_since.get_or_insert(now);
        let age = now.saturating_duration_since(since);
        if self.young.len() == MAX_YOUNG || age >= ttl {
            self.old = mem::take(&mut self.young);
            self.young_since = Some(now);
        }
        let rehash = |entry: &Entry| memory.hash(entry.denial.limiter(), &entry.key);
        self.young.insert_unique(hash, entry, rehash);
    }
}

impl Entry {
    /// Addresses suffice to compare limiters, because there is one copy of each name.
    fn is(&self, limiter: &'static str, key: &Key<'_>) -> bool {
        self.key.as_bytes() == key.as_bytes() && ptr::eq(self.denial.limiter(), limiter)
    }

    fn is_of(&self, settings: &Settings) -> bool {
        (self.algorithm, self.denial.quota()) == (settings.algorithm, settings.quota)
    }

    fn holds_for(&self, limit: &LimitRequest<'_>, now: Instant) -> bool {
        now < self.until && limit.cost >= self.denial.cost() && limit.max_wait <= self.max_wait
    }
}

impl Undecided {
    /// Remembers the decision if it is a denial, and returns it.
    pub(crate) fn decided(self, decision: Decision, now: impl FnOnce() -> Instant) -> Decision {
        let Self { check, changes } = self;
        drop(changes);
        if let (Some(check), Some(wait)) = (check, decision.retry_after()) {
            check.denied(wait, &decision, now());
        }
        decision
    }
}

impl Check {
    fn denied(self, wait: Duration, denial: &Decision, received: Instant) {
        let Self { memory, ttl, hash, key, algorithm, max_wait, sent, changes } = self;
        // The clock of the store may be faster than that of the process.
        let until = sent + (wait - wait / 1_000).min(ttl);
        let denial = denial.clone();
        let mut shard = memory.shard(hash);
        if until > received && shard.changes == changes {
            let entry = Entry { key, algorithm, max_wait, denial, received, until };
            shard.insert(hash, entry, &memory, ttl);
        }
    }
}

impl Change {
    fn apply(&self) {
        let mut shard = self.memory.shard(self.hash);
        shard.changes += 1;
        shard.remove(self.hash, self.limiter, &self.key);
    }
}

impl Drop for Change {
    fn drop(&mut self) {
        self.apply();
    }
}

impl fmt::Debug for Denials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Denials").field("ttl", &self.ttl).finish_non_exhaustive()
    }
}
