//! `TopDenied`: the keys that are denied most, in bounded memory.

use std::{
    cmp::Reverse, collections::BTreeSet, fmt, hash::BuildHasher, mem, sync::Mutex, time::SystemTime,
};

use foldhash::fast::RandomState;
use hashbrown::HashTable;

use super::{event::Event, observer::Observer};
use crate::{keys::Key, sync::lock};

/// The keys that are denied most, in bounded memory: an [`Observer`] that counts denials by limiter
/// and key.
///
/// It implements the algorithm Space-Saving (A. Metwally, D. Agrawal, A. El Abbadi, "Efficient
/// computation of frequent and top-k elements in data streams", ICDT 2005). It has a fixed number
/// of counters, its capacity. If all are in use, a new key takes over the smallest counter, and the
/// count at that moment is the error of the new count. After `N` denials:
///
/// * the true count of a listed key is at most its [`count`](DeniedKey::count), and at least
///   `count - max_error`
/// * each key with more than `N / capacity` denials is listed
/// * an error is at most `N / capacity`
///
/// A denial of several keys of one limiter is not counted, because it names none of them.
///
/// A capacity of 1,000 takes 100 to 400 kB. A denial takes O(log capacity) time, under one lock.
///
/// # Examples
///
/// ```
/// use std::sync::Arc;
/// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, observe::TopDenied};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tower_ratelimit::Error> {
/// let denied = Arc::new(TopDenied::new(1_000));
/// let store = MemoryStore::new();
/// store.add_observer(denied.clone());
/// let limiter = Limiter::new("api", store, Algorithm::token_bucket(), Quota::per_hour(1));
/// for key in ["alice", "ben", "alice", "alice"] {
///     let _ = limiter.check(key).await?;
/// }
/// let top = denied.top(10);
/// assert_eq!((top[0].key.as_str(), top[0].count, top[0].max_error), ("alice", 2, 0));
/// # Ok(())
/// # }
/// ```
pub struct TopDenied {
    capacity: usize,
    hasher: RandomState,
    counters: Mutex<Counters>,
    /// The time of the start, or of the last call of `clear`.
    since: Mutex<SystemTime>,
}

/// A key that is denied often. With the feature `serde`, it is
/// [serialized](crate::guide::configuration#results-as-json).
///
/// # Examples
///
/// ```
/// use std::sync::Arc;
/// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, observe::{DeniedKey, TopDenied}};
///
/// # let top = Arc::new(TopDenied::new(1_000));
/// # let store = MemoryStore::new();
/// # store.add_observer(top.clone());
/// # let limiter = Limiter::new("api", store, Algorithm::sliding_log(), Quota::per_hour(1));
/// # let _ = limiter.check("alice").cost(1).now()?;
/// # let _ = limiter.check("alice").now()?;
/// for DeniedKey { limiter, key, count, .. } in top.top(10) {
///     println!("{count} denials of {key} by {limiter}");
/// }
/// # Ok::<(), tower_ratelimit::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct DeniedKey {
    /// The name of the limiter.
    pub limiter: &'static str,
    /// The key.
    #[cfg_attr(feature = "serde", serde(serialize_with = "text"))]
    pub key: Key<'static>,
    /// The number of denials, or up to `max_error` more.
    pub count: u64,
    /// The most by which `count` can be too large.
    pub max_error: u64,
    /// The time of the last denial, by the clock of the process.
    #[cfg_attr(feature = "serde", serde(rename = "last_denied_unix_ms"))]
    #[cfg_attr(feature = "serde", serde(serialize_with = "crate::time::unix_ms"))]
    pub last_denied: SystemTime,
    /// True if the key was [blocked](crate::Limiter::block) at the last denial, so its quota says
    /// nothing about the denials.
    pub is_blocked: bool,
}

#[derive(Default)]
struct Counters {
    slots: Vec<DeniedKey>,
    /// The slot of each key.
    slot_of: HashTable<usize>,
    /// The counts with their slots, the largest count first.
    order: BTreeSet<(Reverse<u64>, usize)>,
    total: u64,
}

