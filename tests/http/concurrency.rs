//! The layer with a limit on concurrency: a request counts until its response body has ended,
//! however it ends. The limits themselves are in `contract/concurrency.rs`.

use std::{
    convert::Infallible,
    future::{pending, poll_fn, ready},
    mem,
    pin::pin,
    sync::{Arc, Mutex},
    task::{Context, Poll, Waker},
    time::Duration,
};

use axum::{
    Extension, Router,
    body::{Body, Bytes},
    routing,
};
use http::{HeaderMap, Method, Request, Response, StatusCode, request::Parts};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use tokio::{net::TcpListener, time::sleep};
use tokio_stream::StreamExt as _;
use tower::{BoxError, Layer, Service, ServiceExt, service_fn};
use tower_ratelimit::{
    Algorithm, Charge, Limiter, MemoryStore, Permit, Quota, RateLimitLayer, key,
    layer::{Headers, Settle, Usage},
};

use crate::support::{self, get, header, in_memory, load::until};

const SECOND: Duration = Duration::from_secs(1);

fn concurrency(limit: u64) -> Limiter {
    let quota = Quota::concurrent(limit);
    Limiter::new("streams", MemoryStore::new(), Algorithm::concurrency(), quota)
}

fn layer(limiter: &Limiter) -> RateLimitLayer {
    RateLimitLayer::new(limiter, key::Global)
}

async fn in_flight(limiter: &Limiter) -> u64 {
    limiter.peek(key::Global.key()).await.unwrap().held()
}

async fn hold(limiter: &Limiter) -> Permit {
    limiter.hold(key::Global.key(), 1).await.unwrap().admitted().unwrap()
}

fn endless() -> Body {
    let frames = tokio_stream::iter(["data: 1\n\n"]).map(Ok::<_, Infallible>);
    Body::from_stream(frames.chain(tokio_stream::pending()))
}

#[tokio::test(start_paused = true)]
async fn a_request_waits_for_the_end_of_a_block_or_hears_at_once_how_long_it_lasts() {
    for held in [0, 1] {
        let limiter = concurrency(1);
        let service =
            layer(&limiter).max_wait(10 * SECOND).layer(support::counting(&Arc::default()));
        let permits = match held {
            0 => vec![],
            _ => vec![hold(&limiter).await],
        };
        limiter.block(key::Global.key(), 60 * SECOND).await.unwrap();
        let start = tokio::time::Instant::now();
        let rejected = service.clone().oneshot(get(&[])).await.unwrap();
        assert_eq!(rejected.status(), StatusCode::TOO_MANY_REQUESTS);
        // Not 50 s, after which the request may wait.
        assert_eq!(header(&rejected, "retry-after"), ["60"]);
        assert_eq!(support::json(rejected).await["title"], "This client is blocked");
        assert_eq!(start.elapsed(), Duration::ZERO);

        limiter.unblock(key::Global.key()).await.unwrap();
        limiter.block(key::Global.key(), 5 * SECOND).await.unwrap();
        drop(permits);
        let response = service.oneshot(get(&[])).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        assert!((5 * SECOND..6 * SECOND).contains(&start.elapsed()), "{:?}", start.elapsed());
    }
}

#[tokio::test]
async fn a_request_counts_until_its_body_has_ended_or_is_dropped() {
    let limiter = concurrency(1);
    let service = layer(&limiter).layer(service_fn(async |_: Request<Body>| {
        let frames = tokio_stream::iter(["a", "b"]).map(Ok::<_, Infallible>);
        Ok::<_, Infallible>(Response::new(Body::from_stream(frames)))
    }));
    for read in [true, false] {
        let response = service.clone().oneshot(get(&[])).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(header(&response, "ratelimit"), ["\"streams\";r=0"]);
        let rejected = service.clone().oneshot(get(&[])).await.unwrap();
        assert_eq!(rejected.status(), StatusCode::TOO_MANY_REQUESTS);
        match read {
            true => drop(response.into_body().collect().await.unwrap()),
            false => drop(response),
        }
        assert_eq!(in_flight(&limiter).await, 0);
    }
}

