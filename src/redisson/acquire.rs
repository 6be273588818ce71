//! Acquires permits, immediately or within a timeout. The rate is set elsewhere.

use std::{sync::atomic::Ordering::Relaxed, time::Duration};

use tower_ratelimit_redisson::{
    AcquireReply, PLACEHOLDER, Script, entry, id_of, random,
    status::{ABOVE_RATE, AGAIN, DONE, NO_RATE, PER_CLIENT},
};

use super::{
    RateLimiter,
    script::{Acquired, by_hash, sent},
};
use crate::{
    algorithm::{Action, EngineReply},
    decision::{Decision, Limit, Outcome, Policy, Receipt, Receipts, Source},
    error::Error,
    keys::Key,
    limiter::Charge,
    observe::Observers,
    quota,
    store::{Deadline, Reporting, StoreCalls, StoreFuture, report_answer},
};

impl RateLimiter {
    /// Takes `permits`, and waits for them for up to `timeout`.
    ///
    /// If the permits will not be available in time, the request is denied immediately, and
    /// [`retry_after`](Decision::retry_after) returns when they would be. Otherwise the call waits
    /// and retries. A zero `timeout` means a single attempt.
    ///
    /// The calls of a name and a store wait in a [line](crate::guide::waiting#in-a-line): only the
    /// first one sleeps for its delay and retries, and the next one attempts when the first is
    /// served or dropped. So service is first come, first served within a process. Between
    /// processes the order is not defined. Java retries 3 ms after the permits have returned, and
    /// this crate at once: if calls of both wait for the same permits, this crate gets most.
    /// If this process releases permits or changes the rate, the first call attempts at once. A
    /// change of another process is noticed at the next attempt.
    ///
    /// Poll the future until it is ready, or drop it. A first call that is not polled delays the
    /// calls behind it for a tenth of a second, and during an attempt for a second.
    ///
    /// Each attempt has one [deadline](crate::store::RedisConfig::deadline) for all its commands;
    /// the sleep between two attempts has none.
    ///
    /// # Errors
    ///
    /// - [`Error::ZeroCost`] if `permits` is 0.
    /// - [`Error::CostAboveQuota`] if `permits` is above the rate or above 2^31 - 1.
    /// - [`RateLimiterError::NoRate`](super::RateLimiterError::NoRate) if there is no rate.
    /// - [`Error::Store`] if Redis does not reply. The permits may have been taken nevertheless.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped before its first poll or while it waits, no permits are taken, and
    /// the next waiting call moves up. If
    /// it is dropped during a call to Redis, a task releases the permits that this call takes. If
    /// the runtime shuts down first, these permits count for one interval.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime with time.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use tower_ratelimit::{RedisStore, redisson::RateLimiter};
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let store = RedisStore::connect("redis://127.0.0.1/").await?;
    /// # let limiter = RateLimiter::new(store, "shared");
    /// let decision = limiter.try_acquire(1, Duration::from_millis(500)).await?;
    /// println!("{}", decision.is_allowed());
    /// # Ok(())
    /// # }
    /// ```
    pub async fn try_acquire(&self, permits: u64, timeout: Duration) -> Result<Decision, Error> {
        if timeout.is_zero() || permits == 0 {
            let attempt = self.attempt(self.store.start_deadline(), permits, random()).await;
            return attempt.map(|outcome| outcome.decision);
        }
        Charge::of_units(self, PLACEHOLDER, permits).wait(timeout).await
    }

    /// Takes `permits`, and waits for them without a timeout.
    ///
    /// The order of service is that of
    /// [`try_acquire`](RateLimiter::try_acquire).
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
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # use tower_ratelimit::{RedisStore, redisson::RateLimiter};
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let store = RedisStore::connect("redis://127.0.0.1/").await?;
    /// # let limiter = RateLimiter::new(store, "shared");
    /// let _ = limiter.acquire(1).await?; // waits for as long as necessary
    /// # Ok(())
    /// # }
    /// ```
    pub async fn acquire(&self, permits: u64) -> Result<Decision, Error> {
        self.try_acquire(permits, Duration::MAX).await
    }

