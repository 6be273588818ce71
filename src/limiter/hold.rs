//! The calls that hold units: they return a permit. The permit itself is in `permit.rs`, and the
//! waiting in `acquire.rs` and `retry.rs`.

use std::{future::poll_fn, time::Duration};

use super::{
    acquire::Acquire, charge::Charge, handle::Limiter, max_wait::MaxWait, permit::Permit,
    recovery::Recovered,
};
use crate::{
    algorithm::{Action, micros},
    decision::Decision,
    error::Error,
    keys::Key,
};

impl Limiter {
    /// Holds `n` units of the quota of `key`, if they are left: an estimate of a cost that is known
    /// later. The inner error is the decision of a denied request.
    ///
    /// The units count as taken until the [`Permit`] ends. Those that were used count as spent from
    /// then on: a hold opens no [fixed window](crate::Algorithm::FixedWindow), its end does. What
    /// is not used is returned exactly, in every algorithm, whatever the time. Units do not refill
    /// while they are held, so the burst of a bucket should cover the rate multiplied by the
    /// duration of a hold: at 100,000 tokens per minute and streams of 30 s, 50,000.
    ///
    /// While units are held, a denied request may not know its [`retry_after`]: then it is `None`.
    ///
    /// [`retry_after`]: Decision::retry_after
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
    /// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_ratelimit::Error> {
    /// let quota = Quota::per_minute(1_000);
    /// let tokens = Limiter::new("tokens", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// let permit = match tokens.hold("alice", 600).await? {
    ///     Ok(permit) => permit,
    ///     Err(denied) => panic!("{} units are left", denied.remaining()),
    /// };
    /// let denied = tokens.hold("alice", 600).await?.unwrap_err();
    /// assert_eq!(denied.remaining(), 400);
    /// assert_eq!(denied.retry_after(), None); // when the first permit ends
    ///
    /// permit.settle(250);
    /// assert_eq!(tokens.peek("alice").await?.remaining(), 750);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn hold(
        &self,
        key: impl Into<Key<'_>>,
        n: u64,
    ) -> Result<Result<Permit, Decision>, Error> {
        let key = key.into();
        if let Some(outcome) = self.hold_fast(&key, n, false) {
            return Ok(Permit::of_one(self, key, n, outcome));
        }
        let (charge, max_wait) = (Charge::new(self, key).estimate(n), MaxWait::NONE);
        let answer = charge.decide_carefully(Action::Check, max_wait);
        let acquire = Acquire::new(charge.clone(), answer, max_wait);
        charge.hold_or_recover(acquire, max_wait).await
    }

    /// Holds `n` units like [`hold`](Limiter::hold), and waits for them for up to `max_wait`.
    ///
    /// A hold reserves no instant. A denied call checks again when units are restored, and when a
    /// permit of this process ends. While holds have to end first, it also checks every 25 to 50
    /// ms; over a `RedisStore` more often the longer it waits, in memory less often if more than
    /// 8 keys are waited for. In a process, waiting calls are served in the order of their
    /// arrival; between processes, and beside calls that do not wait, the order is not defined.
    ///
    /// With a `RedisStore`, a process whose calls have taken the last units again and again for
    /// 0.4 s leaves what it returns in the next 20 ms to other processes: see
    /// [concurrency](crate::guide::concurrency#waiting-for-a-place).
    ///
    /// # Errors
    ///
    /// As for [`hold`](Limiter::hold).
    ///
    /// # Cancel safety
    ///
    /// As for [`hold`](Limiter::hold).
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
    /// let first = tokens.hold("alice", 600).await?.unwrap();
    /// tokio::spawn(async move {
    ///     tokio::time::sleep(Duration::from_secs(2)).await;
    ///     first.settle(100);
    /// });
    /// let second = tokens.hold_within("alice", 600, Duration::from_secs(5)).await?;
    /// assert!(second.is_ok()); // 2 s later
    /// # Ok(())
    /// # }
    /// ```
    pub async fn hold_within(
        &self,
        key: impl Into<Key<'_>>,
        n: u64,
        max_wait: Duration,
    ) -> Result<Result<Permit, Decision>, Error> {
        let charge = Charge::new(self, key).estimate(n);
        let max_wait = MaxWait::UpTo(micros(max_wait));
        charge.hold_or_recover(charge.begin_hold(max_wait)?, max_wait).await
    }
}

impl Charge {
    /// Spends the costs and holds the [estimates](Charge::estimate), if all quotas have enough
    /// units left: all of them, or none. The inner error is the decision of a denied request. See
    /// [`Limiter::hold`].
    ///
    /// What is spent stays spent when the permit ends. Of the [failure
    /// policies](crate::Limiter::on_failure) of limiters, only
    /// [`Wait`](crate::FailurePolicy::Wait) applies, to [`hold_within`](Charge::hold_within).
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
    /// if let Ok(permit) = charge.hold().await? {
    ///     let used = 730; // as the response reports
    ///     permit.settle(used);
    /// }
    /// assert_eq!(tokens.peek("alice").await?.remaining(), 99_270);
    /// assert_eq!(requests.peek("alice").await?.remaining(), 59);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn hold(&self) -> Result<Result<Permit, Decision>, Error> {
        self.begin_hold(MaxWait::NONE)?.hold().await
    }

    /// Holds like [`hold`](Charge::hold), and waits for up to `max_wait`, as
    /// [`Limiter::hold_within`] does. No limit of the charge reserves an instant.
    ///
    /// # Errors
    ///
    /// As for [`hold`](Charge::hold).
    ///
    /// # Cancel safety
    ///
    /// As for [`hold`](Charge::hold).
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime with time, if it has to wait.
    pub async fn hold_within(&self, max_wait: Duration) -> Result<Result<Permit, Decision>, Error> {
        self.begin_hold(MaxWait::UpTo(micros(max_wait)))?.hold().await
    }

    fn begin_hold(&self, max_wait: MaxWait) -> Result<Acquire, Error> {
        if !self.holds_units() {
            return Err(Error::NoEstimate);
        }
        Ok(Acquire::begin(self.clone(), max_wait))
    }

    /// Holds, and applies the failure policy of the limiter if its store fails.
    async fn hold_or_recover(
        &self,
        mut acquire: Acquire,
        max_wait: MaxWait,
    ) -> Result<Result<Permit, Decision>, Error> {
        let result = poll_fn(|cx| acquire.poll(cx)).await;
        let rest = max_wait.at_most(acquire.remaining_wait());
        match result {
            Err(error) => match self.recover_by_limiter(error)? {
                Recovered::Uncounted(decision) => Ok(Ok(Permit::uncounted(decision))),
                Recovered::Fallback(charge) => charge.begin_hold(rest)?.hold().await,
            },
            Ok(decision) => Ok(acquire.permit(decision)),
        }
    }
}

impl Acquire {
    /// Waits until the request may proceed, and returns its permit.
    async fn hold(mut self) -> Result<Result<Permit, Decision>, Error> {
        let decision = poll_fn(|cx| self.poll(cx)).await?;
        Ok(self.permit(decision))
    }

    /// Returns the permit of a request with this decision.
    fn permit(mut self, decision: Decision) -> Result<Permit, Decision> {
        let (charge, receipts) = self.disarm();
        match decision.is_allowed() {
            true => Ok(charge.permit(decision, &receipts)),
            false => Err(decision),
        }
    }
}
