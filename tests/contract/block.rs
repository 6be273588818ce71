//! Blocked keys over either store: what is denied, what waits, what stays counted, and what ends a
//! block.

use std::{
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use http::StatusCode;
use tokio::time::{Instant, advance, pause, resume};
use tower::{Layer, ServiceExt};
use tower_ratelimit::{
    Algorithm, Charge, Decision, Limiter, MemoryStore, Quota, RateLimitLayer, RedisStore, key,
    layer::Rejection,
    store::{KeyState, Source},
};

use crate::support::{
    self, ALGORITHMS, counting, get,
    recorder::{Recorder, observed},
    server::RedisServer,
};

const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3_600);

async fn forgetful(server: &RedisServer) -> RedisStore {
    support::forgetful_store(server).await
}

/// Limiters over each store, for two replicas.
async fn replicas(server: &RedisServer, algorithm: Algorithm, quota: Quota) -> [[Limiter; 2]; 2] {
    let name = algorithm.name();
    let memory = Limiter::new(name, MemoryStore::new(), algorithm, quota);
    let redis = [forgetful(server).await, forgetful(server).await];
    [[memory.clone(), memory], redis.map(|store| Limiter::new(name, store, algorithm, quota))]
}

fn assert_blocked(decision: &Decision, rest: Duration) {
    assert!(decision.is_blocked() && !decision.is_allowed(), "{decision:?}");
    assert_eq!((decision.remaining(), decision.cost()), (0, 1));
    let ends = decision.replenish_after();
    assert!(ends <= rest && ends + 10 * SECOND > rest, "{decision:?}");
    // A leaky bucket lets a request wait for an hour, in which it drains.
    let may_wait = if decision.limiter() == "leaky-bucket" { HOUR } else { Duration::ZERO };
    assert_eq!(decision.retry_after(), Some(ends - may_wait));
    assert!(decision.reset_after() >= ends);
}

fn assert_left(state: &KeyState, rest: Duration) {
    let ends = state.blocked_for().unwrap();
    assert!(ends <= rest && ends + 10 * SECOND > rest, "{state:?}");
    assert_eq!((state.remaining(), state.replenish_after()), (0, ends));
    let may_wait = if state.limiter() == "leaky-bucket" { HOUR } else { Duration::ZERO };
    let wait = state.retry_after().unwrap();
    assert!(wait == ends || wait == ends - may_wait, "{state:?}");
    assert!(state.reset_after() >= ends);
}

fn query<T: redis::FromRedisValue>(server: &RedisServer, words: &[&str]) -> T {
    redis::cmd(words[0]).arg(&words[1..]).query(&mut server.connection()).unwrap()
}

fn poll_once<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

#[tokio::test]
async fn a_block_denies_on_every_replica_until_it_is_lifted_and_keeps_the_count() {
    let server = RedisServer::start();
    for algorithm in ALGORITHMS {
        for [here, there] in replicas(&server, algorithm, Quota::per_hour(10)).await {
            assert!(here.check("key").cost(3).await.unwrap().is_allowed());
            let blocked = here.block("key", 24 * HOUR).await.unwrap();
            assert_eq!((blocked.remaining(), blocked.allows()), (0, false), "{blocked:?}");
            assert_left(&blocked, 24 * HOUR);
            assert!(here.check("other").await.unwrap().is_allowed(), "{algorithm}");
            for limiter in [&here, &there] {
                assert_blocked(&limiter.check("key").await.unwrap(), 24 * HOUR);
                assert_left(&limiter.peek("key").await.unwrap(), 24 * HOUR);
                let denied = limiter.try_acquire("key", 1, HOUR).await.unwrap();
                let wait = denied.retry_after().unwrap();
                assert!(wait <= 23 * HOUR && wait + 10 * SECOND > 23 * HOUR, "{denied:?}");
            }
            // A shorter block does not shorten it.
            assert_left(&there.block("key", SECOND).await.unwrap(), 24 * HOUR);
            assert_blocked(&here.check("key").await.unwrap(), 24 * HOUR);
            // Units can be returned and spent.
            assert_left(&there.refund("key", 2).await.unwrap(), 24 * HOUR);
            assert_left(&there.spend("key", 4).await.unwrap(), 24 * HOUR);

            let free = there.unblock("key").await.unwrap();
            assert_eq!((free.blocked_for(), free.remaining()), (None, 5), "{algorithm}");
            assert_eq!(here.check("key").await.unwrap().remaining(), 4, "{algorithm}");
            assert_eq!(here.unblock("key").await.unwrap().blocked_for(), None, "{algorithm}");
        }
    }
}

