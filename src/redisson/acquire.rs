//! Taking permits of a limiter that is shared with Java, at once or in time.

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
    /// If they will not be there in time, the request is denied at once, and
    /// [`retry_after`](Decision::retry_after) is when they would be. Else the call sleeps for so long, and up to
    /// a tenth longer (at most 100 ms) at random, never beyond `timeout`, and asks again: others may have been
    /// faster, so there is no order among those who wait. The last question is asked at the end of `timeout` at
    /// the latest. With a `timeout` of zero there is one. Who sleeps does not see that the rate is changed before it
    /// asks again.
    ///
    /// # Errors
    ///
    /// [`Error::ZeroCost`] if `permits` is 0, [`Error::CostAboveQuota`] if it is above the rate (or
    /// above 2^31 - 1), [`Error::NoRate`] if there is no rate, [`Error::Store`] if Redis gives no
    /// answer: then the permits may have been taken. Each attempt has one
    /// [deadline](crate::RedisStore::deadline), however many commands it takes; the sleep between
    /// two attempts has none.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future before its first poll takes nothing, and nor does dropping it while it sleeps. If it
    /// is dropped while Redis is asked, a task gives back what is then taken; when the runtime itself shuts down,
    /// that is lost, and the permits count for one interval.
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

    /// Takes `permits`, and waits for them for as long as it takes.
    ///
    /// The decision is always an allowed one. There is no order among those who wait.
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
        let answer = StoreFuture::Pending(Box::pin(self.clone().ask(deadline, permits, id)));
        let mut attempt = Attempt { limiter: self, permits, id, answer: Some(answer) };
        let reply = poll_fn(|cx| attempt.poll(cx)).await?;
        self.decision(permits, id, &reply)
    }

    /// Asks, again where it takes several calls to know a long log.
    async fn ask(self, deadline: Deadline, permits: u32, id: u64) -> Result<Reply, Error> {
        let (permits, lent) = (permits.to_string(), self.lent(deadline).await?);
        let mut tally = vec![];
        loop {
            let args: [&[u8]; 2] = [permits.as_bytes(), &id_of(id)];
            let reply: Reply = self.run(deadline, &ACQUIRE, &args, &lent, &tally).await?;
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
        let verdict = EngineReply {
            admitted: status == DONE,
            wait: wait as f64,
            remaining: remaining as f64,
            replenish: replenish as f64,
            reset: reset as f64,
            instant: 0.0,
        };
        let limit = Policy {
            limiter: self.label,
            quota: quota(rate, interval),
            cost,
            source: Source::Store,
        };
        let receipt = if verdict.admitted { Receipt::Id(id) } else { Receipt::None };
        Ok(Decision::with_receipt(limit, verdict, receipt, 0.0))
    }

    /// Returns what `answer` grants, in the background.
    fn release_answer_later(&self, permits: u32, id: u64, answer: StoreFuture<Reply>) {
        let limiter = self.clone();
        self.store.spawn_background(Box::pin(async move {
            let denied = matches!(answer.await, Ok(reply) if reply.0 != DONE);
            if !denied {
                limiter.release_later(permits, permits, id);
            }
        }));
    }

    /// Returns in the background `permits` of those that an acquire has `taken`, as far as that is possible.
    pub(super) fn release_later(&self, permits: u32, taken: u32, id: u64) {
        let limiter = self.clone();
        self.store.release_by(self.name(), move || {
            let limiter = limiter.clone();
            Box::pin(async move {
                let deadline = Deadline::in_background();
                match limiter.give_back(deadline, permits, taken, &id_of(id)).await {
                    Err(Error::Store(error)) => Err(error),
                    _ => Ok(()),
                }
            })
        });
    }
}

/// The quota that a rate comes nearest to.
fn quota(rate: u64, interval: u64) -> Quota {
    let limit = u32::try_from(rate).unwrap_or(u32::MAX).max(1);
    let longest = Duration::from_secs(366 * 86_400);
    Quota::new(limit, Duration::from_millis(interval.max(1)).min(longest))
}

/// A question that is on its way. Dropped before its answer is there, it gives back what that grants.
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
    async fn in_a_layer_no_request_sleeps_longer_the_more_often_it_asked() {
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
