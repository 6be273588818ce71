//! Several limits at once, over either store.

mod support;

use std::{sync::Arc, time::Duration};

use support::{ALGORITHMS, server::RedisServer};
use tokio::{sync::Barrier, task::JoinSet, time::Instant};
use tower_ratelimit::{Algorithm, Charge, Error, Limiter, MemoryStore, Quota, RedisStore, Store};

fn named(name: &str, store: &(impl Store + Clone), algorithm: Algorithm, quota: Quota) -> Limiter {
    Limiter::named(name, store.clone(), algorithm, quota)
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
    Charge::new(user, name).and(Charge::new(all, "everybody"))
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
    assert_eq!(
        remaining(&limiters[1], "everybody").await,
        2,
        "{algorithm}: a denied one is charged"
    );

    assert!(check("bob").await.is_allowed(), "{algorithm}");
    assert!(check("carol").await.is_allowed(), "{algorithm}");
    let denied = check("bob").await;
    assert_eq!((denied.is_allowed(), denied.limiter()), (false, "all"), "{algorithm}");
    assert!(denied.retry_after() > Some(Duration::from_secs(3_590)), "{algorithm}");
    assert_eq!(remaining(&limiters[0], "bob").await, 2, "{algorithm}: a denied one is charged");
    assert!(!check("dave").await.is_allowed(), "{algorithm}");
    assert_eq!(remaining(&limiters[0], "dave").await, 3, "{algorithm}: a denied one is charged");
}

#[tokio::test]
async fn all_limits_are_charged_or_none() {
    let server = RedisServer::start();
    for algorithm in ALGORITHMS.into_iter().filter(|it| *it != Algorithm::LeakyBucket) {
        all_or_none(MemoryStore::new(), algorithm).await;
        let store = over_redis(&server).await;
        all_or_none(store.prefix(algorithm.name()), algorithm).await;
    }
}

async fn binding(store: impl Store + Clone) {
    let limiters =
        user_and_all(&store, Algorithm::SlidingLog, Quota::per_hour(3), Quota::per_hour(4));
    let check = async |user| for_user(&limiters, user).check().await.unwrap();
    let decision = check("alice").await;
    assert_eq!((decision.limiter(), decision.remaining()), ("user", 2));
    assert_eq!(decision.quota(), Quota::per_hour(3));
    assert_eq!(check("bob").await.limiter(), "user", "the first of those with least remaining");
    let decision = check("bob").await;
    assert_eq!((decision.limiter(), decision.remaining()), ("user", 1));
    let decision = check("carol").await;
    assert_eq!((decision.limiter(), decision.remaining()), ("all", 0));
    let peeked = for_user(&limiters, "bob").peek().await.unwrap();
    assert_eq!((peeked.is_allowed(), peeked.limiter()), (false, "all"));
}

#[tokio::test]
async fn the_decision_is_that_of_the_limit_that_binds() {
    binding(MemoryStore::new()).await;
    binding(over_redis(&RedisServer::start()).await).await;
}

/// 2,000 requests of 10 users, each of whom may make 15, and all of them together 100.
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
    for algorithm in ALGORITHMS.into_iter().filter(|it| *it != Algorithm::LeakyBucket) {
        let (user, all) = (Quota::per_hour(15), Quota::per_hour(100));
        race(vec![user_and_all(&MemoryStore::new(), algorithm, user, all)]).await;
        let mut replicas = vec![];
        for _ in 0..8 {
            let store = over_redis(&server).await.prefix(algorithm.name());
            replicas.push(user_and_all(&store, algorithm, user, all));
        }
        race(replicas).await;
    }
}

