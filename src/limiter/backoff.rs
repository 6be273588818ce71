//! `Backoff`: the length of the next block of a key whose vendor rejects requests and says no time.
//! It is kept by process, so that it needs no call, and no form of a state in the stores.

use std::{
    collections::HashMap,
    hash::BuildHasher,
    sync::{Arc, Mutex},
    time::Duration,
};

use foldhash::fast::RandomState;
use tokio::time::Instant;

use crate::{keys::Key, sync::lock};

pub(super) const FIRST_BLOCK: Duration = Duration::from_secs(1);
const LONGEST_BLOCK: Duration = Duration::from_secs(60);

/// A key that was not rejected for so long begins anew.
const MEMORY: Duration = Duration::from_secs(600);

/// The number of keys that are remembered. At one more, all others begin anew.
const MAX_KEYS: usize = 10_000;

/// The last blocks of unknown length. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct Backoff(Arc<LastBlocks>);

#[derive(Debug, Default)]
struct LastBlocks {
    hasher: RandomState,
    /// By the hash of their keys. Keys with equal hashes, which are unlikely, share one.
    blocks: Mutex<HashMap<u64, LastBlock>>,
}

#[derive(Clone, Copy, Debug)]
struct LastBlock {
    length: Duration,
    ends: Instant,
}

impl Backoff {
    /// Returns the time for which a key is blocked that was rejected now: twice the last one, if no
    /// request has succeeded since. A rejection during a block belongs to a request that was sent
    /// before it, and does not lengthen it.
    pub(super) fn next(&self, key: &Key<'_>, longest: Duration) -> Duration {
        let (hash, now) = (self.0.hasher.hash_one(key), Instant::now());
        let mut blocks = lock(&self.0.blocks);
        let length = match blocks.get(&hash) {
            Some(last) if now < last.ends => return last.ends - now,
            Some(last) if now < last.ends + MEMORY => (last.length * 2).min(LONGEST_BLOCK),
            _ => FIRST_BLOCK,
        };
        if blocks.len() >= MAX_KEYS && !blocks.contains_key(&hash) {
            blocks.clear();
        }
        let length = length.min(longest);
        blocks.insert(hash, LastBlock { length, ends: now + length });
        length
    }

    /// Returns whether the next block of the key would be longer than the first one. A success
    /// during a block belongs to a request that was sent before it.
    pub(super) fn can_end(&self, key: &Key<'_>) -> bool {
        let blocks = lock(&self.0.blocks);
        if blocks.is_empty() {
            return false;
        }
        let last = blocks.get(&self.0.hasher.hash_one(key));
        last.is_some_and(|last| last.ends <= Instant::now())
    }

    pub(super) fn end(&self, key: &Key<'_>) {
        if self.can_end(key) {
            lock(&self.0.blocks).remove(&self.0.hasher.hash_one(key));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_keys_that_are_remembered_are_bounded() {
        let backoff = Backoff::default();
        for i in 0..3 * MAX_KEYS {
            let key = Key::from(format!("{i}"));
            assert_eq!(backoff.next(&key, Duration::MAX), FIRST_BLOCK);
        }
        assert!(lock(&backoff.0.blocks).len() <= MAX_KEYS);
    }
}
