//! Denials that the store remembers: which calls they answer, and which changes drop them.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use axum::body::Body;
use tokio::time::{advance, pause, resume};
use tower::{Layer, ServiceExt};
use tower_ratelimit::{
    Algorithm, Charge, Decision, Error, Limiter, Quota, RateLimitLayer, RedisStore, key,
    store::{RedisConfig, Source},
};

use crate::support::{self, ALGORITHMS, counting, server::RedisServer};

const HOUR: Duration = Duration::from_secs(3_600);

/// A store that remembers denials for a day.
async fn remembering(server: &RedisServer) -> RedisStore {
    support::connected(support::config(&server.url()).denial_ttl(24 * HOUR)).await
}

async fn limiter(server: &RedisServer, algorithm: Algorithm, quota: Quota) -> Limiter {
    let store = remembering(server).await;
    Limiter::new(algorithm.name(), store, algorithm, quota)
}

async fn hundred_per_hour(server: &RedisServer) -> Limiter {
    limiter(server, Algorithm::token_bucket(), Quota::per_hour(100)).await
}

fn calls(server: &RedisServer) -> u64 {
    server.calls("evalsha") + server.calls("eval")
}

/// Spends until Redis denies. Returns the denial.
async fn exhaust(limiter: &Limiter) -> Decision {
    loop {
        let decision = limiter.check("key").await.unwrap();
        if !decision.is_allowed() {
            assert_eq!(decision.source(), Source::Store);
            return decision;
        }
    }
}

async fn assert_remembered(limiter: &Limiter) {
    let denied = limiter.check("key").await.unwrap();
    assert_eq!((denied.is_allowed(), denied.source()), (false, Source::Cached));
}

/// Checks 1,000 times without a command, with paused time.
async fn flood(server: &RedisServer, limiter: &Limiter) {
    let before = calls(server);
    for _ in 0..1_000 {
        assert_remembered(limiter).await;
    }
    assert_eq!(calls(server), before);
}

#[tokio::test]
async fn a_flood_of_denied_requests_sends_no_command_until_the_instant_and_then_one() {
    let server = RedisServer::start();
    for algorithm in ALGORITHMS {
        let limiter = limiter(&server, algorithm, Quota::per_hour(3)).await;
        let wait = exhaust(&limiter).await.retry_after().unwrap();
        pause();
        flood(&server, &limiter).await;
        advance(wait / 100 * 99).await;
        flood(&server, &limiter).await;
        advance(wait - wait / 100 * 99).await;
        resume();
        let before = calls(&server);
        // The clock of Redis was not advanced, so that it denies again.
        let denied = limiter.check("key").await.unwrap();
        assert_eq!((denied.is_allowed(), denied.source()), (false, Source::Store), "{algorithm}");
        assert_eq!(calls(&server), before + 1, "{algorithm}");
        pause();
        flood(&server, &limiter).await;
        resume();
    }
}

#[tokio::test]
async fn a_flood_of_denied_requests_sends_one_command_per_ttl() {
    let server = RedisServer::start();
    let config = RedisConfig::server(&server.url()).unwrap().deadline(HOUR);
    let second = Duration::from_secs(1);
    for (ttl, config) in [(second, config.clone()), (HOUR / 2, config.denial_ttl(HOUR / 2))] {
        let store = RedisStore::new(config).unwrap();
        let limiter = Limiter::new("default", store, Algorithm::token_bucket(), Quota::per_day(1));
        let _ = exhaust(&limiter).await;
        for _ in 0..3 {
            // The time since the denial is unknown, but less than a test takes.
            pause();
            advance(ttl).await;
            resume();
            let before = calls(&server);
            let denied = limiter.check("key").await.unwrap();
            assert_eq!((denied.is_allowed(), denied.source()), (false, Source::Store));
            assert_eq!(calls(&server), before + 1);
        }
        if ttl > second {
            pause();
            flood(&server, &limiter).await;
            resume();
        }
    }
}

#[tokio::test]
async fn a_store_with_a_ttl_of_zero_sends_each_check() {
    let server = RedisServer::start();
    let store = support::forgetful_store(&server).await;
    let limiter = Limiter::new("default", store, Algorithm::token_bucket(), Quota::per_day(1));
    let _ = exhaust(&limiter).await;
    let before = calls(&server);
    for _ in 0..10 {
        assert_eq!(limiter.check("key").await.unwrap().source(), Source::Store);
    }
    assert_eq!(calls(&server), before + 10);
}

