//! Charges over either store: several limits at once, and settling and returning units after a
//! decision. Permits are in `permit.rs`.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Waker},
    time::Duration,
};

use axum::{Extension, Router, body::Body, http::request::Parts, routing};
use http::{HeaderMap, Request, Response, StatusCode};
use tokio::{
    sync::{Barrier, mpsc, oneshot},
    task::JoinSet,
    time::{Instant, advance, sleep},
};
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::store::ErrorKind;
use tower_ratelimit::{
    Algorithm, Charge, Decision, Error, FailurePolicy, Limiter, MemoryStore, Quota, RateLimitLayer,
    RedisStore, Reservation,
    config::Refill,
    key,
    layer::Settle,
    store::{KeyState, Source, Store},
};

use crate::support::{self, ALGORITHMS, load::until, server::RedisServer};

fn named(name: &str, store: &(impl Store + Clone), algorithm: Algorithm, quota: Quota) -> Limiter {
    Limiter::new(name, store.clone(), algorithm, quota)
}

/// A limit for each user, and one for all of them.
fn user_and_all(
    store: &(impl Store + Clone),
    algorithm: Algorithm,
    user: Quota,
    all: Quota,
) -> [Limiter; 2] {
    [named("user", store, algorithm, user), named("all", store, Algorithm::FixedWindow, all)]
}

fn for_user([user, all]: &[Limiter; 2], name: &str) -> Charge {
    Charge::new(user, name).and(Charge::new(all, "all"))
}

async fn over_redis(server: &RedisServer) -> RedisStore {
    support::redis_store(server).await
}

async fn remaining(limiter: &Limiter, key: &str) -> u64 {
    limiter.peek(key).await.unwrap().remaining()
}

async fn all_or_none(store: impl Store + Clone, algorithm: Algorithm) {
    let limiters = user_and_all(&store, algorithm, Quota::per_hour(3), Quota::per_hour(5));
    let check = async |user| for_user(&limiters, user).check().await.unwrap();
    for _ in 0..3 {
        assert!(check("alice").await.is_allowed(), "{algorithm}");
    }
    let denied = check("alice").await;
    assert!(!denied.is_allowed(), "{algorithm}");
    assert_eq!(denied.limiter(), "user", "{algorithm}");
    assert_eq!(remaining(&limiters[1], "all").await, 2, "{algorithm}: a denied request is charged");

    assert!(check("bob").await.is_allowed(), "{algorithm}");
    assert!(check("carol").await.is_allowed(), "{algorithm}");
    let denied = check("bob").await;
    assert_eq!((denied.is_allowed(), denied.limiter()), (false, "all"), "{algorithm}");
    assert!(denied.retry_after() > Some(Duration::from_secs(3_590)), "{algorithm}");
    assert_eq!(remaining(&limiters[0], "bob").await, 2, "{algorithm}: a denied request is charged");
    assert!(!check("dave").await.is_allowed(), "{algorithm}");
    assert_eq!(
        remaining(&limiters[0], "dave").await,
        3,
        "{algorithm}: a denied request is charged"
    );
}

#[tokio::test]
async fn all_limits_are_charged_or_none() {
    let server = RedisServer::start();
    for algorithm in ALGORITHMS.into_iter().filter(|algorithm| *algorithm != Algorithm::LeakyBucket)
    {
        all_or_none(MemoryStore::new(), algorithm).await;
        let store = support::with_prefix(&server, algorithm.name()).await;
        all_or_none(store, algorithm).await;
    }
}

async fn binding(store: impl Store + Clone) {
    let limiters =
        user_and_all(&store, Algorithm::SlidingLog, Quota::per_hour(3), Quota::per_hour(4));
    let check = async |user| for_user(&limiters, user).check().await.unwrap();
    let decision = check("alice").await;
    assert_eq!((decision.limiter(), decision.remaining()), ("user", 2));
    assert_eq!(decision.quota(), Quota::per_hour(3));
    assert_eq!(check("bob").await.limiter(), "user", "the first limit with the least remaining");
    let decision = check("bob").await;
    assert_eq!((decision.limiter(), decision.remaining()), ("user", 1));
    let decision = check("carol").await;
    assert_eq!((decision.limiter(), decision.remaining()), ("all", 0));
    let peeked = for_user(&limiters, "bob").peek().await.unwrap();
    assert_eq!((peeked.allows(), peeked.limiter()), (false, "all"));
}

#[tokio::test]
async fn the_decision_is_that_of_the_binding_limit() {
    binding(MemoryStore::new()).await;
    binding(over_redis(&RedisServer::start()).await).await;
}