    pub(super) async fn attempt(
        &self,
        deadline: Deadline,
        permits: u64,
        id: u64,
    ) -> Result<Outcome, Error> {
        if permits == 0 {
            return Err(Error::ZeroCost);
        }
        let start = std::time::Instant::now();
        let answer = StoreFuture::pending(self.clone().acquire_in_steps(deadline, permits, id));
        let mut attempt = Attempt { limiter: self, permits, id, answer: Some(answer) };
        let reply = attempt.answer.as_mut().expect("it is there until the reply").await;
        attempt.answer = None;
        let result = reply.and_then(|reply| self.outcome(permits, id, &reply));
        let (observers, key, duration): (&Observers, _, _) =
            (&self.observers, self.key(), Some(start.elapsed()));
        let limits = [(self.label, observers, &key)].into_iter();
        let decided = result.as_ref().map(|outcome| &outcome.decision);
        report_answer(Action::Check, Reporting::Each, limits, decided, duration);
        result
    }

    /// Returns the denial of a request that others have kept from an attempt.
    pub(super) async fn denial(self, permits: u64) -> Result<Outcome, Error> {
        let (config, remaining) = (self.config().await?, self.available_permits().await?);
        let config = config.ok_or_else(|| self.no_rate())?;
        let reply = AcquireReply {
            wait: f64::MAX, // unknown
            remaining: remaining as f64,
            rate: config.rate as f64,
            interval: config.interval.as_millis() as f64,
            ..AcquireReply::default()
        };
        self.outcome(permits, 0, &reply)
    }

