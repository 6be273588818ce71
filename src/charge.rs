//! Several limits at once.

mod any_limiter;

use std::time::Duration;

use tokio::time::{Instant, sleep};

pub use self::any_limiter::AnyLimiter;
use self::any_limiter::Kind;
use crate::{
    algorithm::{Action, micros},
    decision::Decision,
    error::Error,
    key::Key,
    limiter::{Limiter, MaxWait},
    store::{Answer, Call, Demand},
    turn::{Turn, with_jitter},
    waiters::Place,
};

/// What a request is charged: a cost to a key's quota, or several, all or nothing.
///
/// All limits are asked and charged in one atomic step, and with Redis in one round trip. The request is
/// allowed if each of them allows it, and if one denies it, none is charged. The [`Decision`] is that of the
/// limit that binds: see [`Decision::limiter`].
///
/// # Waiting
///
/// Limits on one key book a turn together: the request goes on when the last of them lets it. If one of them
/// is a leaky bucket, it may wait for the others, too, as long as a full bucket takes to run dry.
///
/// Limits on different keys book none, because a turn that is booked far ahead for one user would push back
/// everybody who shares a limit with him. A request that waits for these asks again when all of them could let
/// it, and up to half as long again, at random: there is no order among those who wait. A leaky bucket among
/// them denies where it would delay alone.
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
/// let charge = Charge::new(&second, "alice")
///     .and(Charge::new(&hour, "alice"))
///     .and(Charge::new(&all, "everybody"));
/// let decision = charge.check().await?;
/// assert!(decision.is_allowed());
/// assert_eq!(decision.limiter(), "second"); // has least remaining
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
#[must_use = "a charge does nothing until it is checked"]
pub struct Charge {
    // A charge of one limit shall need no allocation.
    first: Option<Part>,
    rest: Vec<Part>,
}

#[derive(Clone, Debug)]
struct Part {
    limiter: AnyLimiter,
    key: Key<'static>,
    cost: Option<u32>,
}

