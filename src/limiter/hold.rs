//! `Hold`: a call that holds units, a future of a permit. The permit itself is in `permit.rs`, and
//! the waiting in `waiter.rs` and `in_line.rs`.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use super::{
    admission::Admission,
    call::Call,
    charge::Charge,
    handle::Limiter,
    permit::{Holds, Permit},
    version::MaxWait,
    waiter::Waiter,
};
use crate::{algorithm::Action, decision::Outcome, error::Error, keys::Key, store::StoreFuture};

impl Limiter {
    /// Holds `n` units of the quota of `key`, if they are left: an estimate of a cost that is known
    /// later. Await the call, or first let it [wait](Hold::max_wait).
    ///
    /// The units count as taken until the [`Permit`] ends. Those that were used count as spent from
    /// then on: a hold opens no [fixed window](crate::Algorithm::FixedWindow), its end does. What
    /// is not used is returned exactly, in every algorithm, whatever the time. Units do not refill
    /// while they are held, so the burst of a bucket should cover the rate multiplied by the
    /// duration of a hold: at 100,000 tokens per minute and streams of 30 s, 50,000.
    ///
    /// While units are held, a denied request may not know its [`retry_after`]: then it is `None`.
    ///
    /// [`retry_after`]: crate::Decision::retry_after
    ///
    /// The [failure policy](Limiter::on_failure) applies: under `Open` the permit counts nothing,
    /// under `Local` it holds units in memory.
    ///
    /// # Errors
    ///
    /// - [`Error::ZeroCost`] and [`Error::CostAboveQuota`] for an invalid number of units, and
    ///   [`Error::CannotHold`] for a leaky bucket, immediately and without a change.
    /// - [`Error::Store`] if the store fails.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future before it is ready returns the units, exactly once: in memory with the
    /// drop itself, in Redis in the background.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{Admission, Algorithm, Limiter, MemoryStore, Quota};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_ratelimit::Error> {
    /// let quota = Quota::per_minute(1_000);
    /// let tokens = Limiter::new("tokens", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// let Admission::Admitted(permit) = tokens.hold("alice", 600).await? else {
    ///     return Ok(()); // denied
    /// };
    /// if let Admission::Denied(decision) = tokens.hold("alice", 600).await? {
    ///     assert_eq!(decision.remaining(), 400);
    ///     assert_eq!(decision.retry_after(), None); // when the first permit ends
    /// }
    /// permit.settle(250);
    /// assert_eq!(tokens.peek("alice").await?.remaining(), 750);
    /// # Ok(())
    /// # }
    /// ```
    #[inline]
    pub fn hold<'k, K: Into<Key<'k>>>(&self, key: K, n: u64) -> Hold<'_, K> {
        Hold { call: Call::Units(self, Some(key), n), max_wait: Duration::ZERO }
    }
}

impl Charge {
    /// Spends the costs and holds the [estimates](Charge::estimate), if all quotas have enough
    /// units left: all of them, or none. Await the call. See [`Limiter::hold`].
    ///
    /// What is spent stays spent when the permit ends.
    ///
    /// # Errors
    ///
    /// - [`Error::NoEstimate`] if no limit of the charge has an estimate or counts units [at a
    ///   time](crate::Algorithm::Concurrency).
    /// - [`Error::CannotHold`] if a limit that has an estimate cannot hold units.
    /// - As for [`check`](Charge::check).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future before it is ready returns all units, exactly once, as for
    /// [`Limiter::hold`].
    ///
    /// # Examples
    ///
    /// One request, and an estimate of 500 tokens:
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
    /// let charge = Charge::new(&requests, "alice").also(&tokens).estimate(500);
    /// if let Some(permit) = charge.hold().await?.admitted() {
    ///     let used = 730; // as the response reports
    ///     permit.settle(used);
    /// }
    /// assert_eq!(tokens.peek("alice").await?.remaining(), 99_270);
    /// assert_eq!(requests.peek("alice").await?.remaining(), 59);
    /// # Ok(())
    /// # }
    /// ```
    #[inline]
    pub fn hold(&self) -> Hold<'_, Key<'static>> {
        Hold { call: Call::Charge(self, None), max_wait: Duration::ZERO }
    }
}

