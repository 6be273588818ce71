//! Stores, which keep the counts: in memory or in Redis, chosen in the code or, by [`connect`], at
//! run time.

// The trait `StoreCalls` is the one door to all of them.

mod bookings;
mod calls;
mod connect;
#[cfg(feature = "redis")]
mod denials;
mod health;
mod hold;
mod lines;
mod memory;
mod names;
#[cfg(feature = "redis")]
#[cfg_attr(not(feature = "redisson"), allow(dead_code, reason = "runs commands of other formats"))]
mod redis;
mod request;
#[cfg(feature = "redis")]
mod tally;
mod turns;

use std::{
    fmt, mem,
    pin::Pin,
    sync::Arc,
    time::{self, Duration},
};

#[cfg(feature = "redis")]
pub(crate) use self::health::Status;
pub(crate) use self::names::Name;
#[cfg(feature = "redis")]
#[doc(inline)]
pub use self::redis::Credentials;
#[cfg(feature = "redisson")]
pub(crate) use self::redis::Deadline;
#[cfg(feature = "redis")]
pub use self::redis::{KeyScan, RedisConfig, RedisStore};
#[cfg(feature = "redis")]
pub(crate) use self::request::KeptLimit;
pub(crate) use self::{
    bookings::{Booking, BookingGroup, Bookings, Offer},
    calls::StoreCalls,
    hold::{EndedHold, HoldGuard, RenewableHold},
    lines::{DueCheck, LineLimit, LinePlace, LineStep, Lines, NextCheck, Pace, Refusal, after},
    names::Names,
    request::{LatestSettings, LimitRequest, Reporting, Settings, StoreFuture, StoreRequest},
    seal::Sealed,
    turns::yield_time,
};
pub use self::{
    connect::{connect, lazy},
    health::Health,
    memory::{MemoryStore, WhenFull},
};
use crate::{
    algorithm::Action,
    decision::{Decision, Outcome},
    error::Error,
    keys::Key,
    observe::{Event, Observer, Observers, log},
};
pub use crate::{
    decision::{KeyState, Source},
    error::{ErrorKind, StoreError},
};

/// A call or a task without a result, which is ready when it is done or given up.
pub(crate) type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The result of a ping.
pub(crate) type Ping = Pin<Box<dyn Future<Output = Result<(), StoreError>> + Send>>;

/// A store for counts: [`MemoryStore`], `RedisStore` with the feature `redis`, or [`AnyStore`].
///
/// Sealed: no other crate can implement it.
///
/// # Examples
///
/// ```
/// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, store::Store};
///
/// fn limiters(store: impl Store + Clone) -> [Limiter; 2] {
///     let limiter = |name, quota| {
///         Limiter::new(name, store.clone(), Algorithm::token_bucket(), quota)
///     };
///     [limiter("free", Quota::per_minute(10)), limiter("pro", Quota::per_minute(100))]
/// }
/// let [free, _pro] = limiters(MemoryStore::new());
/// assert_eq!(free.name(), "free");
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a store for counts",
    label = "not a store",
    note = "use `MemoryStore`, or `RedisStore` with the feature `redis`; pass a clone to use a \
            store again, as clones share their counts"
)]
pub trait Store: Sealed + fmt::Debug + Send + Sync + 'static {
    /// Returns the store as an [`AnyStore`]: for a field, or to call `health`, `flush` or
    /// `add_observer` in code that is generic over stores.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{MemoryStore, store::{AnyStore, Store}};
    ///
    /// let store: AnyStore = MemoryStore::new().into_any();
    /// assert!(store.health().is_available);
    /// ```
    fn into_any(self) -> AnyStore
    where
        Self: Sized;
}

impl Sealed for AnyStore {}

impl AnyStore {
    /// Decides. Calls `done` with an outcome that is there at once, as for most checks in memory,
    /// else `later` with the answer. So the outcome stays in registers until the caller has taken
    /// what it needs.
    #[inline(always)]
    pub(crate) fn decide_then<R>(
        &self,
        request: &StoreRequest<'_>,
        done: impl FnOnce(Outcome) -> R,
        later: impl FnOnce(StoreFuture<Outcome>) -> R,
    ) -> R {
        let [limit] = request.limits else { return later(self.decide(request)) };
        let answer = match self {
            Self::Memory(store) => match store.decide_alone(request, limit) {
                Ok(outcome) if is_reported(request, outcome.decision.is_allowed()) => {
                    limit.copied(request, |request, _| {
                        report_arrived(request, Ok(&outcome.decision));
                    });
                    return done(outcome);
                }
                Ok(outcome) => return done(outcome),
                Err(error) => limit.copied(request, |request, _| {
                    let mut answer = StoreFuture::ready(Err(error.into()));
                    report(request, &mut answer);
                    answer
                }),
            },
            Self::Dyn(_) => limit.copied(request, |request, _| self.decide(request)),
        };
        later(answer)
    }