#[tokio::test]
async fn a_peek_of_a_blocked_key_finds_its_count_and_what_is_held() {
    let server = RedisServer::start();
    for algorithm in ALGORITHMS.into_iter().filter(|it| *it != Algorithm::LeakyBucket) {
        for [here, there] in replicas(&server, algorithm, Quota::per_hour(10)).await {
            here.spend("key", 6).await.unwrap();
            let _permit = here.hold("key", 2).await.unwrap().admitted().unwrap();
            let before = there.peek("key").await.unwrap().reset_after();
            here.block("key", 60 * SECOND).await.unwrap();
            let blocked = there.peek("key").await.unwrap();
            assert_left(&blocked, 60 * SECOND);
            let reset = blocked.reset_after();
            assert!(reset <= before && reset + 60 * SECOND > before, "{algorithm}: {blocked:?}");
            assert_eq!(blocked.held(), 2, "{algorithm}");
        }
    }
}

#[tokio::test]
async fn a_reset_lifts_a_block_and_a_key_without_a_count_can_be_blocked() {
    let server = RedisServer::start();
    for algorithm in ALGORITHMS {
        for [here, there] in replicas(&server, algorithm, Quota::per_hour(10)).await {
            here.block("key", 24 * HOUR).await.unwrap();
            assert_blocked(&there.check("key").await.unwrap(), 24 * HOUR);
            there.reset("key").await.unwrap();
            assert_eq!(here.check("key").await.unwrap().remaining(), 9, "{algorithm}");

            here.reset("key").await.unwrap();
            here.block("key", Duration::MAX).await.unwrap();
            assert_blocked(&there.check("key").await.unwrap(), 36_525 * 24 * HOUR);
            there.unblock("key").await.unwrap();
            assert_eq!(there.peek("key").await.unwrap().reset_after(), Duration::ZERO);
        }
    }
    assert_eq!(query::<usize>(&server, &["DBSIZE"]), 0, "a key stays that was unblocked");
}

#[tokio::test]
async fn a_key_expires_with_its_block() {
    let server = RedisServer::start();
    let limiter = Limiter::new(
        "default",
        forgetful(&server).await,
        Algorithm::SlidingLog,
        Quota::per_hour(9),
    );
    assert!(limiter.check("key").await.unwrap().is_allowed());
    let key = "ratelimit:default:sliding-log:{key}";
    let ttl = || Duration::from_secs(query(&server, &["TTL", key]));
    assert!(ttl() <= 2 * HOUR);
    limiter.block("key", 24 * HOUR).await.unwrap();
    assert!((23 * HOUR..=24 * HOUR).contains(&ttl()), "{:?}", ttl());
    limiter.unblock("key").await.unwrap();
    assert!(ttl() <= 2 * HOUR);
    limiter.block("key", SECOND).await.unwrap();
    assert!(ttl() > HOUR - 10 * SECOND, "the count expires with the block");
}

#[tokio::test(start_paused = true)]
async fn a_request_that_may_wait_proceeds_after_the_end_of_the_block() {
    for algorithm in ALGORITHMS {
        let limiter = Limiter::new("default", MemoryStore::new(), algorithm, Quota::per_second(2));
        limiter.block("key", HOUR).await.unwrap();
        let start = Instant::now();
        let denied = limiter.try_acquire("key", 1, HOUR - SECOND).await.unwrap();
        assert_eq!((denied.retry_after(), start.elapsed()), (Some(SECOND), Duration::ZERO));

        let allowed = limiter.try_acquire("key", 1, HOUR).await.unwrap();
        assert_eq!((allowed.is_blocked(), allowed.delay()), (true, HOUR), "{algorithm}");
        assert_eq!(start.elapsed(), HOUR, "{algorithm}");
        assert_eq!(limiter.peek("key").await.unwrap().blocked_for(), None, "{algorithm}");

        limiter.block("key", HOUR).await.unwrap();
        let _ = limiter.acquire("key", 1).await.unwrap();
        assert_eq!(start.elapsed(), 2 * HOUR, "{algorithm}");
    }
}

