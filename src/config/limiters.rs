//! The limiters of a configuration file, and how another version of the file changes them.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
};

use super::limits::{Limit, Limits};
use crate::{
    error::ConfigError,
    limiter::{Limiter, check_name},
    observe::{Event, LimiterObservers, log},
    store::{AnyStore, Names, Settings, Store},
    sync::lock,
};

/// The limiters of a configuration file, by name. They can be [reloaded](Limiters::reload) while
/// requests flow. Clones share them.
///
/// # Examples
///
/// ```
/// use tower_ratelimit::{MemoryStore, RateLimitLayer, config::Limits, key};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let read = |text| toml::from_str::<Limits>(text);
/// let limits = read("login = { algorithm = 'sliding-log', quota = '1/min' }")?;
/// let limiters = limits.limiters(&MemoryStore::new())?;
/// let login = limiters.get("login")?;
/// let layer = RateLimitLayer::new(&login, key::PeerIp);
/// # let _ = layer;
/// assert!(login.check("alice").await?.is_allowed());
/// assert!(!login.check("alice").await?.is_allowed());
///
/// // The file has changed. A file with a mistake changes nothing.
/// let error = read("login = { algorithm = 'sliding-log', quota = 'many' }").unwrap_err();
/// assert!(error.to_string().starts_with("TOML parse error at line 1, column 46\n"));
/// limiters.reload(&read("login = { algorithm = 'sliding-log', quota = '5/min' }")?)?;
/// assert_eq!(login.check("alice").await?.remaining(), 3); // also for the layer
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Limiters {
    store: AnyStore,
    by_name: Arc<Mutex<BTreeMap<String, Limiter>>>,
}

/// The treatment of a limiter whose limit is not contained in the new limits.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Removed {
    Reject,
    Keep,
}

/// A limiter, its old and its new settings.
type Change = (Limiter, [Arc<Settings>; 2]);

impl Limits {
    /// Creates the limiters and takes their names in `store`.
    ///
    /// # Errors
    ///
    /// None of the names is taken in these cases:
    ///
    /// * [`ConfigError::NameTaken`] if the store already has a limiter with one of the names.
    /// * [`ConfigError::Name`] if a name is not valid. Limits from a file have valid names.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{MemoryStore, RateLimitLayer, config::Limits, key};
    ///
    /// # let text = "api = { algorithm = 'token-bucket', quota = '10/s' }";
    /// # let mut limits: Limits = toml::from_str(text)?;
    /// let limiters = limits.limiters(&MemoryStore::new())?;
    /// let layer = RateLimitLayer::new(limiters.get("api")?, key::PeerIp);
    /// # let _ = layer;
    /// # let _ = &mut limits;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn limiters(&self, store: &(impl Store + Clone)) -> Result<Limiters, ConfigError> {
        let store = store.clone().into_any();
        let limiters = Limiters { store, by_name: Arc::default() };
        limiters.apply(self, Removed::Reject)?;
        Ok(limiters)
    }
}

impl Limit {
    /// Changes the settings of a limiter, of its clones, and of the layers that hold one, while
    /// requests flow. What follows is described in [`Limiters::reload`].
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{MemoryStore, Quota, config::Limit};
    ///
    /// let limit: Limit = toml::from_str("algorithm = 'token-bucket'\nquota = '10/s'")?;
    /// let limiter = limit.limiter("api", MemoryStore::new())?;
    ///
    /// let changed: Limit = toml::from_str("algorithm = 'token-bucket'\nquota = '20/s'")?;
    /// changed.apply_to(&limiter);
    /// assert_eq!(limiter.quota(), Quota::per_second(20));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn apply_to(&self, limiter: &Limiter) {
        if let Some(change) = self.set(limiter) {
            limiter.settings_changed(change);
        }
    }

    /// Changes the settings of a limiter. Returns the old and the new ones, if they differ.
    fn set(&self, limiter: &Limiter) -> Option<[Arc<Settings>; 2]> {
        limiter.set(self.algorithm(), self.quota()).expect("a limit is valid")
    }
}

