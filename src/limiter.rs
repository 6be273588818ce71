//! A limiter: a name, a quota and an algorithm over a store.

mod acquire;
mod charge;
mod retry;
mod target;
mod wait_queue;

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

pub(crate) use self::acquire::{Acquire, DEFAULT_MAX_LATENESS};
#[cfg(test)]
pub(crate) use self::retry::Retry;
pub use self::{
    charge::Charge,
    target::{AnyLimiter, ChargeTarget},
};
pub(crate) use self::{
    retry::RetryQueues,
    wait_queue::{WaitQueue, WaitSlot},
};
use crate::{
    algorithm::{Action, Algorithm, Params, Release, micros},
    decision::{Decision, Policy, Receipt, Source},
    error::{ConfigError, Error},
    keys::Key,
    quota::Quota,
    store::{
        AnyStore, LimitRequest, MemoryStore, Name, Names, Settings, Store, StoreFuture,
        StoreRequest,
    },
};

/// How many requests of a key may wait, where nothing else bounds them.
pub(crate) const DEFAULT_MAX_PER_KEY: usize = 100;

/// Decides whether a key may spend: an algorithm and a quota over a store. It knows no HTTP.
///
/// Clones share their counts. Two limiters over one store never do: each has a name, which is part
/// of its keys in the store, and a name can be used only once per store.
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

#[derive(Debug)]
struct Inner {
    store: AnyStore,
    taken: Arc<Name>,
    settings: Arc<Settings>,
    /// The wait of a check that names none, in microseconds.
    default_wait: f64,
    max_reservable: f64,
    max_cost: u32,
    /// A limiter with so large a share, once there is one.
    share: OnceLock<(f64, Limiter)>,
}

/// The longest wait of a request, in microseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MaxWait {
    /// That of the algorithm: for a leaky bucket, the time in which it runs dry; else 0.
    Default {
        at_most: f64,
    },
    UpTo(f64),
}

impl MaxWait {
    pub(crate) const DEFAULT: Self = Self::Default { at_most: f64::INFINITY };
    pub(crate) const NONE: Self = Self::UpTo(0.0);
    pub(crate) const LONGEST: Self = Self::UpTo(f64::INFINITY);

    /// Resolves it for a limit with these waits.
    pub(crate) fn resolve(self, default_wait: f64, max_reservable: f64) -> f64 {
        match self {
            Self::Default { at_most } => default_wait.min(at_most),
            Self::UpTo(max_wait) => max_wait.min(max_reservable),
        }
    }

    pub(crate) fn at_most(self, bound: f64) -> Self {
        match self {
            Self::Default { at_most } => Self::Default { at_most: at_most.min(bound) },
            Self::UpTo(max_wait) => Self::UpTo(max_wait.min(bound)),
        }
    }
}

impl Limiter {
    /// Makes a limiter of the name `default`.
    ///
    /// # Panics
    ///
    /// Where [`try_named`](Limiter::try_named) returns an error: most often, because the store already
    /// has a limiter of this name. Then use [`named`](Limiter::named), or clone the other one if they
    /// shall count together.
    #[must_use]
    #[track_caller]
    pub fn new(store: impl Store, algorithm: Algorithm, quota: Quota) -> Self {
        Self::named("default", store, algorithm, quota)
    }

    /// Makes a limiter of the given name: 1 to 64 of the characters `A-Z a-z 0-9 - _ . /`.
    ///
    /// The name separates the limiter's keys from those of others over the same store, and clients see
    /// it in the header fields. Replicas share their counts if they use the same name. It is remembered for as
    /// long as the process lives, so it must not come from requests: that is what keys are for.
    ///
    /// # Panics
    ///
    /// Where [`try_named`](Limiter::try_named) returns an error.
    #[must_use]
    #[track_caller]
    pub fn named(name: &str, store: impl Store, algorithm: Algorithm, quota: Quota) -> Self {
        match Self::try_named(name, store, algorithm, quota) {
            Ok(limiter) => limiter,
            Err(error) => panic!("{error}"),
        }
    }

