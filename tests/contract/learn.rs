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
    Algorithm, Charge, Limiter, MemoryStore, Quota, RateLimitLayer, VendorState, key,
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
        limiter.reset("vendor").await.unwrap();
        assert_eq!(peek(&limiter).await.remaining(), 100);
    }
}

/// The number of requests that are admitted at one instant.
async fn admitted(limiter: &Limiter) -> u32 {
    let mut count = 0;
    while limiter.check("vendor").await.unwrap().is_allowed() {
        count += 1;
    }
    count
}

const SECOND: Duration = Duration::from_secs(1);

#[tokio::test(start_paused = true)]
async fn one_request_follows_a_block_and_then_the_rate() {
    let quota = Quota::per_second(1).burst(100);
    for (spent, block) in [(0, 30), (0, 1), (60, 30), (100, 30), (100, 3), (100, 500), (1, 3_600)] {
        for overdraft in [0, 5] {
            let algorithm = Algorithm::token_bucket().overdraft(overdraft);
            let limiter = Limiter::new("vendor", MemoryStore::new(), algorithm, quota);
            limiter.spend("vendor", spent).await.unwrap();
            // Responses to several requests that were sent before.
            for _ in 0..5 {
                let state = VendorState::default().with_block(block * SECOND);
                limiter.learn("vendor", state).await.unwrap();
            }
            assert_eq!(admitted(&limiter).await, 0);
            tokio::time::advance(block * SECOND).await;
            assert_eq!(admitted(&limiter).await, 1, "{spent}, {block} s, overdraft {overdraft}");
            for _ in 0..3 {
                tokio::time::advance(SECOND).await;
                assert_eq!(admitted(&limiter).await, 1);
            }
        }
    }
}

/// Windows have no rate: a restart with one request takes a window, and is not longer than the
/// block.
#[tokio::test(start_paused = true)]
async fn a_window_restarts_with_one_request_after_a_block_as_long_as_it() {
    for algorithm in [Algorithm::FixedWindow, Algorithm::SlidingLog, Algorithm::sliding_window()] {
        for (block, expected) in [(30, 1), (10, 1), (9, 20)] {
            let quota = Quota::new(20, 10 * SECOND);
            let limiter = Limiter::new("vendor", MemoryStore::new(), algorithm, quota);
            let state = VendorState::default().with_block(block * SECOND);
            limiter.learn("vendor", state).await.unwrap();
            tokio::time::advance(block * SECOND).await;
            assert_eq!(admitted(&limiter).await, expected, "{algorithm:?}, {block} s");
        }
    }
}