/// 2,000 requests of 10 users, with limits of 15 for each user and 100 for all together.
async fn race(limiters: Vec<[Limiter; 2]>) {
    let barrier = Arc::new(Barrier::new(2_000));
    let mut tasks = JoinSet::new();
    for i in 0..2_000 {
        let charge = for_user(&limiters[i % limiters.len()], &format!("user-{}", i % 10));
        let barrier = barrier.clone();
        tasks.spawn(async move {
            barrier.wait().await;
            charge.check().await.unwrap().is_allowed()
        });
    }
    let admitted = tasks.join_all().await.into_iter().filter(|allowed| *allowed).count();
    assert_eq!(admitted, 100);
    let mut spent = 0;
    for user in 0..10 {
        spent += 15 - remaining(&limiters[0][0], &format!("user-{user}")).await;
    }
    assert_eq!(spent, 100, "denied requests were charged");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn requests_that_race_are_admitted_exactly_as_often_as_all_limits_allow() {
    let server = RedisServer::start();
    for algorithm in ALGORITHMS.into_iter().filter(|algorithm| *algorithm != Algorithm::LeakyBucket)
    {
        let (user, all) = (Quota::per_hour(15), Quota::per_hour(100));
        race(vec![user_and_all(&MemoryStore::new(), algorithm, user, all)]).await;
        let mut replicas = vec![];
        for _ in 0..8 {
            let store = support::with_prefix(&server, algorithm.name()).await;
            replicas.push(user_and_all(&store, algorithm, user, all));
        }
        race(replicas).await;
    }
}

#[tokio::test]
async fn a_decision_about_several_limits_is_one_round_trip() {
    let server = RedisServer::start();
    let store = support::forgetful_store(&server).await; // each denial is a call, too
    let limiters =
        user_and_all(&store, Algorithm::token_bucket(), Quota::per_hour(3), Quota::per_hour(9));
    let charge = for_user(&limiters, "alice");
    let _ = charge.check().await.unwrap();
    let before = server.calls("evalsha") + server.calls("eval");
    for _ in 0..5 {
        let _ = charge.check().await.unwrap();
    }
    assert_eq!(server.calls("evalsha") + server.calls("eval") - before, 5);
}

#[tokio::test(start_paused = true)]
async fn limits_on_one_key_make_one_reservation_together() {
    let store = MemoryStore::new();
    let second = named("second", &store, Algorithm::token_bucket(), Quota::per_second(10).burst(1));
    let minute = named("minute", &store, Algorithm::SlidingLog, Quota::per_minute(3));
    let charge = Charge::new(&second, "alice").also(&minute);
    for limiter in ["second"; 3] {
        let decision = charge.check().max_wait(Duration::from_secs(1)).await.unwrap();
        assert_eq!((decision.is_allowed(), decision.limiter()), (true, limiter));
    }
    let denied = charge.check().max_wait(Duration::from_secs(59)).await.unwrap();
    assert_eq!((denied.is_allowed(), denied.limiter()), (false, "minute"));
    let delayed = charge.check().max_wait(Duration::from_secs(60)).await.unwrap();
    assert_eq!((delayed.is_allowed(), delayed.limiter()), (true, "minute"));
    assert!(delayed.delay() > Duration::from_secs(59));
}

async fn drop_waiting(store: impl Store + Clone) {
    let second = named("second", &store, Algorithm::token_bucket(), Quota::per_hour(1));
    let minute = named("minute", &store, Algorithm::SlidingLog, Quota::per_hour(3));
    let charge = Charge::new(&second, "alice").also(&minute).cost(2);
    assert!(charge.check().await.unwrap().is_allowed());
    let before = [second.peek("alice").await.unwrap(), minute.peek("alice").await.unwrap()];
    assert_eq!(before.each_ref().map(KeyState::remaining), [0, 1]);

    let mut tasks = JoinSet::new();
    for _ in 0..3 {
        let charge = charge.clone();
        tasks.spawn(async move { charge.check().max_wait(Duration::from_secs(36_000)).await });
    }
    let has_reservation = async || {
        second.peek("alice").await.unwrap().reset_after() > Duration::from_secs(4 * 3_600 - 60)
    };
    while !has_reservation().await {
        tokio::task::yield_now().await;
    }
    assert_eq!(remaining(&minute, "alice").await, 0, "waiting requests come first");
    tasks.abort_all();
    while tasks.join_next().await.is_some() {}
    while has_reservation().await || remaining(&minute, "alice").await == 0 {
        tokio::task::yield_now().await;
    }
    for (limiter, before) in [&second, &minute].into_iter().zip(&before) {
        let after = limiter.peek("alice").await.unwrap();
        assert_eq!(after.remaining(), before.remaining());
        assert!(after.reset_after() <= before.reset_after());
    }
}

#[tokio::test]
async fn a_reservation_of_a_dropped_request_is_released_to_all_limits() {
    drop_waiting(MemoryStore::new()).await;
    drop_waiting(over_redis(&RedisServer::start()).await).await;
}

async fn slow_user(store: impl Store + Clone) {
    let limiters =
        user_and_all(&store, Algorithm::token_bucket(), Quota::per_hour(1), Quota::per_hour(9));
    assert!(for_user(&limiters, "slow").check().await.unwrap().is_allowed());
    let slow = for_user(&limiters, "slow");
    let waiting =
        tokio::spawn(async move { slow.check().max_wait(Duration::from_secs(7_200)).await });
    tokio::time::sleep(Duration::from_millis(50)).await;
    for n in 0..8 {
        let decision = for_user(&limiters, &format!("user-{n}")).check().await.unwrap();
        assert!(decision.is_allowed() && decision.delay().is_zero(), "{decision:?}");
    }
    assert!(!waiting.is_finished());
    waiting.abort();
    let decision = for_user(&limiters, "late").check().await.unwrap();
    assert_eq!((decision.is_allowed(), decision.limiter()), (false, "all"));
}

#[tokio::test]
async fn a_slow_user_never_delays_the_others() {
    slow_user(MemoryStore::new()).await;
    slow_user(over_redis(&RedisServer::start()).await).await;
}

#[tokio::test(start_paused = true)]
async fn limits_on_different_keys_are_checked_again_until_all_admit() {
    let store = MemoryStore::new();
    let user = Quota::per_second(1);
    let limiters = user_and_all(&store, Algorithm::token_bucket(), user, Quota::per_minute(5));
    let charge = for_user(&limiters, "alice");
    let start = Instant::now();
    for n in 0..5 {
        let decision = charge.check().max_wait(Duration::from_secs(2)).await.unwrap();
        assert!(decision.is_allowed());
        assert!(start.elapsed() >= Duration::from_secs(n), "the request proceeds too early");
        assert!(start.elapsed() <= Duration::from_millis(n * 1_502), "{:?}", start.elapsed());
    }
    let started = Instant::now();
    let denied = charge.check().max_wait(Duration::from_secs(2)).await.unwrap();
    assert_eq!((denied.is_allowed(), denied.limiter()), (false, "all"));
    assert_eq!(started.elapsed(), Duration::ZERO, "the request sleeps before it is denied");

    let decision = charge.check().max_wait(Duration::MAX).await.unwrap();
    assert!(decision.is_allowed() && start.elapsed() >= Duration::from_secs(60));
}

#[tokio::test(start_paused = true)]
async fn checking_again_never_takes_longer_than_the_timeout() {
    let store = MemoryStore::new();
    let user = Quota::per_second(1);
    let limiters = user_and_all(&store, Algorithm::token_bucket(), user, Quota::per_hour(1_000));
    let charge = for_user(&limiters, "alice");
    let mut tasks = JoinSet::new();
    let start = Instant::now();
    for _ in 0..20 {
        let charge = charge.clone();
        tasks.spawn(
            async move { charge.check().max_wait(Duration::from_millis(3_500)).await.unwrap() },
        );
    }
    let decisions = tasks.join_all().await;
    let admitted = decisions.iter().filter(|decision| decision.is_allowed()).count();
    assert!((2..=4).contains(&admitted), "{admitted}");
    assert!(start.elapsed() <= Duration::from_millis(3_502), "{:?}", start.elapsed());
    assert_eq!(1_000 - remaining(&limiters[1], "all").await, admitted as u64);
}

async fn costs_known_afterwards(store: impl Store + Clone) {
    let requests = named("requests", &store, Algorithm::SlidingLog, Quota::per_hour(10));
    let tokens = named("tokens", &store, Algorithm::token_bucket(), Quota::per_hour(1_000));
    let charge = Charge::new(&requests, "alice").and(Charge::new(&tokens, "alice").cost(500));
    let left = async || (remaining(&requests, "alice").await, remaining(&tokens, "alice").await);
    assert!(charge.check().await.unwrap().is_allowed());
    assert_eq!(left().await, (9, 500));

    charge.of("tokens").cost(200).refund().await.unwrap();
    assert_eq!(left().await, (9, 700));
    charge.of("tokens").cost(900).spend().await.unwrap();
    assert_eq!(left().await, (9, 0));
    let denied = charge.check().await.unwrap();
    assert!(!denied.is_allowed());
    // The debt is 200, and 500 are needed; little is refilled meanwhile.
    let retry_after = denied.retry_after().unwrap();
    assert!(retry_after > Duration::from_secs(2_500) && retry_after <= Duration::from_secs(2_520));
    assert_eq!(left().await, (9, 0));

    charge.of("tokens").cost(900).refund().await.unwrap();
    assert_eq!(left().await, (9, 700));
    assert!(charge.of("other").is_exempt());
}

#[tokio::test]
async fn a_cost_can_be_adjusted_when_it_is_known() {
    costs_known_afterwards(MemoryStore::new()).await;
    costs_known_afterwards(over_redis(&RedisServer::start()).await).await;
}

async fn spending_does_not_wait(store: impl Store + Clone) {
    let limiters =
        user_and_all(&store, Algorithm::token_bucket(), Quota::per_hour(1), Quota::per_hour(9));
    let queue = limiters[0].reserve("alice", 1, Duration::from_secs(9_000)).await.unwrap().keep();
    let queue =
        (queue, limiters[0].reserve("alice", 1, Duration::from_secs(9_000)).await.unwrap().keep());
    assert!(queue.1.delay() > Duration::from_secs(3_000));
    for_user(&limiters, "alice").spend().await.unwrap();
    let decision = for_user(&limiters, "bob").check().await.unwrap();
    assert!(decision.is_allowed() && decision.delay().is_zero(), "{decision:?}");
    assert_eq!(remaining(&limiters[1], "all").await, 7);
}

#[tokio::test]
async fn units_spent_for_one_limit_do_not_wait_for_another() {
    spending_does_not_wait(MemoryStore::new()).await;
    spending_does_not_wait(over_redis(&RedisServer::start()).await).await;
}

#[tokio::test]
async fn an_invalid_charge_is_an_error_and_spends_nothing() {
    let store = MemoryStore::new();
    let [user, all] =
        user_and_all(&store, Algorithm::SlidingLog, Quota::per_hour(3), Quota::per_hour(9));
    let elsewhere = named("user", &MemoryStore::new(), Algorithm::SlidingLog, Quota::per_hour(3));
    let (alice, costing) = (Charge::new(&user, "alice"), |n| Charge::new(&user, "alice").cost(n));
    let error = async |charge: Charge| charge.check().await.unwrap_err();

    let twice = alice.clone().and(Charge::new(&all, "all")).and(costing(2));
    let problem = error(twice).await;
    assert!(matches!(problem, Error::SameLimitTwice { .. }), "{problem}");
    assert_eq!(problem.limiter(), Some("user"));
    let problem = error(alice.clone().and(Charge::new(&elsewhere, "alice"))).await;
    assert!(matches!(problem, Error::DifferentStores), "{problem}");
    let problem = error(Charge::exempt()).await;
    assert!(matches!(problem, Error::NoLimits), "{problem}");
    let problem = error(Charge::new(&all, "all").and(costing(4))).await;
    assert!(matches!(problem, Error::CostAboveQuota { cost: 4, max: 3, .. }), "{problem}");
    assert_eq!(problem.limiter(), Some("user"));
    let problem = costing(4).peek().await.unwrap_err();
    assert!(matches!(problem, Error::CostAboveQuota { .. }), "{problem}");
    let problem = error(costing(0)).await;
    assert!(matches!(problem, Error::ZeroCost), "{problem}");
    assert_eq!((remaining(&user, "alice").await, remaining(&all, "all").await), (3, 9));
    assert!(alice.and(Charge::exempt()).check().await.unwrap().is_allowed());
}

#[tokio::test]
async fn a_store_without_room_for_all_keys_charges_none() {
    let store = MemoryStore::with_max_keys(2);
    let limiters =
        user_and_all(&store, Algorithm::SlidingLog, Quota::per_hour(1), Quota::per_hour(1));
    assert!(limiters[0].check("used up").await.unwrap().is_allowed());
    for _ in 0..3 {
        let charge = for_user(&limiters, "alice").and(Charge::new(&limiters[0], "bob"));
        let error = charge.check().await.unwrap_err();
        assert!(
            matches!(&error, Error::Store(error) if error.kind() == ErrorKind::Full),
            "{error}"
        );
    }
    assert_eq!(store.key_count(), 1);
    assert!(for_user(&limiters, "used up").peek().await.is_ok());
    assert!(!for_user(&limiters, "used up").check().await.unwrap().is_allowed());
    assert_eq!(store.key_count(), 1, "a denied request takes no room");
    assert_eq!(remaining(&limiters[1], "all").await, 1);
}

#[tokio::test]
async fn a_flood_of_denied_users_leaves_no_keys() {
    let store = MemoryStore::new();
    let limiters =
        user_and_all(&store, Algorithm::SlidingLog, Quota::per_hour(9), Quota::per_hour(1));
    for n in 0..1_000 {
        let decision = for_user(&limiters, &format!("user-{n}")).check().await.unwrap();
        assert_eq!(decision.is_allowed(), n == 0);
    }
    assert_eq!(store.key_count(), 2);
}

async fn equal_keys(store: impl Store + Clone) {
    let user = Quota::per_minute(1);
    let limiters = user_and_all(&store, Algorithm::token_bucket(), user, Quota::per_hour(9));
    let shared = for_user(&limiters, "all");
    assert!(shared.check().await.unwrap().is_allowed());
    let waiting =
        tokio::spawn(async move { shared.check().max_wait(Duration::from_secs(120)).await });
    tokio::time::sleep(Duration::from_millis(50)).await;
    let decision = for_user(&limiters, "bob").check().await.unwrap();
    assert!(decision.is_allowed() && decision.delay().is_zero(), "{decision:?}");
    waiting.abort();
}

#[tokio::test]
async fn a_client_named_like_a_shared_key_delays_no_other_client() {
    equal_keys(MemoryStore::new()).await;
    equal_keys(over_redis(&RedisServer::start()).await).await;
}

#[tokio::test]
async fn an_exempt_charge_spends_and_grants_nothing() {
    let limiter = support::in_memory(Quota::per_hour(10));
    for exempt in [Charge::exempt(), Charge::new(&limiter, "alice").of("other")] {
        assert_eq!(exempt.spend().await.unwrap(), None);
        assert_eq!(exempt.refund().await.unwrap(), None);
    }
}

#[tokio::test]
async fn spending_and_refunding_return_the_state_of_the_limit_that_binds() {
    let server = RedisServer::start();
    let in_redis = support::redis_store(&server).await;
    async fn check(store: impl Store + Clone) {
        let limiter = |name, limit| {
            let quota = Quota::per_hour(limit);
            Limiter::new(name, store.clone(), Algorithm::sliding_log(), quota)
        };
        let (few, many) = (limiter("few", 10), limiter("many", 20));
        let charge = Charge::new(&few, "alice").cost(3).and(Charge::new(&many, "all").cost(15));
        let spent = charge.spend().await.unwrap().unwrap();
        assert_eq!((spent.limiter(), spent.remaining(), spent.allows()), ("many", 5, true));
        let refund = Charge::new(&few, "alice").cost(0).and(Charge::new(&many, "all").cost(9));
        let refunded = refund.refund().await.unwrap().unwrap();
        assert_eq!((refunded.limiter(), refunded.remaining()), ("many", 14));
        assert_eq!(few.peek("alice").await.unwrap().remaining(), 7, "a cost of 0 refunds nothing");
        let nothing = Charge::new(&few, "alice").cost(0).and(Charge::new(&many, "all").cost(0));
        for state in [nothing.spend().await, nothing.refund().await] {
            let state = state.unwrap().unwrap();
            assert_eq!((state.limiter(), state.remaining(), state.allows()), ("few", 7, true));
        }
        assert!(matches!(nothing.check().await, Err(Error::ZeroCost)));
        let refunded = charge.refund().await.unwrap().unwrap();
        assert_eq!((refunded.limiter(), refunded.remaining()), ("few", 10));
        assert_eq!(many.peek("all").await.unwrap().remaining(), 20);
    }
    check(MemoryStore::new()).await;
    check(in_redis).await;
}

#[tokio::test]
async fn a_peek_takes_no_room_and_no_charge_evicts_its_own_keys() {
    let store = MemoryStore::with_max_keys(2);
    let limiters =
        user_and_all(&store, Algorithm::SlidingLog, Quota::per_hour(5), Quota::per_hour(9));
    assert!(limiters[0].check("alice").cost(4).await.unwrap().is_allowed());
    let used_up = named("used-up", &store, Algorithm::SlidingLog, Quota::per_hour(1));
    assert!(used_up.check("bob").await.unwrap().is_allowed());
    for _ in 0..9 {
        assert!(for_user(&limiters, "alice").peek().await.unwrap().allows());
        assert!(for_user(&limiters, "carol").peek().await.unwrap().allows());
        let error = for_user(&limiters, "alice").check().await.unwrap_err();
        assert!(
            matches!(&error, Error::Store(error) if error.kind() == ErrorKind::Full),
            "{error}"
        );
        assert_eq!(remaining(&limiters[0], "alice").await, 1);
    }
}

#[tokio::test]
async fn a_flood_does_not_evict_a_key_with_a_debt() {
    let store = MemoryStore::with_max_keys(1);
    let limiter = named("user", &store, Algorithm::token_bucket(), Quota::per_hour(5));
    limiter.spend("alice", 9).await.unwrap();
    let window = named("window", &store, Algorithm::sliding_window(), Quota::per_hour(5));
    let more = Charge::new(&limiter, "alice").cost(99).and(Charge::new(&window, "carol").cost(99));
    assert!(
        matches!(more.spend().await, Err(Error::Store(error)) if error.kind() == ErrorKind::Full)
    );
    assert!(limiter.check("bob").await.unwrap_err().to_string().contains("store"));
    assert!(!limiter.check("alice").await.unwrap().is_allowed());
}

#[test]
fn without_a_runtime_a_waiting_request_panics_and_releases_its_reservation() {
    let store = MemoryStore::new();
    let limiter = named("user", &store, Algorithm::SlidingLog, Quota::per_hour(1));
    let all = named("all", &store, Algorithm::SlidingLog, Quota::per_hour(9));
    fn now<T>(future: std::pin::Pin<&mut dyn Future<Output = Result<T, Error>>>) -> T {
        match future.poll(&mut std::task::Context::from_waker(std::task::Waker::noop())) {
            std::task::Poll::Ready(result) => result.unwrap(),
            std::task::Poll::Pending => panic!("the future waits"),
        }
    }
    let wait = Duration::from_secs(9_000);
    let two = Charge::new(&limiter, "alice").and(Charge::new(&all, "all"));
    assert!(now(std::pin::pin!(limiter.check("alice"))).is_allowed());
    let before = now(std::pin::pin!(limiter.peek("alice"))).reset_after();
    for _ in 0..2 {
        let waits = || now(std::pin::pin!(limiter.try_acquire("alice", 1, wait)));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(waits)).is_err());
        let checks_again = || now(std::pin::pin!(two.check().max_wait(wait)));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(checks_again)).is_err());
    }
    assert!(now(std::pin::pin!(limiter.peek("alice"))).reset_after() <= before);
}

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

