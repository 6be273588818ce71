//! A request to a store, and the future of its answer.

use std::{
    fmt,
    pin::Pin,
    sync::{Arc, Mutex, OnceLock, Weak},
    task::{Context, Poll},
    time::Duration,
};

#[cfg(feature = "redis")]
use std::task::ready;

#[cfg(feature = "redis")]
use tokio::task::coop;

use crate::{
    algorithm::{Action, Algorithm, EngineRequest, Kind, Params, units},
    decision::{Decision, Limit, Policy, Source},
    error::{ConfigError, Error},
    keys::Key,
    observe::Observers,
    quota::Quota,
    sync::{POLLED, fill, lock},
};

/// The settings of a limiter, as a store needs them.
#[derive(Debug)]
pub struct Settings {
    pub(crate) name: &'static str,
    pub(crate) algorithm: Algorithm,
    pub(crate) quota: Quota,
    pub(crate) params: Params,
    /// What decisions say of the settings.
    pub(crate) limit: &'static Limit,
    own_quota: Option<Quota>,
    pub(crate) source: Source,
    /// Set by the first change of the limiter. A counted reference would keep itself alive.
    changes: OnceLock<Weak<LatestSettings>>,
}

/// The latest settings of a limiter with each algorithm that it has had; none before a change.
#[derive(Debug, Default)]
pub(crate) struct LatestSettings(Mutex<Vec<Arc<Settings>>>);

impl LatestSettings {
    /// Lets settings find the latest ones, before anything else finds them.
    pub(crate) fn link(self: &Arc<Self>, settings: &Settings) {
        settings.changes.get_or_init(|| Arc::downgrade(self));
    }

    /// Makes one change at a time. It returns the settings before and after, if they differ, which
    /// it has linked.
    pub(crate) fn update<E>(
        self: &Arc<Self>,
        change: impl FnOnce() -> Result<Option<[Arc<Settings>; 2]>, E>,
    ) -> Result<Option<[Arc<Settings>; 2]>, E> {
        let all = &mut *lock(&self.0);
        let changed = change()?;
        for settings in changed.iter().flatten() {
            all.retain(|other| other.params.kind() != settings.params.kind());
            all.push(settings.clone());
        }
        Ok(changed)
    }
}

impl Settings {
    /// Returns settings with parameters of the algorithm and the quota.
    pub(crate) fn new(
        name: &'static str,
        algorithm: Algorithm,
        quota: Quota,
        params: Params,
        source: Source,
    ) -> Self {
        let limit = Limit::of(name, quota);
        let own_quota = limit.other(&quota).copied();
        let changes = OnceLock::new();
        Self { name, algorithm, quota, params, limit, own_quota, source, changes }
    }

    /// Returns settings of the same limiter with another algorithm and quota.
    pub(crate) fn changed(&self, algorithm: Algorithm, quota: Quota) -> Result<Self, ConfigError> {
        let params = Params::new(algorithm, quota)?;
        Ok(Self::new(self.name, algorithm, quota, params, self.source))
    }

    /// Returns the latest settings of the limiter with this algorithm: with others, a change of a
    /// hold would undo a change of the quota.
    pub(crate) fn latest(self: &Arc<Self>, algorithm: Kind) -> Arc<Self> {
        let latest = self.changes.get().and_then(Weak::upgrade).and_then(|latest| {
            lock(&latest.0).iter().find(|other| other.params.kind() == algorithm).cloned()
        });
        latest.unwrap_or_else(|| self.clone())
    }

    #[inline]
    pub(crate) fn policy(&self, cost: u64) -> Policy<'_> {
        let Self { limit, source, .. } = *self;
        let (algorithm, own_quota) = (Some(self.params.kind()), self.own_quota.as_ref());
        Policy { limit, algorithm, own_quota, cost, source }
    }
}

