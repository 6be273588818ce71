//! The responses to gRPC clients.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use axum::{Router, body::Body, routing};
use http::{Extensions, HeaderValue, Method, Request, Response, Version, request::Parts};
use http_body_util::BodyExt;
use hyper_util::{
    client::legacy::{self, connect::HttpConnector},
    rt::TokioExecutor,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, DuplexStream, WriteHalf, duplex, split},
    net::{TcpListener, TcpStream, tcp::OwnedReadHalf},
    time::{Instant, advance},
};
use tonic::{
    Code, Status,
    service::Routes,
    transport::{
        Channel, Endpoint, Server,
        server::{TcpConnectInfo, TcpIncoming},
    },
};
use tonic_health::pb::{
    HealthCheckRequest,
    health_client::HealthClient,
    health_server::{Health, HealthServer},
};
use tonic_types::StatusExt;
use tonic_web::{GrpcWebCall, GrpcWebClientLayer, GrpcWebClientService, GrpcWebLayer};
use tower::{Layer, ServiceBuilder, ServiceExt};
use tower_ratelimit::{
    Algorithm, Charge, Key, Limiter, MemoryStore, Quota, RateLimitLayer, RedisStore,
    key::{self, ClientIp, ProxyHeader},
    layer::{Headers, RequestError, ResponseBody},
};

use crate::support::{counting, get, header, in_memory, item, items};

const HOUR: Duration = Duration::from_secs(3_600);
const MICROSECOND: Duration = Duration::from_micros(1);

fn health() -> HealthServer<impl Health> {
    tonic_health::server::health_reporter().1
}

async fn listen() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

/// Starts a tonic server.
async fn serve(layer: RateLimitLayer) -> SocketAddr {
    let (listener, address) = listen().await;
    let server = Server::builder().layer(layer).add_service(health());
    tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
    address
}

async fn connect(address: SocketAddr) -> HealthClient<Channel> {
    let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
    HealthClient::new(endpoint.connect().await.unwrap())
}

fn check(user: &str) -> tonic::Request<HealthCheckRequest> {
    let mut request = tonic::Request::new(HealthCheckRequest::default());
    request.metadata_mut().insert("user", user.parse().unwrap());
    request
}

fn retry_delay(status: &Status) -> Option<Duration> {
    status.get_details_retry_info().and_then(|info| info.retry_delay)
}

/// The name of the limit that denies the call, and its description.
fn violation(status: &Status) -> Option<(String, String)> {
    let violation = status.get_details_quota_failure()?.violations.pop()?;
    Some((violation.subject, violation.description))
}

fn pushback(status: &Status) -> Option<&str> {
    status.metadata().get("grpc-retry-pushback-ms").map(|value| value.to_str().unwrap())
}

async fn send(layer: &RateLimitLayer, request: Request<Body>) -> Response<ResponseBody<Body>> {
    layer.layer(counting(&Arc::default())).oneshot(request).await.unwrap()
}

fn grpc(headers: &[(&str, &str)]) -> Request<Body> {
    let mut headers = headers.to_vec();
    headers.push(("content-type", "application/grpc"));
    post(&headers)
}

/// A request as a client in the same process builds it: over HTTP/1.1.
fn post(headers: &[(&str, &str)]) -> Request<Body> {
    let mut request = get(headers);
    *request.method_mut() = Method::POST;
    request
}

/// The status of a rejection; `None` for a response of the service.
async fn status(layer: &RateLimitLayer, request: Request<Body>) -> Option<Status> {
    let response = send(layer, request).await;
    assert_eq!(response.status(), 200);
    let status = Status::from_header_map(response.headers())?;
    assert!(http_body::Body::is_end_stream(response.body()));
    Some(status)
}

