//! `Charge`: the limits, keys and costs of one request. Waiting is in `acquire.rs` and `retry.rs`,
//! and the record of the units that a charge has spent in `charge/record.rs`.

mod record;

use std::{future::poll_fn, pin::Pin, sync::Arc, task::Poll, time::Duration};

use tokio::time::Instant;

use self::record::{Record, Return, Spent};
use super::{
    handle::Limiter,
    max_wait::MaxWait,
    target::{AnyLimiter, IntoLimiter},
};
use crate::{
    algorithm::Action,
    decision::{Decision, KeyState},
    error::Error,
    keys::Key,
    store::{LimitRequest, Released, StoreFuture, StoreRequest},
};

/// The charge of a request: its limits, keys and costs.
///
/// All limits are checked and charged in one atomic step, and with Redis in one round trip; a
/// [cluster](Charge#in-a-cluster) is an exception. If one limit denies the request, no limit is
/// charged. The [`Decision`] is that of the limit that binds: see [`Decision::limiter`].
///
/// # Waiting
///
/// Limits on [one key](Charge::also) make a reservation together: the request proceeds when all of
/// them allow it, and later requests to any of them proceed after it. If one of the limits is a
/// leaky bucket, the default wait is that of the bucket for all of them: up to the time in which a
/// full bucket drains. [`check`](Charge::check) can then return a delay, too.
///
/// Limits on [different keys](Charge::and) make no reservation: a distant instant that is reserved
/// for one user would delay all users who share a limit with that user. A waiting request retries
/// instead:
///
/// - It checks again when the limit that denied it has units left, and after the requests of this
///   process that wait for the same limit and key. So service is in order within a process, and
///   each request checks two or three times. Between processes, the order is not defined.
/// - It is denied immediately if its wait is known to be too long.
/// - A new request checks immediately, and can be served before waiting ones.
/// - A leaky bucket among the limits denies requests that it would delay on its own.
///
/// # In a cluster
///
/// The nodes of a Redis Cluster cannot decide together. Limits on one key are on one node, and
/// charged in one step. Limits on different keys are charged one after the other, in the order in
/// which the keys were added. Each key takes a separate round trip, and all share one deadline:
///
/// - If a limit denies or its node fails, the limits behind it are not checked, and the units taken
///   from the limits before it are returned immediately afterwards. During that moment other
///   requests can be denied for lack of these units. No key gets more than its quota.
/// - Units that were taken stay spent if the node fails during the decision or the return.
/// - [`Decision::retry_after`] is that of the first limit that denies. A limit behind it may deny
///   for longer.
/// - [`cancel`](Charge::cancel) and [`refund`](Charge::refund) change all limits that they can
///   reach, and return an error if they could not reach all.
///
/// So add the limit that denies most often first, such as the limit of a user before the limit that
/// all users share.
///
/// # Examples
///
/// 10 per second and 1,000 per hour for each user, and 10,000 per second for all users together:
///
/// ```
/// use tower_ratelimit::{Algorithm, Charge, Limiter, MemoryStore, Quota};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tower_ratelimit::Error> {
/// let store = MemoryStore::new();
/// let limiter = |name, algorithm, quota| Limiter::new(name, store.clone(), algorithm, quota);
/// let second = limiter("second", Algorithm::token_bucket(), Quota::per_second(10));
/// let hour = limiter("hour", Algorithm::sliding_window(), Quota::per_hour(1_000));
/// let all = limiter("all", Algorithm::FixedWindow, Quota::per_second(10_000));
///
/// let charge = Charge::new(&second, "alice").also(&hour).and(Charge::new(&all, "all users"));
/// let decision = charge.check().await?;
/// assert!(decision.is_allowed());
/// assert_eq!(decision.limiter(), "second"); // has the fewest units left
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a charge does nothing until it is checked"]
pub struct Charge {
    // Not only a vector, so that a charge of one limit needs no allocation.
    first: Option<Part>,
    rest: Vec<Part>,
    /// True if all limits were added on one key. Equal keys do not suffice: they can be equal by
    /// accident, or because a client chose its key.
    one_key: bool,
    /// The units that were spent, once the charge is [bound](Charge::decided).
    record: Option<Arc<Record>>,
}

#[derive(Clone, Debug)]
struct Part {
    limiter: AnyLimiter,
    key: Key<'static>,
    cost: Option<u64>,
}

