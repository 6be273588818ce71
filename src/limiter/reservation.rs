//! `Reservation`: a decision whose delay the caller sleeps, and that releases what it has reserved
//! if it is dropped. The waiting itself is in `acquire.rs`.

use std::{future::poll_fn, time::Duration};

use tokio::time::Instant;

use super::{
    acquire::{Acquire, after_decision},
    charge::Charge,
    handle::Limiter,
    max_wait::MaxWait,
    recovery::Recovered,
};
use crate::{
    algorithm::{Action, micros},
    decision::{Decision, Outcome},
    error::Error,
    keys::Key,
};

impl Limiter {
    /// Checks like [`check`](Limiter::check), and makes a reservation if the request can proceed
    /// within `max_wait`. The caller decides how to wait: see [`Reservation`].
    ///
    /// Reservations are made in the order of the checks. If the request would have to wait longer
    /// than `max_wait`, it is denied and reserves nothing, and the same check would succeed after
    /// [`retry_after`](Decision::retry_after). So is a request that needs units that are
    /// [held](Limiter::hold), as there is no instant to reserve. `max_wait` is bounded by 100
    /// years, and by less for a bucket whose rate needs large fractions: by 2.5 hours for 1,000,003
    /// per second, by one second for 4,294,967,291 (2^32 - 5) per second.
    ///
    /// # Errors
    ///
    /// As for [`check`](Limiter::check).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future before its first poll spends nothing. Dropping it before it is ready
    /// returns the units that were spent or reserved, exactly once, as
    /// [`try_acquire`](Limiter::try_acquire) does.
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
    /// let vendor = Limiter::new("vendor", MemoryStore::new(), Algorithm::token_bucket(), quota);
    /// assert!(vendor.check("jobs").await?.is_allowed());
    ///
    /// let turn = vendor.check_within("jobs", Duration::from_secs(1)).await?;
    /// assert_eq!(turn.delay(), Duration::from_millis(100));
    /// // There is time to prepare the call. If that fails, dropping `turn` releases the instant.
    /// assert!(turn.ready().await?.is_allowed()); // 100 ms later
    /// # Ok(())
    /// # }
    /// ```
    pub async fn check_within(
        &self,
        key: impl Into<Key<'_>>,
        max_wait: Duration,
    ) -> Result<Reservation, Error> {
        self.check_within_n(key, 1, max_wait).await
    }

    /// Checks like [`check_n`](Limiter::check_n), and makes a reservation like
    /// [`check_within`](Limiter::check_within).
    ///
    /// # Errors
    ///
    /// As for [`check_n`](Limiter::check_n).
    ///
    /// # Cancel safety
    ///
    /// As for [`check_within`](Limiter::check_within).
    pub async fn check_within_n(
        &self,
        key: impl Into<Key<'_>>,
        n: u64,
        max_wait: Duration,
    ) -> Result<Reservation, Error> {
        let (charge, max_wait) = (Charge::new_n(self, key, n), MaxWait::UpTo(micros(max_wait)));
        charge.check_costs()?;
        match Reservation::make(charge.clone(), max_wait).await {
            Err(error) => match charge.recover_by_limiter(error)? {
                Recovered::Uncounted(decision) => Ok(Reservation::uncounted(decision)),
                Recovered::Fallback(charge) => Reservation::make(charge, max_wait).await,
            },
            made => made,
        }
    }
}

/// The result of [`Limiter::check_within`]: a decision, and the units that an allowed request has
/// spent or reserved. A denied request has reserved nothing.
///
/// - [`ready`](Reservation::ready) waits until the request may proceed.
/// - [`keep`](Reservation::keep) leaves the wait to the caller; the units stay spent.
/// - Dropping it releases the units, exactly once: all of them before the reserved instant, and
///   after it those that still count. Requests queued behind it keep their instants. With a
///   [`MemoryStore`](crate::MemoryStore), the drop itself returns the units. With a `RedisStore`, a
///   background task does: see [capacity](crate::guide::redis_capacity#dropped-requests).
///
/// # Examples
///
/// A job that is put on a queue with a delay:
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), tower_ratelimit::Error> {
/// # async fn enqueue(_: &str, _: Duration) -> Result<(), tower_ratelimit::Error> { Ok(()) }
/// let quota = Quota::per_minute(6).burst(1);
/// let vendor = Limiter::new("vendor", MemoryStore::new(), Algorithm::token_bucket(), quota);
/// for job in ["one", "two"] {
///     let turn = vendor.check_within("jobs", Duration::from_secs(3_600)).await?;
///     if turn.decision().is_allowed() {
///         enqueue(job, turn.delay()).await?; // an error drops `turn`, which releases it
///         let _decision = turn.keep();
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "dropping a reservation releases it: call `ready` or `keep`"]
pub struct Reservation {
    /// Its drop releases what an admitted request has reserved.
    acquire: Acquire,
    decision: Decision,
    /// The instant at which the request may proceed.
    due: Instant,
}

impl Reservation {
    async fn make(charge: Charge, max_wait: MaxWait) -> Result<Self, Error> {
        let answer = charge.decide(Action::Check, max_wait);
        let mut acquire = Acquire::new(charge, answer, max_wait);
        let decision = poll_fn(|cx| acquire.poll_decision(cx)).await?;
        acquire.check_spent()?;
        Ok(Self::new(acquire, decision))
    }

    /// Returns the reservation of a request that proceeds uncounted: there is nothing to release.
    fn uncounted(decision: Decision) -> Self {
        Self::new(
            Acquire::admitted(Charge::exempt(), Outcome::of_nothing(decision.clone())),
            decision,
        )
    }

    fn new(acquire: Acquire, decision: Decision) -> Self {
        let due = after_decision(&decision, decision.delay());
        Self { acquire, decision, due }
    }

    /// Returns the decision: whether the request is allowed, and the state of its key.
    pub fn decision(&self) -> &Decision {
        &self.decision
    }

    /// Returns the time from now until the request may proceed; zero if it is denied.
    #[must_use]
    pub fn delay(&self) -> Duration {
        match self.decision.is_allowed() {
            true => self.due.saturating_duration_since(Instant::now()),
            false => Duration::ZERO,
        }
    }

    /// Waits until the request may proceed, and returns the decision. A denied request does not
    /// wait.
    ///
    /// If the reserved instant was missed by more than 50 ms, because the process was stopped, or
    /// because this was called late, the reservation is released, and the request checks once more
    /// with the rest of `max_wait`, as [`try_acquire`](Limiter::try_acquire) does. It then
    /// proceeds, waits again behind the others, or is denied. The decision is the last one.
    ///
    /// # Errors
    ///
    /// As for [`check_n`](Limiter::check_n), from that second check.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future before it is ready releases the units, exactly once.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime with time, if it has to wait.
    pub async fn ready(self) -> Result<Decision, Error> {
        let Self { mut acquire, decision, due } = self;
        if !decision.is_allowed() {
            return Ok(decision);
        }
        acquire.sleep_until(due);
        acquire.wait_or_recover().await
    }

    /// Keeps the units spent, whatever happens later, and returns the decision. The caller waits
    /// for the [`delay`](Reservation::delay).
    pub fn keep(mut self) -> Decision {
        drop(self.acquire.disarm());
        self.decision
    }
}
