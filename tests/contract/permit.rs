//! Permits over either store: units that are held, how they end, and requests that wait for them.
//! Random histories are in `settling.rs`.

use std::{
    iter,
    pin::pin,
    sync::{Arc, Mutex},
    task::{Context, Waker},
    time::Duration,
};

use tokio::{
    task::JoinSet,
    time::{Instant, advance, sleep},
};
use tower_ratelimit::{
    Algorithm, Charge, Error, FailurePolicy, Limiter, MemoryStore, Permit, Quota, RedisStore,
    config::{Limit, Refill},
    observe::{Event, Observer},
    store::{AnyStore, ErrorKind, Source, Store, WhenFull},
};

use crate::support::{
    self, load::until, memory_store, proxy::Proxy, recorder::Recorder, server::RedisServer,
};

const SECOND: Duration = Duration::from_secs(1);

/// The algorithms that can hold.
fn algorithms() -> impl Iterator<Item = Algorithm> {
    [
        Algorithm::FixedWindow,
        Algorithm::SlidingLog,
        Algorithm::sliding_window(),
        Algorithm::sliding_window().buckets(10),
        Algorithm::token_bucket(),
        Algorithm::token_bucket().refill(Refill::Interval),
    ]
    .into_iter()
}

/// A limiter of ten units per day over each store, for each algorithm.
async fn limiters(server: &RedisServer) -> impl Iterator<Item = Limiter> {
    let redis = support::forgetful_store(server).await;
    algorithms().enumerate().flat_map(move |(number, algorithm)| {
        let stores = [MemoryStore::new().into_any(), redis.clone().into_any()];
        let name = format!("tokens-{number}");
        stores.map(|store| Limiter::new(&name, store, algorithm, Quota::per_day(10)))
    })
}

async fn in_memory(algorithm: Algorithm, quota: Quota) -> Limiter {
    Limiter::new("tokens", MemoryStore::new(), algorithm, quota)
}

async fn hold(limiter: &Limiter, n: u64) -> Permit {
    limiter.hold("alice", n).await.unwrap().admitted().unwrap()
}

async fn remaining(limiter: &Limiter) -> u64 {
    limiter.peek("alice").await.unwrap().remaining()
}

