//! Responses to rejected requests: those that a closure of `map_rejection` makes, and those of
//! handlers that check a limiter themselves.

use std::{
    convert::Infallible,
    panic::catch_unwind,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::{Json, Router, body::Body, extract::State, response::IntoResponse, routing};
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, request::Parts};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use serde_json::json;
use tokio_stream::StreamExt;
use tower::{Layer, ServiceExt};
use tower_ratelimit::{
    Algorithm, Charge, Decision, Error, FailurePolicy, Limiter, MemoryStore, Quota, RateLimitLayer,
    RedisStore, key,
    layer::{Headers, MissingKey, Rejection, RequestError, ResponseBody},
    store::Source,
};

use crate::support::{counting, get, header, in_memory, item, items, json as body_of, log::Log};

async fn send(layer: &RateLimitLayer, request: Request<Body>) -> Response<ResponseBody<Body>> {
    layer.layer(counting(&Arc::default())).oneshot(request).await.unwrap()
}

/// A layer that rejects.
async fn used_up() -> RateLimitLayer {
    let limiter = in_memory(Quota::per_hour(1));
    limiter.spend("global", 1).await.unwrap();
    RateLimitLayer::new(limiter, key::Global).extensions(true)
}

async fn text<B: http_body::Body<Error: std::fmt::Debug>>(response: Response<B>) -> Bytes {
    response.into_body().collect().await.unwrap().to_bytes()
}

#[tokio::test]
async fn a_mapped_rejection_can_be_the_response_of_axum() {
    let layer = used_up().await.map_rejection(|rejection, _head, response| {
        let error = json!({"error": "busy", "retry": rejection.retry_after_secs()});
        (response.status(), Json(error)).into_response()
    });
    let both = [Headers::Draft11, Headers::XRateLimit];
    let response = send(&layer.clone().headers(both), get(&[])).await;
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(header(&response, "content-type"), ["application/json"]);
    assert_eq!(header(&response, "retry-after"), ["3600"], "the layer adds its headers");
    assert_eq!(header(&response, "cache-control"), ["no-store"]);
    assert_eq!(header(&response, "x-ratelimit-limit"), ["1"]);
    assert_eq!(items(&response, "ratelimit"), [item("default", &[("r", 0), ("t", 3600)])]);
    assert_eq!(items(&response, "ratelimit-policy"), [item("default", &[("q", 1), ("w", 3600)])]);
    assert!(matches!(response.extensions().get(), Some(Rejection::Denied(_))));
    assert!(!response.extensions().get::<Decision>().unwrap().is_allowed());
    assert_eq!(body_of(response).await, json!({"error": "busy", "retry": 3600}));

    for (headers, retry_after) in [(vec![], vec![]), (vec![Headers::RetryAfter], vec!["3600"])] {
        let response = send(&layer.clone().headers(headers), get(&[])).await;
        assert_eq!(header(&response, "retry-after"), retry_after);
        assert!(header(&response, "ratelimit").is_empty());
        assert!(header(&response, "ratelimit-policy").is_empty());
    }
}

#[tokio::test]
async fn headers_that_a_mapped_rejection_has_are_kept() {
    let layer = used_up().await.map_rejection(|_, _, _| {
        let headers = [("retry-after", "7"), ("ratelimit", "\"own\";r=0"), ("x-own", "1")];
        (StatusCode::SERVICE_UNAVAILABLE, headers, "later").into_response()
    });
    let response = send(&layer, get(&[])).await;
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(header(&response, "retry-after"), ["7"]);
    assert_eq!(header(&response, "ratelimit"), ["\"own\";r=0"]);
    assert_eq!(header(&response, "ratelimit-policy").len(), 1);
    assert_eq!(header(&response, "x-own"), ["1"]);
    assert_eq!(text(response).await, "later");
}

/// A body in pieces, each of which comes after a millisecond.
fn slow(pieces: Vec<Bytes>) -> Body {
    let pieces = tokio_stream::iter(pieces).then(async |piece| {
        tokio::time::sleep(Duration::from_millis(1)).await;
        Ok::<_, Infallible>(Frame::data(piece))
    });
    Body::new(StreamBody::new(pieces))
}

