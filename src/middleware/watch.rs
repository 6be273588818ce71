//! Watches the first requests of a layer for the commonest mistake with addresses: all clients have
//! one key, because a proxy is in front of the service.

use std::{
    hash::BuildHasher,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed},
    },
};

use foldhash::fast::FixedState;

use crate::{
    keys::Key,
    middleware::{extractor::KeyExtractor, rejection::RequestError},
    observe::log,
};

/// The requests in a row with one key that are suspect.
const RUN: u32 = 1_000;
/// The number of requests that are watched. The others cost one comparison.
const WATCHED: u32 = 100_000;

/// Returns the extractor, which watches the requests if it can be mistaken in the client.
pub(crate) fn watched<H: 'static>(key: impl KeyExtractor<H>) -> Arc<dyn KeyExtractor<H>> {
    if !key.can_mistake() {
        return Arc::new(key);
    }
    Arc::new(Watched {
        key,
        left: AtomicU32::new(WATCHED),
        last: AtomicU64::new(0),
        run: AtomicU32::new(0),
        has_warned: AtomicBool::new(false),
    })
}

/// An extractor, and the keys of the requests of one layer. Threads may overwrite the counts of
/// each other: the exact number does not matter.
struct Watched<K> {
    key: K,
    left: AtomicU32,
    /// The hash of the last key, and the number of requests in a row that have it.
    last: AtomicU64,
    run: AtomicU32,
    has_warned: AtomicBool,
}

impl<H: 'static, K: KeyExtractor<H>> KeyExtractor<H> for Watched<K> {
    #[inline]
    fn extract(&self, head: &H) -> Result<Key<'static>, RequestError> {
        let key = self.key.extract(head);
        let left = self.left.load(Relaxed);
        if left > 0
            && let Ok(key) = &key
        {
            self.count(left, head, key);
        }
        key
    }
}

impl<K> Watched<K> {
    #[inline(never)]
    fn count<H>(&self, left: u32, head: &H, key: &Key<'_>)
    where
        K: KeyExtractor<H>,
    {
        self.left.store(left - 1, Relaxed);
        let hash = FixedState::default().hash_one(key.as_bytes());
        let is_same = self.last.load(Relaxed) == hash;
        let run = if is_same { self.run.load(Relaxed) + 1 } else { 1 };
        if !is_same {
            self.last.store(hash, Relaxed);
        }
        self.run.store(run, Relaxed);
        if run.is_multiple_of(RUN) {
            self.suspect(head);
        }
    }

    #[cold]
    fn suspect<H>(&self, head: &H)
    where
        K: KeyExtractor<H>,
    {
        let Some(mistake) = self.key.mistake(head) else { return };
        if !self.has_warned.swap(true, Relaxed) {
            log::suspected(&format!(
                "all clients may share one limit: {RUN} requests in a row had the same key, and \
                 {mistake}"
            ));
        }
        self.left.store(0, Relaxed);
    }
}