fn all_algorithms() -> impl Iterator<Item = Algorithm> {
    let others = [Algorithm::sliding_window(), Algorithm::token_bucket().refill(Refill::Interval)];
    ALGORITHMS.into_iter().chain(others)
}

/// Sends requests of this cost at one instant. Returns the number of admitted requests.
async fn admitted(limiter: &Limiter, requests: u32, cost: u64) -> u32 {
    let mut admitted = 0;
    for _ in 0..requests {
        let decision = limiter.check("alice").cost(cost).await.unwrap();
        admitted += u32::from(decision.is_allowed());
    }
    admitted
}

/// The pattern of the README: each request holds 500 tokens beforehand. Its headers contain
/// the seconds that it takes, and the tokens that it settles.
fn chat(tokens: &Limiter, requests: &Limiter) -> Router {
    async fn answer(Extension(settle): Extension<Settle>, headers: HeaderMap) {
        let header = |name: &str| headers[name].to_str().unwrap().parse().unwrap();
        sleep(Duration::from_secs(header("seconds"))).await;
        settle.settle("tokens", header("used")).unwrap();
    }
    let (tokens, requests) = (tokens.clone(), requests.clone());
    let layer = RateLimitLayer::by_rule(move |_: &Parts| {
        Ok(Charge::new(&requests, "alice").also(&tokens).estimate(500))
    });
    Router::new().route("/", routing::get(answer)).layer(layer.settle_handle(true))
}

