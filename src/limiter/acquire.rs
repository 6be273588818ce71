//! Waiting for a turn, and giving it back.

use std::{
    fmt,
    future::poll_fn,
    mem,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::time::{Instant, Sleep, sleep};

use crate::{
    algorithm::{Action, micros},
    decision::Decision,
    error::Error,
    keys::Key,
    limiter::Charge,
    limiter::WaitSlot,
    limiter::retry::{self, Retry},
    limiter::{Limiter, MaxWait},
    store::StoreFuture,
};

/// The lateness up to which a waiting request goes on without asking again, unless the layer sets another.
pub(crate) const DEFAULT_MAX_LATENESS: Duration = Duration::from_millis(50);

/// In this time Redis has released what late requests have reserved, unless there are very many:
/// then a request may stand behind its own reservation for a moment, and is denied or waits longer,
/// but no more is admitted.
const RELEASE_TIME: Duration = Duration::from_millis(20);

impl Limiter {
    /// Spends `cost` from `key`'s quota and waits for the request's turn, if that comes within `timeout`.
    ///
    /// The turn is booked by the same question that asks for it, in the order in which the questions reach the
    /// store: first come, first served, also over many processes. If the turn would come later than `timeout`,
    /// the request is denied at once, and [`retry_after`](Decision::retry_after) is when the same call would
    /// succeed. With a `timeout` of zero it never waits. `timeout` counts from the store's decision; a leaky
    /// bucket that is full denies, whatever it is.
    ///
    /// A quota that is changed meanwhile applies to later requests. Requests that wait keep their instants, but they do
    /// not return their reservation if they are dropped later, and in a fixed window and in a leaky bucket other
    /// requests may proceed before them.
    ///
    /// The sleep is [`tokio::time::sleep`], which can be up to a millisecond late. With a `RedisStore` it
    /// counts from when Redis decided, as well as that can be told from how long answers take.
    ///
    /// If the sleep ends more than 50 ms late, because the process stood still, the reservation is released and the
    /// call asks once more, with what is left of `timeout`: the request goes on, waits again behind the others, or is
    /// denied. The decision returned is the last one. See
    /// [`max_lateness`](crate::RateLimitLayer::max_lateness), which is the setting of a layer.
    ///
    /// # Errors
    ///
    /// As for [`check_n`](Limiter::check_n).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future before its first poll spends nothing. Dropping it before it is ready gives back
    /// what was spent or booked, once, and those behind keep their turns, as [`cancel`](Limiter::cancel) does.
    /// With a [`MemoryStore`](crate::MemoryStore) that happens in the drop. With a `RedisStore` it happens in the
    /// background, see [there](crate::operation#requests-that-vanish).
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
    /// let limiter = Limiter::new(MemoryStore::new(), Algorithm::token_bucket(), quota);
    ///
    /// let timeout = Duration::from_millis(150);
    /// assert!(limiter.try_acquire("vendor", 1, timeout).await?.is_allowed()); // now
    /// assert!(limiter.try_acquire("vendor", 1, timeout).await?.is_allowed()); // 100 ms later
    ///
    /// // The next turn is 100 ms away: this one is denied at once.
    /// let denied = limiter.try_acquire("vendor", 1, Duration::from_millis(30)).await?;
    /// assert_eq!(denied.retry_after(), Some(Duration::from_millis(70)));
    /// # Ok(())
    /// # }
    /// ```
    pub async fn try_acquire(
        &self,
        key: impl Into<Key<'_>>,
        cost: u32,
        timeout: Duration,
    ) -> Result<Decision, Error> {
        self.wait(&key.into(), cost, MaxWait::UpTo(micros(timeout))).await
    }

    /// Spends `cost` from `key`'s quota and waits for the request's turn, as long as it takes.
    ///
    /// The decision is always an allowed one. It is first come, first served, with two exceptions,
    /// where no instant can be reserved: a leaky bucket that is full, and an instant that is
    /// further away than [`check_within`](Limiter::check_within) can reserve. Then the call asks
    /// again. The calls of a process that were denied stand in a queue: only the first one asks,
    /// after [`retry_after`](Decision::retry_after), and when it is served or dropped, the next one
    /// does. So it is first come, first served within a process; processes compete at random. While
    /// others wait, a new call sleeps for a millisecond before it asks.
    ///
    /// Poll the future until it is ready, or drop it: a call that asks again and is not polled
    /// delays the calls behind it for a second, or longer if no other call comes or goes.
    ///
    /// # Errors
    ///
    /// As for [`check_n`](Limiter::check_n).
    ///
    /// # Cancel safety
    ///
    /// As for [`try_acquire`](Limiter::try_acquire).
    ///
    /// # Panics
    ///
    /// As for [`try_acquire`](Limiter::try_acquire).
    pub async fn acquire(&self, key: impl Into<Key<'_>>, cost: u32) -> Result<Decision, Error> {
        Charge::new(self, key).cost(cost).acquire().await
    }

    async fn wait(&self, key: &Key<'_>, cost: u32, max_wait: MaxWait) -> Result<Decision, Error> {
        let answer = self.decide(Action::Check, key, cost, max_wait)?;
        if let Some(decision) = answer.now().filter(|it| it.delay().is_zero()) {
            return Ok(decision.clone());
        }
        Acquire::new(Charge::new(self, key).cost(cost), answer, max_wait).wait().await
    }
}

impl Charge {
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
        if self.retry_until(max_wait).is_some() {
            retry::let_others_ask_first(self).await;
        }
        Acquire::new(self.clone(), self.decide(Action::Check, max_wait)?, max_wait).wait().await
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
        retry::let_others_ask_first(self).await;
        let max_wait = MaxWait::LONGEST;
        let mut turn = Acquire::new(self.clone(), self.decide(Action::Check, max_wait)?, max_wait);
        turn.asks_again = true;
        turn.wait().await
    }

    /// Returns what `answer` spends or reserves, in the background, and drops `slot` then.
    pub(crate) fn release_answer_in_background(
        self,
        answer: StoreFuture<Decision>,
        slot: Option<WaitSlot>,
    ) {
        let Some(limiter) = self.limiters().next().cloned() else { return };
        limiter.spawn_background(Box::pin(async move {
            if let Ok(decision) = answer.await {
                self.decided(&decision).release_in_background();
            }
            drop(slot);
        }));
    }
}