#[tokio::test(start_paused = true)]
async fn no_more_than_the_quota_proceeds_at_the_end_of_a_block() {
    for algorithm in ALGORITHMS {
        let limiter = Limiter::new("default", MemoryStore::new(), algorithm, Quota::per_hour(3));
        limiter.block("key", 24 * HOUR).await.unwrap();
        let mut waits: Vec<Duration> = vec![];
        for _ in 0..6 {
            let decision = limiter.reserve("key", 1, 25 * HOUR).await.unwrap().keep();
            waits.extend(decision.is_allowed().then_some(decision.delay()));
        }
        let early = waits.iter().filter(|wait| **wait < 24 * HOUR).count();
        let at_the_end = waits.iter().filter(|wait| **wait == 24 * HOUR).count();
        assert_eq!(early, 0, "{algorithm}: {waits:?}");
        let burst = if algorithm == Algorithm::LeakyBucket { 1 } else { 3 };
        assert_eq!(at_the_end, burst, "{algorithm}: {waits:?}");
    }
}

#[tokio::test]
async fn as_many_requests_wait_for_the_end_of_a_block_as_fit_into_a_leaky_bucket() {
    let server = RedisServer::start();
    for [limiter, _] in replicas(&server, Algorithm::LeakyBucket, Quota::per_hour(4)).await {
        limiter.block("key", 24 * HOUR).await.unwrap();
        for place in 0..4 {
            let waits = limiter.reserve("key", 1, 30 * HOUR).await.unwrap().keep();
            let expected = 24 * HOUR + place * HOUR / 4;
            let delay = waits.delay();
            assert!(delay <= expected && delay + 10 * SECOND > expected, "{place}: {waits:?}");
        }
        let denied = limiter.reserve("key", 1, 30 * HOUR).await.unwrap().keep();
        assert!(denied.retry_after().unwrap() > 24 * HOUR, "{denied:?}");
    }
}

/// Waits for a second, during which a function blocks the key. Returns how long it took.
async fn wait_while(limiter: &Limiter, block: impl AsyncFnOnce(&Limiter)) -> Option<Duration> {
    let start = Instant::now();
    assert!(limiter.try_acquire("key", 2, Duration::ZERO).await.unwrap().is_allowed());
    let mut waiting = pin!(limiter.try_acquire("key", 2, 10 * SECOND));
    assert!(poll_once(waiting.as_mut()).is_pending());
    // With Redis, its check is sent by another task.
    while limiter.peek("key").await.unwrap().reset_after() <= SECOND {
        tokio::task::yield_now().await;
    }
    block(limiter).await;
    waiting.await.unwrap().is_allowed().then(|| start.elapsed())
}

