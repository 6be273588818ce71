//! The contract of `tower::Service`, and other layers inside and outside.

use std::{
    convert::Infallible,
    future::ready,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::{Pin, pin},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use axum::body::Body;
use http::{Request, Response, StatusCode, request::Parts};
use tokio::time::Instant;
use tower::{
    BoxError, Layer, Service, ServiceBuilder, ServiceExt,
    buffer::Buffer,
    limit::ConcurrencyLimit,
    load_shed::LoadShed,
    service_fn,
    util::{BoxCloneSyncService, BoxService},
};
use tower_ratelimit::{
    Algorithm, Charge, Limiter, MemoryStore, Quota, RateLimitLayer, key,
    layer::{MissingKey, RateLimit, Rejection},
};
use tower_test::{assert_request_eq, mock};

use crate::support::{counting, get, in_memory};

fn strings(limiter: Limiter) -> RateLimitLayer<tower_ratelimit::layer::Custom<String, String>> {
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
    let call = |name: &str| shout.clone().oneshot(name.to_owned());
    assert_eq!(call("ada").await.unwrap(), "ADA");
    assert_eq!(call("ada").await.unwrap(), "ada was denied");
    assert_eq!(call("ben").await.unwrap(), "BEN");
}

#[tokio::test]
async fn the_instance_that_was_polled_ready_is_called() {
    // The mock panics if it is called without having been polled ready.
    let limiter = in_memory(Quota::per_hour(2));
    let (mut service, mut inner) = mock::spawn_layer::<String, String, _>(strings(limiter));
    inner.allow(0);
    for _ in 0..2 {
        assert!(
            service.poll_ready().is_ready(),
            "the layer does not poll the service before a call"
        );
        let mut response = Box::pin(service.call("ada".to_owned()));
        assert!(poll_once(response.as_mut()).is_pending());
        inner.allow(1);
        let response = tokio::spawn(response);
        assert_request_eq!(inner, "ada".to_owned()).send_response("hello".to_owned());
        assert_eq!(response.await.unwrap().unwrap(), "hello");
    }
    assert!(service.poll_ready().is_ready(), "the layer is ready although the service is not");
    assert_eq!(service.call("ada".to_owned()).await.unwrap(), "ada was denied");
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
async fn a_service_that_is_not_clone_is_limited_with_a_buffer_inside() {
    let calls = Arc::new(AtomicUsize::new(0));
    let boxed = BoxService::new(counting(&calls));
    let service = ServiceBuilder::new()
        .layer(RateLimitLayer::new(in_memory(Quota::per_hour(2)), key::header("user")))
        .layer(tower::buffer::BufferLayer::new(16))
        .service(boxed);
    let mut statuses = vec![];
    for user in ["ada", "ada", "ada", "ben"] {
        let response = service.clone().oneshot(get(&[("user", user)])).await.unwrap();
        statuses.push(response.status().as_u16());
    }
    assert_eq!((statuses, calls.load(Ordering::SeqCst)), (vec![200, 200, 429, 200], 3));
}

#[tokio::test]
async fn a_denied_request_releases_the_readiness() {
    let calls = Arc::new(AtomicUsize::new(0));
    let layer = RateLimitLayer::new(in_memory(Quota::per_hour(1)), key::header("user"));
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
    Limiter::new(
        "default",
        MemoryStore::new(),
        Algorithm::LeakyBucket,
        Quota::per_second(1).burst(10),
    )
}

#[tokio::test(start_paused = true)]
async fn a_request_that_waits_holds_no_readiness() {
    let calls = Arc::new(AtomicUsize::new(0));
    let layer = RateLimitLayer::new(shaper(), key::header("user"));
    let service = layer.layer(ConcurrencyLimit::new(counting(&calls), 1));
    let start = Instant::now();
    let call = |user: &'static str| {
        let mut service = service.clone();
        async move {
            let response = service.ready().await.unwrap().call(get(&[("user", user)])).await;
            assert_eq!(response.unwrap().status(), StatusCode::OK);
            start.elapsed()
        }
    };
    assert_eq!(call("ada").await, Duration::ZERO);
    let mut second = pin!(call("ada"));
    assert!(poll_once(second.as_mut()).is_pending(), "the second request of ada waits");
    assert_eq!(call("ben").await, Duration::ZERO);
    assert_eq!(second.await, Duration::from_secs(1));
    assert_eq!(calls.load(Ordering::SeqCst), 3);
}

fn poll_once<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

#[tokio::test(start_paused = true)]
async fn a_leaky_bucket_releases_requests_one_by_one() {
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

/// A service that takes a second for each request.
fn slow() -> BoxCloneSyncService<String, String, BoxError> {
    let slow = service_fn(async |name: String| {
        tokio::time::sleep(SECOND).await;
        Ok::<_, BoxError>(name.to_uppercase())
    });
    BoxCloneSyncService::new(slow)
}

/// The responses to concurrent requests in the order of their arrival, with the seconds that they
/// took.
async fn answers<S>(service: S, requests: usize) -> Vec<(String, u64)>
where
    S: Service<String, Response = String, Error = BoxError, Future: Send> + Clone + Send + 'static,
{
    let (start, order) = (Instant::now(), Arc::new(Mutex::new(vec![])));
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..requests {
        let (service, order) = (service.clone(), order.clone());
        tasks.spawn(async move {
            let answer = service.oneshot("ada".to_owned()).await;
            let answer = answer.unwrap_or_else(|error| error.to_string());
            order.lock().unwrap().push((answer, start.elapsed().as_secs()));
        });
        tokio::task::yield_now().await;
    }
    tasks.join_all().await;
    Arc::into_inner(order).unwrap().into_inner().unwrap()
}

fn as_text(answers: &[(String, u64)]) -> Vec<(&str, u64)> {
    answers.iter().map(|(answer, second)| (answer.as_str(), *second)).collect()
}

const SECOND: Duration = Duration::from_secs(1);
const DENIED: (&str, u64) = ("ada was denied", 0);

fn three_per_hour() -> RateLimitLayer<tower_ratelimit::layer::Custom<String, String>> {
    strings(in_memory(Quota::per_hour(3)))
}

#[tokio::test(start_paused = true)]
async fn with_a_concurrency_limit_inside_rejections_are_immediate_and_others_wait() {
    let service = three_per_hour().layer(ConcurrencyLimit::new(slow(), 1));
    let answers = answers(service, 1_003).await;
    let (denied, admitted) = answers.split_at(1_000);
    assert!(as_text(denied).iter().all(|answer| *answer == DENIED), "{denied:?}");
    assert_eq!(as_text(admitted), [("ADA", 1), ("ADA", 2), ("ADA", 3)]);
}

#[tokio::test(start_paused = true)]
async fn with_a_concurrency_limit_outside_rejections_wait_for_a_permit() {
    let service = ConcurrencyLimit::new(three_per_hour().layer(slow()), 1);
    let answers = answers(service, 5).await;
    let denied = ("ada was denied", 3);
    assert_eq!(as_text(&answers), [("ADA", 1), ("ADA", 2), ("ADA", 3), denied, denied]);
}

#[tokio::test(start_paused = true)]
async fn load_shed_inside_sheds_admitted_requests_which_stay_charged() {
    let limiter = in_memory(Quota::per_hour(3));
    let service = strings(limiter.clone()).layer(LoadShed::new(ConcurrencyLimit::new(slow(), 1)));
    let answers = answers(service, 4).await;
    let shed = ("service overloaded", 0);
    assert_eq!(as_text(&answers), [shed, shed, DENIED, ("ADA", 1)]);
    assert_eq!(limiter.peek("ada").await.unwrap().remaining(), 0);
}

#[tokio::test(start_paused = true)]
async fn load_shed_outside_never_sheds() {
    let layer = three_per_hour();
    let service = LoadShed::new(layer.layer(ConcurrencyLimit::new(slow(), 1)));
    let answers = answers(service, 4).await;
    assert_eq!(as_text(&answers), [DENIED, ("ADA", 1), ("ADA", 2), ("ADA", 3)]);
}

#[tokio::test(start_paused = true)]
async fn with_a_full_buffer_inside_rejections_are_immediate() {
    let service = three_per_hour().layer(Buffer::new(ConcurrencyLimit::new(slow(), 1), 1));
    let answers = answers(service, 5).await;
    assert_eq!(as_text(&answers), [DENIED, DENIED, ("ADA", 1), ("ADA", 2), ("ADA", 3)]);
}

#[tokio::test(start_paused = true)]
async fn a_buffer_outside_never_fills() {
    let layer = three_per_hour();
    let service = Buffer::new(layer.layer(ConcurrencyLimit::new(slow(), 1)), 1);
    let answers = answers(service, 5).await;
    assert_eq!(as_text(&answers), [DENIED, DENIED, ("ADA", 1), ("ADA", 2), ("ADA", 3)]);
}

/// What a service does instead of becoming ready.
#[derive(Clone, Copy, PartialEq)]
enum Unready {
    Waits,
    Fails,
    Panics,
    WaitsAndPanics,
}

/// The charge of a request is released if the request is dropped, or fails, before the service is
/// ready, on each path through the layer.
async fn costs_nothing_before_the_service_is_ready(unready: Unready) {
    #[derive(Clone)]
    struct NeverReady(Unready, bool);
    impl Service<Request<Body>> for NeverReady {
        type Response = Response<()>;
        type Error = OwnError;
        type Future = std::future::Ready<Result<Response<()>, OwnError>>;
        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), OwnError>> {
            let was_polled = std::mem::replace(&mut self.1, true);
            match self.0 {
                Unready::Fails => Poll::Ready(Err(OwnError)),
                Unready::Panics => panic!("as intended"),
                Unready::WaitsAndPanics if was_polled => panic!("as intended"),
                Unready::Waits | Unready::WaitsAndPanics => Poll::Pending,
            }
        }
        fn call(&mut self, _: Request<Body>) -> Self::Future {
            panic!("the service is not ready");
        }
    }
    let limiters = || {
        let store = MemoryStore::new();
        ["one", "two"].map(|name| {
            let quota = Quota::per_hour(1);
            Limiter::new(name, store.clone(), Algorithm::token_bucket(), quota)
        })
    };
    let by_key = |limiter: &Limiter| RateLimitLayer::new(limiter, |_: &Parts| "ada".to_owned());
    type Make<'a> = &'a dyn Fn(&[Limiter; 2]) -> RateLimitLayer;
    let ways: [(&str, Make<'_>); 6] = [
        ("by key", &|[one, _]| by_key(one)),
        ("with a hold", &|[one, _]| by_key(one).settle_handle(true)),
        ("in a dry run", &|[one, _]| by_key(one).dry_run(true)),
        ("with a wait", &|[one, _]| by_key(one).max_wait(SECOND)),
        ("by a rule", &|[one, _]| {
            let one = one.clone();
            RateLimitLayer::by_rule(move |_: &Parts| Ok(Charge::new(&one, "ada")))
        }),
        ("by two limits", &|[one, two]| {
            let (one, two) = (one.clone(), two.clone());
            RateLimitLayer::by_rule(move |_: &Parts| Ok(Charge::new(&one, "ada").also(&two)))
        }),
    ];
    for (way, layer) in ways {
        let limiters = limiters();
        let mut service = layer(&limiters).layer(NeverReady(unready, false));
        let mut response = Box::pin(service.call(get(&[])));
        let mut poll = || catch_unwind(AssertUnwindSafe(|| poll_once(response.as_mut())));
        match poll() {
            Ok(Poll::Ready(Err(OwnError))) if unready == Unready::Fails => {}
            Ok(Poll::Pending) if unready == Unready::Waits => {
                let left = limiters[0].peek("ada").await.unwrap().remaining();
                assert_eq!(left, 0, "{way}: the request is not charged meanwhile");
            }
            Ok(Poll::Pending) if unready == Unready::WaitsAndPanics => {
                assert!(poll().is_err(), "{way}: no panic");
            }
            Err(_) if unready == Unready::Panics => {}
            polled => panic!("{way}: {:?}", polled.map(|it| it.map(|result| result.map(|_| ())))),
        }
        drop(response);
        for limiter in limiters {
            assert_eq!(limiter.peek("ada").await.unwrap().remaining(), 1, "{way}");
        }
    }
}

#[tokio::test]
async fn a_request_that_is_dropped_before_the_service_is_ready_costs_nothing() {
    costs_nothing_before_the_service_is_ready(Unready::Waits).await;
}

#[tokio::test]
async fn a_request_costs_nothing_if_the_service_fails_to_become_ready() {
    costs_nothing_before_the_service_is_ready(Unready::Fails).await;
}

#[tokio::test]
async fn a_request_costs_nothing_if_the_service_panics_instead_of_becoming_ready() {
    costs_nothing_before_the_service_is_ready(Unready::Panics).await;
    costs_nothing_before_the_service_is_ready(Unready::WaitsAndPanics).await;
}

#[tokio::test]
async fn in_a_dry_run_a_denied_request_that_is_dropped_releases_nothing() {
    let limiter = in_memory(Quota::per_hour(2));
    let layer = RateLimitLayer::new(limiter.clone(), |_: &Parts| "ada".to_owned()).cost(|_| 2);
    let busy = ConcurrencyLimit::with_semaphore(counting(&Arc::default()), no_permits());
    let mut service = layer.dry_run(true).layer(busy);
    assert!(limiter.check("ada").await.unwrap().is_allowed());
    let mut response = Box::pin(service.call(get(&[])));
    assert!(poll_once(response.as_mut()).is_pending());
    drop(response);
    assert_eq!(limiter.peek("ada").await.unwrap().remaining(), 1);
}

fn no_permits() -> Arc<tokio::sync::Semaphore> {
    Arc::new(tokio::sync::Semaphore::new(0))
}

#[derive(Debug, PartialEq)]
struct OwnError;

#[tokio::test]
async fn the_error_of_the_service_is_untouched() {
    let layer = RateLimitLayer::new(in_memory(Quota::per_hour(1)), key::Global);
    let service = layer.layer(service_fn(|_: Request<()>| ready(Err::<Response<()>, _>(OwnError))));
    let error = service.clone().oneshot(Request::new(())).await.unwrap_err();
    assert_eq!(error, OwnError);
    let rejected = service.oneshot(Request::new(())).await.unwrap();
    assert_eq!(rejected.status(), StatusCode::TOO_MANY_REQUESTS);
}

#[tokio::test]
async fn any_body_type_is_accepted() {
    /// A type without `Default` and `From`, which is no body.
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

/// A middleware that boxes nothing, and so names the future of the service that it wraps.
#[derive(Clone)]
struct Outer<S>(RateLimit<S>);

impl<S, B> Service<Request<B>> for Outer<S>
where
    RateLimit<S>: Service<Request<B>>,
{
    type Response = <RateLimit<S> as Service<Request<B>>>::Response;
    type Error = <RateLimit<S> as Service<Request<B>>>::Error;
    type Future = <RateLimit<S> as Service<Request<B>>>::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        self.0.call(request)
    }
}

#[tokio::test]
async fn a_service_around_a_limited_one_names_its_future() {
    let service = Outer(nameable().layer(counting(&Arc::default())));
    assert_eq!(service.oneshot(get(&[])).await.unwrap().status(), StatusCode::OK);
}

/// The type stays the same with every option.
fn nameable() -> RateLimitLayer {
    RateLimitLayer::new(in_memory(Quota::per_second(10)), |head: &Parts| head.uri.to_string())
        .cost(|_: &Parts| 2)
        .missing_key(MissingKey::Share)
        .headers([])
        .extensions(false)
        .map_rejection(|_, _, response| response)
}

#[test]
fn public_types_are_send_and_sync() {
    fn check<T: Send + Sync + Clone + 'static>(_: &T) {}
    fn check_future<T: Send>(_: &T) {}
    let layer = nameable();
    check(&layer);
    let service: RateLimit<_> = layer.layer(counting(&Arc::default()));
    check(&service);
    check_future(&service.clone().oneshot(get(&[])));
    check(&in_memory(Quota::per_second(1)));
    let _ = BoxCloneSyncService::new(service.map_err(BoxError::from));
}
