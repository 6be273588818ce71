//! Holds: units that are taken now, and whose use is known later. They stand beside the state of an
//! algorithm, which does not know them: what is held makes its quota smaller. Decisions with them
//! are in `holding.rs`. The Lua twin is `scripts/holding.lua`.
//!
//! The units are counted by the slot of time in which their holds expire, so that a key has few
//! counters however many holds it has.

use super::{
    arithmetic::{EXACT, ceil_div},
    core::Core,
    state_bytes::Reader,
};

/// The most slots of a key. One lifetime needs no more, as its grid is at least an eighth of it.
pub(super) const MAX_SLOTS: usize = 9;

/// The end of a hold that does not expire.
const NEVER: i64 = i64::MAX;

/// The units of a key that are held.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) enum Held {
    #[default]
    None,
    /// In memory, where holds do not expire: also the core of a key whose units are only held.
    Endless(Core),
    Expiring(Box<Slots>),
}

/// The units that are held, by the instants at which their holds expire.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Slots {
    /// The instant at which the first of the units was held. A hold with another epoch has lost
    /// its units, because the state was lost: these are others.
    pub(super) epoch: i64,
    /// The time of the slots at their last change: the time of the clock and `skew`, which keeps it
    /// from following a clock that stepped back.
    pub(super) at: i64,
    pub(super) skew: i64,
    /// The end of the last slot that another one has joined, or 0. Only holds whose slots end by
    /// then can have their units in another slot.
    pub(super) joined: i64,
    /// In the order of their ends, by the time of the slots.
    pub(super) slots: Vec<Slot>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Slot {
    pub(super) ends: i64,
    pub(super) units: i64,
}

/// How long a hold lives, in microseconds, before it has to be renewed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lifetime {
    pub time: i64,
    /// The ends of slots are multiples of this: the smallest power of two that is at least an
    /// eighth of the lifetime. So grids of several lifetimes nest.
    pub grid: i64,
}

/// The evidence by which a store finds the units of a hold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HoldReceipt {
    pub epoch: i64,
    /// The end of its slot. After it, the hold has expired.
    pub ends: i64,
}

/// A change of a hold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HoldChange {
    pub receipt: HoldReceipt,
    /// The units of the hold.
    pub units: i64,
    pub action: HoldAction,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum HoldAction {
    /// Ends the hold: this many units were used, perhaps more than it holds.
    End { used: i64 },
    /// Holds the units for another lifetime.
    Renew(Lifetime),
}

/// The result of a change.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum HoldReply {
    /// The units were found, and are not held any more.
    Ended,
    /// The state of the key was lost meanwhile. What was used is spent.
    Lost,
    /// The hold had expired: its units were spent then.
    Expired,
    /// The hold has this receipt from now on.
    Renewed(HoldReceipt),
}

impl Lifetime {
    /// The lifetime of holds whose end cannot be missed.
    pub const ENDLESS: Self = Self { time: NEVER, grid: 1 };

    pub fn new(micros: u64) -> Self {
        let grid = micros.div_ceil(8).next_power_of_two();
        Self { time: micros as i64, grid: grid as i64 }
    }

    /// Returns the end of the slot of a hold that begins at `time`.
    fn end(self, time: i64) -> i64 {
        ceil_div(time + self.time, self.grid) * self.grid
    }
}

/// Units that are held until their holds end.
impl Core {
    /// Holds units. `epoch` is for the first ones.
    #[inline]
    pub(super) fn hold(&mut self, units: i64, epoch: i64) -> HoldReceipt {
        if self.amount == 0 {
            self.at = epoch;
        }
        self.amount = (self.amount + units).min(EXACT);
        HoldReceipt { epoch: self.at, ends: NEVER }
    }

    /// Ends a hold. Returns whether its units were held.
    pub fn end_hold(&mut self, receipt: HoldReceipt, units: i64) -> bool {
        let is_known = self.amount > 0 && self.at == receipt.epoch;
        if is_known {
            self.amount = (self.amount - units).max(0);
        }
        is_known
    }
}

impl Held {
    pub(super) fn is_empty(&self) -> bool {
        self.total() == 0
    }

    /// Forgets the epoch and the time of a key that holds no units any more.
    pub(super) fn forget_if_empty(&mut self) {
        if self.is_empty() {
            *self = Self::None;
        }
    }

    /// The sum of all units.
    #[inline]
    pub(super) fn total(&self) -> i64 {
        match self {
            Self::None => 0,
            Self::Endless(core) => core.amount,
            Self::Expiring(slots) => slots.total(),
        }
    }

