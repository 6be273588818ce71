//! `Charge`: the limits, keys and costs of one request. Its checks and holds are in `check.rs` and
//! `hold.rs`.

use std::{sync::Arc, time::Duration};

use smallvec::{SmallVec, smallvec};
use tokio::time::Instant;

use super::{
    handle::{AnyLimiter, ForeignLimiter, IntoLimiter, Limiter, unheld},
    version::{MaxWait, Version},
};
use crate::{
    algorithm::{Action, PerLimit},
    decision::{Decision, KeyState, Outcome, Receipts},
    error::Error,
    keys::Key,
    observe::Observers,
    store::{LimitRequest, Offer, Reporting, StoreFuture, StoreRequest, Task, report_decided},
};

/// The charge of a request: its limits, keys and costs.
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
/// let all = limiter("all", Algorithm::fixed_window(), Quota::per_second(10_000));
///
/// let charge = Charge::new(&second, "alice").also(&hour).and(Charge::new(&all, "all users"));
/// let decision = charge.check().await?;
/// assert!(decision.is_allowed());
/// assert_eq!(decision.limiter(), "second"); // has the fewest units left
/// # Ok(())
/// # }
/// ```
///
/// # Methods
///
/// | to | call |
/// |---|---|
/// | charge a limit | [`new`](Charge::new) |
/// | add a limit on the same key, or on another one | [`also`](Charge::also), [`and`](Charge::and) |
/// | set the cost of the last limit | [`cost`](Charge::cost), [`estimate`](Charge::estimate) |
/// | count nothing | [`exempt`](Charge::exempt) |
/// | decide | [`check`](Charge::check), [`hold`](Charge::hold) |
/// | look | [`peek`](Charge::peek) |
/// | spend or return units, whatever is left | [`spend`](Charge::spend), [`refund`](Charge::refund) |
///
/// # Details
///
/// All limits are checked and charged in one atomic step, and with Redis in one round trip; a
/// [cluster](Charge#in-a-cluster) is an exception. If one limit denies the request, no limit is
/// charged. The [`Decision`] is about the limit that binds: the one with the least left, or the
/// one that denies. See [`Decision::limiter`].
///
/// # Waiting
///
/// Limits on [one key](Charge::also) make a reservation together: the request proceeds when all of
/// them allow it, and later requests to any of them proceed after it. If one of the limits is a
/// leaky bucket, the default wait is that of the bucket for all of them: up to the time in which a
/// full bucket drains. [`check`](Charge::check) can then return a delay, too.
///
/// Limits on [different keys](Charge::and) make no reservation: a distant instant that is reserved
/// for one user would delay all users who share a limit with that user. A waiting request stands in
/// a [line](crate::guide::waiting#in-a-line) instead:
///
/// - It checks when the limit that denied it has units left, and after the requests of this process
///   that came before and wait for one of its keys. Between processes, the order is not defined.
/// - It is denied immediately if its wait is known to be too long.
/// - A request that may not wait checks immediately, and can be served before waiting ones.
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
/// - [`refund`](Charge::refund) changes all limits that it can reach, and returns an error if it
///   could not reach all.
///
/// So add the limit that denies most often first, such as the limit of a user before the limit that
/// all users share.
#[derive(Clone, Debug)]
#[must_use = "a charge does nothing until it is checked"]
pub struct Charge {
    /// None, if the request is not counted.
    parts: Parts,
    /// True if all limits were added on one key. Equal keys do not suffice: they can be equal by
    /// accident, or because a client chose its key.
    one_key: bool,
    /// Whether decisions say what is left of each of several limits.
    counts: bool,
}

/// One limit needs no allocation.
type Parts = SmallVec<[Part; 2]>;

#[derive(Clone, Debug)]
struct Part {
    limiter: AnyLimiter,
    key: Key<'static>,
    cost: Option<u64>,
    /// True if the cost is an estimate, which is held.
    is_estimate: bool,
}