#[tokio::test(start_paused = true)]
async fn handlers_that_settle_late_return_exactly_what_they_held() {
    for algorithm in all_algorithms().filter(|algorithm| *algorithm != Algorithm::LeakyBucket) {
        let store = MemoryStore::new();
        let tokens = named("tokens", &store, algorithm, Quota::per_minute(1_000));
        let requests = named("requests", &store, Algorithm::SlidingLog, Quota::per_minute(1_000));
        let app = chat(&tokens, &requests);
        let call = |seconds: &str, used: &str| {
            app.clone().oneshot(support::get(&[("seconds", seconds), ("used", used)]))
        };
        let mut slow = JoinSet::new();
        slow.spawn(call("121", "0"));
        sleep(Duration::from_millis(120_999)).await;
        for status in [200, 429] {
            assert_eq!(call("0", "500").await.unwrap().status(), status, "{algorithm}");
        }
        sleep(Duration::from_millis(1)).await;
        for response in slow.join_all().await {
            assert_eq!(response.unwrap().status(), StatusCode::OK);
        }
        for status in [200, 429] {
            assert_eq!(call("0", "500").await.unwrap().status(), status, "{algorithm}");
        }
        assert_eq!(remaining(&requests, "alice").await, 998, "{algorithm}");
    }
}