impl TopDenied {
    /// Makes an observer with this number of counters.
    ///
    /// # Panics
    ///
    /// If `capacity` is 0.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::sync::Arc;
    /// use tower_ratelimit::{MemoryStore, observe::TopDenied};
    ///
    /// let top = Arc::new(TopDenied::new(1_000));
    /// MemoryStore::new().add_observer(top.clone());
    /// ```
    #[must_use]
    #[track_caller]
    pub fn new(capacity: usize) -> Self {
        assert!(capacity > 0, "at least one key must be counted");
        let since = Mutex::new(SystemTime::now());
        Self { capacity, hasher: RandomState::default(), counters: Mutex::default(), since }
    }

    /// Returns up to `count` keys, those with the largest counts first.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::sync::Arc;
    /// use tower_ratelimit::{Algorithm, Key, Limiter, MemoryStore, Quota, observe::TopDenied};
    ///
    /// # let top = Arc::new(TopDenied::new(1_000));
    /// # let store = MemoryStore::new();
    /// # store.add_observer(top.clone());
    /// # let limiter = Limiter::new("api", store, Algorithm::sliding_log(), Quota::per_hour(1));
    /// # let _ = limiter.check("alice").cost(1).now()?;
    /// # let _ = limiter.check("alice").now()?;
    /// assert_eq!(top.top(10)[0].key, Key::from("alice"));
    /// # Ok::<(), tower_ratelimit::Error>(())
    /// ```
    #[must_use]
    pub fn top(&self, count: usize) -> Vec<DeniedKey> {
        let counters = lock(&self.counters);
        let slots = counters.order.iter().take(count);
        slots.map(|(_, slot)| counters.slots[*slot].clone()).collect()
    }

    /// Returns the number of all denials that were counted.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::sync::Arc;
    /// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, observe::TopDenied};
    ///
    /// # let top = Arc::new(TopDenied::new(1_000));
    /// # let store = MemoryStore::new();
    /// # store.add_observer(top.clone());
    /// # let limiter = Limiter::new("api", store, Algorithm::sliding_log(), Quota::per_hour(1));
    /// # let _ = limiter.check("alice").cost(1).now()?;
    /// # let _ = limiter.check("alice").now()?;
    /// assert_eq!(top.total(), 1);
    /// # Ok::<(), tower_ratelimit::Error>(())
    /// ```
    #[must_use]
    pub fn total(&self) -> u64 {
        lock(&self.counters).total
    }

    /// Returns the time at which counting began: when the observer was made, or when it was last
    /// [cleared](TopDenied::clear).
    ///
    /// # Examples
    ///
    /// ```
    /// use std::sync::Arc;
    /// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, observe::TopDenied};
    ///
    /// # let top = Arc::new(TopDenied::new(1_000));
    /// # let store = MemoryStore::new();
    /// # store.add_observer(top.clone());
    /// # let limiter = Limiter::new("api", store, Algorithm::sliding_log(), Quota::per_hour(1));
    /// # let _ = limiter.check("alice").cost(1).now()?;
    /// # let _ = limiter.check("alice").now()?;
    /// println!("since {:?}: {}", top.since(), top.total());
    /// # Ok::<(), tower_ratelimit::Error>(())
    /// ```
    #[must_use]
    pub fn since(&self) -> SystemTime {
        *lock(&self.since)
    }

    /// Forgets all keys and counts, to begin another period.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::sync::Arc;
    /// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, observe::TopDenied};
    ///
    /// # let top = Arc::new(TopDenied::new(1_000));
    /// # let store = MemoryStore::new();
    /// # store.add_observer(top.clone());
    /// # let limiter = Limiter::new("api", store, Algorithm::sliding_log(), Quota::per_hour(1));
    /// # let _ = limiter.check("alice").cost(1).now()?;
    /// # let _ = limiter.check("alice").now()?;
    /// top.clear(); // each day, say
    /// assert_eq!(top.total(), 0);
    /// # Ok::<(), tower_ratelimit::Error>(())
    /// ```
    pub fn clear(&self) {
        drop(mem::take(&mut *lock(&self.counters)));
        *lock(&self.since) = SystemTime::now();
    }

