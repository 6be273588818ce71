//! The checks of one limiter. Those of several limits are in `charge.rs`, those that wait in
//! `acquire.rs`, and those that reserve in `reservation.rs`.

use std::{
    mem,
    pin::Pin,
    task::{Context, Poll, ready},
};

use super::{charge::Charge, handle::Limiter, max_wait::MaxWait, recovery::Recovered};
use crate::{
    algorithm::Action,
    decision::{Decision, KeyState, Outcome},
    error::Error,
    keys::Key,
    store::{Store, StoreFuture},
};

impl Limiter {
    /// Spends 1 unit of the quota of `key` if one is left.
    ///
    /// A denied request spends nothing. A leaky bucket with room allows a request with a
    /// [`delay`](Decision::delay) that the caller must wait for: up to the time in which its burst
    /// drains. The other algorithms allow requests without a delay.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] if the store fails.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future before its first poll spends nothing. After that, the unit may have been
    /// spent: with a [`MemoryStore`](crate::MemoryStore), the first poll decides.
    #[inline]
    pub fn check<'k>(
        &self,
        key: impl Into<Key<'k>>,
    ) -> impl Future<Output = Result<Decision, Error>> {
        Check::new(self, key, 1)
    }

    /// Checks like [`check`](Limiter::check), in code that cannot await: the store must be a
    /// [`MemoryStore`](crate::MemoryStore). If the store fails, the
    /// [failure policy](Limiter::on_failure) applies.
    ///
    /// # Errors
    ///
    /// [`Error::NotImmediate`] if the store answers later, such as a `RedisStore`, immediately and
    /// without spending; [`Error::Store`] if the store fails.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    ///
    /// # fn main() -> Result<(), tower_ratelimit::Error> {
    /// let quota = Quota::per_hour(1);
    /// let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::token_bucket(), quota);
    /// assert!(limiter.check_now("alice")?.is_allowed());
    /// assert!(!limiter.check_now("alice")?.is_allowed());
    /// # Ok(())
    /// # }
    /// ```
    pub fn check_now<'k>(&self, key: impl Into<Key<'k>>) -> Result<Decision, Error> {
        self.check_n_now(key, 1)
    }

    /// Checks like [`check_n`](Limiter::check_n), in code that cannot await. See
    /// [`check_now`](Limiter::check_now). The [failure policy](Limiter::on_failure) applies, too.
    ///
    /// # Errors
    ///
    /// As for [`check_now`](Limiter::check_now), and [`Error::ZeroCost`] and
    /// [`Error::CostAboveQuota`] for an invalid cost, immediately and without spending.
    pub fn check_n_now<'k>(&self, key: impl Into<Key<'k>>, n: u64) -> Result<Decision, Error> {
        let not_immediate = || Error::NotImmediate { limiter: self.static_name().into() };
        if !self.store().is_immediate() {
            return Err(not_immediate());
        }
        let key = key.into();
        let answer = self.decide(Action::Check, &key, n, MaxWait::DEFAULT);
        let result = answer.into_now().ok_or_else(not_immediate)?;
        let recovered = match result {
            Ok(outcome) => return Ok(outcome.decision),
            Err(error) => Charge::new_n(self, &key, n).recover_by_limiter(error)?,
        };
        match recovered {
            Recovered::Uncounted(decision) => Ok(decision),
            Recovered::Fallback(charge) => {
                let answer = charge.decide(Action::Check, MaxWait::DEFAULT);
                let result = answer.into_now().ok_or_else(not_immediate)?;
                result.map(|outcome| outcome.decision)
            }
        }
    }

    /// Spends `n` units of the quota of `key` if they are left.
    ///
    /// # Errors
    ///
    /// [`Error::ZeroCost`] and [`Error::CostAboveQuota`] for an invalid cost, immediately and
    /// without spending; [`Error::Store`] if the store fails.
    ///
    /// # Cancel safety
    ///
    /// As for [`check`](Limiter::check).
    #[inline]
    pub fn check_n<'k>(
        &self,
        key: impl Into<Key<'k>>,
        n: u64,
    ) -> impl Future<Output = Result<Decision, Error>> {
        Check::new(self, key, n)
    }

    /// Returns the state of `key`, and whether [`check`](Limiter::check) would be allowed now. It
    /// spends nothing.
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
    pub async fn peek(&self, key: impl Into<Key<'_>>) -> Result<KeyState, Error> {
        self.peek_n(key, 1).await
    }

    /// Returns the state of `key`, and whether [`check_n`](Limiter::check_n) would be allowed now.
    /// It spends nothing.
    ///
    /// # Errors
    ///
    /// As for [`check_n`](Limiter::check_n).
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
    /// assert!(limiter.peek_n("alice", 3).await?.allows());
    /// assert!(!limiter.peek_n("alice", 4).await?.allows());
    /// # Ok(())
    /// # }
    /// ```
    pub async fn peek_n(&self, key: impl Into<Key<'_>>, n: u64) -> Result<KeyState, Error> {
        let outcome = self.decide(Action::Peek, &key.into(), n, MaxWait::DEFAULT).await?;
        Ok(KeyState::peeked(outcome.decision))
    }
}