/// Polls once: with a memory store, the future then waits for its reservation.
fn start<T>(
    mut future: Pin<Box<impl Future<Output = T>>>,
) -> Option<Pin<Box<impl Future<Output = T>>>> {
    let waits = future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending();
    waits.then_some(future)
}

#[tokio::test(start_paused = true)]
async fn reservations_that_the_store_has_lost_return_nothing() {
    for algorithm in all_algorithms() {
        for is_kept in [false, true] {
            let limiter =
                Limiter::new("default", MemoryStore::new(), algorithm, Quota::per_minute(10));
            let (mut waiting, mut turns) = (vec![], vec![]);
            for _ in 0..110 {
                if is_kept {
                    turns
                        .extend(limiter.reserve("alice", 1, 20 * MINUTE).await.unwrap().admitted());
                } else {
                    let limiter = limiter.clone();
                    let wait = async move { limiter.try_acquire("alice", 1, 20 * MINUTE).await };
                    waiting.extend(start(Box::pin(wait)));
                }
            }
            let turns = that_wait(turns);
            assert!(waiting.len() + turns.len() >= 9, "{algorithm}");
            advance(SECOND).await;
            limiter.reset("alice").await.unwrap();
            assert_eq!(admitted(&limiter, 10, 1).await, 10, "{algorithm}");
            drop((waiting, turns));
            assert_eq!(admitted(&limiter, 20, 1).await, 0, "{algorithm}, kept: {is_kept}");
        }
    }
}