#[tokio::test]
async fn a_request_that_ends_without_a_body_is_free_at_once() {
    let limiter = concurrency(1);
    let fails = layer(&limiter).layer(service_fn(|_: Request<Body>| {
        ready(Err::<Response<Body>, BoxError>("as intended".into()))
    }));
    assert!(fails.oneshot(get(&[])).await.is_err());
    assert_eq!(in_flight(&limiter).await, 0);

    let panics = layer(&limiter).layer(service_fn(async |request: Request<Body>| {
        assert!(request.uri().path() != "/", "as intended");
        Ok::<_, Infallible>(Response::new(Body::empty()))
    }));
    assert!(tokio::spawn(panics.oneshot(get(&[]))).await.is_err());
    assert_eq!(in_flight(&limiter).await, 0);

    let hangs = layer(&limiter)
        .layer(service_fn(|_: Request<Body>| pending::<Result<Response<Body>, Infallible>>()));
    let mut call = Box::pin(hangs.oneshot(get(&[])));
    assert!(is_pending(&mut call).await);
    assert_eq!(in_flight(&limiter).await, 1);
    drop(call);
    assert_eq!(in_flight(&limiter).await, 0);

    for (method, status) in [(Method::HEAD, 200), (Method::GET, 204), (Method::GET, 101)] {
        let service = layer(&limiter).layer(service_fn(move |_: Request<Body>| {
            let response = Response::builder().status(status);
            ready(Ok::<_, Infallible>(response.body(Body::empty()).unwrap()))
        }));
        let mut request = get(&[]);
        *request.method_mut() = method;
        drop(service.oneshot(request).await.unwrap());
        assert_eq!(in_flight(&limiter).await, 0, "{status}");
    }
}

/// Polls a future once. Returns whether it is pending.
async fn is_pending<F: Future + Unpin>(future: &mut F) -> bool {
    tokio::time::timeout(Duration::ZERO, future).await.is_err()
}

/// What handlers do. The drop of each work writes down how many units are held then.
#[derive(Clone)]
struct Works {
    limiter: Limiter,
    held: Arc<Mutex<Vec<u64>>>,
}

struct Work(Works);

impl Works {
    fn of(limiter: &Limiter) -> Self {
        Self { limiter: limiter.clone(), held: Arc::default() }
    }

    fn begin(&self) -> Work {
        Work(self.clone())
    }

    fn take(&self) -> Vec<u64> {
        mem::take(&mut *self.held.lock().unwrap())
    }

    fn held_now(&self) -> u64 {
        let peek = pin!(self.limiter.peek(key::Global.key()));
        let Poll::Ready(state) = peek.poll(&mut Context::from_waker(Waker::noop())) else {
            panic!("a store in memory answers at once");
        };
        state.unwrap().held()
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        let Self(works) = self;
        let held = works.held_now();
        works.held.lock().unwrap().push(held);
    }
}

/// A service whose futures own their work until they are dropped, however they end.
fn working(
    works: &Works,
) -> impl Service<Request<Body>, Response = Response<Body>, Error = BoxError, Future: Send>
+ Clone
+ Send
+ 'static {
    let works = works.clone();
    service_fn(move |request: Request<Body>| {
        let work = works.begin();
        poll_fn(move |_| {
            let (_work, response) = (&work, Response::builder());
            let response = match request.uri().path() {
                "/hangs" => return Poll::Pending,
                "/fails" => return Poll::Ready(Err("as intended".into())),
                "/panics" => panic!("as intended"),
                "/upgrades" => response.status(StatusCode::SWITCHING_PROTOCOLS),
                _ => response.status(StatusCode::OK),
            };
            Poll::Ready(Ok(response.body(Body::empty()).unwrap()))
        })
    })
}

