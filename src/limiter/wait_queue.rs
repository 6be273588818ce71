//! `WaitQueue`: bounds the number of waiting requests, in total and per key. It keeps no order:
//! that is in the lines of `in_line.rs`, and in the reservations of the store.

use std::{
    collections::HashMap,
    hash::{BuildHasher, Hash, Hasher},
    iter,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use foldhash::fast::RandomState;

use super::{charge::Charge, handle::AnyLimiter};
use crate::{keys::Key, sync::lock};

/// Each waiting request holds its connection and its body, some kilobytes. Chosen, not measured.
const DEFAULT_MAX: usize = 10_000;

#[derive(Clone, Debug)]
pub(crate) struct WaitQueue {
    max: usize,
    max_per_key: Option<usize>,
    counts: Arc<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    hasher: RandomState,
    /// The number of all waiting requests. It is changed under the lock, and read without it.
    all: AtomicUsize,
    /// The numbers by the hash of their keys. Keys with equal hashes, which are unlikely, share
    /// slots.
    by_key: Mutex<HashMap<u64, usize, RandomState>>,
}

/// The slot of a waiting request. Dropping it frees the slot.
#[derive(Debug)]
pub(crate) struct WaitSlot {
    counts: Arc<Counts>,
    hash: u64,
}

impl WaitQueue {
    pub(crate) fn new() -> Self {
        Self { max: DEFAULT_MAX, max_per_key: None, counts: Arc::default() }
    }

    pub(crate) fn set_max(&mut self, max: usize) {
        *self = Self { max, counts: Arc::default(), ..*self };
    }

    pub(crate) fn set_max_per_key(&mut self, max_per_key: usize) {
        *self = Self { max_per_key: Some(max_per_key), counts: Arc::default(), ..*self };
    }

    /// Returns whether a request of one limit could wait now. While no request waits, this takes no
    /// lock.
    #[inline]
    pub(crate) fn has_room(&self, limiter: &AnyLimiter, key: &Key<'_>) -> bool {
        let max_per_key = || self.max_per_key.unwrap_or_else(|| limiter.default_max_waiting());
        match self.counts.all.load(Relaxed) {
            0 => self.max > 0 && max_per_key() > 0,
            all => all < self.max && self.counts.waiting(key) < max_per_key(),
        }
    }

    /// Takes a slot, if one is free.
    pub(crate) fn enter(&self, charge: &Charge) -> Option<WaitSlot> {
        let hash = self.counts.hash(charge.keys());
        let max_per_key = self.max_per_key.unwrap_or_else(|| charge.default_max_waiting());
        let mut by_key = lock(&self.counts.by_key);
        let same = by_key.get(&hash).copied().unwrap_or(0);
        if same >= max_per_key || self.counts.all.load(Relaxed) >= self.max {
            return None;
        }
        by_key.insert(hash, same + 1);
        self.counts.all.fetch_add(1, Relaxed);
        Some(WaitSlot { counts: self.counts.clone(), hash })
    }
}

impl Counts {
    fn hash<'a, 'k: 'a>(&self, keys: impl Iterator<Item = &'a Key<'k>>) -> u64 {
        let mut hasher = self.hasher.build_hasher();
        keys.for_each(|key| key.hash(&mut hasher));
        hasher.finish()
    }

    /// Returns the number of requests that wait with a key.
    fn waiting(&self, key: &Key<'_>) -> usize {
        let hash = self.hash(iter::once(key));
        lock(&self.by_key).get(&hash).copied().unwrap_or(0)
    }
}

impl Drop for WaitSlot {
    fn drop(&mut self) {
        let mut by_key = lock(&self.counts.by_key);
        self.counts.all.fetch_sub(1, Relaxed);
        if let Some(same) = by_key.get_mut(&self.hash) {
            *same -= 1;
            if *same == 0 {
                by_key.remove(&self.hash);
            }
        }
    }
}
