//! Denials that are remembered. While a key is certain to be denied again, a check gets its last
//! denial, and no call is made. It knows no Redis, and it never allows a request.
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

mod blocks;
mod entry;
#[cfg(test)]
mod tests;

use std::{
    fmt,
    hash::BuildHasher,
    iter, mem, ptr,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use foldhash::fast::RandomState;
use hashbrown::HashTable;
use tokio::{sync::Notify, time::Instant};

use self::{
    blocks::Blocks,
    entry::{Denial, KeyDenials},
};
use super::{LimitRequest, Settings, StoreRequest};
use crate::{
    algorithm::{Action, Algorithm},
    decision::Decision,
    keys::Key,
    store::Lines,
    sync::lock,
};

/// Each shard has a lock. The shards are as many as the keys of a batch, so that the threads of a
/// flood seldom meet: 8 M denials per second of 256 keys on one thread need no more.
const SHARDS: usize = 64;
/// The entries of a generation, which fill a table of 512 buckets to 7/8, the most that hashbrown
/// takes before it grows. Two generations of 64 shards are 57,344 keys, in up to 27 MB (a test
/// counts them).
const MAX_YOUNG: usize = 448;

/// An instant can be as far away as this.
const LONGEST_TTL: Duration = Duration::from_secs(100 * 365 * 86_400);

/// The denials of a store. Clones share them: one request can have limits of several clones.
#[derive(Clone)]
pub(crate) struct Denials {
    memory: Arc<Memory>,
    ttl: Duration,
}

struct Memory {
    shards: Box<[Mutex<DenialShard>]>,
    hasher: RandomState,
    /// When it was made: the entries count their instants from it.
    start: Instant,
    /// The changes whose calls have not been executed yet.
    changes: Open,
    /// The calls whose answers may begin a change.
    calls: Open,
    /// The requests of the process that wait for units.
    lines: Arc<Lines>,
}

#[derive(Default)]
struct Open {
    count: AtomicUsize,
    /// Notified when there are none.
    none: Notify,
}

/// Entries in two generations. When the young one is full, or older than the TTL, it becomes the
/// old one, and the old one is dropped. So no entry is looked at to make room.
#[derive(Default)]
struct DenialShard {
    young: HashTable<KeyDenials>,
    old: HashTable<KeyDenials>,
    /// Set by the first entry, so that a shard without denials is never rotated.
    young_since: Option<u64>,
    blocks: Blocks,
    /// The number of changes. A denial that was sent before a change is not remembered after it.
    /// One count for all keys of a shard: a change of another key loses a denial, which costs one
    /// call, and a count per key would have to be kept for keys without denials.
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
    check: Option<Check>,
    /// Ended when the request is dropped.
    changes: Vec<Change>,
    /// When a block was sent.
    block_sent: Option<Instant>,
}

/// A check whose denial can be remembered.
struct Check {
    sent: Instant,
    first: CheckedLimit,
    rest: Vec<CheckedLimit>,
}

struct CheckedLimit {
    limiter: &'static str,
    hash: u64,
    key: Key<'static>,
    algorithm: Algorithm,
    /// Whether the limit can be full of requests that wait.
    shapes: bool,
    max_wait: f64,
    /// The number of changes in the shard when it was sent.
    changes: u64,
    /// Which find of a block of the key was known when it was sent.
    block: Option<u64>,
}

/// What is remembered about a limit of a check.
enum Found {
    Denial(Decision),
    /// A denial by another quota.
    OtherQuota,
    None(CheckedLimit),
}

/// A change that may end a denial early. It drops the denial of the key twice: now, and when the
/// change itself is dropped, because its call has been executed. Denials that the store decided in
/// between may or may not be older than the change.
pub(crate) struct Change {
    open: OpenChange,
    hash: u64,
    limiter: &'static str,
    key: Key<'static>,
    ends_block: bool,
}

/// A change that is not executed yet.
struct OpenChange(Arc<Memory>);

/// A call whose answer may begin a change.
pub(crate) struct OpenCall(Arc<Memory>);

impl Denials {
    /// Remembers denials for at most `ttl`; none if it is zero. A change calls the line of its key.
    pub(crate) fn new(ttl: Duration, lines: Arc<Lines>) -> Self {
        let shards = (0..SHARDS).map(|_| Mutex::default()).collect();
        let (hasher, start) = (RandomState::default(), Instant::now());
        let (changes, calls) = Default::default();
        let memory = Memory { shards, hasher, start, changes, calls, lines };
        Self { memory: Arc::new(memory), ttl: ttl.min(LONGEST_TTL) }
    }

    /// Finds a denial that holds for the request. Otherwise the request is to be sent after this.
    pub(crate) fn look_up(&self, request: &StoreRequest<'_>, now: Instant) -> Lookup {
        let Self { memory, ttl } = self;
        let undecided = |changes| Lookup::Undecided(Undecided { changes, ..Undecided::default() });
        match (request.action, request.limits) {
            // No denial is remembered that they could change, and they end no block.
            (Action::Spend | Action::Peek, _) if ttl.is_zero() => return undecided(vec![]),
            (Action::Check, limits) => return self.look_up_check(limits, now),
            _ => {}
        }
        let is_change = |limit: &&LimitRequest<'_>| match request.action {
            Action::Refund | Action::Block { .. } | Action::Unblock => true,
            Action::Spend => memory.has_other_quota(limit),
            Action::Check | Action::Peek | Action::Hold { .. } | Action::Observe => false,
        };
        let changes = request.limits.iter().filter(is_change);
        let ends_block = request.action == Action::Unblock;
        let change =
            |limit: &LimitRequest<'_>| memory.change(limit.settings, limit.key, ends_block);
        let changes = changes.map(change).collect();
        let block_sent = matches!(request.action, Action::Block { .. }).then_some(now);
        Lookup::Undecided(Undecided { check: None, changes, block_sent })
    }

    /// Returns the denial that holds for longest. If a limit has another quota, the store decides,
    /// and no limit is remembered.
    fn look_up_check(&self, limits: &[LimitRequest<'_>], now: Instant) -> Lookup {
        let Self { memory, ttl } = self;
        let (mut denial, mut first, mut rest) = (None, None, vec![]);
        let nanos = memory.nanos(now);
        let mut has_other_quota = false;
        for (index, limit) in limits.iter().enumerate() {
            match memory.find(limit, nanos, !ttl.is_zero()) {
                // Returned at once: a decision that is moved waits for its parts to be written.
                Found::Denial(found) if limits.len() == 1 => return Lookup::Denied(found),
                Found::Denial(found) => denial = longest(denial, found.of_limit(index)),
                Found::OtherQuota => has_other_quota = true,
                Found::None(checked) if first.is_none() => first = Some(checked),
                Found::None(checked) => rest.push(checked),
            }
        }
        if let Some(denial) = denial {
            return Lookup::Denied(denial);
        }
        if has_other_quota {
            let others = limits.iter().filter(|limit| memory.has_other_quota(limit));
            let changes = others.map(|limit| memory.change(limit.settings, limit.key, false));
            let changes = changes.collect();
            return Lookup::Undecided(Undecided { changes, ..Undecided::default() });
        }
        let check = first.map(|first| Check { sent: now, first, rest });
        Lookup::Undecided(Undecided { check, ..Undecided::default() })
    }

    /// Begins a return of units of the key.
    pub(crate) fn begin_return(&self, settings: &Settings, key: &Key<'_>) -> Change {
        self.memory.change(settings, key, false)
    }

    /// Begins a reset of the key.
    pub(crate) fn begin_reset(&self, settings: &Settings, key: &Key<'_>) -> Change {
        self.memory.change(settings, key, true)
    }

    /// Begins a call whose answer may begin a change.
    pub(crate) fn begin_call(&self) -> OpenCall {
        self.memory.calls.begin();
        OpenCall(self.memory.clone())
    }

    /// Waits until all such calls have ended.
    pub(crate) async fn calls_done(&self) {
        self.memory.calls.done().await;
    }

    /// Waits until all changes that have begun are executed or given up.
    pub(crate) async fn changes_done(&self) {
        self.memory.changes.done().await;
    }

    /// Returns the end of the block of the key, or a little earlier, if the block is remembered.
    pub(crate) fn blocked_until(&self, settings: &Settings, key: &Key<'_>) -> Option<Instant> {
        let hash = self.memory.hash(settings.name, key);
        let shard = self.memory.shard(hash);
        Some(shard.blocks.find(hash, settings.name, key)?.until)
    }
}

impl Memory {
    fn hash(&self, limiter: &'static str, key: &Key<'_>) -> u64 {
        self.hasher.hash_one((limiter.as_ptr(), key.as_bytes()))
    }

    fn shard(&self, hash: u64) -> MutexGuard<'_, DenialShard> {
        // The table takes the lowest and the highest bits; the same ones here would put all keys of
        // a shard into few of its buckets.
        lock(&self.shards[(hash >> 32) as usize % SHARDS])
    }

    /// Returns the nanoseconds until an instant.
    fn nanos(&self, instant: Instant) -> u64 {
        instant.saturating_duration_since(self.start).as_nanos() as u64
    }

    /// Finds a denial, if the request `uses` those that are remembered.
    fn find(&self, limit: &LimitRequest<'_>, now: u64, uses: bool) -> Found {
        let LimitRequest { settings, key, .. } = *limit;
        let hash = self.hash(settings.name, key);
        let shard = self.shard(hash);
        let known = shard.find(hash, settings.name, key).filter(|_| uses);
        if known.is_some_and(|entry| !entry.is_of(settings)) {
            return Found::OtherQuota;
        }
        if let Some(denial) = known.and_then(|entry| entry.find(limit, now)) {
            return Found::Denial(denial);
        }
        let block = shard.blocks.find(hash, settings.name, key).map(|block| block.found);
        let changes = shard.changes;
        drop(shard);
        let (limiter, algorithm, shapes) =
            (settings.name, settings.algorithm, settings.params.shapes());
        let key = key.clone().into_owned();
        Found::None(CheckedLimit {
            limiter,
            hash,
            key,
            algorithm,
            shapes,
            max_wait: limit.max_wait as f64,
            changes,
            block,
        })
    }

    fn change(self: &Arc<Self>, settings: &Settings, key: &Key<'_>, ends_block: bool) -> Change {
        let (open, limiter) = (self.open_change(), settings.name);
        let hash = self.hash(limiter, key);
        let change = Change { open, hash, limiter, key: key.clone().into_owned(), ends_block };
        change.apply();
        change
    }

    fn open_change(self: &Arc<Self>) -> OpenChange {
        self.changes.begin();
        OpenChange(self.clone())
    }

    /// Returns whether a denial of the key is remembered that another quota made.
    fn has_other_quota(&self, limit: &LimitRequest<'_>) -> bool {
        let LimitRequest { settings, key, .. } = *limit;
        let hash = self.hash(settings.name, key);
        let shard = self.shard(hash);
        shard.find(hash, settings.name, key).is_some_and(|entry| !entry.is_of(settings))
    }
}

