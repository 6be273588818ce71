//! Denials that are remembered. While a key is certain to be denied again, a check gets its last
//! denial, and no call is made. It knows no Redis, and it never allows a request.
//!
//! A key has one denial, which denies every cost at or above its own. Its times are exact for that
//! cost, and too short for larger ones. Smaller costs ask the store.
//!
//! Other requests only delay the instant at which a request is allowed, in all algorithms. So a
//! denial holds until that instant, for the same limiter and quota and for at least the same cost,
//! whatever other limits the requests have: of several limits, the one that denies for longest
//! denies for that time by itself. `denials/entry.rs` says for which waits.
//!
//! A denial of a key with holds is not remembered: it may last only until one of them ends.
//!
//! Changes can end it earlier: units are returned, the key is reset or unblocked, or another quota
//! is applied to it. If this process makes the change, the denials are dropped. A change by another
//! process, or one whose answer was lost, is seen when the TTL of the denial is over.
//!
//! The blocks of keys are remembered, too, for the requests that wait. A block has no TTL. It is
//! forgotten when this process ends it, or when a newer decision of the store does not find it.

mod entry;
mod table;
#[cfg(test)]
mod tests;

use std::{
    hash::BuildHasher,
    ptr,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use foldhash::fast::RandomState;
use smallvec::SmallVec;
use tokio::time::Instant;

use self::{
    entry::{Denial, Question},
    table::{LimiterKey, Table},
};
use super::{
    Lines, Settings, StoreRequest,
    tally::{Open, Tally},
};
use crate::{algorithm::Action, decision::Decision, keys::Key, sync::lock};

/// Each shard has a lock. The shards are as many as the keys of a batch, so that the threads of a
/// flood seldom meet: 8 M denials per second of 256 keys on one thread need no more.
const SHARDS: usize = 64;
/// The entries of a shard fill a table of 1,024 buckets to 7/8, the most that hashbrown takes: up
/// to 57,344 keys in all, in up to 23 MB (a test counts them).
const MAX_DENIALS: usize = 896;
/// An instant can be as far away as this.
const LONGEST_TTL: Duration = Duration::from_secs(100 * 365 * 86_400);

/// The denials of a store. Clones share them: one request can have limits of several clones.
#[derive(Clone)]
pub(crate) struct Denials {
    memory: Arc<Memory>,
    ttl: Duration,
    /// The changes that are not executed yet.
    pub(crate) changes: Tally,
}

struct Memory {
    shards: Box<[Mutex<DenialShard>]>,
    hasher: RandomState,
    /// When it was made: the entries count their instants from it.
    start: Instant,
    /// The requests of the process that wait for units.
    lines: Arc<Lines>,
}

/// What is known about a part of the keys.
#[derive(Default)]
struct DenialShard {
    denials: Table<Denial, MAX_DENIALS>,
    /// The ends of the blocks that this process began, or has found in decisions of the store, in
    /// nanoseconds since the memory was made. If a block is not remembered, a request that waits
    /// finds it by a call.
    blocks: Table<u64, 256>,
    /// The number of changes, and of finds of blocks. From a decision that was sent before one,
    /// nothing is learned after it. One count for all keys of a shard: a change of another key
    /// loses a denial, which costs one call, and a count per key would have to be kept for keys
    /// without denials.
    changes: u64,
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
    /// In nanoseconds since the memory was made.
    sent: u64,
    blocks: bool,
    /// Whether a block of one of the keys was known when it was sent.
    knows_block: bool,
    /// The limits of a check whose denial can be remembered.
    checked: SmallVec<[CheckedLimit; 1]>,
    /// Ended when the request is dropped.
    changes: Vec<Change>,
}

struct CheckedLimit {
    name: LimiterKey<'static>,
    question: Question,
    /// The number of changes in the shard when it was sent.
    changes: u64,
}

/// A change that may end a denial early. It drops the denial of the key twice: now, and when the
/// change itself is dropped, because its call has been executed. Denials that the store decided in
/// between may or may not be older than the change.
pub(crate) struct Change {
    memory: Arc<Memory>,
    name: LimiterKey<'static>,
    ends_block: bool,
    _open: Open,
}

impl Denials {
    /// Remembers denials for at most `ttl`; none if it is zero. A change calls the line of its key.
    pub(crate) fn new(ttl: Duration, lines: Arc<Lines>) -> Self {
        let shards = (0..SHARDS).map(|_| Mutex::default()).collect();
        let (hasher, start) = (RandomState::default(), Instant::now());
        let memory = Memory { shards, hasher, start, lines };
        Self { memory: Arc::new(memory), ttl: ttl.min(LONGEST_TTL), changes: Tally::default() }
    }

    /// Finds the denial that holds for longest, if one holds for the request. Otherwise the request
    /// is to be sent after this. If it applies another quota than a denial has, that is a change,
    /// and its own denial is not remembered.
    pub(crate) fn look_up(&self, request: &StoreRequest<'_>, now: Instant) -> Lookup {
        let StoreRequest { action, limits, .. } = *request;
        let (nanos, mut denial) = (self.memory.nanos(now), None);
        let blocks = matches!(action, Action::Block { .. });
        let mut undecided = Undecided { sent: nanos, blocks, ..Undecided::default() };
        for (index, limit) in limits.iter().enumerate() {
            let name = self.memory.name(limit.settings, limit.key);
            let shard = self.memory.shard(&name);
            let known = shard.denials.find(&name);
            let is_other = known.is_some_and(|known| !known.is_of(limit.settings));
            match action {
                Action::Check if !is_other => {
                    match known.and_then(|known| known.find(limit, nanos)) {
                        // At once: a decision that is moved waits for its parts to be written.
                        Some(found) if limits.len() == 1 => return Lookup::Denied(found),
                        Some(found) => denial = longest(denial, found.of_limit(index)),
                        None => {
                            undecided.knows_block |= shard.blocks.find(&name).is_some();
                            undecided.checked.push(CheckedLimit {
                                name: name.into_owned(),
                                question: Question::new(limit),
                                changes: shard.changes,
                            });
                        }
                    }
                }
                Action::Spend if !is_other => {}
                Action::Peek | Action::Hold { .. } | Action::Observe => {}
                _ => {
                    drop(shard);
                    undecided.changes.push(self.change(name, action == Action::Unblock));
                }
            }
        }
        if let Some(denial) = denial {
            return Lookup::Denied(denial);
        }
        if !undecided.changes.is_empty() {
            undecided.checked.clear();
        }
        Lookup::Undecided(undecided)
    }

    /// Begins a return of units of the key.
    pub(crate) fn begin_return(&self, settings: &Settings, key: &Key<'_>) -> Change {
        self.change(self.memory.name(settings, key), false)
    }

    /// Begins a reset of the key.
    pub(crate) fn begin_reset(&self, settings: &Settings, key: &Key<'_>) -> Change {
        self.change(self.memory.name(settings, key), true)
    }

    fn change(&self, name: LimiterKey<'_>, ends_block: bool) -> Change {
        let (memory, _open) = (self.memory.clone(), self.changes.begin());
        let change = Change { memory, name: name.into_owned(), ends_block, _open };
        change.apply();
        change
    }

    /// Returns the end of the block of the key, or a little earlier, if the block is remembered.
    pub(crate) fn blocked_until(&self, settings: &Settings, key: &Key<'_>) -> Option<Instant> {
        let name = self.memory.name(settings, key);
        let until = *self.memory.shard(&name).blocks.find(&name)?;
        Some(self.memory.start + Duration::from_nanos(until))
    }
}

impl Memory {
    fn name<'a>(&self, settings: &Settings, key: &'a Key<'_>) -> LimiterKey<'a> {
        let (limiter, key) = (settings.name, Key::from(key));
        let hash = self.hasher.hash_one((limiter.as_ptr(), key.as_bytes()));
        LimiterKey { hash, limiter, key }
    }

    fn shard(&self, name: &LimiterKey<'_>) -> MutexGuard<'_, DenialShard> {
        // The table takes the lowest and the highest bits; the same ones here would put all keys of
        // a shard into few of its buckets.
        lock(&self.shards[(name.hash >> 32) as usize % SHARDS])
    }

    /// Returns the nanoseconds until an instant.
    fn nanos(&self, instant: Instant) -> u64 {
        instant.saturating_duration_since(self.start).as_nanos() as u64
    }
}

impl DenialShard {
    /// Remembers a block that a decision, sent at that instant, has found or made.
    fn find_block(&mut self, name: &LimiterKey<'static>, sent: u64, decision: &Decision) {
        self.changes += 1; // a decision that was sent before must not forget the block
        let rest = decision.block_rest();
        // The clocks of the server and of the process may differ by 0.1 %: far above the drift of
        // quartz, some 0.01 %, and of NTP, which slews by up to 0.05 %.
        let until = sent + (rest - rest / 1_000).as_nanos() as u64;
        self.blocks.insert(name, until, until, sent);
    }
}

impl Undecided {
    /// Ends the changes, and remembers the decision if it is a denial, or finds a block.
    pub(crate) fn resolve(
        &mut self,
        denials: &Denials,
        decision: &Decision,
        received: impl FnOnce() -> Instant,
    ) {
        let Self { sent, blocks, knows_block, checked, changes } = self;
        if let (true, true, [change]) = (*blocks, decision.is_blocked(), &**changes) {
            change.memory.shard(&change.name).find_block(&change.name, *sent, decision);
        }
        changes.clear(); // before the denial is remembered, which they would drop
        let is_free = decision.is_allowed() && !decision.is_blocked();
        if checked.is_empty() || is_free && !*knows_block {
            return;
        }
        // The decision names a limiter, but no key, and two limits of one limiter have different
        // keys.
        let is_of = |limit: &&CheckedLimit| ptr::eq(limit.name.limiter, decision.limiter());
        let is_clear = checked.iter().filter(is_of).count() == 1;
        let times = [*sent, denials.memory.nanos(received())];
        for limit in &*checked {
            let is_named = is_clear && is_of(&limit);
            if is_named || *knows_block {
                limit.learn(denials, decision, is_named, times);
            }
        }
    }
}

impl CheckedLimit {
    /// Remembers a denial, and a block, if the decision is about this limit. Forgets a block that
    /// the decision shows to be over: the decision is about this limit, and there is no block; or
    /// the request proceeds before the block would end.
    fn learn(&self, denials: &Denials, decision: &Decision, is_named: bool, times: [u64; 2]) {
        let (Denials { memory, ttl, .. }, name) = (denials, &self.name);
        let mut shard = memory.shard(name);
        // The store may have decided before the change. Denied for longer than the quota says, the
        // client would wait in vain (law 3); not remembered costs one call.
        if shard.changes != self.changes {
            return;
        }
        if let Some(&until) = shard.blocks.find(name) {
            let begins = times[1] + decision.delay().as_nanos() as u64;
            let proceeds = decision.is_allowed() && begins < until;
            if proceeds || is_named && !decision.is_blocked() {
                shard.blocks.remove(name);
                shard.denials.remove(name);
            }
        }
        if is_named && decision.is_blocked() {
            shard.find_block(name, times[0], decision);
        }
        // A hold that ends elsewhere can return units at any time.
        if !is_named || decision.held() > 0 {
            return;
        }
        let Some(denial) = Denial::new(&self.question, decision, times, *ttl) else { return };
        if shard.denials.find(name).is_none_or(|known| denial.replaces(known, &self.question)) {
            let ends = denial.ends;
            shard.denials.insert(name, denial, ends, times[1]);
        }
    }
}

/// Returns the denial that holds for longer.
fn longest(known: Option<Decision>, found: Decision) -> Option<Decision> {
    Some(known.filter(|known| known.retry_after() >= found.retry_after()).unwrap_or(found))
}

impl Change {
    fn apply(&self) {
        let mut shard = self.memory.shard(&self.name);
        shard.changes += 1;
        shard.denials.remove(&self.name);
        if self.ends_block {
            shard.blocks.remove(&self.name);
        }
    }
}

impl Drop for Change {
    fn drop(&mut self) {
        self.apply();
        self.memory.lines.key_returned(self.name.limiter, &self.name.key);
    }
}
