//! The remembered denials of one key, and the requests that they deny. Does not know the memory
//! that the entry is in, nor the blocks of keys.
//!
//! The engine denies a request that may wait `w` until `max(E - w, R)`: it conforms at `E`, and
//! there is room for it to wait from `R` on. Only the room of a shaper can be full. So a denial of
//! one wait proves until when requests of other waits are denied, if their cost is at least the
//! same. A block denies every cost.

use std::{iter, mem, ptr, time::Duration};

use crate::{
    algorithm::Algorithm,
    decision::Decision,
    keys::Key,
    store::{LimitRequest, Settings},
};

/// The denials of a key that are remembered beside each other: a service has few costs. A flood
/// with more of them costs one call per TTL for each further cost.
const MAX_DENIALS: usize = 4;

/// A key with its denials. Its instants are in nanoseconds since the memory was made: a lookup then
/// reads them all without the arithmetic of `Duration`.
pub(super) struct KeyDenials {
    pub(super) key: Key<'static>,
    algorithm: Algorithm,
    /// The last denial, which reports the count of the key, and when it was received.
    last: Decision,
    received: u64,
    /// Ordered by cost. None of them denies all that another one denies.
    denials: DenialList,
}

/// At least one denial. Most keys have a single one, so it needs no allocation.
struct DenialList {
    first: Denial,
    rest: Box<[Denial]>,
}

/// A proof that requests of a cost are denied. The times that are not instants are in microseconds
/// after the decision.
#[derive(Clone, Copy, Debug)]
pub(super) struct Denial {
    /// The least cost that it denies.
    cost: u64,
    /// When a request of this cost conforms, at the earliest.
    conforms: f64,
    /// When there is room for it to wait; 0 if that is unknown, or if there is always room.
    room: f64,
    sent: u64,
    received: u64,
    /// When it is forgotten.
    ends: u64,
}

impl Denial {
    /// Reads the denial of a check that was sent and received at these instants. `shapes`: by a
    /// limit that can be full.
    pub(super) fn new(
        shapes: bool,
        denied: &Decision,
        max_wait: f64,
        [sent, received]: [u64; 2],
        ttl: Duration,
    ) -> Option<Self> {
        let micros = |time: Duration| time.as_micros() as f64;
        let wait = micros(denied.retry_after()?);
        // A block that ends within the wait is not what has denied the request.
        let by_block = micros(denied.block_rest()) > max_wait;
        let (conforms, room) = if shapes && !by_block {
            // The request leaves when all of those before it have left: when nothing is left.
            let conforms = micros(denied.reset_after());
            (conforms, if wait > conforms - max_wait { wait } else { 0.0 })
        } else if by_block {
            (wait + max_wait, 0.0)
        } else {
            // A count of another quota can be over before the request conforms by this one.
            ((wait + max_wait).min(micros(denied.reset_after())).max(wait), 0.0)
        };
        let cost = if by_block { 0 } else { denied.cost() };
        let ends = sent + ttl.as_nanos() as u64;
        Some(Self { cost, conforms, room, sent, received, ends })
    }

    /// Returns the time from the decision until a request that may wait as long can be allowed.
    fn rest(&self, max_wait: f64) -> f64 {
        (self.conforms - max_wait).max(self.room).max(0.0)
    }

    /// Returns the microseconds until the instant that is `rest` after the decision, or 0.1 %
    /// earlier: the clock of the store may be faster than the clock of the process. It counts from
    /// the instant at which the check was sent, because the store decided at that instant or later.
    fn left_of(&self, rest: f64, now: u64) -> f64 {
        0.999 * rest - now.saturating_sub(self.sent) as f64 / 1e3
    }

    /// Returns the microseconds for which it still denies a request, if it does.
    pub(super) fn left(&self, cost: u64, max_wait: f64, now: u64) -> Option<f64> {
        let left = self.left_of(self.rest(max_wait), now);
        (cost >= self.cost && now < self.ends && left > 0.0).then_some(left)
    }

