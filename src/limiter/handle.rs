//! `Limiter`: a name, a quota and an algorithm over a store, which it asks for decisions. The
//! public calls are in `check.rs`, `acquire.rs`, `reservation.rs`, `hold.rs` and `change.rs`.
//! `AnyLimiter` is a `Limiter`, or one in a foreign format, which the rest of the crate reaches
//! through `ForeignLimiter` alone.

use std::{fmt, sync::Arc, time::Duration};

use super::{
    backoff::Backoff,
    failure_policy::FailurePolicy,
    version::{Current, MaxWait, Version, Versions},
};
use crate::{
    algorithm::{self, Action, Algorithm, HoldReceipt, Kind, Params, Release},
    decision::{Outcome, Receipt, Source},
    error::ConfigError,
    keys::Key,
    observe::{Event, LimiterObservers, log},
    quota::{self, Quota},
    store::{
        AnyStore, EndedHold, HoldGuard, LimitRequest, Lines, Name, Offer, RenewableHold, Reporting,
        Settings, Store, StoreCalls, StoreFuture, StoreRequest, Task,
    },
    sync::fill,
};

/// The lifetime of a hold, if no setting changes it. It must be well above the longest pause of a
/// process, and is the time for which a process that crashed keeps its units from others.
const DEFAULT_HOLD_LIFETIME: Duration = Duration::from_secs(60);
const MIN_HOLD_LIFETIME: Duration = Duration::from_millis(100);
const MAX_HOLD_LIFETIME: Duration = Duration::from_secs(86_400);

/// The number of requests of a key that can wait, if no setting bounds it.
pub(super) const DEFAULT_MAX_PER_KEY: usize = 100;

/// Decides, for each key, whether a request is within its quota. It works without HTTP and Tower.
///
/// # Examples
///
/// ```
/// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tower_ratelimit::Error> {
/// let store = MemoryStore::new();
/// let api = Limiter::new("api", store.clone(), Algorithm::token_bucket(), Quota::per_second(10));
/// let login = Limiter::new("login", store, Algorithm::fixed_window(), Quota::per_minute(1));
///
/// assert!(login.check("alice").await?.is_allowed());
/// assert!(!login.check("alice").await?.is_allowed());
/// assert!(login.check("bob").await?.is_allowed());
/// assert!(api.check("alice").await?.is_allowed());
/// # Ok(())
/// # }
/// ```
///
/// # Methods
///
/// | to | call |
/// |---|---|
/// | decide about a request | [`check`](Limiter::check) |
/// | wait for a turn | [`try_acquire`](Limiter::try_acquire), [`acquire`](Limiter::acquire) |
/// | wait yourself | [`reserve`](Limiter::reserve) |
/// | take units whose use is known later | [`hold`](Limiter::hold) |
/// | look at a key | [`peek`](Limiter::peek) |
/// | spend or return units, whatever is left | [`spend`](Limiter::spend), [`refund`](Limiter::refund) |
/// | ban a client | [`block`](Limiter::block), [`unblock`](Limiter::unblock) |
/// | forget a key | [`reset`](Limiter::reset) |
/// | adopt what a vendor says | [`learn`](Limiter::learn) |
/// | change the quota | [`set_quota`](Limiter::set_quota), [`with_quota`](Limiter::with_quota) |
/// | choose what happens while the store fails | [`on_failure`](Limiter::on_failure) |
/// | choose how long units stay held after a crash | [`hold_lifetime`](Limiter::hold_lifetime) |
///
/// # Details
///
/// Clones share their counts. Limiters with different names do not: the name of a limiter is part
/// of its keys in the store, and can be used only once per store.
#[derive(Clone, Debug)]
pub struct Limiter(Arc<Inner>);

/// A hold of an admitted request, with the algorithm of the decision.
pub(super) enum KeptHold {
    /// In a store that renews holds.
    Renewed(Box<dyn HoldGuard>, Kind),
    Lasting(HoldReceipt, Kind),
}

