//! The blocks of keys that this process knows: those that it began, and those that it has found in
//! decisions of the store. It knows no decisions.

use std::{ptr, time::Duration};

use hashbrown::HashTable;
use tokio::time::Instant;

use crate::keys::Key;

/// More blocks of a part of the keys are not remembered: a request that waits then finds the block
/// by a call. With 64 parts, the process remembers up to 16,384 blocks.
const MAX_BLOCKS: usize = 256;

/// The time for which a full table is not searched for blocks that are over: otherwise each
/// insertion into a full table would look at 256 blocks.
const SEARCH_PAUSE: Duration = Duration::from_secs(1);

/// The blocks of a part of the keys.
#[derive(Default)]
pub(super) struct Blocks {
    table: HashTable<Block>,
    searched: Option<Instant>,
    /// The number of times that a block was found.
    found: u64,
}

#[derive(Debug)]
pub(super) struct Block {
    hash: u64,
    limiter: &'static str,
    key: Key<'static>,
    pub(super) until: Instant,
    /// The value of `Blocks::found` when the block was last found. A decision that was sent before
    /// may be older than the block.
    pub(super) found: u64,
}

impl Block {
    fn is(&self, limiter: &'static str, key: &Key<'_>) -> bool {
        self.key.as_bytes() == key.as_bytes() && ptr::eq(self.limiter, limiter)
    }
}

impl Blocks {
    pub(super) fn find(&self, hash: u64, limiter: &'static str, key: &Key<'_>) -> Option<&Block> {
        if self.table.is_empty() {
            return None;
        }
        self.table.find(hash, |block| block.is(limiter, key))
    }

    pub(super) fn insert(
        &mut self,
        hash: u64,
        limiter: &'static str,
        key: &Key<'_>,
        until: Instant,
    ) {
        self.found += 1;
        let found = self.found;
        if let Some(block) = self.table.find_mut(hash, |block| block.is(limiter, key)) {
            (block.until, block.found) = (until, found);
            return;
        }
        let now = Instant::now();
        let Self { table, searched, .. } = self;
        if table.len() == MAX_BLOCKS && searched.is_none_or(|at| now >= at + SEARCH_PAUSE) {
            table.retain(|block| block.until > now);
            *searched = Some(now);
        }
        if table.len() < MAX_BLOCKS {
            let block = Block { hash, limiter, key: key.clone().into_owned(), until, found };
            table.insert_unique(hash, block, |block| block.hash);
        }
    }

    pub(super) fn remove(&mut self, hash: u64, limiter: &'static str, key: &Key<'_>) {
        if let Ok(block) = self.table.find_entry(hash, |block| block.is(limiter, key)) {
            block.remove();
        }
    }
}
