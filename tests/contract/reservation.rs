//! Reservations that the caller holds: their release, which happens once, and their end by `ready`
//! or `keep`.

use std::{
    pin::{Pin, pin},
    task::{Context, Poll, Waker},
    time::Duration,
};

use tokio::time::{Instant, advance};
use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, Reservation, store::KeyState};

use crate::support::{self, ALGORITHMS, load::until, server::RedisServer};

const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3_600);

fn poll_once<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

/// Limiters of 10 per hour over each store, whose next requests have to wait, and the state of
/// their key.
async fn waiting(server: &RedisServer, algorithm: Algorithm) -> Vec<(Limiter, KeyState)> {
    let quota = Quota::per_hour(10);
    let in_redis = support::redis_store(server).await;
    let mut all = vec![];
    for limiter in [
        Limiter::new(algorithm.name(), MemoryStore::new(), algorithm, quota),
        Limiter::new(algorithm.name(), in_redis, algorithm, quota),
    ] {
        // A full leaky bucket reserves nothing.
        let cost = if algorithm == Algorithm::LeakyBucket { 4 } else { 10 };
        assert!(limiter.check("key").cost(cost).await.unwrap().is_allowed());
        let before = limiter.peek("key").await.unwrap();
        all.push((limiter, before));
    }
    all
}

/// Waits until the key is as it was, except that time has passed.
async fn until_released(limiter: &Limiter, before: &KeyState) {
    let is_released = async || {
        let state = limiter.peek("key").await.unwrap();
        assert!(state.remaining() <= before.remaining(), "released twice: {state:?}");
        state.remaining() == before.remaining() && state.reset_after() <= before.reset_after()
    };
    until("the reservation is released", is_released).await;
}

async fn reserve(limiter: &Limiter, units: u64, max_wait: Duration) -> Reservation {
    limiter.reserve("key", units, max_wait).await.unwrap().admitted().unwrap()
}

#[tokio::test]
async fn a_dropped_reservation_is_released_once() {
    let server = RedisServer::start();
    for algorithm in ALGORITHMS {
        for (limiter, before) in waiting(&server, algorithm).await {
            let first = reserve(&limiter, 3, 9 * HOUR).await;
            let second = reserve(&limiter, 3, 9 * HOUR).await;
            for turn in [&first, &second] {
                assert!(turn.decision().is_allowed() && !turn.delay().is_zero(), "{turn:?}");
                assert!(turn.delay() <= turn.decision().delay(), "{algorithm}");
            }
            drop(first);
            drop(second);
            until_released(&limiter, &before).await;
        }
    }
}

/// A sliding log keeps its entries in order: there, spent units count from the last instant on.
#[tokio::test]
async fn units_that_are_spent_beside_reservations_do_not_stay_behind_them() {
    let server = RedisServer::start();
    for algorithm in ALGORITHMS.into_iter().filter(|it| *it != Algorithm::SlidingLog) {
        for (limiter, before) in waiting(&server, algorithm).await {
            let units = if algorithm == Algorithm::LeakyBucket { 3 } else { 10 };
            let first = reserve(&limiter, units, 9 * HOUR).await;
            let second = reserve(&limiter, units, 9 * HOUR).await;
            limiter.spend("key", 1).await.unwrap();
            drop((first, second));
            let times =
                |state: &KeyState| (state.retry_after().unwrap_or_default(), state.reset_after());
            let (retry, reset) = times(&before);
            until("only the spent unit is left", async || {
                let now = times(&limiter.peek("key").await.unwrap());
                now.0 < retry + HOUR / 4 && now.1 < reset + HOUR / 4
            })
            .await;
        }
    }
}

#[tokio::test]
async fn units_that_outgrow_four_bytes_beside_a_reservation_leave_the_key_readable() {
    let server = RedisServer::start();
    let quota = Quota::per_hour(4_000_000_000);
    for buckets in [1, 9] {
        let algorithm = Algorithm::sliding_window().buckets(buckets);
        let in_redis = support::redis_store(&server).await;
        for limiter in [
            Limiter::new("large", MemoryStore::new(), algorithm, quota),
            Limiter::new("large", in_redis, algorithm, quota),
        ] {
            let key = buckets.to_string();
            assert!(limiter.check(&*key).cost(4_000_000_000).await.unwrap().is_allowed());
            let first = limiter.reserve(&*key, 5, 9 * HOUR).await.unwrap().admitted().unwrap();
            limiter.spend(&*key, 300_000_000).await.unwrap();
            let second = limiter.reserve(&*key, 5, 9 * HOUR).await.unwrap().admitted().unwrap();
            assert!(second.delay() > first.delay() && first.delay() > HOUR / 20, "{buckets}");
            assert!(!limiter.check(&*key).await.unwrap().is_allowed(), "{buckets}");
        }
    }
}