#[tokio::test]
async fn a_place_is_free_after_the_work_of_its_request_is_dropped_however_it_ends() {
    let limiter = concurrency(1);
    let works = Works::of(&limiter);
    let service = layer(&limiter).layer(working(&works));
    for path in ["/hangs", "/fails", "/panics", "/upgrades", "/"] {
        let request = Request::get(path).body(Body::empty()).unwrap();
        let call = tokio::spawn(service.clone().oneshot(request));
        tokio::task::yield_now().await;
        call.abort();
        drop(call.await);
        assert_eq!(works.take(), [1], "{path}");
        assert_eq!(in_flight(&limiter).await, 0, "{path}");
    }
}

#[tokio::test]
async fn units_of_a_response_that_is_not_charged_are_back_after_its_work_is_dropped() {
    let limiter = in_memory(Quota::per_day(10));
    let works = Works::of(&limiter);
    let layer = layer(&limiter).charge_when(|_| false);
    drop(layer.layer(working(&works)).oneshot(get(&[])).await.unwrap());
    assert_eq!(works.take(), [1]);
    let state = limiter.peek(key::Global.key()).await.unwrap();
    assert_eq!((state.held(), state.remaining()), (0, 10));
}

#[tokio::test]
async fn a_service_of_any_type_frees_its_place_after_its_work_is_dropped() {
    let limiter = concurrency(1);
    let works = Works::of(&limiter);
    let layer = RateLimitLayer::custom(&limiter, key::Global, |_, _: &u32| "rejected");
    let service = layer.layer(service_fn({
        let works = works.clone();
        move |_: u32| {
            let work = works.begin();
            poll_fn(move |_| {
                let _work = &work;
                Poll::Ready(Ok::<_, Infallible>("done"))
            })
        }
    }));
    assert_eq!(service.oneshot(1).await, Ok("done"));
    assert_eq!(works.take(), [1]);
    assert_eq!(in_flight(&limiter).await, 0);
}

#[tokio::test]
async fn a_place_is_free_after_the_body_of_the_response_is_dropped_however_it_ends() {
    type Frames = Vec<Result<Frame<Bytes>, BoxError>>;

    let data = || Ok(Frame::data(Bytes::from("data")));
    let limiter = concurrency(1);
    let works = Works::of(&limiter);
    let layers = [layer(&limiter), layer(&limiter).settle_by(|_| Some(Usage::of("streams", 1)))];
    for layer in layers {
        let scripts: [(Frames, usize); 4] = [
            (vec![data(), data()], 3),
            (vec![data(), Ok(Frame::trailers(HeaderMap::new()))], 2),
            (vec![data(), Err("as intended".into())], 2),
            (vec![data(), data()], 1), // cut off
        ];
        for (frames, reads) in scripts {
            let frames = Arc::new(Mutex::new(Some((frames, works.begin()))));
            let service = layer.layer(service_fn(move |_: Request<Body>| {
                let (frames, work) = frames.lock().unwrap().take().unwrap();
                let frames = tokio_stream::iter(frames).map(move |frame| {
                    let _work = &work;
                    frame
                });
                ready(Ok::<_, Infallible>(Response::new(StreamBody::new(frames))))
            }));
            let mut body = service.oneshot(get(&[])).await.unwrap().into_body();
            for _ in 0..reads {
                assert_eq!((works.take(), works.held_now()), (vec![], 1));
                drop(body.frame().await);
            }
            if reads == 1 {
                drop(body);
            } else {
                assert!(body.frame().await.is_none());
            }
            assert_eq!((works.take(), works.held_now()), (vec![1], 0));
        }
    }
}

