//! Waiting: reservations, their order, and their release.

use std::{
    convert::Infallible,
    future::ready,
    pin::{Pin, pin},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};

use http::{Request, Response, StatusCode};
use tokio::{
    task::{JoinHandle, JoinSet},
    time::Instant,
};
use tower::{Layer, Service, ServiceExt, limit::ConcurrencyLimit, service_fn};
use tower_ratelimit::{
    Algorithm, Charge, Decision, Limiter, MemoryStore, Quota, RateLimitLayer, Reservation,
    config::Limit, key,
};

use crate::support::{self, ALGORITHMS, counting, get, server::RedisServer};

const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3_600);

fn in_memory(algorithm: Algorithm, quota: Quota) -> Limiter {
    Limiter::new("default", MemoryStore::new(), algorithm, quota)
}

async fn in_redis(server: &RedisServer, algorithm: Algorithm, quota: Quota) -> Limiter {
    let store = support::redis_store(server).await;
    Limiter::new("default", store, algorithm, quota)
}

fn poll_once<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

/// Uses up the units that are left.
async fn drain(limiter: &Limiter) {
    while limiter.try_acquire("key", 1, Duration::ZERO).await.unwrap().is_allowed() {}
}

#[tokio::test(start_paused = true)]
async fn a_request_is_admitted_now_or_in_time_or_denied_immediately() {
    for algorithm in ALGORITHMS {
        let limiter = in_memory(algorithm, Quota::per_second(2));
        let acquire = async |timeout| {
            let start = Instant::now();
            let decision = limiter.try_acquire("key", 1, timeout).await.unwrap();
            (decision, start.elapsed())
        };
        drain(&limiter).await;

        let (denied, took) = acquire(Duration::ZERO).await;
        let wait = denied.retry_after().expect("the quota is used up");
        assert_eq!(took, Duration::ZERO, "{algorithm}");

        let (denied, took) = acquire(wait - Duration::from_micros(1)).await;
        assert_eq!(denied.retry_after(), Some(Duration::from_micros(1)), "{algorithm}");
        assert_eq!(took, Duration::ZERO, "{algorithm}");

        let (admitted, took) = acquire(wait).await;
        assert_eq!(admitted.delay(), wait, "{algorithm}");
        assert!(wait <= took && took <= wait + Duration::from_millis(1), "{algorithm}: {took:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn requests_proceed_in_the_order_of_their_arrival() {
    for algorithm in ALGORITHMS {
        let limiter = in_memory(algorithm, Quota::per_second(3));
        let order = Arc::new(Mutex::new(vec![]));
        let start = Instant::now();
        let mut tasks = JoinSet::new();
        for i in 0..20 {
            let (limiter, order) = (limiter.clone(), order.clone());
            tasks.spawn(async move {
                let cost = 1 + i % 3;
                // A leaky bucket of 3 has no room for all requests.
                if algorithm != Algorithm::LeakyBucket {
                    assert!(limiter.acquire("key", cost).await.unwrap().is_allowed());
                } else if !limiter.try_acquire("key", 1, HOUR).await.unwrap().is_allowed() {
                    return;
                }
                order.lock().unwrap().push(i);
            });
            tokio::task::yield_now().await;
        }
        tasks.join_all().await;
        assert!(order.lock().unwrap().is_sorted(), "{algorithm}: {order:?}");
        assert!(start.elapsed() >= SECOND * 2 / 3, "{algorithm}");
    }
}

/// Waits for an effect of another task or process.
/// Releases a reservation, and waits until Redis has done it.
async fn released(server: Option<&RedisServer>, turn: Reservation) {
    let calls = || server.map_or(0, |server| server.calls("evalsha"));
    let before = calls();
    drop(turn);
    until(async || server.is_none() || calls() > before).await;
}

async fn until(mut happened: impl AsyncFnMut() -> bool) {
    for _ in 0..10_000 {
        if happened().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    panic!("the effect does not happen");
}

#[tokio::test]
async fn a_wait_costs_one_round_trip_or_a_part_of_one() {
    let server = RedisServer::start();
    let quota = Quota::per_second(20).burst(1);
    let limiter = in_redis(&server, Algorithm::token_bucket(), quota).await;
    let _ = limiter.peek("ada").await.unwrap(); // loads the script
    let calls = || (server.calls("evalsha"), server.calls("eval"));
    let before = calls();
    // On a busy machine, a request can be late: it would check again.
    let layer = RateLimitLayer::new(limiter, key::header("user"));
    let layer = layer.max_wait(HOUR).max_lateness(Duration::MAX);
    let service = layer.layer(counting(&Arc::default()));
    let mut tasks = JoinSet::new();
    for _ in 0..10 {
        let service = service.clone();
        tasks.spawn(async move { call(&service, "ada").await });
    }
    assert!(tasks.join_all().await.into_iter().all(|status| status == StatusCode::OK));
    let (hashes, texts) = calls();
    assert!((1..=10).contains(&(hashes - before.0)) && texts == before.1, "{hashes} {texts}");
}

#[tokio::test]
async fn reservations_are_made_in_the_order_of_arrival_over_many_connections() {
    let server = RedisServer::start();
    for algorithm in ALGORITHMS {
        let quota = Quota::per_hour(60);
        let mut limiters = vec![];
        for _ in 0..4 {
            limiters.push(in_redis(&server, algorithm, quota).await);
        }
        drain(&limiters[0]).await;
        let mut delays = vec![];
        for i in 0..20 {
            let decision = limiters[i % 4].reserve("key", 1, 3 * HOUR).await.unwrap().keep();
            assert!(decision.is_allowed() && !decision.delay().is_zero(), "{algorithm}");
            // Rounds off the time of the test.
            delays.push((decision.delay().as_secs() + 30) / 60);
        }
        assert!(delays.is_sorted(), "{algorithm}: {delays:?}");
    }
}

/// Starts a request, and waits until its reservation is in the store.
async fn start(limiter: &Limiter, server: Option<&RedisServer>) -> JoinHandle<()> {
    let calls = || server.map_or(0, |server| server.calls("evalsha"));
    let before = calls();
    let limiter = limiter.clone();
    let task = tokio::spawn(async move {
        let _ = limiter.acquire("key", 1).await;
    });
    tokio::task::yield_now().await;
    until(async || server.is_none() || calls() > before).await;
    task
}

/// Drops a request, and waits until its reservation is released.
async fn drop_waiting(task: JoinHandle<()>, server: Option<&RedisServer>) {
    let calls = || server.map_or(0, |server| server.calls("evalsha"));
    let before = calls();
    task.abort();
    assert!(task.await.unwrap_err().is_cancelled());
    until(async || server.is_none() || calls() > before).await;
}

#[tokio::test]
async fn a_dropped_request_releases_its_reservation_once_and_later_requests_keep_theirs() {
    let server = RedisServer::start();
    for algorithm in ALGORITHMS {
        let quota = Quota::per_hour(8);
        let memory = (in_memory(algorithm, quota), None);
        let redis = (in_redis(&server, algorithm, quota).await, Some(&server));
        for (limiter, server) in [memory, redis] {
            let next = async || {
                let turn = limiter.reserve("key", 1, 9 * HOUR).await.unwrap().admitted().unwrap();
                let delay = turn.decision().delay();
                released(server, turn).await;
                // Reservations are at least an eighth of an hour apart: rounds off the time of the
                // test.
                (delay.as_secs() + 60) / 300
            };
            drain(&limiter).await;
            let first = next().await;
            assert!(first > 0, "{algorithm}");

            let mut waiting = vec![];
            for _ in 0..3 {
                waiting.push(start(&limiter, server).await);
            }
            let fourth = next().await;
            assert!(fourth >= first, "{algorithm}");
            drop_waiting(waiting.remove(1), server).await;
            let behind = next().await;
            assert!((first..=fourth).contains(&behind), "{algorithm}: {first} {behind} {fourth}");
            drop_waiting(waiting.remove(0), server).await;
            drop_waiting(waiting.remove(0), server).await;
            assert_eq!(
                next().await,
                first,
                "{algorithm}: a reservation is lost, or released twice"
            );

            let peek = limiter.peek("key").await.unwrap();
            let room = if algorithm == Algorithm::LeakyBucket { 7 } else { 0 };
            assert_eq!(peek.remaining(), room, "{algorithm}: more was released than reserved");
        }
    }
}

#[tokio::test]
async fn a_request_dropped_during_its_call_to_redis_releases_what_it_spends() {
    let server = RedisServer::start();
    let limiter = in_redis(&server, Algorithm::SlidingLog, Quota::per_hour(2)).await;
    let calls = Arc::new(AtomicUsize::new(0));
    let service = RateLimitLayer::new(limiter.clone(), |_: &http::request::Parts| "key".to_owned())
        .max_wait(HOUR)
        .layer(counting(&calls));
    assert!(limiter.check("key").await.unwrap().is_allowed());
    let before = server.calls("evalsha");
    server.freeze();
    let mut admitted = Box::pin(service.oneshot(get(&[])));
    let mut waiting = Box::pin(limiter.acquire("key", 2));
    for _ in 0..10 {
        assert!(
            poll_once(admitted.as_mut()).is_pending() && poll_once(waiting.as_mut()).is_pending()
        );
        // Until both are written: an idle connection reads before it writes.
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    drop((admitted, waiting));
    server.thaw();
    // Both are decided, perhaps in one call, and released, perhaps in one call.
    until(async || server.calls("evalsha") >= before + 2).await;
    until(async || limiter.peek("key").await.unwrap().remaining() == 1).await;
    assert_eq!(calls.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn a_future_dropped_before_the_first_poll_spends_nothing() {
    let limiter = in_memory(Algorithm::token_bucket(), Quota::per_hour(1));
    drop(limiter.try_acquire("key", 1, HOUR));
    drop(limiter.acquire("key", 1));
    assert_eq!(limiter.peek("key").await.unwrap().remaining(), 1);
}

#[test]
fn a_reservation_is_released_outside_of_the_runtime_and_when_it_shuts_down() {
    let server = RedisServer::start();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let quota = Quota::per_hour(1);
    let memory = in_memory(Algorithm::token_bucket(), quota);
    let redis = runtime.block_on(in_redis(&server, Algorithm::token_bucket(), quota));
    for limiter in [&memory, &redis] {
        let mut acquire = Box::pin(limiter.acquire("key", 1));
        assert!(runtime.block_on(acquire.as_mut()).unwrap().is_allowed());

        let mut acquire = Box::pin(limiter.acquire("key", 1));
        runtime.block_on(async {
            // The first poll may not send the call: an idle connection reads before it writes.
            until(async || {
                assert!(poll_once(acquire.as_mut()).is_pending());
                limiter.peek("key").await.unwrap().reset_after() > HOUR
            })
            .await;
            let _ = poll_once(acquire.as_mut());
        });
        drop(acquire);
        runtime.block_on(until(async || limiter.peek("key").await.unwrap().reset_after() <= HOUR));
    }

    runtime.spawn({
        let memory = memory.clone();
        async move { memory.acquire("key", 1).await }
    });
    runtime.block_on(until(async || memory.peek("key").await.unwrap().reset_after() > HOUR));
    drop(runtime);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let left = runtime.block_on(memory.peek("key")).unwrap().reset_after();
    assert!(left <= HOUR, "{left:?}");
}

#[tokio::test(start_paused = true)]
async fn acquire_from_a_full_leaky_bucket_waits_until_it_is_admitted() {
    let limiter = in_memory(Algorithm::LeakyBucket, Quota::per_second(10).burst(2));
    let start = Instant::now();
    let mut tasks = JoinSet::new();
    for _ in 0..20 {
        let limiter = limiter.clone();
        tasks.spawn(async move {
            assert!(limiter.acquire("key", 1).await.unwrap().is_allowed());
            start.elapsed()
        });
    }
    let mut departures = tasks.join_all().await;
    departures.sort_unstable();
    for pair in departures.windows(2) {
        let apart = pair[1] - pair[0];
        assert!(apart >= Duration::from_millis(99), "{departures:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_waiting_request_keeps_its_reservation_when_the_quota_is_changed() {
    for algorithm in ALGORITHMS {
        let limiter = in_memory(algorithm, Quota::per_second(2));
        drain(&limiter).await;
        let start = Instant::now();
        let mut waiting = pin!(limiter.acquire("key", 1));
        assert!(poll_once(waiting.as_mut()).is_pending());

        let faster = limiter.with_quota(Quota::per_second(100)).unwrap();
        let later = faster.reserve("key", 1, HOUR).await.unwrap().keep();
        let reserved = waiting.await.unwrap().delay();
        assert!(start.elapsed() - reserved <= Duration::from_millis(1), "{algorithm}");
        assert!(later.delay() <= reserved + SECOND, "{algorithm}: later requests are locked out");
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_dropped_after_a_quota_change_releases_no_more_than_it_reserved() {
    for algorithm in ALGORITHMS {
        for other in [Quota::per_second(100), Quota::per_minute(2), Quota::new(3, 5 * SECOND)] {
            let limiter = in_memory(algorithm, Quota::per_second(2));
            drain(&limiter).await;
            let waiting = limiter.reserve("key", 1, HOUR).await.unwrap().admitted().unwrap();
            assert!(!waiting.delay().is_zero(), "{algorithm}");

            let changed = limiter.with_quota(other).unwrap();
            let used = other.limit() - changed.peek("key").await.unwrap().remaining();
            let _ = changed.reserve("key", 1, HOUR).await.unwrap().keep();
            drop(waiting);
            let mut admitted = 0;
            while changed.try_acquire("key", 1, Duration::ZERO).await.unwrap().is_allowed() {
                admitted += 1;
            }
            assert!(admitted <= other.limit() + 1 - used.min(other.limit()), "{algorithm} {other}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn later_requests_wait_for_an_overdraft() {
    let overdraft = Algorithm::token_bucket().overdraft(5);
    let limiter = in_memory(overdraft, Quota::per_second(10));
    let start = Instant::now();
    let acquire = async |cost| {
        assert!(limiter.acquire("key", cost).await.unwrap().is_allowed());
        start.elapsed().as_millis()
    };
    assert_eq!(acquire(15).await, 0);
    assert_eq!(acquire(5).await, 500, "the wait is for the debt, not for the cost");
    assert_eq!(acquire(6).await, 1_100, "the wait is for units above the overdraft");
}

#[tokio::test(start_paused = true)]
async fn the_layer_delays_requests_instead_of_rejecting_them() {
    let calls = Arc::new(AtomicUsize::new(0));
    for algorithm in ALGORITHMS {
        let limiter = in_memory(algorithm, Quota::per_second(2));
        let service =
            RateLimitLayer::new(limiter, key::Global).max_wait(2 * SECOND).layer(counting(&calls));
        let start = Instant::now();
        let mut requests = JoinSet::new();
        for _ in 0..20 {
            let service = service.clone();
            requests.spawn(async move {
                let response = service.oneshot(get(&[])).await.unwrap();
                (response.status().is_success(), start.elapsed())
            });
        }
        let (admitted, rejected): (Vec<_>, Vec<_>) =
            requests.join_all().await.into_iter().partition(|(admitted, _)| *admitted);
        assert!(
            admitted.iter().any(|(_, after)| *after >= SECOND / 2),
            "{algorithm}: no request waited"
        );
        assert!(admitted.iter().all(|(_, after)| *after <= 2 * SECOND), "{algorithm}");
        assert!(
            !rejected.is_empty() && rejected.iter().all(|(_, after)| after.is_zero()),
            "{algorithm}"
        );
    }
}

fn call<S>(service: &S, user: &'static str) -> impl Future<Output = StatusCode> + Send + use<S>
where
    S: Service<Request<axum::body::Body>, Error = Infallible, Future: Send> + Clone + Send,
    S::Response: Status,
{
    let service = service.clone();
    async move { service.oneshot(get(&[("user", user)])).await.unwrap().code() }
}

trait Status: Send {
    fn code(&self) -> StatusCode;
}

impl<B: Send> Status for Response<B> {
    fn code(&self) -> StatusCode {
        self.status()
    }
}

#[tokio::test(start_paused = true)]
async fn the_number_of_waiting_requests_is_limited_and_others_are_rejected_immediately() {
    let limiter = in_memory(Algorithm::token_bucket(), Quota::per_second(1));
    let layer = RateLimitLayer::new(limiter, key::header("user"))
        .max_wait(HOUR)
        .max_waiting(5)
        .max_waiting_per_key(2);
    let service = layer.layer(counting(&Arc::default()));

    let mut waiting = vec![];
    for user in ["ada", "ben", "cyd"] {
        assert_eq!(call(&service, user).await, StatusCode::OK);
    }
    for (user, waits) in [
        ("ada", true),
        ("ada", true),
        ("ada", false), // the third with its key
        ("ben", true),
        ("ben", true),
        ("cyd", true),
        ("cyd", false), // the sixth in all
    ] {
        let mut request = Box::pin(call(&service, user));
        match poll_once(request.as_mut()) {
            Poll::Pending if waits => waiting.push(request),
            Poll::Ready(status) if !waits => assert_eq!(status, StatusCode::TOO_MANY_REQUESTS),
            polled => panic!("{user}: {polled:?}"),
        }
    }
    assert_eq!(call(&service, "dan").await, StatusCode::OK, "a request without a wait is rejected");
    // A request that is dropped leaves its slot to another one.
    drop(waiting.pop());
    let mut request = Box::pin(call(&service, "cyd"));
    assert!(poll_once(request.as_mut()).is_pending());
    waiting.push(request);
    for request in waiting {
        assert_eq!(request.await, StatusCode::OK);
    }
    assert_eq!(call(&service, "cyd").await, StatusCode::OK);
    let next = poll_once(pin!(call(&service, "cyd")));
    assert!(next.is_pending(), "requests that proceeded still hold slots");
}

#[tokio::test(start_paused = true)]
async fn a_waiting_request_holds_no_readiness_and_polls_the_service_again() {
    /// A service that must be polled ready before each call.
    #[derive(Clone, Default)]
    struct Once(bool, Arc<AtomicUsize>);
    impl Service<Request<axum::body::Body>> for Once {
        type Response = Response<()>;
        type Error = Infallible;
        type Future = std::future::Ready<Result<Response<()>, Infallible>>;
        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
            self.0 = true;
            Poll::Ready(Ok(()))
        }
        fn call(&mut self, _: Request<axum::body::Body>) -> Self::Future {
            assert!(std::mem::take(&mut self.0), "the service was not polled ready");
            self.1.fetch_add(1, Ordering::SeqCst);
            ready(Ok(Response::new(())))
        }
    }
    let inner = Once::default();
    let limiter = in_memory(Algorithm::token_bucket(), Quota::per_second(1));
    let service = RateLimitLayer::new(limiter, key::header("user"))
        .max_wait(HOUR)
        .layer(ConcurrencyLimit::new(inner.clone(), 1));
    let start = Instant::now();
    assert_eq!(call(&service, "ada").await, StatusCode::OK);
    let mut second = pin!(call(&service, "ada"));
    assert!(poll_once(second.as_mut()).is_pending());
    assert_eq!(call(&service, "ben").await, StatusCode::OK);
    assert_eq!(start.elapsed(), Duration::ZERO);
    assert_eq!(second.await, StatusCode::OK);
    assert_eq!(start.elapsed(), SECOND);
    assert_eq!(inner.1.load(Ordering::SeqCst), 3);
}

#[tokio::test(start_paused = true)]
async fn a_request_dropped_late_releases_only_units_that_still_count() {
    for algorithm in ALGORITHMS {
        let limiter = in_memory(algorithm, Quota::per_second(2));
        let gate = Arc::new(tokio::sync::Semaphore::new(0));
        let busy = tower::limit::GlobalConcurrencyLimitLayer::with_semaphore(gate);
        let never =
            service_fn(async |_: Request<axum::body::Body>| Ok::<_, Infallible>(Response::new(())));
        let key = |_: &http::request::Parts| "key".to_owned();
        let service =
            RateLimitLayer::new(limiter.clone(), key).max_wait(HOUR).layer(busy.layer(never));
        drain(&limiter).await;
        // The reservations come due, and then the requests wait for the service, which is never
        // ready.
        let mut stuck = JoinSet::new();
        for _ in 0..2 {
            let mut service = service.clone();
            stuck.spawn(async move { service.call(get(&[])).await.map(|_| ()) });
        }
        tokio::time::sleep(60 * SECOND).await;
        assert_eq!(stuck.len(), 2, "{algorithm}");
        let (mut admitted, wait) = (0, HOUR);
        while limiter.try_acquire("key", 1, Duration::ZERO).await.unwrap().is_allowed() {
            admitted += 1;
        }
        stuck.shutdown().await;
        let next = limiter.reserve("key", 1, wait).await.unwrap().keep();
        assert!(!next.delay().is_zero(), "{algorithm}: {} at once", admitted + 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_dropped_while_the_service_is_not_ready_releases_its_reservation() {
    let limiter = in_memory(Algorithm::SlidingLog, Quota::per_hour(1));
    let gate = Arc::new(tokio::sync::Semaphore::new(0));
    let busy = tower::limit::GlobalConcurrencyLimitLayer::with_semaphore(gate);
    let never =
        service_fn(async |_: Request<axum::body::Body>| Ok::<_, Infallible>(Response::new(())));
    let key = |_: &http::request::Parts| "key".to_owned();
    let mut service =
        RateLimitLayer::new(limiter.clone(), key).max_wait(HOUR).layer(busy.layer(never));
    assert!(limiter.check("key").await.unwrap().is_allowed());
    let request = service.call(get(&[]));
    assert!(
        tokio::time::timeout(HOUR + SECOND, request).await.is_err(),
        "the service became ready"
    );
    assert_eq!(limiter.peek("key").await.unwrap().remaining(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_service_that_fails_after_the_wait_costs_nothing() {
    #[derive(Clone)]
    struct Broken;
    impl Service<Request<axum::body::Body>> for Broken {
        type Response = Response<()>;
        type Error = std::io::Error;
        type Future = std::future::Ready<Result<Response<()>, std::io::Error>>;
        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), std::io::Error>> {
            Poll::Ready(Err(std::io::Error::other("broken")))
        }
        fn call(&mut self, _: Request<axum::body::Body>) -> Self::Future {
            panic!("the service is broken");
        }
    }
    let limiter = in_memory(Algorithm::SlidingLog, Quota::per_hour(1));
    let key = |_: &http::request::Parts| "key".to_owned();
    let layer = RateLimitLayer::new(limiter.clone(), key).max_wait(HOUR);
    assert!(limiter.check("key").await.unwrap().is_allowed());
    let mut service = layer.layer(Broken);
    let mut response = pin!(service.ready().await.unwrap().call(get(&[])));
    let error = response.as_mut().await.unwrap_err();
    assert_eq!(error.to_string(), "broken");
    assert_eq!(
        limiter.peek("key").await.unwrap().remaining(),
        1,
        "the failed request is not dropped yet"
    );
}

#[tokio::test]
async fn dropping_a_waiting_request_while_redis_is_down_fails_nothing() {
    let mut server = RedisServer::start();
    let store = support::redis_store(&server).await;
    let limiter = Limiter::new("default", store, Algorithm::token_bucket(), Quota::per_hour(1));
    assert!(limiter.check("key").await.unwrap().is_allowed());
    let waiting = start(&limiter, Some(&server)).await;
    server.kill();
    waiting.abort();
    assert!(waiting.await.unwrap_err().is_cancelled());
    until(async || limiter.peek("key").await.is_err()).await;
    server.restart();
    until(async || limiter.check("key").await.is_ok_and(|decision| decision.is_allowed())).await;
}

#[tokio::test]
async fn requests_that_wait_for_redis_are_in_the_queue() {
    let server = RedisServer::start();
    let limiter = in_redis(&server, Algorithm::SlidingLog, Quota::per_hour(1)).await;
    assert!(limiter.check("user").await.unwrap().is_allowed());
    let key = |_: &http::request::Parts| "user".to_owned();
    let layer = RateLimitLayer::new(limiter.clone(), key).max_wait(2 * HOUR).max_waiting(2);
    let service = layer.layer(counting(&Arc::default()));
    server.freeze();
    let mut requests: Vec<_> = (0..4).map(|_| Box::pin(call(&service, "ada"))).collect();
    for request in &mut requests {
        assert!(poll_once(request.as_mut()).is_pending());
    }
    server.thaw();
    for request in requests.split_off(2) {
        assert_eq!(request.await, StatusCode::TOO_MANY_REQUESTS, "both slots are taken");
    }
    let mut first = requests.swap_remove(0);
    let waits = tokio::time::timeout(Duration::from_millis(50), first.as_mut()).await;
    assert!(waits.is_err(), "its reservation is in an hour");
}

/// A layer in which one request per key may wait, around a service that is never ready.
fn busy_with_one_waiting(
    limiter: &Limiter,
) -> impl Service<Request<axum::body::Body>, Response: Status, Error = Infallible, Future: Send>
+ Clone
+ Send
+ use<> {
    let permits = Arc::new(tokio::sync::Semaphore::new(0));
    let busy = ConcurrencyLimit::with_semaphore(counting(&Arc::default()), permits);
    let key = |_: &http::request::Parts| "key".to_owned();
    RateLimitLayer::new(limiter, key).max_wait(2 * HOUR).max_waiting_per_key(1).layer(busy)
}

#[tokio::test]
async fn a_request_that_redis_admitted_leaves_the_queue_while_the_service_is_not_ready() {
    let server = RedisServer::start();
    let limiter = in_redis(&server, Algorithm::token_bucket(), Quota::per_hour(1)).await;
    let service = busy_with_one_waiting(&limiter);
    let mut admitted = Box::pin(call(&service, "ada"));
    until(async || {
        assert!(poll_once(admitted.as_mut()).is_pending(), "the service became ready");
        limiter.peek("key").await.unwrap().remaining() == 0
    })
    .await;
    assert!(poll_once(admitted.as_mut()).is_pending());

    let mut waits = Box::pin(call(&service, "ada"));
    until(async || {
        assert!(poll_once(waits.as_mut()).is_pending(), "the request is rejected");
        limiter.peek("key").await.unwrap().reset_after() > HOUR
    })
    .await;
    assert!(poll_once(waits.as_mut()).is_pending(), "the request has a reservation");
    let rejected = call(&service, "ada").await;
    assert_eq!(rejected, StatusCode::TOO_MANY_REQUESTS, "the only slot is taken");
}

#[tokio::test(start_paused = true)]
async fn a_request_that_has_waited_leaves_the_queue_while_the_service_is_not_ready() {
    let limiter = in_memory(Algorithm::token_bucket(), Quota::per_hour(1));
    let service = busy_with_one_waiting(&limiter);
    drain(&limiter).await;
    let mut first = Box::pin(call(&service, "ada"));
    assert!(poll_once(first.as_mut()).is_pending());
    let rejected = call(&service, "ada").await;
    assert_eq!(rejected, StatusCode::TOO_MANY_REQUESTS, "the only slot is taken");

    stop_for(HOUR).await;
    assert!(poll_once(first.as_mut()).is_pending(), "the service became ready");
    let mut second = Box::pin(call(&service, "ada"));
    assert!(poll_once(second.as_mut()).is_pending(), "the request is rejected");
}

#[tokio::test]
async fn a_release_takes_few_redis_commands_with_any_number_of_waiting_requests() {
    let server = RedisServer::start();
    for algorithm in ALGORITHMS {
        let quota = Quota::per_hour(400);
        let limiter = in_redis(&server, algorithm, quota).await;
        let spent =
            limiter.check("key").cost(if algorithm == Algorithm::LeakyBucket { 1 } else { 400 });
        assert!(spent.await.unwrap().is_allowed());
        let mut waiting = vec![];
        for _ in 0..300 {
            waiting.extend(limiter.reserve("key", 1, 24 * HOUR).await.unwrap().admitted());
        }
        redis::cmd("CONFIG").arg("RESETSTAT").exec(&mut server.connection()).unwrap();
        for turn in waiting {
            assert!(!turn.decision().delay().is_zero(), "{algorithm}");
            released(Some(&server), turn).await;
        }
        let stats: String =
            redis::cmd("INFO").arg("commandstats").query(&mut server.connection()).unwrap();
        let calls = |line: &str| -> Option<u64> {
            line.split_once("calls=")?.1.split(',').next()?.parse().ok()
        };
        let all: u64 = stats.lines().filter_map(calls).sum();
        let commands = all - server.calls("evalsha");
        assert!(commands >= 300, "{algorithm}: {commands} commands, so not all are counted");
        assert!(commands < 300 * 25, "{algorithm}: {commands} commands");
    }
}

#[tokio::test]
async fn a_request_that_calls_redis_holds_no_readiness() {
    let server = RedisServer::start();
    let limiter = in_redis(&server, Algorithm::token_bucket(), Quota::per_hour(1)).await;
    let permits = Arc::new(tokio::sync::Semaphore::new(1));
    let calls = Arc::new(AtomicUsize::new(0));
    let busy = ConcurrencyLimit::with_semaphore(counting(&calls), permits.clone());
    let service = RateLimitLayer::new(limiter, key::Global).layer(busy);
    server.freeze();
    let mut request = Box::pin(call(&service, "ada"));
    for _ in 0..10 {
        assert!(poll_once(request.as_mut()).is_pending());
        tokio::task::yield_now().await;
    }
    assert_eq!(permits.available_permits(), 1);
    server.thaw();
    assert_eq!(request.await, StatusCode::OK);
    assert_eq!(calls.load(Ordering::SeqCst), 1);
}

/// Advances the clock as if the process was stopped: all timers of this time have expired.
async fn stop_for(time: Duration) {
    tokio::time::advance(time).await;
    for _ in 0..1_000 {
        tokio::task::yield_now().await;
    }
}

const TENTH: Duration = Duration::from_millis(100);
const PER_SECOND: u32 = 10;

/// Requests that were made at once, and the time at which each one proceeded or was denied.
struct Queued(JoinSet<()>, Arc<Mutex<Vec<(bool, Duration)>>>);

impl Queued {
    /// Sends requests with `call`, which returns true if the request may proceed.
    async fn new<F>(requests: u32, call: impl Fn() -> F) -> Self
    where
        F: Future<Output = bool> + Send + 'static,
    {
        let (start, ends) = (Instant::now(), Arc::new(Mutex::new(vec![])));
        let mut tasks = JoinSet::new();
        for _ in 0..requests {
            let (request, ends) = (call(), ends.clone());
            tasks.spawn(async move {
                let proceeds = request.await;
                ends.lock().unwrap().push((proceeds, start.elapsed()));
            });
            tokio::task::yield_now().await;
        }
        Self(tasks, ends)
    }

    /// The number of requests that have proceeded, or were denied.
    fn count(&self, proceeds: bool) -> u32 {
        self.1.lock().unwrap().iter().filter(|end| end.0 == proceeds).count() as u32
    }

    async fn all(self) -> Vec<(bool, Duration)> {
        self.0.join_all().await;
        Arc::into_inner(self.1).unwrap().into_inner().unwrap()
    }
}

/// A quota for which a leaky bucket has room for all requests.
fn roomy(algorithm: Algorithm) -> Quota {
    let quota = Quota::per_second(PER_SECOND.into());
    if algorithm == Algorithm::LeakyBucket { quota.burst(100) } else { quota }
}

/// The number of requests that may proceed at one instant by the guarantee of the algorithm.
fn max_at_once(algorithm: Algorithm) -> u32 {
    if algorithm == Algorithm::LeakyBucket { 1 } else { PER_SECOND }
}

#[tokio::test(start_paused = true)]
async fn after_a_stop_no_more_requests_proceed_at_once_than_the_algorithm_allows() {
    for algorithm in ALGORITHMS {
        for by_layer in [false, true] {
            let limiter = in_memory(algorithm, roomy(algorithm));
            let calls = Arc::new(AtomicUsize::new(0));
            let layer = RateLimitLayer::new(limiter.clone(), key::Global).max_wait(60 * SECOND);
            let service = layer.layer(counting(&calls));
            let queued = Queued::new(60, || {
                let (limiter, service) = (limiter.clone(), service.clone());
                async move {
                    if by_layer {
                        return call(&service, "ada").await == StatusCode::OK;
                    }
                    limiter.try_acquire("key", 1, 60 * SECOND).await.unwrap().is_allowed()
                }
            });
            let queued = queued.await;
            tokio::time::sleep(SECOND / 2).await;
            let before = queued.count(true);
            stop_for(3 * SECOND).await;
            // The requests of this instant, and one that is late by less than the tolerance.
            let at_once = queued.count(true) - before;
            assert!(at_once <= max_at_once(algorithm) + 1, "{algorithm}: {at_once} at once");
            let ends = queued.all().await;
            assert!(
                ends.iter().all(|(proceeds, _)| *proceeds),
                "{algorithm}: a request was denied"
            );
            for (_, end) in &ends {
                let second = ends.iter().filter(|(_, time)| *end <= *time && *time < *end + SECOND);
                let max = (max_at_once(algorithm) + PER_SECOND + 1) as usize;
                assert!(second.count() <= max, "{algorithm}: {ends:?}");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_late_request_waits_for_the_rest_of_its_wait_budget_or_is_denied() {
    for algorithm in ALGORITHMS {
        let limiter = in_memory(algorithm, roomy(algorithm));
        let queued = Queued::new(50, || {
            let limiter = limiter.clone();
            async move { limiter.try_acquire("key", 1, 5 * SECOND).await.unwrap().is_allowed() }
        });
        let queued = queued.await;
        tokio::time::sleep(SECOND / 2).await;
        let before = queued.count(true);
        stop_for(6 * SECOND).await;
        // The wait budget of all is used up: the requests with room at this instant proceed.
        let at_once = queued.count(true) - before;
        assert!((1..=max_at_once(algorithm)).contains(&at_once), "{algorithm}: {at_once} at once");
        assert_eq!(
            queued.count(false) + queued.count(true),
            50,
            "{algorithm}: requests still wait"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_late_request_that_cannot_be_denied_waits_again() {
    let limiter = in_memory(Algorithm::LeakyBucket, roomy(Algorithm::LeakyBucket));
    let queued = Queued::new(50, || {
        let limiter = limiter.clone();
        async move { limiter.acquire("key", 1).await.unwrap().is_allowed() }
    });
    let queued = queued.await;
    stop_for(10 * SECOND).await;
    let mut ends = queued.all().await.into_iter().map(|(proceeds, end)| {
        assert!(proceeds);
        end
    });
    assert_eq!(ends.next(), Some(Duration::ZERO));
    let expected = (0..49).map(|tenth| 10 * SECOND + tenth * TENTH);
    assert!(ends.eq(expected), "not one by one");
}

#[tokio::test(start_paused = true)]
async fn the_lateness_of_a_request_is_a_setting_of_the_layer() {
    for (max_lateness, late, proceeds_at) in [
        (None, Duration::from_millis(50), 1_050),
        (None, Duration::from_millis(51), 3_000), // behind the next one
        (Some(Duration::from_millis(20)), Duration::from_millis(20), 1_020),
        (Some(Duration::from_millis(20)), Duration::from_millis(21), 3_000),
        (Some(Duration::MAX), 5 * SECOND, 6_000),
    ] {
        let limiter = in_memory(Algorithm::SlidingLog, Quota::per_second(1));
        let key = |_: &http::request::Parts| "key".to_owned();
        let mut layer = RateLimitLayer::new(limiter.clone(), key).max_wait(10 * SECOND);
        if let Some(max_lateness) = max_lateness {
            layer = layer.max_lateness(max_lateness);
        }
        let service = layer.layer(counting(&Arc::default()));
        let start = Instant::now();
        assert_eq!(call(&service, "ada").await, StatusCode::OK);
        let mut waits = Box::pin(call(&service, "ada"));
        assert!(poll_once(waits.as_mut()).is_pending());
        // A request that checks again comes after the next one.
        let _ = limiter.reserve("key", 1, HOUR).await.unwrap().keep();
        stop_for(SECOND + late).await;
        assert_eq!(waits.await, StatusCode::OK);
        assert_eq!(start.elapsed().as_millis(), proceeds_at, "{max_lateness:?} {late:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_is_late_a_second_time_proceeds() {
    let limiter = in_memory(Algorithm::LeakyBucket, Quota::per_second(1).burst(10));
    let queued = Queued::new(4, || {
        let limiter = limiter.clone();
        async move { limiter.try_acquire("key", 1, 60 * SECOND).await.unwrap().is_allowed() }
    });
    let queued = queued.await;
    stop_for(4 * SECOND).await;
    assert_eq!(
        queued.count(true),
        2,
        "the first request, and one of those that check again immediately"
    );
    stop_for(4 * SECOND).await;
    assert_eq!(queued.count(true), 4, "requests that are late again proceed");
}

#[tokio::test(start_paused = true)]
async fn a_late_request_releases_its_reservation_before_it_checks_again() {
    // Without the buckets, which have refilled the reserved units meanwhile.
    for algorithm in ALGORITHMS.into_iter().take(3) {
        let limiter = in_memory(algorithm, Quota::new(2, 10 * SECOND).burst(2));
        drain(&limiter).await;
        let wait = limiter.peek("key").await.unwrap().reset_after();
        let start = Instant::now();
        let mut waits = Box::pin(limiter.try_acquire("key", 1, HOUR));
        assert!(poll_once(waits.as_mut()).is_pending());
        stop_for(wait + SECOND).await;
        assert!(waits.await.unwrap().is_allowed());
        assert_eq!(start.elapsed(), wait + SECOND, "{algorithm}: there is room again");
        let used = 2 - limiter.peek("key").await.unwrap().remaining();
        assert_eq!(used, 1, "{algorithm}");
    }
}

#[tokio::test]
async fn a_request_dropped_while_its_late_reservation_is_released_releases_it_once() {
    let server = RedisServer::start();
    let limiter = in_redis(&server, Algorithm::SlidingLog, Quota::per_hour(2)).await;
    drain(&limiter).await;
    let first = async || {
        let turn = limiter.reserve("key", 1, 9 * HOUR).await.unwrap().admitted().unwrap();
        let delay = turn.decision().delay();
        released(Some(&server), turn).await;
        (delay.as_secs() + 60) / 300
    };
    let expected = first().await;
    let before = server.calls("evalsha");
    let mut late = Box::pin(limiter.try_acquire("key", 1, 9 * HOUR));
    tokio::select! {
        _ = late.as_mut() => panic!("the request must wait"),
        () = until(async || server.calls("evalsha") > before) => {}
    }
    let _ = limiter.peek("key").await.unwrap(); // the earlier reply has arrived, too
    assert!(poll_once(late.as_mut()).is_pending());
    let before = server.calls("evalsha");

    server.freeze();
    stop_process_for(2 * HOUR).await;
    assert!(poll_once(late.as_mut()).is_pending());
    drop(late);
    tokio::task::yield_now().await;
    server.thaw();
    until(async || server.calls("evalsha") > before).await;
    assert_eq!(first().await, expected);
    assert_eq!(
        limiter.peek("key").await.unwrap().remaining(),
        0,
        "the reservation is released twice"
    );
    assert_eq!(server.calls("evalsha"), before + 4, "the dropped request checked again");
}

/// Advances the clock as if the process, but not Redis, was stopped.
async fn stop_process_for(time: Duration) {
    tokio::time::pause();
    tokio::time::advance(time).await;
    tokio::time::resume();
}

#[tokio::test]
async fn late_requests_that_are_dropped_are_released_together() {
    const LATE: u64 = 50;
    let server = RedisServer::start();
    let limiter = in_redis(&server, Algorithm::SlidingLog, Quota::per_hour(2)).await;
    drain(&limiter).await;
    let first = async || {
        let turn = limiter.reserve("key", 1, 40 * HOUR).await.unwrap().admitted().unwrap();
        let delay = turn.decision().delay();
        released(Some(&server), turn).await;
        (delay.as_secs() + 60) / 300
    };
    let expected = first().await;
    let before = server.calls("evalsha");
    let mut late = vec![];
    for sent in 1..=LATE {
        late.push(Box::pin(limiter.try_acquire("key", 1, 30 * HOUR)));
        until(async || {
            assert!(late.iter_mut().all(|request| poll_once(request.as_mut()).is_pending()));
            server.calls("evalsha") == before + sent
        })
        .await;
    }
    let _ = limiter.peek("key").await.unwrap(); // the earlier replies have arrived, too
    assert!(late.iter_mut().all(|request| poll_once(request.as_mut()).is_pending()));
    let before = server.calls("evalsha");

    stop_process_for(40 * HOUR).await;
    assert!(late.iter_mut().all(|request| poll_once(request.as_mut()).is_pending()));
    drop(late);
    let mut peeks = 0;
    until(async || {
        peeks += 2;
        first().await == expected
    })
    .await;
    // A release of `first` can share the call of the others.
    let releases = server.calls("evalsha").saturating_sub(before + peeks);
    assert!(releases <= 4, "{releases} calls");
    assert_eq!(
        limiter.peek("key").await.unwrap().remaining(),
        0,
        "the reservation is released twice"
    );
}

#[tokio::test]
async fn a_late_request_does_not_queue_behind_its_own_reservation_in_redis() {
    let server = RedisServer::start();
    let limiter = in_redis(&server, Algorithm::SlidingLog, Quota::per_hour(1)).await;
    drain(&limiter).await;
    let before = server.calls("evalsha");
    let mut late = Box::pin(limiter.try_acquire("key", 1, 9 * HOUR));
    until(async || {
        assert!(poll_once(late.as_mut()).is_pending());
        server.calls("evalsha") > before
    })
    .await;
    let _ = limiter.peek("key").await.unwrap();
    assert!(poll_once(late.as_mut()).is_pending());
    let before = server.calls("evalsha");

    stop_process_for(2 * HOUR).await;
    until(async || {
        assert!(
            poll_once(late.as_mut()).is_pending(),
            "the reservation is not due by the clock of Redis"
        );
        server.calls("evalsha") >= before + 2
    })
    .await;
    let next = limiter.reserve("key", 1, 9 * HOUR).await.unwrap().keep();
    assert_eq!((next.delay() + HOUR / 2).as_secs() / 3_600, 2, "behind one reservation");
}

/// Runs callers that check again as soon as they are admitted, for a minute. Returns the number of
/// admissions and the longest wait.
async fn greedy(charges: impl Iterator<Item = Charge>) -> (usize, Duration) {
    let mut callers = JoinSet::new();
    let end = Instant::now() + 60 * SECOND;
    for charge in charges {
        callers.spawn(async move {
            let (mut admitted, mut longest) = (0, Duration::ZERO);
            loop {
                let called = Instant::now();
                let decision =
                    tokio::time::timeout_at(end, charge.check().max_wait(Duration::MAX)).await;
                longest = longest.max(called.elapsed());
                let Ok(decision) = decision else { return (admitted, longest) };
                assert!(decision.unwrap().is_allowed());
                admitted += 1;
            }
        });
    }
    let callers = callers.join_all().await;
    let longest = callers.iter().map(|(_, longest)| *longest).max().unwrap_or_default();
    (callers.into_iter().map(|(admitted, _)| admitted).sum(), longest)
}

#[tokio::test(start_paused = true)]
async fn callers_that_check_again_use_the_quota_in_order() {
    let quota = Quota::per_second(100);
    for (algorithm, quota) in [
        (Algorithm::LeakyBucket, quota.burst(2)),
        (Algorithm::token_bucket(), quota.burst(1)),
        (Algorithm::token_bucket(), quota),
        (Algorithm::sliding_window().buckets(4), quota),
        (Algorithm::SlidingLog, quota),
        (Algorithm::FixedWindow, quota),
    ] {
        let is_bucket = matches!(algorithm, Algorithm::LeakyBucket | Algorithm::TokenBucket { .. });
        for callers in [5, 50] {
            let store = MemoryStore::new();
            let all = Limiter::new("all", store.clone(), algorithm, quota);
            let fast = Quota::per_second(1_000);
            let own = Limiter::new("own", store, Algorithm::token_bucket(), fast);
            let charges = (0..callers).map(|caller: u64| match algorithm {
                Algorithm::LeakyBucket => Charge::new(&all, "key"),
                _ => Charge::new(&own, caller).and(Charge::new(&all, "key")),
            });
            let (admitted, longest) = greedy(charges).await;
            println!(
                "{algorithm} {quota}, {callers} callers: {admitted}, longest wait {longest:?}"
            );
            assert!(admitted > 6_000 * 95 / 100, "{algorithm} {quota}, {callers}: {admitted}");
            if is_bucket {
                // A hundredth of a second for each caller.
                let fair = Duration::from_millis(10) * callers as u32;
                assert!(longest <= fair + TENTH, "{algorithm} {quota}, {callers}: {longest:?}");
            }
        }
    }
}

/// Limits on two keys: one for each user, and a shared one that admits 10 per second, one at a
/// time.
fn user_and_all() -> impl Fn(&str) -> Charge + Clone + Send + Sync {
    let store = MemoryStore::new();
    let limiter = |name, limit, burst| {
        let quota = Quota::per_second(limit).burst(burst);
        Limiter::new(name, store.clone(), Algorithm::token_bucket(), quota)
    };
    let (own, all) = (limiter("own", 1_000, 1_000), limiter("all", PER_SECOND.into(), 1));
    move |user| Charge::new(&own, user).and(Charge::new(&all, "all"))
}

#[tokio::test(start_paused = true)]
async fn a_request_behind_others_that_are_dropped_uses_the_free_quota() {
    let full = in_memory(Algorithm::LeakyBucket, Quota::per_second(PER_SECOND.into()).burst(1));
    let two_keys = user_and_all();
    type Make = Box<dyn Fn(&str) -> Charge>;
    let charges: [(&str, Make); 2] = [
        ("leaky bucket", Box::new(move |_| Charge::new(&full, "key"))),
        ("two keys", Box::new(two_keys)),
    ];
    for (case, charge) in charges {
        let start = Instant::now();
        let queued = Queued::new(200, || {
            let charge = charge("ada");
            async move {
                tokio::time::timeout(SECOND, charge.check().max_wait(Duration::MAX)).await.is_ok()
            }
        });
        let queued = queued.await;
        let last = charge("ben");
        let last = tokio::spawn(async move {
            assert!(last.check().max_wait(Duration::MAX).await.unwrap().is_allowed());
            start.elapsed()
        });
        let served = queued.all().await.iter().filter(|(served, _)| *served).count();
        assert!((10..=11).contains(&served), "{case}: {served}");
        let after = last.await.unwrap();
        assert!(after <= SECOND + TENTH, "{case}: the request sleeps for {after:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_behind_clients_that_hang_up_uses_the_free_quota() {
    let charge = user_and_all();
    let rule =
        move |head: &http::request::Parts| Ok(charge(head.headers["user"].to_str().unwrap()));
    let layer = RateLimitLayer::by_rule(rule).max_wait(20 * SECOND).max_waiting_per_key(1_000);
    let service = layer.layer(counting(&Arc::default()));
    let start = Instant::now();
    let mut clients = JoinSet::new();
    for _ in 0..150 {
        clients.spawn(call(&service, "ada"));
        tokio::task::yield_now().await;
    }
    let honest = tokio::spawn(call(&service, "ben"));
    tokio::time::sleep(SECOND).await;
    clients.shutdown().await;
    assert_eq!(honest.await.unwrap(), StatusCode::OK);
    assert!(start.elapsed() <= SECOND + 2 * TENTH, "the request sleeps for {:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_request_that_would_wait_too_long_is_denied_immediately() {
    let charge = user_and_all();
    let queued = Queued::new(200, || {
        let charge = charge("ada");
        async move { charge.check().max_wait(SECOND).await.unwrap().is_allowed() }
    });
    let ends = queued.await.all().await;
    let (served, denied): (Vec<_>, Vec<_>) = ends.into_iter().partition(|(served, _)| *served);
    assert_eq!(served.len(), 11, "now, and one in each tenth of the second");
    // If others wait, a request sleeps for a moment before it checks.
    let latest = denied.iter().map(|(_, end)| *end).max();
    assert!(
        latest <= Some(Duration::from_millis(1)),
        "{latest:?}: a request sleeps before it is denied"
    );
}

#[tokio::test(start_paused = true)]
async fn a_client_that_waits_for_its_own_limit_does_not_delay_other_clients() {
    let store = MemoryStore::new();
    let limiter = |name, quota| Limiter::new(name, store.clone(), Algorithm::token_bucket(), quota);
    let own = limiter("own", Quota::per_hour(10));
    let all = limiter("all", Quota::per_second(PER_SECOND.into()).burst(1));
    let charge = |user| Charge::new(&own, user).and(Charge::new(&all, "all"));
    let start = Instant::now();
    let greedy = Queued::new(100, || {
        let charge = charge("ada");
        async move { charge.check().max_wait(2 * SECOND).await.unwrap().is_allowed() }
    });
    let greedy = greedy.await;
    tokio::time::sleep(Duration::from_millis(2)).await; // all of them have checked
    assert!(charge("ben").check().max_wait(2 * SECOND).await.unwrap().is_allowed());
    assert!(start.elapsed() <= SECOND + 2 * TENTH, "{:?}", start.elapsed());
    let ends = greedy.all().await;
    assert_eq!(ends.iter().filter(|(served, _)| *served).count(), 10);
}

#[tokio::test(start_paused = true)]
async fn a_charge_of_cost_0_is_an_error_also_while_other_requests_wait() {
    let charge = user_and_all();
    for waiting in 0..2 {
        let queued = Queued::new(2 * waiting, || {
            let charge = charge("ada");
            async move { charge.check().max_wait(Duration::MAX).await.unwrap().is_allowed() }
        });
        let _queued = queued.await;
        let zero_cost = charge("ben").of("own").cost(0);
        assert!(matches!(
            zero_cost.check().max_wait(Duration::MAX).await,
            Err(tower_ratelimit::Error::ZeroCost)
        ));
        let other =
            Charge::exempt().and(charge("ben").of("own").cost(0)).and(charge("cyd").of("all"));
        assert!(matches!(
            other.check().max_wait(Duration::MAX).await,
            Err(tower_ratelimit::Error::ZeroCost)
        ));
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_whose_wait_ends_in_the_queue_is_denied() {
    let charge = user_and_all();
    assert!(charge("ada").check().await.unwrap().is_allowed());
    let (start, ada) = (Instant::now(), charge("ada"));
    let mut first = Box::pin(ada.check().max_wait(Duration::MAX));
    assert!(poll_once(first.as_mut()).is_pending());
    let second = charge("ben");
    let second = tokio::spawn(async move { second.check().max_wait(3 * TENTH).await.unwrap() });
    // Other processes are faster every time.
    for _ in 0..5 {
        tokio::task::yield_now().await;
        tokio::time::sleep(TENTH).await;
        assert!(charge("eve").check().await.unwrap().is_allowed());
        assert!(poll_once(first.as_mut()).is_pending());
    }
    let denied = second.await.unwrap();
    assert!(!denied.is_allowed() && denied.limiter() == "all");
    assert!(first.await.unwrap().is_allowed());
    assert!(start.elapsed() >= 6 * TENTH);
}

#[tokio::test(start_paused = true)]
async fn requests_that_check_again_keep_their_order_at_any_cost() {
    let store = MemoryStore::new();
    let limiter = |name, quota| Limiter::new(name, store.clone(), Algorithm::token_bucket(), quota);
    let own = limiter("own", Quota::per_second(1_000));
    let all = limiter("all", Quota::per_second(PER_SECOND.into()));
    let charge = move |number: u32| {
        let all = Charge::new(&all, "all").cost((1 + number * 7 % 5).into());
        Charge::new(&own, u64::from(number)).and(all)
    };
    let rule = {
        let charge = charge.clone();
        move |head: &http::request::Parts| {
            Ok(charge(head.headers["user"].to_str().unwrap().parse().unwrap()))
        }
    };
    let layer = RateLimitLayer::by_rule(rule).max_wait(HOUR).layer(counting(&Arc::default()));
    for by_layer in [false, true] {
        let (order, mut tasks) = (Arc::new(Mutex::new(vec![])), JoinSet::new());
        // Adds requests one by one, once others wait.
        for number in 0..50 {
            let (order, charge, layer) = (order.clone(), charge(number), layer.clone());
            tasks.spawn(async move {
                if by_layer {
                    let request = get(&[("user", &number.to_string())]);
                    assert_eq!(layer.oneshot(request).await.unwrap().status(), StatusCode::OK);
                } else {
                    assert!(charge.check().max_wait(Duration::MAX).await.unwrap().is_allowed());
                }
                order.lock().unwrap().push(number);
            });
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        tasks.join_all().await;
        let order = order.lock().unwrap();
        assert_eq!(order.len(), 50);
        // Before there is a queue, a cheap request may find enough units.
        assert!(order[6..].is_sorted(), "by the layer {by_layer}: {order:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn no_waiting_request_is_forgotten_while_many_threads_check_and_drop() {
    let store = MemoryStore::new();
    let limiter = |name, limit| {
        let quota = Quota::per_second(limit).burst(20);
        Limiter::new(name, store.clone(), Algorithm::token_bucket(), quota)
    };
    let (own, all) = (limiter("own", 2_000), limiter("all", 10_000));
    let callers: JoinSet<_> = (0..50_u64)
        .map(|caller| {
            let cost = 1 + caller % 3;
            let all = Charge::new(&all, "all").cost(cost);
            let charge = Charge::new(&own, caller % 5).and(all);
            async move {
                for round in 0..30 {
                    let some_time = Duration::from_micros((caller * 7 + round * 331) % 3_000);
                    let _ = tokio::time::timeout(some_time, charge.check().max_wait(Duration::MAX))
                        .await;
                }
                assert!(charge.check().max_wait(Duration::MAX).await.unwrap().is_allowed());
            }
        })
        .collect();
    let all_served = tokio::time::timeout(60 * SECOND, callers.join_all()).await;
    assert!(all_served.is_ok(), "a request still waits");
}

#[tokio::test]
async fn requests_that_check_again_over_redis_call_it_about_twice() {
    let server = RedisServer::start();
    let store = support::redis_store(&server).await;
    let limiter = |name, quota| Limiter::new(name, store.clone(), Algorithm::token_bucket(), quota);
    let own = limiter("own", Quota::per_second(1_000));
    let all = limiter("all", Quota::per_second(200).burst(20));
    let charge = Charge::new(&own, "ada").and(Charge::new(&all, "all"));
    assert!(charge.check().await.unwrap().is_allowed());
    let before = server.calls("evalsha");
    let waiting: JoinSet<_> =
        (0..100)
            .map(|_| {
                let charge = charge.clone();
                async move {
                    assert!(charge.check().max_wait(Duration::MAX).await.unwrap().is_allowed())
                }
            })
            .collect();
    waiting.join_all().await;
    let calls = server.calls("evalsha") - before;
    assert!(calls <= 250, "{calls} calls for 100 requests");
}

#[tokio::test(start_paused = true)]
async fn the_denial_at_the_end_of_a_wait_describes_that_instant() {
    let limiter = in_memory(Algorithm::token_bucket(), Quota::per_minute(1).burst(2));
    let _held = limiter.hold("key", 1).await.unwrap().admitted().unwrap();
    assert!(limiter.check("key").await.unwrap().is_allowed());
    let start = Instant::now();
    let hold = async |wait| {
        let admission = limiter.hold("key", 1).max_wait(wait).await.unwrap();
        admission.into_result().unwrap_err()
    };
    let denied = hold(10 * SECOND).await;
    assert_eq!(start.elapsed(), 10 * SECOND);
    let now = hold(Duration::ZERO).await;
    assert_eq!(now.retry_after(), Some(50 * SECOND));
    let of = |it: &Decision| (it.retry_after(), it.remaining(), it.reset_after());
    assert_eq!(of(&denied), of(&now));
}

#[tokio::test(start_paused = true)]
async fn a_request_without_room_to_wait_does_not_overtake_those_that_wait() {
    let limiter =
        Limiter::new("places", MemoryStore::new(), Algorithm::concurrency(), Quota::concurrent(2));
    let users = key::header("user");
    let charge = Charge::new(&limiter, users.key("ada"));
    let _place = charge.hold().await.unwrap().admitted().unwrap();
    for max in [0, 1] {
        let layer = RateLimitLayer::new(limiter.clone(), users.clone())
            .max_wait(SECOND)
            .max_waiting_per_key(max);
        let service = layer.layer(counting(&Arc::default()));
        let large = charge.clone().cost(2);
        let mut large = Box::pin(large.hold().max_wait(HOUR));
        assert!(poll_once(large.as_mut()).is_pending());
        let mut inside = Box::pin(call(&service, "ada"));
        assert_eq!(poll_once(inside.as_mut()).is_pending(), max == 1, "it takes the slot");
        assert_eq!(call(&service, "ada").await, StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(call(&service, "ben").await, StatusCode::OK, "of another line");
        drop((inside, large));
        assert_eq!(call(&service, "ada").await, StatusCode::OK, "no other waits");
    }
}

#[derive(Default)]
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[tokio::test(start_paused = true)]
async fn a_change_that_returns_no_units_calls_no_request() {
    let limit = |quota| {
        let text = format!("algorithm = 'sliding-log'\nquota = '{quota}'");
        toml::from_str::<Limit>(&text).unwrap()
    };
    let limiter = limit("10/day").limiter("tokens", MemoryStore::new()).unwrap();
    let _held = limiter.hold("key", 10).await.unwrap().admitted().unwrap();
    let mut waiting = Box::pin(limiter.hold("key", 1).max_wait(HOUR));
    let woken = Arc::new(Woken::default());
    let waker = Waker::from(woken.clone());
    assert!(waiting.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    limiter.spend("key", 1).await.unwrap();
    Charge::new(&limiter, "key").spend().await.unwrap();
    limiter.block("key", SECOND).await.unwrap();
    limit("10/day").apply_to(&limiter);
    assert!(!woken.0.load(Ordering::Relaxed));
    limit("12/day").apply_to(&limiter);
    assert!(woken.0.load(Ordering::Relaxed));
}