    /// Like [`named`](Limiter::named), for settings that are not literals.
    ///
    /// # Errors
    ///
    /// If the name is not valid or taken, or the algorithm's settings and the quota do not go together.
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
        Ok(Self::assemble(store, Arc::new(taken), settings))
    }

    /// Makes a limiter with another quota that shares this one's name and counts.
    ///
    /// The next check applies the quota to the state of its key as it is: what was used stays used, and
    /// is given back at the new rate.
    ///
    /// Make one for each quota, and keep it: a key in memory remembers by which limiter it was counted, and is
    /// counted faster by the same one.
    ///
    /// # Errors
    ///
    /// If the algorithm's settings and the quota do not go together.
    pub fn with_quota(&self, quota: Quota) -> Result<Self, ConfigError> {
        let Inner { store, taken, settings, .. } = &*self.0;
        let params = Params::new(settings.algorithm, quota)?;
        let settings = Settings { quota, params, ..**settings };
        Ok(Self::assemble(store.clone(), taken.clone(), settings))
    }

    /// A limiter with a share of the quota over a store in memory: the same one each time.
    pub(crate) fn to_share(&self, share: f64) -> Self {
        let (of, limiter) = self.0.share.get_or_init(|| (share, self.make_share(share)));
        if *of == share { limiter.clone() } else { self.make_share(share) }
    }

    fn make_share(&self, share: f64) -> Self {
        let Inner { store, taken, settings, .. } = &*self.0;
        let store = shared(store.as_dyn().names()).fallback().clone();
        let quota = settings.quota.to_share(share);
        let algorithm = match settings.algorithm {
            Algorithm::TokenBucket { refill, overdraft } => {
                let overdraft = (f64::from(overdraft) * share) as u32;
                // The limit may have been rounded down by more, and the rest would take too long to refill.
                let overdraft = overdraft.min(quota.longest_overdraft());
                Algorithm::TokenBucket { refill, overdraft }
            }
            algorithm => algorithm,
        };
        let params = Params::new(algorithm, quota).expect("a part of what can be");
        let source = Source::Local;
        let settings = Settings { name: settings.name, algorithm, quota, params, source };
        Self::assemble(store.into_any(), taken.clone(), settings)
    }

    fn assemble(store: AnyStore, taken: Arc<Name>, settings: Settings) -> Self {
        let max_cost = settings.params.max_cost() as u32;
        let (default_wait, max_reservable) =
            (settings.params.default_wait(), settings.params.max_reservable());
        let settings = Arc::new(settings);
        Self(Arc::new(Inner {
            store,
            taken,
            settings,
            default_wait,
            max_reservable,
            max_cost,
            share: OnceLock::new(),
        }))
    }

    /// Spends 1 from `key`'s quota if that much is left.
    ///
    /// A denied request spends nothing. A leaky bucket admits a request that it can hold, with a
    /// [`delay`](Decision::delay) that the caller must wait for: up to the time in which its burst leaves. The
    /// other algorithms admit without one.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] if the store gives no answer.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future before its first poll spends nothing. After that, it may or may not have
    /// spent: with a [`MemoryStore`](crate::MemoryStore) the first poll decides.
    pub async fn check(&self, key: impl Into<Key<'_>>) -> Result<Decision, Error> {
        self.check_key(&key.into(), 1, MaxWait::DEFAULT).await
    }

    /// Spends `cost` from `key`'s quota if that much is left.
    ///
    /// # Errors
    ///
    /// [`Error::ZeroCost`] and [`Error::CostAboveQuota`] for a cost that cannot be, at once and without
    /// spending; [`Error::Store`] if the store gives no answer.
    ///
    /// # Cancel safety
    ///
    /// As for [`check`](Limiter::check).
    pub async fn check_n(&self, key: impl Into<Key<'_>>, cost: u32) -> Result<Decision, Error> {
        self.check_key(&key.into(), cost, MaxWait::DEFAULT).await
    }

    /// Like [`check_n`](Limiter::check_n), and books the request's turn if that comes within `max_wait`:
    /// then the request is allowed, with a [`delay`](Decision::delay) that the caller must wait for.
    /// [`try_acquire`](Limiter::try_acquire) does that, and gives the turn back if it is dropped.
    ///
    /// Turns are booked in the order of the checks. If the turn would come later, the request is denied,
    /// and [`retry_after`](Decision::retry_after) is when the same check would succeed. `max_wait` is cut
    /// to 100 years, and further for a bucket whose rate needs large fractions: 1,000,003 per second to 2.5 hours,
    /// 4,294,967,291 (2^32 - 5) per second to a second.
    ///
    /// # Errors
    ///
    /// As for [`check_n`](Limiter::check_n).
    ///
    /// # Cancel safety
    ///
    /// As for [`check`](Limiter::check). What was booked stays booked until it is given back with
    /// [`cancel`](Limiter::cancel).
    pub async fn check_within(
        &self,
        key: impl Into<Key<'_>>,
        cost: u32,
        max_wait: Duration,
    ) -> Result<Decision, Error> {
        self.check_key(&key.into(), cost, MaxWait::UpTo(micros(max_wait))).await
    }

    /// Returns what an allowed `decision` about `key` has spent or reserved.
    ///
    /// While the instant at which the request may proceed is still to come, it is as if the request had never been
    /// made: requests behind it keep their instants, and later ones still come after them, but may find more left.
    /// Afterwards, what still counts is returned: nothing if its window is over, and of a bucket not what has
    /// been refilled since.
    ///
    /// A reservation is not returned if the store has lost the key in the meantime, since the units would be those of
    /// other requests. Neither is one that was made before another quota was applied to the key, or before the clock of
    /// the store stepped back; a sliding log finds it nevertheless.
    ///
    /// Call it on the limiter that decided: with another quota, the units that were refilled in the meantime are counted
    /// by the faster one, and a sliding window returns nothing. If the quota of the key was changed and changed
    /// back since, or the clock of the store stepped back, units that were refilled then can be returned a second
    /// time.
    ///
    /// Cancel a decision only once, and do not [settle](Limiter::settle) it as well: the second call would return what
    /// other requests have spent. A [bound charge](Charge::decided) prevents that.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] if the store gives no answer.
    ///
    /// # Cancel safety
    ///
    /// As for [`check`](Limiter::check).
    pub async fn cancel(&self, key: impl Into<Key<'_>>, decision: Decision) -> Result<(), Error> {
        let cost = decision.cost();
        self.release(&key.into(), decision.receipt(), cost, cost).await
    }

    /// Adjusts the cost of an allowed `decision` about `key` to the units that were really `used`: returns the rest, as
    /// [`cancel`](Limiter::cancel) does, or spends what is missing, as [`spend`](Limiter::spend) does.
    ///
    /// A bucket returns only what it has not refilled since the decision, and that of each request apart: after 0.3 s
    /// nothing of 500 units at 100,000 per minute. Count what is settled downwards in a window, or in a token bucket
    /// that refills at once.
    ///
    /// Settle a decision only once, and do not cancel it as well. To settle several times, bind a charge to the decision:
    /// [`Charge::decided`].
    ///
    /// # Errors
    ///
    /// [`Error::NotDecided`] if the decision spent nothing, as a denied one; [`Error::Store`] if the store gives no
    /// answer.
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
    /// let tokens = Limiter::new(MemoryStore::new(), Algorithm::SlidingLog, quota);
    /// let decision = tokens.check_n("alice", 500).await?;
    /// if decision.is_allowed() {
    ///     let used = 180; // as the response reports
    ///     tokens.settle("alice", &decision, used).await?;
    /// }
    /// assert_eq!(tokens.peek("alice").await?.remaining(), 820);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn settle(
        &self,
        key: impl Into<Key<'_>>,
        decision: &Decision,
        used: u32,
    ) -> Result<(), Error> {
        let charge = Charge::new(self, key).cost(decision.cost()).decided(decision);
        charge.settle(self.name(), used).await
    }

    /// Tells what [`check`](Limiter::check) would answer now, without spending anything.
    ///
    /// [`remaining`](Decision::remaining) is what is left before that check.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] if the store gives no answer.
    ///
    /// # Cancel safety
    ///
    /// The future can be dropped at any time.
    pub async fn peek(&self, key: impl Into<Key<'_>>) -> Result<Decision, Error> {
        self.decide(Action::Peek, &key.into(), 1, MaxWait::DEFAULT)?.await
    }

    /// Spends `cost` of `key`'s quota, even if less is left: for a cost that is known when it is too late to deny it.
    ///
    /// If more is spent than is left, later requests are denied until the debt is repaid, or wait for it; a fixed window forgets the debt when
    /// it ends. Waiting requests keep their reservations. To adjust the cost of a request that was checked, call
    /// [`settle`](Limiter::settle).
    ///
    /// # Errors
    ///
    /// [`Error::ZeroCost`]; [`Error::Store`] if the store gives no answer.
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
    pub async fn spend(&self, key: impl Into<Key<'_>>, cost: u32) -> Result<(), Error> {
        let _ = self.decide(Action::Spend, &key.into(), cost, MaxWait::DEFAULT)?.await?;
        Ok(())
    }

    /// Grants `cost` units to `key`, up to what was spent.
    ///
    /// A refund names no decision, so it returns what any request has spent: the key gets `cost` more than its quota. To
    /// return what one request did not use, call [`cancel`](Limiter::cancel) or [`settle`](Limiter::settle).
    ///
    /// The sliding algorithms return what was spent first, so that what was spent later still counts for its full time. A
    /// fixed window returns units of the window that is open now. Reservations of waiting requests are not returned.
    ///
    /// # Errors
    ///
    /// [`Error::ZeroCost`]; [`Error::Store`] if the store gives no answer.
    ///
    /// # Cancel safety
    ///
    /// As for [`check`](Limiter::check).
    pub async fn refund(&self, key: impl Into<Key<'_>>, cost: u32) -> Result<(), Error> {
        let _ = self.decide(Action::Refund, &key.into(), cost, MaxWait::DEFAULT)?.await?;
        Ok(())
    }

    /// Forgets `key`: its next request is as its first.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] if the store gives no answer.
    ///
    /// # Cancel safety
    ///
    /// As for [`check`](Limiter::check).
    pub async fn reset(&self, key: impl Into<Key<'_>>) -> Result<(), Error> {
        self.0.store.as_dyn().reset(&self.0.settings, &key.into()).await
    }

    /// The name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.0.settings.name
    }

    /// The algorithm.
    #[must_use]
    pub fn algorithm(&self) -> Algorithm {
        self.0.settings.algorithm
    }

    /// The quota.
    #[must_use]
    pub fn quota(&self) -> Quota {
        self.0.settings.quota
    }

    /// Returns the default number of requests of a key that can wait.
    pub(crate) fn default_max_waiting(&self) -> usize {
        match self.algorithm() {
            // All that there is room for.
            Algorithm::LeakyBucket => self.quota().burst_size() as usize,
            _ => DEFAULT_MAX_PER_KEY,
        }
    }

    pub(crate) fn policy(&self, cost: u32) -> Policy {
        self.0.settings.policy(cost)
    }

    pub(crate) fn store(&self) -> &AnyStore {
        &self.0.store
    }

    /// Decides about a key: the door through which all decisions of one limit go.
    #[inline]
    pub(crate) fn decide(
        &self,
        action: Action,
        key: &Key<'_>,
        cost: u32,
        max_wait: MaxWait,
    ) -> Result<StoreFuture<Decision>, Error> {
        let limits = &[self.request(action, key, cost, max_wait)?];
        Ok(self.decide_limits(&StoreRequest { action, limits }))
    }

    /// [`decide`](Limiter::decide) for a check, and waits for the answer. In memory there is none to
    /// wait for, and moving it into a [`StoreFuture`] would take an eighth of the time of a check.
    #[inline]
    async fn check_key(
        &self,
        key: &Key<'_>,
        cost: u32,
        max_wait: MaxWait,
    ) -> Result<Decision, Error> {
        let limits = &[self.request(Action::Check, key, cost, max_wait)?];
        let request = StoreRequest { action: Action::Check, limits };
        match &self.0.store {
            AnyStore::Memory(store) => store.decide_now(&request),
            AnyStore::Dyn(store) => store.decide(&request).await,
        }
    }

    /// Decides about several limits of this store.
    #[inline]
    pub(crate) fn decide_limits(&self, request: &StoreRequest<'_>) -> StoreFuture<Decision> {
        self.0.store.decide(request)
    }

    /// Returns `units` of those that a decision about the key has `spent` or reserved.
    pub(crate) fn release(
        &self,
        key: &Key<'_>,
        receipt: &Receipt,
        spent: u32,
        units: u32,
    ) -> StoreFuture<()> {
        match release_of(receipt, spent, units) {
            Some(release) => self.0.store.as_dyn().release(&self.0.settings, key, release),
            None => StoreFuture::ready(Ok(())),
        }
    }

    /// The same in the background, as far as that is possible.
    pub(crate) fn release_in_background(
        &self,
        key: &Key<'_>,
        receipt: &Receipt,
        spent: u32,
        units: u32,
    ) {
        if let Some(release) = release_of(receipt, spent, units) {
            self.0.store.as_dyn().release_in_background(&self.0.settings, key, release);
        }
    }

    /// The wait, in microseconds: not longer than the algorithm can book.
    pub(crate) fn resolve(&self, max_wait: MaxWait) -> f64 {
        max_wait.resolve(self.0.default_wait, self.0.max_reservable)
    }

    /// Makes the request to this limit.
    #[inline]
    pub(crate) fn request<'a>(
        &'a self,
        action: Action,
        key: &'a Key<'_>,
        cost: u32,
        max_wait: MaxWait,
    ) -> Result<LimitRequest<'a>, Error> {
        let Inner { settings, max_cost, .. } = &*self.0;
        if cost == 0 {
            return Err(Error::ZeroCost);
        }
        if matches!(action, Action::Check | Action::Peek) && cost > *max_cost {
            return Err(Error::CostAboveQuota { limiter: settings.name, cost, max: *max_cost });
        }
        Ok(LimitRequest { settings, key, cost, max_wait: self.resolve(max_wait) })
    }
}

/// What the limiters over one store share.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    /// Decides by a fraction of the quotas while the store fails.
    fallback: OnceLock<MemoryStore>,
    pub(crate) retry_queues: Arc<RetryQueues>,
}

impl Shared {
    fn fallback(&self) -> &MemoryStore {
        self.fallback.get_or_init(MemoryStore::new)
    }
}

pub(crate) fn shared(names: &Names) -> Arc<Shared> {
    names.shared()
}

fn release_of(receipt: &Receipt, spent: u32, units: u32) -> Option<Release> {
    match *receipt {
        Receipt::At(instant) if units > 0 => {
            let kept = spent.saturating_sub(units).into();
            Some(Release { instant: Some(instant), units: units.into(), kept })
        }
        _ => None,
    }
}

pub(crate) fn check_name(name: &str) -> Result<(), ConfigError> {
    let fine = |b: u8| b.is_ascii_alphanumeric() || b"-_./".contains(&b);
    match !name.is_empty() && name.len() <= 64 && name.bytes().all(fine) {
        true => Ok(()),
        false => Err(ConfigError::Name { name: name.to_owned() }),
    }
}