/// The clock is paused, so that the delays are exact.
#[tokio::test(start_paused = true)]
async fn a_tonic_client_is_rejected_with_a_retry_delay() {
    let quota = Quota::per_hour(2);
    let layer = RateLimitLayer::new(in_memory(quota), key::header("user"));
    let mut client = connect(serve(layer).await).await;
    for remaining in ["1", "0"] {
        let response = client.check(check("ada")).await.unwrap();
        let start = format!("\"default\";r={remaining};t=");
        let fields = response.metadata().get("ratelimit").unwrap().to_str().unwrap();
        assert!(fields.starts_with(&start), "{fields}");
    }
    advance(Duration::from_micros(1_500)).await;

    let status = client.check(check("ada")).await.unwrap_err();
    let wait = HOUR / 2 - Duration::from_millis(1); // in whole milliseconds, rounded up
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert_eq!(status.message(), "rate limit exceeded; try again in 1799.999 s");
    assert_eq!(retry_delay(&status), Some(wait));
    assert_eq!(pushback(&status), Some("1799999"));
    assert_eq!(violation(&status), Some(("default".into(), "2/h".into())));
    assert!(status.metadata().get("retry-after").is_none());

    assert!(client.check(check("ben")).await.is_ok());
    advance(wait).await;
    assert!(client.check(check("ada")).await.is_ok());
}

#[tokio::test]
async fn a_stream_is_rejected_before_it_opens() {
    let layer = RateLimitLayer::new(in_memory(Quota::per_hour(1)), key::Global);
    let mut client = connect(serve(layer).await).await;
    let mut open = client.watch(HealthCheckRequest::default()).await.unwrap().into_inner();
    assert!(open.message().await.unwrap().is_some());
    let status = client.watch(HealthCheckRequest::default()).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
}

/// Passes on the bytes of a server, and returns them.
async fn record(mut from: OwnedReadHalf, mut to: WriteHalf<DuplexStream>) -> Vec<u8> {
    let (mut recorded, mut buffer) = (vec![], [0; 1_024]);
    loop {
        let length = from.read(&mut buffer).await.unwrap();
        if length == 0 {
            return recorded;
        }
        recorded.extend_from_slice(&buffer[..length]);
        let _ = to.write_all(&buffer[..length]).await; // the client may be gone
    }
}

/// The kinds and flags of the frames of the first stream.
fn frames(mut bytes: &[u8]) -> Vec<(u8, u8)> {
    let mut frames = vec![];
    while let [l0, l1, l2, kind, flags, stream @ ..] = bytes {
        let length = u32::from_be_bytes([0, *l0, *l1, *l2]) as usize;
        if stream[..4] == [0, 0, 0, 1] {
            frames.push((*kind, *flags));
        }
        bytes = &bytes[9 + length..];
    }
    frames
}

