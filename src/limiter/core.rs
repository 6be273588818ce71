//! `Limiter`: a name, a quota and an algorithm over a store, and its decisions. Waiting is in
//! `acquire.rs`, and several limits are in `charge.rs`.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use tokio::time::Instant;

use super::{
    failure_policy::{FailurePolicy, Recovered},
    max_wait::MaxWait,
    report::{is_reported, report_released, reported},
    retry_queue::RetryQueues,
    version::{Current, Version, Versions},
};
use crate::{
    algorithm::{Action, Algorithm, LONGEST_BLOCK, Params, micros},
    decision::{Allowed, Decision, Policy, Receipt, Source},
    error::{ConfigError, Error},
    keys::Key,
    observe::{LimiterObservers, Observer},
    quota::Quota,
    store::{
        AnyStore, LimitRequest, MemoryStore, Name, Names, Settings, Store, StoreFuture,
        StoreRequest,
    },
};

/// The number of requests of a key that can wait, if no setting bounds it.
pub(super) const DEFAULT_MAX_PER_KEY: usize = 100;

/// A limit per key: an algorithm and a quota over a store. It knows no HTTP.
///
/// Clones share their counts. Limiters with different names do not: the name of a limiter is part
/// of its keys in the store, and can be used only once per store.
///
/// # Examples
///
/// ```
/// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tower_ratelimit::Error> {
/// let store = MemoryStore::new();
/// let api = Limiter::new(store.clone(), Algorithm::token_bucket(), Quota::per_second(10));
/// let login = Limiter::named("login", store, Algorithm::FixedWindow, Quota::per_minute(1));
///
/// assert!(login.check("alice").await?.is_allowed());
/// assert!(!login.check("alice").await?.is_allowed());
/// assert!(login.check("bob").await?.is_allowed());
/// assert!(api.check("alice").await?.is_allowed());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Limiter(Arc<Inner>);

#[derive(Clone, Debug)]
struct Inner {
    store: AnyStore,
    taken: Arc<Name>,
    versions: Versions,
    on_failure: FailurePolicy,
    observers: LimiterObservers,
}

impl Limiter {
    /// Creates a limiter named `default`.
    ///
    /// # Panics
    ///
    /// If [`try_named`](Limiter::try_named) returns an error: most often because the store already
    /// has a limiter of this name. Then use [`named`](Limiter::named), or clone the other limiter
    /// if they should share counts.
    #[must_use]
    #[track_caller]
    pub fn new(store: impl Store, algorithm: Algorithm, quota: Quota) -> Self {
        Self::named("default", store, algorithm, quota)
    }

    /// Creates a limiter with a name: 1 to 64 of the characters `A-Z a-z 0-9 - _ . /`.
    ///
    /// The name separates the keys of the limiter from those of other limiters over the same store,
    /// and the response headers contain it. Replicas share counts if they use the same name. The
    /// process keeps the name in memory until it exits, so the name must not come from requests:
    /// use keys for that.
    ///
    /// # Panics
    ///
    /// If [`try_named`](Limiter::try_named) returns an error.
    #[must_use]
    #[track_caller]
    pub fn named(name: &str, store: impl Store, algorithm: Algorithm, quota: Quota) -> Self {
        match Self::try_named(name, store, algorithm, quota) {
            Ok(limiter) => limiter,
            Err(error) => panic!("{error}"),
        }
    }

    /// Creates a limiter like [`named`](Limiter::named), from settings that are not literals.
    ///
    /// # Errors
    ///
    /// If the name is invalid or taken, or if the algorithm does not support the quota.
    pub fn try_named(
        name: &str,
        store: impl Store,
        algorithm: Algorithm,
        quota: Quota,
    ) -> Result<Self, ConfigError> {
        let params = Params::new(algorithm, quota)?;
        check_name(name)?;
        let store = store.into_any();
        let names = store.as_dyn().names();
        let taken =
            names.take(name).ok_or_else(|| ConfigError::NameTaken { name: name.to_owned() })?;
        let source = Source::Store;
        let settings = Settings { name: taken.text, algorithm, quota, params, source };
        let observers = LimiterObservers::new(store.as_dyn().observers(), taken.text);
        Ok(Self::assemble(store, Arc::new(taken), settings, observers))
    }