impl Charge {
    /// Creates a charge of one unit to `key`; [`cost`](Charge::cost) changes that. In a layer, it
    /// is a charge of the [cost](crate::RateLimitLayer::cost) that the layer computes.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Charge, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// let charge = Charge::new(&limiter, "alice");
    /// assert_eq!(charge.check().await?.remaining(), 2);
    /// # Ok(())
    /// # }
    /// ```
    #[inline]
    pub fn new<'a>(limiter: impl IntoLimiter, key: impl Into<Key<'a>>) -> Self {
        Self::of_part(limiter.into_limiter(), key.into(), None)
    }

    /// Creates a charge of `units` to `key`.
    #[inline]
    pub(crate) fn of_units<'a>(
        limiter: impl IntoLimiter,
        key: impl Into<Key<'a>>,
        units: u64,
    ) -> Self {
        Self::of_part(limiter.into_limiter(), key.into(), Some(units))
    }

    #[inline]
    fn of_part(limiter: AnyLimiter, key: Key<'_>, cost: Option<u64>) -> Self {
        let part = Part { limiter, key: key.into_owned(), cost, is_estimate: false };
        Self { parts: smallvec![part], one_key: true, counts: false }
    }

    /// Creates an empty charge: the request is not counted.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::Charge;
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let charge = Charge::exempt(); // a health check, say
    /// assert!(charge.spend().await?.is_none()); // nothing is counted
    /// # Ok(())
    /// # }
    /// ```
    #[inline]
    pub fn exempt() -> Self {
        Self { parts: Parts::new(), one_key: true, counts: false }
    }

    /// Adds a limit on the same key, which is charged one unit, or the
    /// [cost](crate::RateLimitLayer::cost) of the layer; [`cost`](Charge::cost) changes that. An
    /// exempt charge has no key, and stays exempt.
    ///
    /// # Examples
    ///
    /// One request, and 500 tokens:
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Charge, Limiter, MemoryStore, Quota};
    /// # let store = MemoryStore::new();
    /// # let limiter = |name, quota| {
    /// #     Limiter::new(name, store.clone(), Algorithm::token_bucket(), quota)
    /// # };
    /// let requests = limiter("requests", Quota::per_minute(60));
    /// let tokens = limiter("tokens", Quota::per_minute(100_000));
    /// let charge = Charge::new(&requests, "alice").also(&tokens).cost(500);
    /// # let _ = charge;
    /// ```
    #[inline]
    pub fn also(mut self, limiter: impl IntoLimiter) -> Self {
        if let Some(last) = self.parts.last() {
            let (limiter, key) = (limiter.into_limiter(), last.key.clone());
            self.parts.push(Part { limiter, key, cost: None, is_estimate: false });
        }
        self
    }

    /// Sets the cost of the limit that was added last, in a layer in place of the
    /// [cost](crate::RateLimitLayer::cost) that the layer computes. It replaces an
    /// [estimate](Charge::estimate). An exempt charge stays exempt.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Charge, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// let charge = Charge::new(&limiter, "alice").cost(2);
    /// assert_eq!(charge.check().await?.remaining(), 1);
    /// # Ok(())
    /// # }
    /// ```
    pub fn cost(mut self, units: u64) -> Self {
        if let Some(last) = self.parts.last_mut() {
            (last.cost, last.is_estimate) = (Some(units), false);
        }
        self
    }

    /// Makes the cost of the limit that was added last an estimate of `n` units. They are held, and
    /// not spent, until their [`Permit`](crate::Permit) ends: call [`hold`](Charge::hold) instead
    /// of [`check`](Charge::check). An exempt charge stays exempt.
    ///
    /// The other limits are spent at once: a hold of everything would keep the place of a request
    /// for as long as it is served.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Charge, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// let charge = Charge::new(&limiter, "alice").estimate(3);
    /// if let Some(permit) = charge.hold().await?.admitted() {
    ///     permit.settle(1); // 2 return
    /// }
    /// assert_eq!(limiter.peek("alice").await?.remaining(), 2);
    /// # Ok(())
    /// # }
    /// ```
    pub fn estimate(mut self, n: u64) -> Self {
        if let Some(last) = self.parts.last_mut() {
            (last.cost, last.is_estimate) = (Some(n), true);
        }
        self
    }

    /// Makes the costs of all limits estimates.
    pub(crate) fn estimate_all(mut self) -> Result<Self, Error> {
        for part in self.parts.iter_mut() {
            if !part.limiter.can_hold() {
                return Err(Error::CannotHold { limiter: part.limiter.name().to_owned().into() });
            }
            part.is_estimate = true;
        }
        Ok(self)
    }

    /// Adds the limits of another charge, on another key.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Charge, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let store = MemoryStore::new();
    /// # let second = Quota::per_second(50);
    /// # let second = Limiter::new("second", store.clone(), Algorithm::token_bucket(), second);
    /// # let day = Limiter::new("day", store, Algorithm::fixed_window(), Quota::per_day(1_000));
    /// let charge = Charge::new(&second, "alice").and(Charge::new(&day, "all users"));
    /// assert_eq!(charge.check().await?.limiter(), "second");
    /// # Ok(())
    /// # }
    /// ```
    pub fn and(mut self, other: Self) -> Self {
        if self.is_exempt() {
            return other;
        }
        self.one_key &= other.is_exempt();
        self.counts |= other.counts;
        self.parts.extend(other.parts);
        self
    }

    /// Returns the part of the charge to the limiter of this name; exempt if there is none. For
    /// [`spend`](Charge::spend) and [`refund`](Charge::refund) of another number of units than the
    /// request costs, set its [`cost`](Charge::cost): of several keys of this limiter, only the
    /// last one gets it.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Charge, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let store = MemoryStore::new();
    /// # let second = Quota::per_second(50);
    /// # let second = Limiter::new("second", store.clone(), Algorithm::token_bucket(), second);
    /// # let day = Limiter::new("day", store, Algorithm::fixed_window(), Quota::per_day(1_000));
    /// let charge = Charge::new(&second, "alice").also(&day).cost(5);
    /// let _ = charge.check().await?;
    /// charge.of("day").refund().await?; // only the day gets its units back
    /// assert_eq!(day.peek("alice").await?.remaining(), 1_000);
    /// # Ok(())
    /// # }
    /// ```
    pub fn of(&self, limiter: &str) -> Self {
        let mut charge = self.clone();
        charge.parts.retain(|part| part.limiter.name() == limiter);
        charge
    }

    /// Returns whether the charge is empty.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Charge, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// assert!(Charge::exempt().is_exempt());
    /// assert!(!Charge::new(&limiter, "alice").is_exempt());
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    #[inline]
    pub fn is_exempt(&self) -> bool {
        self.parts.is_empty()
    }

    /// Returns the state of the key at the limit that binds, and whether [`check`](Charge::check)
    /// would be allowed now. It spends nothing.
    ///
    /// # Errors
    ///
    /// As for [`Check::peek`](crate::call::Check::peek).
    ///
    /// # Cancel safety
    ///
    /// The future can be dropped at any time.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Charge, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let store = MemoryStore::new();
    /// # let second = Quota::per_second(50);
    /// # let second = Limiter::new("second", store.clone(), Algorithm::token_bucket(), second);
    /// # let day = Limiter::new("day", store, Algorithm::fixed_window(), Quota::per_day(1_000));
    /// let state = Charge::new(&second, "alice").also(&day).peek().await?;
    /// assert!(state.allows());
    /// assert_eq!(state.limiter(), "second");
    /// # Ok(())
    /// # }
    /// ```
    pub async fn peek(&self) -> Result<KeyState, Error> {
        self.check().peek().await
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
    /// - [`Error::Redisson`] if Redisson shares the limiter.
    /// - [`Error::Store`] if the store fails.
    ///
    /// # Cancel safety
    ///
    /// As for [`Limiter::check`].
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Charge, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let store = MemoryStore::new();
    /// # let second = Quota::per_second(50);
    /// # let second = Limiter::new("second", store.clone(), Algorithm::token_bucket(), second);
    /// # let day = Limiter::new("day", store, Algorithm::fixed_window(), Quota::per_day(1_000));
    /// let charge = Charge::new(&second, "alice").also(&day).cost(1_200);
    /// charge.spend().await?; // more than the day has left
    /// assert!(!day.peek("alice").await?.allows());
    /// # Ok(())
    /// # }
    /// ```
    pub async fn spend(&self) -> Result<Option<KeyState>, Error> {
        self.change(Action::Spend).await
    }

    /// Grants the costs to their keys, up to the units that were spent. See [`Limiter::refund`]. An
    /// exempt charge grants nothing.
    ///
    /// A refund refers to no decision, so it returns units that any request has spent. To return
    /// the unused units of one request, [hold](Charge::hold) them.
    ///
    /// Returns the state afterwards, at the limit that binds; `None` if the charge is exempt, or if
    /// Redisson shares the limiter. Costs of 0 count as for [`spend`](Charge::spend).
    ///
    /// # Errors
    ///
    /// As for [`spend`](Charge::spend); a limiter that Redisson shares supports it.
    ///
    /// # Cancel safety
    ///
    /// As for [`Limiter::check`].
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Charge, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let store = MemoryStore::new();
    /// # let second = Quota::per_second(50);
    /// # let second = Limiter::new("second", store.clone(), Algorithm::token_bucket(), second);
    /// # let day = Limiter::new("day", store, Algorithm::fixed_window(), Quota::per_day(1_000));
    /// let charge = Charge::new(&second, "alice").also(&day).cost(10);
    /// let _ = charge.check().await?;
    /// charge.refund().await?;
    /// assert_eq!(day.peek("alice").await?.remaining(), 1_000);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn refund(&self) -> Result<Option<KeyState>, Error> {
        if let Some((limiter, key, cost)) = self.foreign() {
            if cost > 0 {
                limiter.refund(key, cost).await?;
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
            return Ok(Some(KeyState::changed(changed.decision)));
        }
        charge = self.clone();
        charge.parts.iter_mut().for_each(|part| part.cost = None);
        Ok(Some(charge.peek().await?))
    }

    /// Returns the limiter and the key of a charge to one limiter of this crate.
    pub(super) fn single(&self) -> Option<(&Limiter, &Key<'static>)> {
        let part = self.only_part()?;
        Some((part.limiter.own()?, &part.key))
    }

    /// Returns the limiter in a foreign format, the key and the cost, if it is the only one.
    pub(super) fn foreign(&self) -> Option<(&dyn ForeignLimiter, &Key<'static>, u64)> {
        let part = self.only_part()?;
        Some((part.limiter.as_foreign()?, &part.key, part.cost()))
    }

    /// Returns the charge to limiters with a fraction of the quotas over stores in memory; `None`
    /// if one of the limiters has no such fallback.
    pub(crate) fn fallback(&self, fraction: f64) -> Option<Self> {
        let mut charge = self.clone();
        for part in charge.parts.iter_mut() {
            part.limiter = part.limiter.own()?.fallback(fraction)?.into_limiter();
        }
        Some(charge)
    }

    /// Returns whether the costs are such that all limits can grant them to this action.
    pub(super) fn can_be_granted(&self, action: Action) -> bool {
        let can_hold = |part: &Part| action.holds() && part.limiter.can_hold();
        self.parts.iter().all(|part| part.cost() > 0)
            && self.own_parts().all(|(limiter, _, cost)| cost <= limiter.max_cost())
            && self.parts.iter().all(|part| !part.holds() || can_hold(part))
    }

    /// Returns the decision of a request that proceeds uncounted; `None` if the quota is unknown.
    pub(crate) fn uncounted_decision(&self) -> Option<Decision> {
        let part = self.parts.first()?;
        Some(Decision::uncounted(part.limiter.own()?.current().settings.policy(part.cost())))
    }

    /// Returns the units that a request has taken, in the background, if possible.
    pub(crate) fn release_in_background(&self, receipts: &Receipts) {
        drop(self.begin_release(receipts, None));
    }

    /// Offers a reserved instant to other requests, and then returns it in the background.
    pub(crate) fn release_offer(&self, offer: Offer) {
        let offer = Arc::new(offer);
        drop(self.begin_release(offer.receipts(), Some(&offer)));
    }

    /// Gives back an instant that was reserved for the request.
    pub(super) fn give_back(&self, due: Instant, receipts: Receipts) {
        match self.bookings() {
            None => self.release_in_background(&receipts),
            Some(bookings) => {
                let group = self.booking_group(&bookings);
                self.release_offer(bookings.give_back(group, due, receipts));
            }
        }
    }

    /// Begins to return the units that a request has taken. Returns what is left to wait for until
    /// they are back.
    pub(super) fn begin_release(
        &self,
        receipts: &Receipts,
        offer: Option<&Arc<Offer>>,
    ) -> Vec<Task> {
        let released = self.parts.iter().enumerate().filter_map(|(index, part)| {
            let receipt = receipts.get(index);
            part.limiter.release_in_background(&part.key, &receipt, part.cost(), offer)
        });
        released.collect()
    }

    /// Returns the part of a charge to one limiter.
    fn only_part(&self) -> Option<&Part> {
        if let [part] = &*self.parts { Some(part) } else { None }
    }

    pub(crate) fn limiters(&self) -> impl Iterator<Item = &AnyLimiter> {
        self.parts.iter().map(|part| &part.limiter)
    }

    /// Returns whether each answer is there at once.
    pub(super) fn is_immediate(&self) -> bool {
        self.limiters().all(AnyLimiter::is_immediate)
    }

    /// Returns the limiters of this crate with their keys and costs, in the order in which they
    /// were added.
    pub(super) fn own_parts(&self) -> impl Iterator<Item = (&Limiter, &Key<'static>, u64)> {
        self.parts.iter().filter_map(Part::own)
    }

    /// Returns the parts of [`own_parts`](Self::own_parts) whose units are held.
    pub(super) fn held_parts(&self) -> impl Iterator<Item = (&Limiter, &Key<'static>, u64)> {
        self.parts.iter().filter(|part| part.holds()).filter_map(Part::own)
    }

    /// Returns whether a request that is denied because of held units waits for them.
    pub(super) fn can_wait_for_holds(&self, max_wait: MaxWait) -> bool {
        (max_wait.is_asked_for() || self.holds_units()) && self.resolve(max_wait) > 0
    }

    /// Returns whether units of a limit are held.
    pub(crate) fn holds_units(&self) -> bool {
        self.parts.iter().any(Part::holds)
    }

    pub(crate) fn keys(&self) -> impl Iterator<Item = &Key<'static>> {
        self.parts.iter().map(|part| &part.key)
    }

    /// Sets the costs that are not set yet.
    pub(crate) fn or_cost(mut self, cost: u64) -> Self {
        for part in self.parts.iter_mut() {
            part.cost.get_or_insert(cost);
        }
        self
    }

    /// Lets decisions say what is left of each of several limits, as the headers of a layer do.
    pub(crate) fn with_counts(mut self) -> Self {
        self.counts = true;
        self
    }

    /// Removes the limits with a cost of 0.
    pub(crate) fn without_free_limits(mut self) -> Self {
        self.parts.retain(|part| part.cost != Some(0));
        self
    }

    /// Returns whether instants can be reserved.
    pub(super) fn reserves(&self) -> bool {
        self.one_key
            && !self.holds_units()
            && self.limiters().all(|limiter| limiter.own().is_some())
    }

    /// Resolves a wait in microseconds: the longest of all limits.
    pub(crate) fn resolve(&self, max_wait: MaxWait) -> u64 {
        self.limiters().map(|limiter| limiter.resolve(max_wait)).max().unwrap_or_default()
    }

    /// Returns the instant until which a denied request retries; `None` if it makes a reservation
    /// instead.
    pub(super) fn retry_deadline(&self, max_wait: MaxWait) -> Option<Instant> {
        // A reservation needs no retries: the first answer says whether there is an instant.
        let wait = if self.reserves() { 0 } else { self.resolve(max_wait) };
        (wait > 0).then(|| Instant::now() + Duration::from_micros(wait))
    }

    /// Returns the default number of requests of a key that can wait.
    pub(super) fn default_max_waiting(&self) -> usize {
        self.limiters().map(AnyLimiter::default_max_waiting).max().unwrap_or_default()
    }

    /// Decides about all limits. `HOLD` spends the units of those that can be spent and are no
    /// estimate, and `Check` is an error if not all of them are.
    pub(crate) fn decide(&self, action: Action, max_wait: MaxWait) -> StoreFuture<Outcome> {
        let fail = |error| StoreFuture::ready(Err(error));
        let find_estimate = || self.parts.iter().find(|part| part.is_estimate);
        if let (Action::Check, Some(part)) = (action, find_estimate()) {
            return fail(Error::HasEstimate { limiter: part.limiter.name().to_owned().into() });
        }
        if let Some(part) = self.only_part() {
            let action = if part.holds() { action } else { unheld(action) };
            return part.limiter.decide(action, &part.key, part.cost(), max_wait);
        }
        let Some(first) = self.parts.first() else { return fail(Error::NoLimits) };
        let Some(store) = first.limiter.own().map(Limiter::store) else {
            return fail(Error::DifferentStores);
        };

        // Taken once: a quota that is changed meanwhile must not mix with the old one in a request.
        let mut versions = PerLimit::new();
        for part in &self.parts {
            match part.limiter.own() {
                Some(limiter) if limiter.store().names().is_same(store.names()) => {
                    versions.push((limiter, limiter.current()));
                }
                _ => return fail(Error::DifferentStores),
            }
        }
        let mut limits: PerLimit<LimitRequest<'_>> = PerLimit::new();
        let (mut wait, mut reservable, mut holds) = (0, u64::MAX, false);
        for (part, (limiter, version)) in self.parts.iter().zip(&versions[..]) {
            let version: &Version = version;
            let is_held = part.is_estimate || !version.spends;
            let action = if is_held { action } else { unheld(action) };
            if let Some(error) = version.refusal(action, part.cost()) {
                return fail(error);
            }
            let limit = limiter.request(version, action, &part.key, part.cost(), 0);
            // All limits are looked at before one is charged: a limit that is there twice would
            // admit what fits once (law 2). Quadratic, for a handful of limits.
            if limits.iter().any(|other| other.is_same_limit(&limit)) {
                return fail(Error::SameLimitTwice { limiter: limit.settings.name.into() });
            }
            limits.push(limit);
            holds |= is_held;
            wait = version.resolve(max_wait).max(wait);
            reservable = version.max_reservable.min(reservable);
        }
        let waits = (max_wait.is_asked_for() || holds) && wait > 0;
        if self.one_key && !holds && wait > 0 {
            limits.iter_mut().for_each(|limit| limit.max_wait = wait.min(reservable));
        }
        let (counts, reporting) = (self.counts, Reporting::of_waiting(waits));
        let action = unheld(action);
        store.decide(&StoreRequest { action, limits: &limits, reporting, counts })
    }

    /// Reports a decision about the charge that its store has not reported.
    pub(super) fn report(&self, decision: &Decision) {
        let limits = self.parts.iter().map(|part| {
            let observers: &Observers = part.limiter.observers();
            (part.limiter.name(), observers, &part.key)
        });
        report_decided(limits, decision, None);
    }
}

impl Part {
    /// Returns whether the units are held: those of an estimate, or at a time.
    fn holds(&self) -> bool {
        self.is_estimate || self.limiter.only_holds()
    }

    fn cost(&self) -> u64 {
        self.cost.unwrap_or(1)
    }

    /// Returns the limiter, unless it is foreign, with the key and the cost.
    fn own(&self) -> Option<(&Limiter, &Key<'static>, u64)> {
        Some((self.limiter.own()?, &self.key, self.cost()))
    }
}
