//! Acquires permits, immediately or within a timeout. The rate is set elsewhere.

use std::{
    future::poll_fn,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::time::{Instant, sleep};

use super::{
    RateLimiter, id_of, random,
    script::{ABOVE_RATE, ACQUIRE, AGAIN, DONE, NO_RATE},
};
use crate::{
    algorithm::EngineReply,
    decision::{Decision, Policy, Receipt, Source},
    error::Error,
    quota::Quota,
    store::{Deadline, Store, StoreFuture},
    time::with_jitter,
};

/// {status, wait, remaining, replenish, reset, rate, interval, tally}
type Reply = (i64, u64, u64, u64, u64, u64, u64, Vec<u8>);

impl RateLimiter {
    /// Takes `permits`, and waits for them for up to `timeout`.
    ///
    /// If the permits will not be available in time, the request is denied immediately, and
    /// [`retry_after`](Decision::retry_after) returns when they would be. Otherwise the call sleeps
    /// for this delay and retries. A random addition of up to a tenth (at most 100 ms) spreads the
    /// retries, but no sleep goes beyond `timeout`. A zero `timeout` means a single attempt.
    ///
    /// Other requests can take the permits first, so the order of service is not defined. If the
    /// rate changes during a sleep, the call notices this at its next attempt.
    ///
    /// Each attempt has one [deadline](crate::RedisStore::deadline) for all its commands; the sleep
    /// between two attempts has none.
    ///
    /// # Errors
    ///
    /// - [`Error::ZeroCost`] if `permits` is 0.
    /// - [`Error::CostAboveQuota`] if `permits` is above the rate or above 2^31 - 1.
    /// - [`Error::NoRate`] if there is no rate.
    /// - [`Error::Store`] if Redis does not reply. The permits may have been taken nevertheless.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped before its first poll or while it sleeps, no permits are taken. If
    /// it is dropped during a call to Redis, a task releases the permits that this call takes. If
    /// the runtime shuts down first, these permits count for one interval.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime with time.
    pub async fn try_acquire(&self, permits: u32, timeout: Duration) -> Result<Decision, Error> {
        let start = Instant::now();
        let id = random();
        loop {
            let decision = self.attempt(self.store.start_deadline(), permits, id).await?;
            let Some(delay) = decision.retry_after() else { return Ok(decision) };
            let rest = timeout.saturating_sub(start.elapsed());
            if delay > rest {
                return Ok(decision);
            }
            sleep(with_jitter(delay).min(rest)).await;
        }
    }

    /// Takes `permits`, and waits for them without a timeout.
    ///
    /// The decision is always an allowed one. The order of service is not defined.
    ///
    /// # Errors
    ///
    /// As for [`try_acquire`](RateLimiter::try_acquire).
    ///
    /// # Cancel safety
    ///
    /// As for [`try_acquire`](RateLimiter::try_acquire).
    ///
    /// # Panics
    ///
    /// As for [`try_acquire`](RateLimiter::try_acquire).
    pub async fn acquire(&self, permits: u32) -> Result<Decision, Error> {
        self.try_acquire(permits, Duration::MAX).await
    }

    pub(super) async fn attempt(
        &self,
        deadline: Deadline,
        permits: u32,
        id: u64,
    ) -> Result<Decision, Error> {
        if permits == 0 {
            return Err(Error::ZeroCost);
        }
        let answer = StoreFuture::pending(self.clone().acquire_in_steps(deadline, permits, id));
        let mut attempt = Attempt { limiter: self, permits, id, answer: Some(answer) };
        let reply = poll_fn(|cx| attempt.poll(cx)).await?;
        self.decision(permits, id, &reply)
    }

    /// Executes the script, repeatedly if it takes several calls to read a long log.
    async fn acquire_in_steps(
        self,
        deadline: Deadline,
        permits: u32,
        id: u64,
    ) -> Result<Reply, Error> {
        let (permits, rate) = (permits.to_string(), self.template_rate(deadline).await?);
        let mut tally = vec![];
        loop {
            let args: [&[u8]; 2] = [permits.as_bytes(), &id_of(id)];
            let reply: Reply = self.execute(deadline, &ACQUIRE, &args, &rate, &tally).await?;
            if reply.0 != AGAIN {
                return Ok(reply);
            }
            tally = reply.7;
        }
    }

    fn decision(&self, cost: u32, id: u64, reply: &Reply) -> Result<Decision, Error> {
        let (status, wait, remaining, replenish, reset, rate, interval, _) = *reply;
        match status {
            NO_RATE => return Err(self.no_rate()),
            ABOVE_RATE => {
                let max = rate.min(i32::MAX as u64) as u32;
                return Err(Error::CostAboveQuota { limiter: self.label, cost, max });
            }
            _ => {}
        }
        let reply = EngineReply {
            admitted: status == DONE,
            wait: wait as f64,
            remaining: remaining as f64,
            replenish: replenish as f64,
            reset: reset as f64,
            instant: 0.0,
        };
        let policy = Policy {
            limiter: self.label,
            quota: quota(rate, interval),
            cost,
            source: Source::Store,
        };
        let receipt = if reply.admitted { Receipt::Id(id) } else { Receipt::None };
        Ok(Decision::with_receipt(policy, reply, receipt, 0.0))
    }

    /// Releases in the background the permits that `answer` grants.
    fn release_answer_later(&self, permits: u32, id: u64, answer: StoreFuture<Reply>) {
        let limiter = self.clone();
        self.store.spawn_background(Box::pin(async move {
            let denied = matches!(answer.await, Ok(reply) if reply.0 != DONE);
            if !denied {
                limiter.release_later(permits, permits, id);
            }
        }));
    }

    /// Releases in the background `permits` of the permits that an acquire has `taken`, if Redis
    /// can be reached.
    pub(super) fn release_later(&self, permits: u32, taken: u32, id: u64) {
        let limiter = self.clone();
        self.store.release_by(self.name(), move || {
            let limiter = limiter.clone();
            Box::pin(async move {
                let deadline = Deadline::in_background();
                match limiter.release_taken(deadline, permits, taken, &id_of(id)).await {
                    Err(Error::Store(error)) => Err(error),
                    _ => Ok(()),
                }
            })
        });
    }
}

/// Returns the quota that is nearest to a rate.
fn quota(rate: u64, interval: u64) -> Quota {
    let limit = u32::try_from(rate).unwrap_or(u32::MAX).max(1);
    let max_window = Duration::from_secs(366 * 86_400);
    Quota::new(limit, Duration::from_millis(interval.max(1)).min(max_window))
}

/// A call in flight. If it is dropped before the reply, it releases the permits that the reply
/// grants.
struct Attempt<'a> {
    limiter: &'a RateLimiter,
    permits: u32,
    id: u64,
    answer: Option<StoreFuture<Reply>>,
}