    fn count(&self, limiter: &'static str, key: &Key<'_>, is_blocked: bool) {
        let hash = |limiter, key: &Key<'_>| self.hasher.hash_one((limiter, key.as_bytes()));
        let hash_of = |denied: &DeniedKey| hash(denied.limiter, &denied.key);
        let is_it = |denied: &DeniedKey| denied.limiter == limiter && denied.key == *key;
        let last_denied = SystemTime::now();
        let Counters { slots, slot_of, order, total } = &mut *lock(&self.counters);
        *total += 1;
        let hash_of_key = hash(limiter, key);
        let known = slot_of.find(hash_of_key, |slot| is_it(&slots[*slot])).copied();
        let slot = known.unwrap_or_else(|| {
            let key = key.clone().into_owned();
            let mut denied =
                DeniedKey { limiter, key, count: 0, max_error: 0, last_denied, is_blocked };
            let smallest = order.last().filter(|_| slots.len() == self.capacity);
            let slot = match smallest {
                None => {
                    slots.push(denied);
                    slots.len() - 1
                }
                Some(&(Reverse(count), slot)) => {
                    (denied.count, denied.max_error) = (count, count);
                    let before = mem::replace(&mut slots[slot], denied);
                    if let Ok(entry) = slot_of.find_entry(hash_of(&before), |it| *it == slot) {
                        entry.remove();
                    }
                    slot
                }
            };
            slot_of.insert_unique(hash_of_key, slot, |slot| hash_of(&slots[*slot]));
            slot
        });
        let denied = &mut slots[slot];
        order.remove(&(Reverse(denied.count), slot));
        denied.count += 1;
        order.insert((Reverse(denied.count), slot));
        (denied.last_denied, denied.is_blocked) = (last_denied, is_blocked);
    }
}

impl Observer for TopDenied {
    fn on_event(&self, event: &Event<'_>) {
        if let Event::Decided { decision, key: Some(key), .. } = event
            && !decision.is_allowed()
        {
            self.count(decision.limiter(), key, decision.is_blocked());
        }
    }
}

impl fmt::Debug for TopDenied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TopDenied").field("capacity", &self.capacity).finish_non_exhaustive()
    }
}

#[cfg(feature = "serde")]
fn text<S: serde::Serializer>(key: &Key<'_>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(key.as_str())
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn counts_are_within_their_errors(
            capacity in 1_usize..12,
            // Some keys are frequent.
            keys in prop::collection::vec((0_u32..40, 0_u32..3), 0..400),
        ) {
            let keys: Vec<u32> = keys.iter().map(|(key, skew)| key / (1 + 5 * skew)).collect();
            let denied = TopDenied::new(capacity);
            let mut exact = HashMap::new();
            for key in &keys {
                denied.count(["a", "b"][*key as usize % 2], &Key::from(*key), false);
                *exact.entry(Key::from(*key)).or_insert(0_u64) += 1;
            }
            let top = denied.top(usize::MAX);
            let total = keys.len() as u64;
            prop_assert_eq!(denied.total(), total);
            prop_assert!(top.len() == exact.len().min(capacity));
            prop_assert!(top.is_sorted_by(|one, next| one.count >= next.count));
            prop_assert_eq!(top.iter().map(|denied| denied.count).sum::<u64>(), total);
            for DeniedKey { key, count, max_error, .. } in &top {
                let exact = exact[key];
                prop_assert!(count - max_error <= exact && exact <= *count);
                prop_assert!(*max_error <= total / capacity as u64);
            }
            for (key, count) in exact {
                let is_listed = top.iter().any(|denied| denied.key == key);
                prop_assert!(is_listed || count <= total / capacity as u64);
            }
        }
    }

    #[test]
    fn a_key_of_two_limiters_has_two_counts() {
        let denied = TopDenied::new(8);
        for (limiter, times) in [("a", 2), ("b", 1)] {
            (0..times).for_each(|time| denied.count(limiter, &Key::from("key"), time == 0));
        }
        let top: Vec<_> =
            denied.top(8).iter().map(|denied| (denied.limiter, denied.count)).collect();
        assert_eq!(top, [("a", 2), ("b", 1)]);
        let top = denied.top(8);
        assert_eq!([top[0].is_blocked, top[1].is_blocked], [false, true], "at the last denial");
        denied.clear();
        assert!(denied.top(8).is_empty() && denied.total() == 0);
    }
}