#[tokio::test(start_paused = true)]
async fn a_request_that_waits_when_its_key_is_blocked_waits_for_the_end_or_is_denied() {
    for algorithm in ALGORITHMS.into_iter().filter(|algorithm| *algorithm != Algorithm::LeakyBucket)
    {
        let wait = async |block: Duration, unblocks: bool| {
            let limiter =
                Limiter::new("default", MemoryStore::new(), algorithm, Quota::per_second(2));
            wait_while(&limiter, async |limiter| {
                limiter.block("key", block).await.unwrap();
                if unblocks {
                    limiter.unblock("key").await.unwrap();
                }
            })
            .await
        };
        let usual = wait(Duration::ZERO, false).await.unwrap();
        assert!(usual >= SECOND, "{algorithm}");
        assert_eq!(wait(5 * SECOND, true).await, Some(usual), "{algorithm}");
        assert_eq!(wait(5 * SECOND, false).await, Some(5 * SECOND), "{algorithm}");
        assert_eq!(wait(30 * SECOND, false).await, None, "{algorithm}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_waits_looks_for_blocks_each_time_that_its_time_has_come() {
    let limiter = Limiter::new(
        "default",
        MemoryStore::new(),
        Algorithm::token_bucket(),
        Quota::per_second(2),
    );
    let start = Instant::now();
    assert!(limiter.check("key").cost(2).await.unwrap().is_allowed());
    let other = limiter.clone();
    let waiting = tokio::spawn(async move { other.acquire("key", 1).await.unwrap() });
    for second in 0..4 {
        tokio::time::sleep_until(start + second * SECOND + Duration::from_millis(100)).await;
        limiter.block("key", 2 * SECOND).await.unwrap();
    }
    drop(waiting.await.unwrap());
    assert_eq!(start.elapsed(), 5 * SECOND + Duration::from_millis(100));
}

#[tokio::test]
async fn a_request_that_waits_for_redis_knows_the_blocks_of_its_process() {
    let server = RedisServer::start();
    let limiter =
        |store| Limiter::new("default", store, Algorithm::token_bucket(), Quota::per_second(2));
    let here = limiter(support::redis_store(&server).await);
    // The process begins the block itself.
    assert_eq!(
        wait_while(&here, async |here| drop(here.block("key", HOUR).await.unwrap())).await,
        None
    );
    here.reset("key").await.unwrap();
    // Another process begins it, and this one is denied.
    let there = limiter(support::redis_store(&server).await);
    let waited = wait_while(&here, async |here| {
        there.block("key", HOUR).await.unwrap();
        assert!(here.check("key").await.unwrap().is_blocked());
    });
    assert_eq!(waited.await, None);
    here.reset("key").await.unwrap();
    // Another process begins it, and a request of this one may wait for its end.
    let waited = wait_while(&here, async |here| {
        there.block("key", HOUR).await.unwrap();
        let waits = here.reserve("key", 1, 2 * HOUR).await.unwrap().keep();
        assert!(waits.is_blocked() && waits.is_allowed());
    });
    assert_eq!(waited.await, None);
    here.reset("key").await.unwrap();
    // It was lifted before the time of the request came.
    let waited = wait_while(&here, async |here| {
        here.block("key", HOUR).await.unwrap();
        here.unblock("key").await.unwrap();
    });
    assert!(waited.await.unwrap() >= SECOND);
}

#[tokio::test]
async fn a_block_that_is_over_does_not_disturb_a_request_that_waits() {
    let server = RedisServer::start();
    let store = support::redis_store(&server).await;
    let limiter = Limiter::new("default", store, Algorithm::token_bucket(), Quota::per_second(2));
    let layer = RateLimitLayer::new(&limiter, key::Global).max_wait(10 * SECOND);
    let service = layer.max_lateness(HOUR).layer(counting(&Arc::default()));
    for block in [Duration::ZERO, Duration::from_millis(100)] {
        assert!(limiter.check("global").cost(2).await.unwrap().is_allowed());
        let waiting = tokio::spawn(service.clone().oneshot(get(&[])));
        while limiter.peek("global").await.unwrap().replenish_after() <= SECOND / 2 {
            tokio::task::yield_now().await;
        }
        // If the request checked again, it would have to wait for longer than it may.
        limiter.spend("global", 100).await.unwrap();
        limiter.block("global", block).await.unwrap();
        assert_eq!(waiting.await.unwrap().unwrap().status(), StatusCode::OK);
        limiter.reset("global").await.unwrap();
    }
}

#[tokio::test]
async fn a_block_that_another_process_has_lifted_does_not_disturb_later_requests_that_wait() {
    let server = RedisServer::start();
    let (recorder, quota) = (Recorder::new(), Quota::per_second(50).burst(1));
    let [here, there] =
        [observed(forgetful(&server).await, recorder.clone()), forgetful(&server).await]
            .map(|store| Limiter::new("default", store, Algorithm::token_bucket(), quota));
    let layer = RateLimitLayer::new(&here, key::Global).max_wait(HOUR).max_lateness(HOUR);
    let service = layer.layer(counting(&Arc::default()));
    for finds in ["denied", "waits", "began"] {
        let blocks = if finds == "began" { &here } else { &there };
        blocks.block("global", 3 * HOUR).await.unwrap();
        let found = match finds {
            "denied" => here.check("global").await.unwrap().is_blocked(),
            "waits" => here.reserve("global", 1, 4 * HOUR).await.unwrap().keep().is_blocked(),
            _ => here.peek("global").await.unwrap().blocked_for().is_some(),
        };
        assert!(found);
        there.reset("global").await.unwrap();
        recorder.take();
        let requests = (0..20).map(|_| tokio::spawn(service.clone().oneshot(get(&[]))));
        for request in requests.collect::<Vec<_>>() {
            assert_eq!(request.await.unwrap().unwrap().status(), StatusCode::OK, "{finds}");
        }
        let events = recorder.take();
        let count = |word| events.iter().filter(|event| event.starts_with(word)).count();
        assert_eq!((count("decided"), count("released")), (20, 0), "{finds}: {events:?}");
        there.reset("global").await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_waits_for_the_end_of_a_block_keeps_its_instant_when_it_is_lifted() {
    for algorithm in ALGORITHMS {
        let limiter = Limiter::new("default", MemoryStore::new(), algorithm, Quota::per_second(2));
        limiter.block("key", HOUR).await.unwrap();
        let start = Instant::now();
        let mut waiting = pin!(limiter.acquire("key", 1));
        assert!(poll_once(waiting.as_mut()).is_pending());
        limiter.unblock("key").await.unwrap();
        assert_eq!(limiter.peek("key").await.unwrap().blocked_for(), None, "{algorithm}");
        limiter.reset("key").await.unwrap();
        assert!(limiter.check("key").await.unwrap().is_allowed(), "{algorithm}");
        assert!(waiting.await.unwrap().is_allowed());
        assert_eq!(start.elapsed(), HOUR, "{algorithm}");
    }
}

#[tokio::test]
async fn a_denial_of_a_blocked_key_is_remembered_until_this_process_lifts_the_block() {
    let server = RedisServer::start();
    let config = support::config(&server.url()).denial_ttl(24 * HOUR);
    let store = support::connected(config).await;
    let limiter = Limiter::new("default", store, Algorithm::token_bucket(), Quota::per_second(10));
    assert!(limiter.check("key").await.unwrap().is_allowed());
    limiter.block("key", HOUR).await.unwrap();
    assert_eq!(limiter.check("key").await.unwrap().source(), Source::Store);
    pause();
    advance(60 * SECOND).await;
    let cached = limiter.check("key").await.unwrap();
    assert_eq!(cached.source(), Source::Cached);
    assert_blocked(&cached, HOUR - 60 * SECOND);
    resume();
    limiter.unblock("key").await.unwrap();
    assert!(limiter.check("key").await.unwrap().is_allowed());
}

#[tokio::test]
async fn one_blocked_key_denies_a_request_of_several_limits_and_charges_none() {
    let server = RedisServer::start();
    let memory = MemoryStore::new();
    let redis = forgetful(&server).await;
    let new = |name, store: &dyn Fn(&str) -> Limiter| store(name);
    let in_memory =
        |name: &str| Limiter::new(name, memory.clone(), Algorithm::SlidingLog, Quota::per_hour(5));
    let in_redis =
        |name: &str| Limiter::new(name, redis.clone(), Algorithm::SlidingLog, Quota::per_hour(5));
    for store in [&in_memory as &dyn Fn(&str) -> Limiter, &in_redis] {
        let (one, two) = (new("one", store), new("two", store));
        let charge = Charge::new(&one, "key").and(Charge::new(&two, "key"));
        assert!(charge.check().await.unwrap().is_allowed());
        two.block("key", 24 * HOUR).await.unwrap();
        let denied = charge.check().await.unwrap();
        assert_blocked(&denied, 24 * HOUR);
        assert_eq!(denied.limiter(), "two");
        assert_eq!(one.peek("key").await.unwrap().remaining(), 4);
        two.unblock("key").await.unwrap();
        assert_eq!(charge.check().await.unwrap().remaining(), 3);
    }
}

#[tokio::test(start_paused = true)]
async fn a_layer_rejects_a_blocked_key_or_waits_for_the_end() {
    let quota = Quota::per_second(10);
    let limiter = Limiter::new("default", MemoryStore::new(), Algorithm::token_bucket(), quota);
    let calls = Arc::new(AtomicUsize::new(0));
    let service = counting(&calls);
    let layer = RateLimitLayer::new(&limiter, key::header("x-api-key")).extensions(true);
    let send = async |layer: &RateLimitLayer<_>| {
        layer.layer(service.clone()).oneshot(get(&[("x-api-key", "k1")])).await.unwrap()
    };
    limiter.block(key::header("x-api-key").key("k1"), 5 * SECOND).await.unwrap();
    let rejected = send(&layer).await;
    assert_eq!(rejected.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(rejected.headers()["retry-after"], "5");
    let rejection = rejected.extensions().get::<Rejection>().unwrap();
    assert_eq!(
        rejection.to_string(),
        "this client is blocked; try again in 5 s (limiter \"default\")"
    );
    assert!(rejected.extensions().get::<Decision>().unwrap().is_blocked());
    assert_eq!(support::json(rejected).await["title"], "This client is blocked");
    assert_eq!(calls.load(Ordering::Relaxed), 0);

    let start = Instant::now();
    let response = send(&layer.max_wait(10 * SECOND)).await;
    assert_eq!((response.status(), start.elapsed()), (StatusCode::OK, 5 * SECOND));
}