#[tokio::test]
async fn times_count_down_and_the_rest_is_that_of_the_denial() {
    let server = RedisServer::start();
    let limiter = hundred_per_hour(&server).await;
    assert!(limiter.check("key").cost(98).await.unwrap().is_allowed());
    let denied = limiter.check("key").cost(10).await.unwrap();
    pause();
    let first = limiter.check("key").cost(10).await.unwrap();
    advance(Duration::from_secs(10)).await;
    let later = limiter.check("key").cost(10).await.unwrap();
    assert_eq!(later.source(), Source::Cached);
    for time in [Decision::reset_after, Decision::replenish_after, wait] {
        assert!(time(&first) <= time(&denied));
        assert_eq!(time(&first) - time(&later), Duration::from_secs(10));
    }
    assert_eq!((later.remaining(), later.cost(), later.limiter()), (2, 10, "token-bucket"));
    assert_eq!(later.quota(), limiter.quota());
}

fn wait(denied: &Decision) -> Duration {
    denied.retry_after().unwrap()
}

#[tokio::test]
async fn a_denial_is_used_for_larger_costs_and_for_each_wait_that_does_not_suffice() {
    let server = RedisServer::start();
    let limiter = hundred_per_hour(&server).await;
    let minute = Duration::from_secs(60);
    assert!(limiter.check("key").cost(100).await.unwrap().is_allowed());
    let check = async |cost, wait| {
        let decision = limiter.reserve("key", cost, wait).await.unwrap().keep();
        assert!(!decision.is_allowed() && decision.cost() == cost);
        decision.source()
    };
    assert_eq!(check(10, 2 * minute).await, Source::Store);
    assert_eq!(check(10, 2 * minute).await, Source::Cached);
    assert_eq!(check(20, 2 * minute).await, Source::Cached);
    assert_eq!(check(10, minute).await, Source::Cached);
    assert_eq!(check(10, Duration::ZERO).await, Source::Cached);
    assert_eq!(check(9, 2 * minute).await, Source::Store);
    // The cost of 9 is restored after 5 minutes and 24 s, and that of 10 after 6 minutes.
    assert_eq!(check(9, 5 * minute).await, Source::Cached);
    assert_eq!(check(10, 5 * minute).await, Source::Cached);
    let before = calls(&server);
    let peek = limiter.peek("key").await.unwrap();
    assert_eq!((peek.allows(), peek.source()), (false, Source::Store));
    limiter.spend("key", 1).await.unwrap();
    assert_eq!(calls(&server), before + 2);
    assert_eq!(check(9, 3 * minute).await, Source::Cached);
    // The denial of the larger cost takes the place.
    assert_eq!(check(10, 5 * minute + minute / 2).await, Source::Store);
    assert_eq!(check(9, 3 * minute).await, Source::Store);
}

#[tokio::test]
async fn a_flood_with_several_costs_and_waits_sends_one_command_for_each_cost() {
    let server = RedisServer::start();
    for algorithm in ALGORITHMS {
        let limiter = limiter(&server, algorithm, Quota::per_hour(4)).await;
        limiter.spend("key", 4).await.unwrap();
        let before = calls(&server);
        for number in 0..1_000_u64 {
            let (cost, wait) = (4 - number % 4, Duration::from_secs(number * 37 % 600));
            let denied = limiter.reserve("key", cost, wait).await.unwrap().keep();
            assert!(!denied.is_allowed() && denied.cost() == cost, "{algorithm}: {denied:?}");
        }
        let sent = calls(&server) - before;
        // A leaky bucket denies for lack of room, or because a request may not wait as long.
        let most = if algorithm == Algorithm::LeakyBucket { 8 } else { 4 };
        assert!((1..=most).contains(&sent), "{algorithm}: {sent} commands");
    }
}

/// Spends the quota of a key until a denial is remembered, and applies a change. Returns the next
/// decision, which is that of Redis.
async fn after(limiter: &Limiter, key: &str, change: impl AsyncFnOnce(Charge)) -> Decision {
    let charge = Charge::new(limiter, key);
    while charge.check().await.unwrap().source() != Source::Cached {}
    change(charge.clone()).await;
    let next = charge.check().await.unwrap();
    assert_eq!(next.source(), Source::Store, "{}: {key}", limiter.name());
    next
}

#[tokio::test]
async fn each_change_by_this_process_drops_the_denial() {
    let server = RedisServer::start();
    for algorithm in ALGORITHMS {
        let limiter = &limiter(&server, algorithm, Quota::per_hour(2)).await;
        let reset = after(limiter, "reset", async |_| limiter.reset("reset").await.unwrap());
        assert!(reset.await.is_allowed(), "{algorithm}: reset");

        // The first request has left a leaky bucket, and the second one waits: there is nothing to
        // refund.
        let refunds = algorithm != Algorithm::LeakyBucket;
        let refund = after(limiter, "refund", async |charge| drop(charge.refund().await.unwrap()));
        assert_eq!(refund.await.is_allowed(), refunds, "{algorithm}: refund");
        let of_two = after(limiter, "refund of two keys", async |charge| {
            charge.and(Charge::new(limiter, "other")).refund().await.unwrap();
        });
        assert_eq!(of_two.await.is_allowed(), refunds, "{algorithm}: refund of two keys");
    }
}

