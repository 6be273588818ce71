//! `Check`: the check of a limiter or a charge, a future. `acquire.rs` and `hold.rs` have the calls
//! that wait and hold, and `reservation.rs` the call that reserves.

use std::{
    borrow::Cow,
    pin::Pin,
    task::{Context, Poll, Waker},
    time::Duration,
};

use super::{
    acquire::Acquire,
    call::{BEGUN, Call},
    charge::Charge,
    handle::Limiter,
    recovery::Recovery,
    version::MaxWait,
};
use crate::{
    algorithm::Action,
    decision::{Decision, KeyState, Outcome},
    error::Error,
    keys::Key,
    store::StoreFuture,
};

impl Limiter {
    /// Spends 1 unit of the quota of `key` if one is left: await the call. Its methods spend more
    /// than one unit, wait, or change nothing: see [`Check`].
    ///
    /// A denied request spends nothing. A leaky bucket with room allows a request with a
    /// [`delay`](Decision::delay) that the caller must wait for: up to the time in which its burst
    /// drains. The other algorithms allow requests without a delay.
    ///
    /// # Errors
    ///
    /// - [`Error::Store`] if the store fails.
    /// - [`Error::ZeroCost`] and [`Error::CostAboveQuota`] for an invalid
    ///   [cost](Check::cost), immediately and without spending.
    /// - [`Error::OnlyHolds`] if the limiter counts units [at a
    ///   time](crate::Algorithm::Concurrency).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future before its first poll spends nothing. After that, the unit may have been
    /// spent: with a [`MemoryStore`](crate::MemoryStore), the first poll decides.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_ratelimit::Error> {
    /// let quota = Quota::per_hour(10);
    /// let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::token_bucket(), quota);
    /// assert!(limiter.check("alice").await?.is_allowed());
    /// assert!(limiter.check("alice").cost(9).await?.is_allowed());
    /// assert!(!limiter.check("alice").await?.is_allowed());
    /// # Ok(())
    /// # }
    /// ```
    #[inline]
    pub fn check<'k, K: Into<Key<'k>>>(&self, key: K) -> Check<'_, K> {
        Check { call: Call::Units(self, Some(key), 1) }
    }

    /// Returns the state of `key`, and whether a [`check`](Limiter::check) would be allowed now. It
    /// spends nothing. For a check of several units, see [`Check::peek`].
    ///
    /// For a key that a layer counts, see [`reset`](Limiter::reset).
    ///
    /// # Errors
    ///
    /// [`Error::Store`] if the store fails.
    ///
    /// # Cancel safety
    ///
    /// The future can be dropped at any time.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// let _ = limiter.check("alice").await?;
    /// let state = limiter.peek("alice").await?; // spends nothing
    /// assert_eq!(state.remaining(), 2);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn peek(&self, key: impl Into<Key<'_>>) -> Result<KeyState, Error> {
        self.check(key).peek().await
    }
}

impl Charge {
    /// Spends the costs if all quotas have enough units left: await the call. See
    /// [`Limiter::check`].
    ///
    /// If the store fails, the [failure policy](Limiter::on_failure) applies that all limiters of
    /// the charge have; if they differ, an error is returned.
    ///
    /// # Errors
    ///
    /// - [`Error::NoLimits`], [`Error::SameLimitTwice`] and [`Error::DifferentStores`] for an
    ///   invalid charge, immediately and without spending.
    /// - [`Error::ZeroCost`] and [`Error::CostAboveQuota`] for an invalid cost, immediately and
    ///   without spending.
    /// - [`Error::HasEstimate`] if the cost of a limit is an [estimate](Charge::estimate), and
    ///   [`Error::OnlyHolds`] if a limit counts units [at a time](crate::Algorithm::Concurrency).
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
    /// let charge = Charge::new(&second, "alice").also(&day);
    /// assert!(charge.check().await?.is_allowed());
    /// assert_eq!(day.peek("alice").await?.remaining(), 999);
    /// # Ok(())
    /// # }
    /// ```
    #[inline]
    pub fn check(&self) -> Check<'_, Key<'static>> {
        Check { call: Call::Charge(self, None) }
    }
}