    /// Returns the slots, if there are any.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn slots(&self) -> Option<&Slots> {
        if let Self::Expiring(slots) = self { Some(slots) } else { None }
    }

    /// Holds units. `epoch` is for the first units of a key.
    #[inline]
    pub(super) fn hold(
        &mut self,
        now: i64,
        units: i64,
        lifetime: Lifetime,
        epoch: i64,
    ) -> HoldReceipt {
        if self.is_empty() {
            *self = match lifetime.time {
                NEVER => Self::Endless(Core::default()),
                _ => Self::Expiring(Box::new(Slots { epoch, at: now, ..Slots::default() })),
            };
        }
        match self {
            Self::Expiring(slots) => slots.hold(now, units, lifetime),
            Self::Endless(core) => core.hold(units, epoch),
            Self::None => unreachable!("units are held"),
        }
    }
}

impl Slots {
    pub(super) fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// The sum of all units.
    fn total(&self) -> i64 {
        self.slots.iter().map(|slot| slot.units).sum::<i64>().min(EXACT)
    }

    /// Returns the skew of the slots at a time of the clock.
    fn skew_at(&self, now: i64) -> i64 {
        match now + self.skew < self.at {
            true => self.at - now,
            false => self.skew,
        }
    }

    /// Returns the time of the slots.
    pub(super) fn time(&self, now: i64) -> i64 {
        now + self.skew_at(now)
    }

    /// Returns whether the clock has stepped back since the last change. Unless the skew is stored
    /// then, the time of the slots stands still until the clock has caught up (law 8).
    pub(super) fn is_stale(&self, now: i64) -> bool {
        !self.is_empty() && now + self.skew < self.at
    }

    /// Returns whether the slots change before a decision.
    pub(super) fn is_due(&self, now: i64) -> bool {
        self.is_stale(now) || self.slots.first().is_some_and(|slot| slot.ends <= self.time(now))
    }

    /// Follows the clock, before a change.
    pub(super) fn touch(&mut self, now: i64) {
        self.skew = self.skew_at(now);
        self.at = now + self.skew;
    }

    /// Removes the first slot, if it has ended. Returns its units, and the instant by the clock.
    pub(super) fn expire(&mut self, now: i64) -> Option<(i64, i64)> {
        if self.slots.first()?.ends > self.time(now) {
            return None;
        }
        self.touch(now);
        let Slot { ends, units } = self.slots.remove(0);
        if ends == self.joined {
            self.joined = 0;
        }
        Some((units, ends - self.skew))
    }

    pub(super) fn hold(&mut self, now: i64, units: i64, lifetime: Lifetime) -> HoldReceipt {
        self.touch(now);
        let ends = lifetime.end(self.at);
        self.add(Slot { ends, units });
        HoldReceipt { epoch: self.epoch, ends }
    }

    /// Adds units to a slot. With more slots than are stored, the one whose neighbour ends soonest
    /// after it joins that neighbour: so no hold ends too early.
    fn add(&mut self, new: Slot) {
        let index = self.slots.partition_point(|slot| slot.ends < new.ends);
        match self.slots.get_mut(index) {
            Some(same) if same.ends == new.ends => same.units += new.units,
            _ => self.slots.insert(index, new),
        }
        if self.slots.len() > MAX_SLOTS {
            let gap = |i: &usize| self.slots[i + 1].ends - self.slots[*i].ends;
            let mut nearest = 0;
            for i in 1..MAX_SLOTS {
                if gap(&i) < gap(&nearest) {
                    nearest = i;
                }
            }
            let Slot { units, .. } = self.slots.remove(nearest);
            self.slots[nearest].units += units;
            self.joined = self.joined.max(self.slots[nearest].ends);
        }
    }
}

/// The letter that what is held begins and ends with.
pub(super) const FORM: u8 = b'H';

/// Reads what is held of a key, in front of the bytes of the state, which it returns, too.
pub(super) fn decode(bytes: &[u8]) -> Option<(Held, &[u8])> {
    let mut reader = Reader::new(bytes, FORM)?;
    let counts = reader.integer(1)? as usize;
    let [epoch, at, skew] = reader.integers([7; 3])?;
    let mut slots = vec![];
    for _ in 0..counts % 16 {
        let [ends, units] = reader.integers([7; 2])?;
        // An unused slot keeps its place, because the scripts cannot shorten a value.
        if units > 0 {
            slots.push(Slot { ends, units });
        }
    }
    reader.integers([1; 2])?; // the count and the letter again, to be read from the end
    let last = (counts / 16).checked_sub(1);
    let joined = last.and_then(|last| slots.get(last)).map_or(0, |slot: &Slot| slot.ends);
    let slots = Slots { epoch, at, skew, joined, slots };
    let held = if slots.is_empty() { Held::None } else { Held::Expiring(Box::new(slots)) };
    Some((held, reader.rest()))
}