impl KeptHold {
    /// Returns whether units are spent at the end.
    pub(super) fn is_spent(&self) -> bool {
        let (Self::Renewed(_, algorithm) | Self::Lasting(_, algorithm)) = self;
        algorithm.spends()
    }

    pub(super) fn is_expired(&self) -> bool {
        matches!(self, Self::Renewed(guard, _) if guard.is_expired())
    }
}

#[derive(Clone, Debug)]
struct Inner {
    store: AnyStore,
    taken: Arc<Name>,
    versions: Versions,
    on_failure: FailurePolicy,
    hold_lifetime: Duration,
    observers: LimiterObservers,
    backoff: Backoff,
}

impl Limiter {
    /// Creates a limiter with a name: 1 to 64 of the characters `A-Z a-z 0-9 - _ . /`.
    ///
    /// The name separates the keys of the limiter from those of other limiters over the same store,
    /// and the response headers contain it. Replicas share counts if they use the same name. The
    /// process keeps the name in memory until it exits, so the name must not come from requests:
    /// use keys for that.
    ///
    /// # Panics
    ///
    /// If [`try_new`](Limiter::try_new) returns an error: most often because the store already has
    /// a limiter of this name. Then choose another name, or clone the first limiter to share its
    /// counts.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    ///
    /// let quota = Quota::per_second(10).burst(20);
    /// let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::token_bucket(), quota);
    /// assert_eq!(limiter.name(), "api");
    /// ```
    #[must_use]
    #[track_caller]
    pub fn new(name: &str, store: impl Store, algorithm: Algorithm, quota: Quota) -> Self {
        match Self::try_new(name, store, algorithm, quota) {
            Ok(limiter) => limiter,
            Err(error) => panic!("{}", error.in_code()),
        }
    }

    /// Creates a limiter like [`new`](Limiter::new), from settings that are not literals.
    ///
    /// # Errors
    ///
    /// If the name is invalid or taken, or if the algorithm does not support the quota.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{Algorithm, Limiter, MemoryStore};
    ///
    /// let store = MemoryStore::new();
    /// let quota = "10/s burst 20".parse()?;
    /// let api = Limiter::try_new("api", store.clone(), Algorithm::token_bucket(), quota)?;
    /// let again = Limiter::try_new("api", store, Algorithm::token_bucket(), quota);
    /// assert!(again.is_err()); // the name is taken: clone `api`
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn try_new(
        name: &str,
        store: impl Store,
        algorithm: Algorithm,
        quota: Quota,
    ) -> Result<Self, ConfigError> {
        let store = store.into_any();
        let of_store =
            |store: &AnyStore, name| LimiterObservers::new(store.as_dyn().observers(), name);
        Self::with_observers(name, store, algorithm, quota, of_store)
    }

