//! The blocks of keys that this process knows: those that it began, and those that it has found in
//! decisions of the store. Only requests that wait look for them, so one lock suffices.

use std::{ptr, sync::Mutex, time::Duration};

use hashbrown::HashTable;
use tokio::time::Instant;

use crate::{keys::Key, sync::lock};

/// More blocks are not remembered.
const MAX_BLOCKS: usize = 10_000;

/// The time for which a full table is not searched for blocks that are over.
const SEARCH_PAUSE: Duration = Duration::from_secs(1);

#[derive(Default)]
pub(super) struct Blocks(Mutex<Table>);

#[derive(Default)]
struct Table {
    blocks: HashTable<Block>,
    searched: Option<Instant>,
}

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
        let table = lock(&self.0);
        Some(table.blocks.find(hash, |block| block.is(limiter, key))?.until)
    }

    pub(super) fn insert(&self, hash: u64, limiter: &'static str, key: &Key<'_>, until: Instant) {
        let Table { blocks, searched } = &mut *lock(&self.0);
        if let Some(block) = blocks.find_mut(hash, |block| block.is(limiter, key)) {
            block.until = until;
            return;
        }
        let now = Instant::now();
        if blocks.len() == MAX_BLOCKS && searched.is_none_or(|at| now >= at + SEARCH_PAUSE) {
            blocks.retain(|block| block.until > now);
            *searched = Some(now);
        }
        if blocks.len() < MAX_BLOCKS {
            let block = Block { hash, limiter, key: key.clone().into_owned(), until };
            blocks.insert_unique(hash, block, |block| block.hash);
        }
    }

    pub(super) fn remove(&self, hash: u64, limiter: &'static str, key: &Key<'_>) {
        if let Ok(block) = lock(&self.0).blocks.find_entry(hash, |block| block.is(limiter, key)) {
            block.remove();
        }
    }
}