/// A call that holds units, made by [`Limiter::hold`] or [`Charge::hold`]: a future of an
/// [`Admission`] with a [`Permit`].
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
/// let call = limiter.hold("alice", 2).max_wait(Duration::from_secs(5));
/// assert!(call.await?.is_admitted());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "a call does nothing until it is awaited"]
pub struct Hold<'a, K> {
    call: Call<'a, K, Admission<Permit>>,
    max_wait: Duration,
}

impl<'a, K> Hold<'a, K> {
    /// Waits for the units for up to `max_wait`, but no longer than a
    /// [reservation](Limiter::reserve) can be away. The default is not to wait.
    ///
    /// A hold reserves no instant. Waiting calls stand in a
    /// [line](crate::guide::waiting#in-a-line): in a process, they are served in the order of their
    /// arrival. The first one checks again when units are restored, and when a permit of this
    /// process ends or the key is changed in another way. Over a `RedisStore`, it also asks for the
    /// units that other processes hold, at least every 50 ms, and more often the longer it waits.
    /// Between processes, and beside calls that do not wait, the order is not defined.
    ///
    /// With a `RedisStore`, a process whose calls have taken the last units again and again for
    /// 0.4 s, or less if they hold them shortly, leaves what it returns in the next 20 ms to other
    /// processes: see [concurrency](crate::guide::concurrency#waiting-for-a-place).
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
    /// let quota = Quota::per_minute(1_000);
    /// let tokens = Limiter::new("tokens", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// if let Some(first) = tokens.hold("alice", 600).await?.admitted() {
    ///     tokio::spawn(async move {
    ///         tokio::time::sleep(Duration::from_secs(2)).await;
    ///         first.settle(100);
    ///     });
    /// }
    /// let second = tokens.hold("alice", 600).max_wait(Duration::from_secs(5)).await?;
    /// assert!(second.is_admitted()); // 2 s later
    /// # Ok(())
    /// # }
    /// ```
    #[inline]
    pub fn max_wait(mut self, max_wait: Duration) -> Self {
        self.max_wait = max_wait;
        self
    }

    /// Waits for an answer, or applies the failure policy.
    #[inline(never)]
    fn poll_answer(
        &mut self,
        cx: &mut Context<'_>,
        charge: Charge,
        answer: StoreFuture<Outcome>,
    ) -> Poll<Result<Admission<Permit>, Error>> {
        let rest = |charge, answer| Waiter::new(Action::HOLD, charge, answer, MaxWait::NONE).hold();
        self.call.poll_answer(cx, charge, answer, Permit::of_charge, rest)
    }
}

/// The key is moved before it is used.
impl<K> Unpin for Hold<'_, K> {}

impl<'k, K: Into<Key<'k>>> Future for Hold<'_, K> {
    type Output = Result<Admission<Permit>, Error>;

    #[inline]
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        let waits = !this.max_wait.is_zero();
        let charge = if let Some((limiter, key, units)) = this.call.take_units() {
            let key = key.into();
            if !waits {
                let (action, max_wait) = (Action::HOLD, MaxWait::NONE);
                return match limiter.decide_then(
                    &limiter.current(),
                    action,
                    &key,
                    units,
                    max_wait,
                    Ok,
                    Err,
                ) {
                    Ok(outcome) => Poll::Ready(Ok(Permit::admission(outcome, |outcome| {
                        Holds::of_one(limiter, key, units, outcome)
                    }))),
                    Err(answer) => {
                        let charge = Charge::new(limiter, key).estimate(units);
                        this.poll_answer(cx, charge, answer)
                    }
                };
            }
            Charge::new(limiter, key).estimate(units)
        } else if let Some(charge) = this.call.take_charge() {
            charge.into_owned()
        } else {
            return this.call.poll_rest(cx);
        };
        if !charge.holds_units() {
            return Poll::Ready(Err(Error::NoEstimate));
        }
        if waits {
            let max_wait = MaxWait::up_to(this.max_wait);
            let waiter = Waiter::begin(Action::HOLD, charge, max_wait, false);
            return this.call.go_on(cx, waiter.hold());
        }
        let answer = charge.decide(Action::HOLD, MaxWait::NONE);
        this.poll_answer(cx, charge, answer)
    }
}

impl Waiter {
    /// Waits until the request may proceed or is denied, and returns its permit.
    async fn hold(self) -> Result<Admission<Permit>, Error> {
        let (charge, outcome) = self.finish().await?;
        Ok(Permit::of_charge(charge, outcome))
    }
}