/// A request to one limit, or to several, which admit it all or none.
///
/// It borrows: a decision in memory copies no key, and counts no reference to settings that all
/// threads share.
#[derive(Clone, Copy, Debug)]
pub struct StoreRequest<'a> {
    pub(crate) action: Action,
    pub(crate) limits: &'a [LimitRequest<'a>],
    pub(crate) reporting: Reporting,
    /// Whether the decision says what is left of each of several limits, which takes an allocation.
    pub(crate) counts: bool,
}

/// The answers to a request that are reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reporting {
    /// None: the call is no request, such as the spending of what a vendor has counted.
    Nothing,
    Each,
    /// The answer that ends the request. After a denial because of held units, it waits for them
    /// and checks again.
    Last,
}

impl Reporting {
    /// Returns what is reported of a request that waits for held units, or does not.
    #[inline]
    pub(crate) fn of_waiting(waits_for_holds: bool) -> Self {
        if waits_for_holds { Self::Last } else { Self::Each }
    }

    /// Returns whether a decision is reported.
    pub(crate) fn includes(self, decision: &Decision) -> bool {
        match self {
            Self::Nothing => false,
            Self::Each => true,
            Self::Last => !decision.waits_for_holds(),
        }
    }
}

/// The part of a request that concerns one limit.
#[derive(Clone, Copy, Debug)]
pub struct LimitRequest<'a> {
    pub(crate) settings: &'a Arc<Settings>,
    /// The observers of the limiter.
    pub(crate) observers: &'a Observers,
    pub(crate) key: &'a Key<'a>,
    pub(crate) cost: u64,
    /// In microseconds.
    pub(crate) max_wait: u64,
    /// The lifetime of the hold, if a check holds the units instead of spending them.
    pub(crate) hold: Option<Duration>,
}

impl<'a> LimitRequest<'a> {
    /// Returns whether both are counted in one place.
    pub(crate) fn is_same_limit(&self, other: &LimitRequest<'_>) -> bool {
        self.settings.name == other.settings.name && self.key == other.key
    }

    /// Returns whether the units have to be returned if the caller does not take the answer: the
    /// request can get a reservation, or holds units.
    #[cfg(feature = "redis")]
    pub(crate) fn is_returned(&self) -> bool {
        self.max_wait > 0 || self.hold.is_some()
    }

    /// Copies the limit for a call that can outlive the request.
    #[cfg(feature = "redis")]
    pub(crate) fn kept(&self) -> KeptLimit {
        let Self { settings, observers, key, cost, max_wait, hold } = *self;
        let (settings, observers, key) =
            (settings.clone(), observers.clone(), key.clone().into_owned());
        KeptLimit { settings, observers, key, cost, max_wait, hold }
    }

    /// Calls a function that is not inlined with a copy of a request to this limit: the request
    /// itself stays in registers.
    #[inline(always)]
    pub(crate) fn copied<R>(
        &self,
        request: &StoreRequest<'_>,
        call: impl FnOnce(&StoreRequest<'_>, &LimitRequest<'_>) -> R,
    ) -> R {
        let limits = [*self];
        call(&StoreRequest { limits: &limits, ..*request }, &limits[0])
    }

    #[inline]
    pub(crate) fn policy(&self) -> Policy<'a> {
        self.settings.policy(self.cost)
    }
}

/// A [`LimitRequest`] that outlives its request.
#[cfg(feature = "redis")]
#[derive(Debug)]
pub(crate) struct KeptLimit {
    settings: Arc<Settings>,
    observers: Observers,
    key: Key<'static>,
    cost: u64,
    max_wait: u64,
    hold: Option<Duration>,
}

#[cfg(feature = "redis")]
impl KeptLimit {
    pub(crate) fn request(&self) -> LimitRequest<'_> {
        let Self { settings, observers, key, cost, max_wait, hold } = self;
        let (cost, max_wait, hold) = (*cost, *max_wait, *hold);
        LimitRequest { settings, observers, key, cost, max_wait, hold }
    }
}

