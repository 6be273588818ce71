//! Waiting for a turn, and giving it back.

use std::{
    fmt,
    future::poll_fn,
    hash::{BuildHasher, RandomState},
    mem,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::time::{Instant, Sleep, sleep};

#[cfg(feature = "redis")]
use crate::redisson;
use crate::{
    algorithm::micros,
    charge::Charge,
    decision::Decision,
    error::Error,
    key::Key,
    limiter::{Limiter, MaxWait},
    store::Answer,
    waiters::Place,
};

impl Limiter {
    /// Spends `cost` from `key`'s quota and waits for the request's turn, if that comes within `timeout`.
    ///
    /// The turn is booked by the same question that asks for it, in the order in which the questions reach the
    /// store: first come, first served, also over many processes. If the turn would come later than `timeout`,
    /// the request is denied at once, and [`retry_after`](Decision::retry_after) is when the same call would
    /// succeed. With a `timeout` of zero it never waits. `timeout` counts from the store's decision; a leaky
    /// bucket that is full denies, whatever it is.
    ///
    /// A quota that is changed meanwhile applies to those who come later; those who wait keep their turns,
    /// but in a fixed window and in a leaky bucket others may then go before them.
    ///
    /// The sleep is [`tokio::time::sleep`], which can be up to a millisecond late. With a `RedisStore` it
    /// counts from when Redis decided, as well as that can be told from how long answers take.
    ///
    /// # Errors
    ///
    /// As for [`check_n`](Limiter::check_n).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future before its first poll spends nothing. Dropping it before it is ready gives back
    /// what was spent or booked, once, and those behind keep their turns, as [`cancel`](Limiter::cancel) does.
    /// With a [`MemoryStore`](crate::MemoryStore) that happens in the drop. With a `RedisStore` it takes a task
    /// on the runtime: if that is shutting down, the turn stays booked, and passes unused.
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
    /// The decision is always an allowed one. It is first come, first served, with two exceptions, where no
    /// turn can be booked: a leaky bucket that is full, and a turn that is further away than
    /// [`check_within`](Limiter::check_within) can book. Then the call asks again after
    /// [`retry_after`](Decision::retry_after) and up to half as long again, at random, and each further time up to
    /// twice as much later as before.
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
        let answer = self.ask(key, cost, max_wait)?;
        if let Some(decision) = answer.now().filter(|it| it.delay().is_zero()) {
            return Ok(decision);
        }
        Turn::new(Charge::new(self, key).cost(cost), answer, max_wait, None).wait().await
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
        let max_wait = MaxWait::LONGEST;
        for attempt in 0.. {
            let turn = Turn::new(self.clone(), self.ask(max_wait)?, max_wait, None);
            let decision = turn.wait().await?;
            let Some(retry_after) = decision.retry_after() else { return Ok(decision) };
            sleep(drawn_out(retry_after, attempt)).await;
        }
        unreachable!()
    }

    /// How long a request that was denied sleeps before it asks again.
    pub(crate) fn pause(&self, retry_after: Duration, attempt: u32) -> Duration {
        match self.limiters().next() {
            #[cfg(feature = "redis")]
            Some(limiter) if limiter.is_redisson() => redisson::drawn_out(retry_after),
            _ => drawn_out(retry_after, attempt),
        }
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
}

/// The time, and up to half as long again; with each attempt up to twice as much longer, so that many who
/// wait do not all ask all the time.
fn drawn_out(time: Duration, attempt: u32) -> Duration {
    let jitter = RandomState::new().hash_one(()) as f64 / u64::MAX as f64;
    time.mul_f64(1.0 + jitter / 2.0 * f64::from(1 << attempt.min(10)))
}

/// A request that asks for its turn, and waits for it. Dropped before it goes on, it gives back what it
/// has spent or booked.
pub(crate) struct Turn {
    phase: Phase,
    charge: Charge,
    place: Option<Place>,
    /// Where no turn can be booked, until when to ask again.
    retry_until: Option<Instant>,
    attempt: u32,
}

enum Phase {
    Asking(Answer<Decision>),
    Admitted(Decision, Option<Pin<Box<Sleep>>>),
    Retrying(Pin<Box<Sleep>>),
    Over,
}

impl Turn {
    pub(crate) fn new(
        charge: Charge,
        answer: Answer<Decision>,
        max_wait: MaxWait,
        place: Option<Place>,
    ) -> Self {
        let retry_until = charge.retry_until(max_wait);
        Self { phase: Phase::Asking(answer), charge, place, retry_until, attempt: 0 }
    }

    /// A request that has been admitted, and waits only for the service.
    pub(crate) fn admitted(charge: Charge, decision: Decision) -> Self {
        let mut turn = Self::new(charge, Answer::Ready(None), MaxWait::NONE, None);
        turn.phase = Phase::Admitted(decision, None);
        turn
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
                        self.phase = Phase::Admitted(decision, None);
                        Phase::Admitted(decision, timer(decision))
                    } else if let Some(sleep) = self.retry(decision) {
                        Phase::Retrying(sleep)
                    } else {
                        return Poll::Ready(Ok(decision));
                    }
                }
                Phase::Admitted(decision, timer) => {
                    if let Some(sleep) = timer {
                        ready!(sleep.as_mut().poll(cx));
                    }
                    return Poll::Ready(Ok(*decision));
                }
                Phase::Retrying(sleep) => {
                    ready!(sleep.as_mut().poll(cx));
                    Phase::Asking(self.charge.ask(MaxWait::NONE)?)
                }
                Phase::Over => panic!("polled after completion"),
            }
        }
    }

    /// The time until a denied request asks again, if that is not too late.
    fn retry(&mut self, decision: Decision) -> Option<Pin<Box<Sleep>>> {
        let (until, retry_after) = (self.retry_until?, decision.retry_after()?);
        let left = until.saturating_duration_since(Instant::now());
        let pause = self.charge.pause(retry_after, self.attempt).min(left);
        self.attempt += 1;
        (retry_after <= left).then(|| Box::pin(sleep(pause)))
    }

    /// What is left of the time for which it waits, in microseconds.
    pub(crate) fn left(&self) -> f64 {
        let until = self.retry_until.map(|until| until.saturating_duration_since(Instant::now()));
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
        self.place = None;
        mem::replace(&mut self.charge, Charge::exempt())
    }
}

fn timer(decision: Decision) -> Option<Pin<Box<Sleep>>> {
    let delay = decision.sleep();
    (!delay.is_zero()).then(|| Box::pin(sleep(delay)))
}

impl Drop for Turn {
    fn drop(&mut self) {
        let answer = match mem::replace(&mut self.phase, Phase::Over) {
            Phase::Asking(answer) => answer,
            Phase::Admitted(decision, _) => Answer::ready(Ok(decision)),
            Phase::Retrying(_) | Phase::Over => return,
        };
        mem::replace(&mut self.charge, Charge::exempt()).give_back_later(answer, self.place.take());
    }
}

impl fmt::Debug for Turn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Turn").finish_non_exhaustive()
    }
}
