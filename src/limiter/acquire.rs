//! `Acquire`: a call that waits for quota, a future. The waiting itself is in `waiter.rs`.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use super::{call::Call, charge::Charge, handle::Limiter, version::MaxWait, waiter::Waiter};
use crate::{
    algorithm::Action,
    decision::{Decision, Outcome},
    error::Error,
    keys::Key,
};

impl Limiter {
    /// Spends `n` units of the quota of `key`, and waits until the request may proceed, if that is
    /// within `timeout`: await the call. It is short for
    /// [`check(key).cost(n).max_wait(timeout)`](crate::call::Check).
    ///
    /// The check also makes the reservation. Reservations are in the order in which the checks
    /// reach the store: first come, first served, over all processes. If the request would have to
    /// wait longer than `timeout`, it is denied immediately, and the same call would succeed after
    /// [`retry_after`](Decision::retry_after). With a `timeout` of zero the call never waits.
    /// `timeout` counts from the decision of the store. A full leaky bucket denies, whatever the
    /// `timeout`, unless that is [`Duration::MAX`], as for [`acquire`](Limiter::acquire).
    ///
    /// If the quota is changed in the meantime, waiting requests keep their instants, and new
    /// requests come after them. If a waiting request is dropped after a check with another quota,
    /// its reservation may pass unused:
    /// [configuration](crate::guide::configuration#changes-without-a-restart) describes when.
    ///
    /// The sleep is `tokio::time::sleep`, which can be up to a millisecond late. With a
    /// `RedisStore` it counts from the decision in Redis, which is estimated from the times of
    /// replies.
    ///
    /// If the sleep ends more than 50 ms late, because the process was stopped, the reservation is
    /// released, and the call checks once more with the rest of `timeout`. The request then
    /// proceeds, waits again behind the others, or is denied. The call returns the last decision.
    /// Layers have a setting for the 50 ms: [`max_lateness`](crate::RateLimitLayer::max_lateness).
    ///
    /// # Errors
    ///
    /// As for [`check`](Limiter::check).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future before its first poll spends nothing. Dropping it before it is ready
    /// returns the units that were spent or reserved, exactly once: all of them before the reserved
    /// instant, and after it those that still count. Requests of this process that wait for the
    /// same go one reserved instant earlier each. With a
    /// [`MemoryStore`](crate::MemoryStore), the drop itself returns the units. With a `RedisStore`,
    /// a background task does: see [capacity](crate::guide::redis_capacity#dropped-requests).
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime with time, if it has to wait.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), tower_ratelimit::Error> {
    /// let quota = Quota::per_second(10).burst(1);
    /// let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::token_bucket(), quota);
    ///
    /// let timeout = Duration::from_millis(150);
    /// assert!(limiter.try_acquire("vendor", 1, timeout).await?.is_allowed()); // now
    /// assert!(limiter.try_acquire("vendor", 1, timeout).await?.is_allowed()); // 100 ms later
    ///
    /// // The wait would be 100 ms: this request is denied immediately.
    /// let denied = limiter.try_acquire("vendor", 1, Duration::from_millis(30)).await?;
    /// assert_eq!(denied.retry_after(), Some(Duration::from_millis(70)));
    /// # Ok(())
    /// # }
    /// ```
    #[inline]
    pub fn try_acquire<'k, K: Into<Key<'k>>>(
        &self,
        key: K,
        n: u64,
        timeout: Duration,
    ) -> Acquire<'_, K> {
        self.check(key).cost(n).max_wait(timeout)
    }

    /// Spends `n` units of the quota of `key`, and waits as long as necessary until the request may
    /// proceed: await the call. The decision is always allowed. It is short for
    /// [`try_acquire(key, n, Duration::MAX)`](Limiter::try_acquire).
    ///
    /// Service is first come, first served, with two exceptions for which no instant can be
    /// reserved:
    ///
    /// - a leaky bucket that is full
    /// - an instant further away than [`reserve`](Limiter::reserve) can reserve
    ///
    /// In these cases the calls of a process wait in a
    /// [line](crate::guide::waiting#in-a-line): only the first one checks, after
    /// [`retry_after`](Decision::retry_after), and the next one checks when the first is served or
    /// dropped. So service is first come, first served within a process, and in no defined order
    /// between processes.
    ///
    /// Poll the future until it is ready, or drop it. A first call that is not polled delays the
    /// calls behind it for a tenth of a second.
    ///
    /// # Errors
    ///
    /// As for [`check`](Limiter::check).
    ///
    /// # Cancel safety
    ///
    /// As for [`try_acquire`](Limiter::try_acquire).
    ///
    /// # Panics
    ///
    /// As for [`try_acquire`](Limiter::try_acquire).
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// for _ in 0..4 {
    ///     let _ = limiter.acquire("alice", 1).await?; // the fourth waits for an hour
    /// }
    /// # Ok(())
    /// # }
    /// ```
    #[inline]
    pub fn acquire<'k, K: Into<Key<'k>>>(&self, key: K, n: u64) -> Acquire<'_, K> {
        self.try_acquire(key, n, Duration::MAX)
    }
}

impl Charge {
    /// Spends the costs, and waits.
    pub(crate) async fn wait(self, max_wait: Duration) -> Result<Decision, Error> {
        let is_endless = max_wait == Duration::MAX;
        Waiter::begin(Action::Check, self, MaxWait::up_to(max_wait), is_endless).check().await
    }
}

impl Waiter {
    /// Waits until the request may proceed or is denied, without a permit.
    pub(super) async fn check(self) -> Result<Decision, Error> {
        Ok(self.finish().await?.1.decision)
    }
}

/// A check that waits, made by [`Limiter::try_acquire`], [`Limiter::acquire`] or
/// [`Check::max_wait`](crate::call::Check::max_wait): a future of its [`Decision`].
///
/// Nothing happens before the first poll. Dropping it before it is ready returns the units.
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
/// let call = limiter.try_acquire("alice", 1, Duration::from_secs(5));
/// assert!(call.await?.is_allowed());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "a call does nothing until it is awaited"]
pub struct Acquire<'a, K> {
    pub(super) call: Call<'a, K, Decision>,
    pub(super) max_wait: Duration,
}

/// The key is moved before it is used.
impl<K> Unpin for Acquire<'_, K> {}

impl<'k, K: Into<Key<'k>>> Future for Acquire<'_, K> {
    type Output = Result<Decision, Error>;

    #[inline]
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        let is_endless = this.max_wait == Duration::MAX;
        let max_wait = MaxWait::up_to(this.max_wait);
        let charge = if let Some((limiter, key, units)) = this.call.take_units() {
            let key = key.into();
            if !is_endless {
                let answer = limiter.decide(Action::Check, &key, units, max_wait);
                if let Some(Outcome { decision, .. }) = answer.now()
                    && decision.delay().is_zero()
                    && !decision.waits_for_holds()
                {
                    return Poll::Ready(Ok(decision.clone()));
                }
                let charge = Charge::of_units(limiter, key, units);
                let waiter = Waiter::new(Action::Check, charge, answer, max_wait);
                return this.call.go_on(cx, waiter.check());
            }
            Charge::of_units(limiter, key, units)
        } else if let Some(charge) = this.call.take_charge() {
            charge.into_owned()
        } else {
            return this.call.poll_rest(cx);
        };
        this.call.go_on(cx, charge.wait(this.max_wait))
    }
}
