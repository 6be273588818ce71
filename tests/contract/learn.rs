//! Limiters that adopt what a vendor says, over either store: by `Limiter::learn`, and in layers
//! around a client.

use std::{
    collections::VecDeque,
    convert::Infallible,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::body::Body;
use http::{Request, Response, StatusCode};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_ratelimit::{
    Algorithm, Charge, Limiter, MemoryStore, Quota, RateLimitLayer, http::VendorState, key,
    store::KeyState,
};

use crate::support::{
    self, ALGORITHMS, get,
    recorder::{Recorder, observed},
    server::RedisServer,
};

const MINUTE: Duration = Duration::from_secs(60);

/// A limiter over each store.
async fn limiters(server: &RedisServer, algorithm: Algorithm, quota: Quota) -> [Limiter; 2] {
    let (memory, redis) = (MemoryStore::new(), support::redis_store(server).await);
    let name = algorithm.name();
    [Limiter::new(name, memory, algorithm, quota), Limiter::new(name, redis, algorithm, quota)]
}

async fn peek(limiter: &Limiter) -> KeyState {
    limiter.peek("vendor").await.unwrap()
}

fn left(units: u64) -> VendorState {
    VendorState::default().with_remaining(units)
}

#[tokio::test]
async fn a_key_is_drained_to_what_the_vendor_has_left_and_never_raised() {
    let server = RedisServer::start();
    for algorithm in ALGORITHMS {
        for limiter in limiters(&server, algorithm, Quota::per_day(100)).await {
            limiter.learn("vendor", VendorState::default()).await.unwrap();
            assert_eq!(peek(&limiter).await.remaining(), 100, "{algorithm:?}");
            for (said, remaining) in [(100, 100), (130, 100), (40, 40), (70, 40), (7, 7), (0, 0)] {
                limiter.learn("vendor", left(said)).await.unwrap();
                assert_eq!(peek(&limiter).await.remaining(), remaining, "{algorithm:?}: {said}");
            }
            limiter.learn("vendor", left(50)).await.unwrap();
            assert_eq!(peek(&limiter).await.remaining(), 0, "{algorithm:?}");
        }
    }
}

#[tokio::test]
async fn a_rejection_blocks_the_key_and_shortens_no_block() {
    let server = RedisServer::start();
    for limiter in limiters(&server, Algorithm::token_bucket(), Quota::per_day(100)).await {
        limiter.block("vendor", MINUTE).await.unwrap();
        let state = left(50).with_block(Duration::from_secs(1));
        limiter.learn("vendor", state).await.unwrap();
        let rest = peek(&limiter).await.blocked_for().unwrap();
        assert!(rest > Duration::from_secs(30), "{rest:?}");
        limiter.learn("vendor", left(0).with_block(50 * MINUTE)).await.unwrap();
        let rest = peek(&limiter).await.blocked_for().unwrap();
        assert!(rest > 40 * MINUTE, "{rest:?}");
        limiter.unblock("vendor").await.unwrap();
        assert_eq!(peek(&limiter).await.remaining(), 100, "the count stays");
    }
}

/// Calls that overlap spend what is left, at most: no debt arises.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn overlapping_calls_leave_no_debt() {
    let server = RedisServer::start();
    for limiter in limiters(&server, Algorithm::token_bucket(), Quota::per_day(1_000)).await {
        let calls: Vec<_> = (0..50)
            .map(|_| {
                let limiter = limiter.clone();
                tokio::spawn(async move { limiter.learn("vendor", left(400)).await })
            })
            .collect();
        for call in calls {
            call.await.unwrap().unwrap();
        }
        let remaining = peek(&limiter).await.remaining();
        assert!(remaining <= 400, "{remaining}");
        // Without a debt, the units that are refunded are there.
        assert_eq!(limiter.refund("vendor", 10).await.unwrap().remaining(), remaining + 10);
    }
}

#[tokio::test]
async fn a_drain_is_no_request_and_concurrency_has_none() {
    let recorder = Recorder::new();
    let store = observed(MemoryStore::new(), recorder.clone());
    let limiter =
        Limiter::new("vendor", store.clone(), Algorithm::token_bucket(), Quota::per_day(100));
    limiter.learn("vendor", left(40)).await.unwrap();
    assert_eq!(peek(&limiter).await.remaining(), 40);
    assert_eq!(recorder.take_of("decided"), [""; 0]);

    let in_flight =
        Limiter::new("in-flight", store, Algorithm::concurrency(), Quota::concurrent(10));
    in_flight.learn("vendor", left(3)).await.unwrap();
    assert_eq!(peek(&in_flight).await.remaining(), 10);
    in_flight.learn("vendor", left(3).with_block(MINUTE)).await.unwrap();
    assert!(peek(&in_flight).await.blocked_for().is_some());
}