impl DenialShard {
    fn find(&self, hash: u64, limiter: &'static str, key: &Key<'_>) -> Option<&KeyDenials> {
        if self.young.is_empty() && self.old.is_empty() {
            return None; // most services deny few requests
        }
        let is_it = |entry: &KeyDenials| entry.is(limiter, key);
        self.young.find(hash, is_it).or_else(|| self.old.find(hash, is_it))
    }

    fn remove(&mut self, hash: u64, limiter: &'static str, key: &Key<'_>) -> Option<KeyDenials> {
        for entries in [&mut self.young, &mut self.old] {
            if let Ok(entry) = entries.find_entry(hash, |entry| entry.is(limiter, key)) {
                return Some(entry.remove().0);
            }
        }
        None
    }

    fn insert(&mut self, hash: u64, entry: KeyDenials, memory: &Memory, ttl: Duration) {
        let now = entry.received();
        let since = *self.young_since.get_or_insert(now);
        let age = now.saturating_sub(since);
        if self.young.len() == MAX_YOUNG || u128::from(age) >= ttl.as_nanos() {
            self.old = mem::take(&mut self.young);
            self.young_since = Some(now);
        }
        let rehash = |entry: &KeyDenials| memory.hash(entry.limiter(), &entry.key);
        self.young.insert_unique(hash, entry, rehash);
    }
}

