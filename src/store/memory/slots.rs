//! The number of keys in all shards of a store, and its maximum. Does not know the keys.

use std::{
    mem,
    sync::atomic::{AtomicUsize, Ordering},
};

/// Counts the keys of a store, so that all shards together hold at most `max`.
///
/// One number for all shards: with a maximum per shard, the store would be full when its fullest
/// shard is full. Only insertions and removals change the number.
pub(super) struct Slots {
    used: AtomicUsize,
    max: usize,
}

/// The right to hold one key. When it is dropped, another key may take it.
#[must_use]
pub(super) struct Slot<'a>(&'a Slots);

impl Slots {
    pub(super) fn new(max: usize) -> Self {
        Self { used: AtomicUsize::new(0), max }
    }

    pub(super) fn max(&self) -> usize {
        self.max
    }

    pub(super) fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Takes a slot, if one is free.
    pub(super) fn take(&self) -> Option<Slot<'_>> {
        let one_more = |used| (used < self.max).then_some(used + 1);
        let taken = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more);
        taken.ok().map(|_| Slot(self))
    }

    /// Returns the slot of a key that was removed from its shard.
    pub(super) fn of_removed_key(&self) -> Slot<'_> {
        Slot(self)
    }
}

impl Slot<'_> {
    /// Hands the slot to a key that was inserted into a shard, which holds it until it is removed.
    pub(super) fn fill(self) {
        mem::forget(self);
    }
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        self.0.used.fetch_sub(1, Ordering::Relaxed);
    }
}
