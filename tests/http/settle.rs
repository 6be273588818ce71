//! The layer settles what a request holds by its response: when, how often, and with which numbers.

use std::{
    collections::VecDeque,
    convert::Infallible,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::{Pin, pin},
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
use http_body::{Body as _, Frame, SizeHint};
use http_body_util::BodyExt;
use tokio::net::TcpListener;
use tokio_stream::StreamExt as _;
use tower::{BoxError, Layer, Service, ServiceExt, service_fn};
use tower_ratelimit::{
    Algorithm, Charge, Error, Limiter, MemoryStore, Quota, RateLimitLayer, key,
    layer::{Meter, ResponseBody, Settle, Usage},
};

use crate::support::{
    get, in_memory,
    recorder::{Recorder, observed},
};

/// What a scripted body returns when it is polled. After the last step, it has ended.
enum Step {
    Data(&'static str),
    Trailers(&'static str),
    Fail,
    Panic,
}

use Step::{Data, Fail, Panic, Trailers};

/// How much a body tells about its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tells {
    Nothing,
    Size,
    End,
}

struct Scripted {
    steps: VecDeque<Step>,
    tells: Tells,
}

fn body<const N: usize>(tells: Tells, steps: [Step; N]) -> Scripted {
    Scripted { steps: steps.into(), tells }
}

impl http_body::Body for Scripted {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        Poll::Ready(self.steps.pop_front().map(|step| match step {
            Data(text) => Ok(Frame::data(Bytes::from(text))),
            Trailers(used) => {
                let trailers = [("used".parse().unwrap(), used.parse().unwrap())];
                Ok(Frame::trailers(HeaderMap::from_iter(trailers)))
            }
            Fail => Err("as intended".into()),
            Panic => panic!("as intended"),
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.tells == Tells::End && self.steps.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        match self.tells {
            Tells::Size => SizeHint::with_exact(self.left()),
            _ => SizeHint::default(),
        }
    }
}

impl Scripted {
    fn left(&self) -> u64 {
        let data = self.steps.iter().map(|step| if let Data(text) = step { text.len() } else { 0 });
        data.sum::<usize>() as u64
    }
}

/// Counts bytes, and 100 more if the body is complete; trailers replace that.
#[derive(Default)]
struct Bytewise {
    bytes: u64,
    trailer: Option<u64>,
}

impl Meter for Bytewise {
    fn data(&mut self, data: &[u8]) {
        self.bytes += data.len() as u64;
    }

    fn trailers(&mut self, trailers: &HeaderMap) {
        self.trailer = trailers["used"].to_str().unwrap().parse().ok();
    }

    fn usage(&mut self, is_complete: bool) -> Option<Usage> {
        let complete = if is_complete { 100 } else { 0 };
        Some(Usage::of("default", self.trailer.unwrap_or(self.bytes + complete)))
    }
}

/// A limiter whose holds are written down.
fn recorded() -> (Limiter, Arc<Recorder>) {
    let recorder = Recorder::new();
    let store = observed(MemoryStore::new(), recorder.clone());
    let quota = Quota::per_day(1_000);
    (Limiter::new("default", store, Algorithm::SlidingLog, quota), recorder)
}

/// A layer that holds 500 units for each request.
fn holding(limiter: &Limiter) -> RateLimitLayer {
    RateLimitLayer::new(limiter, key::Global).cost(|_: &Parts| 500)
}

fn bytewise(limiter: &Limiter) -> RateLimitLayer {
    holding(limiter).settle_by(|_| Bytewise::default())
}

/// Returns the units that each hold has settled, since the last call.
fn settled(recorder: &Recorder) -> Vec<u64> {
    let ended = recorder.take_of("hold ended");
    ended.iter().map(|event| event.rsplit(' ').next().unwrap().parse().unwrap()).collect()
}

async fn respond<B>(layer: RateLimitLayer, response: Response<B>) -> Response<ResponseBody<B>> {
    request(layer, get(&[]), response).await
}

async fn request<B>(
    layer: RateLimitLayer,
    request: Request<Body>,
    response: Response<B>,
) -> Response<ResponseBody<B>> {
    let response = Mutex::new(Some(response));
    let service = service_fn(|_| {
        let response = response.lock().unwrap().take().unwrap();
        async { Ok::<_, Infallible>(response) }
    });
    layer.layer(service).oneshot(request).await.unwrap()
}

fn poll<B>(body: &mut ResponseBody<B>) -> Option<Result<Frame<Bytes>, B::Error>>
where
    B: http_body::Body<Data = Bytes> + Unpin,
{
    let polled = Pin::new(body).poll_frame(&mut Context::from_waker(Waker::noop()));
    let Poll::Ready(frame) = polled else { panic!("the body is not ready") };
    frame
}

#[tokio::test]
async fn a_body_settles_once_with_its_last_frame_or_its_end() {
    let used = 103;
    for (tells, polls) in [(Tells::Nothing, 3), (Tells::Size, 3), (Tells::End, 2)] {
        let (limiter, recorder) = recorded();
        let script = body(tells, [Data("a"), Data("bc")]);
        let mut body = respond(bytewise(&limiter), Response::new(script)).await.into_body();
        for _ in 1..polls {
            assert!(poll(&mut body).is_some());
            assert_eq!(settled(&recorder), [0; 0], "{tells:?}");
            assert_eq!(limiter.peek("global").await.unwrap().held(), 500);
        }
        let _ = poll(&mut body);
        assert_eq!(settled(&recorder), [used], "{tells:?}");
        assert_eq!(limiter.peek("global").await.unwrap().remaining(), 1_000 - used);
        assert!(poll(&mut body).is_none());
        drop(body);
        assert_eq!(settled(&recorder), [0; 0], "{tells:?}");
    }
}

#[tokio::test]
async fn trailers_are_the_last_frame() {
    let (limiter, recorder) = recorded();
    let script = body(Tells::Nothing, [Data("abc"), Trailers("42")]);
    let mut body = respond(bytewise(&limiter), Response::new(script)).await.into_body();
    assert!(poll(&mut body).unwrap().unwrap().is_data());
    assert_eq!(settled(&recorder), [0; 0]);
    assert!(poll(&mut body).unwrap().unwrap().is_trailers());
    assert_eq!(settled(&recorder), [42]);
}

#[tokio::test]
async fn a_stream_that_is_cut_off_settles_what_was_seen() {
    for (polls, used) in [(0, 0), (1, 1), (2, 3)] {
        let (limiter, recorder) = recorded();
        let script = body(Tells::Nothing, [Data("a"), Data("bc"), Data("def")]);
        let mut body = respond(bytewise(&limiter), Response::new(script)).await.into_body();
        for _ in 0..polls {
            assert!(poll(&mut body).is_some());
        }
        assert_eq!(settled(&recorder), [0; 0]);
        drop(body);
        assert_eq!(settled(&recorder), [used]);
        assert_eq!(limiter.peek("global").await.unwrap().remaining(), 1_000 - used);
    }
}

#[tokio::test]
async fn a_body_that_is_dropped_is_complete_if_nothing_is_left() {
    let script = |tells| body(tells, [Data("abc")]);
    let with_length = |length: &str| Response::builder().header("content-length", length);
    for (response, is_complete) in [
        (Response::new(script(Tells::Nothing)), false),
        (Response::new(script(Tells::Size)), true),
        (with_length("3").body(script(Tells::Nothing)).unwrap(), true),
        (with_length("4").body(script(Tells::Nothing)).unwrap(), false),
    ] {
        let (limiter, recorder) = recorded();
        let mut body = respond(bytewise(&limiter), response).await.into_body();
        assert!(poll(&mut body).is_some());
        assert_eq!(settled(&recorder), [0; 0]);
        drop(body);
        assert_eq!(settled(&recorder), [if is_complete { 103 } else { 3 }]);
    }
}

/// As hyper does: it asks for the end, and does not poll then.
#[tokio::test]
async fn an_empty_body_is_complete_once_it_has_told_its_end() {
    for (tells, used) in [(Tells::Nothing, 0), (Tells::End, 100)] {
        let (limiter, recorder) = recorded();
        let body = respond(bytewise(&limiter), Response::new(body(tells, []))).await.into_body();
        assert_eq!(body.is_end_stream(), tells == Tells::End);
        assert_eq!(settled(&recorder), [0; 0]);
        drop(body);
        assert_eq!(settled(&recorder), [used]);
    }
    let (limiter, recorder) = recorded();
    let response = Response::builder().header("content-length", "0");
    drop(respond(bytewise(&limiter), response.body(()).unwrap()).await);
    assert_eq!(settled(&recorder), [100]);
}

#[tokio::test]
async fn the_guard_passes_hints_through() {
    let (limiter, _) = recorded();
    let sized = body(Tells::Size, [Data("abc"), Data("de")]);
    let mut sized = respond(bytewise(&limiter), Response::new(sized)).await.into_body();
    assert_eq!(sized.size_hint().exact(), Some(5));
    let _ = poll(&mut sized);
    assert_eq!((sized.size_hint().exact(), sized.is_end_stream()), (Some(2), false));
    let telling = body(Tells::End, [Data("abc")]);
    let mut telling = respond(bytewise(&limiter), Response::new(telling)).await.into_body();
    assert!(!telling.is_end_stream());
    let _ = poll(&mut telling);
    assert!(telling.is_end_stream());
    assert_eq!(telling.size_hint().exact(), Some(0));
}

#[tokio::test]
async fn a_body_that_fails_or_panics_settles_what_was_seen() {
    let (limiter, recorder) = recorded();
    let script = body(Tells::End, [Data("abc"), Fail]);
    let mut failing = respond(bytewise(&limiter), Response::new(script)).await.into_body();
    assert!(poll(&mut failing).unwrap().is_ok());
    assert!(poll(&mut failing).unwrap().is_err());
    assert_eq!(settled(&recorder), [3]);
    assert!(poll(&mut failing).is_none());
    drop(failing);
    assert_eq!(settled(&recorder), [0; 0]);

    let script = body(Tells::End, [Data("abc"), Panic]);
    let mut panicking = respond(bytewise(&limiter), Response::new(script)).await.into_body();
    assert!(poll(&mut panicking).unwrap().is_ok());
    assert!(catch_unwind(AssertUnwindSafe(|| poll(&mut panicking))).is_err());
    assert_eq!(settled(&recorder), [0; 0]);
    drop(panicking);
    assert_eq!(settled(&recorder), [3]);
}

#[tokio::test]
async fn a_response_without_a_body_is_complete_and_settles_at_its_drop() {
    for (method, status) in [
        (Method::HEAD, 200),
        (Method::GET, 204),
        (Method::GET, 304),
        (Method::CONNECT, 403), // not a tunnel
    ] {
        let (limiter, recorder) = recorded();
        let mut head = get(&[]);
        *head.method_mut() = method.clone();
        let response = Response::builder().status(status).header("content-length", "0");
        let response = match method {
            Method::HEAD => Response::builder().header("content-length", "900"),
            _ => response,
        };
        let response = response.body(body(Tells::Nothing, [])).unwrap();
        let response = request(bytewise(&limiter), head, response).await;
        assert_eq!(settled(&recorder), [0; 0], "{method} {status}");
        drop(response);
        assert_eq!(settled(&recorder), [100], "{method} {status}");
    }
    for status in [204, 304] {
        let (limiter, recorder) = recorded();
        let response = Response::builder().status(status).body(()).unwrap();
        drop(respond(bytewise(&limiter), response).await);
        assert_eq!(settled(&recorder), [100], "{status}");
    }
}

/// The handle of the request, and the response of a service with it.
async fn with_handle(
    layer: RateLimitLayer,
    method: Method,
    status: u16,
    settle: impl Fn(&Settle),
) -> (Settle, Response<ResponseBody<Scripted>>) {
    let mut request = get(&[]);
    *request.method_mut() = method;
    let handle = Mutex::new(None);
    let service = service_fn(|request: Request<Body>| {
        let found = request.extensions().get::<Settle>().unwrap().clone();
        settle(&found);
        *handle.lock().unwrap() = Some(found);
        let response = Response::builder().status(status).body(body(Tells::End, [Data("abc")]));
        async { Ok::<_, Infallible>(response.unwrap()) }
    });
    let response = layer.settle_handle(true).layer(service).oneshot(request).await.unwrap();
    (handle.into_inner().unwrap().unwrap(), response)
}

#[tokio::test]
async fn a_tunnel_settles_with_its_response_unless_the_service_keeps_the_units() {
    for (method, status) in [(Method::GET, 101), (Method::CONNECT, 200)] {
        let (limiter, recorder) = recorded();
        let layer = || bytewise(&limiter);
        let (settle, response) = with_handle(layer(), method.clone(), status, |_| ()).await;
        assert_eq!(settled(&recorder), [100], "{method}");
        assert!(matches!(settle.settle("default", 7), Err(Error::HoldEnded { .. })));
        drop(response);
        assert_eq!(settled(&recorder), [0; 0], "{method}");

        let (settle, response) = with_handle(layer(), method.clone(), status, Settle::keep).await;
        drop(response);
        assert_eq!(settled(&recorder), [0; 0], "{method}");
        settle.settle("default", 7).unwrap();
        assert!(matches!(settle.settle("default", 7), Err(Error::HoldEnded { .. })));
        drop(settle);
        assert_eq!(settled(&recorder), [7], "{method}");

        let (settle, response) = with_handle(layer(), method.clone(), status, Settle::keep).await;
        let clone = settle.clone();
        drop((settle, response));
        assert_eq!(settled(&recorder), [0; 0], "{method}");
        drop(clone);
        assert_eq!(settled(&recorder), [500], "{method}: dropped without a word");
    }
}

#[tokio::test]
async fn units_that_are_kept_outlive_a_response_with_a_body() {
    let (limiter, recorder) = recorded();
    let (settle, response) = with_handle(bytewise(&limiter), Method::GET, 200, |_| ()).await;
    settle.keep(); // later than the response
    response.into_body().collect().await.unwrap();
    assert_eq!(settled(&recorder), [0; 0]);
    settle.settle("default", 20).unwrap();
    assert_eq!(settled(&recorder), [20]);

    // A response that is not charged returns what is kept.
    let layer = bytewise(&limiter).charge_when(|_| false);
    let (settle, _response) = with_handle(layer, Method::GET, 200, Settle::keep).await;
    assert_eq!(settled(&recorder), [0]);
    assert!(matches!(settle.settle("default", 7), Err(Error::HoldEnded { .. })));
}

#[tokio::test]
async fn the_first_to_settle_wins() {
    let (limiter, recorder) = recorded();
    let first = |settle: &Settle| settle.settle("default", 20).unwrap();
    let (settle, response) = with_handle(bytewise(&limiter), Method::GET, 200, first).await;
    response.into_body().collect().await.unwrap();
    assert!(matches!(settle.settle("default", 7), Err(Error::HoldEnded { .. })));
    assert_eq!(settled(&recorder), [20]);

    // While the body is sent.
    let (settle, response) = with_handle(bytewise(&limiter), Method::GET, 200, |_| ()).await;
    settle.settle("default", 30).unwrap();
    response.into_body().collect().await.unwrap();
    assert_eq!(settled(&recorder), [30]);

    let (settle, response) = with_handle(bytewise(&limiter), Method::GET, 200, |_| ()).await;
    response.into_body().collect().await.unwrap();
    assert!(matches!(settle.settle("default", 7), Err(Error::HoldEnded { .. })));
    assert_eq!(settled(&recorder), [103]);
}

#[tokio::test]
async fn what_nothing_settles_counts_as_the_estimate() {
    let (limiter, recorder) = recorded();
    let layers: [fn(&Limiter) -> RateLimitLayer; 4] = [
        |limiter| holding(limiter).settle_handle(true),
        |limiter| holding(limiter).settle_by(|_| None::<Usage>),
        |limiter| holding(limiter).settle_by(|_| Usage::default()),
        |limiter| holding(limiter).settle_by(|_| Usage::of("unknown", 3)),
    ];
    for layer in layers {
        limiter.reset("global").await.unwrap();
        let response = Response::new(body(Tells::End, [Data("abc")]));
        let response = respond(layer(&limiter), response).await;
        assert_eq!(settled(&recorder), [0; 0]);
        response.into_body().collect().await.unwrap();
        assert_eq!(settled(&recorder), [500]);
    }
}

#[tokio::test]
async fn each_limiter_is_settled_by_its_name() {
    let recorder = Recorder::new();
    let store = observed(MemoryStore::new(), recorder.clone());
    let [requests, input, output] = ["requests", "input", "output"].map(|name| {
        Limiter::new(name, store.clone(), Algorithm::SlidingLog, Quota::per_day(1_000))
    });
    let layer = RateLimitLayer::by_rule(move |_: &Parts| {
        let charge = Charge::new(&requests, "ada").also(&input).estimate(300);
        Ok(charge.also(&output).estimate(200))
    })
    .settle_by(|head| {
        let used = head.headers.get("used")?.to_str().ok()?.parse().ok()?;
        Some(Usage::of("input", used).and("requests", 9).and("input", 4).and("output", 20))
    });
    for (used, expected) in [
        ("250", ["hold ended input ada 300 250", "hold ended output ada 200 20"]),
        ("none", ["hold ended input ada 300 300", "hold ended output ada 200 200"]),
    ] {
        let response = Response::builder().header("used", used).body(Body::empty()).unwrap();
        drop(respond(layer.clone(), response).await);
        assert_eq!(recorder.take_of("hold ended"), expected);
    }
}

/// How a service does not respond.
#[derive(Clone, Copy)]
enum Without {
    Failing,
    Panicking,
    Waiting,
}

#[tokio::test]
async fn a_request_without_a_response_ends_its_holds_once() {
    for without in [Without::Failing, Without::Panicking, Without::Waiting] {
        let (limiter, recorder) = recorded();
        let service = service_fn(move |_: Request<Body>| async move {
            match without {
                Without::Failing => Err::<Response<Body>, _>(BoxError::from("as intended")),
                Without::Panicking => panic!("as intended"),
                Without::Waiting => std::future::pending().await,
            }
        });
        let mut response = Box::pin(bytewise(&limiter).layer(service).call(get(&[])));
        let mut poll = || {
            let polled = response.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            matches!(polled, Poll::Ready(Err(_)))
        };
        let polled = catch_unwind(AssertUnwindSafe(&mut poll));
        let expected = match without {
            Without::Failing => vec![500],
            Without::Panicking | Without::Waiting => vec![],
        };
        assert_eq!(polled.is_err(), matches!(without, Without::Panicking));
        assert_eq!(settled(&recorder), expected);
        drop(response);
        let expected = if expected.is_empty() { vec![500] } else { vec![] };
        assert_eq!(settled(&recorder), expected);
        assert_eq!(limiter.peek("global").await.unwrap().held(), 0);
    }
}

#[tokio::test]
async fn a_request_that_is_dropped_before_its_first_poll_holds_nothing() {
    let (limiter, recorder) = recorded();
    let service = service_fn(async |_: Request<Body>| Ok::<_, Infallible>(Response::new(())));
    drop(bytewise(&limiter).layer(service).call(get(&[])));
    assert_eq!(recorder.take(), [""; 0]);
}

struct Panicking {
    in_data: bool,
}

impl Meter for Panicking {
    fn data(&mut self, _: &[u8]) {
        assert!(!self.in_data, "as intended");
    }

    fn usage(&mut self, _: bool) -> Option<Usage> {
        panic!("as intended");
    }
}

#[tokio::test]
async fn if_a_meter_panics_the_estimate_counts() {
    for in_data in [true, false] {
        let (limiter, recorder) = recorded();
        let layer = holding(&limiter).settle_by(move |_| Panicking { in_data });
        let response = Response::new(body(Tells::End, [Data("abc")]));
        let mut body = respond(layer, response).await.into_body();
        assert!(catch_unwind(AssertUnwindSafe(|| poll(&mut body))).is_err());
        drop(body);
        assert_eq!(settled(&recorder), [500]);
    }
    let (limiter, recorder) = recorded();
    let layer = holding(&limiter).settle_by(|_| -> Usage { panic!("as intended") });
    let mut response = pin!(respond(layer, Response::new(())));
    let mut poll = || response.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready();
    assert!(catch_unwind(AssertUnwindSafe(&mut poll)).is_err());
    assert_eq!(settled(&recorder), [500]);
}

#[tokio::test]
async fn a_request_that_holds_nothing_has_no_meter() {
    let limiter = in_memory(Quota::per_day(1_000));
    let layer = holding(&limiter).settle_by(|_| -> Usage { panic!("there is nothing to settle") });
    let dry = layer.clone().dry_run(true);
    let _ = limiter.check("global").cost(900).await.unwrap();
    let ok = async |layer| respond(layer, Response::new(())).await.status();
    assert_eq!(ok(dry).await, StatusCode::OK);
    assert_eq!(ok(layer.clone().exempt(|_: &Parts| true)).await, StatusCode::OK);
    assert_eq!(ok(layer.clone().cost(|_| 0)).await, StatusCode::OK);
    assert_eq!(ok(layer).await, StatusCode::TOO_MANY_REQUESTS);

    // A response that is not charged has none either.
    limiter.reset("global").await.unwrap();
    let layer = holding(&limiter).charge_when(|_| false);
    let layer = layer.settle_by(|_| -> Usage { panic!("there is nothing to settle") });
    assert_eq!(ok(layer).await, StatusCode::OK);
    assert_eq!(limiter.peek("global").await.unwrap().remaining(), 1_000);
}

#[tokio::test]
async fn a_custom_request_ends_its_holds_with_its_future() {
    let (limiter, recorder) = recorded();
    let rule = {
        let limiter = limiter.clone();
        move |name: &String| Ok(Charge::new(&limiter, name).estimate(5))
    };
    let layer = RateLimitLayer::custom_by_rule(rule, |_, _: &String| String::new());
    let service = layer.layer(service_fn(async |name: String| match &*name {
        "fail" => Err("as intended"),
        _ => Ok(name),
    }));
    for name in ["ada", "fail"] {
        let mut response = Box::pin(service.clone().oneshot(name.to_owned()));
        let polled = response.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert!(polled.is_ready());
        assert_eq!(settled(&recorder), [5]);
        drop(response);
        assert_eq!(settled(&recorder), [0; 0]);
    }
}

#[tokio::test]
async fn a_custom_request_is_settled_by_its_response() {
    let (limiter, recorder) = recorded();
    // The response is the number of units that were used, if it is known.
    let service = service_fn(async |name: String| match &*name {
        "fail" => Err("as intended"),
        _ => Ok(name.parse().ok()),
    });
    let settle = |used: &Option<u64>| match used {
        Some(0) => Some(Usage::of("another", 0)),
        Some(9) => panic!("as intended"),
        used => used.map(|used| Usage::of("default", used)),
    };
    let by_key = RateLimitLayer::custom(&limiter, key::Global, |_, _: &String| None)
        .cost(|_| 5)
        .settle_by(settle);
    let rule = {
        let limiter = limiter.clone();
        move |_: &String| Ok(Charge::new(&limiter, "global").estimate(5))
    };
    let by_rule = RateLimitLayer::custom_by_rule(rule, |_, _: &String| None).settle_by(settle);
    for layer in [by_key, by_rule] {
        for (answer, used) in [("2", 2), ("7", 7), ("unknown", 5), ("0", 5), ("fail", 5)] {
            let _ = layer.layer(service).oneshot(answer.to_owned()).await;
            assert_eq!(settled(&recorder), [used], "{answer}");
        }
        let panics = tokio::spawn(layer.layer(service).oneshot("9".to_owned()));
        assert!(panics.await.unwrap_err().is_panic());
        assert_eq!(settled(&recorder), [5]);
    }
}

/// A response body has the same auto traits with any meter.
#[test]
fn a_response_body_is_send_and_sync() {
    fn check<T: Send + Sync + Unpin + std::panic::UnwindSafe + std::panic::RefUnwindSafe>() {}
    check::<ResponseBody<String>>();
}

/// Sums the numbers of the lines `data: <number>` of a stream of events.
#[derive(Default)]
struct Events {
    line: Vec<u8>,
    sum: u64,
}

impl Meter for Events {
    fn data(&mut self, data: &[u8]) {
        for &byte in data {
            if byte != b'\n' {
                self.line.push(byte);
                continue;
            }
            let line = String::from_utf8(std::mem::take(&mut self.line)).unwrap();
            let number = line.strip_prefix("data: ").and_then(|it| it.parse::<u64>().ok());
            self.sum += number.unwrap_or(0);
        }
    }

    fn usage(&mut self, _: bool) -> Option<Usage> {
        Some(Usage::of("default", self.sum))
    }
}

async fn until_ended(recorder: &Recorder) -> Vec<u64> {
    loop {
        let settled = settled(recorder);
        if !settled.is_empty() {
            return settled;
        }
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_server_of_axum_settles_streams_that_end_and_that_clients_cut_off() {
    let (limiter, recorder) = recorded();
    let stream = |is_endless: bool| {
        let frames = ["data: 1", "0\nda", "ta: 7\n"].map(Ok::<_, Infallible>);
        let frames = tokio_stream::iter(frames);
        match is_endless {
            true => Body::from_stream(frames.chain(tokio_stream::pending())),
            false => Body::from_stream(frames),
        }
    };
    let app = Router::new()
        .route("/ends", routing::get(async move || stream(false)))
        .route("/endless", routing::get(async move || stream(true)))
        .route("/text", routing::get("data: 30\n"))
        .layer(holding(&limiter).settle_by(|_| Events::default()));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let server = tokio::spawn(axum::serve(listener, app).into_future());
    let client = reqwest::Client::new();
    let path = async |path: &str| client.get(format!("{url}{path}")).send().await.unwrap();

    assert_eq!(path("/ends").await.text().await.unwrap(), "data: 10\ndata: 7\n");
    assert_eq!(until_ended(&recorder).await, [17]);
    assert_eq!(path("/text").await.text().await.unwrap(), "data: 30\n");
    assert_eq!(until_ended(&recorder).await, [30]);
    let response = client.head(format!("{url}/text")).send().await.unwrap();
    assert_eq!(response.headers()["content-length"], "9");
    assert_eq!(until_ended(&recorder).await, [0]);

    let mut response = path("/endless").await;
    let mut seen = 0;
    while seen < "data: 10\ndata: 7\n".len() {
        seen += response.chunk().await.unwrap().unwrap().len();
    }
    assert_eq!(settled(&recorder), [0; 0]);
    drop(response);
    assert_eq!(until_ended(&recorder).await, [17]);
    server.abort();
}

#[tokio::test]
async fn a_handler_settles_in_its_stream() {
    let (limiter, recorder) = recorded();
    let handler = async |Extension(settle): Extension<Settle>| {
        Body::from_stream(tokio_stream::iter([1_u64, 2, 3]).map(move |number| {
            if number == 3 {
                settle.settle("default", 6).unwrap();
            }
            Ok::<_, Infallible>(number.to_string())
        }))
    };
    let layer = holding(&limiter).settle_handle(true);
    let app = Router::new().route("/", routing::get(handler)).layer(layer);
    let response = app.oneshot(get(&[])).await.unwrap();
    assert_eq!(settled(&recorder), [0; 0]);
    let body = response.into_body().collect().await.unwrap().to_bytes();
    assert_eq!((&*body, settled(&recorder)), (&b"123"[..], vec![6]));
}

/// Reads the status of a gRPC response, which is in its trailers, or in its head if it has no body.
struct GrpcStatus(Option<u64>);

impl GrpcStatus {
    fn read(headers: &HeaderMap) -> Option<u64> {
        headers.get("grpc-status")?.to_str().ok()?.parse().ok()
    }
}

impl Meter for GrpcStatus {
    fn trailers(&mut self, trailers: &HeaderMap) {
        self.0 = Self::read(trailers);
    }

    fn usage(&mut self, is_complete: bool) -> Option<Usage> {
        assert!(is_complete);
        Some(Usage::of("default", 10 + self.0?))
    }
}

#[tokio::test]
async fn a_server_of_tonic_settles_by_its_trailers() {
    use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

    let (limiter, recorder) = recorded();
    let layer = holding(&limiter).settle_by(|head| GrpcStatus(GrpcStatus::read(&head.headers)));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let health = tonic_health::server::health_reporter().1;
    let server = tonic::transport::Server::builder().layer(layer).add_service(health);
    let incoming = tonic::transport::server::TcpIncoming::from(listener);
    let server = tokio::spawn(server.serve_with_incoming(incoming));
    let endpoint = tonic::transport::Endpoint::from_shared(url).unwrap();
    let mut client = HealthClient::new(endpoint.connect().await.unwrap());
    client.check(HealthCheckRequest::default()).await.unwrap();
    assert_eq!(until_ended(&recorder).await, [10]);
    let unknown = HealthCheckRequest { service: "unknown".to_owned() };
    let status = client.check(unknown).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::NotFound);
    assert_eq!(until_ended(&recorder).await, [15]);
    server.abort();
}

#[tokio::test(start_paused = true)]
async fn a_request_that_may_wait_waits_until_a_hold_has_ended() {
    let limiter = in_memory(Quota::per_day(10));
    let permit = limiter.hold(key::Global.key(), 10).await.unwrap().admitted().unwrap();
    let layer = RateLimitLayer::new(&limiter, key::Global).max_wait(Duration::from_secs(5));
    let service = layer.layer(service_fn(async |_: Request<Body>| {
        Ok::<_, Infallible>(Response::new(Body::empty()))
    }));
    let waiting = tokio::spawn(service.clone().oneshot(get(&[])));
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(!waiting.is_finished());
    permit.settle(9);
    assert_eq!(waiting.await.unwrap().unwrap().status(), StatusCode::OK);
    let denied = service.oneshot(get(&[])).await.unwrap();
    assert_eq!(denied.status(), StatusCode::TOO_MANY_REQUESTS);
}