/// Requests that wait already keep no instants before the end of the block.
#[tokio::test(start_paused = true)]
async fn waiting_requests_leave_one_by_one_after_a_block() {
    let quota = Quota::per_second(10).burst(20);
    let limiter = Limiter::new("vendor", MemoryStore::new(), Algorithm::token_bucket(), quota);
    let (start, left) = (tokio::time::Instant::now(), Arc::new(Mutex::new(vec![])));
    let calls: Vec<_> = (0..50)
        .map(|_| {
            let (limiter, left) = (limiter.clone(), left.clone());
            tokio::spawn(async move {
                let _ = limiter.acquire("vendor", 1).await.unwrap();
                left.lock().unwrap().push(start.elapsed());
            })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(left.lock().unwrap().len(), 20);
    limiter.learn("vendor", VendorState::default().with_block(10 * SECOND)).await.unwrap();
    for call in calls {
        call.await.unwrap();
    }
    let late = left.lock().unwrap()[20..].to_vec();
    assert!(late[0] >= 10 * SECOND, "{late:?}");
    for pair in late.windows(2) {
        assert!(pair[1] - pair[0] >= Duration::from_millis(99), "{late:?}");
    }
    assert!(late[29] < 14 * SECOND, "{late:?}");
}

#[tokio::test]
async fn both_stores_reserve_the_restart() {
    let server = RedisServer::start();
    let quota = Quota::per_hour(3_600).burst(100);
    for limiter in limiters(&server, Algorithm::token_bucket(), quota).await {
        for spent in [0, 40] {
            limiter.reset("vendor").await.unwrap();
            limiter.spend("vendor", spent).await.unwrap();
            let state = VendorState::default().with_block(30 * SECOND);
            limiter.learn("vendor", state).await.unwrap();
            let first = limiter.reserve("vendor", 1, MINUTE).await.unwrap().keep().delay();
            assert!(first <= 31 * SECOND && first > 10 * SECOND, "{first:?}");
            let second = limiter.reserve("vendor", 1, 2 * first).await.unwrap().keep().delay();
            // Between them, only the time has passed that the second check took.
            assert!(second > first.saturating_sub(10 * SECOND), "{first:?}, {second:?}");
            let more = limiter.reserve("vendor", 50, 10 * MINUTE).await.unwrap();
            let more = more.keep().delay();
            assert!(more > first + 25 * SECOND, "{spent}: {first:?}, {more:?}");
        }
    }
}

fn rejected() -> VendorState {
    VendorState::from_response(StatusCode::TOO_MANY_REQUESTS, &Default::default())
}

#[tokio::test(start_paused = true)]
async fn blocks_of_unknown_length_double_until_a_success() {
    let success = || VendorState::from_response(StatusCode::OK, &Default::default());
    let quota = Quota::per_day(100);
    let limiter = Limiter::new("vendor", MemoryStore::new(), Algorithm::token_bucket(), quota);
    let learn = async |state| limiter.learn("vendor", state).await.unwrap();
    for _ in 0..2 {
        for seconds in [1, 2, 4, 8, 16, 32, 60, 60] {
            limiter.reset("vendor").await.unwrap();
            learn(rejected()).await;
            let rest = peek(&limiter).await.blocked_for().unwrap();
            assert_eq!(rest.as_secs_f64().ceil() as u32, seconds);
            // Responses to requests that were sent before the block.
            learn(rejected()).await;
            learn(success()).await;
            assert!(peek(&limiter).await.blocked_for().unwrap() <= rest);
            tokio::time::advance(seconds * SECOND).await;
            // An answer that says nothing about limits.
            learn(VendorState::from_response(StatusCode::NOT_FOUND, &Default::default())).await;
            learn(VendorState::default()).await;
        }
        learn(success()).await;
    }
    // Other keys, and longer ago.
    limiter.reset("vendor").await.unwrap();
    learn(rejected()).await;
    limiter.learn("other", rejected()).await.unwrap();
    let other = limiter.peek("other").await.unwrap().blocked_for().unwrap();
    assert!(other <= SECOND);
    tokio::time::advance(15 * MINUTE).await;
    limiter.reset("vendor").await.unwrap();
    limiter.with_quota(Quota::per_day(50)).unwrap().learn("vendor", rejected()).await.unwrap();
    assert!(peek(&limiter).await.blocked_for().unwrap() <= SECOND);
    tokio::time::advance(MINUTE).await;
    limiter.reset("vendor").await.unwrap();
    let state = rejected().max_block(SECOND / 10);
    learn(state).await;
    assert!(peek(&limiter).await.blocked_for().unwrap() <= SECOND / 10);
}

/// A vendor that rejects for five minutes, and says no time, gets few requests.
#[tokio::test(start_paused = true)]
async fn a_vendor_that_says_no_time_is_asked_ever_less_often() {
    let quota = Quota::per_hour(3_600).burst(100);
    let limiter = Limiter::new("vendor", MemoryStore::new(), Algorithm::token_bucket(), quota);
    let layer = RateLimitLayer::new(&limiter, key::Global).max_wait(10 * MINUTE);
    let (start, calls) = (tokio::time::Instant::now(), Arc::new(Mutex::new(0)));
    let vendor = {
        let calls = calls.clone();
        service_fn(move |_: Request<Body>| {
            *calls.lock().unwrap() += 1;
            let status = if start.elapsed() < 5 * MINUTE { 429 } else { 200 };
            let response = Response::builder().status(status).body(Body::empty()).unwrap();
            async move { Ok::<_, Infallible>(response) }
        })
    };
    let client = layer.learn(VendorState::from_response).layer(vendor);
    while status(&client).await != 200 {}
    assert!(start.elapsed() < 7 * MINUTE, "{:?}", start.elapsed());
    assert!(*calls.lock().unwrap() <= 13, "{}", calls.lock().unwrap());
    // The success ends the doubling, though it says nothing else.
    limiter.learn(key::Global.key(), rejected()).await.unwrap();
    assert_eq!(limiter.peek(key::Global.key()).await.unwrap().blocked_for(), Some(SECOND));
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