    /// Returns the name in Redis as the key of events.
    pub(super) fn key(&self) -> Key<'_> {
        self.name().into()
    }

    /// Executes the script, repeatedly if it takes several calls to read a long log.
    async fn acquire_in_steps(
        self,
        deadline: Deadline,
        permits: u64,
        id: u64,
    ) -> Result<AcquireReply, Error> {
        let (entry, rate) = (entry(&id_of(id), permits), self.template_rate(deadline).await?);
        let mut tally = vec![];
        loop {
            let command = match self.is_per_client.load(Relaxed) {
                true => by_hash(Script::Acquire, &self.keys.all, &[&entry], &rate, &tally),
                false => by_hash(Script::Acquire, &self.keys.overall(), &[&entry], &rate, &tally),
            };
            let text = &sent(Script::Acquire).text;
            let Acquired(reply) = self.store.run(self.label, deadline, command, text).await?;
            match reply.status {
                AGAIN => tally = reply.tally,
                PER_CLIENT => self.is_per_client.store(true, Relaxed),
                _ => return Ok(reply),
            }
        }
    }

    fn outcome(&self, cost: u64, id: u64, reply: &AcquireReply) -> Result<Outcome, Error> {
        let AcquireReply { wait, remaining, replenish, reset, .. } = *reply;
        match reply.status {
            NO_RATE => return Err(self.no_rate()),
            ABOVE_RATE => {
                let max = reply.rate.min(i32::MAX.into()) as u64;
                return Err(Error::CostAboveQuota { limiter: self.label.into(), cost, max });
            }
            _ => {}
        }
        let quota = quota::nearest(reply.rate as u64, Duration::from_millis(reply.interval as u64));
        let admitted = reply.status == DONE;
        let reply = EngineReply {
            admitted,
            wait: Some(wait as i64),
            remaining: remaining as i64,
            replenish: replenish as i64,
            reset: reset as i64,
            ..EngineReply::uncounted(0)
        };
        let (limit, source) = (Limit::of(self.label, quota), Source::Store);
        let policy =
            Policy { limit, algorithm: None, own_quota: limit.other(&quota), cost, source };
        let receipt = if admitted { Receipt::Id(id) } else { Receipt::None };
        let decision = Decision::new(policy, reply, 0.0);
        Ok(Outcome { decision, receipts: Receipts::shared(receipt) })
    }

    /// Releases in the background the permits that `answer` grants.
    fn release_answer_later(&self, permits: u64, id: u64, answer: StoreFuture<AcquireReply>) {
        let limiter = self.clone();
        self.store.spawn_background(Box::pin(async move {
            let denied = matches!(answer.await, Ok(reply) if reply.status != DONE);
            if !denied {
                limiter.release_later(permits, permits, id);
            }
        }));
    }

    /// Releases in the background `permits` of the permits that an acquire has `taken`, if Redis
    /// can be reached.
    pub(super) fn release_later(&self, permits: u64, taken: u64, id: u64) {
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

/// A call in flight. If it is dropped before the reply, it releases the permits that the reply
/// grants.
struct Attempt<'a> {
    limiter: &'a RateLimiter,
    permits: u64,
    id: u64,
    answer: Option<StoreFuture<AcquireReply>>,
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
    use std::{
        collections::VecDeque,
        sync::{Arc, Mutex},
        task::{Context, Waker},
    };

    use tokio::{
        task::JoinSet,
        time::{Instant, sleep},
    };

    use super::*;
    use crate::{
        RedisStore,
        limiter::{AnyLimiter, ForeignLimiter},
        observe::LimiterObservers,
        sync::lock,
    };

    const DENIED: i64 = 0;
    const MS: Duration = Duration::from_millis(1);

    fn limiter() -> RateLimiter {
        let store = RedisStore::lazy("redis://127.0.0.1:1/").unwrap();
        RateLimiter::new(store, "LIMITER_NAME")
    }

    /// A log in memory that decides as the script does.
    #[derive(Debug)]
    struct Log {
        limiter: RateLimiter,
        rate: usize,
        interval: Duration,
        entries: Mutex<VecDeque<Instant>>,
    }

    impl Log {
        fn new(rate: usize, interval: Duration) -> Arc<Self> {
            Arc::new(Self { limiter: limiter(), rate, interval, entries: Mutex::default() })
        }

        fn take(&self) -> Outcome {
            let (mut entries, now) = (lock(&self.entries), Instant::now());
            while entries.front().is_some_and(|at| *at + self.interval <= now) {
                entries.pop_front();
            }
            let granted = entries.len() < self.rate;
            if granted {
                entries.push_back(now);
            }
            let next = (entries[0] + self.interval - now).as_micros() as f64;
            let reply = AcquireReply {
                status: if granted { DONE } else { DENIED },
                wait: if granted { 0.0 } else { next },
                remaining: (self.rate - entries.len()) as f64,
                replenish: next,
                reset: next,
                rate: self.rate as f64,
                interval: self.interval.as_millis() as f64,
                tally: vec![],
            };
            self.limiter.outcome(1, 0, &reply).unwrap()
        }

        /// Acquires as `try_acquire` does.
        async fn acquire(self: &Arc<Self>, timeout: Duration) -> Decision {
            let limiter = AnyLimiter::foreign(Target(self.clone()));
            Charge::of_units(&limiter, "", 1).wait(timeout).await.unwrap()
        }

        /// Returns the waiting call, polled until it waits, and a task that sees its end.
        async fn spawn(self: &Arc<Self>, ends: &mut Vec<tokio::task::JoinHandle<Instant>>) {
            let log = self.clone();
            ends.push(tokio::spawn(async move {
                assert!(log.acquire(Duration::MAX).await.is_allowed());
                Instant::now()
            }));
            sleep(10 * MS).await;
        }
    }

    #[derive(Debug)]
    struct Target(Arc<Log>);

    impl ForeignLimiter for Target {
        fn name(&self) -> &str {
            self.0.limiter.name()
        }

        fn store(&self) -> &dyn StoreCalls {
            &self.0.limiter.store
        }

        fn observers(&self) -> &LimiterObservers {
            self.0.limiter.observers()
        }

        fn decide(&self, _: Action, _: &Key<'_>, _: u64) -> StoreFuture<Outcome> {
            let log = self.0.clone();
            StoreFuture::pending(async move {
                sleep(MS).await; // a round trip
                Ok(log.take())
            })
        }

        fn denial(&self, _: &Key<'_>, _: u64) -> StoreFuture<Outcome> {
            let reply = AcquireReply { rate: 1.0, interval: 1.0, ..AcquireReply::default() };
            StoreFuture::ready(self.0.limiter.outcome(1, 0, &reply))
        }

        fn release_in_background(&self, _: &Key<'_>, _: &Receipt, _: u64) {}

        fn refund(&self, _: &Key<'_>, _: u64) -> StoreFuture<()> {
            StoreFuture::ready(Ok(()))
        }

        fn line(&self, key: &Key<'_>) -> u64 {
            self.0.limiter.line(key)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn callers_that_acquire_again_at_once_wait_no_longer_than_the_permits_take() {
        // All permits of a log return together; one permit in 50 ms, for 8 callers.
        for (rate, interval, longest) in [(20, 1_000 * MS, 1_010 * MS), (1, 50 * MS, 450 * MS)] {
            let (log, end) = (Log::new(rate, interval), Instant::now() + 20_000 * MS);
            let mut callers = JoinSet::new();
            for _ in 0..8 {
                let log = log.clone();
                callers.spawn(async move {
                    let (mut longest, mut served) = (Duration::ZERO, 0);
                    while Instant::now() < end {
                        let start = Instant::now();
                        assert!(log.acquire(Duration::MAX).await.is_allowed());
                        (longest, served) = (longest.max(start.elapsed()), served + 1);
                    }
                    (longest, served)
                });
            }
            let callers = callers.join_all().await;
            let waited = callers.iter().map(|(longest, _)| *longest).max().unwrap();
            let served: u32 = callers.iter().map(|(_, served)| served).sum();
            println!("{rate} per {interval:?}: {waited:?}, {served} served");
            assert!(waited <= longest, "{waited:?}");
            assert!(served >= 380, "{served} of 400 permits are used");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_calls_are_served_in_the_order_of_their_arrival() {
        let (log, mut ends) = (Log::new(1, 100 * MS), vec![]);
        assert!(log.acquire(Duration::ZERO).await.is_allowed());
        for _ in 0..5 {
            log.spawn(&mut ends).await;
        }
        let mut before = Instant::now();
        for end in ends {
            let end = end.await.unwrap();
            assert!(before < end);
            before = end;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_dropped_call_lets_the_next_one_go_on() {
        let (log, mut ends) = (Log::new(1, 100 * MS), vec![]);
        assert!(log.acquire(Duration::ZERO).await.is_allowed());
        let start = Instant::now();
        for _ in 0..3 {
            log.spawn(&mut ends).await;
        }
        ends.remove(0).abort();
        // Java leaves no permits to others, and neither do they.
        assert!(ends.remove(0).await.unwrap() - start <= 105 * MS);
        assert!(ends.remove(0).await.unwrap() - start <= 210 * MS);
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_that_is_not_polled_delays_others_for_a_bounded_time() {
        let log = Log::new(1, 100 * MS);
        assert!(log.acquire(Duration::ZERO).await.is_allowed());
        let mut first = Box::pin(log.acquire(Duration::MAX));
        for _ in 0..4 {
            let _ = first.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            sleep(MS).await;
        }
        let (start, mut ends) = (Instant::now(), vec![]);
        log.spawn(&mut ends).await;
        log.spawn(&mut ends).await;
        for end in ends {
            assert!(end.await.unwrap() - start <= 1_300 * MS);
        }
        drop(first);
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_whose_timeout_ends_in_the_queue_is_denied() {
        let (log, mut ends) = (Log::new(1, 100 * MS), vec![]);
        assert!(log.acquire(Duration::ZERO).await.is_allowed());
        log.spawn(&mut ends).await;
        let start = Instant::now();
        // The permits before it take until then, so it does not even wait.
        assert!(!log.acquire(150 * MS).await.is_allowed());
        assert!(start.elapsed() <= 5 * MS, "{:?}", start.elapsed());
        assert!(ends.remove(0).await.unwrap() - start <= 105 * MS);
    }

    #[tokio::test(start_paused = true)]
    async fn each_name_and_each_client_has_a_line() {
        let limiter = limiter();
        let line = |limiter: &RateLimiter, key: &str| limiter.line(&Key::from(key));
        let same = RateLimiter::new(limiter.store.clone(), "LIMITER_NAME");
        assert_eq!(line(&limiter, ""), line(&same, "any"));
        assert_ne!(line(&limiter, ""), line(&limiter.clone().client_id("other"), ""));
        let template = RateLimiter::new(limiter.store.clone(), "api:{key}");
        assert_ne!(line(&template, "a"), line(&template, "b"));
        assert_eq!(line(&template, "a"), line(&template.for_key("a").unwrap(), ""));
    }
}
