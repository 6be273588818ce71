//! A table of what is remembered about keys, of at most `MAX` entries: a full one forgets what is
//! over and, if that is too little, every second of the others. It knows no decisions. Its times
//! are nanoseconds since the memory was made.

use std::{mem, ptr};

use hashbrown::HashTable;

use crate::keys::Key;

/// A key of a limiter.
#[derive(Clone)]
pub(super) struct LimiterKey<'a> {
    pub(super) hash: u64,
    /// Its address suffices to compare limiters: there is one copy of each name.
    pub(super) limiter: &'static str,
    pub(super) key: Key<'a>,
}

impl LimiterKey<'_> {
    pub(super) fn into_owned(self) -> LimiterKey<'static> {
        let Self { hash, limiter, key } = self;
        LimiterKey { hash, limiter, key: key.into_owned() }
    }

    fn is(&self, other: &LimiterKey<'_>) -> bool {
        self.key == other.key && ptr::eq(self.limiter, other.limiter)
    }
}

pub(super) struct Table<T, const MAX: usize> {
    entries: HashTable<Remembered<T>>,
}

pub(super) struct Remembered<T> {
    name: LimiterKey<'static>,
    end: u64,
    value: T,
}

impl<T, const MAX: usize> Default for Table<T, MAX> {
    fn default() -> Self {
        Self { entries: HashTable::new() }
    }
}

impl<T, const MAX: usize> Table<T, MAX> {
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn find(&self, name: &LimiterKey<'_>) -> Option<&T> {
        Some(&self.entries.find(name.hash, |entry| entry.name.is(name))?.value)
    }

    pub(super) fn remove(&mut self, name: &LimiterKey<'_>) {
        if let Ok(entry) = self.entries.find_entry(name.hash, |entry| entry.name.is(name)) {
            entry.remove();
        }
    }

    /// Remembers a value until an instant, in place of the one with its name.
    pub(super) fn insert(&mut self, name: &LimiterKey<'static>, value: T, end: u64, now: u64) {
        self.remove(name);
        if self.entries.len() == self.entries.capacity() {
            self.make_room(now);
        }
        let entry = Remembered { name: name.clone(), end, value };
        self.entries.insert_unique(name.hash, entry, |entry| entry.name.hash);
    }

    /// Makes a table of twice the size, or of the largest one with at least a quarter of it free:
    /// the old one can be full of what was removed, by which it would grow without bounds.
    #[cold]
    fn make_room(&mut self, now: u64) {
        let mut old = mem::take(&mut self.entries);
        old.retain(|entry| entry.end > now);
        self.entries = HashTable::with_capacity((2 * old.len()).clamp(8, MAX));
        let step = if old.len() > MAX / 4 * 3 { 2 } else { 1 };
        for entry in old.into_iter().step_by(step) {
            self.entries.insert_unique(entry.name.hash, entry, |entry| entry.name.hash);
        }
    }

    #[cfg(test)]
    pub(super) fn allocation_size(&self) -> usize {
        self.entries.allocation_size()
    }
}
