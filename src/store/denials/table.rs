//! A table of what is remembered about keys, of at most `MAX` entries: a full one forgets what is
//! over, or else any entry. It knows no decisions. Its times are nanoseconds since the memory was
//! made.

use hashbrown::HashTable;

use super::name::{LimiterKey, OwnedLimiterKey};

/// The time for which a full table is not searched for entries that are over: otherwise each
/// insertion into it would look at all of them.
const SEARCH_PAUSE: u64 = 1_000_000_000;

pub(super) struct Table<T, const MAX: usize> {
    entries: HashTable<Remembered<T>>,
    /// When it was searched last.
    searched: u64,
}

pub(super) struct Remembered<T> {
    name: OwnedLimiterKey,
    end: u64,
    value: T,
}

impl<T, const MAX: usize> Default for Table<T, MAX> {
    fn default() -> Self {
        Self { entries: HashTable::new(), searched: 0 }
    }
}

impl<T, const MAX: usize> Table<T, MAX> {
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn find(&self, name: LimiterKey<'_>) -> Option<&T> {
        Some(&self.entries.find(name.hash, |entry| entry.name.is(name))?.value)
    }

    pub(super) fn remove(&mut self, name: LimiterKey<'_>) {
        if let Ok(entry) = self.entries.find_entry(name.hash, |entry| entry.name.is(name)) {
            entry.remove();
        }
    }

    /// Remembers a value until an instant, in place of the one with its name.
    pub(super) fn insert(&mut self, name: &OwnedLimiterKey, value: T, end: u64, now: u64) {
        self.remove(name.borrowed());
        let Self { entries, searched } = self;
        if entries.len() == MAX && now >= *searched + SEARCH_PAUSE {
            entries.retain(|entry| entry.end > now);
            *searched = now;
        }
        if entries.len() == MAX {
            drop(entries.extract_if(|_| true).next());
        }
        let entry = Remembered { name: name.clone(), end, value };
        entries.insert_unique(name.hash, entry, |entry| entry.name.hash);
    }
}