impl Attempt<'_> {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Reply, Error>> {
        let answer = self.answer.as_mut().expect("polled after completion");
        let reply = ready!(Pin::new(answer).poll(cx));
        self.answer = None;
        Poll::Ready(reply)
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        if let Some(answer) = self.answer.take() {
            self.limiter.release_answer_later(self.permits, self.id, answer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Charge, RedisStore, limiter::Retry};

    #[tokio::test(start_paused = true)]
    async fn in_a_layer_the_delay_does_not_grow_with_the_number_of_retries() {
        let store = RedisStore::lazy("redis://127.0.0.1:1/").unwrap();
        let limiter = RateLimiter::new(store, "LIMITER_NAME");
        let ms = 50;
        let reply = (0, ms * 1_000, 0, ms * 1_000, ms * 1_000, 10, 1_000, vec![]);
        let denied = limiter.decision(1, 0, &reply).unwrap();
        let (charge, delay) = (Charge::new(limiter, "ada"), Duration::from_millis(ms));
        let mut retry = Retry::default();
        for _ in 0..100 {
            assert_eq!(denied.retry_after(), Some(delay));
            assert!(retry.denied(&charge, &denied, None));
            let start = Instant::now();
            assert!(poll_fn(|cx| retry.poll(cx, None)).await);
            let tick = Duration::from_millis(1);
            assert!((delay..=delay * 11 / 10 + tick).contains(&start.elapsed()));
        }
    }
}
