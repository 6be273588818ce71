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

use tokio::time::{Sleep, sleep};

use crate::{
    decision::Decision,
    error::{Error, StoreError},
    key::Key,
    limiter::Limiter,
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
        let max_wait = self.bounded_wait(timeout);
        self.wait(&key.into(), cost, max_wait).await
    }

    /// Spends `cost` from `key`'s quota and waits for the request's turn, as long as it takes.
    ///
    /// The decision is always an allowed one. It is first come, first served, with two exceptions, where no
    /// turn can be booked: a leaky bucket that is full, and a turn that is further away than
    /// [`check_within`](Limiter::check_within) can book. Then the call asks again after
    /// [`retry_after`](Decision::retry_after) and up to half as long again, at random.
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
        let key = key.into();
        loop {
            let decision = self.wait(&key, cost, self.longest_wait()).await?;
            let Some(retry_after) = decision.retry_after() else { return Ok(decision) };
            let jitter = RandomState::new().hash_one(()) as f64 / u64::MAX as f64;
            tokio::time::sleep(retry_after.mul_f64(1.0 + jitter / 2.0)).await;
        }
    }

    async fn wait(&self, key: &Key<'_>, cost: u32, max_wait: f64) -> Result<Decision, Error> {
        let answer = self.ask(key, cost, max_wait)?;
        if let Some(decision) = answer.now().filter(|it| it.delay().is_zero()) {
            return Ok(decision);
        }
        let mut turn = Turn::new(self.clone(), key.clone().into_owned(), answer, None);
        let decision = poll_fn(|cx| turn.poll_answer(cx)).await?;
        poll_fn(|cx| turn.poll_sleep(cx)).await;
        turn.go();
        Ok(decision)
    }
}

/// A request that asks for its turn, and waits for it. Dropped before it goes on, it gives back what it
/// has spent or booked.
pub(crate) struct Turn {
    phase: Phase,
    /// Until it goes on, or gives back.
    who: Option<(Limiter, Key<'static>, Option<Place>)>,
}

enum Phase {
    Asking(Answer<Decision>),
    Admitted(Decision, Option<Pin<Box<Sleep>>>),
    Over,
}

impl Turn {
    pub(crate) fn new(
        limiter: Limiter,
        key: Key<'static>,
        answer: Answer<Decision>,
        place: Option<Place>,
    ) -> Self {
        Self { phase: Phase::Asking(answer), who: Some((limiter, key, place)) }
    }

    /// Waits for the decision. If that allows, there is its delay to wait for.
    pub(crate) fn poll_answer(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Decision, StoreError>> {
        let Phase::Asking(answer) = &mut self.phase else { panic!("polled after completion") };
        let answer = ready!(Pin::new(answer).poll(cx));
        self.phase = match answer {
            Ok(decision) if decision.is_allowed() => Phase::Admitted(decision, None),
            _ => Phase::Over,
        };
        if let Phase::Admitted(decision, timer) = &mut self.phase
            && !decision.sleep().is_zero()
        {
            *timer = Some(Box::pin(sleep(decision.sleep())));
        }
        Poll::Ready(answer)
    }

    pub(crate) fn poll_sleep(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        match &mut self.phase {
            Phase::Admitted(_, Some(sleep)) => sleep.as_mut().poll(cx),
            _ => Poll::Ready(()),
        }
    }

    /// The request goes on, and nothing is given back. Returns who is charged.
    pub(crate) fn go(mut self) -> Option<Key<'static>> {
        self.phase = Phase::Over;
        self.who.take().map(|(_, key, _)| key)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let answer = match mem::replace(&mut self.phase, Phase::Over) {
            Phase::Asking(answer) => answer,
            Phase::Admitted(decision, _) => Answer::ready(Ok(decision)),
            Phase::Over => return,
        };
        if let Some((limiter, key, place)) = self.who.take() {
            limiter.give_back_later(key, answer, place);
        }
    }
}

impl fmt::Debug for Turn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Turn").finish_non_exhaustive()
    }
}
