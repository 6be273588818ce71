//! The remembered denial of one key, and the requests that it denies. Does not know the memory that
//! it is in, nor the blocks of keys.
//!
//! The engine denies a request that may wait `w` until `max(E - w, R)`: it conforms at `E`, and
//! there is room for it to wait from `R` on. Only the room of a shaper can be full. So a denial of
//! one wait proves until when requests of other waits are denied, if their cost is at least the
//! same. A block denies every cost.

use std::{
    cmp::Ordering::{Equal, Greater, Less},
    time::Duration,
};

use crate::{
    algorithm::Algorithm,
    decision::Decision,
    store::{LimitRequest, Settings},
};

/// What a check asks about a limit.
pub(super) struct Question {
    algorithm: Algorithm,
    /// Whether the limit can be full of requests that wait.
    shapes: bool,
    max_wait: f64,
}

/// A proof that requests of a cost are denied. Its instants are in nanoseconds since the memory was
/// made: a lookup then reads them without the arithmetic of `Duration`. The other times are in
/// microseconds after the decision.
pub(super) struct Denial {
    algorithm: Algorithm,
    /// Reports the count of the key.
    decision: Decision,
    /// The least cost that it denies.
    cost: u64,
    /// When a request of this cost conforms, at the earliest.
    conforms: f64,
    /// When there is room for it to wait; 0 if that is unknown, or if there is always room.
    room: f64,
    sent: u64,
    received: u64,
    /// When it is forgotten.
    pub(super) ends: u64,
}

impl Question {
    pub(super) fn new(limit: &LimitRequest<'_>) -> Self {
        let Settings { algorithm, params, .. } = **limit.settings;
        Self { algorithm, shapes: params.shapes(), max_wait: limit.max_wait as f64 }
    }
}

impl Denial {
    /// Reads the denial of a check that was sent and received at these instants. Returns `None` if
    /// it denies nothing any more.
    pub(super) fn new(
        &Question { algorithm, shapes, max_wait }: &Question,
        denied: &Decision,
        [sent, received]: [u64; 2],
        ttl: Duration,
    ) -> Option<Self> {
        let micros = |time: Duration| time.as_micros() as f64;
        let (wait, reset) = (micros(denied.retry_after()?), micros(denied.reset_after()));
        // A block that ends within the wait is not what has denied the request.
        let by_block = micros(denied.block_rest()) > max_wait;
        let (conforms, room) = if by_block {
            (wait + max_wait, 0.0)
        } else if shapes {
            // The request leaves when all of those before it have left: when nothing is left.
            (reset, if wait > reset - max_wait { wait } else { 0.0 })
        } else {
            // A count of another quota can be over before the request conforms by this one.
            ((wait + max_wait).min(reset).max(wait), 0.0)
        };
        let cost = if by_block { 0 } else { denied.cost() };
        let ends = sent + ttl.as_nanos() as u64;
        let decision = denied.clone().without_counts();
        let it = Self { algorithm, decision, cost, conforms, room, sent, received, ends };
        it.denies(denied.cost(), max_wait, received).then_some(it)
    }

    pub(super) fn is_of(&self, settings: &Settings) -> bool {
        self.algorithm == settings.algorithm && self.decision.quota() == settings.quota
    }

    /// Returns the time from the decision until a request that may wait as long can be allowed.
    fn rest(&self, max_wait: f64) -> f64 {
        (self.conforms - max_wait).max(self.room).max(0.0)
    }

    /// Returns whether it denies a request. It counts from the instant at which the check was sent,
    /// because the store decided at that instant or later, and ends 0.1 % earlier: the clock of the
    /// store may be faster than the clock of the process.
    fn denies(&self, cost: u64, max_wait: f64, now: u64) -> bool {
        let left = 0.999 * self.rest(max_wait) - now.saturating_sub(self.sent) as f64 / 1e3;
        cost >= self.cost && now < self.ends && left > 0.0
    }

    /// Returns whether it is to be remembered in place of a known one, as the answer to this
    /// question. The known one stays if it was sent later, or if it denies the same request, and
    /// further ones.
    pub(super) fn replaces(&self, known: &Self, question: &Question) -> bool {
        match self.cost.cmp(&known.cost) {
            Less => true,
            Equal => self.sent >= known.sent,
            Greater => !known.denies(self.decision.cost(), question.max_wait, self.received),
        }
    }

    /// Returns the denial of a request. It is exact for the request that was denied.
    pub(super) fn find(&self, limit: &LimitRequest<'_>, now: u64) -> Option<Decision> {
        let (cost, max_wait) = (limit.cost, limit.max_wait as f64);
        let age = now.saturating_sub(self.received) / 1_000;
        let wait = || (self.rest(max_wait) as u64).saturating_sub(age);
        self.denies(cost, max_wait, now).then(|| self.decision.remembered(age, cost, wait()))
    }
}