impl Limiters {
    /// Returns the limiter of this name.
    ///
    /// # Errors
    ///
    /// [`ConfigError::MissingLimit`] if there is no limit of this name.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{MemoryStore, Quota, config::Limits};
    ///
    /// # let text = "api = { algorithm = 'token-bucket', quota = '10/s' }";
    /// # let mut limits: Limits = toml::from_str(text)?;
    /// let limiters = limits.limiters(&MemoryStore::new())?;
    /// assert_eq!(limiters.get("api")?.quota(), Quota::per_second(10));
    /// assert!(limiters.get("login").is_err());
    /// # let _ = &mut limits;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn get(&self, name: &str) -> Result<Limiter, ConfigError> {
        let limiter = lock(&self.by_name).get(name).cloned();
        limiter.ok_or_else(|| ConfigError::MissingLimit { limiter: name.to_owned().into() })
    }

    /// Applies new limits to the limiters of the same names, to their clones, and to the layers
    /// that hold one.
    ///
    /// | change | effect on the next check of a key |
    /// |---|---|
    /// | the quota, the buckets, the refill or the overdraft | used units stay used, and are restored at the new rate |
    /// | another algorithm | the key counts as unused and is not blocked; switching back before the old state expires restores it, including any block |
    /// | a new limit | [`get`](Limiters::get) returns its limiter from then on |
    /// | a limit without changes | none |
    /// | a limit that is no longer contained | the new limits are rejected: see [`reload_keeping_removed`](Limiters::reload_keeping_removed) |
    ///
    /// Requests that are waiting keep their instants, as [`Limiter::try_acquire`] describes. A
    /// permit that was held by another algorithm returns nothing to the new one. Other processes
    /// apply the limits when they reload. While two quotas alternate on a key in Redis, each check
    /// applies its own.
    ///
    /// Observers of the store, metrics and the log get each change, and whether the limits were
    /// rejected. If the file cannot be read as `Limits`, report the error yourself: there is
    /// nothing to pass to this method.
    ///
    /// # Errors
    ///
    /// Nothing changes in these cases:
    ///
    /// * [`ConfigError::LimitsRemoved`] if limits were removed, such as one that was renamed by
    ///   mistake: a layer may use it.
    /// * [`ConfigError::NameTaken`] if another limiter over the store has the name of a new limit.
    /// * [`ConfigError::Name`] if a name is not valid. Limits from a file have valid names.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{MemoryStore, Quota, config::Limits};
    ///
    /// # let text = "api = { algorithm = 'token-bucket', quota = '10/s' }";
    /// # let mut limits: Limits = toml::from_str(text)?;
    /// let limiters = limits.limiters(&MemoryStore::new())?;
    /// let api = limiters.get("api")?;
    /// limiters.reload(&toml::from_str("api = { algorithm = 'token-bucket', quota = '20/s' }")?)?;
    /// assert_eq!(api.quota(), Quota::per_second(20));
    /// # let _ = &mut limits;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn reload(&self, limits: &Limits) -> Result<(), ConfigError> {
        self.reload_with(limits, Removed::Reject)
    }

    /// Does the same as [`reload`](Limiters::reload), but accepts that limits were removed: their
    /// limiters keep their last settings, until new limits contain them again.
    ///
    /// # Errors
    ///
    /// [`ConfigError::NameTaken`] and [`ConfigError::Name`], as [`reload`](Limiters::reload).
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{MemoryStore, Quota, config::Limits};
    ///
    /// # let text = "api = { algorithm = 'token-bucket', quota = '10/s' }";
    /// # let mut limits: Limits = toml::from_str(text)?;
    /// let limiters = limits.limiters(&MemoryStore::new())?;
    /// limiters.reload_keeping_removed(&Limits::default())?;
    /// assert_eq!(limiters.get("api")?.quota(), Quota::per_second(10));
    /// # let _ = &mut limits;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn reload_keeping_removed(&self, limits: &Limits) -> Result<(), ConfigError> {
        self.reload_with(limits, Removed::Keep)
    }

    fn reload_with(&self, limits: &Limits, removed: Removed) -> Result<(), ConfigError> {
        let result = self.apply(limits, removed).map(|changes| {
            // Without the lock: an observer or a waker may get a limiter.
            changes.into_iter().for_each(|(limiter, change)| limiter.settings_changed(change));
        });
        let error = result.as_ref().err();
        self.store.as_dyn().observers().report(&Event::Reloaded { error });
        log::reloaded(error);
        result
    }

    /// Returns the observers of the limiters that are added, by name. Without the lock: an observer
    /// may get a limiter. No limiter is ever removed, so under the lock no other is added.
    fn observers_of_added(&self, limits: &Limits) -> BTreeMap<&'static str, LimiterObservers> {
        let known: BTreeSet<String> = lock(&self.by_name).keys().cloned().collect();
        let names = limits.iter().map(|(name, _)| name).filter(|name| !known.contains(*name));
        let names = names.map(Names::text_of);
        let observers = self.store.as_dyn().observers();
        names.map(|name| (name, LimiterObservers::new(observers.clone(), name))).collect()
    }

    /// Returns the limiters whose settings have changed, with the old and the new settings.
    fn apply(&self, limits: &Limits, removed: Removed) -> Result<Vec<Change>, ConfigError> {
        limits.iter().try_for_each(|(name, _)| check_name(name))?;
        let observers = self.observers_of_added(limits);
        let mut by_name = lock(&self.by_name);
        let missing = by_name.keys().filter(|name| limits.get(name).is_none());
        let names: Vec<_> = missing.cloned().collect();
        if !names.is_empty() && removed == Removed::Reject {
            return Err(ConfigError::LimitsRemoved { names });
        }
        let added = limits.iter().filter(|(name, _)| !by_name.contains_key(*name));
        let added = added.map(|(name, limit)| {
            let (store, of_limiter) = (self.store.clone(), |_: &_, name| observers[name].clone());
            let (algorithm, quota) = (limit.algorithm(), limit.quota());
            let limiter = Limiter::with_observers(name, store, algorithm, quota, of_limiter)?;
            Ok((name.to_owned(), limiter))
        });
        let added = added.collect::<Result<Vec<_>, ConfigError>>()?;
        let changes = by_name.iter().filter_map(|(name, limiter)| {
            let change = limits.get(name)?.set(limiter)?;
            Some((limiter.clone(), change))
        });
        let changes = changes.collect();
        by_name.extend(added);
        Ok(changes)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        pin::pin,
        sync::{Weak, atomic::AtomicBool, atomic::Ordering::Relaxed},
        task::{Context, Wake, Waker},
        time::Duration,
    };

    use super::*;
    use crate::store::MemoryStore;

    struct GetsLimiter(Weak<Mutex<BTreeMap<String, Limiter>>>, AtomicBool);

    impl Wake for GetsLimiter {
        fn wake(self: Arc<Self>) {
            let by_name = self.0.upgrade().unwrap();
            self.1.store(by_name.try_lock().is_ok(), Relaxed);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_waker_that_a_reload_calls_can_get_a_limiter() {
        let limits = |count| {
            let text =
                format!("places = {{ algorithm = 'concurrency', quota = '{count} concurrent' }}");
            toml::from_str::<Limits>(&text).unwrap()
        };
        let limiters = limits(1).limiters(&MemoryStore::new()).unwrap();
        let places = limiters.get("places").unwrap();
        let _first = places.hold("key", 1).await.unwrap().admitted().unwrap();
        let mut waiting = pin!(places.hold("key", 1).max_wait(Duration::from_secs(1)));
        let woken = GetsLimiter(Arc::downgrade(&limiters.by_name), AtomicBool::new(false));
        let woken = Arc::new(woken);
        let waker = Waker::from(woken.clone());
        assert!(waiting.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        limiters.reload(&limits(2)).unwrap();
        assert!(woken.1.load(Relaxed), "it was called, without the lock");
        assert!(waiting.await.unwrap().is_admitted());
    }
}