    /// Creates a limiter whose observers are not simply those of the store.
    pub(crate) fn with_observers(
        name: &str,
        store: AnyStore,
        algorithm: Algorithm,
        quota: Quota,
        observers: impl FnOnce(&AnyStore, &'static str) -> LimiterObservers,
    ) -> Result<Self, ConfigError> {
        let params = Params::new(algorithm, quota)?;
        check_name(name)?;
        let taken = store
            .names()
            .take(name)
            .ok_or_else(|| ConfigError::NameTaken { limiter: name.to_owned().into() })?;
        let settings = Settings::new(taken.text, algorithm, quota, params, Source::Store);
        let observers = observers(&store, taken.text);
        Ok(Self::assemble(store, Arc::new(taken), settings, observers))
    }

    /// Creates a limiter with another quota, which shares the name and the counts of this one.
    ///
    /// The next check applies the quota to the current state of its key: used units stay used, and
    /// are restored at the new rate.
    ///
    /// Create one limiter per quota, and keep it. A key in memory remembers the limiter that
    /// counted it last, and the same limiter counts it faster. A denied check converts nothing. So
    /// each denied check by another quota converts anew, which takes two to three times as long in
    /// Redis, and longer in memory, too. To change the quota of this limiter itself, call
    /// [`set_quota`](Limiter::set_quota).
    ///
    /// # Errors
    ///
    /// If the algorithm does not support the quota.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// let pro = limiter.with_quota(Quota::per_hour(30))?;
    /// let _ = limiter.check("alice").await?;
    /// assert_eq!(pro.peek("alice").await?.remaining(), 29);
    /// # Ok(())
    /// # }
    /// ```
    pub fn with_quota(&self, quota: Quota) -> Result<Self, ConfigError> {
        let known = self.current();
        let settings = known.settings.changed(known.settings.algorithm, quota)?;
        let versions = Versions::new(Version::new(settings));
        Ok(Self(Arc::new(Inner { versions, ..(*self.0).clone() })))
    }

    /// Changes the quota of this limiter, of its clones, and of the layers and charges that hold
    /// one, while requests flow.
    ///
    /// The next check applies the quota to the current state of its key: used units stay used, and
    /// are restored at the new rate. If no request waits, a higher quota takes effect immediately,
    /// also for a key that was denied. A lower quota forgets no debt. Until it has admitted a
    /// request of the key, used units count for as long as by the old quota, at most.
    ///
    /// Waiting requests keep their instants, and new requests come after them, even if the quota is
    /// raised: until the last reserved instant, a new request is denied or has to wait. See
    /// [configuration](crate::guide::configuration#changes-without-a-restart).
    ///
    /// Limiters from [`with_quota`](Limiter::with_quota) keep their quotas, and other processes
    /// keep theirs until they change them. While two quotas alternate on a key in Redis, each check
    /// applies its own.
    ///
    /// # Errors
    ///
    /// If the algorithm does not support the quota. The limiter then keeps its quota.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let store = MemoryStore::new();
    /// let limiter = Limiter::new("api", store, Algorithm::sliding_log(), Quota::per_hour(1));
    /// let layer = RateLimitLayer::new(&limiter, key::Global);
    /// # let _ = layer;
    /// assert!(limiter.check("alice").await?.is_allowed());
    /// assert!(!limiter.check("alice").await?.is_allowed());
    ///
    /// limiter.set_quota(Quota::per_hour(3))?; // also that of the layer
    /// assert_eq!(limiter.check("alice").await?.remaining(), 1);
    /// # Ok(())
    /// # }
    /// ```
    pub fn set_quota(&self, quota: Quota) -> Result<(), ConfigError> {
        if let Some(change) = self.0.versions.update(None, quota)? {
            self.settings_changed(change);
        }
        Ok(())
    }

    /// Changes the algorithm and the quota. The counts of another algorithm do not apply. If the
    /// settings differ, the caller calls [`settings_changed`](Self::settings_changed), and holds no
    /// lock then.
    #[cfg(feature = "serde")]
    pub(crate) fn set(
        &self,
        algorithm: Algorithm,
        quota: Quota,
    ) -> Result<Option<[Arc<Settings>; 2]>, ConfigError> {
        self.0.versions.update(Some(algorithm), quota)
    }

    /// Calls the requests that wait, and reports the old and the new settings. Wakers and observers
    /// can call anything.
    pub(crate) fn settings_changed(&self, change: [Arc<Settings>; 2]) {
        let (limiter, observers) = (self.name(), self.observers());
        self.lines().limiter_changed(limiter);
        let [from, to] = change.map(|settings| (settings.algorithm, settings.quota));
        observers.report(&Event::SettingsChanged { limiter, from, to });
        log::settings_changed(limiter, from, to);
    }

    /// Creates a limiter with a failure policy, which shares the name and the counts of this one.
    /// The default is [`FailurePolicy::Closed`]: an error of the store is returned.
    ///
    /// The policy applies to [`check`](Limiter::check), [`try_acquire`](Limiter::try_acquire),
    /// [`acquire`](Limiter::acquire), [`reserve`](Limiter::reserve) and [`hold`](Limiter::hold),
    /// and to a [`Charge`](crate::Charge) whose limiters all have it. A layer has a [policy of its
    /// own](crate::RateLimitLayer::on_failure).
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{Algorithm, FailurePolicy, Limiter, MemoryStore, Quota};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_ratelimit::Error> {
    /// // A `RedisStore` fails more often.
    /// let store = MemoryStore::with_max_keys(1);
    /// let limiter = Limiter::new("api", store, Algorithm::sliding_log(), Quota::per_hour(1))
    ///     .on_failure(FailurePolicy::Open);
    /// assert!(limiter.check("alice").await?.is_allowed());
    /// assert!(limiter.check("ben").await?.is_allowed()); // the store is full
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn on_failure(self, policy: FailurePolicy) -> Self {
        let mut inner = Arc::unwrap_or_clone(self.0);
        inner.on_failure = policy;
        Self(Arc::new(inner))
    }

    /// Creates a limiter whose [holds](Limiter::hold) have another lifetime, which shares the name
    /// and the counts of this one. The default is a minute.
    ///
    /// While a permit is held, its process renews the hold several times per lifetime. If no
    /// renewal arrives for that long, because the process crashed or was stopped, the units count
    /// as used. A new hold lives for a quarter of the lifetime, until its first renewal. If the
    /// answer of the store takes longer than that, the permit is
    /// [expired](crate::Permit::is_expired) when it arrives. A process that continues after a
    /// longer pause exceeds the quota by what it uses then: choose more than four times the longest
    /// pause. In memory, holds need no renewal.
    ///
    /// # Panics
    ///
    /// If the lifetime is below 100 ms or above a day.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    ///
    /// # let store = MemoryStore::new();
    /// let quota = Quota::per_minute(100_000);
    /// let tokens = Limiter::new("tokens", store, Algorithm::token_bucket(), quota)
    ///     .hold_lifetime(Duration::from_secs(20));
    /// # let _ = tokens;
    /// ```
    #[must_use]
    #[track_caller]
    pub fn hold_lifetime(self, lifetime: Duration) -> Self {
        let allowed = MIN_HOLD_LIFETIME..=MAX_HOLD_LIFETIME;
        assert!(allowed.contains(&lifetime), "hold lifetime {lifetime:?}: use 100 ms to a day");
        let mut inner = Arc::unwrap_or_clone(self.0);
        inner.hold_lifetime = lifetime;
        Self(Arc::new(inner))
    }

    /// Returns the limiter with a fraction of the quota over the fallback of the store, if there is
    /// one. Calls with the same fraction share counts.
    pub(super) fn fallback(&self, fraction: f64) -> Option<Self> {
        let store = self.0.store.as_dyn().fallback()?;
        let version = self.current();
        let new = || Self::fallback_settings(&version.settings, fraction).map(Arc::new);
        // A key in memory is counted faster by settings that have counted it before.
        let (known, settings) = version.fallback.get_or_init(|| (fraction, new()));
        let settings = if *known == fraction { settings.clone() } else { new() };
        let (taken, observers) = (self.0.taken.clone(), self.0.observers.clone());
        Some(Self::assemble(store, taken, settings?, observers))
    }

    fn fallback_settings(settings: &Settings, fraction: f64) -> Option<Settings> {
        let quota = quota::scaled(settings.quota, fraction);
        let algorithm = algorithm::scaled(settings.algorithm, fraction, quota);
        let params = Params::new(algorithm, quota).ok()?;
        Some(Settings::new(settings.name, algorithm, quota, params, Source::Local))
    }

    fn assemble(
        store: AnyStore,
        taken: Arc<Name>,
        settings: impl Into<Arc<Settings>>,
        observers: LimiterObservers,
    ) -> Self {
        let versions = Versions::new(Version::new(settings));
        let (on_failure, hold_lifetime) = (FailurePolicy::Closed, DEFAULT_HOLD_LIFETIME);
        let backoff = Backoff::default();
        let inner = Inner { store, taken, versions, on_failure, hold_lifetime, observers, backoff };
        Self(Arc::new(inner))
    }

    /// Returns the name.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// assert_eq!(limiter.name(), "api");
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn name(&self) -> &str {
        self.0.taken.text
    }

    /// Returns the algorithm.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// assert_eq!(limiter.algorithm(), Algorithm::sliding_log());
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn algorithm(&self) -> Algorithm {
        self.current().settings.algorithm
    }

    /// Returns the quota.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// limiter.set_quota(Quota::per_hour(5))?;
    /// assert_eq!(limiter.quota(), Quota::per_hour(5));
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn quota(&self) -> Quota {
        self.current().settings.quota
    }

    /// Returns the default number of requests of a key that can wait.
    pub(super) fn default_max_waiting(&self) -> usize {
        let settings = &self.current().settings;
        match settings.params.shapes() {
            true => settings.quota.burst_size() as usize, // a shaper bounds it itself
            false => DEFAULT_MAX_PER_KEY,
        }
    }

    pub(super) fn observers(&self) -> &LimiterObservers {
        &self.0.observers
    }

    pub(super) fn failure_policy(&self) -> FailurePolicy {
        self.0.on_failure
    }

    pub(super) fn params(&self) -> Params {
        self.current().settings.params
    }

    pub(super) fn store(&self) -> &AnyStore {
        &self.0.store
    }

    /// Returns the lines of the requests of this process that wait.
    pub(super) fn lines(&self) -> &Arc<Lines> {
        self.0.store.names().lines()
    }

    pub(super) fn backoff(&self) -> &Backoff {
        &self.0.backoff
    }

    /// Returns the largest cost that can be granted.
    pub(super) fn max_cost(&self) -> u64 {
        self.current().max_cost
    }

    /// Returns the settings that apply now.
    #[inline]
    pub(super) fn current(&self) -> Current<'_> {
        self.0.versions.current()
    }

    /// Returns the part of a valid request to the store that concerns this limit. A hold reserves
    /// no instant.
    #[inline(always)]
    pub(super) fn request<'a>(
        &'a self,
        version: &'a Version,
        action: Action,
        key: &'a Key<'_>,
        cost: u64,
        max_wait: u64,
    ) -> LimitRequest<'a> {
        let hold = action.holds().then_some(self.0.hold_lifetime);
        let max_wait = if action.holds() { 0 } else { max_wait };
        let (settings, observers) = (&version.settings, &self.0.observers);
        LimitRequest { settings, observers, key, cost, max_wait, hold }
    }

    /// Decides about a key. An invalid cost is an answer, too, so that callers have one to handle.
    #[inline]
    pub(super) fn decide(
        &self,
        action: Action,
        key: &Key<'_>,
        cost: u64,
        max_wait: MaxWait,
    ) -> StoreFuture<Outcome> {
        let version = &self.current();
        self.decide_then(version, action, key, cost, max_wait, StoreFuture::from, |answer| answer)
    }

    /// Decides by a version of the settings, with the closures of [`AnyStore::decide_then`].
    #[allow(clippy::too_many_arguments)]
    #[inline(always)]
    pub(super) fn decide_then<R>(
        &self,
        version: &Version,
        action: Action,
        key: &Key<'_>,
        cost: u64,
        max_wait: MaxWait,
        done: impl FnOnce(Outcome) -> R,
        later: impl FnOnce(StoreFuture<Outcome>) -> R,
    ) -> R {
        // Not a result of the request, which would not stay in registers.
        if let Some(error) = version.refusal(action, cost) {
            return later(StoreFuture::ready(Err(error)));
        }
        let longest = version.resolve(max_wait);
        let limit = self.request(version, action, key, cost, longest);
        // A request that holds units can wait for them without asking to.
        let waits = action.holds() || max_wait.is_asked_for();
        let reporting = Reporting::of_waiting(waits && longest > 0);
        let action = unheld(action);
        self.0.store.decide_then(&StoreRequest::new(action, &[limit], reporting), done, later)
    }

    /// Decides by a version of the settings, and writes an outcome that is there at once. Returns
    /// an answer that comes later.
    #[inline(always)]
    fn ask(
        &self,
        version: &Version,
        action: Action,
        key: &Key<'_>,
        cost: u64,
        max_wait: MaxWait,
        outcome: &mut Option<Outcome>,
    ) -> Option<StoreFuture<Outcome>> {
        let done = |decided| {
            fill(outcome, decided);
            None
        };
        let later = self.decide_then(version, action, key, cost, max_wait, done, Some);
        later.and_then(|answer| answer.put_in(outcome))
    }

    /// Returns units that a request of the key has spent, reserved or held, in the background, if
    /// possible, unless other requests take an offer before.
    pub(super) fn release_in_background(
        &self,
        key: &Key<'_>,
        receipt: &Receipt,
        units: u64,
        offer: Option<&Arc<Offer>>,
    ) -> Option<Task> {
        let (limiter, observers) = (self.name(), self.observers());
        let settings = &self.current().settings;
        let released = match *receipt {
            Receipt::Hold(receipt, algorithm) => {
                let hold = self.keep_hold(key, units, (receipt, algorithm, Duration::ZERO));
                self.end_hold(hold, key, units, 0);
                None
            }
            Receipt::At(instant, algorithm) if algorithm == settings.params.kind() => {
                let instant = Some(instant as i64);
                let release = Release { instant, units: algorithm::units(units) };
                let store = self.0.store.as_dyn();
                store.release_in_background(settings, key, release, offer.cloned())
            }
            _ => return None,
        };
        if offer.is_none_or(|offer| !offer.is_exchanged()) {
            // Last: an observer can panic.
            observers.report(&Event::Released { limiter, key, units });
        }
        released
    }

    /// Keeps the units that an admitted request holds, by the algorithm of the decision: the
    /// limiter may have another one by now. They have been held for an age.
    #[inline]
    pub(super) fn keep_hold(
        &self,
        key: &Key<'_>,
        units: u64,
        (receipt, algorithm, age): (HoldReceipt, Kind, Duration),
    ) -> KeptHold {
        let Inner { store, hold_lifetime, observers, .. } = &*self.0;
        let guard = store.keep_hold(&|| RenewableHold {
            settings: self.current().settings.latest(algorithm),
            observers: (**observers).clone(),
            key: key.clone().into_owned(),
            units,
            lifetime: *hold_lifetime,
            receipt,
            age,
        });
        match guard {
            Some(guard) => KeptHold::Renewed(guard, algorithm),
            None => KeptHold::Lasting(receipt, algorithm),
        }
    }

    /// Ends a hold: `used` of its `units` were used, or more.
    #[inline]
    pub(super) fn end_hold(&self, hold: KeptHold, key: &Key<'_>, units: u64, used: u64) {
        let (receipt, algorithm) = match hold {
            KeptHold::Renewed(guard, _) => return guard.end(used),
            KeptHold::Lasting(receipt, algorithm) => (receipt, algorithm),
        };
        let (settings, observers) = (&self.current().settings, &self.0.observers);
        let ended = EndedHold { settings, algorithm, observers, key, receipt, units, used };
        self.0.store.end_hold(&ended);
    }

    /// Returns whether units are only held.
    #[inline]
    pub(super) fn only_holds(&self) -> bool {
        !self.current().spends
    }

    /// Resolves a wait in microseconds: at most the longest that the algorithm can reserve.
    #[inline]
    pub(super) fn resolve(&self, max_wait: MaxWait) -> u64 {
        self.current().resolve(max_wait)
    }
}