    /// Decides, and reports the answer.
    pub(crate) fn decide(&self, request: &StoreRequest<'_>) -> StoreFuture<Outcome> {
        let mut answer = match self {
            Self::Memory(store) => store.decide(request),
            Self::Dyn(store) => store.decide(request),
        };
        report(request, &mut answer);
        answer
    }

    /// See [`StoreCalls::keep_hold`].
    #[inline]
    pub(crate) fn keep_hold(&self, hold: &dyn Fn() -> RenewableHold) -> Option<Box<dyn HoldGuard>> {
        match self {
            Self::Memory(store) => store.keep_hold(hold),
            Self::Dyn(store) => store.keep_hold(hold),
        }
    }

    /// See [`StoreCalls::end_hold`].
    #[inline]
    pub(crate) fn end_hold(&self, hold: &EndedHold<'_>) {
        match self {
            Self::Memory(store) => store.end_hold(hold),
            Self::Dyn(store) => store.end_hold(hold),
        }
    }

    /// See [`StoreCalls::names`].
    #[inline]
    pub(crate) fn names(&self) -> &Names {
        match self {
            Self::Memory(store) => store.names(),
            Self::Dyn(store) => store.names(),
        }
    }
}

impl Store for AnyStore {
    fn into_any(self) -> AnyStore {
        self
    }
}

mod seal {
    /// The seal of [`Store`](super::Store): only the stores of this crate implement it.
    pub trait Sealed {}
}

/// A store that a URL chooses at run time: in memory for tests, in Redis in production.
///
/// # Examples
///
/// ```
/// use tower_ratelimit::{Algorithm, Limiter, Quota, store};
///
/// let store = store::lazy("memory:")?; // or redis://127.0.0.1/?prefix=shop
/// let limiter = Limiter::new("api", store, Algorithm::token_bucket(), Quota::per_second(10));
/// # let _ = limiter;
/// # Ok::<(), tower_ratelimit::store::StoreError>(())
/// ```
///
/// # Methods
///
/// | to | call |
/// |---|---|
/// | make one, and prove that it can decide | [`connect`] |
/// | make one although Redis is down | [`lazy`] |
/// | see the state of the store | [`health`](AnyStore::health), [`ping`](AnyStore::ping) |
/// | observe decisions | [`add_observer`](AnyStore::add_observer) |
/// | shut down | [`flush`](AnyStore::flush) |
///
/// # Details
///
/// Use it as the type of fields and arguments; clones share its counts. Use [`RedisStore`] to
/// [scan](RedisStore::scan) keys, and for settings that no URL has.
// A decision in memory needs no dynamic call.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum AnyStore {
    /// In the memory of the process.
    Memory(MemoryStore),
    /// Another store.
    #[doc(hidden)]
    Dyn(Arc<dyn StoreCalls>),
}

impl AnyStore {
    /// Returns the store of a limiter for which none was chosen.
    pub(crate) fn of_process() -> Self {
        Self::Memory(MemoryStore::new())
    }

    /// Returns whether every call is done when it returns, a release in the background too.
    #[inline]
    pub(crate) fn is_immediate(&self) -> bool {
        matches!(self, Self::Memory(_))
    }

    /// Proves that the store can decide: see [`RedisStore::ping`]. A store in memory always can.
    ///
    /// # Errors
    ///
    /// If Redis cannot decide. Print the error with `{:?}`, which contains the cause.
    ///
    /// # Cancel safety
    ///
    /// The future can be dropped at any time.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime with time and I/O, if the store is in Redis.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::store;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let store = store::lazy("memory:")?;
    /// if let Err(error) = store.ping().await {
    ///     eprintln!("the store cannot decide yet: {error:?}");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn ping(&self) -> Result<(), StoreError> {
        self.as_dyn().ping().await
    }

    /// Waits until the units of ended permits and of dropped requests are back: see
    /// [`RedisStore::flush`]. In memory they are back at once.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # use tower_ratelimit::store;
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let store = store::connect("redis://127.0.0.1/").await?;
    /// // At the end of the process: the ends of holds are sent.
    /// store.flush().await;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn flush(&self) {
        self.as_dyn().flush().await;
    }

    /// Returns the state of the store and its counters, without calling it.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::store;
    ///
    /// let store = store::lazy("memory:")?;
    /// assert_eq!(store.health().status(), "ready");
    /// # Ok::<(), tower_ratelimit::store::StoreError>(())
    /// ```
    #[must_use]
    pub fn health(&self) -> Health {
        self.as_dyn().health()
    }

    /// Adds an observer to the store and its clones: see [`MemoryStore::add_observer`].
    ///
    /// # Examples
    ///
    /// ```
    /// use std::sync::Arc;
    /// use tower_ratelimit::{observe::Event, store};
    ///
    /// let store = store::lazy("memory:")?;
    /// store.add_observer(Arc::new(|event: &Event<'_>| println!("{event:?}")));
    /// # Ok::<(), tower_ratelimit::store::StoreError>(())
    /// ```
    pub fn add_observer(&self, observer: Arc<dyn Observer>) {
        self.as_dyn().add_observer(observer);
    }

    /// Returns the store, for calls other than decisions.
    #[inline]
    pub(crate) fn as_dyn(&self) -> &dyn StoreCalls {
        match self {
            Self::Memory(store) => store,
            Self::Dyn(store) => &**store,
        }
    }
}