impl Charge {
    /// Creates a charge of one unit to `key`. In a layer, it is a charge of the
    /// [cost](crate::RateLimitLayer::cost) that the layer computes.
    #[inline]
    pub fn new<'a>(limiter: impl IntoLimiter, key: impl Into<Key<'a>>) -> Self {
        Self::of_part(limiter.into_limiter(), key.into(), None)
    }

    /// Creates a charge of `n` units to `key`.
    #[inline]
    pub fn new_n<'a>(limiter: impl IntoLimiter, key: impl Into<Key<'a>>, n: u64) -> Self {
        Self::of_part(limiter.into_limiter(), key.into(), Some(n))
    }

    fn of_part(limiter: AnyLimiter, key: Key<'_>, cost: Option<u64>) -> Self {
        let first = Some(Part { limiter, key: key.into_owned(), cost });
        Self { first, rest: vec![], one_key: true, record: None }
    }

    /// Creates an empty charge: the request is not counted.
    pub fn exempt() -> Self {
        Self { first: None, rest: vec![], one_key: true, record: None }
    }

    /// Adds a limit on the same key, which is charged one unit, or the
    /// [cost](crate::RateLimitLayer::cost) of the layer. An exempt charge has no key, and stays
    /// exempt.
    ///
    /// The result is not [bound](Charge::decided), even if `self` was: the decision was not about
    /// the new limit. The same holds for [`and`](Charge::and) and [`of`](Charge::of).
    ///
    /// # Examples
    ///
    /// One request, and an estimate of 500 tokens:
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Charge, Limiter, MemoryStore, Quota};
    /// # let store = MemoryStore::new();
    /// # let limiter = |name, quota| {
    /// #     Limiter::new(name, store.clone(), Algorithm::token_bucket(), quota)
    /// # };
    /// let requests = limiter("requests", Quota::per_minute(60));
    /// let tokens = limiter("tokens", Quota::per_minute(100_000));
    /// let charge = Charge::new(&requests, "alice").also_n(&tokens, 500);
    /// # let _ = charge;
    /// ```
    pub fn also(self, limiter: impl IntoLimiter) -> Self {
        self.with(limiter.into_limiter(), None)
    }

    /// Adds a limit on the same key like [`also`](Charge::also), which is charged `n` units.
    pub fn also_n(self, limiter: impl IntoLimiter, n: u64) -> Self {
        self.with(limiter.into_limiter(), Some(n))
    }

    fn with(mut self, limiter: AnyLimiter, cost: Option<u64>) -> Self {
        if let Some(Part { key, .. }) = self.parts().last() {
            let key = key.clone();
            self.rest.push(Part { limiter, key, cost });
            self.record = None;
        }
        self
    }

    /// Adds the limits of another charge, on another key.
    pub fn and(mut self, other: Self) -> Self {
        if self.is_exempt() {
            return other;
        }
        if other.is_exempt() {
            return self;
        }
        (self.one_key, self.record) = (false, None);
        self.rest.extend(other.first.into_iter().chain(other.rest));
        self
    }

    /// Returns the part of the charge to the limiter of this name; exempt if there is none.
    pub fn of(&self, limiter: &str) -> Self {
        let parts = self.parts().filter(|part| part.limiter.name() == limiter);
        Self::of_parts(parts.cloned(), self.one_key)
    }

    /// Returns the part of the charge to the limiter of this name, which is charged `n` units;
    /// exempt if there is none. For [`spend`](Charge::spend) and [`refund`](Charge::refund) of
    /// another number of units than the request costs.
    pub fn of_n(&self, limiter: &str, n: u64) -> Self {
        let mut part = self.of(limiter);
        part.parts_mut().for_each(|part| part.cost = Some(n));
        part
    }

    /// Returns whether the charge is empty.
    #[must_use]
    pub fn is_exempt(&self) -> bool {
        self.first.is_none()
    }

    /// Spends the costs if all quotas have enough units left. See [`Limiter::check_n`].
    ///
    /// # Errors
    ///
    /// - [`Error::NoLimits`], [`Error::SameLimitTwice`] and [`Error::DifferentStores`] for an
    ///   invalid charge, immediately and without spending.
    /// - [`Error::ZeroCost`] and [`Error::CostAboveQuota`] for an invalid cost, immediately and
    ///   without spending.
    /// - [`Error::Store`] if the store fails.
    ///
    /// # Cancel safety
    ///
    /// As for [`Limiter::check`].
    pub async fn check(&self) -> Result<Decision, Error> {
        self.decide(Action::Check, MaxWait::DEFAULT).await
    }

    /// Returns the state of the key at the limit that binds, and whether [`check`](Charge::check)
    /// would be allowed now. It spends nothing.
    ///
    /// # Errors
    ///
    /// As for [`check`](Charge::check), and [`Error::Unsupported`] if Redisson shares the limiter.
    ///
    /// # Cancel safety
    ///
    /// The future can be dropped at any time.
    pub async fn peek(&self) -> Result<KeyState, Error> {
        self.decide(Action::Peek, MaxWait::DEFAULT).await.map(KeyState::peeked)
    }

    /// Spends the costs, even if fewer units are left. See [`Limiter::spend`]. Returns the state
    /// afterwards, at the limit that binds; `None` if the charge is exempt.
    ///
    /// A limit with a cost of 0 is left out. If all costs are 0, nothing is spent.
    ///
    /// # Errors
    ///
    /// - [`Error::SameLimitTwice`] and [`Error::DifferentStores`] for an invalid charge,
    ///   immediately and without spending.
    /// - [`Error::Unsupported`] if Redisson shares the limiter.
    /// - [`Error::Store`] if the store fails.
    ///
    /// # Cancel safety
    ///
    /// As for [`Limiter::check`].
    pub async fn spend(&self) -> Result<Option<KeyState>, Error> {
        self.change(Action::Spend).await
    }

    /// Grants the costs to their keys, up to the units that were spent. See [`Limiter::refund`]. An
    /// exempt charge grants nothing.
    ///
    /// A refund refers to no decision, so it returns units that any request has spent. To return
    /// the unused units of one request, call [`settle`](Charge::settle) or
    /// [`cancel`](Charge::cancel).
    ///
    /// Returns the state afterwards, at the limit that binds; `None` if the charge is exempt, or if
    /// Redisson shares the limiter. Costs of 0 count as for [`spend`](Charge::spend).
    ///
    /// # Errors
    ///
    /// As for [`spend`](Charge::spend), without [`Error::Unsupported`].
    ///
    /// # Cancel safety
    ///
    /// As for [`Limiter::check`].
    pub async fn refund(&self) -> Result<Option<KeyState>, Error> {
        if let (Some(part), []) = (&self.first, &*self.rest)
            && let Some(target) = part.limiter.as_foreign()
        {
            if part.cost() > 0 {
                target.refund(&part.key, part.cost()).await?;
            }
            return Ok(None);
        }
        self.change(Action::Refund).await
    }

    /// Spends or grants units, whatever is left.
    async fn change(&self, action: Action) -> Result<Option<KeyState>, Error> {
        if self.is_exempt() {
            return Ok(None);
        }
        let mut charge = self.clone().without_free_limits();
        if !charge.is_exempt() {
            let changed = charge.decide(action, MaxWait::NONE).await?;
            return Ok(Some(KeyState::changed(changed)));
        }
        charge = self.clone();
        charge.parts_mut().for_each(|part| part.cost = None);
        Ok(Some(charge.peek().await?))
    }

    /// Binds the charge to the `decision` that was made about it. A bound charge records the units
    /// that it has spent, and can be [settled](Charge::settle).
    ///
    /// The decision must be about this charge: the same limits, keys and costs. Clones share the
    /// record. Two charges that are bound separately to one decision do not: settle only one of
    /// them.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{Algorithm, Charge, Limiter, MemoryStore, Quota};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_ratelimit::Error> {
    /// let store = MemoryStore::new();
    /// let limiter = |name, quota| {
    ///     Limiter::new(name, store.clone(), Algorithm::token_bucket(), quota)
    /// };
    /// let requests = limiter("requests", Quota::per_day(60));
    /// let tokens = limiter("tokens", Quota::per_day(100_000));
    ///
    /// let charge = Charge::new(&requests, "alice").also_n(&tokens, 500);
    /// let decision = charge.check().await?;
    /// if decision.is_allowed() {
    ///     let used = 730; // as the response reports
    ///     charge.decided(&decision).settle("tokens", used).await?;
    /// }
    /// assert_eq!(tokens.peek("alice").await?.remaining(), 99_270);
    /// # Ok(())
    /// # }
    /// ```
    pub fn decided(self, decision: &Decision) -> Self {
        let record = Record::new(decision, self.parts().map(Part::cost));
        Self { record: Some(Arc::new(record)), ..self }
    }

    /// Adjusts the cost that was charged to a limiter to the units that were actually `used`. It
    /// returns unused units, as [`Limiter::cancel`] does, or spends missing ones, as
    /// [`Limiter::spend`] does.
    ///
    /// The charge must be bound to its decision: by [`decided`](Charge::decided), or by a layer
    /// with [`charge_handle`](crate::RateLimitLayer::charge_handle). Settling does nothing if:
    ///
    /// - the charge is exempt
    /// - the charge was [cancelled](Charge::cancel)
    /// - the response is [not charged](crate::RateLimitLayer::charge_when)
    ///
    /// A charge can be settled again, with a larger or a smaller number. Await one call before the
    /// next: two concurrent calls may both spend the missing units. If one limiter is charged for
    /// several keys, each key is settled.
    ///
    /// A bucket returns only units that it has not refilled since the decision, separately for each
    /// request: at 100,000 per minute, none of 500 units after 0.3 s. If you settle below the
    /// estimate, use a window, or a token bucket that refills once per interval.
    ///
    /// If the store fails, or the future is dropped, unused units may stay spent, and no later call
    /// returns them. Missing units may have been spent, and a later call spends them again.
    ///
    /// # Errors
    ///
    /// - [`Error::NotDecided`] if the charge is not bound, or its decision spent nothing, such as a
    ///   denial.
    /// - [`Error::NotCharged`] if no limiter of that name is charged.
    /// - [`Error::Unsupported`] if more was used than charged, and Redisson shares the limiter.
    /// - [`Error::Store`] if the store fails. After an error the other keys are still settled.
    ///
    /// # Cancel safety
    ///
    /// As for [`Limiter::check`].
    ///
    /// # Examples
    ///
    /// See [`RateLimitLayer::charge_handle`](crate::RateLimitLayer::charge_handle).
    pub async fn settle(&self, limiter: &str, used: u64) -> Result<(), Error> {
        if self.is_exempt() {
            return Ok(());
        }
        let record = self.record.as_ref().filter(|record| record.has_spent());
        let record = record.ok_or(Error::NotDecided)?;
        let named = |(_, part): &(usize, &Part)| part.limiter.name() == limiter;
        let mut result = Err(Error::NotCharged { limiter: limiter.to_owned() });
        for (number, (limit, part)) in self.parts().enumerate().filter(named).enumerate() {
            let settled = part.settle(record, limit, used).await;
            if number == 0 || settled.is_err() {
                result = settled;
            }
        }
        result
    }

    /// Returns the units that an allowed `decision` about this charge has spent or reserved. See
    /// [`Limiter::cancel`].
    ///
    /// If the charge is [bound](Charge::decided) to this decision, it returns the units that are
    /// still charged after calls of [`settle`](Charge::settle), and a second call returns nothing.
    /// Otherwise cancel a decision only once.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] if the store fails. After an error the units of the other limits are still
    /// returned.
    ///
    /// # Cancel safety
    ///
    /// As for [`Limiter::check`].
    pub async fn cancel(&self, decision: Decision) -> Result<(), Error> {
        let bound = self.record.as_ref().is_some_and(|record| record.is_about(&decision));
        let charge = if bound { self.clone() } else { self.clone().decided(&decision) };
        let returns = charge.take_returns();
        all(returns.iter().map(|(part, unused)| part.return_unused(unused)).collect()).await
    }

    /// Returns the charge to limiters with a fraction of the quotas over stores in memory; `None`
    /// if one of the limiters has no such fallback.
    pub(crate) fn fallback(&self, fraction: f64) -> Option<Self> {
        let parts = self.parts().map(|part| {
            let limiter = part.limiter.own().ok()?.fallback(fraction)?.into_limiter();
            Some(Part { limiter, ..part.clone() })
        });
        let parts = parts.collect::<Option<Vec<_>>>()?;
        Some(Self::of_parts(parts.into_iter(), self.one_key))
    }

    /// Returns whether no cost is above what its limit can ever grant.
    pub(super) fn can_be_granted(&self) -> bool {
        self.own_parts().all(|(limiter, _, cost)| cost <= limiter.max_cost())
    }

    /// Returns the decision of a request that proceeds uncounted; `None` if the quota is unknown.
    pub(crate) fn uncounted_decision(&self) -> Option<Decision> {
        let part = self.first.as_ref()?;
        Some(Decision::uncounted(part.limiter.own().ok()?.policy(part.cost())))
    }

    /// Returns the units that the charge has spent, in the background, if possible.
    pub(crate) fn release_in_background(&self) {
        drop(self.begin_release());
    }

    /// Does the same, and returns what is left to wait for until the units are back.
    pub(super) fn begin_release(&self) -> Vec<Released> {
        let returns = self.take_returns().into_iter();
        let released = returns.filter_map(|(part, Return { spent, units })| {
            part.limiter.release_in_background(&part.key, spent.receipt, spent.units, units)
        });
        released.collect()
    }

    /// Removes all units that the charge has spent from its record.
    fn take_returns(&self) -> Vec<(&Part, Return)> {
        let Some(record) = &self.record else { return vec![] };
        let returns = self.parts().zip(record.cancel());
        returns.flat_map(|(part, all)| all.into_iter().map(move |unused| (part, unused))).collect()
    }

    fn of_parts(mut parts: impl Iterator<Item = Part>, one_key: bool) -> Self {
        Self { first: parts.next(), rest: parts.collect(), one_key, record: None }
    }

    fn parts(&self) -> impl Iterator<Item = &Part> {
        self.first.iter().chain(&self.rest)
    }

    fn parts_mut(&mut self) -> impl Iterator<Item = &mut Part> {
        self.first.iter_mut().chain(&mut self.rest)
    }

    pub(crate) fn limiters(&self) -> impl Iterator<Item = &AnyLimiter> {
        self.parts().map(|part| &part.limiter)
    }

    /// Returns the limiters of this crate with their keys and costs, in the order in which they
    /// were added.
    pub(super) fn own_parts(&self) -> impl Iterator<Item = (&Limiter, &Key<'static>, u64)> {
        self.parts().filter_map(|part| Some((part.limiter.own().ok()?, &part.key, part.cost())))
    }

    pub(crate) fn keys(&self) -> impl Iterator<Item = &Key<'static>> {
        self.parts().map(|part| &part.key)
    }

    /// Sets the costs that are not set yet.
    pub(crate) fn or_cost(mut self, cost: u64) -> Self {
        for part in self.parts_mut() {
            part.cost.get_or_insert(cost);
        }
        self
    }

    /// Removes the limits with a cost of 0.
    pub(crate) fn without_free_limits(self) -> Self {
        if self.parts().all(|part| part.cost != Some(0)) {
            return self;
        }
        let one_key = self.one_key;
        let parts = self.first.into_iter().chain(self.rest);
        Self::of_parts(parts.filter(|part| part.cost != Some(0)), one_key)
    }

    /// Returns whether instants can be reserved.
    fn reserves(&self) -> bool {
        self.one_key && self.limiters().all(AnyLimiter::reserves)
    }

    /// Resolves a wait in microseconds: the longest of all limits.
    pub(crate) fn resolve(&self, max_wait: MaxWait) -> f64 {
        self.limiters().map(|limiter| limiter.resolve(max_wait)).fold(0.0, f64::max)
    }

    /// Bounds a wait by the longest one that all limits can reserve.
    fn reservable(&self, max_wait: MaxWait) -> MaxWait {
        let longest = self.limiters().map(|limiter| limiter.resolve(MaxWait::LONGEST));
        let bound = longest.fold(f64::INFINITY, f64::min);
        MaxWait::UpTo(self.resolve(max_wait)).at_most(bound)
    }

    /// Returns the instant until which a denied request retries; `None` if it makes a reservation
    /// instead.
    pub(super) fn retry_deadline(&self, max_wait: MaxWait) -> Option<Instant> {
        // A reservation needs no retries: the first answer says whether there is an instant.
        let wait = if self.reserves() { 0.0 } else { self.resolve(max_wait) };
        (wait > 0.0).then(|| Instant::now() + Duration::from_micros(wait as u64))
    }

    /// Returns the default number of requests of a key that can wait.
    pub(super) fn default_max_waiting(&self) -> usize {
        self.limiters().map(AnyLimiter::default_max_waiting).max().unwrap_or_default()
    }

    /// Decides about all limits: the one door for decisions about a charge.
    pub(crate) fn decide(&self, action: Action, max_wait: MaxWait) -> StoreFuture<Decision> {
        match (&self.first, &*self.rest) {
            (None, _) => StoreFuture::ready(Err(Error::NoLimits)),
            (Some(part), []) => part.limiter.decide(action, &part.key, part.cost(), max_wait),
            (Some(first), _) => {
                let answer = self.decide_together(&first.limiter, action, max_wait);
                answer.unwrap_or_else(|error| StoreFuture::ready(Err(error)))
            }
        }
    }

    /// Decides about several limits, the first of which is that of `first`.
    fn decide_together(
        &self,
        first: &AnyLimiter,
        action: Action,
        max_wait: MaxWait,
    ) -> Result<StoreFuture<Decision>, Error> {
        let limiter = first.own()?;
        let max_wait = if self.reserves() { self.reservable(max_wait) } else { MaxWait::NONE };
        let names = limiter.store().as_dyn().names();
        // Taken once: a quota that is changed meanwhile must not mix with the old one in a request.
        let versions = self.parts().map(|part| Ok(part.limiter.own()?.current()));
        let versions = versions.collect::<Result<Vec<_>, Error>>()?;
        let mut limits: Vec<LimitRequest<'_>> = Vec::with_capacity(versions.len());
        for (part, version) in self.parts().zip(&versions) {
            let limiter = part.limiter.own()?;
            if !limiter.store().as_dyn().names().is_same(names) {
                return Err(Error::DifferentStores);
            }
            let limit = limiter.request(version, action, &part.key, part.cost(), max_wait)?;
            // All limits are looked at before one is charged: a limit that is there twice would
            // admit what fits once (law 2). Quadratic, for a handful of limits.
            if limits.iter().any(|other| other.is_same_limit(&limit)) {
                return Err(Error::SameLimitTwice { limiter: limit.settings.name });
            }
            limits.push(limit);
        }
        Ok(limiter.decide_limits(&StoreRequest { action, limits: &limits }))
    }
}