/// Returns the action on a limit whose units are spent, of a request that holds others.
#[inline]
pub(super) fn unheld(action: Action) -> Action {
    if action.holds() { Action::Check } else { action }
}

pub(crate) fn check_name(name: &str) -> Result<(), ConfigError> {
    let is_valid = |b: u8| b.is_ascii_alphanumeric() || b"-_./".contains(&b);
    match !name.is_empty() && name.len() <= 64 && name.bytes().all(is_valid) {
        true => Ok(()),
        false => Err(ConfigError::Name { limiter: name.to_owned().into() }),
    }
}

/// A limiter in a foreign format. It reserves no instants, and shares no charge with other
/// limiters.
pub trait ForeignLimiter: fmt::Debug + Send + Sync {
    /// Returns the name, as clients see it.
    fn name(&self) -> &str;

    fn store(&self) -> &dyn StoreCalls;

    fn observers(&self) -> &LimiterObservers;

    fn decide(&self, action: Action, key: &Key<'_>, cost: u64) -> StoreFuture<Outcome>;

    /// Returns the denial of a request that others have kept from a check.
    fn denial(&self, key: &Key<'_>, cost: u64) -> StoreFuture<Outcome>;

    /// Returns units that a request of the key has spent, in the background, if possible.
    fn release_in_background(&self, key: &Key<'_>, receipt: &Receipt, units: u64);

    /// Returns units of the key, of whatever request.
    fn refund(&self, key: &Key<'_>, units: u64) -> StoreFuture<()>;

    /// Returns the line in which requests of the key wait.
    fn line(&self, key: &Key<'_>) -> u64;
}

/// A limiter that can be charged: a [`Limiter`], or a `redisson::RateLimiter` (feature `redisson`).
#[derive(Clone, Debug)]
pub struct AnyLimiter(AnyKind);

#[derive(Clone, Debug)]
enum AnyKind {
    Own(Limiter),
    Foreign(Arc<dyn ForeignLimiter>),
}

impl AnyLimiter {
    #[doc(hidden)]
    pub fn foreign(limiter: impl ForeignLimiter + 'static) -> Self {
        Self(AnyKind::Foreign(Arc::new(limiter)))
    }

    /// Returns the name, as clients see it.
    pub(crate) fn name(&self) -> &str {
        match &self.0 {
            AnyKind::Own(limiter) => limiter.name(),
            AnyKind::Foreign(limiter) => limiter.name(),
        }
    }

    pub(crate) fn observers(&self) -> &LimiterObservers {
        match &self.0 {
            AnyKind::Own(limiter) => limiter.observers(),
            AnyKind::Foreign(limiter) => limiter.observers(),
        }
    }

    pub(super) fn store(&self) -> &dyn StoreCalls {
        match &self.0 {
            AnyKind::Own(limiter) => limiter.store().as_dyn(),
            AnyKind::Foreign(limiter) => limiter.store(),
        }
    }

    /// Returns the quota, if it is known before a decision.
    pub(crate) fn quota(&self) -> Option<Quota> {
        self.own().map(Limiter::quota)
    }

    /// Returns the limiter, if its store can decide about several limiters together.
    pub(crate) fn own(&self) -> Option<&Limiter> {
        if let AnyKind::Own(limiter) = &self.0 { Some(limiter) } else { None }
    }

    pub(super) fn as_foreign(&self) -> Option<&dyn ForeignLimiter> {
        match &self.0 {
            AnyKind::Own(_) => None,
            AnyKind::Foreign(limiter) => Some(&**limiter),
        }
    }

    /// Decides about a key.
    #[inline]
    pub(crate) fn decide(
        &self,
        action: Action,
        key: &Key<'_>,
        cost: u64,
        max_wait: MaxWait,
    ) -> StoreFuture<Outcome> {
        match &self.0 {
            AnyKind::Own(limiter) => limiter.decide(action, key, cost, max_wait),
            AnyKind::Foreign(limiter) => limiter.decide(action, key, cost),
        }
    }

    /// Decides about a request, whose units are held if the limiter only holds units, else spent.
    /// Writes an outcome that is there at once. Returns an answer that comes later.
    // One copy: the future of each layer would have its own.
    #[inline(never)]
    pub(crate) fn admit(
        &self,
        key: &Key<'_>,
        cost: u64,
        max_wait: MaxWait,
        outcome: &mut Option<Outcome>,
    ) -> Option<StoreFuture<Outcome>> {
        let limiter = match &self.0 {
            AnyKind::Own(limiter) => limiter,
            AnyKind::Foreign(limiter) => {
                return limiter.decide(Action::Check, key, cost).put_in(outcome);
            }
        };
        let version = &*limiter.current();
        // With a constant action, most of a decision is left out.
        if version.spends {
            limiter.ask(version, Action::Check, key, cost, max_wait, outcome)
        } else {
            limiter.ask(version, Action::HOLD, key, cost, max_wait, outcome)
        }
    }

    /// Returns units that a request of the key has spent, reserved or held, in the background, if
    /// possible, unless other requests take an offer before.
    pub(super) fn release_in_background(
        &self,
        key: &Key<'_>,
        receipt: &Receipt,
        units: u64,
        offer: Option<&Arc<Offer>>,
    ) -> Option<Task> {
        match &self.0 {
            AnyKind::Own(limiter) => limiter.release_in_background(key, receipt, units, offer),
            AnyKind::Foreign(limiter) => {
                limiter.release_in_background(key, receipt, units);
                None
            }
        }
    }

    /// Returns whether a request of this process may wait to check again, for whatever key.
    #[inline]
    pub(crate) fn store_has_lines(&self) -> bool {
        !self.store().names().lines().is_empty()
    }

    /// Returns whether each answer is there at once.
    #[inline]
    pub(crate) fn is_immediate(&self) -> bool {
        matches!(&self.0, AnyKind::Own(limiter) if limiter.store().is_immediate())
    }

    /// Returns whether units can be held.
    pub(super) fn can_hold(&self) -> bool {
        matches!(&self.0, AnyKind::Own(limiter) if limiter.params().can_hold())
    }

    /// Returns whether units are only held.
    #[inline]
    pub(crate) fn only_holds(&self) -> bool {
        matches!(&self.0, AnyKind::Own(limiter) if limiter.only_holds())
    }

    /// Resolves a wait in microseconds: at most the longest that is possible.
    #[inline]
    pub(crate) fn resolve(&self, max_wait: MaxWait) -> u64 {
        match &self.0 {
            AnyKind::Own(limiter) => limiter.resolve(max_wait),
            AnyKind::Foreign(_) => max_wait.resolve(0, quota::LONGEST_REFILL),
        }
    }

    /// Returns the default number of requests of a key that can wait.
    pub(super) fn default_max_waiting(&self) -> usize {
        self.own().map_or(DEFAULT_MAX_PER_KEY, Limiter::default_max_waiting)
    }
}

/// A limiter as an argument. The trait is not exported, which seals it; it is one of its own
/// because the compiler would explain a missing `Into<AnyLimiter>` by a name that users cannot use.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a limiter",
    label = "not a limiter",
    note = "pass a `Limiter` or a `&Limiter`, made by `Limiter::new(name, store, algorithm, \
            quota)`; with the feature `redisson`, also a `redisson::RateLimiter`"
)]
pub trait IntoLimiter {
    fn into_limiter(self) -> AnyLimiter;
}

impl IntoLimiter for Limiter {
    fn into_limiter(self) -> AnyLimiter {
        AnyLimiter(AnyKind::Own(self))
    }
}

impl IntoLimiter for &Limiter {
    fn into_limiter(self) -> AnyLimiter {
        self.clone().into_limiter()
    }
}

#[diagnostic::do_not_recommend]
impl IntoLimiter for &AnyLimiter {
    fn into_limiter(self) -> AnyLimiter {
        self.clone()
    }
}