#[tokio::test(start_paused = true)]
async fn a_body_that_is_not_complete_is_collected() {
    let layer = used_up().await.map_rejection(|_, _, response| {
        response.map(|_| slow(vec!["not ".into(), "so ".into(), "fast".into()]))
    });
    let mut future = Box::pin(send(&layer, get(&[])));
    let waker = std::task::Waker::noop();
    assert!(future.as_mut().poll(&mut Context::from_waker(waker)).is_pending());
    let response = future.await;
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(header(&response, "retry-after"), ["3600"]);
    let body = http_body::Body::size_hint(response.body());
    assert_eq!(body.exact(), Some(11), "the body is complete");
    assert_eq!(text(response).await, "not so fast");
}

#[tokio::test(start_paused = true)]
async fn a_body_that_is_too_long_is_a_mistake_of_the_service() {
    const KIB: usize = 1024;
    for (pieces, is_valid) in [
        (vec![vec![b'x'; 64 * KIB]], true),
        (vec![vec![b'x'; 63 * KIB], vec![b'x'; KIB]], true),
        (vec![vec![b'x'; 64 * KIB + 1]], false),
        (vec![vec![b'x'; 64 * KIB], vec![b'x']], false),
    ] {
        let layer = used_up().await.map_rejection(move |_, _, response| {
            response.map(|_| slow(pieces.iter().cloned().map(Bytes::from).collect()))
        });
        let response = send(&layer, get(&[])).await;
        assert!(response.extensions().get::<Rejection>().is_some());
        assert_eq!(header(&response, "cache-control"), ["no-store"]);
        if is_valid {
            assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
            assert_eq!(text(response).await.len(), 64 * KIB);
        } else {
            assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
            assert_eq!(body_of(response).await["detail"], MISCONFIGURED);
        }
    }
}

#[tokio::test]
async fn a_body_that_fails_is_a_mistake_of_the_service() {
    let layer = used_up().await.map_rejection(|_, _, response| {
        let failure = std::io::Error::other("no template");
        let frames = [Ok(Frame::data(Bytes::from("half"))), Err(failure)];
        response.map(|_| StreamBody::new(tokio_stream::iter(frames)))
    });
    let mistake = "the body of a mapped rejection failed: no template";
    for (layer, detail) in [(layer.clone(), MISCONFIGURED), (layer.error_details(true), mistake)] {
        let (log, _guard) = Log::start(tracing::Level::INFO);
        let response = send(&layer, get(&[])).await;
        assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
        assert_eq!(body_of(response).await["detail"], detail);
        // At most once per 10 s for each layer.
        assert_eq!(log.text().contains(mistake), detail == MISCONFIGURED, "{}", log.text());
    }
}

const MISCONFIGURED: &str = "The service is not set up correctly; its log names the mistake.";

#[tokio::test]
async fn clients_learn_nothing_about_the_inside_of_the_service() {
    let store = MemoryStore::new();
    let (bucket, quota) = (Algorithm::token_bucket(), Quota::per_hour(9));
    let limiter = Limiter::new("api", store.clone(), bucket, quota);
    let leaky = Limiter::new("leaky", store, Algorithm::leaky_bucket(), quota);
    let lazy = RedisStore::lazy("unix:///nowhere/redis.sock").unwrap();
    let in_redis = Limiter::new("api", lazy, bucket, quota);
    let twice = limiter.clone();
    for layer in [
        RateLimitLayer::new(&limiter, key::PeerIp),
        RateLimitLayer::new(&limiter, key::PeerIp.peer_addr(|_| None)),
        RateLimitLayer::new(&limiter, key::Route),
        RateLimitLayer::new(&limiter, key::Global).forbid(key::PeerIp.within(["10.0.0.0/8"])),
        RateLimitLayer::new(&leaky, key::Global).charge_when(|_| true),
        RateLimitLayer::by_rule(|_: &Parts| {
            Err::<Charge, _>(RequestError::misconfigured("`plans` has no peer: tower_ratelimit"))
        }),
        RateLimitLayer::by_rule(|_: &Parts| Err::<Charge, _>(RequestError::missing_key("no")))
            .missing_key(MissingKey::Share),
        RateLimitLayer::by_rule(move |_: &Parts| Ok(Charge::new(&twice, "a").also(&twice))),
        RateLimitLayer::new(in_redis, key::Global),
    ] {
        let layer = layer.extensions(true);
        let response = send(&layer, get(&[])).await;
        assert!(response.status().is_server_error());
        let rejection = response.extensions().get::<Rejection>().unwrap().clone();
        let body = String::from_utf8(text(response).await.to_vec()).unwrap();
        for text in [rejection.to_string(), body] {
            for word in ["`", "peer", "redis", "Redis", "leaky", "tower_ratelimit", "twice"] {
                assert!(!text.contains(word), "{text}");
            }
        }
    }
}

