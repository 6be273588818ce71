//! `FailurePolicy::Wait`: requests that may wait outlast a Redis that is down.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::body::Body;
use http::{Request, Response, StatusCode};
use tokio::task::{JoinSet, yield_now};
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::{
    Algorithm, Charge, Decision, Error, FailurePolicy, Limiter, Quota, RateLimitLayer, RedisStore,
    key, layer::Rejection, redisson,
};

use crate::support::{self, server::RedisServer};

const MINUTE: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(300);

async fn connect(server: &RedisServer) -> RedisStore {
    RedisStore::connect(&format!("{}?deadline=1s", server.url())).await.unwrap()
}

fn rate(store: &RedisStore, name: &str) -> Limiter {
    let quota = Quota::per_second(100_000);
    let limiter = Limiter::new(name, store.clone(), Algorithm::token_bucket(), quota);
    limiter.on_failure(FailurePolicy::Wait)
}

fn places(store: &RedisStore, name: &str, places: u64) -> Limiter {
    let quota = Quota::concurrent(places);
    let limiter = Limiter::new(name, store.clone(), Algorithm::concurrency(), quota);
    limiter.on_failure(FailurePolicy::Wait)
}

/// Polls each task up to its wait.
async fn settle() {
    for _ in 0..100 {
        yield_now().await;
    }
}