/// Keeps the units of those that need not wait.
fn that_wait(turns: Vec<Reservation>) -> Vec<Reservation> {
    let waits = |turn: &Reservation| turn.decision().delay() > SECOND;
    let (waiting, others): (Vec<_>, Vec<_>) = turns.into_iter().partition(waits);
    others.into_iter().for_each(|turn| drop(turn.keep()));
    waiting
}

#[tokio::test]
async fn reservations_that_redis_has_lost_return_nothing() {
    let server = RedisServer::start();
    // A remembered denial would hide the loss.
    let store = support::forgetful_store(&server).await;
    let flush = || redis::cmd("FLUSHDB").query::<()>(&mut server.connection()).unwrap();
    let calls = async |count: u64| {
        until("Redis was called", async || server.calls("evalsha") >= count).await;
    };
    for algorithm in all_algorithms() {
        let limiter = named("default", &store, algorithm, Quota::per_day(10));
        let wait = 20 * 24 * 60 * MINUTE;
        let _ = limiter.peek("alice").await.unwrap(); // loads the script
        for is_kept in [false, true] {
            flush();
            let (mut waiting, mut turns) = (JoinSet::new(), vec![]);
            let before = server.calls("evalsha");
            for sent in 1..=60 {
                if is_kept {
                    turns.extend(limiter.reserve("alice", 1, wait).await.unwrap().admitted());
                } else {
                    let limiter = limiter.clone();
                    waiting.spawn(async move { limiter.try_acquire("alice", 1, wait).await });
                }
                calls(before + sent).await;
            }
            let turns = that_wait(turns);
            flush();
            assert_eq!(admitted(&limiter, 10, 1).await, 10, "{algorithm}");
            let before = server.calls("evalsha");
            waiting.abort_all();
            while waiting.join_next().await.is_some() {}
            drop(turns);
            calls(before + 1).await; // this call releases all reservations
            assert_eq!(admitted(&limiter, 20, 1).await, 0, "{algorithm}, kept: {is_kept}");
        }
    }
}