/// A body that is dropped before it is complete.
struct Endless {
    _alive: Arc<()>,
}

impl http_body::Body for Endless {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Pending
    }
}

#[tokio::test]
async fn a_body_is_dropped_with_the_response() {
    let alive = Arc::new(());
    let of_body = alive.clone();
    let layer = used_up()
        .await
        .map_rejection(move |_, _, response| response.map(|_| Endless { _alive: of_body.clone() }));
    let mut future = Box::pin(send(&layer, get(&[])));
    let waker = std::task::Waker::noop();
    assert!(future.as_mut().poll(&mut Context::from_waker(waker)).is_pending());
    assert_eq!(Arc::strong_count(&alive), 3);
    drop(future);
    assert_eq!(Arc::strong_count(&alive), 2);
}

#[tokio::test]
async fn a_mapped_rejection_of_grpc_gets_no_headers_of_http() {
    let layer = used_up().await.map_rejection(|_, _, response| response);
    let mut request = get(&[("content-type", "application/grpc")]);
    *request.method_mut() = Method::POST;
    let response = send(&layer, request).await;
    assert_eq!(header(&response, "grpc-status"), ["8"]);
    assert!(header(&response, "retry-after").is_empty());
    assert!(http_body::Body::is_end_stream(response.body()));
}

async fn handler(State(limiter): State<Limiter>, head: Parts) -> Result<String, Rejection> {
    let cost = head.uri.path().trim_start_matches('/').parse().unwrap();
    let decision = limiter.check("all").cost(cost).await?;
    match decision.is_allowed() {
        true => Ok(format!("{} left", decision.remaining())),
        false => Err(Rejection::Denied(decision)),
    }
}

#[tokio::test]
async fn a_handler_responds_like_the_layer() {
    let app = |limiter| Router::new().route("/{cost}", routing::get(handler)).with_state(limiter);
    let request = |path: &str| Request::get(path).body(Body::empty()).unwrap();
    let quota = Quota::per_hour(5);
    let by_layer = RateLimitLayer::new(in_memory(quota), |_: &Parts| "all")
        .cost(|head: &Parts| head.uri.path()[1..].parse().unwrap_or(1));
    let router = app(in_memory(quota));
    for (path, status) in [("/5", 200), ("/1", 429), ("/6", 429)] {
        let by_layer = send(&by_layer, request(path)).await;
        let by_handler = router.clone().oneshot(request(path)).await.unwrap();
        assert_eq!(by_handler.status(), status, "{path}");
        if status == 200 {
            assert_eq!(text(by_handler).await, "0 left");
            continue;
        }
        assert!(by_handler.extensions().get::<Rejection>().is_some());
        assert!(by_layer.extensions().get::<Rejection>().is_none());
        let mut expected = by_layer.headers().clone();
        if path == "/6" {
            expected.remove("ratelimit-policy"); // the rejection has no quota
        }
        let mut headers = by_handler.headers().clone();
        headers.remove("content-length"); // the router adds it
        assert_eq!(headers, expected, "{path}");
        assert_eq!(body_of(by_handler).await, body_of(by_layer).await, "{path}");
    }
    let unreachable = RedisStore::lazy("unix:///nowhere/redis.sock").unwrap();
    let unreachable = Limiter::new("default", unreachable, Algorithm::token_bucket(), quota);
    let response = app(unreachable).oneshot(request("/1")).await.unwrap();
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(header(&response, "retry-after"), ["1"]);
    // The only mistake that a handler returns in these tests: at most one per 10 s is logged.
    let (log, _guard) = Log::start(tracing::Level::INFO);
    let response = app(in_memory(quota)).oneshot(request("/0")).await.unwrap();
    assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR, "a mistake in the handler");
    assert_eq!(body_of(response).await["detail"], MISCONFIGURED);
    assert!(log.text().contains("invalid cost 0"), "{}", log.text());
}