#[tokio::test]
async fn a_place_is_free_after_the_response_is_dropped_if_a_closure_panics() {
    let limiter = concurrency(1);
    let works = Works::of(&limiter);
    let by_meter = layer(&limiter).settle_by(|_| -> Usage { panic!("as intended") });
    let by_head = layer(&limiter).charge_when(|_| panic!("as intended"));
    for layer in [by_meter, by_head] {
        let begun = works.clone();
        let service = layer.layer(service_fn(move |_: Request<Body>| {
            let work = begun.begin();
            let frames = tokio_stream::iter([Ok::<_, BoxError>(Frame::data(Bytes::new()))]);
            let frames = frames.map(move |frame| {
                let _work = &work;
                frame
            });
            ready(Ok::<_, Infallible>(Response::new(StreamBody::new(frames))))
        }));
        assert!(tokio::spawn(service.oneshot(get(&[]))).await.is_err());
        assert_eq!((works.take(), works.held_now()), (vec![1], 0));
    }

    let layer = RateLimitLayer::custom(&limiter, key::Global, |_, _: &u32| None);
    let layer = layer.settle_by(|_: &Option<Work>| panic!("as intended"));
    let begun = works.clone();
    let service =
        layer.layer(service_fn(move |_: u32| ready(Ok::<_, Infallible>(Some(begun.begin())))));
    assert!(tokio::spawn(service.oneshot(1)).await.is_err());
    assert_eq!((works.take(), works.held_now()), (vec![1], 0));
}