/// A request that asks for its turn, and waits for it. Dropped before it goes on, it gives back what it
/// has spent or booked.
pub(crate) struct Acquire {
    phase: Phase,
    charge: Charge,
    max_wait: MaxWait,
    max_lateness: Duration,
    slot: Option<WaitSlot>,
    /// The end of the wait, once it is known.
    until: Option<Instant>,
    /// It has asked again because it was late, and does so only once.
    was_late: bool,
    /// Whether it asks again when it is denied.
    asks_again: bool,
    /// Since it was denied. In a box, as most requests never are.
    retry: Option<Box<Retry>>,
}

enum Phase {
    Asking(StoreFuture<Decision>),
    Admitted(Decision, Option<Pin<Box<Sleep>>>),
    /// The reservation that the request came too late for is being released.
    Releasing(Option<Pin<Box<Sleep>>>),
    /// Waits to ask again, after this denial.
    Retrying(Decision),
    Over,
}

impl Acquire {
    pub(crate) fn new(charge: Charge, answer: StoreFuture<Decision>, max_wait: MaxWait) -> Self {
        let until = charge.retry_until(max_wait);
        Self {
            phase: Phase::Asking(answer),
            charge,
            max_wait,
            max_lateness: DEFAULT_MAX_LATENESS,
            slot: None,
            until,
            was_late: false,
            asks_again: until.is_some(),
            retry: None,
        }
    }

    /// A request that has been admitted, and waits only for the service.
    pub(crate) fn admitted(charge: Charge, decision: Decision) -> Self {
        let mut turn = Self::new(charge, StoreFuture::Ready(None), MaxWait::NONE);
        turn.phase = Phase::Admitted(decision, None);
        turn
    }

    pub(crate) fn max_lateness(mut self, max_lateness: Duration) -> Self {
        self.max_lateness = max_lateness;
        self
    }

    pub(crate) fn wait_slot(mut self, slot: Option<WaitSlot>) -> Self {
        self.slot = slot;
        self
    }