impl Limiter {
    /// Adjusts the cost of an allowed `decision` about `key` to the units that were actually
    /// `used`. It returns unused units, as [`cancel`](Limiter::cancel) does, or spends missing
    /// ones, as [`spend`](Limiter::spend) does.
    ///
    /// A bucket returns only units that it has not refilled since the decision, separately for each
    /// request: at 100,000 per minute, none of 500 units after 0.3 s. If you settle below the
    /// estimate, use a window, or a token bucket that refills once per interval.
    ///
    /// Settle a decision only once, and do not cancel it as well. To settle several times, bind a
    /// charge to the decision: [`Charge::decided`].
    ///
    /// # Errors
    ///
    /// [`Error::NotDecided`] if the decision spent nothing, such as a denial; [`Error::Store`] if
    /// the store fails.
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
    /// let tokens = Limiter::new("tokens", MemoryStore::new(), Algorithm::SlidingLog, quota);
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
        used: u64,
    ) -> Result<(), Error> {
        let charge = Charge::new_n(self, key, decision.cost()).decided(decision);
        charge.settle(self.name(), used).await
    }
}

impl Part {
    fn cost(&self) -> u64 {
        self.cost.unwrap_or(1)
    }

    /// Returns or spends the difference between the record of this limit and `used`.
    async fn settle(&self, record: &Record, limit: usize, used: u64) -> Result<(), Error> {
        let (returns, missing) = record.adjust(limit, used);
        all(returns.iter().map(|unused| self.return_unused(unused)).collect()).await?;
        if missing == 0 {
            return Ok(());
        }
        let answer = self.limiter.decide(Action::Spend, &self.key, missing, MaxWait::NONE);
        let receipt = answer.await?.receipt(0);
        match record.add(limit, Spent { receipt, units: missing }) {
            Some(unused) => self.return_unused(&unused).await,
            None => Ok(()),
        }
    }

    fn return_unused(&self, Return { spent, units }: &Return) -> StoreFuture<()> {
        self.limiter.release(&self.key, spent.receipt, spent.units, *units)
    }
}

/// Waits for all answers. Returns the last error, if there is one.
async fn all(mut answers: Vec<StoreFuture<()>>) -> Result<(), Error> {
    let mut result = Ok(());
    poll_fn(|cx| {
        answers.retain_mut(|answer| match Pin::new(answer).poll(cx) {
            Poll::Pending => true,
            Poll::Ready(Ok(())) => false,
            Poll::Ready(Err(error)) => {
                result = Err(error);
                false
            }
        });
        if answers.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    result
}
