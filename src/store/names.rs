//! The names of the limiters over a store, and the queues of their requests that retry.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    fmt,
    sync::{Arc, Mutex},
};

use super::retry_queue::RetryQueues;
use crate::sync::lock;

/// The names in use over one store, so that no two limiters share a count by accident.
#[derive(Clone, Default)]
pub struct Names {
    scope: Arc<Scope>,
    scopes: Arc<Mutex<Scopes>>,
}

/// The named parts of a store. All handles that name one have the same.
type Scopes = BTreeMap<String, Arc<Scope>>;

#[derive(Default)]
struct Scope {
    text: String,
    taken: Mutex<HashSet<&'static str>>,
    retry_queues: Arc<RetryQueues>,
}

impl Names {
    /// Returns the names in another part of the same store.
    #[cfg(feature = "redis")]
    pub(super) fn scoped(&self, text: &str) -> Self {
        let new = || Arc::new(Scope { text: text.to_owned(), ..Scope::default() });
        let scope = lock(&self.scopes).entry(text.to_owned()).or_insert_with(new).clone();
        Self { scope, scopes: self.scopes.clone() }
    }

    /// Takes `name` for as long as the result lives; `None` if it is taken.
    pub(crate) fn take(&self, name: &str) -> Option<Name> {
        let text = interned(&self.scope.text, name);
        let free = lock(&self.scope.taken).insert(text);
        free.then(|| Name { text, scope: self.scope.clone() })
    }

    /// Returns the queues of the requests that retry over the store.
    pub(crate) fn retry_queues(&self) -> &Arc<RetryQueues> {
        &self.scope.retry_queues
    }

    /// Returns whether these are the names of the same store.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.scope, &other.scope)
    }
}

impl fmt::Debug for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Names").field("scope", &self.scope.text).finish_non_exhaustive()
    }
}

/// A name that is in use.
pub(crate) struct Name {
    pub(crate) text: &'static str,
    scope: Arc<Scope>,
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Name").field(&self.text).finish()
    }
}

impl Drop for Name {
    fn drop(&mut self) {
        lock(&self.scope.taken).remove(self.text);
    }
}

/// Returns the one copy of a name in a scope. Decisions hold it without a count of references, and
/// its address distinguishes it from other names, and from the same name in another scope.
fn interned(scope: &str, name: &str) -> &'static str {
    static ALL: Mutex<BTreeMap<String, BTreeSet<&'static str>>> = Mutex::new(BTreeMap::new());
    let mut all = lock(&ALL);
    let names = all.entry(scope.to_owned()).or_default();
    if let Some(known) = names.get(name) {
        return known;
    }
    let name = String::from(name).leak();
    names.insert(name);
    name
}