/// The future of a check. Not an async function, whose state machine takes a fifth of a check in
/// memory.
struct Check<'s, 'k, K> {
    limiter: &'s Limiter,
    n: u64,
    state: State<'k, K>,
}

enum State<'k, K> {
    /// The key is converted by the first poll, which moves it less often.
    Starting(K),
    /// Boxed, so that the future of a check in memory is small.
    Waiting(Box<Waiting<'k>>),
    Done,
}

/// A check whose answer comes later.
struct Waiting<'k> {
    key: Key<'k>,
    answer: StoreFuture<Outcome>,
    /// True if the answer is that of the fallback, because the store has failed.
    falls_back: bool,
}

impl<'s, 'k, K> Check<'s, 'k, K> {
    #[inline]
    fn new(limiter: &'s Limiter, key: K, n: u64) -> Self {
        Self { limiter, n, state: State::Starting(key) }
    }

    /// Decides without the fast path.
    #[inline(never)]
    fn decide(&mut self, cx: &mut Context<'_>, key: Key<'k>) -> Poll<Result<Decision, Error>> {
        if let Some(outcome) = self.limiter.check_observed(&key, self.n, MaxWait::DEFAULT) {
            return Poll::Ready(Ok(outcome.decision));
        }
        let mut answer =
            self.limiter.decide_in_store(Action::Check, &key, self.n, MaxWait::DEFAULT);
        // Boxed only if it has to be kept.
        let failed = match Pin::new(&mut answer).poll(cx) {
            Poll::Ready(Ok(outcome)) => return Poll::Ready(Ok(outcome.decision)),
            Poll::Ready(Err(error)) => Some(error),
            Poll::Pending => None,
        };
        let is_pending = failed.is_none();
        if let Some(error) = failed {
            answer = StoreFuture::ready(Err(error));
        }
        self.state = State::Waiting(Box::new(Waiting { key, answer, falls_back: false }));
        if is_pending { Poll::Pending } else { self.poll_later(cx) }
    }

    #[inline(never)]
    fn poll_later(&mut self, cx: &mut Context<'_>) -> Poll<Result<Decision, Error>> {
        let State::Waiting(waiting) = &mut self.state else { panic!("polled after completion") };
        loop {
            let Waiting { key, answer, falls_back } = &mut **waiting;
            let result = ready!(Pin::new(&mut *answer).poll(cx));
            let error = match result {
                Ok(outcome) => return self.done(Ok(outcome.decision)),
                Err(error) if *falls_back => return self.done(Err(error)),
                Err(error) => error,
            };
            match Charge::new_n(self.limiter, &*key, self.n).recover_by_limiter(error) {
                Ok(Recovered::Fallback(charge)) => {
                    // It may count units at a time by now.
                    if let Err(error) = charge.check_costs() {
                        return self.done(Err(error));
                    }
                    *answer = charge.decide(Action::Check, MaxWait::DEFAULT);
                    *falls_back = true;
                }
                Ok(Recovered::Uncounted(decision)) => return self.done(Ok(decision)),
                Err(error) => return self.done(Err(error)),
            }
        }
    }

    fn done(&mut self, result: Result<Decision, Error>) -> Poll<Result<Decision, Error>> {
        self.state = State::Done;
        Poll::Ready(result)
    }
}

/// The key is moved before it is used.
impl<K> Unpin for Check<'_, '_, K> {}

impl<'k, K: Into<Key<'k>>> Future for Check<'_, 'k, K> {
    type Output = Result<Decision, Error>;

    #[inline]
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        if !matches!(this.state, State::Starting(_)) {
            return this.poll_later(cx);
        }
        let State::Starting(key) = mem::replace(&mut this.state, State::Done) else {
            unreachable!("matched above")
        };
        let key = key.into();
        match this.limiter.check_fast(Action::Check, &key, this.n, MaxWait::DEFAULT) {
            Some(outcome) => Poll::Ready(Ok(outcome.decision)),
            None => this.decide(cx, key),
        }
    }
}