/// Waits until so many units are left and held: over Redis, permits end in the background.
async fn until_left(limiter: &Limiter, left: u64, held: u64) {
    until(&format!("{left} are left and {held} held"), async || {
        let state = limiter.peek("alice").await.unwrap();
        (state.remaining(), state.held()) == (left, held)
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn settling_below_the_estimate_returns_the_rest_exactly_whatever_the_time() {
    for algorithm in algorithms() {
        let limiter = in_memory(algorithm, Quota::per_minute(1_000)).await;
        let permit = hold(&limiter, 500).await;
        advance(30 * SECOND).await;
        assert_eq!(remaining(&limiter).await, 500, "{algorithm}");
        permit.settle(180);
        assert_eq!(remaining(&limiter).await, 820, "{algorithm}");
        let state = limiter.peek("alice").await.unwrap();
        assert!(state.reset_after() <= 120 * SECOND, "{algorithm}");
        advance(state.reset_after()).await;
        assert_eq!(remaining(&limiter).await, 1_000, "{algorithm}");
    }
}

#[tokio::test]
async fn a_permit_that_is_dropped_counts_as_used() {
    let server = RedisServer::start();
    for limiter in limiters(&server).await {
        let permit = hold(&limiter, 3).await;
        let decision = permit.decision();
        assert_eq!((decision.remaining(), decision.cost()), (7, 3));
        assert!(!permit.is_expired());
        until_left(&limiter, 7, 3).await;
        drop(permit);
        until_left(&limiter, 7, 0).await;
    }
}

#[tokio::test]
async fn a_permit_that_is_dropped_counts_what_it_was_told() {
    let server = RedisServer::start();
    for limiter in limiters(&server).await {
        let mut permit = hold(&limiter, 5).await;
        permit.set_used(1);
        permit.set_used(2);
        until_left(&limiter, 5, 5).await;
        drop(permit);
        until_left(&limiter, 8, 0).await;
        let mut permit = hold(&limiter, 2).await;
        permit.set_used_for(limiter.name(), 7).unwrap(); // more than it holds
        let error = permit.set_used_for("another", 0).unwrap_err();
        assert!(matches!(error, Error::NotHeld { .. }), "{error}");
        permit.settle(1); // it is not dropped
        until_left(&limiter, 7, 0).await;
        let mut permit = hold(&limiter, 1).await;
        permit.set_used(3);
        drop(permit);
        until_left(&limiter, 4, 0).await;
    }
}

#[tokio::test]
async fn a_cancelled_permit_returns_all_units_and_a_settled_one_those_that_were_not_used() {
    let server = RedisServer::start();
    for limiter in limiters(&server).await {
        hold(&limiter, 10).await.cancel();
        until_left(&limiter, 10, 0).await;
        hold(&limiter, 5).await.settle(2);
        until_left(&limiter, 8, 0).await;
        hold(&limiter, 2).await.settle(5);
        until_left(&limiter, 3, 0).await;
        hold(&limiter, 3).await.settle(9);
        until_left(&limiter, 0, 0).await;
        assert!(!limiter.check("alice").await.unwrap().is_allowed());
    }
}

#[tokio::test]
async fn units_that_are_held_are_taken_and_a_denial_does_not_know_when_they_return() {
    let server = RedisServer::start();
    for limiter in limiters(&server).await {
        let permit = hold(&limiter, 8).await;
        let denied = limiter.hold("alice", 3).await.unwrap().into_result().unwrap_err();
        assert_eq!((denied.is_allowed(), denied.remaining()), (false, 2));
        assert_eq!((denied.retry_after(), denied.retry_after_secs()), (None, None));
        let denied = limiter.check("alice").cost(3).await.unwrap();
        assert_eq!((denied.is_allowed(), denied.retry_after()), (false, None));
        let state = limiter.check("alice").cost(3).peek().await.unwrap();
        assert_eq!((state.allows(), state.held(), state.retry_after()), (false, 8, None));
        assert!(limiter.check("alice").cost(2).await.unwrap().is_allowed());
        until_left(&limiter, 0, 8).await;
        permit.cancel();
        until_left(&limiter, 8, 0).await;
    }
}

#[tokio::test]
async fn a_charge_spends_and_holds_all_or_nothing() {
    let server = RedisServer::start();
    let redis = support::forgetful_store(&server).await.into_any();
    for store in [MemoryStore::new().into_any(), redis] {
        let limiter = |name, algorithm, limit| {
            Limiter::new(name, store.clone(), algorithm, Quota::per_day(limit))
        };
        let requests = limiter("requests", Algorithm::SlidingLog, 10);
        let input = limiter("input", Algorithm::token_bucket(), 1_000);
        let output = limiter("output", Algorithm::FixedWindow, 1_000);
        let charge =
            Charge::new(&requests, "alice").also(&input).estimate(600).also(&output).estimate(300);
        let mut permit = charge.hold().await.unwrap().admitted().unwrap();
        assert_eq!(remaining(&requests).await, 9);
        until_left(&input, 400, 600).await;
        let denied = charge.hold().await.unwrap().into_result().unwrap_err();
        assert_eq!((denied.limiter(), denied.retry_after()), ("input", None));
        until_left(&output, 700, 300).await;
        assert_eq!(remaining(&requests).await, 9);

        permit.settle_for("input", 100).unwrap();
        until_left(&input, 900, 0).await;
        until_left(&output, 700, 300).await;
        permit.set_used(700); // of the output alone: the input is settled
        for again in [permit.settle_for("input", 100), permit.set_used_for("input", 100)] {
            let again = again.unwrap_err();
            assert!(matches!(again, Error::HoldEnded { .. }), "{again}");
        }
        for name in ["requests", "tokens"] {
            let error = permit.settle_for(name, 1).unwrap_err();
            assert!(matches!(error, Error::NotHeld { .. }), "{error}");
        }
        permit.settle(50);
        until_left(&output, 950, 0).await;
        until_left(&input, 900, 0).await;
        assert_eq!(remaining(&requests).await, 9);
    }
}

#[tokio::test]
async fn limits_on_different_keys_are_held_together() {
    let server = RedisServer::start();
    let redis = support::forgetful_store(&server).await.into_any();
    for store in [MemoryStore::new().into_any(), redis] {
        let limiter =
            |name, algorithm| Limiter::new(name, store.clone(), algorithm, Quota::per_day(10));
        let user = limiter("user", Algorithm::token_bucket());
        let all = limiter("all", Algorithm::sliding_window());
        let charge = |name, n| {
            Charge::new(&user, name).estimate(n).and(Charge::new(&all, "alice").estimate(n))
        };
        let permit = charge("alice", 7).hold().await.unwrap().admitted().unwrap();
        let denied = charge("bob", 4).hold().await.unwrap().into_result().unwrap_err();
        assert_eq!(denied.limiter(), "all");
        assert_eq!(user.peek("bob").await.unwrap().held(), 0);
        permit.settle(1);
        until_left(&user, 9, 0).await;
        until_left(&all, 9, 0).await;
        charge("bob", 4).hold().await.unwrap().admitted().unwrap().cancel();
        until_left(&all, 9, 0).await;
    }
}

#[tokio::test]
async fn a_wrong_call_is_an_error_that_says_what_to_call_and_takes_nothing() {
    let store = MemoryStore::new();
    let tokens = Limiter::new("tokens", store.clone(), Algorithm::SlidingLog, Quota::per_day(10));
    let leaky = Limiter::new("leaky", store.clone(), Algorithm::LeakyBucket, Quota::per_day(10));
    let estimate = Charge::new(&tokens, "alice").estimate(3);
    for error in [
        estimate.check().await.unwrap_err(),
        estimate.check().max_wait(Duration::MAX).await.unwrap_err(),
        estimate.check().max_wait(SECOND).await.unwrap_err(),
    ] {
        assert!(matches!(error, Error::HasEstimate { .. }), "{error}");
        assert!(error.to_string().contains("`hold`"), "{error}");
    }
    for plain in [Charge::new(&tokens, "alice"), Charge::exempt(), Charge::exempt().estimate(1)] {
        for error in
            [plain.hold().await.unwrap_err(), plain.hold().max_wait(SECOND).await.unwrap_err()]
        {
            assert!(matches!(error, Error::NoEstimate), "{error}");
        }
    }
    let error = tokens.hold("alice", 0).await.unwrap_err();
    assert!(matches!(error, Error::ZeroCost), "{error}");
    let error = tokens.hold("alice", 11).await.unwrap_err();
    assert!(matches!(error, Error::CostAboveQuota { cost: 11, max: 10, .. }), "{error}");
    let with_leaky = Charge::new(&tokens, "alice").also(&leaky).estimate(1);
    for error in [
        leaky.hold("alice", 1).await.unwrap_err(),
        with_leaky.hold().await.unwrap_err(),
        leaky.hold("alice", 1).max_wait(SECOND).await.unwrap_err(),
    ] {
        assert!(matches!(error, Error::CannotHold { .. }), "{error}");
    }
    assert_eq!((remaining(&tokens).await, store.key_count()), (10, 0));
}

#[test]
fn a_lifetime_of_a_hold_is_neither_too_short_nor_endless() {
    let limiter = || support::in_memory(Quota::per_hour(1));
    for lifetime in [Duration::from_millis(100), 20 * SECOND, 86_400 * SECOND] {
        let _ = limiter().hold_lifetime(lifetime);
    }
    for lifetime in [Duration::ZERO, Duration::from_millis(99), Duration::MAX] {
        let made = std::panic::catch_unwind(|| limiter().hold_lifetime(lifetime));
        assert!(made.is_err(), "{lifetime:?}");
    }
}

#[tokio::test]
async fn a_reset_forgets_what_is_held_and_an_earlier_permit_takes_no_units_of_a_later_one() {
    let server = RedisServer::start();
    for limiter in limiters(&server).await {
        let before = hold(&limiter, 6).await;
        limiter.reset("alice").await.unwrap();
        let after = hold(&limiter, 5).await;
        before.cancel();
        until_left(&limiter, 5, 5).await;
        after.settle(1);
        until_left(&limiter, 9, 0).await;

        let lost = hold(&limiter, 6).await;
        limiter.reset("alice").await.unwrap();
        lost.settle(4);
        until_left(&limiter, 6, 0).await;
    }
}

#[tokio::test]
async fn a_block_denies_holds_and_lets_permits_end() {
    let server = RedisServer::start();
    for limiter in limiters(&server).await {
        let permit = hold(&limiter, 6).await;
        limiter.block("alice", 1_000 * SECOND).await.unwrap();
        let denied = limiter.hold("alice", 1).await.unwrap().into_result().unwrap_err();
        assert!(denied.is_blocked());
        permit.settle(2);
        let ended = async || {
            limiter.unblock("alice").await.unwrap();
            let state = limiter.peek("alice").await.unwrap();
            (state.remaining(), state.held()) == (8, 0)
        };
        until("the permit ends", ended).await;
    }
}

#[tokio::test]
async fn another_quota_applies_beside_what_is_held() {
    let server = RedisServer::start();
    for limiter in limiters(&server).await {
        let permit = hold(&limiter, 6).await;
        limiter.set_quota(Quota::per_day(20)).unwrap();
        assert_eq!(
            limiter.hold("alice", 15).await.unwrap().into_result().unwrap_err().retry_after(),
            None
        );
        hold(&limiter, 14).await.cancel();
        limiter.set_quota(Quota::per_day(4)).unwrap();
        let denied = limiter.hold("alice", 1).await.unwrap().into_result().unwrap_err();
        assert_eq!((denied.remaining(), denied.retry_after()), (0, None));
        permit.settle(1);
        until_left(&limiter, 3, 0).await;
    }
}

#[tokio::test]
async fn a_permit_returns_nothing_to_another_algorithm() {
    let server = RedisServer::start();
    for limiter in limiters(&server).await {
        let from = limiter.algorithm();
        let to = algorithms().chain([Algorithm::LeakyBucket]).filter(|to| *to != from);
        for to in to.filter(|to| to.name() != from.name()) {
            let permits = [hold(&limiter, 3).await, hold(&limiter, 3).await];
            Limit::try_new(to, limiter.quota()).unwrap().apply_to(&limiter);
            assert!(limiter.check("alice").cost(10).await.unwrap().is_allowed(), "{from} to {to}");
            permits.into_iter().for_each(Permit::cancel);
            assert_eq!(remaining(&limiter).await, 0, "{from} to {to}");
            limiter.reset("alice").await.unwrap(); // in Redis, each algorithm has a key of its own
            Limit::try_new(from, limiter.quota()).unwrap().apply_to(&limiter);
            limiter.reset("alice").await.unwrap();
            until_left(&limiter, 10, 0).await;
        }
    }
}

#[tokio::test]
async fn a_hold_counts_although_another_algorithm_has_blocked_the_key() {
    let server = RedisServer::start();
    for limiter in limiters(&server).await {
        let from = limiter.algorithm();
        for to in algorithms().filter(|to| to.name() != from.name()) {
            limiter.block("alice", 60 * SECOND).await.unwrap();
            Limit::try_new(to, limiter.quota()).unwrap().apply_to(&limiter);
            let permit = hold(&limiter, 10).await;
            assert!(!limiter.hold("alice", 1).await.unwrap().is_admitted(), "{from} to {to}");
            permit.cancel();
            until_left(&limiter, 10, 0).await;
            Limit::try_new(from, limiter.quota()).unwrap().apply_to(&limiter);
            limiter.reset("alice").await.unwrap();
        }
    }
}

/// Law 1.
#[tokio::test]
async fn a_denied_charge_keeps_the_block_by_another_algorithm() {
    let server = RedisServer::start();
    for limiter in limiters(&server).await {
        let from = limiter.algorithm();
        let to = algorithms().find(|to| to.name() != from.name()).unwrap();
        limiter.block("alice", 60 * SECOND).await.unwrap();
        limiter.block("bob", 60 * SECOND).await.unwrap();
        Limit::try_new(to, limiter.quota()).unwrap().apply_to(&limiter);
        limiter.spend("bob", 10).await.unwrap();
        let both = Charge::new(&limiter, "alice").and(Charge::new(&limiter, "bob"));
        assert!(!both.check().await.unwrap().is_allowed());
        Limit::try_new(from, limiter.quota()).unwrap().apply_to(&limiter);
        assert!(limiter.check("alice").await.unwrap().is_blocked(), "{from} to {to}");
    }
}

/// It checks again and again, but observers and the log get one decision about it.
#[tokio::test(start_paused = true)]
async fn a_check_that_waits_for_held_units_is_decided_once() {
    let store = MemoryStore::new();
    let recorder = Recorder::new();
    store.add_observer(recorder.clone());
    let quota = Quota::per_day(10);
    let tokens = Limiter::new("tokens", store.clone(), Algorithm::FixedWindow, quota);
    let calls = Limiter::new("calls", store, Algorithm::token_bucket(), quota);
    let both = Charge::new(&tokens, "alice").also(&calls);
    let permit = hold(&tokens, 10).await;
    recorder.take();
    for wait in [SECOND, Duration::ZERO] {
        assert!(!tokens.try_acquire("alice", 1, wait).await.unwrap().is_allowed());
        assert!(!both.check().max_wait(wait).await.unwrap().is_allowed());
        // Makes a reservation or is denied, but does not wait.
        assert!(!tokens.reserve("alice", 1, wait).await.unwrap().decision().is_allowed());
        let decided = recorder.take_of("decided");
        let denied = |it: &String| it.starts_with("decided tokens alice Denied");
        assert!(decided.len() == 3 && decided.iter().all(denied), "{wait:?}: {decided:?}");
    }
    let mut waiting = pin!(tokens.try_acquire("alice", 1, 60 * SECOND));
    assert!(waiting.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    assert_eq!(recorder.take_of("decided"), [""; 0]);
    permit.cancel();
    assert!(waiting.await.unwrap().is_allowed());
    let decided = recorder.take_of("decided");
    assert!(decided.len() == 1 && decided[0].contains("Allowed"), "{decided:?}");
}

/// Law 1.
#[tokio::test]
async fn a_denied_charge_keeps_the_count_by_another_algorithm() {
    let server = RedisServer::start();
    for limiter in limiters(&server).await {
        let from = limiter.algorithm();
        let to = algorithms().find(|to| to.name() != from.name()).unwrap();
        limiter.spend("alice", 10).await.unwrap();
        Limit::try_new(to, limiter.quota()).unwrap().apply_to(&limiter);
        limiter.spend("bob", 10).await.unwrap();
        let both = Charge::new(&limiter, "alice").and(Charge::new(&limiter, "bob"));
        assert!(!both.check().await.unwrap().is_allowed());
        Limit::try_new(from, limiter.quota()).unwrap().apply_to(&limiter);
        assert_eq!(remaining(&limiter).await, 0, "{from} to {to}");
    }
}

#[tokio::test]
async fn a_peek_or_a_refund_by_another_algorithm_keeps_what_is_held() {
    let server = RedisServer::start();
    for limiter in limiters(&server).await {
        let from = limiter.algorithm();
        let to = algorithms().find(|to| to.name() != from.name()).unwrap();
        let permit = hold(&limiter, 10).await;
        Limit::try_new(to, limiter.quota()).unwrap().apply_to(&limiter);
        assert_eq!(limiter.peek("alice").await.unwrap().remaining(), 10);
        limiter.refund("alice", 10).await.unwrap();
        Limit::try_new(from, limiter.quota()).unwrap().apply_to(&limiter);
        assert_eq!(limiter.peek("alice").await.unwrap().held(), 10, "{from} to {to}");
        permit.cancel();
        until_left(&limiter, 10, 0).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_key_with_holds_is_neither_evicted_nor_swept() {
    for algorithm in algorithms() {
        for when_full in [WhenFull::RejectNewKeys, WhenFull::EvictSoonest] {
            let store = memory_store(1, when_full);
            let limiter = Limiter::new("tokens", store, algorithm, Quota::per_second(10));
            let permit = hold(&limiter, 4).await;
            advance(3_600 * SECOND).await;
            let error = limiter.check("bob").await.unwrap_err();
            assert!(matches!(&error, Error::Store(error) if error.kind() == ErrorKind::Full));
            assert_eq!(limiter.peek("alice").await.unwrap().held(), 4, "{algorithm}");
            permit.cancel();
            assert!(limiter.check("bob").await.unwrap().is_allowed(), "{algorithm}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_full_store_forgets_a_denial_for_an_unknown_time_when_the_hold_ends() {
    let store = memory_store(1, WhenFull::RejectNewKeys);
    let limiter = Limiter::new("tokens", store, Algorithm::FixedWindow, Quota::per_second(10));
    let permit = hold(&limiter, 10).await;
    assert!(!limiter.check("alice").await.unwrap().is_allowed());
    permit.settle(5);
    advance(2 * SECOND).await;
    assert!(limiter.check("bob").await.unwrap().is_allowed());
}

#[tokio::test(start_paused = true)]
async fn waiting_calls_are_woken_by_an_end_in_the_order_of_their_arrival() {
    for algorithm in algorithms() {
        let limiter = in_memory(algorithm, Quota::per_day(10)).await;
        let first = hold(&limiter, 8).await;
        let (start, served) = (Instant::now(), Arc::new(Mutex::new(vec![])));
        let mut waiting = JoinSet::new();
        for number in 0..4 {
            let (limiter, served) = (limiter.clone(), served.clone());
            waiting.spawn(async move {
                let permit = limiter
                    .hold("alice", 4)
                    .max_wait(60 * SECOND)
                    .await
                    .unwrap()
                    .admitted()
                    .unwrap();
                served.lock().unwrap().push((number, start.elapsed().as_millis()));
                sleep(SECOND).await;
                permit.cancel();
            });
            sleep(Duration::from_millis(10)).await;
        }
        sleep(Duration::from_millis(7_333)).await;
        let ended = start.elapsed().as_millis();
        first.cancel();
        while waiting.join_next().await.is_some() {}
        let served = served.lock().unwrap();
        let expected = [(0, ended), (1, ended), (2, ended + 1_000), (3, ended + 1_000)];
        // A timer of tokio has a resolution of a millisecond.
        for ((number, at), (expected, from)) in iter::zip(&*served, expected) {
            assert_eq!(*number, expected, "{algorithm}: {served:?}");
            assert!((from..from + 3).contains(at), "{algorithm}: {served:?}, not {expected:?}");
        }
        assert_eq!(served.len(), 4);
    }
}

#[tokio::test(start_paused = true)]
async fn a_check_that_may_wait_is_woken_by_an_end() {
    for algorithm in algorithms() {
        let limiter = in_memory(algorithm, Quota::per_day(10)).await;
        let permit = hold(&limiter, 8).await;
        let start = Instant::now();
        let mut waiting = JoinSet::new();
        for call in 0..3 {
            let limiter = limiter.clone();
            waiting.spawn(async move {
                let decision = match call {
                    0 => limiter.acquire("alice", 3).await,
                    1 => limiter.try_acquire("alice", 3, 60 * SECOND).await,
                    _ => Charge::new(&limiter, "alice").cost(3).check().max_wait(60 * SECOND).await,
                };
                assert!(decision.unwrap().is_allowed());
                start.elapsed().as_millis()
            });
        }
        sleep(Duration::from_millis(5_555)).await;
        permit.settle(1);
        for elapsed in waiting.join_all().await {
            assert!((5_555..5_560).contains(&elapsed), "{algorithm}: {elapsed}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_that_waits_in_vain_is_denied_at_its_deadline() {
    let limiter = in_memory(Algorithm::token_bucket(), Quota::per_day(10)).await;
    let permit = hold(&limiter, 8).await;
    let start = Instant::now();
    let denied =
        limiter.hold("alice", 3).max_wait(3 * SECOND).await.unwrap().into_result().unwrap_err();
    assert_eq!(denied.retry_after(), None);
    assert_eq!(start.elapsed().as_secs(), 3);
    let denied = limiter.try_acquire("alice", 3, 2 * SECOND).await.unwrap();
    assert!(!denied.is_allowed());
    assert_eq!(start.elapsed().as_secs(), 5);
    assert!(!limiter.try_acquire("alice", 3, Duration::ZERO).await.unwrap().is_allowed());
    // There is no instant to reserve.
    let turn = limiter.reserve("alice", 3, 60 * SECOND).await.unwrap();
    assert!(!turn.decision().is_allowed());
    assert_eq!(start.elapsed().as_secs(), 5);
    permit.cancel();
}

#[tokio::test(start_paused = true)]
async fn a_dropped_call_holds_nothing() {
    for algorithm in algorithms() {
        let limiter = in_memory(algorithm, Quota::per_day(10)).await;
        let permit = hold(&limiter, 8).await;
        {
            let mut waiting = pin!(limiter.hold("alice", 3).max_wait(60 * SECOND));
            let cx = &mut Context::from_waker(Waker::noop());
            assert!(waiting.as_mut().poll(cx).is_pending());
            permit.cancel();
        }
        assert_eq!(limiter.peek("alice").await.unwrap().held(), 0, "{algorithm}");
        assert_eq!(remaining(&limiter).await, 10, "{algorithm}");
    }
}

#[tokio::test]
async fn calls_that_are_dropped_before_the_answer_of_redis_hold_nothing() {
    let server = RedisServer::start();
    let store = support::forgetful_store(&server).await;
    for algorithm in algorithms().take(5).filter(|it| *it != Algorithm::sliding_window()) {
        let name = algorithm.name();
        let limiter = Limiter::new(name, store.clone(), algorithm, Quota::per_day(100));
        let mut calls = JoinSet::new();
        for _ in 0..50 {
            let limiter = limiter.clone();
            calls.spawn(
                async move { drop(limiter.hold("alice", 2).await.map(|it| it.is_admitted())) },
            );
        }
        tokio::task::yield_now().await;
        calls.shutdown().await;
        // Those that were answered before have dropped their permits, which counts as used.
        until("nothing is held", async || limiter.peek("alice").await.unwrap().held() == 0).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_permit_too_many_is_given_to_tasks_that_race() {
    for algorithm in algorithms() {
        let limiter = in_memory(algorithm, Quota::per_day(100)).await;
        let mut tasks = JoinSet::new();
        for _ in 0..500 {
            let limiter = limiter.clone();
            tasks.spawn(async move { limiter.hold("alice", 1).await.unwrap().admitted() });
        }
        let permits: Vec<Permit> = tasks.join_all().await.into_iter().flatten().collect();
        assert_eq!(permits.len(), 100, "{algorithm}");
        permits.into_iter().for_each(Permit::cancel);
        assert_eq!(remaining(&limiter).await, 100, "{algorithm}");
    }
}

#[tokio::test]
async fn while_the_store_fails_a_permit_counts_nothing_or_holds_in_memory() {
    let store = RedisStore::lazy("unix:///no/such/socket").unwrap();
    let quota = Quota::per_day(10);
    let closed = Limiter::new("tokens", store, Algorithm::SlidingLog, quota);
    assert!(closed.hold("alice", 4).await.unwrap_err().is_store());
    let open = closed.clone().on_failure(FailurePolicy::Open);
    for _ in 0..3 {
        let mut permit = hold(&open, 4).await;
        assert_eq!(permit.decision().source(), Source::Open);
        permit.settle_for("tokens", 3).unwrap();
        assert!(!permit.is_expired());
        permit.settle(4);
    }
    let local = closed.on_failure(FailurePolicy::local(1.0));
    let permit = hold(&local, 4).await;
    assert_eq!((permit.decision().source(), permit.decision().remaining()), (Source::Local, 6));
    let denied =
        local.hold("alice", 7).max_wait(Duration::ZERO).await.unwrap().into_result().unwrap_err();
    assert_eq!(denied.source(), Source::Local);
    permit.settle(1);
    assert_eq!(local.check("alice").await.unwrap().remaining(), 8);
}

#[tokio::test]
async fn the_begin_and_the_end_of_each_hold_are_reported() {
    let store = MemoryStore::new();
    let recorder = Recorder::new();
    store.add_observer(recorder.clone());
    let limiter = Limiter::new("tokens", store, Algorithm::FixedWindow, Quota::per_hour(10));
    let permit = hold(&limiter, 4).await;
    drop(hold(&limiter, 2).await);
    permit.settle(3);
    let lost = hold(&limiter, 5).await;
    limiter.reset("alice").await.unwrap();
    lost.cancel();
    assert_eq!(
        recorder.take_of("hold"),
        [
            "hold began tokens alice 4",
            "hold began tokens alice 2",
            "hold ended tokens alice 2 2",
            "hold ended tokens alice 4 3",
            "hold began tokens alice 5",
            "hold lost tokens alice 5",
            "hold ended tokens alice 5 0",
        ]
    );
}

#[tokio::test]
async fn a_store_chosen_at_run_time_holds_units() {
    let store: AnyStore = tower_ratelimit::store::lazy("memory:").unwrap();
    let limiter = Limiter::new("tokens", store, Algorithm::token_bucket(), Quota::per_hour(10));
    let permit = hold(&limiter, 4).await;
    assert_eq!(limiter.peek("alice").await.unwrap().held(), 4);
    permit.cancel();
}

#[tokio::test]
async fn a_permit_whose_answer_outlasts_its_first_life_is_expired_at_once() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server);
    let store = RedisStore::connect(&format!("{}?deadline=30s", proxy.url())).await.unwrap();
    let places = Limiter::new("places", store, Algorithm::concurrency(), Quota::concurrent(1))
        .hold_lifetime(4 * SECOND);
    // The offset of the clocks is known from replies without a delay.
    for _ in 0..3 {
        places.peek("key").await.unwrap();
    }
    proxy.delay_replies(2 * SECOND);
    let permit = places.hold("key", 1).await.unwrap().admitted().unwrap();
    assert!(permit.is_expired(), "it lives for a second until its first renewal");
}

/// Panics at each event.
struct Panicking;

impl Observer for Panicking {
    fn on_event(&self, event: &Event<'_>) {
        panic!("scripted: {event:?}");
    }
}

#[tokio::test]
async fn an_observer_that_panics_keeps_no_place_and_frees_none_twice() {
    let store = MemoryStore::new();
    store.add_observer(Arc::new(Panicking));
    let limiters = ["a", "b"].map(|name| {
        Limiter::new(name, store.clone(), Algorithm::concurrency(), Quota::concurrent(2))
    });
    let charge = Charge::new(&limiters[0], "alice").also(&limiters[1]).estimate(1);
    for _ in 0..3 {
        let first = charge.hold().await.unwrap().admitted().unwrap();
        let second = charge.hold().await.unwrap().admitted().unwrap();
        assert!(charge.hold().await.unwrap().admitted().is_none());
        drop(first);
        // The place of the other permit is still taken.
        let third = charge.hold().await.unwrap().admitted().unwrap();
        assert!(charge.hold().await.unwrap().admitted().is_none());
        drop((second, third));
    }
    for limiter in limiters {
        assert_eq!(limiter.peek("alice").await.unwrap().remaining(), 2);
    }
}
