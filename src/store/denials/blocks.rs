//! The blocks of keys that this process knows: those that it began, and those that it was denied by.
//! Only requests that wait look at them, so one lock suffices.

use std::{ptr, sync::Mutex};

use hashbrown::HashTable;
use tokio::time::Instant;

use crate::{keys::Key, sync::lock};

/// More blocks are not remembered.
const MAX_BLOCKS: usize = 10_000;

#[derive(Default)]
pub(super) struct Blocks(Mutex<HashTable<Block>>);

struct Block {
    hash: u64,
    limiter: &'static str,
    key: Key<'static>,
    until: Instant,
}

impl Block {
    fn is(&self, limiter: &'static str, key: &Key<'_>) -> bool {
        self.key.as_bytes() == key.as_bytes() && ptr::eq(self.limiter, limiter)
    }
}

impl Blocks {
    pub(super) fn find(&self, hash: u64, limiter: &'static str, key: &Key<'_>) -> Option<Instant> {
        let blocks = lock(&self.0);
        Some(blocks.find(hash, |block| block.is(limiter, key))?.until)
    }

    pub(super) fn insert(&self, hash: u64, limiter: &'static str, key: &Key<'_>, until: Instant) {
        let mut blocks = lock(&self.0);
        if let Some(block) = blocks.find_mut(hash, |block| block.is(limiter, key)) {
            block.until = until;
            return;
        }
        if blocks.len() == MAX_BLOCKS {
            let now = Instant::now();
            blocks.retain(|block| block.until > now);
        }
        if blocks.len() < MAX_BLOCKS {
            let block = Block { hash, limiter, key: key.clone().into_owned(), until };
            blocks.insert_unique(hash, block, |block| block.hash);
        }
    }

    pub(super) fn remove(&self, hash: u64, limiter: &'static str, key: &Key<'_>) {
        if let Ok(block) = lock(&self.0).find_entry(hash, |block| block.is(limiter, key)) {
            block.remove();
        }
    }
}
