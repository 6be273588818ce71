//! The model of an algorithm: its state, and how time, requests and releases change it. Does not
//! decide. Both buckets share one model, `bucket.rs`. Its Lua twin is the text of
//! `scripts/NAME/model.lua`; the functions that both have stand in the same order. Rust counts in
//! integers, Lua in doubles that hold them.

use std::fmt;

use super::{core::Core, request::Release};
use crate::quota::LONGEST_REFILL;

/// An algorithm with a quota, apart from the states of keys.
pub trait Parameters {
    /// The parameters of the script.
    fn args(&self) -> Vec<f64>;

    /// The units that a key without requests has left.
    fn full(&self) -> i64;

    /// The largest cost that a check can be granted.
    fn max_cost(&self) -> i64 {
        self.full()
    }

    /// The time until units, spent now of a key without requests, do not count any more.
    fn drain(&self, units: i64) -> i64;

    /// True if units are restored one by one, false if the units of a window may all be restored at
    /// one instant.
    fn restores_evenly(&self) -> bool {
        false
    }

    /// The longest wait, in microseconds, of a check that does not specify one.
    fn default_wait(&self) -> i64 {
        0
    }

    /// The longest wait, in microseconds, that can be reserved.
    fn max_reservable(&self) -> i64 {
        LONGEST_REFILL as i64
    }

    /// The same with a quota that is smaller by the units that are held.
    fn beside(&self, held: i64) -> Self
    where
        Self: Sized;
}

/// The state of a key under one algorithm. [`engine`](super::engine) decides with it.
///
/// All times are in microseconds.
pub(crate) trait Model: Clone + fmt::Debug + PartialEq + Sized {
    /// The algorithm with a quota.
    type Params: Parameters + Copy + fmt::Debug;

    /// The parts of the state that a check changes before it decides. They are restored if nothing
    /// is written.
    type Saved;

    /// True if the engine keeps the reservations of waiting requests. A log contains them itself.
    const RESERVES: bool = true;

    /// False if units are only held.
    const SPENDS: bool = true;

    /// True for a shaper: requests wait without asking to, and the room for them is bounded. So a
    /// request can be denied for lack of room, too, whatever it may wait. Its units cannot be held:
    /// each is a departure, which has an instant of its own.
    const SHAPES: bool = false;

    /// The state of a key without requests.
    fn initial(now: i64, params: &Self::Params) -> Self;

    /// Reads the state that a script found.
    fn decode(bytes: &[u8]) -> Option<Self>;

    /// Copies the parts of the state that a check changes before it decides.
    fn save(&self) -> Self::Saved;

    /// Restores the parts that were saved.
    fn restore(&mut self, saved: Self::Saved);

    /// Follows a clock that stepped back. Returns true if it did.
    fn step_back(&mut self, now: i64) -> bool;

    /// Lets time pass until `now`.
    fn advance(&mut self, now: i64);

    /// Lets time pass until `now`, and converts a state that was counted by other parameters. From
    /// the last request that it counts on, units are restored at the new rate, whenever this is
    /// called: so a denied request need not store the result. Returns the time until the state is
    /// over as it was counted, if the parameters are others; by then, it is over for all.
    fn adopt(&mut self, now: i64, params: &Self::Params, saved: &mut Self::Saved) -> Option<i64>;

    /// The wait until `needed` units are left, or for requests that wait, if none are needed.
    fn earliest(&self, now: i64, needed: Option<i64>, params: &Self::Params) -> Earliest;

    /// Counts a request that proceeds at `instant`.
    fn commit(&mut self, instant: i64, cost: i64, params: &Self::Params);

    /// Returns units that still count: the units of one request, or of any requests.
    fn refund(&mut self, now: i64, release: &Release, params: &Self::Params);

    /// The time until the state is the initial one; 0 if it is.
    fn reset_after(&self, now: i64) -> i64;

    /// The same if units that are held were used now. Without them, it is `reset`.
    fn reset_beside(&self, _now: i64, reset: i64, held: i64, params: &Self::Params) -> i64 {
        reset.max(params.drain(held))
    }

    /// The units that are left of a state that is not the initial one, and the time until there are
    /// more. That time is `known` already for one number of units.
    fn report(&self, now: i64, known: (i64, i64), params: &Self::Params) -> Report;

    /// The instant of the newest request, if the state itself contains the requests that wait.
    fn last_instant(&self) -> Option<i64> {
        None
    }

    /// The same parameters with constants, if they are the simplest ones, which most quotas have:
    /// the compiler computes with them.
    fn simplest(_: &Self::Params) -> Option<Self::Params> {
        None
    }

    /// The state that lies in a core, at an instant that is not before the core; `None` if no core
    /// has one.
    fn open(_: Core, _now: i64, _: &Self::Params) -> Option<Self> {
        None
    }

    /// The core that represents the state under these parameters, if one does.
    fn close(&self, _now: i64, _: &Self::Params) -> Option<Core> {
        None
    }
}

/// The earliest instant at which a request can proceed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Earliest {
    /// The time until that instant.
    pub(crate) wait: i64,
    /// The time until there is room for it to wait.
    pub(crate) full: i64,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Report {
    pub(crate) remaining: i64,
    /// The time until `remaining` grows; 0 when it cannot.
    pub(crate) replenish: i64,
}