/// A step of a request.
#[derive(Clone, Copy, Debug)]
enum Step {
    Settle(u64),
    Respond { is_charged: bool },
}

/// Runs a request of 500 units through these steps. After each step, `others` units are spent.
/// Asserts that `left` of 1,000 units are left.
async fn assert_left(limiter: &Limiter, steps: &[Step], others: u64, left: u64) {
    limiter.reset("global").await.unwrap();
    let layer = RateLimitLayer::new(limiter.clone(), key::Global)
        .cost(|_: &Parts| 500)
        .settle_handle(true)
        .charge_when(|response| response.status == StatusCode::OK);
    let (called, calls) = mpsc::unbounded_channel();
    let handler = move |request: Request<Body>| {
        let (respond, response) = oneshot::channel();
        called.send((request.into_parts().0.extensions, respond)).unwrap();
        async { Ok::<_, Infallible>(response.await.unwrap()) }
    };
    let mut response = tokio::spawn(layer.layer(service_fn(handler)).oneshot(support::get(&[])));
    let (extensions, respond) = { calls }.recv().await.unwrap();
    let settle: &Settle = extensions.get().unwrap();
    let (mut respond, mut has_ended) = (Some(respond), false);
    for step in steps {
        match *step {
            Step::Settle(used) => match settle.clone().settle("tokens", used) {
                Ok(()) => assert!(!has_ended),
                Err(error) => assert!(has_ended && matches!(error, Error::HoldEnded { .. })),
            },
            Step::Respond { is_charged } => {
                let status = if is_charged { 200 } else { 500 };
                let answer = Response::builder().status(status).body(Body::empty()).unwrap();
                respond.take().unwrap().send(answer).unwrap();
                (&mut response).await.unwrap().unwrap();
            }
        }
        has_ended = true;
        if others > 0 {
            limiter.spend("global", others).await.unwrap();
        }
    }
    until(&format!("{left} are left by {} after {steps:?}", limiter.algorithm()), async || {
        let state = limiter.peek("global").await.unwrap();
        (state.remaining(), state.held()) == (left, 0)
    })
    .await;
}

