//! Several limits at once.

mod record;

use std::{future::poll_fn, pin::Pin, sync::Arc, task::Poll, time::Duration};

use tokio::time::Instant;

use self::record::{Record, Return, Spent};
use super::target::AnyLimiter;
use crate::{
    algorithm::Action,
    decision::Decision,
    error::Error,
    keys::Key,
    limiter::{Limiter, MaxWait},
    store::{LimitRequest, StoreFuture, StoreRequest},
};

/// What a request is charged: a cost to a key's quota, or several, all or nothing.
///
/// All limits are asked and charged in one atomic step, and with Redis in one round trip. The request is
/// allowed if each of them allows it, and if one denies it, none is charged. The [`Decision`] is that of the
/// limit that binds: see [`Decision::limiter`].
///
/// # Waiting
///
/// Limits on [one key](Charge::also) book a turn together: the request goes on when the last of them lets it,
/// and whoever comes later to any of them comes after it. If one of them is a leaky bucket, a request may wait
/// for the other limits, too, as long as a full bucket takes to run dry, and also [`check`](Charge::check)
/// returns a delay.
///
/// Limits on [different keys](Charge::and) book none, because a turn that is booked far ahead for one user would
/// push back everybody who shares a limit with him. A request that waits for these asks again: when the limit that
/// denied it has room, and has served the requests of this process that wait for the same limit and key before it. So
/// within a process requests are served in order, and each asks two or three times; processes compete at random. A
/// request that would wait for longer than it may, as far as that is known, is denied at once. A request
/// that has not been denied yet asks at once, and can be served before them. A leaky bucket among the limits denies
/// where it would delay alone.
///
/// # In a cluster
///
/// A Redis Cluster keeps different keys on different servers, which cannot decide together. Limits on one key are
/// charged in one step there, too. Limits on different keys are charged one after the other, in the order in which
/// their keys were added, each in a round trip of its own, and all within one deadline:
///
/// - If one denies, or gives no answer, those behind it are not asked, and what those before it took is given back
///   right afterwards. For that moment it is missing to others, who can be denied for it; nobody gets more than the
///   quota.
/// - What was taken from a limit stays so if its server gave no answer, or gives none when it is to be given back.
/// - [`Decision::retry_after`] is that of the first that denies; one behind it may deny for longer.
/// - [`cancel`](Charge::cancel) and [`refund`](Charge::refund) reach all limits that they can, and fail if that was
///   not all.
///
/// So the limit that denies most often comes first, such as a user's own before the one that all share.
///
/// # Examples
///
/// 10 per second and 1,000 per hour for each user, and 10,000 per second for all of them together:
///
/// ```
/// use tower_ratelimit::{Algorithm, Charge, Limiter, MemoryStore, Quota};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tower_ratelimit::Error> {
/// let store = MemoryStore::new();
/// let limiter = |name, algorithm, quota| Limiter::named(name, store.clone(), algorithm, quota);
/// let second = limiter("second", Algorithm::token_bucket(), Quota::per_second(10));
/// let hour = limiter("hour", Algorithm::sliding_window(), Quota::per_hour(1_000));
/// let all = limiter("all", Algorithm::FixedWindow, Quota::per_second(10_000));
///
/// let charge = Charge::new(&second, "alice").also(&hour).and(Charge::new(&all, "everybody"));
/// let decision = charge.check().await?;
/// assert!(decision.is_allowed());
/// assert_eq!(decision.limiter(), "second"); // has least remaining
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a charge does nothing until it is checked"]
pub struct Charge {
    // A charge of one limit shall need no allocation.
    first: Option<Part>,
    rest: Vec<Part>,
    /// Whether all of it is on one key, because it was made so: two keys can be equal by accident, or because
    /// a client chose his.
    one_key: bool,
    /// What it has spent, once it was [decided](Charge::decided).
    record: Option<Arc<Record>>,
}

#[derive(Clone, Debug)]
struct Part {
    limiter: AnyLimiter,
    key: Key<'static>,
    cost: Option<u32>,
}