#[tokio::test]
async fn requests_wait_for_redis_and_leave_in_the_order_of_their_arrival() {
    let mut server = RedisServer::start();
    let store = connect(&server).await;
    let layer = RateLimitLayer::new(rate(&store, "vendor"), key::Global)
        .max_wait(MINUTE)
        .max_waiting_per_key(1_000)
        .on_failure(FailurePolicy::Wait);
    let sent = Arc::<Mutex<Vec<usize>>>::default();
    let service = {
        let sent = sent.clone();
        layer.layer(service_fn(move |request: Request<Body>| {
            sent.lock().unwrap().push(*request.extensions().get().unwrap());
            async { Ok::<_, std::io::Error>(Response::new(Body::empty())) }
        }))
    };
    server.kill();
    let before = store.health();
    let mut tasks = JoinSet::new();
    for index in 0..300_usize {
        let mut request = support::get(&[]);
        request.extensions_mut().insert(index);
        tasks.spawn(service.clone().oneshot(request));
        settle().await;
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(sent.lock().unwrap().is_empty());
    let health = store.health();
    let calls = health.errors + health.skipped - before.errors - before.skipped;
    assert!(calls < 350, "each request asks once, and then only the first one: {calls} calls");
    server.restart();
    for response in tasks.join_all().await {
        assert_eq!(response.unwrap().status(), StatusCode::OK);
    }
    assert_eq!(*sent.lock().unwrap(), (0..300).collect::<Vec<_>>());
}

#[tokio::test]
async fn every_call_that_may_wait_outlasts_an_outage() {
    let mut server = RedisServer::start();
    let store = connect(&server).await;
    let (rate, other, places) =
        (rate(&store, "rate"), rate(&store, "other"), places(&store, "places", 5));
    server.kill();
    let one = Charge::new(&rate, "charge");
    let several = Charge::new(&rate, "a").and(Charge::new(&other, "b"));
    let mixed = Charge::new(&rate, "mixed").also(&places);
    let calls = async {
        tokio::join!(
            rate.try_acquire("try_acquire", 1, MINUTE),
            rate.acquire("acquire", 1),
            async { rate.reserve("reserve", 1, MINUTE).await?.admitted().unwrap().ready().await },
            one.check().max_wait(MINUTE),
            several.check().max_wait(MINUTE),
            several.check().max_wait(Duration::MAX),
            async {
                places
                    .hold("hold", 1)
                    .max_wait(MINUTE)
                    .await
                    .map(|place| assert!(place.is_admitted()))
            },
            async { mixed.hold().max_wait(MINUTE).await.map(|place| assert!(place.is_admitted())) },
        )
    };
    let mut calls = std::pin::pin!(calls);
    assert!(tokio::time::timeout(SHORT, &mut calls).await.is_err());
    server.restart();
    let (a, b, c, d, e, f, g, h) = calls.await;
    for decision in [a, b, c, d, e, f] {
        assert!(decision.unwrap().is_allowed());
    }
    g.unwrap();
    h.unwrap();
}

#[tokio::test]
async fn the_wait_for_redis_is_bounded_and_its_end_names_the_limiter() {
    let mut server = RedisServer::start();
    let store = connect(&server).await;
    let (rate, places) = (rate(&store, "vendor"), places(&store, "places", 5));
    server.kill();
    let charge = Charge::new(&rate, "charge");
    let errors: [Error; 6] = [
        rate.check("key").await.unwrap_err(),
        rate.try_acquire("key", 1, Duration::ZERO).await.unwrap_err(),
        rate.try_acquire("key", 1, SHORT).await.unwrap_err(),
        rate.reserve("key", 1, SHORT).await.unwrap_err(),
        charge.check().await.unwrap_err(),
        charge.check().max_wait(SHORT).await.unwrap_err(),
    ];
    let name = |error: Error| match error {
        Error::Store(error) => error.limiter().unwrap_or_default().to_owned(),
        other => panic!("{other}"),
    };
    assert_eq!(errors.map(name), ["vendor"; 6]);
    assert_eq!(name(places.hold("key", 1).max_wait(SHORT).await.unwrap_err()), "places");

    for max_wait in [None, Some(SHORT)] {
        let reject = |rejection: &Rejection, _: &()| rejection.clone();
        let layer =
            RateLimitLayer::custom(&rate, key::Global, reject).on_failure(FailurePolicy::Wait);
        let layer = max_wait.map_or(layer.clone(), |max_wait| layer.max_wait(max_wait));
        let service = service_fn(async |(): ()| -> Result<Rejection, Error> { panic!("not sent") });
        let rejection = layer.layer(service).oneshot(()).await.unwrap();
        let text =
            "the rate limit cannot be checked right now; try again later (limiter \"vendor\")";
        assert_eq!(rejection.to_string(), text);
        let response = rejection.to_response();
        assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert!(matches!(response.extensions().get(), Some(Rejection::Store(_))));
    }
}

/// As for a denial: the requests behind it are served.
#[tokio::test]
async fn a_request_that_is_dropped_while_it_asks_for_others_delays_none_of_them() {
    let mut server = RedisServer::start();
    let store = connect(&server).await;
    let places = places(&store, "places", 1);
    server.kill();
    let hold = || {
        let places = places.clone();
        async move { places.hold("key", 1).max_wait(MINUTE).await.unwrap().admitted().unwrap() }
    };
    let first = tokio::spawn(hold());
    settle().await;
    let others: Vec<_> = (0..3).map(|_| tokio::spawn(hold())).collect();
    tokio::time::sleep(SHORT).await;
    first.abort();
    server.restart();
    for other in others {
        drop(other.await.unwrap()); // one after the other: there is one place
    }
}

#[tokio::test]
async fn requests_of_a_limiter_that_redisson_shares_outlast_a_redis_that_hangs() {
    let server = RedisServer::start();
    let limiter = redisson::RateLimiter::new(connect(&server).await, "api:{key}").label("api");
    let hour = Duration::from_secs(3_600);
    assert!(limiter.try_set_rate(redisson::RateLimiterConfig::overall(1_000, hour)).await.unwrap());
    let layer =
        RateLimitLayer::new(&limiter, key::Global).max_wait(MINUTE).on_failure(FailurePolicy::Wait);
    let service = layer.layer(support::counting(&Arc::default()));
    server.freeze();
    let mut tasks = JoinSet::new();
    for _ in 0..20 {
        tasks.spawn(service.clone().oneshot(support::get(&[])));
    }
    tokio::time::sleep(Duration::from_millis(1_500)).await; // the deadline of the store is over
    server.thaw();
    for response in tasks.join_all().await {
        assert_eq!(response.unwrap().status(), StatusCode::OK);
    }
}

/// The others have other keys, which Redis decides about.
#[tokio::test]
async fn a_key_that_redis_cannot_decide_about_holds_up_no_other_key() {
    let server = RedisServer::start();
    let store = connect(&server).await;
    let limiter = rate(&store, "rate");
    let redis_key = "ratelimit:rate:token-bucket:{damaged}";
    let mut redis = server.connection();
    redis::cmd("LPUSH").arg(redis_key).arg("x").exec(&mut redis).unwrap();
    let damaged = |_| {
        let limiter = limiter.clone();
        tokio::spawn(async move { limiter.try_acquire("damaged", 1, MINUTE).await })
    };
    let damaged: Vec<_> = (0..20).map(damaged).collect();
    tokio::time::sleep(SHORT).await;
    let other: Decision = limiter.try_acquire("other", 1, MINUTE).await.unwrap();
    assert!(other.is_allowed());
    assert!(damaged.iter().all(|task| !task.is_finished()));
    redis::cmd("DEL").arg(redis_key).exec(&mut redis).unwrap();
    for task in damaged {
        assert!(task.await.unwrap().unwrap().is_allowed());
    }
}
