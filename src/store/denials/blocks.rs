//! The blocks of keys that this process knows: those that it began, and those that it has found in
//! decisions of the store. It knows no decisions.

use std::time::Duration;

use hashbrown::HashTable;
use tokio::time::Instant;

use super::name::{LimiterKey, OwnedLimiterKey};

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

pub(super) struct Block {
    name: OwnedLimiterKey,
    pub(super) until: Instant,
    /// The value of `Blocks::found` when the block was last found. A decision that was sent before
    /// may be older than the block.
    pub(super) found: u64,
}

impl Blocks {
    pub(super) fn find(&self, name: LimiterKey<'_>) -> Option<&Block> {
        if self.table.is_empty() {
            return None;
        }
        self.table.find(name.hash, |block| block.name.is(name))
    }

    pub(super) fn insert(&mut self, name: &OwnedLimiterKey, until: Instant) {
        let Self { table, searched, found } = self;
        *found += 1;
        let block = Block { name: name.clone(), until, found: *found };
        if let Some(known) = table.find_mut(name.hash, |it| it.name.is(name.borrowed())) {
            *known = block;
            return;
        }
        let now = Instant::now();
        if table.len() == MAX_BLOCKS && searched.is_none_or(|at| now >= at + SEARCH_PAUSE) {
            table.retain(|block| block.until > now);
            *searched = Some(now);
        }
        if table.len() < MAX_BLOCKS {
            table.insert_unique(name.hash, block, |block| block.name.hash);
        }
    }

    pub(super) fn remove(&mut self, name: LimiterKey<'_>) {
        if let Ok(block) = self.table.find_entry(name.hash, |block| block.name.is(name)) {
            block.remove();
        }
    }
}