/// A limit of a request: the name of the limiter, its observers and the key.
type ReportedLimit<'a> = (&'a str, &'a Observers, &'a Key<'a>);

/// Returns whether an answer may be reported. One that is not there yet is none that allows.
#[inline(always)]
fn is_reported(request: &StoreRequest<'_>, is_allowed: bool) -> bool {
    request.reporting != Reporting::Nothing
        && (request.limits.iter().any(|limit| !limit.observers.is_empty())
            || !is_allowed && log::records_denials())
}

/// Reports the answer to a request, now or when it comes.
#[inline(never)]
fn report(request: &StoreRequest<'_>, answer: &mut StoreFuture<Outcome>) {
    let is_allowed = answer.now().is_some_and(|outcome| outcome.decision.is_allowed());
    if !is_reported(request, is_allowed) {
        return;
    }
    if let Some(result) = answer.arrived() {
        return report_arrived(request, result.map(|outcome| &outcome.decision));
    }
    let StoreRequest { action, limits, reporting, .. } = *request;
    let start = time::Instant::now();
    let owned = |limit: &LimitRequest<'_>| {
        (limit.settings.name, limit.observers.clone(), limit.key.clone().into_owned())
    };
    let limits: Vec<_> = limits.iter().map(owned).collect();
    let later = mem::replace(answer, StoreFuture::Ready(None));
    *answer = StoreFuture::pending(async move {
        let result = later.await;
        let limits = limits.iter().map(|(name, observers, key)| (*name, observers, key));
        let decided = result.as_ref().map(|outcome| &outcome.decision);
        report_answer(action, reporting, limits, decided, Some(start.elapsed()));
        result
    });
}

/// Reports an answer that is there.
#[inline(never)]
fn report_arrived(request: &StoreRequest<'_>, result: Result<&Decision, &Error>) {
    let StoreRequest { action, limits, reporting, .. } = *request;
    let limits = limits.iter().map(|it| (it.settings.name, it.observers, it.key));
    report_answer(action, reporting, limits, result, None);
}

/// Reports the answer to a request to these limits.
pub(crate) fn report_answer<'a>(
    action: Action,
    reporting: Reporting,
    mut limits: impl Iterator<Item = ReportedLimit<'a>>,
    result: Result<&Decision, &Error>,
    duration: Option<Duration>,
) {
    match result {
        Ok(decision) if action == Action::Check && reporting.includes(decision) => {
            report_decided(limits, decision, duration);
        }
        Ok(_) => {}
        Err(error) => {
            if let Some((limiter, observers, _)) = limits.next() {
                report_failed(observers, limiter, action.operation(), error);
            }
        }
    }
}

/// Reports a decision about a check of these limits.
pub(crate) fn report_decided<'a>(
    limits: impl Iterator<Item = ReportedLimit<'a>>,
    decision: &Decision,
    duration: Option<Duration>,
) {
    let mut of_limiter = limits.filter(|(name, ..)| *name == decision.limiter());
    let Some((_, observers, key)) = of_limiter.next() else { return };
    // The decision names a limiter, but no key.
    let key = of_limiter.next().is_none().then_some(key);
    observers.report(&Event::Decided { decision, key, duration });
    if !decision.is_allowed() {
        log::denied(decision, key);
    }
}

/// Reports the failure of a store; other errors are not reported.
pub(crate) fn report_failed(
    observers: &Observers,
    limiter: &str,
    operation: &'static str,
    error: &Error,
) {
    if let Error::Store(error) = error {
        observers.report(&Event::StoreFailed { limiter, operation, error });
    }
}