#[tokio::test]
async fn a_decision_about_several_limits_is_one_round_trip() {
    let server = RedisServer::start();
    let store = over_redis(&server).await;
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
async fn limits_on_one_key_book_a_turn_together() {
    let store = MemoryStore::new();
    let second = named("second", &store, Algorithm::token_bucket(), Quota::per_second(10).burst(1));
    let minute = named("minute", &store, Algorithm::SlidingLog, Quota::per_minute(3));
    let charge = Charge::new(&second, "alice").also(&minute);
    for limiter in ["second"; 3] {
        let decision = charge.try_acquire(Duration::from_secs(1)).await.unwrap();
        assert_eq!((decision.is_allowed(), decision.limiter()), (true, limiter));
    }
    let denied = charge.try_acquire(Duration::from_secs(59)).await.unwrap();
    assert_eq!((denied.is_allowed(), denied.limiter()), (false, "minute"));
    let delayed = charge.try_acquire(Duration::from_secs(60)).await.unwrap();
    assert_eq!((delayed.is_allowed(), delayed.limiter()), (true, "minute"));
    assert!(delayed.delay() > Duration::from_secs(59));
}

async fn give_up(store: impl Store + Clone) {
    let second = named("second", &store, Algorithm::token_bucket(), Quota::per_hour(1));
    let minute = named("minute", &store, Algorithm::SlidingLog, Quota::per_hour(3));
    let charge = Charge::new(&second, "alice").also(&minute).cost(2);
    assert!(charge.check().await.unwrap().is_allowed());
    let before = [second.peek("alice").await.unwrap(), minute.peek("alice").await.unwrap()];
    assert_eq!(before.map(|it| it.remaining()), [0, 1]);

    let mut tasks = JoinSet::new();
    for _ in 0..3 {
        let charge = charge.clone();
        tasks.spawn(async move { charge.try_acquire(Duration::from_secs(36_000)).await });
    }
    let booked = async || {
        second.peek("alice").await.unwrap().reset_after() > Duration::from_secs(4 * 3_600 - 60)
    };
    while !booked().await {
        tokio::task::yield_now().await;
    }
    assert_eq!(remaining(&minute, "alice").await, 0, "those who wait come first");
    tasks.abort_all();
    while tasks.join_next().await.is_some() {}
    while booked().await || remaining(&minute, "alice").await == 0 {
        tokio::task::yield_now().await;
    }
    for (limiter, before) in [&second, &minute].into_iter().zip(before) {
        let after = limiter.peek("alice").await.unwrap();
        assert_eq!(after.remaining(), before.remaining());
        assert!(after.reset_after() <= before.reset_after());
    }
}

#[tokio::test]
async fn a_turn_that_is_given_up_is_given_back_to_all_limits() {
    give_up(MemoryStore::new()).await;
    give_up(over_redis(&RedisServer::start()).await).await;
}

async fn slow_user(store: impl Store + Clone) {
    let limiters =
        user_and_all(&store, Algorithm::token_bucket(), Quota::per_hour(1), Quota::per_hour(9));
    assert!(for_user(&limiters, "slow").check().await.unwrap().is_allowed());
    let slow = for_user(&limiters, "slow");
    let waiting = tokio::spawn(async move { slow.try_acquire(Duration::from_secs(7_200)).await });
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
async fn limits_on_different_keys_are_asked_again_until_all_let_it() {
    let store = MemoryStore::new();
    let user = Quota::per_second(1);
    let limiters = user_and_all(&store, Algorithm::token_bucket(), user, Quota::per_minute(5));
    let charge = for_user(&limiters, "alice");
    let start = Instant::now();
    for n in 0..5 {
        let decision = charge.try_acquire(Duration::from_secs(2)).await.unwrap();
        assert!(decision.is_allowed());
        assert!(start.elapsed() >= Duration::from_secs(n), "it goes on too early");
        assert!(start.elapsed() <= Duration::from_millis(n * 1_502), "{:?}", start.elapsed());
    }
    let asked = Instant::now();
    let denied = charge.try_acquire(Duration::from_secs(2)).await.unwrap();
    assert_eq!((denied.is_allowed(), denied.limiter()), (false, "all"));
    assert_eq!(asked.elapsed(), Duration::ZERO, "nobody sleeps in vain");

    let decision = charge.acquire().await.unwrap();
    assert!(decision.is_allowed() && start.elapsed() >= Duration::from_secs(60));
}

#[tokio::test(start_paused = true)]
async fn asking_again_never_takes_longer_than_the_timeout() {
    let store = MemoryStore::new();
    let user = Quota::per_second(1);
    let limiters = user_and_all(&store, Algorithm::token_bucket(), user, Quota::per_hour(1_000));
    let charge = for_user(&limiters, "alice");
    let mut tasks = JoinSet::new();
    let start = Instant::now();
    for _ in 0..20 {
        let charge = charge.clone();
        tasks.spawn(async move { charge.try_acquire(Duration::from_millis(3_500)).await.unwrap() });
    }
    let decisions = tasks.join_all().await;
    let admitted = decisions.iter().filter(|decision| decision.is_allowed()).count();
    assert!((2..=4).contains(&admitted), "{admitted}");
    assert!(start.elapsed() <= Duration::from_millis(3_502), "{:?}", start.elapsed());
    assert_eq!(1_000 - remaining(&limiters[1], "everybody").await, admitted as u64);
}

async fn costs_known_afterwards(store: impl Store + Clone) {
    let requests = named("requests", &store, Algorithm::SlidingLog, Quota::per_hour(10));
    let tokens = named("tokens", &store, Algorithm::token_bucket(), Quota::per_hour(1_000));
    let charge = Charge::new(&requests, "alice").and(Charge::new(&tokens, "alice").cost(500));
    let left = async || (remaining(&requests, "alice").await, remaining(&tokens, "alice").await);
    let decision = charge.check().await.unwrap();
    assert_eq!(left().await, (9, 500));

    charge.of("tokens").cost(200).refund().await.unwrap();
    assert_eq!(left().await, (9, 700));
    charge.of("tokens").cost(900).spend().await.unwrap();
    assert_eq!(left().await, (9, 0));
    let denied = charge.check().await.unwrap();
    assert!(!denied.is_allowed());
    // 200 are owed, and 500 are needed; what flows in meanwhile is not much.
    let retry_after = denied.retry_after().unwrap();
    assert!(retry_after > Duration::from_secs(2_500) && retry_after <= Duration::from_secs(2_520));
    assert_eq!(left().await, (9, 0));

    charge.of("tokens").cost(900).refund().await.unwrap();
    charge.cancel(decision).await.unwrap();
    assert_eq!(left().await, (10, 1_000));
    assert!(charge.of("nobody").is_exempt());
}

#[tokio::test]
async fn a_cost_can_be_settled_when_it_is_known() {
    costs_known_afterwards(MemoryStore::new()).await;
    costs_known_afterwards(over_redis(&RedisServer::start()).await).await;
}

async fn spending_does_not_wait(store: impl Store + Clone) {
    let limiters =
        user_and_all(&store, Algorithm::token_bucket(), Quota::per_hour(1), Quota::per_hour(9));
    let queue = limiters[0].check_within("alice", 1, Duration::from_secs(9_000)).await.unwrap();
    let queue =
        (queue, limiters[0].check_within("alice", 1, Duration::from_secs(9_000)).await.unwrap());
    assert!(queue.1.delay() > Duration::from_secs(3_000));
    for_user(&limiters, "alice").spend().await.unwrap();
    let decision = for_user(&limiters, "bob").check().await.unwrap();
    assert!(decision.is_allowed() && decision.delay().is_zero(), "{decision:?}");
    assert_eq!(remaining(&limiters[1], "everybody").await, 7);
}

#[tokio::test]
async fn what_is_spent_for_one_limit_does_not_wait_for_another() {
    spending_does_not_wait(MemoryStore::new()).await;
    spending_does_not_wait(over_redis(&RedisServer::start()).await).await;
}

#[tokio::test]
async fn a_charge_that_cannot_be_is_an_error_and_spends_nothing() {
    let store = MemoryStore::new();
    let [user, all] =
        user_and_all(&store, Algorithm::SlidingLog, Quota::per_hour(3), Quota::per_hour(9));
    let elsewhere = named("user", &MemoryStore::new(), Algorithm::SlidingLog, Quota::per_hour(3));
    let alice = Charge::new(&user, "alice");
    let error = async |charge: Charge| charge.check().await.unwrap_err();

    let twice = alice.clone().and(Charge::new(&all, "everybody")).and(alice.clone().cost(2));
    let problem = error(twice).await;
    assert!(matches!(problem, Error::SameLimitTwice { limiter: "user", .. }), "{problem}");
    let problem = error(alice.clone().and(Charge::new(&elsewhere, "alice"))).await;
    assert!(matches!(problem, Error::DifferentStores), "{problem}");
    let problem = error(Charge::exempt()).await;
    assert!(matches!(problem, Error::NoLimits), "{problem}");
    let problem = error(Charge::new(&all, "everybody").and(alice.clone().cost(4))).await;
    assert!(
        matches!(problem, Error::CostAboveQuota { limiter: "user", cost: 4, most: 3, .. }),
        "{problem}"
    );
    let problem = alice.clone().cost(4).peek().await.unwrap_err();
    assert!(matches!(problem, Error::CostAboveQuota { .. }), "{problem}");
    let problem = error(alice.clone().cost(0)).await;
    assert!(matches!(problem, Error::ZeroCost), "{problem}");
    assert_eq!((remaining(&user, "alice").await, remaining(&all, "everybody").await), (3, 9));
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
        assert!(matches!(&error, Error::Store(error) if error.is_full()), "{error}");
    }
    assert_eq!(store.key_count(), 1);
    assert!(for_user(&limiters, "used up").peek().await.is_ok());
    assert!(!for_user(&limiters, "used up").check().await.unwrap().is_allowed());
    assert_eq!(store.key_count(), 1, "a denied request takes no room");
    assert_eq!(remaining(&limiters[1], "everybody").await, 1);
}

#[tokio::test]
async fn a_flood_of_users_who_are_denied_leaves_no_keys() {
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
    let everybody = for_user(&limiters, "everybody");
    assert!(everybody.check().await.unwrap().is_allowed());
    let waiting =
        tokio::spawn(async move { everybody.try_acquire(Duration::from_secs(120)).await });
    tokio::time::sleep(Duration::from_millis(50)).await;
    let decision = for_user(&limiters, "bob").check().await.unwrap();
    assert!(decision.is_allowed() && decision.delay().is_zero(), "{decision:?}");
    waiting.abort();
}

#[tokio::test]
async fn a_client_who_calls_himself_like_a_shared_key_delays_nobody() {
    equal_keys(MemoryStore::new()).await;
    equal_keys(over_redis(&RedisServer::start()).await).await;
}

#[tokio::test]
async fn what_was_used_settles_what_was_charged() {
    let store = MemoryStore::new();
    let requests = named("requests", &store, Algorithm::SlidingLog, Quota::per_hour(10));
    let tokens = named("tokens", &store, Algorithm::FixedWindow, Quota::per_hour(1_000));
    let charge = Charge::new(&requests, "alice").also(&tokens).cost(300);
    for (used, left) in [(120, 880), (300, 580), (0, 580), (510, 70)] {
        assert!(charge.check().await.unwrap().is_allowed());
        charge.settle("tokens", used).await.unwrap();
        assert_eq!(remaining(&tokens, "alice").await, left, "{used}");
    }
    assert_eq!(remaining(&requests, "alice").await, 6);
    let error = charge.settle("tokns", 9).await.unwrap_err();
    assert!(matches!(error, Error::NotCharged { .. }), "{error}");
    for nobody in [Charge::exempt(), charge.of("nobody")] {
        nobody.settle("tokens", 9).await.unwrap();
        nobody.spend().await.unwrap();
        nobody.refund().await.unwrap();
    }
}

#[tokio::test]
async fn to_look_takes_no_room_and_no_charge_drops_its_own_keys() {
    let store = MemoryStore::with_max_keys(2);
    let limiters =
        user_and_all(&store, Algorithm::SlidingLog, Quota::per_hour(5), Quota::per_hour(9));
    assert!(limiters[0].check_n("alice", 4).await.unwrap().is_allowed());
    let used_up = named("used-up", &store, Algorithm::SlidingLog, Quota::per_hour(1));
    assert!(used_up.check("bob").await.unwrap().is_allowed());
    for _ in 0..9 {
        assert!(for_user(&limiters, "alice").peek().await.unwrap().is_allowed());
        assert!(for_user(&limiters, "carol").peek().await.unwrap().is_allowed());
        let error = for_user(&limiters, "alice").check().await.unwrap_err();
        assert!(matches!(&error, Error::Store(error) if error.is_full()), "{error}");
        assert_eq!(remaining(&limiters[0], "alice").await, 1);
    }
}

#[tokio::test]
async fn what_is_owed_is_not_forgotten_in_a_flood() {
    let store = MemoryStore::with_max_keys(1);
    let limiter = named("user", &store, Algorithm::token_bucket(), Quota::per_hour(5));
    limiter.spend("alice", 9).await.unwrap();
    let window = named("window", &store, Algorithm::sliding_window(), Quota::per_hour(5));
    let more = Charge::new(&limiter, "alice").cost(99).and(Charge::new(&window, "carol").cost(99));
    assert!(matches!(more.spend().await, Err(Error::Store(error)) if error.is_full()));
    assert!(limiter.check("bob").await.unwrap_err().to_string().contains("store"));
    assert!(!limiter.check("alice").await.unwrap().is_allowed());
}

#[test]
fn without_a_runtime_who_must_wait_panics_and_gives_back() {
    let store = MemoryStore::new();
    let limiter = named("user", &store, Algorithm::SlidingLog, Quota::per_hour(1));
    let all = named("all", &store, Algorithm::SlidingLog, Quota::per_hour(9));
    let now = |future: std::pin::Pin<&mut dyn Future<Output = Result<_, Error>>>| match future
        .poll(&mut std::task::Context::from_waker(std::task::Waker::noop()))
    {
        std::task::Poll::Ready(decision) => decision.unwrap(),
        std::task::Poll::Pending => panic!("it waits"),
    };
    let wait = Duration::from_secs(9_000);
    let two = Charge::new(&limiter, "alice").and(Charge::new(&all, "everybody"));
    assert!(now(std::pin::pin!(limiter.check("alice"))).is_allowed());
    let before = now(std::pin::pin!(limiter.peek("alice"))).reset_after();
    for _ in 0..2 {
        let waits = || now(std::pin::pin!(limiter.try_acquire("alice", 1, wait)));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(waits)).is_err());
        let asks_again = || now(std::pin::pin!(two.try_acquire(wait)));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(asks_again)).is_err());
    }
    assert!(now(std::pin::pin!(limiter.peek("alice"))).reset_after() <= before);
}
