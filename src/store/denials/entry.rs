//! The remembered denials of one key, and the requests that they deny. Does not know the memory
//! that the entry is in, nor the blocks of keys.
//!
//! The engine denies a request that may wait `w` until `max(E - w, R)`: it conforms at `E`, and
//! there is room for it to wait from `R` on. Only the room of a shaper can be full. So a denial of
//! one wait proves until when requests of other waits are denied, if their cost is at least the
//! same. A block denies every cost.

use std::{iter, mem, ptr, time::Duration};

use tokio::time::Instant;

use crate::{
    algorithm::Algorithm,
    decision::Decision,
    keys::Key,
    store::{LimitRequest, Settings},
};

/// The denials of a key that are remembered beside each other: a service has few costs. A flood
/// with more of them costs one call per TTL for each further cost.
const MAX_DENIALS: usize = 4;

/// A key with its denials.
pub(super) struct KeyDenials {
    pub(super) key: Key<'static>,
    algorithm: Algorithm,
    /// The last denial, which reports the count of the key, and when it was received.
    last: Decision,
    received: Instant,
    /// Ordered by cost. None of them denies all that another one denies.
    denials: DenialList,
}

/// At least one denial. Most keys have a single one, so it needs no allocation.
struct DenialList {
    first: Denial,
    rest: Box<[Denial]>,
}

/// A proof that requests of a cost are denied. The times are in microseconds after the decision.
#[derive(Clone, Copy, Debug)]
pub(super) struct Denial {
    /// The least cost that it denies.
    cost: u64,
    /// When a request of this cost conforms, at the earliest.
    conforms: f64,
    /// When there is room for it to wait; 0 if that is unknown, or if there is always room.
    room: f64,
    sent: Instant,
    received: Instant,
    /// When it is forgotten.
    ends: Instant,
}

impl Denial {
    /// Reads the denial of a check that was sent and received at these instants. `shapes`: by a
    /// limit that can be full.
    pub(super) fn new(
        shapes: bool,
        denied: &Decision,
        max_wait: f64,
        [sent, received]: [Instant; 2],
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
        } else {
            (wait + max_wait, 0.0)
        };
        let cost = if by_block { 0 } else { denied.cost() };
        Some(Self { cost, conforms, room, sent, received, ends: sent + ttl })
    }

    /// Returns the time from the decision until a request that may wait as long can be allowed.
    fn rest(&self, max_wait: f64) -> f64 {
        (self.conforms - max_wait).max(self.room).max(0.0)
    }

    /// Returns the instant that is `rest` after the decision, or 0.1 % earlier: the clock of the
    /// store may be faster than the clock of the process. It counts from the instant at which the
    /// check was sent, because the store decided at that instant or later.
    fn after(&self, rest: f64) -> Instant {
        let rest = Duration::from_micros(rest as u64);
        self.sent + (rest - rest / 1_000)
    }

    fn until(&self, max_wait: f64) -> Instant {
        self.after(self.rest(max_wait)).min(self.ends)
    }

    pub(super) fn denies(&self, cost: u64, max_wait: f64, now: Instant) -> bool {
        cost >= self.cost && now < self.until(max_wait)
    }

    /// Returns whether it denies whatever the other one denies.
    fn covers(&self, other: &Self) -> bool {
        self.cost <= other.cost
            && self.ends >= other.ends
            && self.after(self.conforms) >= other.after(other.conforms)
            && (other.room == 0.0 || self.after(self.room) >= other.after(other.room))
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
    fn add(&mut self, denial: Denial, now: Instant) {
        if self.iter().any(|known| known.covers(&denial)) {
            return;
        }
        let mut all: Vec<_> = self.iter().copied().collect();
        all.retain(|known| known.ends > now && !denial.covers(known) && !denial.replaces(known));
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

    pub(super) fn received(&self) -> Instant {
        self.received
    }

    /// Addresses suffice to compare limiters, because there is one copy of each name.
    pub(super) fn is(&self, limiter: &'static str, key: &Key<'_>) -> bool {
        self.key.as_bytes() == key.as_bytes() && ptr::eq(self.limiter(), limiter)
    }

    pub(super) fn is_of(&self, settings: &Settings) -> bool {
        (self.algorithm, self.last.quota()) == (settings.algorithm, settings.quota)
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
    pub(super) fn find(&self, limit: &LimitRequest<'_>, now: Instant) -> Option<Decision> {
        let LimitRequest { cost, max_wait, .. } = *limit;
        // At most four, so a scan is cheaper than any order beside that of the costs.
        let all = self.denials.iter().filter(|denial| denial.denies(cost, max_wait, now));
        let denial = all.max_by_key(|denial| denial.until(max_wait))?;
        let age = |received| now.saturating_duration_since(received).as_micros() as u64;
        let wait = (denial.rest(max_wait) as u64).saturating_sub(age(denial.received));
        Some(self.last.remembered(age(self.received), cost, wait))
    }
}