/// Two limiters over one store: the second one grants fewer units.
async fn two_limits(server: &RedisServer) -> [Limiter; 2] {
    let store = remembering(server).await;
    [("many", 100), ("few", 2)].map(|(name, limit)| {
        Limiter::new(name, store.clone(), Algorithm::FixedWindow, Quota::per_day(limit))
    })
}

#[tokio::test]
async fn a_flood_of_requests_with_several_limits_sends_no_command_after_a_denial() {
    let server = RedisServer::start();
    for other_key in ["key", "other"] {
        let [many, few] = two_limits(&server).await;
        many.reset(other_key).await.unwrap();
        few.reset("key").await.unwrap();
        let charge = Charge::new(&many, other_key).and(Charge::new(&few, "key"));
        for _ in 0..2 {
            assert!(charge.check().await.unwrap().is_allowed());
        }
        let denied = charge.check().await.unwrap();
        assert_eq!((denied.limiter(), denied.source()), ("few", Source::Store));
        let before = calls(&server);
        for _ in 0..1_000 {
            let denied = charge.check().await.unwrap();
            assert_eq!((denied.is_allowed(), denied.source()), (false, Source::Cached));
            assert_eq!((denied.limiter(), denied.remaining()), ("few", 0));
        }
        assert_remembered(&few).await;
        assert_eq!(calls(&server), before);

        // The other limit has counted none of them, and does not deny by itself.
        assert_eq!(many.check(other_key).await.unwrap().remaining(), 97);
        let larger = Charge::new(&many, other_key).cost(10).and(Charge::new(&few, "key").cost(2));
        assert_eq!(larger.check().await.unwrap().source(), Source::Cached);
        let elsewhere = Charge::new(&many, other_key).and(Charge::new(&few, "elsewhere"));
        assert!(elsewhere.check().await.unwrap().is_allowed());
        few.reset("elsewhere").await.unwrap();
    }
}

#[tokio::test]
async fn each_change_of_the_limit_that_denied_drops_the_denial_of_several_limits() {
    let server = RedisServer::start();
    let [many, few] = two_limits(&server).await;
    let charge = Charge::new(&many, "other").and(Charge::new(&few, "key"));
    let exhaust = async || {
        while charge.check().await.unwrap().source() != Source::Cached {}
    };
    exhaust().await;
    charge.refund().await.unwrap();
    assert!(charge.check().await.unwrap().is_allowed());
    exhaust().await;
    few.refund("key", 1).await.unwrap();
    assert!(charge.check().await.unwrap().is_allowed());
    exhaust().await;
    few.reset("key").await.unwrap();
    assert!(charge.check().await.unwrap().is_allowed());
    exhaust().await;
    let larger = few.with_quota(Quota::per_day(5)).unwrap();
    let larger = Charge::new(&many, "other").and(Charge::new(&larger, "key"));
    assert!(larger.check().await.unwrap().is_allowed());
    // The denial of one limit does not depend on the units of others.
    exhaust().await;
    many.reset("other").await.unwrap();
    assert_eq!(charge.check().await.unwrap().source(), Source::Cached);
}

#[tokio::test]
async fn clones_of_a_store_share_denials_and_names() {
    let server = RedisServer::start();
    let store = remembering(&server).await;
    let limiter =
        |name| Limiter::try_new(name, store.clone(), Algorithm::FixedWindow, Quota::per_day(2));
    let old = limiter("api").unwrap();
    assert!(limiter("api").is_err(), "the name is taken");
    let _ = exhaust(&old).await;
    assert_remembered(&old).await;
    drop(old);

    let new = limiter("api").unwrap();
    assert_remembered(&new).await;
    let other = limiter("other").unwrap();
    let both = Charge::new(&new, "key").and(Charge::new(&other, "key"));
    assert_eq!(both.check().await.unwrap().source(), Source::Cached, "limits of one store");
    new.reset("key").await.unwrap();
    assert!(both.check().await.unwrap().is_allowed());
}

#[tokio::test]
async fn another_quota_is_applied_at_the_next_check() {
    let server = RedisServer::start();
    for algorithm in ALGORITHMS {
        let limiter = limiter(&server, algorithm, Quota::per_hour(3)).await;
        let _ = exhaust(&limiter).await;
        assert_remembered(&limiter).await;
        let larger = limiter.with_quota(Quota::per_hour(10)).unwrap();
        assert!(larger.check("key").await.unwrap().is_allowed(), "{algorithm}");
        assert_eq!(limiter.check("key").await.unwrap().source(), Source::Store, "{algorithm}");
    }
}