#[tokio::test]
async fn a_rejection_is_one_headers_frame_while_the_request_is_still_open() {
    const HEADERS: u8 = 1;
    const RST_STREAM: u8 = 3;
    const END_STREAM: u8 = 1;
    const END_HEADERS: u8 = 4;

    let limiter = in_memory(Quota::per_hour(1));
    assert!(limiter.check("global").await.unwrap().is_allowed());
    let address = serve(RateLimitLayer::new(limiter, |_: &Parts| "global")).await;
    let (io, proxy) = duplex(1_024);
    let (mut from_client, to_client) = split(proxy);
    let (from_server, mut to_server) = TcpStream::connect(address).await.unwrap().into_split();
    tokio::spawn(async move {
        tokio::io::copy(&mut from_client, &mut to_server).await.unwrap();
        to_server.shutdown().await.unwrap();
    });
    let recorded = tokio::spawn(record(from_server, to_client));

    let (mut client, connection) = h2::client::handshake(io).await.unwrap();
    let connection = tokio::spawn(connection);
    let request = Request::post(format!("http://{address}/grpc.health.v1.Health/Check"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(())
        .unwrap();
    let (response, request_body) = client.send_request(request, false).unwrap();
    let response = response.await.unwrap();
    assert_eq!(response.status(), 200);
    assert!(response.body().is_end_stream());
    for (name, value) in [("content-type", "application/grpc"), ("grpc-status", "8")] {
        assert_eq!(header(&response, name), [value]);
    }
    for name in ["grpc-status-details-bin", "grpc-retry-pushback-ms", "ratelimit"] {
        assert_eq!(header(&response, name).len(), 1, "{name}");
    }
    assert!(header(&response, "grpc-message")[0].starts_with("rate limit exceeded"));
    assert!(header(&response, "retry-after").is_empty());

    drop((client, request_body, response));
    connection.await.unwrap().unwrap();
    let mut frames = frames(&recorded.await.unwrap());
    frames.retain(|(kind, _)| *kind != RST_STREAM); // ends the request body, which is not read
    assert_eq!(frames, [(HEADERS, END_STREAM | END_HEADERS)]);
}

fn by_rule_that(rejects: RequestError) -> RateLimitLayer {
    RateLimitLayer::by_rule(move |_: &Parts| Err::<Charge, _>(rejects.clone()))
}

#[tokio::test]
async fn each_rejection_has_a_status() {
    let lazy = RedisStore::lazy("unix:///nowhere/redis.sock").unwrap();
    let without_redis =
        Limiter::new("default", lazy, Algorithm::token_bucket(), Quota::per_hour(1));
    let by = |key| RateLimitLayer::new(in_memory(Quota::per_hour(1)), key);
    let by_user = by(key::header("user"));
    let misconfigured = by_rule_that(RequestError::misconfigured("50 % of the plans"));
    let invalid = by_user.clone().exempt(|_: &Parts| Err(RequestError::invalid("50 %\n\u{e9}")));
    for (layer, user, code, message, may_retry) in [
        (
            RateLimitLayer::new(without_redis, key::Global),
            "ada",
            Code::Unavailable,
            "the rate limit cannot be checked right now; try again later",
            Some("1000"),
        ),
        (by_user.clone(), "", Code::InvalidArgument, "header user is missing or empty", None),
        (invalid, "ada", Code::InvalidArgument, "50 %\n\u{e9}", None),
        (
            misconfigured.clone(),
            "ada",
            Code::Internal,
            "the service is not set up correctly; its log names the mistake",
            None,
        ),
        (misconfigured.error_details(true), "ada", Code::Internal, "50 % of the plans", None),
        (
            by_user.cost(|_: &Parts| 2),
            "ada",
            Code::ResourceExhausted,
            "the request is too large; it counts as 2, and at most 1 are allowed",
            Some("-1"),
        ),
    ] {
        let status = status(&layer, grpc(&[("user", user)])).await.expect(message);
        assert_eq!((status.code(), status.message()), (code, message));
        let retry_after = (code == Code::Unavailable).then_some(Duration::from_secs(1));
        assert_eq!(retry_delay(&status), retry_after, "{message}");
        assert_eq!(pushback(&status), may_retry, "{message}");
    }
}

/// The clock is paused, so that the times are exact.
#[tokio::test(start_paused = true)]
async fn the_text_the_details_and_the_pushback_of_a_denial_have_the_same_time() {
    for (quota, micros, text) in [
        (Quota::new(1, Duration::from_millis(93)), 0, "0.093"),
        (Quota::new(1, Duration::from_millis(93)), 1, "0.093"),
        (Quota::new(1, Duration::from_millis(93)), 92_999, "0.001"),
        (Quota::new(1, Duration::from_millis(1_500)), 0, "1.5"),
        (Quota::per_second(1), 0, "1"),
        (Quota::per_day(1), 0, "86400"),
    ] {
        let layer = RateLimitLayer::new(in_memory(quota), key::Global);
        assert!(status(&layer, grpc(&[])).await.is_none());
        advance(Duration::from_micros(micros)).await;
        let status = status(&layer, grpc(&[])).await.unwrap();
        assert_eq!(status.message(), format!("rate limit exceeded; try again in {text} s"));
        let delay = retry_delay(&status).unwrap();
        assert_eq!(delay.as_secs_f64().to_string(), text);
        assert_eq!(pushback(&status), Some(&*delay.as_millis().to_string()));
        assert_eq!(violation(&status), Some(("default".into(), quota.to_string())));
    }
}

#[tokio::test]
async fn the_status_of_every_kind_of_denial_names_the_limit() {
    let store = MemoryStore::new();
    let bucket = Algorithm::token_bucket();
    let second = Limiter::new("second", store.clone(), bucket, Quota::per_second(100));
    let hour = Limiter::new("hour", store.clone(), bucket, Quota::per_hour(1));
    let both = move |_: &Parts| Ok::<_, RequestError>(Charge::new(&second, "ada").also(&hour));
    let places = Limiter::new("places", store, Algorithm::concurrency(), Quota::concurrent(1));
    let held = places.hold("global", 1).await.unwrap().admitted().unwrap();
    let blocked = in_memory(Quota::per_second(100));
    blocked.block("global", HOUR).await.unwrap();
    let costly = in_memory(Quota::per_second(1));
    let global = |_: &Parts| "global";
    for (layer, limiter, description) in [
        (RateLimitLayer::by_rule(both), "hour", "1/h"),
        (RateLimitLayer::new(&places, global), "places", "1 concurrent"),
        (RateLimitLayer::new(blocked, global), "default", "This client is blocked"),
        (
            RateLimitLayer::new(costly, global).cost(|_: &Parts| 2),
            "default",
            "It counts as 2, and at most 1 are allowed.",
        ),
    ] {
        let first = status(&layer, grpc(&[])).await;
        let denied = match first {
            Some(status) => status,
            None => status(&layer, grpc(&[])).await.unwrap(),
        };
        assert_eq!(denied.code(), Code::ResourceExhausted);
        assert_eq!(violation(&denied), Some((limiter.into(), description.into())));
    }
    drop(held);
}

#[tokio::test]
async fn a_status_shows_the_quota_only_if_the_headers_show_it() {
    let places = Algorithm::concurrency();
    let places = Limiter::new("places", MemoryStore::new(), places, Quota::concurrent(1));
    let held = places.hold("global", 1).await.unwrap().admitted().unwrap();
    let bucket = in_memory(Quota::per_hour(1));
    assert!(bucket.check("global").await.unwrap().is_allowed());
    for (limiter, quota, title) in [
        (places, "1 concurrent", "Too many concurrent requests"),
        (bucket, "1/h", "Rate limit exceeded"),
    ] {
        let layer = RateLimitLayer::new(limiter, |_: &Parts| "global");
        for (headers, description) in [
            (&[Headers::Draft11][..], quota),
            (&[Headers::Draft06, Headers::Draft11All], quota),
            (&[Headers::XRateLimit], title),
            (&[Headers::RetryAfter], title),
            (&[], title),
        ] {
            let layer = layer.clone().headers(headers.iter().copied());
            let denied = status(&layer, grpc(&[])).await.unwrap();
            assert_eq!(violation(&denied).unwrap().1, description, "{headers:?}");
        }
    }
    drop(held);
}

#[tokio::test(start_paused = true)]
async fn a_wait_beyond_the_range_of_the_pushback_is_capped() {
    let quota = Quota::new(1, Duration::from_secs(40 * 24 * 3_600));
    let layer = RateLimitLayer::new(in_memory(quota), key::Global);
    assert!(status(&layer, grpc(&[])).await.is_none());
    let status = status(&layer, grpc(&[])).await.unwrap();
    assert_eq!(retry_delay(&status), Some(quota.window()));
    assert_eq!(pushback(&status), Some("2147483647"));
}

#[tokio::test]
async fn headers_can_be_switched_off_and_the_status_stays() {
    let layer = RateLimitLayer::new(in_memory(Quota::per_hour(1)), key::Global).headers([]);
    let _ = send(&layer, grpc(&[])).await;
    let rejected = send(&layer, grpc(&[])).await;
    assert_eq!(header(&rejected, "grpc-status"), ["8"]);
    assert_eq!(header(&rejected, "grpc-retry-pushback-ms").len(), 1);
    assert!(header(&rejected, "ratelimit").is_empty());
}

#[tokio::test]
async fn the_content_type_of_a_post_identifies_grpc() {
    for (content_type, is_grpc) in [
        ("application/grpc", true),
        ("application/grpc+proto", true),
        ("application/grpc+json", true),
        ("application/grpc; x", true),
        ("application/grpc ;x", true),
        ("application/grpc-web", false),
        ("application/grpc-web+proto", false),
        ("application/grpc-web-text", false),
        ("application/grpcx", false),
        ("application/json", false),
        ("", false),
    ] {
        let layer = RateLimitLayer::new(in_memory(Quota::per_hour(1)), key::Global);
        let request = || post(&[("content-type", content_type)]);
        let _ = send(&layer, request()).await;
        let rejected = send(&layer, request()).await;
        let expected = if is_grpc { (200, vec!["8"]) } else { (429, vec![]) };
        let got = (rejected.status().as_u16(), header(&rejected, "grpc-status"));
        assert_eq!(got, expected, "{content_type:?}");
    }
}

#[tokio::test]
async fn only_a_post_is_grpc_over_any_version_of_http() {
    for method in ["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "POST"] {
        for version in [Version::HTTP_11, Version::HTTP_2, Version::HTTP_3] {
            let layer = RateLimitLayer::new(in_memory(Quota::per_hour(1)), key::Global);
            let request = || {
                let mut request = grpc(&[]);
                *request.method_mut() = Method::try_from(method).unwrap();
                *request.version_mut() = version;
                request
            };
            let _ = send(&layer, request()).await;
            let rejected = send(&layer, request()).await;
            let expected = if method == "POST" { (200, vec!["8"]) } else { (429, vec![]) };
            let got = (rejected.status().as_u16(), header(&rejected, "grpc-status"));
            assert_eq!(got, expected, "{method} {version:?}");
        }
    }
}

#[tokio::test]
async fn a_rejection_forbids_caches_to_store_it() {
    let layer = RateLimitLayer::new(in_memory(Quota::per_hour(1)), key::Global);
    assert!(header(&send(&layer, grpc(&[])).await, "cache-control").is_empty());
    let rejected = send(&layer, grpc(&[])).await;
    assert_eq!(header(&rejected, "grpc-status"), ["8"]);
    assert_eq!(header(&rejected, "cache-control"), ["no-store"]);
}

#[tokio::test]
async fn http_and_grpc_on_one_port_draw_from_one_budget() {
    let limiter = in_memory(Quota::per_hour(3));
    let app = Routes::new(health())
        .into_axum_router()
        .merge(Router::new().route("/", routing::get(async || "hello")))
        .layer(RateLimitLayer::new(limiter, (key::PeerIp, key::header("user"))))
        .into_make_service_with_connect_info::<SocketAddr>();
    let (listener, address) = listen().await;
    tokio::spawn(axum::serve(listener, app).into_future());
    let http = legacy::Client::builder(TokioExecutor::new()).build_http::<Body>();
    let get = async |user| {
        let request = Request::get(format!("http://{address}/")).header("user", user);
        http.request(request.body(Body::empty()).unwrap()).await.unwrap()
    };
    let mut grpc = connect(address).await;

    assert_eq!(get("ada").await.status(), 200);
    assert!(grpc.check(check("ada")).await.is_ok());
    assert_eq!(get("ada").await.status(), 200);

    let status = grpc.check(check("ada")).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    let rejected = get("ada").await;
    assert_eq!(rejected.status(), 429);
    assert_eq!(header(&rejected, "content-type"), ["application/problem+json"]);
    assert!(header(&rejected, "grpc-status").is_empty());

    assert!(grpc.check(check("ben")).await.is_ok());
    assert_eq!(get("ben").await.status(), 200);
}

/// Limits by a rule: each user, and all users together.
fn by_rule(own: Quota, all: Quota) -> RateLimitLayer {
    let store = MemoryStore::new();
    let limiter = |name, quota| Limiter::new(name, store.clone(), Algorithm::FixedWindow, quota);
    let (own, all) = (limiter("user", own), limiter("all", all));
    RateLimitLayer::by_rule(move |head: &Parts| {
        let user = head.headers.get("user").map(HeaderValue::as_bytes).unwrap_or_default();
        Ok(Charge::new(&own, user).and(Charge::new(&all, "all")))
    })
}

#[tokio::test(start_paused = true)]
async fn a_rejection_by_one_of_several_limits_names_that_limit() {
    let layer = by_rule(Quota::per_minute(1), Quota::per_hour(2));
    for (user, denied_by, wait) in [
        ("ada", None, Duration::ZERO),
        ("ada", Some("user"), Duration::from_secs(60)),
        ("ben", None, Duration::ZERO),
        ("carl", Some("all"), HOUR),
    ] {
        let response = send(&layer, grpc(&[("user", user)])).await;
        assert_eq!(
            items(&response, "ratelimit-policy"),
            [item("user", &[("q", 1), ("w", 60)]), item("all", &[("q", 2), ("w", 3600)])]
        );
        let status = Status::from_header_map(response.headers());
        assert_eq!(status.is_some(), denied_by.is_some(), "{user}");
        let (Some(status), Some(limiter)) = (status, denied_by) else { continue };
        assert_eq!(status.code(), Code::ResourceExhausted);
        assert_eq!(retry_delay(&status), Some(wait));
        let seconds = wait.as_secs() as i64;
        assert_eq!(items(&response, "ratelimit"), [item(limiter, &[("r", 0), ("t", seconds)])]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_checks_several_limits_again_respects_the_deadline() {
    let layer = by_rule(Quota::per_minute(1), Quota::per_hour(9)).max_wait(HOUR);
    assert!(status(&layer, grpc(&[("user", "ada")])).await.is_none());
    for (timeout, is_rejected) in [("59S", true), ("2M", false)] {
        let start = Instant::now();
        let call = grpc(&[("user", "ada"), ("grpc-timeout", timeout)]);
        assert_eq!(status(&layer, call).await.is_some(), is_rejected, "{timeout}");
        assert_eq!(start.elapsed().is_zero(), is_rejected, "{timeout}");
    }
}

#[tokio::test]
async fn http_and_grpc_draw_from_one_budget_by_a_rule() {
    let app = Routes::new(health())
        .into_axum_router()
        .merge(Router::new().route("/", routing::get(async || "hello")))
        .layer(by_rule(Quota::per_hour(2), Quota::per_hour(3)));
    let (listener, address) = listen().await;
    tokio::spawn(axum::serve(listener, app.clone()).into_future());
    let mut grpc = connect(address).await;
    let get = async |user| app.clone().oneshot(get(&[("user", user)])).await.unwrap().status();

    assert_eq!(get("ada").await, 200);
    assert!(grpc.check(check("ada")).await.is_ok());
    assert_eq!(get("ada").await, 429);
    assert_eq!(grpc.check(check("ada")).await.unwrap_err().code(), Code::ResourceExhausted);
    assert!(grpc.check(check("ben")).await.is_ok());
    assert_eq!(get("carl").await, 429, "all users together have used three");
}

/// Sends the second request to a quota of one per `window`, which may wait for 200 years. Returns
/// the time that it took, and the status if it was rejected.
async fn second(window: Duration, timeout: &[u8]) -> (Duration, Option<Status>) {
    let layer = RateLimitLayer::new(in_memory(Quota::new(1, window)), key::Global);
    let layer = layer.max_wait(HOUR * 24 * 365 * 200);
    assert!(status(&layer, grpc(&[])).await.is_none());
    let mut request = grpc(&[]);
    request.headers_mut().insert("grpc-timeout", HeaderValue::from_bytes(timeout).unwrap());
    let start = Instant::now();
    let rejected = status(&layer, request).await;
    (start.elapsed(), rejected)
}

#[tokio::test(start_paused = true)]
async fn a_call_waits_only_until_its_deadline() {
    for (text, timeout) in [
        ("1H", HOUR),
        ("01H", HOUR),
        ("2M", Duration::from_secs(120)),
        ("7S", Duration::from_secs(7)),
        ("00000007S", Duration::from_secs(7)),
        ("250m", Duration::from_millis(250)),
        ("99999999m", Duration::from_millis(99_999_999)),
        ("4000u", Duration::from_millis(4)),
        ("99999000n", Duration::from_micros(99_999)),
    ] {
        let (took, rejected) = second(timeout, text.as_bytes()).await;
        assert!(rejected.is_none(), "{text}: {rejected:?}");
        let late = took.checked_sub(timeout).expect(text);
        assert!(late <= Duration::from_millis(1), "{text}: {late:?}");

        let (took, rejected) = second(timeout + MICROSECOND, text.as_bytes()).await;
        let rejected = rejected.expect(text);
        assert_eq!(rejected.code(), Code::ResourceExhausted, "{text}");
        assert_eq!(took, Duration::ZERO, "{text}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_deadline_of_zero_or_of_millennia_is_valid() {
    for text in ["0H", "0n", "1n"] {
        let (took, rejected) = second(HOUR, text.as_bytes()).await;
        assert!(rejected.is_some() && took.is_zero(), "{text}");
    }
    let (took, rejected) = second(HOUR, b"99999999H").await;
    assert!(rejected.is_none() && took >= HOUR);
}

#[tokio::test(start_paused = true)]
async fn an_invalid_deadline_is_ignored() {
    for text in [
        "",
        "H",
        "1",
        "1h",
        "1s",
        "1N",
        "100000000n",
        "-1n",
        "+1n",
        "1.5n",
        "1 n",
        "n1",
        "1nn",
        "1\u{b5}",
        "\u{b5}",
    ] {
        let (took, rejected) = second(HOUR, text.as_bytes()).await;
        assert!(rejected.is_none() && took >= HOUR, "{text:?}: {rejected:?}");
    }
    assert!(second(HOUR, b"1\xff").await.1.is_none());
}

#[tokio::test(start_paused = true)]
async fn an_http_request_has_no_grpc_deadline() {
    let layer = RateLimitLayer::new(in_memory(Quota::per_hour(1)), key::Global).max_wait(HOUR);
    let mut get_of_a_call = grpc(&[("grpc-timeout", "1S")]);
    *get_of_a_call.method_mut() = Method::GET;
    for request in [get(&[("grpc-timeout", "1S")]), post(&[("grpc-timeout", "1S")]), get_of_a_call]
    {
        assert!(status(&layer, request).await.is_none(), "the request waits");
    }
}

#[tokio::test]
async fn a_tonic_client_with_a_deadline_is_rejected_before_it() {
    let quota = Quota::per_hour(1);
    let layer = RateLimitLayer::new(in_memory(quota), key::header("user")).max_wait(HOUR);
    let mut client = connect(serve(layer).await).await;
    let start = Instant::now();
    assert!(client.check(check("ada")).await.is_ok());
    let mut request = check("ada");
    request.set_timeout(HOUR / 2);
    let status = client.check(request).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    // Without the deadline, the request would wait for the other half.
    let delay = retry_delay(&status).unwrap();
    assert!(delay <= HOUR / 2 && HOUR / 2 - delay <= start.elapsed(), "{delay:?}");
}

#[tokio::test(start_paused = true)]
async fn a_leaky_bucket_respects_the_deadline() {
    let store = MemoryStore::new();
    let limiter =
        Limiter::new("default", store, Algorithm::LeakyBucket, Quota::per_hour(1).burst(2));
    let layer = RateLimitLayer::new(limiter, key::Global);
    assert!(status(&layer, grpc(&[])).await.is_none());
    for timeout in ["1M", "59M", "3599999m"] {
        let status = status(&layer, grpc(&[("grpc-timeout", timeout)])).await.expect(timeout);
        assert_eq!(status.code(), Code::ResourceExhausted);
    }
    assert!(status(&layer, grpc(&[("grpc-timeout", "60M")])).await.is_none());
}

type WebClient = legacy::Client<HttpConnector, GrpcWebCall<tonic::body::Body>>;

fn web_client(address: SocketAddr) -> HealthClient<GrpcWebClientService<WebClient>> {
    let http = legacy::Client::builder(TokioExecutor::new()).build_http();
    let service = ServiceBuilder::new().layer(GrpcWebClientLayer::new()).service(http);
    HealthClient::with_origin(service, format!("http://{address}").parse().unwrap())
}

async fn post_grpc_web(
    address: SocketAddr,
) -> Response<impl http_body::Body<Data: Send, Error: std::fmt::Debug>> {
    let http = legacy::Client::builder(TokioExecutor::new()).build_http::<Body>();
    let request = Request::post(format!("http://{address}/grpc.health.v1.Health/Check"))
        .header("content-type", "application/grpc-web")
        .header("user", "ada");
    http.request(request.body(Body::empty()).unwrap()).await.unwrap()
}

#[tokio::test]
async fn inside_of_the_grpc_web_layer_a_rejection_is_grpc_web() {
    let layer = RateLimitLayer::new(in_memory(Quota::per_hour(1)), key::header("user"));
    let (listener, address) = listen().await;
    let server = Server::builder()
        .accept_http1(true)
        .layer(GrpcWebLayer::new())
        .layer(layer)
        .add_service(health());
    tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));

    let mut web = web_client(address);
    assert!(web.check(check("ada")).await.is_ok());
    let status = web.check(check("ada")).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    let wait = retry_delay(&status).unwrap();
    assert!(wait <= HOUR && pushback(&status).is_some(), "{wait:?}");

    let mut grpc = connect(address).await;
    let status = grpc.check(check("ada")).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);

    // A browser sees the status in the headers, as there is no message.
    let rejected = post_grpc_web(address).await;
    assert_eq!(rejected.status(), 200);
    assert_eq!(header(&rejected, "content-type"), ["application/grpc-web+proto"]);
    assert_eq!(header(&rejected, "grpc-status"), ["8"]);
    assert!(rejected.into_body().collect().await.unwrap().to_bytes().is_empty());
}

#[tokio::test]
async fn outside_of_the_grpc_web_layer_a_rejection_is_http() {
    let layer = RateLimitLayer::new(in_memory(Quota::per_hour(1)), key::header("user"));
    let (listener, address) = listen().await;
    let server = Server::builder()
        .accept_http1(true)
        .layer(layer)
        .layer(GrpcWebLayer::new())
        .add_service(health());
    tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));

    assert!(web_client(address).check(check("ada")).await.is_ok());
    let rejected = post_grpc_web(address).await;
    assert_eq!(rejected.status(), 429);
    assert_eq!(header(&rejected, "content-type"), ["application/problem+json"]);
    assert!(header(&rejected, "grpc-status").is_empty());
}

#[tokio::test]
async fn grpc_web_and_http_on_one_port_draw_from_one_budget() {
    let layer = RateLimitLayer::new(in_memory(Quota::per_hour(2)), key::header("user"));
    // `GrpcWebLayer` answers 400 to other requests over HTTP/1.
    let app = Routes::new(health())
        .into_axum_router()
        .layer(layer.clone())
        .layer(GrpcWebLayer::new())
        .merge(Router::new().route("/", routing::get(async || "hello")).layer(layer));
    let (listener, address) = listen().await;
    tokio::spawn(axum::serve(listener, app.clone()).into_future());
    let get = async || app.clone().oneshot(get(&[("user", "ada")])).await.unwrap().status();

    assert_eq!(get().await, 200);
    let mut web = web_client(address);
    assert!(web.check(check("ada")).await.is_ok());
    assert_eq!(web.check(check("ada")).await.unwrap_err().code(), Code::ResourceExhausted);
    assert_eq!(get().await, 429);
}

fn tonic_peer(extensions: &Extensions) -> Option<SocketAddr> {
    extensions.get::<TcpConnectInfo>()?.remote_addr()
}

#[tokio::test]
async fn the_peer_of_a_tonic_server_is_known_with_peer_addr() {
    let limiter = in_memory(Quota::per_hour(3));
    let without_peer_addr = RateLimitLayer::new(limiter.clone(), key::PeerIp);
    let mut without_peer_addr = connect(serve(without_peer_addr).await).await;
    assert_eq!(without_peer_addr.check(check("ada")).await.unwrap_err().code(), Code::Internal);

    let client_ip = ClientIp::new(ProxyHeader::XForwardedFor, ["10.0.0.0/8"]);
    let layers = [
        RateLimitLayer::new(limiter.clone(), key::PeerIp.peer_addr(tonic_peer)),
        RateLimitLayer::new(limiter.clone(), client_ip.peer_addr(tonic_peer)),
        RateLimitLayer::new(limiter.clone(), |head: &Parts| {
            tonic_peer(&head.extensions).map(|peer| peer.ip())
        }),
    ];
    let peer = Key::from(IpAddr::from([127, 0, 0, 1]));
    for (layer, remaining) in layers.iter().zip([2, 1, 0]) {
        let mut client = connect(serve(layer.clone()).await).await;
        assert!(client.check(check("ada")).await.is_ok());
        assert_eq!(limiter.peek(&peer).await.unwrap().remaining(), remaining);
    }
    for layer in layers {
        let mut client = connect(serve(layer).await).await;
        let status = client.check(check("ada")).await.unwrap_err();
        assert_eq!(status.code(), Code::ResourceExhausted, "both share the limiter and the key");
    }
}

#[tokio::test]
async fn a_peer_that_the_key_does_not_find_is_reported_as_misconfiguration() {
    let client_ip = ClientIp::new(ProxyHeader::XForwardedFor, ["10.0.0.0/8"]);
    for layer in [
        RateLimitLayer::new(in_memory(Quota::per_hour(1)), key::PeerIp.peer_addr(tonic_peer)),
        RateLimitLayer::new(in_memory(Quota::per_hour(1)), client_ip.peer_addr(tonic_peer)),
    ] {
        let mut request = grpc(&[]);
        let elsewhere: SocketAddr = "192.0.2.1:80".parse().unwrap();
        request.extensions_mut().insert(elsewhere);
        let status = status(&layer.clone().error_details(true), request).await.unwrap();
        assert_eq!(status.code(), Code::Internal);
        let text = "no peer address: `peer_addr` returned `None`; make it read the place";
        assert!(status.message().contains(text), "{status}");
        assert_eq!(send(&layer, get(&[])).await.status(), 500);
    }
}
