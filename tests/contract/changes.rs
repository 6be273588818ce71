//! Changes of a quota or an algorithm while requests flow, over either store. Reloaded files are in
//! the tests `http`, and remembered denials in the tests `redis`.

use std::{
    convert::Infallible,
    pin::{Pin, pin},
    sync::{
        Arc, Barrier,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::{Context, Waker},
    thread,
    time::Duration,
};

use tokio::{task::JoinSet, time::Instant};
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::{
    Algorithm, Charge, Decision, Error, FailurePolicy, Limiter, MemoryStore, Quota, RateLimitLayer,
    RedisStore,
    config::{ConfigError, Limit, QuotaError},
    store::{self, AnyStore, Source, Store},
};

use crate::support::{self, ALGORITHMS, load::until, recorder::Recorder, server::RedisServer};

const HOUR: Duration = Duration::from_secs(3_600);

/// A limiter in memory, and one in Redis, with counts of its own.
async fn limiters(server: &RedisServer, algorithm: Algorithm, quota: Quota) -> [Limiter; 2] {
    stores(server).await.map(|store| Limiter::new("default", store, algorithm, quota))
}

async fn stores(server: &RedisServer) -> [AnyStore; 2] {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let prefix = NEXT.fetch_add(1, Ordering::Relaxed).to_string();
    let redis = support::with_prefix(server, &prefix).await;
    [MemoryStore::new().into_any(), redis.into_any()]
}

#[tokio::test]
async fn a_changed_quota_applies_to_all_clones_and_to_the_state_as_it_is() {
    let server = RedisServer::start();
    for algorithm in ALGORITHMS {
        for limiter in limiters(&server, algorithm, Quota::per_hour(10)).await {
            let clones = [limiter.clone(), limiter.clone().on_failure(FailurePolicy::Open)];
            assert!(limiter.check("key").cost(8).await.unwrap().is_allowed());
            for (limit, remaining) in [(20, 12), (5, 0), (10, 2), (9, 1)] {
                let quota = Quota::per_hour(limit);
                limiter.set_quota(quota).unwrap();
                for limiter in clones.iter().chain([&limiter]) {
                    let peeked = limiter.peek("key").await.unwrap();
                    assert_eq!((limiter.quota(), peeked.quota()), (quota, quota));
                    assert_eq!(peeked.remaining(), remaining, "{algorithm} {quota}");
                }
                let error = limiter.check("key").cost(limit + 1).await.unwrap_err();
                assert!(matches!(error, Error::CostAboveQuota { max, .. } if max == limit));
            }
            assert!(clones[0].check("key").await.unwrap().is_allowed(), "{algorithm}");
            assert!(!clones[1].check("key").await.unwrap().is_allowed(), "{algorithm}");
        }
    }
}

#[tokio::test]
async fn a_block_stays_when_the_quota_changes() {
    let server = RedisServer::start();
    for algorithm in ALGORITHMS {
        for limiter in limiters(&server, algorithm, Quota::per_hour(10)).await {
            assert!(limiter.check("key").cost(8).await.unwrap().is_allowed());
            let _ = limiter.block("key", 24 * HOUR).await.unwrap();
            for limit in [20, 5] {
                limiter.set_quota(Quota::per_hour(limit)).unwrap();
                let denied = limiter.check("key").await.unwrap();
                assert!(!denied.is_allowed() && denied.is_blocked(), "{algorithm} {limit}");
            }
            limiter.set_quota(Quota::per_hour(20)).unwrap();
            let lifted = limiter.unblock("key").await.unwrap();
            assert_eq!(lifted.remaining(), 12, "{algorithm}");
            assert!(limiter.check("key").await.unwrap().is_allowed(), "{algorithm}");
        }
    }
}

#[tokio::test]
async fn a_changed_quota_applies_to_charges_of_several_limits() {
    let server = RedisServer::start();
    for url in ["memory:", &(server.url() + "?deadline=30s")] {
        let store = store::connect(url).await.unwrap();
        let [one, two] = ["one", "two"].map(|name| {
            let quota = Quota::per_hour(4);
            Limiter::new(name, store.clone(), Algorithm::sliding_log(), quota)
        });
        let charge = Charge::new(&one, "key").also(&two);
        assert!(charge.check().await.unwrap().is_allowed());
        two.set_quota(Quota::per_hour(2)).unwrap();
        assert_eq!(charge.check().await.unwrap().limiter(), "two");
        assert_eq!(charge.check().await.unwrap().limiter(), "two");
        assert_eq!(
            one.peek("key").await.unwrap().remaining(),
            2,
            "a denied request spends nothing"
        );
        two.set_quota(Quota::per_hour(100)).unwrap();
        for remaining in [1, 0] {
            let decision = charge.check().await.unwrap();
            assert_eq!((decision.limiter(), decision.remaining()), ("one", remaining));
        }
        assert!(!charge.check().await.unwrap().is_allowed());
    }
}

#[tokio::test]
async fn an_invalid_quota_changes_nothing_and_a_limiter_with_another_quota_keeps_its_own() {
    let limiter =
        Limiter::new("default", MemoryStore::new(), Algorithm::FixedWindow, Quota::per_hour(10));
    let other = limiter.with_quota(Quota::per_hour(20)).unwrap();
    let error = limiter.set_quota(Quota::per_hour(5).burst(2)).unwrap_err();
    assert!(matches!(error, ConfigError::Quota(QuotaError::BurstWithoutBucket { .. })));
    assert_eq!(limiter.peek("key").await.unwrap().remaining(), 10);
    limiter.set_quota(Quota::per_hour(5)).unwrap();
    assert_eq!((limiter.quota(), other.quota()), (Quota::per_hour(5), Quota::per_hour(20)));
    let later = limiter.with_quota(Quota::per_hour(7)).unwrap();
    later.set_quota(Quota::per_hour(8)).unwrap();
    assert_eq!(limiter.quota(), Quota::per_hour(5));
}

#[tokio::test(start_paused = true)]
async fn waiting_requests_keep_their_instants_and_later_ones_follow_the_new_quota() {
    for algorithm in ALGORITHMS {
        let limiter = Limiter::new("default", MemoryStore::new(), algorithm, Quota::per_second(2));
        while limiter.try_acquire("key", 1, Duration::ZERO).await.unwrap().is_allowed() {}
        let start = Instant::now();
        let mut waiting = pin!(limiter.acquire("key", 1));
        assert!(waiting.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        limiter.set_quota(Quota::per_second(100)).unwrap();
        let later = limiter.reserve("key", 1, HOUR).await.unwrap().keep();
        let reserved = waiting.await.unwrap().delay();
        assert!(start.elapsed() - reserved <= Duration::from_millis(1), "{algorithm}");
        assert!(later.delay() <= reserved + Duration::from_secs(1), "{algorithm}");
    }
}

/// Polls a future once, after which it waits.
fn start_waiting<F: Future>(future: F) -> Pin<Box<F>> {
    let mut future = Box::pin(future);
    assert!(future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    future
}

/// A limiter in memory, with five requests that wait for its quota.
async fn with_waiting(
    algorithm: Algorithm,
    quota: Quota,
) -> (Limiter, Vec<Pin<Box<impl Future<Output = Result<Decision, Error>>>>>) {
    let limiter = Limiter::new("default", MemoryStore::new(), algorithm, quota);
    while limiter.try_acquire("key", 1, Duration::ZERO).await.unwrap().is_allowed() {}
    let acquire = |limiter: Limiter| async move { limiter.acquire("key", 1).await };
    let waiting = (0..5).map(|_| start_waiting(acquire(limiter.clone()))).collect();
    (limiter, waiting)
}

const WINDOWS: [Algorithm; 3] =
    [Algorithm::FixedWindow, Algorithm::SlidingLog, Algorithm::sliding_window()];

async fn longest_wait(
    waiting: Vec<impl Future<Output = Result<Decision, Error>> + Unpin>,
) -> Duration {
    let mut longest = Duration::ZERO;
    for request in waiting {
        longest = longest.max(request.await.unwrap().delay());
    }
    longest
}

#[tokio::test(start_paused = true)]
async fn after_a_higher_quota_a_new_request_comes_after_those_that_wait() {
    let (before, after) = (Quota::per_second(2), Quota::per_second(100));
    let of_windows = WINDOWS.map(|algorithm| (algorithm, before));
    let others =
        [(Algorithm::token_bucket(), before), (Algorithm::FixedWindow, Quota::per_minute(2))];
    for (algorithm, before) in of_windows.into_iter().chain(others) {
        let (limiter, waiting) = with_waiting(algorithm, before).await;
        limiter.set_quota(after).unwrap();
        assert!(!limiter.check("key").await.unwrap().is_allowed(), "{algorithm}");
        let new = limiter.reserve("key", 1, HOUR).await.unwrap().keep().delay();
        assert_eq!(new, longest_wait(waiting).await, "{algorithm}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_is_dropped_after_a_denied_check_with_another_quota_is_released() {
    for algorithm in WINDOWS.into_iter().chain([Algorithm::token_bucket()]) {
        for other in [Quota::per_second(100), Quota::per_minute(100)] {
            let (limiter, waiting) = with_waiting(algorithm, Quota::per_second(2)).await;
            limiter.set_quota(other).unwrap();
            assert!(!limiter.check("key").await.unwrap().is_allowed(), "{algorithm} {other}");
            drop(waiting);
            let remaining = limiter.peek("key").await.unwrap().remaining();
            assert_eq!(remaining, 98, "{algorithm} {other}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_denied_request_by_another_quota_changes_nothing_for_the_first_one() {
    for algorithm in ALGORITHMS {
        let all = Limiter::new("default", MemoryStore::new(), algorithm, Quota::per_second(1_000));
        let plan = all.with_quota(Quota::per_day(3)).unwrap();
        assert!(plan.check("key").cost(3).await.unwrap().is_allowed());
        assert!(!all.check("key").cost(1_000).await.unwrap().is_allowed(), "{algorithm}");
        tokio::time::advance(Duration::from_secs(3)).await;
        assert!(!plan.check("key").cost(3).await.unwrap().is_allowed(), "{algorithm}");
    }
}

#[tokio::test(start_paused = true)]
async fn another_algorithm_begins_empty_and_the_first_one_goes_on_as_it_was() {
    let limit = |algorithm| Limit::try_new(algorithm, Quota::per_day(3)).unwrap();
    let [window, log] = [Algorithm::FixedWindow, Algorithm::SlidingLog].map(limit);
    let api = Limiter::new("api", MemoryStore::new(), Algorithm::FixedWindow, Quota::per_day(3));
    let permit = api.hold("key", 1).await.unwrap().admitted().unwrap();
    assert!(api.check("key").cost(2).await.unwrap().is_allowed());
    log.apply_to(&api);
    assert!(api.check("key").cost(3).await.unwrap().is_allowed());
    permit.cancel();
    assert!(!api.check("key").await.unwrap().is_allowed());
    window.apply_to(&api);
    assert!(api.check("key").await.unwrap().is_allowed(), "the permit has returned its unit");
    assert!(!api.check("key").await.unwrap().is_allowed());
}

#[tokio::test(start_paused = true)]
async fn while_a_charge_waits_its_other_limit_has_no_units_left() {
    for algorithm in WINDOWS.into_iter().chain([Algorithm::token_bucket()]) {
        let store = MemoryStore::new();
        let limiter =
            |name, limit| Limiter::new(name, store.clone(), algorithm, Quota::per_second(limit));
        let (small, large) = (limiter("small", 1), limiter("large", 100));
        let charge = Charge::new(&small, "key").also(&large);
        assert!(charge.check().await.unwrap().is_allowed());
        assert_eq!(large.peek("key").await.unwrap().remaining(), 99);
        let layer = RateLimitLayer::custom_by_rule(
            move |(): &()| Ok(charge.clone()),
            |rejection, (): &()| panic!("{rejection}"),
        );
        let service = layer.max_wait(HOUR).layer(service_fn(async |()| Ok::<_, Infallible>(())));
        let waiting = start_waiting(service.oneshot(()));
        assert_eq!(large.peek("key").await.unwrap().remaining(), 0, "{algorithm}");
        assert!(!large.check("key").await.unwrap().is_allowed(), "{algorithm}");
        let later = large.reserve("key", 1, HOUR).await.unwrap().keep().delay();
        assert!(later >= Duration::from_secs(1), "{algorithm}");
        drop(waiting);
    }
}

#[tokio::test(start_paused = true)]
async fn a_waiting_request_that_is_dropped_after_a_change_returns_at_most_its_own_units() {
    for algorithm in ALGORITHMS {
        for other in [Quota::per_second(100), Quota::per_minute(2)] {
            let limiter =
                Limiter::new("default", MemoryStore::new(), algorithm, Quota::per_second(2));
            while limiter.try_acquire("key", 1, Duration::ZERO).await.unwrap().is_allowed() {}
            let mut waiting = Box::pin(limiter.acquire("key", 1));
            assert!(waiting.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
            limiter.set_quota(other).unwrap();
            let used = other.limit() - limiter.peek("key").await.unwrap().remaining();
            let _ = limiter.reserve("key", 1, HOUR).await.unwrap().keep();
            drop(waiting);
            let mut admitted = 0;
            while limiter.try_acquire("key", 1, Duration::ZERO).await.unwrap().is_allowed() {
                admitted += 1;
            }
            assert!(admitted <= other.limit() + 1 - used.min(other.limit()), "{algorithm} {other}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn no_more_than_the_highest_quota_passes_while_it_changes() {
    let server = RedisServer::start();
    for algorithm in ALGORITHMS {
        for limiter in limiters(&server, algorithm, Quota::per_day(100)).await {
            let done = Arc::new(AtomicBool::new(false));
            let changes = tokio::spawn({
                let (limiter, done) = (limiter.clone(), done.clone());
                async move {
                    while !done.load(Ordering::Relaxed) {
                        for limit in [50, 100] {
                            limiter.set_quota(Quota::per_day(limit)).unwrap();
                            tokio::task::yield_now().await;
                        }
                    }
                }
            });
            let mut tasks = JoinSet::new();
            for _ in 0..20 {
                let limiter = limiter.clone();
                tasks.spawn(async move {
                    let mut admitted = 0;
                    for _ in 0..50 {
                        admitted += u32::from(limiter.check("key").await.unwrap().is_allowed());
                    }
                    admitted
                });
            }
            let admitted: u32 = tasks.join_all().await.into_iter().sum();
            done.store(true, Ordering::Relaxed);
            changes.await.unwrap();
            assert!((50..=100).contains(&admitted), "{algorithm}: {admitted}");
        }
    }
}

#[tokio::test]
async fn the_fallback_follows_the_quota() {
    let store = RedisStore::lazy("redis://127.0.0.1:1/").unwrap();
    let limiter = Limiter::new("default", store, Algorithm::sliding_log(), Quota::per_hour(8));
    let local = limiter.on_failure(FailurePolicy::local(0.25));
    for remaining in [1, 0] {
        let decision = local.check("key").await.unwrap();
        assert_eq!((decision.remaining(), decision.source()), (remaining, Source::Local));
    }
    assert!(!local.check("key").await.unwrap().is_allowed());
    local.set_quota(Quota::per_hour(12)).unwrap();
    let decision = local.check("key").await.unwrap();
    assert!(decision.is_allowed(), "2 of 3 units were spent");
    assert_eq!((decision.quota(), decision.remaining()), (Quota::per_hour(3), 0));
    assert!(!local.check("key").await.unwrap().is_allowed());
}

#[test]
fn a_change_of_the_quota_undoes_no_change_of_the_algorithm() {
    for _ in 0..2_000 {
        let limiter =
            Limiter::new("default", MemoryStore::new(), Algorithm::FixedWindow, Quota::per_hour(1));
        let barrier = Barrier::new(2);
        thread::scope(|scope| {
            scope.spawn(|| {
                barrier.wait();
                for limit in 2..20 {
                    limiter.set_quota(Quota::per_hour(limit)).unwrap();
                }
            });
            barrier.wait();
            set(&limiter, Algorithm::SlidingLog, Quota::per_hour(1));
        });
        assert_eq!(limiter.algorithm(), Algorithm::SlidingLog);
    }
}

/// All pairs of algorithms.
fn changes() -> impl Iterator<Item = (Algorithm, Algorithm)> {
    let pairs = ALGORITHMS.map(|from| ALGORITHMS.map(|to| (from, to)));
    pairs.into_iter().flatten().filter(|(from, to)| from != to)
}

fn set(limiter: &Limiter, algorithm: Algorithm, quota: Quota) {
    Limit::try_new(algorithm, quota).unwrap().apply_to(limiter);
}

fn pair(store: impl Store + Clone, algorithm: Algorithm, quota: Quota) -> [Limiter; 2] {
    let two = Limiter::new("two", store.clone(), Algorithm::FixedWindow, quota);
    [Limiter::new("one", store, algorithm, quota), two]
}

#[tokio::test]
async fn a_permit_returns_units_only_to_the_limits_whose_algorithm_stays() {
    let server = RedisServer::start();
    let quota = Quota::per_day(10);
    for (from, to) in changes().filter(|(from, _)| *from != Algorithm::LeakyBucket) {
        let redis = support::with_prefix(&server, &format!("{from} {to}")).await;
        for [one, two] in [pair(MemoryStore::new(), from, quota), pair(redis, from, quota)] {
            let part = |limiter, key| Charge::new(limiter, key).estimate(5);
            let on_one_key = |key| part(&one, key).also(&two).estimate(5);
            let on_two_keys = |key| part(&two, key).and(part(&one, key));
            let charges = [on_one_key("a"), on_one_key("b"), on_two_keys("c"), on_two_keys("d")];
            let mut permits = vec![];
            for charge in &charges {
                permits.push(charge.hold().await.unwrap().admitted().unwrap());
            }
            set(&one, to, quota);
            for key in ["a", "b", "c", "d"] {
                assert!(one.check(key).cost(10).await.unwrap().is_allowed());
            }
            for (mut permit, key) in permits.into_iter().zip(["a", "b", "c", "d"]) {
                if key == "a" || key == "c" {
                    permit.cancel();
                } else {
                    permit.settle_for("one", 0).unwrap();
                    permit.settle_for("two", 0).unwrap();
                }
                let is_returned = async || two.peek(key).await.unwrap().remaining() == 10;
                until("the units are returned", is_returned).await;
                let left = one.peek(key).await.unwrap().remaining();
                assert_eq!(left, 0, "{from} to {to}, {key}");
            }
        }
    }
}

#[tokio::test]
async fn a_request_that_waits_by_another_algorithm_releases_nothing_if_it_is_dropped() {
    let server = RedisServer::start();
    let quota = Quota::per_day(10);
    for (from, to) in changes() {
        for store in stores(&server).await {
            let recorder = Recorder::new();
            store.add_observer(recorder.clone());
            let limiter = Limiter::new("default", store, from, quota);
            let _ = limiter.check("key").cost(10).await.unwrap();
            let mut waiting = Box::pin(limiter.acquire("key", 1));
            let pause = tokio::time::sleep(Duration::from_millis(20));
            tokio::select! {
                allowed = &mut waiting => panic!("{allowed:?}"),
                () = pause => {}
            }
            set(&limiter, to, quota);
            let _ = limiter.check("key").cost(10).await.unwrap();
            drop(waiting);
            assert_eq!(limiter.peek("key").await.unwrap().remaining(), 0, "{from} to {to}");
            let events = recorder.take();
            let released = events.iter().any(|event| event.starts_with("released"));
            assert!(!released, "{from} to {to}: {events:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_checks_again_for_a_block_returns_no_unit_on_which_later_ones_count() {
    let ms = Duration::from_millis;
    let slow = Quota::new(4, ms(500)).burst(3);
    let limiter = Limiter::new(
        "default",
        MemoryStore::new(),
        Algorithm::token_bucket(),
        Quota::new(5, ms(500)).burst(2),
    );
    let start = Instant::now();
    let mut waiting = JoinSet::new();
    let mut wait = async |cost| {
        let limiter = limiter.clone();
        waiting.spawn(async move {
            assert!(limiter.acquire("key", cost).await.unwrap().is_allowed());
            (start.elapsed(), cost)
        });
        tokio::task::yield_now().await; // it has reserved its instant
    };
    limiter.block("key", ms(60)).await.unwrap();
    wait(1).await;
    limiter.block("key", ms(688)).await.unwrap();
    wait(1).await;
    wait(2).await; // counts on a unit since
    limiter.block("key", ms(749)).await.unwrap();
    limiter.set_quota(slow).unwrap();
    let admitted = waiting.join_all().await;
    for (first, _) in admitted.iter().copied() {
        let at_once = admitted.iter().filter(|(instant, _)| *instant == first);
        let units: u64 = at_once.map(|(_, cost)| cost).sum();
        assert!(units <= slow.burst_size(), "{admitted:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_permit_of_a_blocked_key_ends_after_a_denial_while_another_algorithm_counted() {
    let ms = Duration::from_millis;
    for algorithm in [Algorithm::concurrency(), Algorithm::sliding_window()] {
        let quota = match algorithm {
            Algorithm::Concurrency => Quota::concurrent(2),
            _ => Quota::new(2, ms(10)),
        };
        let store = MemoryStore::new();
        let limiter = Limiter::new("one", store.clone(), algorithm, quota);
        let other = Limiter::new("two", store, Algorithm::token_bucket(), Quota::per_day(1));
        assert!(other.check("key").await.unwrap().is_allowed());
        let permit = limiter.hold("key", 2).await.unwrap().admitted().unwrap();
        limiter.block("key", ms(18)).await.unwrap();
        set(&limiter, Algorithm::SlidingLog, Quota::new(2, ms(10)));
        let denied = Charge::new(&limiter, "key").also(&other).check().await.unwrap();
        assert_eq!((denied.is_allowed(), denied.limiter()), (false, "two"));
        set(&limiter, algorithm, quota);
        drop(permit);
        tokio::time::sleep(HOUR).await;
        let state = limiter.peek("key").await.unwrap();
        assert_eq!((state.held(), state.remaining()), (0, 2), "{algorithm}");
    }
}