impl<'a> StoreRequest<'a> {
    /// Returns a request to one limit or several, without the counts of each limit.
    #[inline]
    pub(crate) fn new(
        action: Action,
        limits: &'a [LimitRequest<'a>],
        reporting: Reporting,
    ) -> Self {
        Self { action, limits, reporting, counts: false }
    }

    /// Returns the request to the engine.
    #[inline(always)]
    pub(crate) fn to_engine(
        self,
        limit: &LimitRequest<'_>,
        now: i64,
        action: Action,
    ) -> EngineRequest {
        EngineRequest {
            action,
            cost: units(limit.cost),
            max_wait: limit.max_wait as i64,
            now,
            admission: None,
            blocked: 0,
        }
    }
}

/// The answer of a store: immediate, if it can be.
pub enum StoreFuture<T> {
    /// The answer; `None` once it was taken.
    Ready(Option<Result<T, Error>>),
    /// A remembered answer; `None` once it was taken. It takes part in the cooperative budget of
    /// tokio, so that a task that checks in a loop yields, as it would if Redis answered.
    #[cfg(feature = "redis")]
    Cached(Option<T>),
    /// The answer will come.
    Pending(Pin<Box<dyn Future<Output = Result<T, Error>> + Send>>),
}

impl<T> StoreFuture<T> {
    #[inline]
    pub(crate) fn ready(result: Result<T, Error>) -> Self {
        Self::Ready(Some(result))
    }

    pub(crate) fn pending(answer: impl Future<Output = Result<T, Error>> + Send + 'static) -> Self {
        Self::Pending(Box::pin(answer))
    }

    #[cfg(feature = "redis")]
    pub(crate) fn cached(answer: T) -> Self {
        Self::Cached(Some(answer))
    }

    /// Returns the answer or the error, if it is there.
    pub(super) fn arrived(&self) -> Option<Result<&T, &Error>> {
        match self {
            Self::Ready(result) => result.as_ref().map(Result::as_ref),
            #[cfg(feature = "redis")]
            Self::Cached(answer) => answer.as_ref().map(Ok),
            Self::Pending(_) => None,
        }
    }

    /// Returns the answer, if it is immediate and not an error.
    #[inline]
    pub(crate) fn now(&self) -> Option<&T> {
        match self {
            Self::Ready(Some(Ok(answer))) => Some(answer),
            _ => None,
        }
    }

    /// Returns the answer, if it is immediate and not an error, else itself.
    #[inline]
    pub(crate) fn at_once(self) -> Result<T, Self> {
        match self {
            Self::Ready(Some(Ok(answer))) => Ok(answer),
            later => Err(later),
        }
    }

    /// Puts an answer that is immediate and not an error into an empty place, else returns itself.
    #[inline]
    pub(crate) fn put_in(self, place: &mut Option<T>) -> Option<Self> {
        self.at_once().map(|answer| fill(place, answer)).err()
    }
}

impl<T> From<T> for StoreFuture<T> {
    #[inline(always)]
    fn from(answer: T) -> Self {
        Self::Ready(Some(Ok(answer)))
    }
}

impl<T: Unpin> Future for StoreFuture<T> {
    type Output = Result<T, Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.get_mut() {
            Self::Ready(result) => Poll::Ready(result.take().expect(POLLED)),
            #[cfg(feature = "redis")]
            Self::Cached(answer) => {
                ready!(coop::poll_proceed(cx)).made_progress();
                Poll::Ready(Ok(answer.take().expect(POLLED)))
            }
            Self::Pending(answer) => answer.as_mut().poll(cx),
        }
    }
}

impl<T: fmt::Debug> fmt::Debug for StoreFuture<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ready(result) => f.debug_tuple("Ready").field(result).finish(),
            #[cfg(feature = "redis")]
            Self::Cached(answer) => f.debug_tuple("Cached").field(answer).finish(),
            Self::Pending(_) => f.write_str("Pending"),
        }
    }
}