/// A check, made by [`Limiter::check`] or [`Charge::check`]: a future of its [`Decision`].
///
/// | to | call |
/// |---|---|
/// | decide | `check(key).await` |
/// | spend `n` units | [`check(key).cost(n)`](Check::cost)`.await` |
/// | wait for the units | [`check(key).max_wait(time)`](Check::max_wait)`.await` |
/// | decide in code that cannot await | [`check(key).now()`](Check::now) |
/// | know what it would decide | [`check(key).peek()`](Check::peek)`.await` |
///
/// Nothing happens before the first poll. After it, the methods panic.
///
/// # Examples
///
/// ```
/// # use std::time::Duration;
/// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let quota = Quota::per_hour(3);
/// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
/// assert!(limiter.check("alice").await?.is_allowed());
/// assert!(limiter.check("alice").cost(2).now()?.is_allowed()); // in memory, without await
/// let denied = limiter.check("alice").max_wait(Duration::from_secs(1)).await?;
/// assert!(!denied.is_allowed());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "a check does nothing until it is awaited"]
pub struct Check<'a, K> {
    call: Call<'a, K, Decision>,
}

impl<'a, 'k, K: Into<Key<'k>>> Check<'a, K> {
    /// Sets the units that the check spends. The default is 1, or the costs of the charge: then it
    /// is the cost of the limit that was added last, as for [`Charge::cost`].
    ///
    /// A cost of 0, or above the largest that the quota can grant, is an error of the check. In a
    /// charge, it replaces an estimate.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// assert_eq!(limiter.check("alice").cost(2).await?.remaining(), 1);
    /// # Ok(())
    /// # }
    /// ```
    #[inline]
    pub fn cost(mut self, units: u64) -> Self {
        self.call.cost(units);
        self
    }

