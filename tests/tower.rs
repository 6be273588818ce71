//! The layer keeps the contract of `tower::Service`.

mod support;

use std::{
    convert::Infallible,
    future::ready,
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use http::{Request, Response, StatusCode, request::Parts};
use support::{counting, get, in_memory};
use tokio::time::Instant;
use tower::{
    BoxError, Layer, Service, ServiceBuilder, ServiceExt, limit::ConcurrencyLimit, service_fn,
};
use tower_ratelimit::{
    Algorithm, Limiter, MemoryStore, MissingKey, Quota, RateLimit, RateLimitLayer, Rejection, key,
};
use tower_test::{assert_request_eq, mock};

fn strings(limiter: Limiter) -> RateLimitLayer<tower_ratelimit::Custom<String, String>> {
    RateLimitLayer::custom(
        limiter,
        |name: &String| name.clone(),
        |rejection, name: &String| match rejection {
            Rejection::Denied(_) => format!("{name} was denied"),
            other => panic!("{other:?}"),
        },
    )
}

#[tokio::test]
async fn a_service_of_strings_is_limited() {
    let limiter = in_memory(Quota::per_hour(1));
    let shout = strings(limiter)
        .layer(service_fn(async |name: String| Ok::<_, Infallible>(name.to_uppercase())));
    let ask = |name: &str| shout.clone().oneshot(name.to_owned());
    assert_eq!(ask("ada").await.unwrap(), "ADA");
    assert_eq!(ask("ada").await.unwrap(), "ada was denied");
    assert_eq!(ask("ben").await.unwrap(), "BEN");
}

#[tokio::test]
async fn the_instance_that_was_polled_ready_is_called() {
    // The mock panics if an instance is called that was not ready.
    let limiter = in_memory(Quota::per_hour(2));
    let (mut service, mut inner) = mock::spawn_layer::<String, String, _>(strings(limiter));
    for _ in 0..2 {
        inner.allow(1);
        assert!(service.poll_ready().is_ready());
        let response = tokio::spawn(service.call("ada".to_owned()));
        assert_request_eq!(inner, "ada".to_owned()).send_response("hello".to_owned());
        assert_eq!(response.await.unwrap().unwrap(), "hello");
    }
    assert!(service.poll_ready().is_pending(), "the inner service is not ready");
}

#[tokio::test]
async fn the_inner_service_is_not_called_when_denied() {
    let calls = Arc::new(AtomicUsize::new(0));
    let layer = RateLimitLayer::new(in_memory(Quota::per_hour(2)), key::Global);
    let mut service = ServiceBuilder::new()
        .layer(layer)
        .layer(tower::buffer::BufferLayer::new(16))
        .service(counting(&calls));
    let mut denied = 0;
    for _ in 0..10 {
        let response = service.ready().await.unwrap().call(get(&[])).await.unwrap();
        denied += usize::from(response.status() == StatusCode::TOO_MANY_REQUESTS);
    }
    assert_eq!((calls.load(Ordering::SeqCst), denied), (2, 8));
}

#[tokio::test]
async fn a_denied_request_gives_the_readiness_back() {
    let calls = Arc::new(AtomicUsize::new(0));
    let layer = RateLimitLayer::new(in_memory(Quota::per_hour(1)), key::Header::new("user"));
    let mut service = layer.layer(ConcurrencyLimit::new(counting(&calls), 1));
    for user in ["ada", "ada", "ada", "ben"] {
        let ready = service.ready().await.unwrap();
        let _ = ready.call(get(&[("user", user)])).await.unwrap();
    }
    assert_eq!(calls.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn dropping_the_response_before_it_is_polled_spends_nothing() {
    let limiter = in_memory(Quota::per_hour(1));
    let calls = Arc::new(AtomicUsize::new(0));
    let layer = RateLimitLayer::new(limiter.clone(), key::Global);
    let mut service = layer.layer(counting(&calls));
    drop(service.ready().await.unwrap().call(get(&[])));
    drop(limiter.check("global"));
    assert_eq!(limiter.peek("global").await.unwrap().remaining(), 1);
    assert_eq!(calls.load(Ordering::SeqCst), 0);
}

fn shaper() -> Limiter {
    Limiter::new(MemoryStore::new(), Algorithm::LeakyBucket, Quota::per_second(1).burst(10))
}

#[tokio::test(start_paused = true)]
async fn a_request_that_waits_holds_no_readiness() {
    let calls = Arc::new(AtomicUsize::new(0));
    let layer = RateLimitLayer::new(shaper(), key::Header::new("user"));
    let service = layer.layer(ConcurrencyLimit::new(counting(&calls), 1));
    let start = Instant::now();
    let ask = |user: &'static str| {
        let mut service = service.clone();
        async move {
            let response = service.ready().await.unwrap().call(get(&[("user", user)])).await;
            assert_eq!(response.unwrap().status(), StatusCode::OK);
            start.elapsed()
        }
    };
    assert_eq!(ask("ada").await, Duration::ZERO);
    let mut second = pin!(ask("ada"));
    assert!(poll_once(second.as_mut()).is_pending(), "the second of ada waits for its turn");
    assert_eq!(ask("ben").await, Duration::ZERO);
    assert_eq!(second.await, Duration::from_secs(1));
    assert_eq!(calls.load(Ordering::SeqCst), 3);
}

fn poll_once<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

#[tokio::test(start_paused = true)]
async fn a_leaky_bucket_lets_requests_go_one_by_one() {
    let calls = Arc::new(AtomicUsize::new(0));
    let service = RateLimitLayer::new(shaper(), key::Global).layer(counting(&calls));
    let start = Instant::now();
    let mut requests = tokio::task::JoinSet::new();
    for _ in 0..12 {
        let service = service.clone();
        requests.spawn(async move {
            let response = service.oneshot(get(&[])).await.unwrap();
            (response.status().as_u16(), start.elapsed().as_secs())
        });
    }
    let mut answers = requests.join_all().await;
    answers.sort_unstable();
    let mut expected: Vec<_> = (0..10).map(|second| (200, second)).collect();
    expected.extend([(429, 0); 2]);
    assert_eq!(answers, expected);
}

#[derive(Debug, PartialEq)]
struct OwnError;

#[tokio::test]
async fn the_error_of_the_service_is_untouched() {
    let layer = RateLimitLayer::new(in_memory(Quota::per_hour(1)), key::Global);
    let service = layer.layer(service_fn(|_: Request<()>| ready(Err::<Response<()>, _>(OwnError))));
    let error = service.clone().oneshot(Request::new(())).await.unwrap_err();
    assert_eq!(error, OwnError);
    let refused = service.oneshot(Request::new(())).await.unwrap();
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
}

#[tokio::test]
async fn any_body_will_do() {
    /// Neither `Default`, nor made from anything, nor a body at all.
    struct Opaque(#[allow(dead_code)] std::rc::Rc<()>);
    let layer = RateLimitLayer::new(in_memory(Quota::per_hour(1)), key::Global);
    let service = layer.layer(service_fn(|request: Request<Opaque>| {
        ready(Ok::<_, Infallible>(Response::new(request.into_body())))
    }));
    for status in [StatusCode::OK, StatusCode::TOO_MANY_REQUESTS] {
        let request = Request::new(Opaque(Default::default()));
        assert_eq!(service.clone().oneshot(request).await.unwrap().status(), status);
    }
}

/// The type stays the same, whatever is switched on.
fn nameable() -> RateLimitLayer {
    RateLimitLayer::new(in_memory(Quota::per_second(10)), |head: &Parts| head.uri.to_string())
        .cost(|_: &Parts| 2)
        .missing_key(MissingKey::Share)
        .headers([])
        .extensions(false)
        .map_refusal(|_, _, response| response)
}

#[test]
fn what_users_store_is_send_and_sync() {
    fn check<T: Send + Sync + Clone + 'static>(_: &T) {}
    fn check_future<T: Send>(_: &T) {}
    let layer = nameable();
    check(&layer);
    let service: RateLimit<_> = layer.layer(counting(&Arc::default()));
    check(&service);
    check_future(&service.clone().oneshot(get(&[])));
    check(&in_memory(Quota::per_second(1)));
    let _ = tower::util::BoxCloneSyncService::new(service.map_err(BoxError::from));
}