    /// Waits for the decision, and until an admitted request may go on.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Decision, Error>> {
        loop {
            self.phase = match &mut self.phase {
                Phase::Asking(answer) => {
                    let answer = ready!(Pin::new(answer).poll(cx));
                    // Before there is a timer, which needs a runtime: without one this is dropped.
                    self.phase = Phase::Over;
                    let decision = answer?;
                    if decision.is_allowed() {
                        if let Some(retry) = &mut self.retry {
                            retry.allowed(&self.charge, &decision);
                        }
                        let lateness = self.note(&decision);
                        self.phase = Phase::Admitted(decision.clone(), None);
                        if self.is_too_late(lateness) {
                            self.release()
                        } else {
                            let timer = timer(&decision);
                            Phase::Admitted(decision, timer)
                        }
                    } else if self.asks_again
                        && self.retry.get_or_insert_default().denied(
                            &self.charge,
                            &decision,
                            self.until,
                        )
                    {
                        Phase::Retrying(decision)
                    } else {
                        return Poll::Ready(Ok(decision));
                    }
                }
                Phase::Admitted(decision, timer) => {
                    let Some(sleep) = timer else {
                        self.slot = None;
                        return Poll::Ready(Ok(decision.clone()));
                    };
                    ready!(sleep.as_mut().poll(cx));
                    let lateness = Instant::now().saturating_duration_since(sleep.deadline());
                    *timer = None;
                    if !self.is_too_late(lateness) {
                        continue;
                    }
                    self.release()
                }
                Phase::Releasing(pause) => {
                    if let Some(sleep) = pause {
                        ready!(sleep.as_mut().poll(cx));
                    }
                    Phase::Asking(
                        self.charge.decide(Action::Check, self.max_wait.at_most(self.left()))?,
                    )
                }
                Phase::Retrying(denied) => {
                    let retry = self.retry.get_or_insert_default();
                    if !ready!(retry.poll(cx, self.until)) {
                        return Poll::Ready(Ok(denied.clone()));
                    }
                    Phase::Asking(self.charge.decide(Action::Check, self.max_wait)?)
                }
                Phase::Over => panic!("polled after completion"),
            }
        }
    }

    /// Notes when the wait of an admitted request ends at the latest, which counts from the first decision.
    /// Returns by how much the decision came after the instant of the reservation.
    fn note(&mut self, decision: &Decision) -> Duration {
        if decision.delay().is_zero() {
            return Duration::ZERO; // there is no reservation
        }
        let (now, age) = (Instant::now(), decision.age());
        let wait = Duration::from_micros(self.charge.resolve(self.max_wait) as u64);
        self.until.get_or_insert_with(|| (now + wait).checked_sub(age).unwrap_or(now));
        age.saturating_sub(decision.delay())
    }

    fn is_too_late(&self, lateness: Duration) -> bool {
        lateness > self.max_lateness && !self.was_late
    }

    /// Releases what the request has reserved, and pauses until that is done: else it would stand
    /// in its own way. Of the many requests that are late after a stop, some may be gone already,
    /// and the store releases all of them together.
    fn release(&mut self) -> Phase {
        let Phase::Admitted(decision, _) = mem::replace(&mut self.phase, Phase::Over) else {
            panic!("only an admitted request has a reservation");
        };
        self.was_late = true;
        self.charge.clone().decided(&decision).release_in_background();
        let is_released =
            self.charge.own_parts().all(|(limiter, ..)| limiter.store().releases_immediately());
        Phase::Releasing((!is_released).then(|| Box::pin(sleep(RELEASE_TIME))))
    }

    /// What is left of the time for which it waits, in microseconds.
    pub(crate) fn left(&self) -> f64 {
        let until = self.until.map(|until| until.saturating_duration_since(Instant::now()));
        until.map_or(f64::INFINITY, micros)
    }

    async fn wait(mut self) -> Result<Decision, Error> {
        let decision = poll_fn(|cx| self.poll(cx)).await?;
        drop(self.go());
        Ok(decision)
    }

    /// The request goes on, or never will, and nothing is given back. Returns what it is charged.
    pub(crate) fn go(&mut self) -> Charge {
        self.phase = Phase::Over;
        self.slot = None;
        self.retry = None;
        mem::replace(&mut self.charge, Charge::exempt())
    }
}

fn timer(decision: &Decision) -> Option<Pin<Box<Sleep>>> {
    let delay = decision.sleep();
    (!delay.is_zero()).then(|| Box::pin(sleep(delay)))
}

impl Drop for Acquire {
    fn drop(&mut self) {
        let charge = mem::replace(&mut self.charge, Charge::exempt());
        match mem::replace(&mut self.phase, Phase::Over) {
            Phase::Asking(answer) => charge.release_answer_in_background(answer, self.slot.take()),
            Phase::Admitted(decision, _) => charge.decided(&decision).release_in_background(),
            Phase::Releasing(_) | Phase::Retrying(_) | Phase::Over => {}
        }
    }
}

impl fmt::Debug for Acquire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Acquire").finish_non_exhaustive()
    }
}
