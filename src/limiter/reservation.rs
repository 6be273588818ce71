//! `Reservation`: what a request has reserved, and releases if it is dropped. The caller sleeps for
//! its delay; the waiting itself is in `waiter.rs`.

use std::{mem, time::Duration};

use tokio::time::Instant;

use super::{
    admission::{Admission, Guard},
    charge::Charge,
    handle::Limiter,
    version::MaxWait,
    waiter::{Waiter, after_decision},
};
use crate::{
    algorithm::Action,
    decision::{Decision, Outcome, Receipts},
    error::Error,
    keys::Key,
};

impl Limiter {
    /// Checks like [`check`](Limiter::check), and reserves `n` units if the request can proceed
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
    /// if let Some(turn) = vendor.reserve("jobs", 1, Duration::from_secs(1)).await?.admitted() {
    ///     assert_eq!(turn.delay(), Duration::from_millis(100));
    ///     // There is time to prepare the call. If that fails, the drop releases the instant.
    ///     assert!(turn.ready().await?.is_allowed()); // 100 ms later
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn reserve(
        &self,
        key: impl Into<Key<'_>>,
        n: u64,
        max_wait: Duration,
    ) -> Result<Admission<Reservation>, Error> {
        let (action, max_wait) = (Action::Check, MaxWait::up_to(max_wait));
        let charge = Charge::of_units(self, key, n);
        let answer = charge.decide(action, max_wait);
        let waiter = Waiter::new(action, charge, answer, max_wait).leave_delay();
        let (decision, mut waiter) = waiter.decided().await?;
        let (max_wait, deadline) = (waiter.max_wait, waiter.deadline);
        let (charge, outcome) = waiter.outcome(decision);
        Ok(match outcome.decision.is_allowed() {
            true => Admission::Admitted(Reservation::new(charge, outcome, max_wait, deadline)),
            false => Admission::Denied(outcome.decision),
        })
    }
}

/// Units that an admitted request has spent or reserved, made by [`Limiter::reserve`]. A
/// reservation that is dropped is released: a turn that was not taken has used nothing.
///
/// - [`ready`](Reservation::ready) waits until the request may proceed.
/// - [`keep`](Reservation::keep) leaves the wait to the caller; the units stay spent.
/// - Dropping it releases the units, exactly once: all of them before the reserved instant, and
///   after it those that still count. Requests of this process that wait for the same go one
///   reserved instant earlier each. With a [`MemoryStore`](crate::MemoryStore), the drop itself
///   returns the units. With a `RedisStore`, a background task does: see
///   [capacity](crate::guide::redis_capacity#dropped-requests).
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
///     let an_hour = Duration::from_secs(3_600);
///     if let Some(turn) = vendor.reserve("jobs", 1, an_hour).await?.admitted() {
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
    /// Exempt once the units are released elsewhere, or kept.
    charge: Charge,
    outcome: Outcome,
    /// The instant at which the request may proceed.
    due: Instant,
    max_wait: MaxWait,
    /// The end of the wait.
    deadline: Option<Instant>,
}

impl Reservation {
    pub(super) fn new(
        charge: Charge,
        mut outcome: Outcome,
        max_wait: MaxWait,
        deadline: Option<Instant>,
    ) -> Self {
        let Outcome { decision, receipts } = &mut outcome;
        let mut due = after_decision(decision, decision.delay());
        // An instant on offer can lie in the block.
        let can_exchange = !decision.delay().is_zero() && !decision.is_blocked();
        if let Some(bookings) = charge.bookings().filter(|_| can_exchange) {
            let (group, reserved) = (charge.booking_group(&bookings), due);
            let own = mem::replace(receipts, Receipts::NONE);
            let (taken, own) = bookings.exchange(group, reserved, own);
            ((due, _), *receipts) = taken;
            decision.move_delay(reserved, due);
            own.into_iter().for_each(|own| charge.release_offer(own));
        }
        Self { charge, outcome, due, max_wait, deadline }
    }

    /// Returns the decision that admitted the request.
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
    /// if let Some(reservation) = limiter.reserve("alice", 1, Duration::ZERO).await?.admitted() {
    ///     assert_eq!(reservation.decision().remaining(), 2);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn decision(&self) -> &Decision {
        &self.outcome.decision
    }

    /// Returns the time from now until the request may proceed.
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
    /// let _ = limiter.check("alice").cost(3).await?;
    /// let admission = limiter.reserve("alice", 1, Duration::from_secs(3_600)).await?;
    /// if let Some(reservation) = admission.admitted() {
    ///     assert_eq!(reservation.delay(), Duration::from_secs(3_600));
    /// }
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn delay(&self) -> Duration {
        self.due.saturating_duration_since(Instant::now())
    }

    /// Waits until the request may proceed, and returns the decision.
    ///
    /// If a request had to wait, and its reserved instant was missed by more than 50 ms, because
    /// the process was stopped, or because this was called late, the reservation is released, and
    /// the request checks once more with the rest of `max_wait`, as
    /// [`try_acquire`](Limiter::try_acquire) does. It then proceeds, waits again behind the others,
    /// or is denied. The decision is the last one.
    ///
    /// # Errors
    ///
    /// As for [`check`](Limiter::check), from that second check.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future before it is ready releases the units, exactly once.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime with time, if it has to wait.
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
    /// let _ = limiter.check("alice").cost(3).await?;
    /// let admission = limiter.reserve("alice", 1, Duration::from_secs(3_600)).await?;
    /// if let Some(reservation) = admission.admitted() {
    ///     assert!(reservation.ready().await?.is_allowed()); // an hour later
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn ready(mut self) -> Result<Decision, Error> {
        let (charge, outcome) = (self.take_charge(), self.outcome.clone());
        let waiter = Waiter::until(charge, outcome, self.due, self.max_wait, self.deadline);
        waiter.check().await
    }

    /// Keeps the units spent, whatever happens later, and returns the decision. The caller waits
    /// for the [`delay`](Reservation::delay).
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
    /// if let Some(reservation) = limiter.reserve("alice", 1, Duration::ZERO).await?.admitted() {
    ///     assert!(reservation.keep().is_allowed());
    /// }
    /// assert_eq!(limiter.peek("alice").await?.remaining(), 2);
    /// # Ok(())
    /// # }
    /// ```
    pub fn keep(mut self) -> Decision {
        drop(self.take_charge());
        self.outcome.decision.clone()
    }

    fn take_charge(&mut self) -> Charge {
        mem::replace(&mut self.charge, Charge::exempt())
    }
}

impl Admission<Reservation> {
    /// Keeps what an admitted request has spent or reserved, as [`Reservation::keep`] does. Returns
    /// the decision: an allowed request proceeds after its [`delay`](Decision::delay).
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
    /// let decision = limiter.reserve("alice", 1, Duration::ZERO).await?.keep();
    /// assert!(decision.is_allowed());
    /// # Ok(())
    /// # }
    /// ```
    pub fn keep(self) -> Decision {
        match self {
            Self::Admitted(reservation) => reservation.keep(),
            Self::Denied(decision) => decision,
        }
    }
}

impl Guard for Reservation {
    fn decision(&self) -> &Decision {
        self.decision()
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let receipts = mem::replace(&mut self.outcome.receipts, Receipts::NONE);
        self.charge.give_back(self.due, receipts);
    }
}