impl Charge {
    /// A charge of 1 to `key`'s quota.
    pub fn new<'a>(limiter: impl Into<AnyLimiter>, key: impl Into<Key<'a>>) -> Self {
        let (limiter, key) = (limiter.into(), key.into().into_owned());
        Self { first: Some(Part { limiter, key, cost: None }), rest: vec![] }
    }

    /// A charge of nothing, to nobody: the request goes on, and is not counted.
    pub fn exempt() -> Self {
        Self::default()
    }

    /// Sets the cost, for all limits that are in it by now.
    pub fn cost(mut self, cost: u32) -> Self {
        for part in self.parts_mut() {
            part.cost = Some(cost);
        }
        self
    }

    /// Adds the limits of another charge.
    pub fn and(mut self, other: Self) -> Self {
        if self.is_exempt() {
            return other;
        }
        self.rest.extend(other.first.into_iter().chain(other.rest));
        self
    }

    /// The part of it that the limiter of this name gets; exempt if there is none.
    ///
    /// # Examples
    ///
    /// See [`RateLimitLayer::charge_handle`](crate::RateLimitLayer::charge_handle).
    pub fn of(&self, limiter: &str) -> Self {
        let parts = self.parts().filter(|part| part.limiter.name() == limiter);
        let mut parts = parts.cloned();
        Self { first: parts.next(), rest: parts.collect() }
    }

    /// Whether nobody is charged.
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
        self.ask(MaxWait::OWN)?.await
    }

    /// Tells what [`check`](Charge::check) would answer now, without spending anything.
    ///
    /// # Errors
    ///
    /// As for [`check`](Charge::check).
    ///
    /// # Cancel safety
    ///
    /// The future can be dropped at any time.
    pub async fn peek(&self) -> Result<Decision, Error> {
        self.call(Action::Peek, 0.0, MaxWait::OWN)?.await
    }

    /// Spends the costs and waits until the request may go on, if that is within `timeout`. See
    /// [`Limiter::try_acquire`], and [above](Charge#waiting) for limits on different keys.
    ///
    /// # Errors
    ///
    /// As for [`check`](Charge::check).
    ///
    /// # Cancel safety
    ///
    /// As for [`Limiter::try_acquire`].
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime with time, if it has to wait.
    pub async fn try_acquire(&self, timeout: Duration) -> Result<Decision, Error> {
        let max_wait = MaxWait::UpTo(micros(timeout));
        Turn::new(self.clone(), self.ask(max_wait)?, max_wait, None).wait().await
    }

    /// Spends the costs and waits until the request may go on, as long as it takes. See
    /// [`Limiter::acquire`].
    ///
    /// # Errors
    ///
    /// As for [`check`](Charge::check).
    ///
    /// # Cancel safety
    ///
    /// As for [`Limiter::try_acquire`].
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime with time, if it has to wait.
    pub async fn acquire(&self) -> Result<Decision, Error> {
        loop {
            let max_wait = MaxWait::LONGEST;
            let turn = Turn::new(self.clone(), self.ask(max_wait)?, max_wait, None);
            let decision = turn.wait().await?;
            let Some(retry_after) = decision.retry_after() else { return Ok(decision) };
            sleep(with_jitter(retry_after)).await;
        }
    }

    /// Spends the costs, whether that much is left or not. See [`Limiter::spend`].
    ///
    /// # Errors
    ///
    /// As for [`check`](Charge::check), but for [`Error::CostAboveQuota`].
    ///
    /// # Cancel safety
    ///
    /// As for [`Limiter::check`].
    pub async fn spend(&self) -> Result<Decision, Error> {
        self.call(Action::Spend, 0.0, MaxWait::NONE)?.await
    }

    /// Gives back the costs, and never more than were spent. See [`Limiter::refund`].
    ///
    /// # Errors
    ///
    /// As for [`spend`](Charge::spend).
    ///
    /// # Cancel safety
    ///
    /// As for [`Limiter::check`].
    pub async fn refund(&self) -> Result<(), Error> {
        self.give_back(0.0).await
    }

    /// Gives back what an allowed `decision` about this charge has spent, or the turn that it has booked. See
    /// [`Limiter::cancel`].
    ///
    /// # Errors
    ///
    /// As for [`spend`](Charge::spend).
    ///
    /// # Cancel safety
    ///
    /// As for [`Limiter::check`].
    pub async fn cancel(&self, decision: Decision) -> Result<(), Error> {
        if decision.is_allowed() {
            self.give_back(decision.turn()).await?;
        }
        Ok(())
    }

    async fn give_back(&self, turn: f64) -> Result<(), Error> {
        #[cfg(feature = "redis")]
        if let (Some(Part { limiter: AnyLimiter(Kind::Redisson(limiter)), key, cost }), []) =
            (&self.first, &*self.rest)
        {
            return limiter.for_key(key)?.release(cost.unwrap_or(1)).await;
        }
        let _ = self.call(Action::Refund, turn, MaxWait::NONE)?.await?;
        Ok(())
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

    /// The first key, which stands for the others.
    pub(crate) fn key(&self) -> Option<&Key<'static>> {
        self.first.as_ref().map(|part| &part.key)
    }

    /// Sets the costs that are not set yet.
    pub(crate) fn or_cost(mut self, cost: u32) -> Self {
        for part in self.parts_mut() {
            part.cost.get_or_insert(cost);
        }
        self
    }

    /// Whether turns can be booked: on one key only.
    fn books(&self) -> bool {
        self.limiters().all(AnyLimiter::books)
            && self.rest.iter().all(|part| Some(&part.key) == self.key())
    }

    /// How long it waits at most, in microseconds.
    pub(crate) fn longest_wait(&self, max_wait: MaxWait) -> f64 {
        self.limiters().map(|limiter| limiter.cut(max_wait)).fold(0.0, f64::max)
    }

    /// How long a turn that is booked for all limits may be away: none further than it can be.
    fn bookable(&self, max_wait: MaxWait) -> MaxWait {
        let longest = self.limiters().map(|limiter| limiter.cut(MaxWait::LONGEST));
        let bound = longest.fold(f64::INFINITY, f64::min);
        MaxWait::UpTo(self.longest_wait(max_wait)).at_most(bound)
    }

    /// Until when a request tries again; `None` if it books its turn.
    pub(crate) fn retry_until(&self, max_wait: MaxWait) -> Option<Instant> {
        let wait = if self.books() { 0.0 } else { self.longest_wait(max_wait) };
        (wait > 0.0).then(|| Instant::now() + Duration::from_micros(wait as u64))
    }

    /// How many requests of a key may wait, if nobody says.
    pub(crate) fn default_most_waiting(&self) -> usize {
        self.limiters().map(AnyLimiter::default_most_waiting).max().unwrap_or_default()
    }

    pub(crate) fn ask(&self, max_wait: MaxWait) -> Result<Answer<Decision>, Error> {
        self.call(Action::Check, 0.0, max_wait)
    }

    /// Gives back what `answer` allows, without anybody waiting for it, and drops `place` then.
    pub(crate) fn give_back_later(self, answer: Answer<Decision>, place: Option<Place>) {
        let Some(limiter) = self.limiters().next().cloned() else { return };
        limiter.detach(Box::pin(async move {
            if let Ok(decision) = answer.await {
                // Without an answer the turn passes unused.
                let _ = self.cancel(decision).await;
            }
            drop(place);
        }));
    }

    fn call(
        &self,
        action: Action,
        turn: f64,
        max_wait: MaxWait,
    ) -> Result<Answer<Decision>, Error> {
        let first = self.first.as_ref().ok_or(Error::NoLimits)?;
        let limiter = match &first.limiter.0 {
            Kind::Own(limiter) => limiter,
            #[cfg(feature = "redis")]
            Kind::Redisson(limiter) if self.rest.is_empty() => {
                return limiter.answer(action, &first.key, first.cost.unwrap_or(1));
            }
            #[cfg(feature = "redis")]
            Kind::Redisson(_) => return Err(Error::DifferentStores),
        };
        if self.rest.is_empty() {
            let demands = &[first.demand(limiter, action, max_wait)?];
            return Ok(limiter.store().call(&Call { action, turn, demands }));
        }
        let max_wait = if self.books() { self.bookable(max_wait) } else { MaxWait::NONE };
        let store = limiter.store();
        let mut demands = vec![first.demand(limiter, action, max_wait)?];
        for part in &self.rest {
            let limiter = match &part.limiter.0 {
                Kind::Own(limiter) if limiter.store().names().is_same(store.names()) => limiter,
                _ => return Err(Error::DifferentStores),
            };
            let demand = part.demand(limiter, action, max_wait)?;
            if demands.iter().any(|it| it.is_same(&demand)) {
                return Err(Error::SameLimitTwice { limiter: demand.rule.name });
            }
            demands.push(demand);
        }
        Ok(store.call(&Call { action, turn, demands: &demands }))
    }
}

impl Part {
    fn demand<'a>(
        &'a self,
        limiter: &'a Limiter,
        action: Action,
        max_wait: MaxWait,
    ) -> Result<Demand<'a>, Error> {
        limiter.demand(action, &self.key, self.cost.unwrap_or(1), max_wait)
    }
}