#[tokio::test(start_paused = true)]
async fn a_decision_has_headers_and_whole_seconds() {
    let quota = Quota::new(2, Duration::from_millis(2_500));
    let limiter = Limiter::new("default", MemoryStore::new(), Algorithm::sliding_log(), quota);
    let allowed = limiter.check("ada").await.unwrap();
    let headers = allowed.headers();
    assert_eq!(headers["ratelimit"], "\"default\";r=1;t=3");
    assert_eq!(headers["ratelimit-policy"], "\"default\";q=2");
    assert_eq!((headers.len(), allowed.retry_after_secs()), (2, None));
    limiter.spend("ada", 1).await.unwrap();
    let denied = limiter.check("ada").await.unwrap();
    assert_eq!(denied.retry_after_secs(), Some(3));
    assert_eq!(denied.headers()["retry-after"], "3");
    assert_eq!(denied.headers()["cache-control"], "no-store");
    assert_eq!(Rejection::Denied(denied).retry_after_secs(), Some(3));
    tokio::time::advance(Duration::from_millis(2_400)).await;
    assert_eq!(limiter.check("ada").await.unwrap().retry_after_secs(), Some(1));
    let forbidden = RequestError::forbidden("no");
    assert_eq!(Rejection::Request(forbidden).retry_after_secs(), None);
}

#[tokio::test(start_paused = true)]
async fn the_text_of_a_rejection_rounds_its_wait_as_the_default_body_does() {
    let limiter = in_memory(Quota::per_minute(1));
    let layer = RateLimitLayer::new(limiter.clone(), key::Global).extensions(true);
    assert_eq!(send(&layer, get(&[])).await.status(), StatusCode::OK);
    for (passed, seconds) in [(131, "60"), (869, "59"), (58_001, "1")] {
        tokio::time::advance(Duration::from_millis(passed)).await;
        let response = send(&layer, get(&[])).await;
        assert_eq!(header(&response, "retry-after"), [seconds]);
        let rejection: &Rejection = response.extensions().get().unwrap();
        let text = format!("rate limit exceeded; try again in {seconds} s (limiter \"default\")");
        assert_eq!(rejection.to_string(), text);
        assert_eq!(body_of(response).await["detail"], format!("Try again in {seconds} s."));
    }
    limiter.block("global", Duration::from_millis(1_500)).await.unwrap();
    let rejection = Rejection::Denied(limiter.check("global").await.unwrap());
    let text = "this client is blocked; try again in 2 s (limiter \"default\")";
    assert_eq!(rejection.to_string(), text);
}

#[tokio::test]
async fn the_default_body_ends_with_a_newline() {
    let limiter = in_memory(Quota::per_hour(1));
    let layer = RateLimitLayer::new(limiter, key::header("user")).extensions(true);
    for user in [&[("user", "ada")][..], &[("user", "ada")], &[]] {
        let response = send(&layer, get(user)).await;
        let is_rejected = response.extensions().get::<Rejection>().is_some();
        let length = http_body::Body::size_hint(response.body()).exact();
        let body = text(response).await;
        assert_eq!(length, Some(body.len() as u64));
        assert_eq!(body.ends_with(b"}\n"), is_rejected, "{body:?}");
        assert_eq!(body.is_empty(), !is_rejected, "{body:?}");
    }
}