/// A response of the vendor: its status and one header.
type Answer = (u16, &'static str, &'static str);

/// A vendor that gives these answers, and then panics.
fn vendor(
    answers: &[Answer],
) -> impl Service<Request<Body>, Response = Response<Body>, Error = Infallible, Future: Send>
+ Clone
+ use<> {
    let answers = Arc::new(Mutex::new(answers.iter().copied().collect::<VecDeque<_>>()));
    service_fn(move |_| {
        let (status, name, value) = answers.lock().unwrap().pop_front().expect("a request");
        let response = Response::builder().status(status).header(name, value);
        async move { Ok(response.body(Body::empty()).unwrap()) }
    })
}

async fn status<S, B>(service: &S) -> StatusCode
where
    S: Service<Request<Body>, Response = Response<B>, Error = Infallible> + Clone,
{
    service.clone().oneshot(get(&[])).await.unwrap().status()
}

#[tokio::test]
async fn a_layer_blocks_the_key_before_it_returns_the_response() {
    let server = RedisServer::start();
    for limiter in limiters(&server, Algorithm::token_bucket(), Quota::per_day(100)).await {
        let layer = RateLimitLayer::new(&limiter, |_: &http::request::Parts| "vendor");
        let client = layer.learn(VendorState::from_response).layer(vendor(&[
            (200, "ratelimit", r#""a";r=60;t=5"#),
            (200, "ratelimit", r#""a";r=90;t=5"#),
            (403, "retry-after", "1200"),
        ]));
        for (answer, remaining) in [(200, 60), (200, 59), (403, 0)] {
            assert_eq!(status(&client).await, answer);
            assert_eq!(peek(&limiter).await.remaining(), remaining);
        }
        // The vendor is not asked again.
        assert_eq!(status(&client).await, 429);
        assert!(peek(&limiter).await.blocked_for().unwrap() > 10 * MINUTE);
    }
}

#[tokio::test(start_paused = true)]
async fn requests_wait_until_the_vendor_accepts_them() {
    let quota = Quota::per_hour(100);
    let limiter = Limiter::new("vendor", MemoryStore::new(), Algorithm::token_bucket(), quota);
    let layer = RateLimitLayer::new(&limiter, key::Global).max_wait(MINUTE);
    let client = layer
        .learn(VendorState::from_response)
        .layer(vendor(&[(429, "retry-after", "30"), (200, "x", "y")]));
    let start = tokio::time::Instant::now();
    assert_eq!(status(&client).await, 429);
    assert_eq!(start.elapsed(), Duration::ZERO);
    assert_eq!(status(&client).await, 200);
    assert_eq!(start.elapsed().as_secs(), 30);
}

#[tokio::test(start_paused = true)]
async fn a_layer_for_other_requests_learns_by_its_closure() {
    let quota = Quota::per_hour(100);
    let limiter = Limiter::new("vendor", MemoryStore::new(), Algorithm::token_bucket(), quota);
    let layer = RateLimitLayer::custom(&limiter, key::Global, |_, _: &u64| 0)
        .learn(|left: &u64| VendorState::default().with_remaining(*left));
    let client = layer.layer(service_fn(async |left: u64| Ok::<_, Infallible>(left)));
    for (said, remaining) in [(70, 70), (80, 69), (5, 5)] {
        assert_eq!(client.clone().oneshot(said).await, Ok(said));
        assert_eq!(limiter.peek(key::Global.key()).await.unwrap().remaining(), remaining);
    }
}

/// Of several limits, the layer does not know which one is the vendor's.
#[tokio::test]
async fn a_charge_of_several_limits_learns_nothing() {
    let store = MemoryStore::new();
    let limiter =
        |name| Limiter::new(name, store.clone(), Algorithm::token_bucket(), Quota::per_day(100));
    let (user, all) = (limiter("user"), limiter("all"));
    let rule = {
        let (user, all) = (user.clone(), all.clone());
        move |_: &http::request::Parts| Ok(Charge::new(&user, "vendor").also(&all))
    };
    let layer = RateLimitLayer::by_rule(rule).learn(VendorState::from_response);
    let client = layer.layer(vendor(&[(429, "retry-after", "60"), (200, "x", "y")]));
    assert_eq!(status(&client).await, 429);
    assert_eq!(status(&client).await, 200);
    assert_eq!((peek(&user).await.remaining(), peek(&all).await.remaining()), (98, 98));
}