    /// Returns whether it denies whatever the other one denies.
    fn covers(&self, other: &Self, now: u64) -> bool {
        self.cost <= other.cost
            && self.ends >= other.ends
            && self.left_of(self.conforms, now) >= other.left_of(other.conforms, now)
            && (other.room == 0.0 || self.left_of(self.room, now) >= other.left_of(other.room, now))
    }

    /// Returns whether it is a newer answer to the question that the other one has answered.
    fn replaces(&self, other: &Self) -> bool {
        let is_newer = self.cost == other.cost && self.sent >= other.sent;
        is_newer && (other.room == 0.0 || self.room > 0.0)
    }
}

impl DenialList {
    fn iter(&self) -> impl Iterator<Item = &Denial> {
        iter::once(&self.first).chain(&self.rest)
    }

    /// Adds a denial. If there are too many, it removes the denial that ends first, but keeps the
    /// denial of the least cost, which denies most requests.
    fn add(&mut self, denial: Denial, now: u64) {
        if self.iter().any(|known| known.covers(&denial, now)) {
            return;
        }
        let mut all: Vec<_> = self.iter().copied().collect();
        all.retain(|known| {
            known.ends > now && !denial.covers(known, now) && !denial.replaces(known)
        });
        all.push(denial);
        all.sort_unstable_by_key(|denial| denial.cost);
        if all.len() > MAX_DENIALS {
            let oldest = (1..all.len()).min_by_key(|&index| all[index].ends);
            all.remove(oldest.expect("there are several"));
        }
        self.first = all.remove(0);
        self.rest = all.into();
    }
}

impl KeyDenials {
    pub(super) fn new(
        key: Key<'static>,
        algorithm: Algorithm,
        last: Decision,
        first: Denial,
    ) -> Self {
        let (received, rest) = (first.received, Box::default());
        Self { key, algorithm, last, received, denials: DenialList { first, rest } }
    }

    pub(super) fn limiter(&self) -> &'static str {
        self.last.limiter()
    }

    pub(super) fn received(&self) -> u64 {
        self.received
    }

    /// Addresses suffice to compare limiters, because there is one copy of each name.
    pub(super) fn is(&self, limiter: &'static str, key: &Key<'_>) -> bool {
        self.key.as_bytes() == key.as_bytes() && ptr::eq(self.limiter(), limiter)
    }

    pub(super) fn is_of(&self, settings: &Settings) -> bool {
        self.algorithm == settings.algorithm && self.last.quota() == settings.quota
    }

    /// Adds the denials of an older entry of the same key and quota.
    pub(super) fn remember(&mut self, older: Self) {
        if (older.algorithm, older.last.quota()) != (self.algorithm, self.last.quota()) {
            return;
        }
        let newest = mem::replace(&mut self.denials, older.denials);
        self.denials.add(newest.first, self.received);
    }

    /// Returns the denial of a request, of the longest that holds: it is exact for the request that
    /// was denied.
    pub(super) fn find(&self, limit: &LimitRequest<'_>, now: u64) -> Option<Decision> {
        let (cost, max_wait) = (limit.cost, limit.max_wait as f64);
        // At most four, so a scan is cheaper than any order beside that of the costs.
        let left = |denial: &Denial| denial.left(cost, max_wait, now);
        let all = self.denials.iter().filter_map(|denial| Some((left(denial)?, denial)));
        // A fold, which passes the end of the chain more cheaply than `max_by`.
        let longest = |known: Option<(f64, _)>, found: (f64, _)| {
            Some(known.filter(|known| known.0 > found.0).unwrap_or(found))
        };
        let (_, denial) = all.fold(None, longest)?;
        let age = |received| now.saturating_sub(received) / 1_000;
        let wait = (denial.rest(max_wait) as u64).saturating_sub(age(denial.received));
        Some(self.last.remembered(age(self.received), cost, wait))
    }
}
