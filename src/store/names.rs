//! The names of the limiters over a store, and the queues of their requests that retry.

use std::{
    collections::{BTreeSet, HashSet},
    fmt,
    sync::{Arc, Mutex},
};

use super::retry_queue::RetryQueues;
use crate::sync::lock;

/// The names in use over one store, so that no two limiters share a count by accident.
#[derive(Clone, Default)]
pub struct Names {
    taken: Arc<Mutex<HashSet<String>>>,
    scope: Arc<str>,
    retry_queues: Arc<RetryQueues>,
}

impl Names {
    /// Returns the names in another part of the same store.
    #[cfg(feature = "redis")]
    pub(super) fn scoped(&self, scope: &str) -> Self {
        Self { taken: self.taken.clone(), scope: scope.into(), ..Self::default() }
    }

    /// Takes `name` for as long as the result lives; `None` if it is taken.
    pub(crate) fn take(&self, name: &str) -> Option<Name> {
        let scoped = [&self.scope, ":", name].concat();
        let free = lock(&self.taken).insert(scoped.clone());
        free.then(|| Name { text: interned(name), scoped, names: self.clone() })
    }

    /// Returns the queues of the requests that retry over the store.
    pub(crate) fn retry_queues(&self) -> &Arc<RetryQueues> {
        &self.retry_queues
    }

    /// Returns whether these are the names of the same store.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.taken, &other.taken) && self.scope == other.scope
    }
}

impl fmt::Debug for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Names").field("scope", &self.scope).finish_non_exhaustive()
    }
}

/// A name that is in use.
#[derive(Debug)]
pub(crate) struct Name {
    pub(crate) text: &'static str,
    scoped: String,
    names: Names,
}

impl Drop for Name {
    fn drop(&mut self) {
        lock(&self.names.taken).remove(&self.scoped);
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