#[test]
fn the_status_of_a_rejection_is_that_of_an_error() {
    for status in [400, 401, 429, 503, 599] {
        let status = StatusCode::from_u16(status).unwrap();
        let _ = (RequestError::with_status(status, "no"), MissingKey::reject_with(status));
    }
    for status in [100, 200, 204, 302, 399, 600] {
        let status = StatusCode::from_u16(status).unwrap();
        let expected = format!("a rejection has a status of 400 to 599, not {status}");
        let denied = RequestError::with_status(status, "no");
        assert_eq!(denied, RequestError::misconfigured(expected.clone()));
        let panic = catch_unwind(|| MissingKey::reject_with(status)).unwrap_err();
        assert_eq!(*panic.downcast_ref::<String>().unwrap(), expected);
    }
}

#[test]
fn a_mistake_in_the_settings_is_named_for_its_developers() {
    let window =
        Limiter::new("api", MemoryStore::new(), Algorithm::fixed_window(), Quota::per_hour(1));
    let error = window.set_quota(Quota::per_hour(1).burst(2)).unwrap_err();
    let text = error.to_string();
    let rejection = Rejection::from(tower_ratelimit::Error::from(error));
    assert_eq!(rejection, Rejection::Request(RequestError::misconfigured(text)));
}

#[tokio::test]
async fn a_closure_for_any_response_borrows_the_rejection() {
    let layer = RateLimitLayer::custom(
        in_memory(Quota::per_hour(1)),
        |name: &String| name.clone(),
        |rejection: &Rejection, name: &String| {
            (rejection.retry_after_secs(), format!("not so fast, {name}"))
        },
    );
    let service = tower::service_fn(async |name: String| Ok::<_, Infallible>((None, name)));
    let shout = async || layer.layer(service).oneshot(String::from("ada")).await.unwrap();
    assert_eq!(shout().await, (None, String::from("ada")));
    assert_eq!(shout().await, (Some(3600), String::from("not so fast, ada")));
}

#[tokio::test(start_paused = true)]
async fn a_limiter_without_a_layer_has_a_failure_policy() {
    let store = RedisStore::lazy("unix:///nowhere/redis.sock").unwrap();
    let limiter = Limiter::new("default", store, Algorithm::sliding_log(), Quota::per_hour(8));
    let hour = Duration::from_secs(3_600);
    let sources = async |limiter: &Limiter| {
        [
            limiter.check("a").await.map(|it| it.source()),
            limiter.check("b").cost(2).await.map(|it| it.source()),
            limiter.reserve("c", 2, hour).await.map(|it| it.decision().source()),
            limiter.try_acquire("d", 2, hour).await.map(|it| it.source()),
            limiter.acquire("e", 2).await.map(|it| it.source()),
        ]
    };
    for closed in [limiter.clone(), limiter.clone().on_failure(FailurePolicy::Closed)] {
        for result in sources(&closed).await {
            assert!(result.unwrap_err().is_store());
        }
    }
    let open = limiter.clone().on_failure(FailurePolicy::Open);
    for result in sources(&open).await {
        assert_eq!(result.unwrap(), Source::Open);
    }
    assert!(open.peek("a").await.unwrap_err().is_store(), "a policy is for checks");
    let error = open.check("a").cost(9).await.unwrap_err();
    assert!(matches!(error, Error::CostAboveQuota { .. }), "not a failure of the store");

    let local = limiter.clone().on_failure(FailurePolicy::local(0.25));
    for result in sources(&local).await {
        assert_eq!(result.unwrap(), Source::Local);
    }
    assert!(local.check("a").await.unwrap().is_allowed());
    let denied = local.check("a").await.unwrap();
    assert!(!denied.is_allowed() && denied.source() == Source::Local, "2 of 8 are allowed");
    assert!(
        local.check("f").cost(3).await.unwrap_err().is_store(),
        "more than the share can grant"
    );
    let start = tokio::time::Instant::now();
    let waited = local.try_acquire("d", 1, 2 * hour).await.unwrap();
    assert!(waited.is_allowed() && start.elapsed() >= hour - Duration::from_secs(1));
    let reserved = local.reserve("b", 1, 2 * hour).await.unwrap().keep();
    assert!(reserved.is_allowed());
    let other = local.with_quota(Quota::per_hour(4)).unwrap();
    assert_eq!(other.check("g").await.unwrap().source(), Source::Local, "the policy is kept");
}