#[tokio::test]
async fn a_rejection_says_that_the_time_is_unknown() {
    let limiter = concurrency(2);
    let dialects = [Headers::Draft11, Headers::XRateLimit];
    let service = layer(&limiter).headers(dialects).layer(support::counting(&Arc::default()));
    let permits = [hold(&limiter).await, hold(&limiter).await];
    let rejected = service.clone().oneshot(get(&[])).await.unwrap();
    assert_eq!(rejected.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(header(&rejected, "retry-after"), [""; 0]);
    assert_eq!(header(&rejected, "ratelimit"), ["\"streams\";r=0"]);
    let policy = ["\"streams\";q=2;qu=\"concurrent-requests\""];
    assert_eq!(header(&rejected, "ratelimit-policy"), policy);
    assert_eq!(header(&rejected, "x-ratelimit-limit"), ["2"]);
    assert_eq!(header(&rejected, "x-ratelimit-remaining"), ["0"]);
    assert_eq!(header(&rejected, "x-ratelimit-reset"), [""; 0]);
    let problem = support::json(rejected).await;
    assert_eq!(problem["title"], "Too many concurrent requests");
    assert_eq!(problem["detail"], "Try again when earlier requests have ended.");

    let grpc = &[("content-type", "application/grpc")];
    let mut request = get(grpc);
    *request.method_mut() = Method::POST;
    let rejected = service.oneshot(request).await.unwrap();
    assert_eq!(header(&rejected, "grpc-status"), ["8"]);
    let message = "too many concurrent requests; try again when earlier requests have ended";
    assert_eq!(header(&rejected, "grpc-message"), [message]);
    assert_eq!(header(&rejected, "grpc-retry-pushback-ms"), [""; 0]);
    drop(permits);
}

#[tokio::test]
async fn a_server_frees_the_place_of_a_stream_that_the_client_cuts_off() {
    let layer = RateLimitLayer::concurrency(2, key::header("user"));
    let app = Router::new().route("/", routing::get(async || endless())).layer(layer);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let server = tokio::spawn(axum::serve(listener, app).into_future());
    let client = reqwest::Client::new();
    let send = async |user| client.get(&url).header("user", user).send().await.unwrap();
    let mut streams = vec![send("ada").await, send("ada").await];
    for stream in &mut streams {
        assert!(stream.chunk().await.unwrap().is_some());
    }
    assert_eq!(send("ada").await.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(send("ben").await.status(), StatusCode::OK);
    streams.pop();
    until("the place is free", async || send("ada").await.status() == StatusCode::OK).await;
    server.abort();
}

#[tokio::test]
async fn a_call_of_tonic_counts_until_its_trailers() {
    use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

    let limiter = concurrency(1);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let health = tonic_health::server::health_reporter().1;
    let server = tonic::transport::Server::builder().layer(layer(&limiter)).add_service(health);
    let incoming = tonic::transport::server::TcpIncoming::from(listener);
    let server = tokio::spawn(server.serve_with_incoming(incoming));
    let endpoint = tonic::transport::Endpoint::from_shared(url).unwrap();
    let mut client = HealthClient::new(endpoint.connect().await.unwrap());
    let mut watch = client.watch(HealthCheckRequest::default()).await.unwrap().into_inner();
    assert!(watch.message().await.unwrap().is_some());
    let status = client.check(HealthCheckRequest::default()).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::ResourceExhausted);
    drop(watch);
    until("the stream has ended", async || in_flight(&limiter).await == 0).await;
    client.check(HealthCheckRequest::default()).await.unwrap();
    until("the call has ended", async || in_flight(&limiter).await == 0).await;
    server.abort();
}

#[tokio::test(start_paused = true)]
async fn requests_wait_in_order_and_a_dropped_one_delays_no_other() {
    let limiter = concurrency(1);
    let log = Arc::new(Mutex::new(vec![]));
    let service = layer(&limiter).max_wait(60 * SECOND).layer(service_fn({
        let log = log.clone();
        move |request: Request<Body>| {
            log.lock().unwrap().push(request.uri().path().to_owned());
            async {
                sleep(SECOND).await;
                Ok::<_, Infallible>(Response::new(Body::empty()))
            }
        }
    }));
    let permit = hold(&limiter).await;
    let mut requests = vec![];
    for number in 0..6 {
        let request = Request::get(format!("/{number}")).body(Body::empty()).unwrap();
        let response = service.clone().oneshot(request);
        requests.push(tokio::spawn(async { drop(response.await) }));
        sleep(Duration::from_millis(1)).await;
    }
    requests[2].abort();
    drop(permit);
    sleep(10 * SECOND).await;
    assert_eq!(*log.lock().unwrap(), ["/0", "/1", "/3", "/4", "/5"]);
    assert_eq!(in_flight(&limiter).await, 0);
}

#[tokio::test(start_paused = true)]
async fn a_request_that_waits_for_too_long_is_rejected_and_waiting_is_bounded() {
    let limiter = concurrency(1);
    let layer = layer(&limiter).max_wait(SECOND).max_waiting_per_key(1);
    let service = layer.layer(support::counting(&Arc::default()));
    let permit = hold(&limiter).await;
    let waits = tokio::spawn(service.clone().oneshot(get(&[])));
    sleep(SECOND / 2).await;
    let start = tokio::time::Instant::now();
    let rejected = service.oneshot(get(&[])).await.unwrap();
    assert_eq!(rejected.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(start.elapsed(), Duration::ZERO, "one request waits already");
    assert_eq!(waits.await.unwrap().unwrap().status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(start.elapsed(), SECOND / 2);
    drop(permit);
}

#[tokio::test]
async fn work_in_a_task_keeps_the_place_of_a_client_that_has_left() {
    let limiter = concurrency(1);
    let (ends, ended) = tokio::sync::oneshot::channel();
    let ended = Arc::new(Mutex::new(Some(ended)));
    let handler = async move |Extension(settle): Extension<Settle>| {
        settle.keep();
        let ended = ended.lock().unwrap().take().expect("one request");
        let work = tokio::spawn(async move {
            let _ = ended.await;
            drop(settle);
        });
        work.await.expect("no panic");
    };
    let layer = layer(&limiter).settle_handle(true);
    let app = Router::new().route("/", routing::get(handler)).layer(layer);
    let request = tokio::spawn(app.oneshot(get(&[])));
    tokio::task::yield_now().await;
    request.abort();
    assert!(request.await.unwrap_err().is_cancelled());
    assert_eq!(in_flight(&limiter).await, 1);
    ends.send(()).unwrap();
    tokio::task::yield_now().await;
    assert_eq!(in_flight(&limiter).await, 0);
}

#[tokio::test]
async fn a_service_keeps_the_place_of_a_connection_that_outlives_its_response() {
    let limiter = concurrency(1);
    let kept = Arc::new(Mutex::new(None));
    let handler = {
        let kept = kept.clone();
        async move |Extension(settle): Extension<Settle>| {
            settle.keep();
            *kept.lock().unwrap() = Some(settle);
            StatusCode::SWITCHING_PROTOCOLS
        }
    };
    let layer = layer(&limiter).settle_handle(true);
    let app = Router::new().route("/", routing::get(handler)).layer(layer);
    drop(app.clone().oneshot(get(&[])).await.unwrap());
    assert_eq!(in_flight(&limiter).await, 1);
    let rejected = app.oneshot(get(&[])).await.unwrap();
    assert_eq!(rejected.status(), StatusCode::TOO_MANY_REQUESTS);
    drop(kept.lock().unwrap().take());
    assert_eq!(in_flight(&limiter).await, 0);
}

#[tokio::test]
async fn a_rule_charges_a_rate_and_concurrency_together() {
    let store = MemoryStore::new();
    let quota = Quota::concurrent(2);
    let streams = Limiter::new("streams", store.clone(), Algorithm::concurrency(), quota);
    let quota = Quota::per_day(3);
    let rate = Limiter::new("rate", store, Algorithm::sliding_log(), quota);
    let rule = {
        let (rate, streams) = (rate.clone(), streams.clone());
        move |_: &Parts| Ok(Charge::new(&rate, "ada").also(&streams))
    };
    // The rate counts successful requests; the place is held to the end of the body in any case.
    let layer = RateLimitLayer::by_rule(rule).charge_when(|head| head.status.is_success());
    let service = layer.layer(service_fn(async |request: Request<Body>| {
        let status = if request.uri().path() == "/fails" { 500 } else { 200 };
        Ok::<_, Infallible>(Response::builder().status(status).body(endless()).unwrap())
    }));
    let send = async |path: &str| {
        let request = Request::get(path).body(Body::empty()).unwrap();
        service.clone().oneshot(request).await.unwrap()
    };
    let state = async || {
        let left = rate.peek("ada").await.unwrap();
        (left.remaining(), left.held(), streams.peek("ada").await.unwrap().held())
    };
    let failed = send("/fails").await;
    assert_eq!(state().await, (3, 0, 1));
    let response = send("/").await;
    assert_eq!(state().await, (2, 0, 2));
    let rejected = send("/").await;
    assert_eq!(rejected.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(state().await, (2, 0, 2));
    drop((failed, response));
    assert_eq!(state().await, (2, 0, 0));
}

#[tokio::test]
async fn a_service_of_any_type_is_limited_until_its_future_ends() {
    let limiter = concurrency(1);
    let layer = RateLimitLayer::custom(&limiter, key::Global, |_, _: &u32| "rejected");
    let (sender, receiver) = tokio::sync::watch::channel(false);
    let mut service = layer.layer(service_fn(move |_: u32| {
        let mut receiver = receiver.clone();
        async move {
            let _ = receiver.wait_for(|is_over| *is_over).await;
            Ok::<_, Infallible>("done")
        }
    }));
    let first = tokio::spawn(service.ready().await.unwrap().call(1));
    until("it is in flight", async || in_flight(&limiter).await == 1).await;
    assert_eq!(service.ready().await.unwrap().call(2).await, Ok("rejected"));
    sender.send(true).unwrap();
    assert_eq!(first.await.unwrap(), Ok("done"));
    assert_eq!(in_flight(&limiter).await, 0);
}

#[tokio::test]
async fn other_layers_around_it_and_dry_runs_work() {
    let limiter = concurrency(1);
    let dry_run = layer(&limiter).dry_run(true);
    let outer = RateLimitLayer::new(in_memory(Quota::per_day(9)), key::Global);
    let service = support::counting(&Arc::default());
    let service = outer.layer(dry_run.layer(service));
    let responses = [
        service.clone().oneshot(get(&[])).await.unwrap(),
        service.clone().oneshot(get(&[])).await.unwrap(),
    ];
    assert!(responses.iter().all(|response| response.status() == StatusCode::OK));
    assert_eq!(in_flight(&limiter).await, 1);
    drop(responses);
    assert_eq!(in_flight(&limiter).await, 0);
}
