//! How many requests may wait for their turns.

use std::{
    collections::HashMap,
    hash::{BuildHasher, Hash, Hasher, RandomState},
    sync::{Arc, Mutex},
};

use crate::{limiter::Charge, store::lock};

const DEFAULT_MOST: usize = 10_000;

#[derive(Clone, Debug)]
pub(crate) struct Waiters {
    most: usize,
    most_per_key: Option<usize>,
    counts: Arc<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    hasher: RandomState,
    /// By the hash of the keys: in the unlikely case two have a place less.
    waiting: Mutex<(usize, HashMap<u64, usize>)>,
}

/// A place among those who wait, which it leaves when dropped.
#[derive(Debug)]
pub(crate) struct Place {
    counts: Arc<Counts>,
    hash: u64,
}

impl Waiters {
    pub(crate) fn new() -> Self {
        Self { most: DEFAULT_MOST, most_per_key: None, counts: Arc::default() }
    }

    pub(crate) fn set_most(&mut self, most: usize) {
        *self = Self { most, counts: Arc::default(), ..*self };
    }

    pub(crate) fn set_most_per_key(&mut self, most_per_key: usize) {
        *self = Self { most_per_key: Some(most_per_key), counts: Arc::default(), ..*self };
    }

    /// Takes a place, if there is one.
    pub(crate) fn enter(&self, charge: &Charge) -> Option<Place> {
        let mut hasher = self.counts.hasher.build_hasher();
        charge.keys().for_each(|key| key.hash(&mut hasher));
        let hash = hasher.finish();
        let most_per_key = self.most_per_key.unwrap_or_else(|| charge.default_most_waiting());
        let (all, by_key) = &mut *lock(&self.counts.waiting);
        let same = by_key.get(&hash).copied().unwrap_or(0);
        if *all >= self.most || same >= most_per_key {
            return None;
        }
        *all += 1;
        by_key.insert(hash, same + 1);
        Some(Place { counts: self.counts.clone(), hash })
    }
}

impl Drop for Place {
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