async fn once_in_any_order(store: impl Store + Clone) {
    use Step::Settle;
    const NO: Step = Step::Respond { is_charged: false };
    const YES: Step = Step::Respond { is_charged: true };
    for algorithm in all_algorithms().filter(|it| *it != Algorithm::LeakyBucket) {
        let limiter = named("tokens", &store, algorithm, Quota::per_day(1_000));
        for (steps, left) in [
            (&[NO][..], 990),
            (&[YES], 490),
            (&[Settle(300), NO], 680),
            (&[NO, Settle(300)], 980),
            (&[Settle(700), NO], 280),
            (&[Settle(0), NO], 980),
            (&[YES, Settle(100)], 480),
            (&[Settle(0), Settle(300), YES], 970),
            (&[Settle(700), Settle(100), Settle(400), YES], 260),
            (&[Settle(500), YES, Settle(510)], 470),
        ] {
            assert_left(&limiter, steps, 10, left).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn units_are_returned_once_in_any_order_of_settling_and_responding() {
    once_in_any_order(MemoryStore::new()).await;
}

#[tokio::test]
async fn units_are_returned_once_in_any_order_over_redis() {
    once_in_any_order(over_redis(&RedisServer::start()).await).await;
}

#[tokio::test]
async fn settling_a_request_that_was_not_charged_does_nothing() {
    let limiter = support::in_memory(Quota::per_hour(10));
    let settle = async |layer: RateLimitLayer, used: u64| {
        let answer = async move |Extension(settle): Extension<Settle>| {
            settle.settle("default", used).unwrap();
            settle.settle("default", used).is_ok().to_string()
        };
        let app = Router::new().route("/", routing::get(answer)).layer(layer.settle_handle(true));
        let response = app.oneshot(support::get(&[])).await.unwrap();
        axum::body::to_bytes(response.into_body(), 9).await.unwrap()
    };
    let layer = RateLimitLayer::new(limiter.clone(), key::Global).cost(|_: &Parts| 6);
    let dry = layer.clone().dry_run(true);
    for (layer, used, is_uncounted, left) in [
        (&dry, 4, "false", 6),
        (&dry, 5, "false", 1), // counted, as admitted requests are
        (&dry, 0, "true", 1),
        (&dry, 9, "true", 1),
        (&layer.clone().exempt(|_: &Parts| true), 9, "true", 1),
    ] {
        assert_eq!(settle(layer.clone(), used).await, is_uncounted);
        assert_eq!(remaining(&limiter, "global").await, left);
    }
}

#[tokio::test]
async fn without_a_reply_of_redis_settling_is_local_or_does_nothing() {
    let store = RedisStore::lazy("unix:///no/such/socket").unwrap();
    let tokens = named("tokens", &store, Algorithm::SlidingLog, Quota::per_hour(1_000));
    let layer = RateLimitLayer::new(tokens, key::Global).cost(|_: &Parts| 500).settle_handle(true);
    let call = async |policy, used: u64| {
        let answer = async move |Extension(settle): Extension<Settle>| {
            settle.settle("tokens", used).unwrap();
        };
        let layer = layer.clone().on_failure(policy).extensions(true);
        let app: Router = Router::new().route("/", routing::get(answer)).layer(layer);
        let response = app.oneshot(support::get(&[])).await.unwrap();
        let decision: Decision = response.extensions().get().cloned().unwrap();
        (decision.source(), decision.is_allowed(), decision.remaining())
    };
    let local = FailurePolicy::local(1.0);
    assert_eq!(call(local, 100).await, (Source::Local, true, 500));
    assert_eq!(call(local, 700).await, (Source::Local, true, 400));
    for used in [0, 900] {
        assert_eq!(call(FailurePolicy::Open, used).await, (Source::Open, true, 0));
    }
    assert_eq!(call(local, 0).await, (Source::Local, false, 200));
}
