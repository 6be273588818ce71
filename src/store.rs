//! Where the counts are kept.

pub(crate) mod error;
mod memory;
#[cfg(feature = "redis")]
mod redis;

use std::{
    collections::{BTreeSet, HashSet},
    fmt,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    task::{Context, Poll, Waker},
};

pub use error::StoreError;
pub use memory::{MemoryStore, WhenFull};
#[cfg(feature = "redis")]
pub(crate) use redis::Deadline;
#[cfg(feature = "tls-rustls")]
pub use redis::Tls;
#[cfg(all(test, feature = "redis"))]
pub(crate) use redis::script;
#[cfg(feature = "redis")]
pub use redis::{Health, RedisConfig, RedisStore};

use crate::{
    algorithm::{Action, Algorithm, EngineRequest, Params, Release},
    decision::{Decision, Policy, Source},
    error::Error,
    keys::Key,
    limiter::RetryQueues,
    quota::Quota,
};

/// A place for counts: [`MemoryStore`], or `RedisStore` with the feature `redis`.
///
/// The trait is sealed: what a store must do will still grow.
pub trait Store: Into<AnyStore> + fmt::Debug + Send + Sync + 'static {}

/// A store of any kind.
#[derive(Clone, Debug)]
pub enum AnyStore {
    /// In the memory of the process.
    Memory(MemoryStore),
    /// In Redis.
    #[cfg(feature = "redis")]
    Redis(RedisStore),
}

impl AnyStore {
    /// Decides, and changes the counts, in one atomic step.
    pub(crate) fn call(&self, call: &Call<'_>) -> Answer<Decision> {
        match self {
            Self::Memory(store) => Answer::ready(store.decide(call)),
            #[cfg(feature = "redis")]
            Self::Redis(store) => store.call(call),
        }
    }

    /// Runs a task that no caller waits for.
    pub(crate) fn spawn_background(&self, mut task: Pin<Box<dyn Future<Output = ()> + Send>>) {
        match self {
            // Its answers are ready at once.
            Self::Memory(_) => drop(task.as_mut().poll(&mut Context::from_waker(Waker::noop()))),
            #[cfg(feature = "redis")]
            Self::Redis(store) => store.spawn_background(task),
        }
    }

    /// Returns units that requests of a key have spent or reserved.
    pub(crate) fn release(
        &self,
        settings: &Arc<Settings>,
        key: &Key<'_>,
        release: Release,
    ) -> Answer<()> {
        match self {
            Self::Memory(store) => {
                store.release(settings, key, &[release]);
                Answer::ready(Ok(()))
            }
            #[cfg(feature = "redis")]
            Self::Redis(store) => store.release(settings, key, release),
        }
    }

    /// Returns units in the background, as far as that is possible.
    pub(crate) fn release_later(&self, settings: &Arc<Settings>, key: &Key<'_>, release: Release) {
        match self {
            Self::Memory(store) => store.release(settings, key, &[release]),
            #[cfg(feature = "redis")]
            Self::Redis(store) => store.release_later(settings, key, release),
        }
    }

    /// Forgets a key.
    pub(crate) fn reset(&self, settings: &Arc<Settings>, key: &Key<'_>) -> Answer<()> {
        match self {
            Self::Memory(store) => {
                store.reset(settings, key);
                Answer::ready(Ok(()))
            }
            #[cfg(feature = "redis")]
            Self::Redis(store) => store.reset(settings, key),
        }
    }

    /// The names of the limiters over this store.
    pub(crate) fn names(&self) -> &Names {
        match self {
            Self::Memory(store) => store.names(),
            #[cfg(feature = "redis")]
            Self::Redis(store) => store.names(),
        }
    }
}

/// A limiter's settings, as a store needs them.
#[derive(Debug)]
pub struct Settings {
    pub(crate) name: &'static str,
    pub(crate) algorithm: Algorithm,
    pub(crate) quota: Quota,
    pub(crate) params: Params,
    pub(crate) source: Source,
}

impl Settings {
    pub(crate) fn policy(&self, cost: u32) -> Policy {
        let Self { name, quota, source, .. } = *self;
        Policy { limiter: name, quota, cost, source }
    }
}

/// One question about a key, or about several limits, which then are of one mind.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    pub(crate) action: Action,
    pub(crate) demands: &'a [Demand<'a>],
}

/// What is asked of one limit.
#[derive(Clone, Copy, Debug)]
pub struct Demand<'a> {
    pub(crate) settings: &'a Arc<Settings>,
    pub(crate) key: &'a Key<'a>,
    pub(crate) cost: u32,
    /// In microseconds.
    pub(crate) max_wait: f64,
}

impl Demand<'_> {
    /// Whether both are counted in one place.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.settings.name == other.settings.name && self.key == other.key
    }

    fn policy(&self) -> Policy {
        self.settings.policy(self.cost)
    }
}

impl Call<'_> {
    fn ask(&self, demand: &Demand<'_>, now: f64) -> EngineRequest {
        let Demand { cost, max_wait, .. } = *demand;
        EngineRequest { action: self.action, cost: cost.into(), max_wait, now, admission: None }
    }
}

/// What a store answers: at once, if it can.
pub enum Answer<T> {
    /// The answer; `None` once it was taken.
    Ready(Option<Result<T, Error>>),
    /// The answer will come.
    #[cfg_attr(not(feature = "redis"), allow(dead_code))]
    Pending(Pin<Box<dyn Future<Output = Result<T, Error>> + Send>>),
}

impl<T> Answer<T> {
    pub(crate) fn ready(result: Result<T, Error>) -> Self {
        Self::Ready(Some(result))
    }
}

impl<T> Answer<T> {
    /// The answer, if it is there already, and not an error.
    pub(crate) fn now(&self) -> Option<&T> {
        match self {
            Self::Ready(Some(Ok(answer))) => Some(answer),
            _ => None,
        }
    }
}

impl<T: Unpin> Future for Answer<T> {
    type Output = Result<T, Error>;

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

/// Locks, also after a panic elsewhere: what is behind these locks is whole at every step.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The names in use over one store, so that no two limiters share a count by accident.
#[derive(Clone, Debug, Default)]
pub struct Names {
    taken: Arc<Mutex<HashSet<String>>>,
    scope: Arc<str>,
    /// Takes the place of the store when it gives no answer.
    local: Arc<OnceLock<MemoryStore>>,
    retry_queues: Arc<RetryQueues>,
}

impl Names {
    /// The names in another part of the same store.
    #[cfg(feature = "redis")]
    fn scoped(&self, scope: &str) -> Self {
        Self { taken: self.taken.clone(), scope: scope.into(), ..Self::default() }
    }

    /// Takes `name` for as long as the result lives; `None` if it is taken.
    pub(crate) fn take(&self, name: &str) -> Option<Name> {
        let scoped = [&self.scope, ":", name].concat();
        let free = lock(&self.taken).insert(scoped.clone());
        free.then(|| Name { text: interned(name), scoped, names: self.clone() })
    }

    pub(crate) fn local(&self) -> &MemoryStore {
        self.local.get_or_init(MemoryStore::new)
    }

    pub(crate) fn retry_queues(&self) -> &Arc<RetryQueues> {
        &self.retry_queues
    }

    /// Whether these are the names of one and the same store.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.taken, &other.taken) && self.scope == other.scope
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

/// The one copy of a name: a decision can hold it for nothing, and its address tells it from others.
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