#[tokio::test]
async fn a_denial_under_an_old_quota_does_not_deny_under_the_new_one() {
    let server = RedisServer::start();
    for algorithm in ALGORITHMS {
        let limiter = limiter(&server, algorithm, Quota::per_hour(3)).await;
        let _ = exhaust(&limiter).await;
        assert_remembered(&limiter).await;
        limiter.clone().set_quota(Quota::per_hour(10)).unwrap();
        let decision = limiter.check("key").await.unwrap();
        assert!(decision.is_allowed(), "{algorithm}");
        assert_eq!((decision.quota(), decision.source()), (Quota::per_hour(10), Source::Store));
        let _ = exhaust(&limiter).await;
        assert_remembered(&limiter).await;
        limiter.set_quota(Quota::per_hour(5)).unwrap();
        let denied = limiter.check("key").await.unwrap();
        assert_eq!((denied.is_allowed(), denied.source()), (false, Source::Store), "{algorithm}");
        assert_eq!(denied.quota(), Quota::per_hour(5));
    }
}

#[tokio::test]
async fn a_release_in_the_background_drops_denials_until_it_is_executed() {
    let server = RedisServer::start();
    for algorithm in ALGORITHMS {
        let quota = Quota::per_hour(if algorithm == Algorithm::LeakyBucket { 2 } else { 1 });
        let limiter = limiter(&server, algorithm, quota).await;
        let wait = HOUR * 3 / 2;
        let check = async || limiter.reserve("key", 1, wait).await.unwrap().keep();
        assert!(check().await.delay().is_zero());
        let reset_after = async || limiter.peek("key").await.unwrap().reset_after();
        let before = reset_after().await;
        let mut waiting = Box::pin(limiter.try_acquire("key", 1, wait));
        tokio::select! {
            decision = &mut waiting => panic!("{algorithm}: {decision:?}"),
            () = async {
                while reset_after().await <= before {}
                let _ = reset_after().await; // the request has its decision
            } => {}
        }
        assert!(!check().await.is_allowed(), "{algorithm}");
        drop(waiting);
        // The release is sent some milliseconds later, and a denial is remembered until then.
        let mut next = check().await;
        assert_eq!(next.source(), Source::Store, "{algorithm}");
        let start = std::time::Instant::now();
        while !next.is_allowed() {
            assert!(start.elapsed() < Duration::from_secs(30), "{algorithm}: remembered");
            tokio::time::sleep(Duration::from_millis(1)).await;
            next = check().await;
        }
    }
}

#[tokio::test]
async fn remembered_denials_are_valid_while_redis_does_not_answer() {
    let mut server = RedisServer::start();
    let limiter = hundred_per_hour(&server).await;
    let _ = exhaust(&limiter).await;
    server.kill();
    for _ in 0..10 {
        assert_remembered(&limiter).await;
        assert!(matches!(limiter.check("other").await, Err(Error::Store(_))));
    }
    assert!(matches!(limiter.peek("key").await, Err(Error::Store(_))));
}

/// Runs `call` until another task has run, which needs this task to yield.
async fn until_another_task_runs(mut call: impl AsyncFnMut()) {
    let has_run = Arc::new(AtomicBool::new(false));
    let flag = has_run.clone();
    tokio::spawn(async move { flag.store(true, Relaxed) });
    for _ in 0..10_000 {
        call().await;
        if has_run.load(Relaxed) {
            return;
        }
    }
    panic!("the task does not yield");
}

#[tokio::test]
async fn a_loop_of_denied_requests_yields() {
    let server = RedisServer::start();
    let limiter = hundred_per_hour(&server).await;
    let _ = exhaust(&limiter).await;
    let before = calls(&server);
    until_another_task_runs(async || assert_remembered(&limiter).await).await;
    until_another_task_runs(async || {
        let denied = limiter.try_acquire("key", 1, Duration::ZERO).await.unwrap();
        assert_eq!(denied.source(), Source::Cached);
    })
    .await;
    let charge = Charge::new(&limiter, "key");
    until_another_task_runs(async || {
        assert_eq!(charge.check().await.unwrap().source(), Source::Cached);
    })
    .await;
    let layer = RateLimitLayer::new(limiter, key::header("user")).extensions(true);
    let service = layer.layer(counting(&Arc::default()));
    let request = |user| {
        let mut request = http::Request::new(Body::empty());
        request.headers_mut().insert("user", http::HeaderValue::from_static(user));
        request
    };
    while service.clone().oneshot(request("key")).await.unwrap().status() == 200 {}
    until_another_task_runs(async || {
        let response = service.clone().oneshot(request("key")).await.unwrap();
        let decision: &Decision = response.extensions().get().unwrap();
        assert_eq!((response.status().as_u16(), decision.source()), (429, Source::Cached));
    })
    .await;
    assert!(calls(&server) <= before + 101, "the denials were not remembered");
}
