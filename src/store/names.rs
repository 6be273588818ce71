//! The names of the limiters over a store, and the lines of their requests that wait.

use std::{
    collections::{BTreeSet, HashSet},
    fmt,
    sync::{Arc, Mutex},
};

use super::{bookings::Bookings, lines::Lines};
use crate::sync::lock;

/// The names in use over one store, so that no two limiters share a count by accident.
#[derive(Clone, Default)]
pub struct Names(Arc<Shared>);

#[derive(Default)]
struct Shared {
    taken: Mutex<HashSet<&'static str>>,
    lines: Arc<Lines>,
    bookings: Arc<Bookings>,
}

impl Names {
    /// Takes `name` for as long as the result lives; `None` if it is taken.
    pub(crate) fn take(&self, name: &str) -> Option<Name> {
        let text = interned(name);
        let free = lock(&self.0.taken).insert(text);
        free.then(|| Name { text, names: self.clone() })
    }

    /// Returns the text of a name for as long as the process runs, without taking it.
    #[cfg(feature = "serde")]
    pub(crate) fn text_of(name: &str) -> &'static str {
        interned(name)
    }

    /// Returns the lines of the requests that wait over the store.
    pub(crate) fn lines(&self) -> &Arc<Lines> {
        &self.0.lines
    }

    /// Returns the reserved instants of the requests that wait for them.
    pub(crate) fn bookings(&self) -> &Arc<Bookings> {
        &self.0.bookings
    }

    /// Returns whether these are the names of the same store.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Debug for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Names").field("taken", &self.0.taken).finish_non_exhaustive()
    }
}

/// A name that is in use.
#[derive(Debug)]
pub(crate) struct Name {
    pub(crate) text: &'static str,
    names: Names,
}

impl Drop for Name {
    fn drop(&mut self) {
        lock(&self.names.0.taken).remove(self.text);
    }
}

/// Returns the one copy of a name. Decisions hold it without a count of references, and its address
/// distinguishes it from others.
fn interned(name: &str) -> &'static str {
    static ALL: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    let mut all = lock(&ALL);
    if let Some(known) = all.get(name) {
        return known;
    }
    let name = String::from(name).leak();
    all.insert(name);
    name
}