impl Charge {
    /// A charge of 1 to `key`'s quota.
    #[inline]
    pub fn new<'a>(limiter: impl Into<AnyLimiter>, key: impl Into<Key<'a>>) -> Self {
        let (limiter, key) = (limiter.into(), key.into().into_owned());
        let first = Some(Part { limiter, key, cost: None });
        Self { first, rest: vec![], one_key: true, record: None }
    }

    /// Makes an empty charge: the request is not counted.
    pub fn exempt() -> Self {
        Self { first: None, rest: vec![], one_key: true, record: None }
    }

    /// Sets the cost to the limit that was added last.
    pub fn cost(mut self, cost: u32) -> Self {
        if let Some(part) = self.parts_mut().last() {
            part.cost = Some(cost);
        }
        self
    }

    /// Adds a limit on the same key. An exempt charge has no key, and stays exempt.
    ///
    /// The result is not [decided](Charge::decided), even if `self` was: the decision was not about the new limit. The
    /// same holds for [`and`](Charge::and) and [`of`](Charge::of).
    ///
    /// # Examples
    ///
    /// A request, and the 500 tokens that it may use:
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Charge, Limiter, MemoryStore, Quota};
    /// # let store = MemoryStore::new();
    /// # let limiter = |name, quota| {
    /// #     Limiter::named(name, store.clone(), Algorithm::token_bucket(), quota)
    /// # };
    /// let requests = limiter("requests", Quota::per_minute(60));
    /// let tokens = limiter("tokens", Quota::per_minute(100_000));
    /// let charge = Charge::new(&requests, "alice").also(&tokens).cost(500);
    /// # let _ = charge;
    /// ```
    pub fn also(mut self, limiter: impl Into<AnyLimiter>) -> Self {
        if let Some(Part { key, .. }) = self.parts().last() {
            let part = Part { limiter: limiter.into(), key: key.clone(), cost: None };
            self.rest.push(part);
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

    /// The part of it that the limiter of this name gets; exempt if there is none.
    pub fn of(&self, limiter: &str) -> Self {
        let parts = self.parts().filter(|part| part.limiter.name() == limiter);
        Self::of_parts(parts.cloned(), self.one_key)
    }

    /// Returns whether the charge is empty.
    #[must_use]
    pub fn is_exempt(&self) -> bool {
        self.first.is_none()
    }

    /// Spends the costs if that much is left of all quotas. See [`Limiter::check_n`].
    ///
    /// # Errors
    ///
    /// [`Error::NoLimits`], [`Error::SameLimitTwice`] and [`Error::DifferentStores`] for a charge that cannot
    /// be, [`Error::ZeroCost`] and [`Error::CostAboveQuota`] for a cost that cannot be, at once and without
    /// spending; [`Error::Store`] if the store gives no answer.
    ///
    /// # Cancel safety
    ///
    /// As for [`Limiter::check`].
    pub async fn check(&self) -> Result<Decision, Error> {
        self.decide(Action::Check, MaxWait::DEFAULT)?.await
    }

    /// Returns what [`check`](Charge::check) would return now. It spends nothing.
    ///
    /// # Errors
    ///
    /// As for [`check`](Charge::check), and [`Error::Unsupported`] if Redisson shares the limiter.
    ///
    /// # Cancel safety
    ///
    /// The future can be dropped at any time.
    pub async fn peek(&self) -> Result<Decision, Error> {
        self.decide(Action::Peek, MaxWait::DEFAULT)?.await
    }

    /// Spends the costs, even if less is left. See [`Limiter::spend`]. An exempt charge spends nothing.
    ///
    /// # Errors
    ///
    /// As for [`check`](Charge::check), but for [`Error::NoLimits`] and [`Error::CostAboveQuota`];
    /// [`Error::Unsupported`] if Redisson shares the limiter.
    ///
    /// # Cancel safety
    ///
    /// As for [`Limiter::check`].
    pub async fn spend(&self) -> Result<(), Error> {
        if !self.is_exempt() {
            let _ = self.decide(Action::Spend, MaxWait::NONE)?.await?;
        }
        Ok(())
    }

    /// Grants the costs to their keys, up to what was spent. See [`Limiter::refund`]. An exempt charge grants nothing.
    ///
    /// A refund names no decision, so it returns what any request has spent. To return what one request did not use, call
    /// [`settle`](Charge::settle) or [`cancel`](Charge::cancel).
    ///
    /// # Errors
    ///
    /// As for [`spend`](Charge::spend), but for [`Error::Unsupported`].
    ///
    /// # Cancel safety
    ///
    /// As for [`Limiter::check`].
    pub async fn refund(&self) -> Result<(), Error> {
        match (&self.first, &*self.rest) {
            (None, _) => Ok(()),
            (Some(part), []) if let Some(target) = part.limiter.as_foreign() => {
                target.refund(&part.key, part.cost()).await
            }
            _ => self.decide(Action::Refund, MaxWait::NONE)?.await.map(drop),
        }
    }

    /// Binds the charge to the `decision` that was made about it. A bound charge has a record of what it has spent,
    /// and can be [settled](Charge::settle).
    ///
    /// The decision must be that of this charge: with the same limits, keys and costs. Clones share the record. Two charges
    /// that are bound to one decision do not: settle only one of them.
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
    ///     Limiter::named(name, store.clone(), Algorithm::token_bucket(), quota)
    /// };
    /// let requests = limiter("requests", Quota::per_day(60));
    /// let tokens = limiter("tokens", Quota::per_day(100_000));
    ///
    /// let charge = Charge::new(&requests, "alice").also(&tokens).cost(500);
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

    /// Adjusts the cost that was charged to a limiter to the units that were really `used`: returns the rest, as
    /// [`Limiter::cancel`] does, or spends what is missing, as [`Limiter::spend`] does.
    ///
    /// The charge must be bound to its decision: by [`decided`](Charge::decided), or by a layer with
    /// [`charge_handle`](crate::RateLimitLayer::charge_handle). Settling an exempt charge does nothing, and so does
    /// settling one that was [cancelled](Charge::cancel), or whose response is
    /// [not charged](crate::RateLimitLayer::charge_when).
    ///
    /// It can be called again, with a larger or a smaller number. Make these calls one after the other: two at the same time
    /// may both spend what is missing. If one limiter is charged for several keys, each key is settled.
    ///
    /// A bucket returns only what it has not refilled since the decision, and that of each request apart: after 0.3 s
    /// nothing of 500 units at 100,000 per minute. Count what is settled downwards in a window, or in a token bucket
    /// that refills at once.
    ///
    /// If the store gives no answer, or the future is dropped, units that were to be returned may stay spent, and no
    /// later call returns them; units that were missing may be spent, and a later call spends them again.
    ///
    /// # Errors
    ///
    /// - [`Error::NotDecided`] if the charge is not bound, or its decision spent nothing, as a denied one.
    /// - [`Error::NotCharged`] if no limiter of that name is charged.
    /// - [`Error::Unsupported`] if more was used than was charged and Redisson shares the limiter.
    /// - [`Error::Store`] if the store gives no answer. All keys are tried, also if one fails.
    ///
    /// # Cancel safety
    ///
    /// As for [`Limiter::check`].
    ///
    /// # Examples
    ///
    /// See [`RateLimitLayer::charge_handle`](crate::RateLimitLayer::charge_handle).
    pub async fn settle(&self, limiter: &str, used: u32) -> Result<(), Error> {
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

    /// The same charge to limiters with a share of the quotas over stores in memory; `None` if one of them cannot
    /// have any.
    pub(crate) fn to_share(&self, share: f64) -> Option<Self> {
        let parts = self.parts().map(|part| {
            let limiter = part.limiter.own().ok()?.to_share(share).into();
            Some(Part { limiter, ..part.clone() })
        });
        let parts = parts.collect::<Option<Vec<_>>>()?;
        Some(Self::of_parts(parts.into_iter(), self.one_key))
    }

    /// Returns the decision of a request that proceeds uncounted; `None` if the quota is unknown.
    pub(crate) fn uncounted_decision(&self) -> Option<Decision> {
        let Part { limiter, cost, .. } = self.first.as_ref()?;
        let limiter = limiter.own().ok()?;
        Some(Decision::uncounted(limiter.policy(cost.unwrap_or(1))))
    }

    fn of_parts(mut parts: impl Iterator<Item = Part>, one_key: bool) -> Self {
        Self { first: parts.next(), rest: parts.collect(), one_key, record: None }
    }

    /// Returns what an allowed `decision` about this charge has spent or reserved. See [`Limiter::cancel`].
    ///
    /// If the charge is [bound](Charge::decided) to this decision, it returns what is still charged after calls of
    /// [`settle`](Charge::settle), and nothing a second time. Otherwise cancel a decision only once.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] if the store gives no answer. All limits are tried, also if one fails.
    ///
    /// # Cancel safety
    ///
    /// As for [`Limiter::check`].
    pub async fn cancel(&self, decision: Decision) -> Result<(), Error> {
        let own = self.record.as_ref().filter(|record| record.is_of(&decision));
        let charge = own.map_or_else(|| self.clone().decided(&decision), |_| self.clone());
        let returns = charge.take_returns();
        all(returns.iter().map(|(part, it)| part.release(it)).collect()).await
    }

    /// Returns in the background what the charge has spent, as far as that is possible.
    pub(crate) fn release_in_background(&self) {
        for (part, Return { spent, units }) in self.take_returns() {
            part.limiter.release_in_background(&part.key, &spent.receipt, spent.units, units);
        }
    }

    /// All that the charge has spent, which it is not charged any more.
    fn take_returns(&self) -> Vec<(&Part, Return)> {
        let Some(record) = &self.record else { return vec![] };
        let returns = self.parts().zip(record.cancel());
        returns.flat_map(|(part, all)| all.into_iter().map(move |it| (part, it))).collect()
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

    /// The limiters of this crate with their keys and costs, in the order in which they were added.
    pub(crate) fn own_parts(&self) -> impl Iterator<Item = (&Limiter, &Key<'static>, u32)> {
        self.parts().filter_map(|it| Some((it.limiter.own().ok()?, &it.key, it.cost.unwrap_or(1))))
    }

    pub(crate) fn keys(&self) -> impl Iterator<Item = &Key<'static>> {
        self.parts().map(|part| &part.key)
    }

    /// Sets the costs that are not set yet.
    pub(crate) fn or_cost(mut self, cost: u32) -> Self {
        for part in self.parts_mut() {
            part.cost.get_or_insert(cost);
        }
        self
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

    /// Until when a request tries again; `None` if it books its turn.
    pub(crate) fn retry_until(&self, max_wait: MaxWait) -> Option<Instant> {
        let wait = if self.reserves() { 0.0 } else { self.resolve(max_wait) };
        (wait > 0.0).then(|| Instant::now() + Duration::from_micros(wait as u64))
    }

    /// Returns the default number of requests of a key that can wait.
    pub(crate) fn default_max_waiting(&self) -> usize {
        self.limiters().map(AnyLimiter::default_max_waiting).max().unwrap_or_default()
    }

    /// Decides about all limits: the door through which all decisions of a charge go.
    pub(crate) fn decide(
        &self,
        action: Action,
        max_wait: MaxWait,
    ) -> Result<StoreFuture<Decision>, Error> {
        let first = self.first.as_ref().ok_or(Error::NoLimits)?;
        if self.rest.is_empty() {
            return first.limiter.decide(action, &first.key, first.cost(), max_wait);
        }
        let limiter = first.limiter.own()?;
        let max_wait = if self.reserves() { self.reservable(max_wait) } else { MaxWait::NONE };
        let names = limiter.store().as_dyn().names();
        let mut limits = vec![first.request(limiter, action, max_wait)?];
        for part in &self.rest {
            let limiter = part.limiter.own()?;
            if !limiter.store().as_dyn().names().is_same(names) {
                return Err(Error::DifferentStores);
            }
            let limit = part.request(limiter, action, max_wait)?;
            if limits.iter().any(|other| other.is_same_limit(&limit)) {
                return Err(Error::SameLimitTwice { limiter: limit.settings.name });
            }
            limits.push(limit);
        }
        Ok(limiter.decide_limits(&StoreRequest { action, limits: &limits }))
    }
}

impl Part {
    fn request<'a>(
        &'a self,
        limiter: &'a Limiter,
        action: Action,
        max_wait: MaxWait,
    ) -> Result<LimitRequest<'a>, Error> {
        limiter.request(action, &self.key, self.cost(), max_wait)
    }

    fn cost(&self) -> u32 {
        self.cost.unwrap_or(1)
    }

    /// Returns or spends what the record of this limit differs by from `used`.
    async fn settle(&self, record: &Record, limit: usize, used: u32) -> Result<(), Error> {
        let (returns, missing) = record.adjust(limit, used);
        all(returns.iter().map(|it| self.release(it)).collect()).await?;
        if missing == 0 {
            return Ok(());
        }
        let answer = self.limiter.decide(Action::Spend, &self.key, missing, MaxWait::NONE)?;
        let receipt = answer.await?.receipt().of(0);
        match record.add(limit, Spent { receipt, units: missing }) {
            Some(it) => self.release(&it).await,
            None => Ok(()),
        }
    }

    fn release(&self, Return { spent, units }: &Return) -> StoreFuture<()> {
        self.limiter.release(&self.key, &spent.receipt, spent.units, *units)
    }
}

/// Waits for all answers, and returns the last error, if there is one.
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