#[tokio::test]
async fn a_reservation_that_is_kept_stays_spent() {
    let server = RedisServer::start();
    for algorithm in ALGORITHMS {
        for (limiter, before) in waiting(&server, algorithm).await {
            let turn = limiter.reserve("key", 3, 9 * HOUR).await.unwrap();
            assert!(turn.keep().is_allowed());
            let after = limiter.peek("key").await.unwrap();
            assert!(after.reset_after() > before.reset_after(), "{algorithm}");
        }
    }
}

#[tokio::test]
async fn a_denied_request_reserves_nothing() {
    let server = RedisServer::start();
    for algorithm in ALGORITHMS {
        for (limiter, before) in waiting(&server, algorithm).await {
            let turn = limiter.reserve("key", 3, SECOND).await.unwrap();
            assert!(!turn.is_admitted() && !turn.decision().is_allowed(), "{algorithm}");
            assert!(!turn.keep().is_allowed(), "{algorithm}");
            until_released(&limiter, &before).await;
        }
    }
}

#[tokio::test]
async fn a_dropped_call_or_wait_releases_the_reservation() {
    let server = RedisServer::start();
    for algorithm in ALGORITHMS {
        for (limiter, before) in waiting(&server, algorithm).await {
            {
                let mut call = pin!(limiter.reserve("key", 3, 9 * HOUR));
                let _ = poll_once(call.as_mut()); // Redis answers later
            }
            until_released(&limiter, &before).await;
            let turn = reserve(&limiter, 3, 9 * HOUR).await;
            {
                let mut wait = pin!(turn.ready());
                assert!(poll_once(wait.as_mut()).is_pending(), "{algorithm}");
            }
            until_released(&limiter, &before).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_reservation_is_ready_at_its_instant() {
    for algorithm in ALGORITHMS {
        let limiter = Limiter::new("default", MemoryStore::new(), algorithm, Quota::per_second(4));
        while limiter.check("key").await.unwrap().delay().is_zero() {
            let next = limiter.peek("key").await.unwrap();
            if !next.allows() || !next.delay().is_zero() {
                break;
            }
        }
        let start = Instant::now();
        let turn = reserve(&limiter, 1, HOUR).await;
        let delay = turn.delay();
        assert!(!delay.is_zero(), "{algorithm}");
        advance(delay / 2).await; // the caller prepares its request
        assert_eq!(turn.delay(), delay - delay / 2, "{algorithm}");
        assert!(turn.ready().await.unwrap().is_allowed(), "{algorithm}");
        let late = start.elapsed() - delay;
        assert!(late < Duration::from_millis(2), "{algorithm}: {late:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_reservation_that_is_used_late_checks_again() {
    for algorithm in ALGORITHMS {
        let quota = Quota::per_second(1);
        let quota = if algorithm == Algorithm::LeakyBucket { quota.burst(3) } else { quota };
        let limiter = Limiter::new("default", MemoryStore::new(), algorithm, quota);
        assert!(limiter.check("key").await.unwrap().is_allowed());
        let late = reserve(&limiter, 1, HOUR).await;
        advance(10 * SECOND).await;
        assert_eq!(late.delay(), Duration::ZERO);
        assert!(late.ready().await.unwrap().is_allowed(), "{algorithm}");

        let denied = reserve(&limiter, 1, HOUR).await;
        assert!(denied.decision().is_allowed(), "{algorithm}");
        advance(10 * SECOND).await;
        limiter.block("key", 2 * HOUR).await.unwrap();
        let decision = denied.ready().await.unwrap();
        assert!(!decision.is_allowed() && decision.is_blocked(), "{algorithm}: {decision:?}");
    }
}