    /// Waits until the request may proceed, if that is within `max_wait`: see
    /// [`Limiter::try_acquire`], also for errors, cancel safety and panics. With [`Duration::MAX`],
    /// it waits as long as necessary: see [`Limiter::acquire`]. For limits on different keys, see
    /// [`Charge`](crate::Charge#waiting).
    ///
    /// # Examples
    ///
    /// Two limits on one key, and a wait of at most a second:
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_ratelimit::{Algorithm, Charge, Limiter, MemoryStore, Quota};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), tower_ratelimit::Error> {
    /// let store = MemoryStore::new();
    /// let limiter = |name, quota| {
    ///     Limiter::new(name, store.clone(), Algorithm::token_bucket(), quota)
    /// };
    /// let second = limiter("second", Quota::per_second(2).burst(1));
    /// let day = limiter("day", Quota::per_day(1_000));
    ///
    /// let charge = Charge::new(&second, "vendor").also(&day);
    /// for _ in 0..2 {
    ///     let decision = charge.check().max_wait(Duration::from_secs(1)).await?;
    ///     assert!(decision.is_allowed()); // the second one after 500 ms
    /// }
    /// # Ok(())
    /// # }
    /// ```
    #[inline]
    pub fn max_wait(self, max_wait: Duration) -> Acquire<'a, K> {
        Acquire { call: self.call, max_wait }
    }

    /// Decides in code that cannot await: each store must be a
    /// [`MemoryStore`](crate::MemoryStore).
    ///
    /// # Errors
    ///
    /// As for [`Limiter::check`] or [`Charge::check`], and [`Error::NotImmediate`] if a store
    /// answers later, such as a `RedisStore`, immediately and without spending.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    ///
    /// # fn main() -> Result<(), tower_ratelimit::Error> {
    /// let quota = Quota::per_hour(1);
    /// let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::token_bucket(), quota);
    /// assert!(limiter.check("alice").now()?.is_allowed());
    /// assert!(!limiter.check("alice").now()?.is_allowed());
    /// # Ok(())
    /// # }
    /// ```
    #[inline]
    pub fn now(mut self) -> Result<Decision, Error> {
        self.call.check_immediate()?;
        let polled = |polled| match polled {
            Poll::Ready(result) => result,
            Poll::Pending => unreachable!("a store in memory answers at once"),
        };
        self.poll_with(&mut Context::from_waker(Waker::noop()), Ok, polled)
    }

    /// Returns the state of the key, and whether the check would be allowed now. It spends nothing.
    /// For a charge, this is the state at the limit that binds.
    ///
    /// # Errors
    ///
    /// As for [`Limiter::check`] or [`Charge::check`], without [`Error::HasEstimate`] and
    /// [`Error::OnlyHolds`], and `Error::Redisson` if Redisson shares the limiter.
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
    /// let limiter = Limiter::new("api", store, Algorithm::sliding_log(), Quota::per_hour(10));
    /// limiter.spend("alice", 7).await?;
    /// assert!(limiter.check("alice").cost(3).peek().await?.allows());
    /// assert!(!limiter.check("alice").cost(4).peek().await?.allows());
    /// # Ok(())
    /// # }
    /// ```
    #[allow(clippy::missing_panics_doc, reason = "it has not begun")]
    pub async fn peek(mut self) -> Result<KeyState, Error> {
        let (action, max_wait) = (Action::Peek, MaxWait::DEFAULT);
        let answer = match self.call.take_charge() {
            Some(charge) => charge.decide(action, max_wait),
            None => {
                let (limiter, key, units) = self.call.take_units().expect(BEGUN);
                limiter.decide(action, &key.into(), units, max_wait)
            }
        };
        Ok(KeyState::peeked(answer.await?.decision))
    }

    /// Polls the check. Calls `done` with a decision that is there at once, as most are in memory,
    /// else `polled`: so the decision stays in registers.
    #[inline(always)]
    fn poll_with<R>(
        &mut self,
        cx: &mut Context<'_>,
        done: impl FnOnce(Decision) -> R,
        polled: impl FnOnce(Poll<Result<Decision, Error>>) -> R,
    ) -> R {
        let Some((limiter, key, units)) = self.call.take_units() else {
            return polled(self.poll_other(cx));
        };
        let key = key.into();
        limiter.decide_then(
            &limiter.current(),
            Action::Check,
            &key,
            units,
            MaxWait::DEFAULT,
            |outcome| done(outcome.decision),
            |answer| polled(self.poll_units(cx, (limiter, key.clone(), units), answer)),
        )
    }

    /// Waits for an answer about the units of one limiter.
    #[inline(never)]
    fn poll_units(
        &mut self,
        cx: &mut Context<'_>,
        asked: (&'a Limiter, Key<'k>, u64),
        answer: StoreFuture<Outcome>,
    ) -> Poll<Result<Decision, Error>> {
        let rest = |(limiter, key, units): (&'a Limiter, Key<'k>, u64), answer| {
            let key = key.into_owned();
            finish(answer, move || Cow::Owned(Charge::of_units(limiter, key, units)))
        };
        self.call.poll_answer(cx, asked, answer, |_, outcome| outcome.decision, rest)
    }

    /// Decides about a charge, or goes on.
    #[inline(never)]
    fn poll_other(&mut self, cx: &mut Context<'_>) -> Poll<Result<Decision, Error>> {
        let Some(charge) = self.call.take_charge() else {
            return self.call.poll_rest(cx);
        };
        let answer = match charge.decide(Action::Check, MaxWait::DEFAULT) {
            StoreFuture::Ready(Some(Ok(outcome))) => return Poll::Ready(Ok(outcome.decision)),
            later => later,
        };
        let rest = |charge, answer| finish(answer, move || charge);
        self.call.poll_answer(cx, charge, answer, |_, outcome| outcome.decision, rest)
    }
}

/// Waits for an answer, and applies the failure policy of a charge if the store fails.
async fn finish<'a>(
    answer: StoreFuture<Outcome>,
    charge: impl FnOnce() -> Cow<'a, Charge>,
) -> Result<Decision, Error> {
    let error = match answer.await {
        Ok(outcome) => return Ok(outcome.decision),
        Err(error) => error,
    };
    match charge().recover_by_limiter(error)? {
        Recovery::Uncounted(decision) => decision.ok_or(Error::NoLimits),
        Recovery::Fallback(charge) => {
            Ok(charge.decide(Action::Check, MaxWait::DEFAULT).await?.decision)
        }
    }
}

/// The key is moved before it is used.
impl<K> Unpin for Check<'_, K> {}

impl<'k, K: Into<Key<'k>>> Future for Check<'_, K> {
    type Output = Result<Decision, Error>;

    #[inline(always)]
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.get_mut().poll_with(cx, |decision| Poll::Ready(Ok(decision)), |polled| polled)
    }
}
