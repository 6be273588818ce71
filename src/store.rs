//! Where the counts are kept.

mod memory;
#[cfg(feature = "redis")]
mod redis;

use std::{
    collections::HashSet,
    fmt,
    pin::Pin,
    sync::{Arc, Mutex, OnceLock, PoisonError},
    task::{Context, Poll},
};

pub use memory::MemoryStore;
#[cfg(feature = "redis")]
pub use redis::RedisStore;

use crate::{
    algorithm::{Action, Algorithm, Ask, Params},
    decision::Decision,
    error::StoreError,
    quota::Quota,
};

/// A place for counts: [`MemoryStore`], or `RedisStore` with the feature `redis`.
///
/// The trait is sealed: what a store must do will still grow.
pub trait Store: Backend + 'static {}

/// What a limiter asks of its store.
pub trait Backend: fmt::Debug + Send + Sync {
    /// Decides, and changes the counts, in one atomic step.
    fn call(&self, call: &Call<'_>) -> Answer<Decision>;

    /// Forgets a key.
    fn reset(&self, rule: &Rule, key: &str) -> Answer<()>;

    /// The names of the limiters over this store.
    fn names(&self) -> &Names;
}

/// A limiter's settings, as a store needs them.
#[derive(Debug)]
pub struct Rule {
    pub(crate) name: Arc<str>,
    pub(crate) algorithm: Algorithm,
    pub(crate) quota: Quota,
    pub(crate) params: Params,
    /// By which a server knows the script.
    pub(crate) script_hash: OnceLock<Box<str>>,
}

/// One question about one key.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    pub(crate) rule: &'a Rule,
    pub(crate) key: &'a str,
    pub(crate) action: Action,
    pub(crate) cost: u32,
    /// In microseconds.
    pub(crate) max_wait: f64,
}

impl Call<'_> {
    fn ask(&self, now: f64) -> Ask {
        Ask { action: self.action, cost: self.cost.into(), max_wait: self.max_wait, now }
    }
}

/// What a store answers: at once, if it can.
pub enum Answer<T> {
    /// The answer; `None` once it was taken.
    Ready(Option<Result<T, StoreError>>),
    /// The answer will come.
    Pending(Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send>>),
}

impl<T> Answer<T> {
    fn ready(result: Result<T, StoreError>) -> Self {
        Self::Ready(Some(result))
    }
}

impl<T: Unpin> Future for Answer<T> {
    type Output = Result<T, StoreError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.get_mut() {
            Self::Ready(result) => Poll::Ready(result.take().expect("polled after completion")),
            Self::Pending(future) => future.as_mut().poll(cx),
        }
    }
}

impl<T: fmt::Debug> fmt::Debug for Answer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ready(result) => f.debug_tuple("Ready").field(result).finish(),
            Self::Pending(_) => f.write_str("Pending"),
        }
    }
}

/// The names in use over one store, so that no two limiters share a count by accident.
#[derive(Clone, Debug, Default)]
pub struct Names(Arc<Mutex<HashSet<Arc<str>>>>);

impl Names {
    /// Takes `name` for as long as the result lives; `None` if it is taken.
    pub(crate) fn take(&self, name: &str) -> Option<Name> {
        let name: Arc<str> = name.into();
        let free = self.lock().insert(name.clone());
        free.then(|| Name { name, names: self.clone() })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashSet<Arc<str>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A name that is in use.
#[derive(Debug)]
pub(crate) struct Name {
    name: Arc<str>,
    names: Names,
}

impl Name {
    pub(crate) fn as_arc(&self) -> &Arc<str> {
        &self.name
    }
}

impl Drop for Name {
    fn drop(&mut self) {
        self.names.lock().remove(&self.name);
    }
}