impl Undecided {
    /// Ends the changes, and remembers the decision if it is a denial.
    pub(crate) fn resolve(
        &mut self,
        denials: &Denials,
        decision: &Decision,
        now: impl FnOnce() -> Instant,
    ) {
        let Self { check, changes, block_sent } = self;
        if let (Some(sent), [change]) = (*block_sent, &**changes) {
            change.note_block(sent, decision);
        }
        changes.clear(); // before the denial is remembered, which they would drop
        if let Some(check) = check {
            check.learn(denials, decision, now);
        }
    }
}

impl Check {
    /// Remembers a denial, and a block, and forgets the blocks that are over.
    fn learn(&self, denials: &Denials, decision: &Decision, received: impl FnOnce() -> Instant) {
        let all = || iter::once(&self.first).chain(&self.rest);
        let knows_block = all().any(|limit| limit.block.is_some());
        if decision.is_allowed() && !decision.is_blocked() && !knows_block {
            return;
        }
        let (received, named) = (received(), self.named(decision));
        for limit in all().filter(|limit| limit.block.is_some()) {
            let is_named = named.is_some_and(|named| ptr::eq(named, limit));
            limit.forget_block(&denials.memory, decision, is_named, received);
        }
        if let Some(limit) = named {
            limit.remember(denials, decision, [self.sent, received]);
        }
    }

