//! `WaitQueue`: bounds the number of waiting requests, in total and per key. It keeps no order:
//! that is in `retry_queue.rs`, and in the reservations of the store.

use std::{
    collections::HashMap,
    hash::{BuildHasher, Hash, Hasher, RandomState},
    sync::{Arc, Mutex},
};

use super::charge::Charge;
use crate::sync::lock;

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
    /// The number of waiting requests: of all, and by the hash of their keys. Keys with equal
    /// hashes, which are unlikely, share slots.
    waiting: Mutex<(usize, HashMap<u64, usize>)>,
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

    /// Takes a slot, if one is free.
    pub(crate) fn enter(&self, charge: &Charge) -> Option<WaitSlot> {
        let mut hasher = self.counts.hasher.build_hasher();
        charge.keys().for_each(|key| key.hash(&mut hasher));
        let hash = hasher.finish();
        let max_per_key = self.max_per_key.unwrap_or_else(|| charge.default_max_waiting());
        let (all, by_key) = &mut *lock(&self.counts.waiting);
        let same = by_key.get(&hash).copied().unwrap_or(0);
        if *all >= self.max || same >= max_per_key {
            return None;
        }
        *all += 1;
        by_key.insert(hash, same + 1);
        Some(WaitSlot { counts: self.counts.clone(), hash })
    }
}

impl Drop for WaitSlot {
    fn drop(&mut self) {
        let (all, by_key) = &mut *lock(&self.counts.waiting);
        *all -= 1;
        if let Some(same) = by_key.get_mut(&self.hash) {
            *same -= 1;
            if *same == 0 {
                by_key.remove(&self.hash);
            }
        }
    }
}