    /// Creates a limiter with another quota, which shares the name and the counts of this one.
    ///
    /// The next check applies the quota to the current state of its key: used units stay used, and
    /// are restored at the new rate.
    ///
    /// Create one limiter per quota, and keep it. A key in memory remembers the limiter that
    /// counted it last, and the same limiter counts it faster. To change the quota of this limiter
    /// itself, call [`set_quota`](Limiter::set_quota).
    ///
    /// # Errors
    ///
    /// If the algorithm does not support the quota.
    pub fn with_quota(&self, quota: Quota) -> Result<Self, ConfigError> {
        let Inner { store, taken, observers, .. } = &*self.0;
        let known = self.current();
        let settings = known.settings.changed(known.settings.algorithm, quota)?;
        let limiter = Self::assemble(store.clone(), taken.clone(), settings, observers.clone());
        Ok(limiter.on_failure(self.0.on_failure))
    }

    /// Changes the quota of this limiter, of its clones, and of the layers and charges that hold
    /// one, while requests flow.
    ///
    /// The next check applies the quota to the current state of its key: used units stay used, and
    /// are restored at the new rate. So a higher quota takes effect immediately, also for a key
    /// that was denied, and a lower quota forgets no debt. Waiting requests keep their instants, as
    /// [`try_acquire`](Limiter::try_acquire) describes. New requests come after them: until the last
    /// of them proceeds, new ones are denied or have to wait, even if the quota is raised.
    ///
    /// Limiters from [`with_quota`](Limiter::with_quota) keep their quotas, and other processes
    /// keep theirs until they change them. While two quotas alternate on a key in Redis, each check
    /// applies its own.
    ///
    /// After the first change, each check reads the quota under a lock that is shared by all
    /// threads: about 20 ns more.
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
    /// let limiter = Limiter::new(store, Algorithm::sliding_log(), Quota::per_hour(1));
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
        self.0.versions.update(None, quota)
    }

    /// Changes the algorithm and the quota. The counts of another algorithm do not apply.
    #[cfg(feature = "serde")]
    pub(crate) fn set(&self, algorithm: Algorithm, quota: Quota) -> Result<(), ConfigError> {
        self.0.versions.update(Some(algorithm), quota)
    }

    /// Creates a limiter with a failure policy, which shares the name and the counts of this one.
    /// The default is [`FailurePolicy::Closed`]: an error of the store is returned.
    ///
    /// The policy applies to [`check`](Limiter::check), [`check_n`](Limiter::check_n),
    /// [`check_within`](Limiter::check_within), [`try_acquire`](Limiter::try_acquire) and
    /// [`acquire`](Limiter::acquire). A layer has a [policy of its
    /// own](crate::RateLimitLayer::on_failure), and a [`Charge`](crate::Charge) has none.
    ///
    /// Do not [cancel](Limiter::cancel) or [settle](Limiter::settle) a decision whose
    /// [source](Decision::source) is [`Source::Local`]: its units were spent in the memory of the
    /// process.
    ///
    /// # Panics
    ///
    /// If a [share](FailurePolicy::Local) is not above 0 and at most 1.
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
    /// let limiter = Limiter::new(store, Algorithm::sliding_log(), Quota::per_hour(1))
    ///     .on_failure(FailurePolicy::Open);
    /// assert!(limiter.check("alice").await?.is_allowed());
    /// assert!(limiter.check("ben").await?.is_allowed()); // the store is full
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    #[track_caller]
    pub fn on_failure(self, policy: FailurePolicy) -> Self {
        let mut inner = Arc::unwrap_or_clone(self.0);
        inner.on_failure = policy.validated();
        Self(Arc::new(inner))
    }

    /// Adds an observer, which gets the events of this limiter: see [`observe`](crate::observe).
    /// The limiter shares the name and the counts of this one, and clones made before it are not
    /// observed.
    ///
    /// The observers of a store are inherited, and an observer gets each event only once.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::sync::Arc;
    /// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, observe::TopDenied};
    ///
    /// let denied = Arc::new(TopDenied::new(100));
    /// let quota = Quota::per_second(10);
    /// let limiter = Limiter::new(MemoryStore::new(), Algorithm::token_bucket(), quota)
    ///     .observe(denied.clone());
    /// # let _ = limiter;
    /// ```
    #[must_use]
    pub fn observe(self, observer: Arc<dyn Observer>) -> Self {
        let mut inner = Arc::unwrap_or_clone(self.0);
        inner.observers.add(observer, inner.taken.text);
        Self(Arc::new(inner))
    }

    /// Returns the limiter with a fraction of the quota over a store in memory. Calls with the same
    /// fraction share counts.
    pub(super) fn fallback(&self, fraction: f64) -> Self {
        let version = self.current();
        let new = || self.new_fallback(&version.settings, fraction);
        let (known, limiter) = version.fallback.get_or_init(|| (fraction, new()));
        let limiter = if *known == fraction { limiter.clone() } else { new() };
        // Limiters that share a version can have other observers.
        let mut inner = Arc::unwrap_or_clone(limiter.0);
        inner.observers = self.0.observers.clone();
        Self(Arc::new(inner))
    }

    fn new_fallback(&self, settings: &Settings, fraction: f64) -> Self {
        let store = self.shared().fallback_store().clone();
        let quota = settings.quota.scaled(fraction);
        let algorithm = match settings.algorithm {
            Algorithm::TokenBucket { refill, overdraft } => {
                let overdraft = (f64::from(overdraft) * fraction) as u32;
                // The limit can be rounded down further: then the overdraft takes too long to
                // refill.
                let overdraft = overdraft.min(quota.max_overdraft());
                Algorithm::TokenBucket { refill, overdraft }
            }
            algorithm => algorithm,
        };
        let params = Params::new(algorithm, quota).expect("a fraction of valid settings is valid");
        let source = Source::Local;
        let settings = Settings { name: settings.name, algorithm, quota, params, source };
        let (taken, observers) = (self.0.taken.clone(), LimiterObservers::default());
        Self::assemble(store.into_any(), taken, settings, observers)
    }

    fn assemble(
        store: AnyStore,
        taken: Arc<Name>,
        settings: Settings,
        observers: LimiterObservers,
    ) -> Self {
        let versions = Versions::new(Version::new(settings));
        let on_failure = FailurePolicy::Closed;
        Self(Arc::new(Inner { store, taken, versions, on_failure, observers }))
    }

    /// Spends 1 unit of the quota of `key` if one is left.
    ///
    /// A denied request spends nothing. A leaky bucket with room allows a request with a
    /// [`delay`](Decision::delay) that the caller must wait for: up to the time in which its burst
    /// drains. The other algorithms allow requests without a delay.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] if the store fails.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future before its first poll spends nothing. After that, the unit may have been
    /// spent: with a [`MemoryStore`](crate::MemoryStore), the first poll decides.
    pub async fn check(&self, key: impl Into<Key<'_>>) -> Result<Decision, Error> {
        self.check_key(&key.into(), 1, MaxWait::DEFAULT).await
    }

    /// Spends `cost` units of the quota of `key` if they are left.
    ///
    /// # Errors
    ///
    /// [`Error::ZeroCost`] and [`Error::CostAboveQuota`] for an invalid cost, immediately and
    /// without spending; [`Error::Store`] if the store fails.
    ///
    /// # Cancel safety
    ///
    /// As for [`check`](Limiter::check).
    pub async fn check_n(&self, key: impl Into<Key<'_>>, cost: u32) -> Result<Decision, Error> {
        self.check_key(&key.into(), cost, MaxWait::DEFAULT).await
    }

    /// Checks like [`check_n`](Limiter::check_n), and makes a reservation if the request can
    /// proceed within `max_wait`.
    ///
    /// The request is then allowed, with a [`delay`](Decision::delay) that the caller must wait
    /// for. [`try_acquire`](Limiter::try_acquire) also waits, and releases the reservation if it is
    /// dropped.
    ///
    /// Reservations are made in the order of the checks. If the request would have to wait longer
    /// than `max_wait`, it is denied, and the same check would succeed after
    /// [`retry_after`](Decision::retry_after). `max_wait` is bounded by 100 years, and by less for
    /// a bucket whose rate needs large fractions: by 2.5 hours for 1,000,003 per second, by one
    /// second for 4,294,967,291 (2^32 - 5) per second.
    ///
    /// # Errors
    ///
    /// As for [`check_n`](Limiter::check_n).
    ///
    /// # Cancel safety
    ///
    /// As for [`check`](Limiter::check). A reservation stays until [`cancel`](Limiter::cancel)
    /// releases it.
    pub async fn check_within(
        &self,
        key: impl Into<Key<'_>>,
        cost: u32,
        max_wait: Duration,
    ) -> Result<Decision, Error> {
        self.check_key(&key.into(), cost, MaxWait::UpTo(micros(max_wait))).await
    }

    /// Returns the units that an allowed `decision` about `key` has spent or reserved.
    ///
    /// Before the instant at which the request may proceed, the reservation is released: requests
    /// behind it keep their instants; later requests still proceed after these, but may find more
    /// units left. After that instant, only units that still count are returned: none if their
    /// window is over, and for a bucket none that were refilled since.
    ///
    /// A reservation is not returned in these cases:
    ///
    /// - The store has lost the key in the meantime: the units would be those of other requests.
    /// - Another quota was applied to the key, or the clock of the store stepped back, after the
    ///   reservation was made. A sliding log finds the reservation nevertheless.
    ///
    /// If another algorithm was applied to the limiter after the decision, nothing is returned: that
    /// algorithm has not counted the units.
    ///
    /// Call it on the limiter that decided; a decision about several limits is cancelled by its
    /// [charge](crate::Charge::cancel). On a limiter with another quota, units refilled in the
    /// meantime are counted at the faster rate, and a sliding window returns nothing. If the quota
    /// of the key was changed and changed back, or if the clock of the store stepped back, units
    /// that were refilled then can be returned a second time.
    ///
    /// Cancel a decision only once, and do not [settle](Limiter::settle) it as well: the second
    /// call would return units that other requests have spent. A
    /// [bound charge](crate::Charge::decided) prevents that.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] if the store fails.
    ///
    /// # Cancel safety
    ///
    /// As for [`check`](Limiter::check).
    pub async fn cancel(&self, key: impl Into<Key<'_>>, decision: Decision) -> Result<(), Error> {
        let cost = decision.cost();
        self.release(&key.into(), decision.receipt(), cost, cost).await
    }

    /// Returns the decision that [`check`](Limiter::check) would make now, and spends nothing.
    ///
    /// [`remaining`](Decision::remaining) contains the units that are left before that check. For a
    /// key that a layer counts, see [`reset`](Limiter::reset).
    ///
    /// # Errors
    ///
    /// [`Error::Store`] if the store fails.
    ///
    /// # Cancel safety
    ///
    /// The future can be dropped at any time.
    pub async fn peek(&self, key: impl Into<Key<'_>>) -> Result<Decision, Error> {
        self.peek_n(key, 1).await
    }

    /// Returns the decision that [`check_n`](Limiter::check_n) would make now, and spends nothing.
    ///
    /// # Errors
    ///
    /// As for [`check_n`](Limiter::check_n).
    ///
    /// # Cancel safety
    ///
    /// The future can be dropped at any time.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_ratelimit::Error> {
    /// # let store = MemoryStore::new();
    /// let limiter = Limiter::new(store, Algorithm::sliding_log(), Quota::per_hour(10));
    /// limiter.spend("alice", 7).await?;
    /// assert!(limiter.peek_n("alice", 3).await?.is_allowed());
    /// assert!(!limiter.peek_n("alice", 4).await?.is_allowed());
    /// # Ok(())
    /// # }
    /// ```
    pub async fn peek_n(&self, key: impl Into<Key<'_>>, cost: u32) -> Result<Decision, Error> {
        self.decide(Action::Peek, &key.into(), cost, MaxWait::DEFAULT)?.await
    }

    /// Spends `cost` units of the quota of `key`, even if fewer are left: for a cost that is known
    /// only after the request was served.
    ///
    /// If more is spent than is left, later requests are denied or wait until the debt is repaid. A
    /// fixed window forgets the debt when it ends. Waiting requests keep their reservations. To
    /// adjust the cost of a request that was checked, call [`settle`](Limiter::settle).
    ///
    /// The decision describes the key afterwards. A cost of 0 spends nothing: the decision
    /// describes the key as it is.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] if the store fails.
    ///
    /// # Cancel safety
    ///
    /// As for [`check`](Limiter::check).
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_ratelimit::Error> {
    /// let quota = Quota::per_minute(1000);
    /// let tokens = Limiter::new(MemoryStore::new(), Algorithm::token_bucket(), quota);
    /// if tokens.check_n("alice", 200).await?.is_allowed() {
    ///     let used = 1_450; // as the response reports
    ///     tokens.spend("alice", used - 200).await?;
    /// }
    /// assert!(!tokens.check("alice").await?.is_allowed());
    /// # Ok(())
    /// # }
    /// ```
    pub async fn spend(&self, key: impl Into<Key<'_>>, cost: u32) -> Result<Allowed, Error> {
        self.change(Action::Spend, &key.into(), cost).await
    }

    /// Grants `cost` units to `key`, up to the units that were spent.
    ///
    /// A refund refers to no decision, so it returns units that any request has spent: the key gets
    /// `cost` units more than its quota. To return the unused units of one request, call
    /// [`cancel`](Limiter::cancel) or [`settle`](Limiter::settle).
    ///
    /// The sliding algorithms return the units that were spent first, so that later ones still
    /// count for their full time. A fixed window returns units of the current window. Reservations
    /// of waiting requests are not returned.
    ///
    /// The decision describes the key afterwards. A cost of 0 grants nothing: the decision
    /// describes the key as it is.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] if the store fails.
    ///
    /// # Cancel safety
    ///
    /// As for [`check`](Limiter::check).
    pub async fn refund(&self, key: impl Into<Key<'_>>, cost: u32) -> Result<Allowed, Error> {
        self.change(Action::Refund, &key.into(), cost).await
    }

    /// Spends or grants units, whatever is left.
    async fn change(&self, action: Action, key: &Key<'_>, cost: u32) -> Result<Allowed, Error> {
        match cost {
            0 => Ok(self.decide(Action::Peek, key, 1, MaxWait::DEFAULT)?.await?.into_report()),
            cost => Ok(Allowed(self.decide(action, key, cost, MaxWait::DEFAULT)?.await?)),
        }
    }

    /// Denies the requests of `key` for `duration`, whatever is left of its quota: for a client that
    /// misbehaves, or an upstream that answers 429 with `Retry-After`. Requests that a layer exempts,
    /// or that cost 0, proceed.
    ///
    /// The block begins now, by the clock of the store, and holds for all processes that share the
    /// store, in one call. Until it ends,
    ///
    /// - [`check`](Limiter::check) is denied, and [`is_blocked`](Decision::is_blocked) is true
    /// - a request that may wait as long proceeds after the end of the block: with
    ///   [`try_acquire`](Limiter::try_acquire), [`acquire`](Limiter::acquire), a layer with a
    ///   [`max_wait`](crate::RateLimitLayer::max_wait), or in a leaky bucket, whose requests wait up
    ///   to the time in which it drains
    /// - a request of this process that is waiting already checks again when its time has come; one
    ///   of another process does so if a decision there has found the block
    ///
    /// The count of the key stays, and its quota is restored as usual. [`spend`](Limiter::spend) and
    /// [`refund`](Limiter::refund) change it. A block of a key that is blocked never shortens the
    /// block. It is at most 100 years long, and the end is an instant of the clock of the store: if
    /// the clock is set back, the block is longer. [`unblock`](Limiter::unblock) ends it, and so does
    /// [`reset`](Limiter::reset), which also deletes the count. So does another algorithm.
    ///
    /// If the key is counted by a layer, pass the key that its extractor makes: see
    /// [`reset`](Limiter::reset). The decision describes the key afterwards.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] if the store fails.
    ///
    /// # Cancel safety
    ///
    /// As for [`check`](Limiter::check).
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), tower_ratelimit::Error> {
    /// let vendor = Limiter::new(MemoryStore::new(), Algorithm::token_bucket(), Quota::per_second(9));
    /// let retry_after = Duration::from_secs(30); // from the response of the vendor
    /// vendor.block("api.example.com", retry_after).await?;
    ///
    /// let denied = vendor.check("api.example.com").await?;
    /// assert!(denied.is_blocked());
    /// assert_eq!(denied.retry_after(), Some(retry_after));
    ///
    /// vendor.unblock("api.example.com").await?;
    /// assert!(vendor.check("api.example.com").await?.is_allowed());
    /// # Ok(())
    /// # }
    /// ```
    pub async fn block(
        &self,
        key: impl Into<Key<'_>>,
        duration: Duration,
    ) -> Result<Allowed, Error> {
        let max_wait = micros(duration).min(LONGEST_BLOCK);
        self.change_block(Action::Block, &key.into(), max_wait).await
    }

    /// Ends the [block](Limiter::block) of `key`, if there is one. Its count stays.
    ///
    /// Other processes may deny the key for up to
    /// [`denial_ttl`](crate::RedisStore::denial_ttl) more. Requests that wait for the end of the block
    /// keep their instants and their units, so the key can stay denied because of them:
    /// [`reset`](Limiter::reset) frees it.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] if the store fails.
    ///
    /// # Cancel safety
    ///
    /// As for [`check`](Limiter::check).
    pub async fn unblock(&self, key: impl Into<Key<'_>>) -> Result<Allowed, Error> {
        self.change_block(Action::Unblock, &key.into(), 0.0).await
    }

    async fn change_block(
        &self,
        action: Action,
        key: &Key<'_>,
        max_wait: f64,
    ) -> Result<Allowed, Error> {
        let answer = {
            let version = self.current();
            let (settings, observers) = (&version.settings, &*self.0.observers);
            let limits = &[LimitRequest { settings, observers, key, cost: 1, max_wait }];
            self.decide_limits(&StoreRequest { action, limits })
        };
        Ok(answer.await?.into_report())
    }

    /// Deletes the state of `key`: its next request counts as its first.
    ///
    /// Requests that are waiting keep their instants. Other processes may deny the key for up to
    /// [`denial_ttl`](crate::RedisStore::denial_ttl) more. For a key that a layer counts, pass the
    /// key that its extractor makes: each has a method `key`.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let store = MemoryStore::new();
    /// let limiter = Limiter::new(store, Algorithm::token_bucket(), Quota::per_second(10));
    /// let api_key = key::Header::new("x-api-key");
    /// let layer = RateLimitLayer::new(&limiter, (api_key.clone(), key::PeerIp));
    /// # let _ = layer;
    ///
    /// let address: std::net::IpAddr = "2001:db8::7".parse()?; // the layer counts 2001:db8::/64
    /// limiter.reset((api_key.key("k1"), key::PeerIp.key(address))).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Store`] if the store fails.
    ///
    /// # Cancel safety
    ///
    /// As for [`check`](Limiter::check).
    pub async fn reset(&self, key: impl Into<Key<'_>>) -> Result<(), Error> {
        let answer = self.0.store.as_dyn().reset(&self.current().settings, &key.into());
        self.reported_failure(answer).await
    }

    /// Returns the name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.0.taken.text
    }

    /// Returns the name for as long as the process runs.
    pub(super) fn static_name(&self) -> &'static str {
        self.0.taken.text
    }

    /// Returns the algorithm.
    #[must_use]
    pub fn algorithm(&self) -> Algorithm {
        self.current().settings.algorithm
    }

    /// Returns the quota.
    #[must_use]
    pub fn quota(&self) -> Quota {
        self.current().settings.quota
    }

    /// Returns the default number of requests of a key that can wait.
    pub(super) fn default_max_waiting(&self) -> usize {
        let settings = &self.current().settings;
        match settings.algorithm {
            // The bucket itself bounds it.
            Algorithm::LeakyBucket => settings.quota.burst_size() as usize,
            _ => DEFAULT_MAX_PER_KEY,
        }
    }

    pub(super) fn observers(&self) -> &LimiterObservers {
        &self.0.observers
    }

    pub(super) fn failure_policy(&self) -> FailurePolicy {
        self.0.on_failure
    }

    pub(super) fn policy(&self, cost: u32) -> Policy {
        self.current().settings.policy(cost)
    }

    pub(super) fn store(&self) -> &AnyStore {
        &self.0.store
    }

    /// Returns the end of the block of a key, as far as that is known.
    pub(super) fn blocked_until(&self, key: &Key<'_>) -> Option<Instant> {
        self.0.store.as_dyn().blocked_until(&self.current().settings, key)
    }

    /// Returns the largest cost that can be granted.
    pub(super) fn max_cost(&self) -> u32 {
        self.current().max_cost
    }

    /// Returns the settings that apply now.
    #[inline]
    pub(super) fn current(&self) -> Current<'_> {
        self.0.versions.current()
    }

    /// Returns the part of a request to the store that concerns this limit.
    #[inline]
    pub(super) fn request<'a>(
        &'a self,
        version: &'a Version,
        action: Action,
        key: &'a Key<'_>,
        cost: u32,
        max_wait: MaxWait,
    ) -> Result<LimitRequest<'a>, Error> {
        version.request(&self.0.observers, action, key, cost, max_wait)
    }

    /// Returns the state that the limiters over the store share.
    pub(super) fn shared(&self) -> Arc<Shared> {
        self.0.store.as_dyn().names().shared()
    }

    /// Decides about a key: the one door for decisions about a single limit.
    #[inline]
    pub(super) fn decide(
        &self,
        action: Action,
        key: &Key<'_>,
        cost: u32,
        max_wait: MaxWait,
    ) -> Result<StoreFuture<Decision>, Error> {
        let version = self.current();
        let limits = &[self.request(&version, action, key, cost, max_wait)?];
        Ok(self.decide_limits(&StoreRequest { action, limits }))
    }

    /// Checks a key by [`decide`](Limiter::decide), and waits for the answer. A store in memory has
    /// it immediately: moving it into a [`StoreFuture`] would take 4 % of the time of a check.
    #[inline]
    async fn check_key(
        &self,
        key: &Key<'_>,
        cost: u32,
        max_wait: MaxWait,
    ) -> Result<Decision, Error> {
        let result = match &self.0.store {
            AnyStore::Memory(store) => {
                let version = self.current();
                let limits = &[self.request(&version, Action::Check, key, cost, max_wait)?];
                store.decide_now(&StoreRequest { action: Action::Check, limits })
            }
            AnyStore::Dyn(_) => self.decide(Action::Check, key, cost, max_wait)?.await,
        };
        if matches!(self.0.store, AnyStore::Memory(_)) {
            self.report_now(key, &result);
        }
        match result {
            Err(error) => match self.recover(error, key, cost)? {
                Recovered::Uncounted(decision) => Ok(decision),
                Recovered::Fallback(charge) => charge.decide(Action::Check, max_wait)?.await,
            },
            result => result,
        }
    }

    /// Decides about several limits of this store.
    #[inline]
    pub(super) fn decide_limits(&self, request: &StoreRequest<'_>) -> StoreFuture<Decision> {
        let mut answer = self.0.store.decide(request);
        if is_reported(request, &answer) {
            answer = reported(request, answer);
        }
        answer
    }

    /// Returns `units` of those that a decision about the key has `spent` or reserved.
    pub(super) fn release(
        &self,
        key: &Key<'_>,
        receipt: &Receipt,
        spent: u32,
        units: u32,
    ) -> StoreFuture<()> {
        let version = self.current();
        let Some(release) = version.release(receipt, spent, units) else {
            return StoreFuture::ready(Ok(()));
        };
        report_released(&self.0.observers, self.0.taken.text, key, units);
        let answer = self.0.store.as_dyn().release(&version.settings, key, release);
        self.reported_failure(answer)
    }

    /// Releases units in the background, as far as that is possible.
    pub(super) fn release_in_background(
        &self,
        key: &Key<'_>,
        receipt: &Receipt,
        spent: u32,
        units: u32,
    ) {
        let version = self.current();
        if let Some(release) = version.release(receipt, spent, units) {
            report_released(&self.0.observers, self.0.taken.text, key, units);
            self.0.store.as_dyn().release_in_background(&version.settings, key, release);
        }
    }

    /// Resolves a wait in microseconds: at most the longest that the algorithm can reserve.
    pub(super) fn resolve(&self, max_wait: MaxWait) -> f64 {
        self.current().resolve(max_wait)
    }
}

/// The state that the limiters over one store share.
#[derive(Debug, Default)]
pub(super) struct Shared {
    /// Decides about fractions of the quotas while the store fails.
    fallback_store: OnceLock<MemoryStore>,
    retry_queues: Arc<RetryQueues>,
}

/// Returns the queues of the requests that retry over a store with these names.
pub(crate) fn retry_queues(names: &Names) -> Arc<RetryQueues> {
    names.shared::<Shared>().retry_queues.clone()
}

impl Shared {
    fn fallback_store(&self) -> &MemoryStore {
        self.fallback_store.get_or_init(MemoryStore::new)
    }
}

pub(crate) fn check_name(name: &str) -> Result<(), ConfigError> {
    let is_valid = |b: u8| b.is_ascii_alphanumeric() || b"-_./".contains(&b);
    match !name.is_empty() && name.len() <= 64 && name.bytes().all(is_valid) {
        true => Ok(()),
        false => Err(ConfigError::Name { name: name.to_owned() }),
    }
}