    /// Returns the limit that the decision describes. It names the limiter, but no key, and two
    /// limits of one limiter have different keys.
    fn named(&self, decision: &Decision) -> Option<&CheckedLimit> {
        let limits = iter::once(&self.first).chain(&self.rest);
        let mut limits = limits.filter(|it| ptr::eq(it.limiter, decision.limiter()));
        limits.next().filter(|_| limits.next().is_none())
    }
}

impl CheckedLimit {
    /// Forgets the block that was known when the check was sent, if the decision shows that it is
    /// over: the decision describes this limit, and there is no block; or the request proceeds
    /// before the block would end.
    fn forget_block(
        &self,
        memory: &Memory,
        decision: &Decision,
        is_named: bool,
        received: Instant,
    ) {
        let mut shard = memory.shard(self.hash);
        let Some(block) = shard.blocks.find(self.hash, self.limiter, &self.key) else { return };
        let proceeds = decision.is_allowed() && received + decision.delay() < block.until;
        let is_over = proceeds || is_named && !decision.is_blocked();
        if is_over && self.block == Some(block.found) {
            shard.blocks.remove(self.hash, self.limiter, &self.key);
            shard.remove(self.hash, self.limiter, &self.key);
        }
    }

    /// Remembers a denial, and a block, by this limit.
    fn remember(&self, denials: &Denials, decision: &Decision, [sent, received]: [Instant; 2]) {
        let Self { hash, algorithm, shapes, max_wait, changes, .. } = *self;
        let Denials { memory, ttl } = denials;
        let mut shard = memory.shard(hash);
        // The store may have decided before the change. Denied for longer than the quota says, the
        // client would wait in vain (law 3); not remembered costs one call.
        if shard.changes != changes {
            return;
        }
        if decision.is_blocked() {
            shard.blocks.insert(hash, self.limiter, &self.key, block_end(sent, decision));
        }
        // A hold that ends elsewhere can return units at any time.
        if decision.held() > 0 {
            return;
        }
        let times = [sent, received].map(|instant| memory.nanos(instant));
        let denial = Denial::new(shapes, decision, max_wait, times, *ttl);
        if let Some(denial) =
            denial.filter(|it| it.left(decision.cost(), max_wait, times[1]).is_some())
        {
            let decision = decision.clone().without_counts();
            let mut entry = KeyDenials::new(self.key.clone(), algorithm, decision, denial);
            if let Some(older) = shard.remove(hash, self.limiter, &self.key) {
                entry.remember(older);
            }
            shard.insert(hash, entry, memory, *ttl);
        }
    }
}

/// Returns a lower bound of the end of the block of a key that a decision, sent at that instant,
/// has found or made.
fn block_end(sent: Instant, blocked: &Decision) -> Instant {
    let rest = blocked.block_rest();
    // The clocks of the server and of the process may differ by 0.1 %: far above the drift of
    // quartz, some 0.01 %, and of NTP, which slews by up to 0.05 %.
    sent + (rest - rest / 1_000)
}

/// Returns the denial that holds for longer.
fn longest(known: Option<Decision>, found: Decision) -> Option<Decision> {
    Some(known.filter(|known| known.retry_after() >= found.retry_after()).unwrap_or(found))
}

impl Change {
    fn apply(&self) {
        let mut shard = self.open.0.shard(self.hash);
        shard.changes += 1;
        shard.remove(self.hash, self.limiter, &self.key);
        if self.ends_block {
            shard.blocks.remove(self.hash, self.limiter, &self.key);
        }
    }

    fn note_block(&self, sent: Instant, blocked: &Decision) {
        if blocked.is_blocked() {
            let until = block_end(sent, blocked);
            let mut shard = self.open.0.shard(self.hash);
            shard.blocks.insert(self.hash, self.limiter, &self.key, until);
        }
    }
}

impl Drop for Change {
    fn drop(&mut self) {
        self.apply();
        self.open.0.lines.key_returned(self.limiter, &self.key);
    }
}

impl Open {
    fn begin(&self) {
        self.count.fetch_add(1, SeqCst);
    }

    fn end(&self) {
        if self.count.fetch_sub(1, SeqCst) == 1 {
            self.none.notify_waiters();
        }
    }

    async fn done(&self) {
        let notified = self.none.notified();
        if self.count.load(SeqCst) > 0 {
            notified.await; // there were none, if only for an instant
        }
    }
}

impl Drop for OpenChange {
    fn drop(&mut self) {
        self.0.changes.end();
    }
}

impl Drop for OpenCall {
    fn drop(&mut self) {
        self.0.calls.end();
    }
}

impl fmt::Debug for Denials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Denials").field("ttl", &self.ttl).finish_non_exhaustive()
    }
}
