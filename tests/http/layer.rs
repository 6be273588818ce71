//! The layer as HTTP clients, handlers and other layers see it.

use std::{
    collections::HashSet,
    convert::Infallible,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use axum::{
    Extension, Router,
    body::Body,
    extract::{ConnectInfo, OriginalUri},
    routing,
};
use http::{HeaderValue, Method, Request, Response, StatusCode, request::Parts};
use http_body_util::BodyExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_ratelimit::{
    Algorithm, Charge, Decision, Key, Limiter, MemoryStore, Quota, RateLimitLayer, RedisStore,
    key::{self, ClientIp, ProxyHeader},
    layer::{Headers, MissingKey, Rejection, RequestError, ResponseBody},
    store::Store,
};

use crate::support::{
    self, ALGORITHMS, counting, get, header, in_memory, item, items, json, server::RedisServer,
};

async fn send(layer: &RateLimitLayer, request: Request<Body>) -> Response<ResponseBody<Body>> {
    layer.layer(counting(&Arc::default())).oneshot(request).await.unwrap()
}

#[tokio::test]
async fn only_some_outcomes_are_charged() {
    let server = RedisServer::start();
    let in_redis = support::redis_store(&server).await;
    for algorithm in ALGORITHMS.into_iter().filter(|it| *it != Algorithm::LeakyBucket) {
        let quota = Quota::per_hour(2);
        for limiter in [
            Limiter::new("default", MemoryStore::new(), algorithm, quota),
            Limiter::new(algorithm.name(), in_redis.clone(), algorithm, quota),
        ] {
            let layer = RateLimitLayer::new(limiter.clone(), key::Global)
                .charge_when(|response| response.status == StatusCode::UNAUTHORIZED)
                .max_wait(Duration::ZERO);
            let login = layer.layer(tower::service_fn(async |request: Request<Body>| {
                match request.uri().path() {
                    "/fails" => Err(std::io::Error::other("no response")),
                    "/wrong" => Ok(StatusCode::UNAUTHORIZED),
                    _ => Ok(StatusCode::OK),
                }
                .map(|status| Response::builder().status(status).body(Body::empty()).unwrap())
            }));
            let send = async |path: &str| {
                let request = Request::get(path).body(Body::empty()).unwrap();
                login
                    .clone()
                    .oneshot(request)
                    .await
                    .map(|response| response.status().as_u16())
                    .unwrap_or(0)
            };
            // In Redis, units are returned while the response is on its way.
            let left = async |expected| {
                for _ in 0..1_000 {
                    if limiter.peek("global").await.unwrap().remaining() == expected {
                        return;
                    }
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                panic!("{algorithm}: not {expected} are left");
            };
            for _ in 0..5 {
                assert_eq!(send("/").await, 200, "{algorithm}");
                left(2).await;
            }
            assert_eq!(send("/wrong").await, 401, "{algorithm}");
            left(1).await;
            assert_eq!(send("/fails").await, 0, "{algorithm}");
            left(0).await; // a request without a response is charged
            assert_eq!(send("/").await, 429, "{algorithm}");
        }
    }
}

#[tokio::test]
async fn requests_can_be_exempt() {
    let layer = RateLimitLayer::new(in_memory(Quota::per_hour(1)), key::header("user"))
        .exempt(|head: &Parts| head.method == http::Method::OPTIONS);
    let options = || Request::options("/").body(Body::empty()).unwrap();
    for _ in 0..3 {
        let response = send(&layer, options()).await;
        assert_eq!(response.status(), StatusCode::OK);
        assert!(header(&response, "ratelimit").is_empty());
    }
    assert_eq!(send(&layer, get(&[("user", "ada")])).await.status(), StatusCode::OK);
    assert_eq!(send(&layer, get(&[("user", "ada")])).await.status(), 429);
}

#[tokio::test(start_paused = true)]
async fn a_dry_run_counts_and_reports_but_rejects_no_request() {
    for algorithm in ALGORITHMS {
        let limiter = Limiter::new("default", MemoryStore::new(), algorithm, Quota::per_hour(1));
        let layer = RateLimitLayer::new(limiter.clone(), key::header("user"))
            .max_wait(Duration::from_secs(7_200))
            .extensions(true)
            .dry_run(true);
        let start = tokio::time::Instant::now();
        for allowed in [true, false, false] {
            let response = send(&layer, get(&[("user", "ada")])).await;
            assert_eq!(response.status(), StatusCode::OK, "{algorithm}");
            let decision = response.extensions().get::<Decision>().unwrap();
            assert_eq!(decision.is_allowed(), allowed, "{algorithm}");
            assert!(items(&response, "ratelimit")[0].1.contains(&("r".to_owned(), 0)));
        }
        assert_eq!(send(&layer, get(&[])).await.status(), StatusCode::OK, "without a key");
        assert_eq!(start.elapsed(), Duration::ZERO, "{algorithm}: a request waited");
    }
}

#[tokio::test(start_paused = true)]
async fn an_allowed_response_reports_the_quota() {
    let layer = RateLimitLayer::new(in_memory(Quota::per_minute(6).burst(3)), key::Global);
    let response = send(&layer, get(&[])).await;
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(items(&response, "ratelimit"), [item("default", &[("r", 2), ("t", 10)])]);
    assert_eq!(items(&response, "ratelimit-policy"), [item("default", &[("q", 6), ("w", 60)])]);
    assert!(header(&response, "retry-after").is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_rejection_contains_the_reason_and_the_retry_after() {
    let layer = RateLimitLayer::new(in_memory(Quota::new(1, Duration::from_secs(5))), key::Global);
    let _ = send(&layer, get(&[])).await;
    tokio::time::advance(Duration::from_millis(2500)).await;
    let response = send(&layer, get(&[])).await;
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(header(&response, "retry-after"), ["3"]);
    assert_eq!(items(&response, "ratelimit"), [item("default", &[("r", 0), ("t", 3)])]);
    assert_eq!(items(&response, "ratelimit-policy"), [item("default", &[("q", 1), ("w", 5)])]);
    assert_eq!(header(&response, "content-type"), ["application/problem+json"]);
    let problem = json(response).await;
    assert_eq!(problem["type"], "https://iana.org/assignments/http-problem-types#quota-exceeded");
    assert_eq!(problem["status"], 429);
    assert_eq!(problem["violated-policies"], serde_json::json!(["default"]));
}

#[tokio::test(start_paused = true)]
async fn retry_after_is_at_least_a_second() {
    let layer = RateLimitLayer::new(in_memory(Quota::per_second(1000).burst(1)), key::Global);
    let _ = send(&layer, get(&[])).await;
    let response = send(&layer, get(&[])).await;
    assert_eq!(header(&response, "retry-after"), ["1"]);
}

#[tokio::test]
async fn a_window_that_is_not_in_whole_seconds_is_left_out() {
    let quota = Quota::new(10, Duration::from_millis(1500));
    let layer = RateLimitLayer::new(in_memory(quota), key::Global);
    let response = send(&layer, get(&[])).await;
    assert_eq!(items(&response, "ratelimit-policy"), [item("default", &[("q", 10)])]);
}

#[tokio::test]
async fn a_cost_above_the_quota_is_rejected_without_retry_after() {
    let layer = RateLimitLayer::new(in_memory(Quota::per_second(10)), key::Global);
    let layer = layer.cost(|head: &Parts| head.uri.path().len() as u64);
    let long = Request::get("/eleven_long").body(Body::empty()).unwrap();
    let response = send(&layer, long).await;
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    assert!(header(&response, "retry-after").is_empty());
    let response = send(&layer, get(&[])).await;
    assert_eq!(items(&response, "ratelimit")[0].1[0], (String::from("r"), 9), "nothing was spent");
}

#[tokio::test]
async fn a_list_can_make_a_bad_request() {
    let layer = RateLimitLayer::new(in_memory(Quota::per_second(10)), key::Global)
        .exempt(|_: &Parts| Err(RequestError::invalid("say \"please\"")));
    let response = send(&layer, get(&[])).await;
    assert_eq!(response.status(), StatusCode::BAD_REQUEST);
    assert_eq!(json(response).await["detail"], "say \"please\"");
}

#[tokio::test]
async fn a_request_without_a_key_is_rejected_exempt_or_shares_a_key() {
    let layer = || RateLimitLayer::new(in_memory(Quota::per_hour(1)), key::header("user"));
    let without = || [get(&[]), get(&[("user", "")])];

    let rejecting = layer();
    for request in without() {
        let response = send(&rejecting, request).await;
        assert_eq!(response.status(), StatusCode::BAD_REQUEST);
        let problem = json(response).await;
        assert_eq!(
            (&problem["type"], &problem["title"]),
            (&"about:blank".into(), &"Bad Request".into())
        );
        assert_eq!(problem["detail"], "header user is missing or empty");
    }

    let exempting = layer().missing_key(MissingKey::Exempt);
    for request in without() {
        let response = send(&exempting, request).await;
        assert_eq!(response.status(), StatusCode::OK);
        assert!(response.headers().is_empty() && response.extensions().is_empty());
    }

    let sharing = layer().missing_key(MissingKey::Share);
    let [first, second] = without();
    assert_eq!(send(&sharing, first).await.status(), StatusCode::OK);
    assert_eq!(send(&sharing, second).await.status(), StatusCode::TOO_MANY_REQUESTS);
    let named = get(&[("user", "anonymous")]);
    assert_eq!(send(&sharing, named).await.status(), StatusCode::OK, "a user of that name");
}

#[tokio::test]
async fn a_duplicate_header_is_a_bad_request() {
    let layer = RateLimitLayer::new(in_memory(Quota::per_hour(1)), key::header("user"));
    let response = send(&layer, get(&[("user", "ada"), ("user", "ben")])).await;
    assert_eq!(response.status(), StatusCode::BAD_REQUEST);
    assert_eq!(json(response).await["detail"], "header user occurs more than once");
}

#[tokio::test]
async fn a_missing_peer_address_is_reported_as_misconfiguration() {
    for missing_key in [MissingKey::Reject, MissingKey::Exempt, MissingKey::Share] {
        let layer = RateLimitLayer::new(in_memory(Quota::per_hour(1)), key::PeerIp);
        let layer = layer.missing_key(missing_key);
        assert_eq!(send(&layer, get(&[])).await.status(), StatusCode::INTERNAL_SERVER_ERROR);
        let response = send(&layer.error_details(true), get(&[])).await;
        assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
        let detail = json(response).await["detail"].as_str().unwrap().to_owned();
        for text in ["into_make_service_with_connect_info::<SocketAddr>()` of axum 0.8", "a Unix"] {
            assert!(detail.contains(text), "{detail}");
        }
    }
}

#[tokio::test]
async fn a_peer_is_identified_by_its_address() {
    let layer = RateLimitLayer::new(in_memory(Quota::per_hour(1)), key::PeerIp);
    let from = |address: &str| {
        let mut request = get(&[]);
        request.extensions_mut().insert(ConnectInfo(address.parse::<SocketAddr>().unwrap()));
        request
    };
    let mut plain = get(&[]);
    plain.extensions_mut().insert("192.0.2.3:80".parse::<SocketAddr>().unwrap());
    let mut mocked = get(&[]);
    let address: SocketAddr = "192.0.2.4:80".parse().unwrap();
    mocked.extensions_mut().insert(axum::extract::connect_info::MockConnectInfo(address));
    for (request, status) in [
        (from("192.0.2.1:4711"), 200),
        (from("192.0.2.1:4712"), 429),
        (from("[::ffff:192.0.2.1]:4713"), 429),
        (from("192.0.2.2:4711"), 200),
        (from("[2001:db8:0:1::1]:1"), 200),
        (from("[2001:db8:0:1:ffff::2]:1"), 429),
        (from("[2001:db8:0:2::1]:1"), 200),
        (plain, 200),
        (mocked, 200),
        (from("192.0.2.3:4711"), 429),
    ] {
        assert_eq!(send(&layer, request).await.status().as_u16(), status);
    }
}

#[tokio::test]
async fn an_ip_and_an_api_key_never_collide() {
    let limiter = in_memory(Quota::per_hour(1));
    let by_ip = RateLimitLayer::new(limiter.clone(), |_: &Parts| IpAddr::from([192, 0, 2, 1]));
    let by_key = RateLimitLayer::new(limiter.clone(), key::header("ip"));
    let by_text = RateLimitLayer::new(limiter, |_: &Parts| "ip=192.0.2.1");
    for layer in [by_ip, by_key, by_text] {
        let response = send(&layer, get(&[("ip", "192.0.2.1")])).await;
        assert_eq!(response.status(), StatusCode::OK);
    }
}

#[tokio::test]
async fn a_limit_per_address_is_one_call() {
    let layer = RateLimitLayer::per_ip(Quota::per_hour(1).burst(2));
    let from = |address: &str| {
        let mut request = get(&[]);
        request.extensions_mut().insert(address.parse::<SocketAddr>().unwrap());
        request
    };
    for (address, status) in
        [("192.0.2.1:1", 200), ("192.0.2.1:2", 200), ("192.0.2.1:3", 429), ("192.0.2.2:1", 200)]
    {
        assert_eq!(send(&layer, from(address)).await.status(), status);
    }
    let other = RateLimitLayer::per_ip(Quota::per_hour(1));
    assert_eq!(send(&other, from("192.0.2.1:1")).await.status(), 200, "each call counts apart");
}

#[tokio::test]
async fn a_pair_is_one_key_of_both() {
    let app = Router::new()
        .route("/a/{id}", routing::get(async || ()))
        .nest("/n", Router::new().route("/{id}", routing::get(async || ())))
        .layer(RateLimitLayer::new(in_memory(Quota::per_hour(1)), (key::PeerIp, key::Route)));
    let send = async |address: &str, path: &str| {
        let mut request = Request::get(path).body(Body::empty()).unwrap();
        request.extensions_mut().insert(address.parse::<SocketAddr>().unwrap());
        app.clone().oneshot(request).await.unwrap().status().as_u16()
    };
    let (ada, ben) = ("192.0.2.1:80", "192.0.2.2:80");
    assert_eq!(send(ada, "/a/1").await, 200);
    assert_eq!(send(ada, "/a/2").await, 429);
    assert_eq!(send(ada, "/n/1").await, 200);
    assert_eq!(send(ben, "/a/1").await, 200);
    assert_eq!(send(ada, "/nowhere").await, 404);
    assert_eq!(send(ada, "/nowhere_else").await, 429);
}

#[tokio::test]
async fn a_route_is_known_only_inside_of_a_router() {
    let layer = RateLimitLayer::new(in_memory(Quota::per_hour(1)), key::Route).error_details(true);
    let routes = || Router::new().route("/a", routing::get(async || ()));
    let nested = || Router::new().nest_service("/n", routes()).fallback(async || ());
    for app in [routes().layer(layer.clone()), nested().layer(layer.clone())] {
        for path in ["/a", "/n/a", "/nowhere"] {
            let request = Request::get(path).body(Body::empty()).unwrap();
            let status = app.clone().oneshot(request).await.unwrap().status();
            assert_ne!(status, StatusCode::INTERNAL_SERVER_ERROR, "{path}");
        }
    }
    // Around the router, as around a router of another version of axum, there is no route.
    let response = layer.layer(routes()).oneshot(get(&[])).await.unwrap();
    assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
    let detail = json(response).await["detail"].as_str().unwrap().to_owned();
    assert!(detail.contains("no router of axum 0.8") && detail.contains("`Router::layer`"));
}

#[tokio::test]
async fn in_nests_the_path_has_lost_its_prefix_and_original_uri_has_it() {
    let path = |head: &Parts| head.uri.path().to_owned();
    let original = |head: &Parts| {
        let uri = head.extensions.get::<OriginalUri>().map_or(&head.uri, |original| &original.0);
        uri.path().to_owned()
    };
    let limiter = || in_memory(Quota::per_hour(1));
    let app = |layer: RateLimitLayer, around: bool| {
        let inner = Router::new().route("/list", routing::get(async || ()));
        let service =
            service_fn(async |_: Request<Body>| Ok::<_, Infallible>(Response::new(Body::empty())));
        let inner = if around { inner } else { inner.layer(layer.clone()) };
        let app = Router::new().nest("/a", inner.clone()).nest("/b", inner);
        let app = app.nest_service("/c", service).nest_service("/d", service);
        if around { app.layer(layer) } else { app }
    };
    let send = async |app: &Router, path: &str| {
        let request = Request::get(path).body(Body::empty()).unwrap();
        app.clone().oneshot(request).await.unwrap().status().as_u16()
    };
    // Inside of the nests.
    let by_path = app(RateLimitLayer::new(limiter(), path), false);
    assert_eq!(send(&by_path, "/a/list").await, 200);
    assert_eq!(send(&by_path, "/b/list").await, 429, "one count for both");
    let by_original = app(RateLimitLayer::new(limiter(), original), false);
    assert_eq!(send(&by_original, "/a/list").await, 200);
    assert_eq!(send(&by_original, "/b/list").await, 200);
    assert_eq!(send(&by_original, "/b/list").await, 429);
    let by_route = app(RateLimitLayer::new(limiter(), key::Route), false);
    assert_eq!(send(&by_route, "/a/list").await, 200);
    assert_eq!(send(&by_route, "/b/list").await, 200);
    // Around them.
    for key in [path, original] {
        let app = app(RateLimitLayer::new(limiter(), key), true);
        for path in ["/a/list", "/b/list", "/c/x", "/d/x", "/c/y"] {
            assert_eq!(send(&app, path).await, 200);
        }
    }
    let by_route = app(RateLimitLayer::new(limiter(), key::Route), true);
    assert_eq!(send(&by_route, "/a/list").await, 200);
    assert_eq!(send(&by_route, "/b/list").await, 200);
    assert_eq!(send(&by_route, "/c/x").await, 200);
    assert_eq!(send(&by_route, "/d/x").await, 429, "all routes of nest_service are one");
    assert_eq!(send(&by_route, "/nowhere").await, 429, "with requests without a route");
}

#[test]
fn keys_are_bounded_and_cannot_be_forged() {
    assert_eq!(Key::from("{tag}\0é").as_str(), "%7Btag%7D%00%C3%A9");
    let long = Key::from("x".repeat(129));
    let hash = long.as_str().rsplit('=').next().unwrap().to_owned();
    assert!(long.as_str().starts_with("sha256=") && hash.len() == 64, "{long}");
    for (scope, value) in [
        ("sha256", hash.clone()),
        ("sha256", format!("={hash}")),
        ("sha256=", hash.clone()),
        ("sha256==", hash.clone()),
        ("", format!("sha256=={hash}")),
    ] {
        assert_ne!(long, Key::scoped(scope, &value), "{scope:?}");
        let (pair, forged) = (Key::from("a").and(&long), Key::scoped(scope, &value));
        assert_ne!(pair, Key::from("a").and(&forged), "{scope:?}");
    }
    assert_ne!(long, Key::from("x".repeat(130)));
    assert_ne!(long, Key::from(long.as_str().to_owned()));
    assert_eq!(Key::from("x".repeat(128)).as_str().len(), 128);
    assert_eq!(Key::from("alice"), Key::from(String::from("alice")));
    assert_eq!(Key::from("a b"), Key::from(&b"a b"[..]));
    assert_ne!(Key::scoped("a", "b=c"), Key::scoped("a=b", "c"));
    let longest = IpAddr::from([0xfedc; 8]);
    assert_eq!(Key::from(longest).as_str(), format!("ip={longest}"));
    assert_eq!(Key::from(u64::MAX).as_str(), u64::MAX.to_string());
}

#[test]
fn a_key_is_the_same_from_each_conversion() {
    for length in 0..=200 {
        let text = "x".repeat(length);
        let key = Key::from(&text);
        assert_eq!(key.as_str() == text, length <= 128);
        let owned = [Key::from(text.as_bytes()), Key::from(text.clone()), key.clone().into_owned()];
        for other in owned.iter().chain([&Key::from(&key)]) {
            assert_eq!(other.as_str(), key.as_str());
            assert_eq!(HashSet::from([other, &key]).len(), 1);
        }
        let (scoped, text) = (Key::scoped("s", &text), format!("s={text}"));
        assert_eq!(scoped.as_str() == text, text.len() <= 128);
    }
}

#[tokio::test]
async fn the_decision_is_in_the_extensions_if_it_is_switched_on() {
    let app = Router::new()
        .route(
            "/",
            routing::get(async |Extension(decision): Extension<Decision>| {
                decision.remaining().to_string()
            }),
        )
        .layer(RateLimitLayer::new(in_memory(Quota::per_hour(2)), key::Global).extensions(true));
    let response = app.clone().oneshot(get(&[])).await.unwrap();
    assert_eq!(response.extensions().get::<Decision>().unwrap().remaining(), 1);
    assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "1");
    let _ = app.clone().oneshot(get(&[])).await.unwrap();
    let rejected = app.oneshot(get(&[])).await.unwrap();
    assert!(!rejected.extensions().get::<Decision>().unwrap().is_allowed());
    assert!(matches!(rejected.extensions().get(), Some(Rejection::Denied(_))));
}

#[tokio::test(start_paused = true)]
async fn the_older_headers_can_be_chosen() {
    let quota = Quota::per_minute(6).burst(2);
    let both = [Headers::Draft06, Headers::XRateLimitEpoch];
    let layer = RateLimitLayer::new(in_memory(quota), key::Global).headers(both);
    for (status, remaining, reset) in [(200, "1", "10"), (200, "0", "20"), (429, "0", "20")] {
        let before = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs();
        let response = send(&layer, get(&[])).await;
        assert_eq!(response.status(), status);
        assert!(header(&response, "ratelimit").is_empty());
        assert_eq!(header(&response, "ratelimit-limit"), ["6"]);
        assert_eq!(header(&response, "ratelimit-remaining"), [remaining]);
        assert_eq!(header(&response, "ratelimit-reset"), [reset]);
        assert_eq!(header(&response, "x-ratelimit-limit"), ["6"]);
        assert_eq!(header(&response, "x-ratelimit-remaining"), [remaining]);
        let epoch: u64 = header(&response, "x-ratelimit-reset")[0].parse().unwrap();
        let reset: u64 = reset.parse().unwrap();
        assert!((before + reset..before + reset + 60).contains(&epoch), "{epoch}");
        let retry_after = if status == 429 { vec!["10"] } else { vec![] };
        assert_eq!(header(&response, "retry-after"), retry_after);
    }

    // The limit is never below what remains.
    let in_advance = Algorithm::token_bucket().overdraft(5);
    for (algorithm, quota, limit, remaining) in [
        (Algorithm::token_bucket(), Quota::per_minute(6).burst(20), "20", "19"),
        (in_advance, Quota::per_minute(6).burst(20), "20", "20"),
        (Algorithm::leaky_bucket(), Quota::per_minute(6).burst(20), "20", "19"),
        (Algorithm::sliding_log(), Quota::per_minute(6), "6", "5"),
        (Algorithm::fixed_window(), Quota::per_minute(6), "6", "5"),
    ] {
        let limiter = Limiter::new("default", MemoryStore::new(), algorithm, quota);
        let layer = RateLimitLayer::new(limiter, key::Global).headers(both);
        let response = send(&layer, get(&[])).await;
        for prefix in ["ratelimit", "x-ratelimit"] {
            assert_eq!(header(&response, &format!("{prefix}-limit")), [limit], "{algorithm:?}");
            assert_eq!(header(&response, &format!("{prefix}-remaining")), [remaining]);
        }
    }

    // Of stacked layers, the one with fewer remaining units reports.
    let delta = [Headers::Draft11, Headers::XRateLimit];
    let outer = |quota| RateLimitLayer::new(in_memory(quota), key::Global).headers(delta);
    for (one, other) in [(9, 5), (5, 9)] {
        let inner = outer(Quota::per_hour(one)).layer(counting(&Arc::default()));
        let stacked = outer(Quota::per_hour(other)).layer(inner);
        let response = stacked.oneshot(get(&[])).await.unwrap();
        assert_eq!(header(&response, "x-ratelimit-limit"), ["5"]);
        assert_eq!(header(&response, "x-ratelimit-remaining"), ["4"]);
        assert_eq!(header(&response, "x-ratelimit-reset"), ["720"]);
        assert_eq!(header(&response, "ratelimit").len(), 2);
    }
}

#[tokio::test]
async fn all_headers_can_be_switched_off() {
    let layer = RateLimitLayer::new(in_memory(Quota::per_hour(1)), key::Global).headers([]);
    let allowed = send(&layer, get(&[])).await;
    assert!(allowed.headers().is_empty() && allowed.extensions().is_empty());
    let rejected = send(&layer, get(&[])).await;
    assert_eq!(rejected.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(rejected.headers().len(), 2, "only the content type and `no-store` are left");
    assert!(rejected.extensions().is_empty());
}

#[tokio::test]
async fn a_closure_can_replace_the_rejection() {
    let layer = RateLimitLayer::new(in_memory(Quota::per_hour(1)), key::Global).map_rejection(
        |rejection, head, response| {
            let Rejection::Denied(decision) = rejection else { panic!("{rejection:?}") };
            let text = format!("{} {} {}", head.method, head.uri, decision.remaining());
            response.map(|_| text)
        },
    );
    let _ = send(&layer, get(&[])).await;
    let rejected = send(&layer, get(&[])).await;
    assert_eq!(rejected.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(header(&rejected, "retry-after").len(), 1);
    assert_eq!(rejected.into_body().collect().await.unwrap().to_bytes(), "GET / 0");
}

#[tokio::test]
async fn every_rejection_forbids_caches_to_store_it() {
    let by_user = || RateLimitLayer::new(in_memory(Quota::per_hour(1)), key::header("user"));
    let unreachable = RedisStore::lazy("unix:///nowhere/redis.sock").unwrap();
    let unreachable =
        Limiter::new("default", unreachable, Algorithm::token_bucket(), Quota::per_hour(1));
    let used_up = by_user();
    let allowed = send(&used_up, get(&[("user", "ada")])).await;
    assert!(header(&allowed, "cache-control").is_empty());
    for (layer, user, status) in [
        (used_up.clone(), "ada", 429),
        (used_up.headers([]), "ada", 429),
        (by_user().cost(|_: &Parts| 2), "ada", 429),
        (by_user(), "", 400),
        (RateLimitLayer::new(in_memory(Quota::per_hour(1)), key::PeerIp), "ada", 500),
        (RateLimitLayer::new(unreachable, key::Global), "ada", 503),
    ] {
        let rejected = send(&layer, get(&[("user", user)])).await;
        assert_eq!(rejected.status(), status);
        assert_eq!(header(&rejected, "cache-control"), ["no-store"], "{status}");
    }
}

#[tokio::test]
async fn a_mapped_rejection_is_stored_only_if_the_closure_allows_it() {
    for (own, expected) in [(None, "no-store"), (Some("max-age=1"), "max-age=1")] {
        for as_grpc in [false, true] {
            let layer = RateLimitLayer::new(in_memory(Quota::per_hour(1)), key::Global)
                .map_rejection(move |_, _, _| {
                    let mut response = Response::new(String::new());
                    if let Some(own) = own {
                        let own = HeaderValue::from_static(own);
                        response.headers_mut().insert("cache-control", own);
                    }
                    response
                });
            let request = || {
                let mut request = get(&[]);
                if as_grpc {
                    *request.method_mut() = Method::POST;
                    let grpc = HeaderValue::from_static("application/grpc");
                    request.headers_mut().insert("content-type", grpc);
                }
                request
            };
            let _ = send(&layer, request()).await;
            let rejected = send(&layer, request()).await;
            assert_eq!(header(&rejected, "cache-control"), [expected]);
        }
    }
}

/// A layer with a limit for each client and one for all, which lists both.
fn lists_both(store: impl Store + Clone) -> RateLimitLayer {
    let named = |name, quota| Limiter::new(name, store.clone(), Algorithm::FixedWindow, quota);
    let (client, all) = (named("client", Quota::per_minute(2)), named("all", Quota::per_hour(3)));
    let layer = RateLimitLayer::by_rule(move |head: &Parts| {
        let user = head.headers["user"].to_str().unwrap();
        Ok(Charge::new(&all, "all").and(Charge::new(&client, user)))
    });
    layer.headers([Headers::Draft11All])
}

#[tokio::test(start_paused = true)]
async fn an_option_lists_all_limits_of_a_request() {
    let layer = lists_both(MemoryStore::new());
    let states = async |user| {
        let response = send(&layer, get(&[("user", user)])).await;
        let policies =
            [item("all", &[("q", 3), ("w", 3600)]), item("client", &[("q", 2), ("w", 60)])];
        assert_eq!(items(&response, "ratelimit-policy"), policies);
        (response.status().as_u16(), items(&response, "ratelimit"))
    };
    let client = |remaining, time| item("client", &[("r", remaining), ("t", time)]);
    let all = |remaining, time| item("all", &[("r", remaining), ("t", time)]);
    // The limit that binds comes first.
    assert_eq!(states("ada").await, (200, vec![client(1, 60), all(2, 3600)]));
    tokio::time::advance(Duration::from_secs(10)).await;
    assert_eq!(states("ada").await, (200, vec![client(0, 50), all(1, 3590)]));
    assert_eq!(states("ada").await, (429, vec![client(0, 50), all(1, 3590)]));
    assert_eq!(states("ben").await, (200, vec![all(0, 3590), client(1, 60)]));
    // A client that was not counted has all of its quota left.
    let full = item("client", &[("r", 2)]);
    assert_eq!(states("eve").await, (429, vec![all(0, 3590), full]));
}

#[tokio::test]
async fn with_redis_an_option_lists_all_limits_of_a_request_that_it_has_decided() {
    let server = RedisServer::start();
    let layer = lists_both(support::redis_store(&server).await);
    let states = async |user| {
        let response = send(&layer, get(&[("user", user)])).await;
        let states = items(&response, "ratelimit").into_iter();
        let states = states.map(|(name, params)| (name, params[0].1)).collect::<Vec<_>>();
        (response.status().as_u16(), states)
    };
    let both = |client, all| vec![("client".to_owned(), client), ("all".to_owned(), all)];
    assert_eq!(states("ada").await, (200, both(1, 2)));
    assert_eq!(states("ada").await, (200, both(0, 1)));
    assert_eq!(states("ada").await, (429, both(0, 1)));
    let remembered = vec![("client".to_owned(), 0)];
    assert_eq!(states("ada").await, (429, remembered));
}

#[tokio::test(start_paused = true)]
async fn stacked_layers_add_up() {
    let store = MemoryStore::new();
    let named = |name, quota| Limiter::new(name, store.clone(), Algorithm::FixedWindow, quota);
    let inner = RateLimitLayer::new(named("second", Quota::per_second(1)), key::Global);
    let outer = RateLimitLayer::new(named("hour", Quota::per_hour(2)), key::Global);
    let service = outer.layer(inner.layer(counting(&Arc::default())));

    let allowed = service.clone().oneshot(get(&[])).await.unwrap();
    assert_eq!(
        items(&allowed, "ratelimit"),
        [item("second", &[("r", 0), ("t", 1)]), item("hour", &[("r", 1), ("t", 3600)])]
    );
    assert_eq!(
        items(&allowed, "ratelimit-policy"),
        [item("second", &[("q", 1), ("w", 1)]), item("hour", &[("q", 2), ("w", 3600)])]
    );

    // The inner layer denies for a second; the outer one, now used up, for the rest of the hour.
    let rejected = service.oneshot(get(&[])).await.unwrap();
    assert_eq!(rejected.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(header(&rejected, "retry-after"), ["3600"]);
    assert_eq!(items(&rejected, "ratelimit").len(), 2);
}

/// A retry has the same cost, so it needs more than one unit of the outer limit.
#[tokio::test(start_paused = true)]
async fn the_time_of_a_retry_satisfies_the_cost_in_the_outer_of_two_layers() {
    let store = MemoryStore::new();
    let named = |name, quota| Limiter::new(name, store.clone(), Algorithm::FixedWindow, quota);
    let inner = RateLimitLayer::new(named("second", Quota::per_second(1)), key::Global);
    let outer = RateLimitLayer::new(named("hour", Quota::per_hour(8)), key::Global).cost(|_| 3);
    let service = outer.layer(inner.layer(counting(&Arc::default())));
    let send = async || service.clone().oneshot(get(&[])).await.unwrap();

    assert_eq!(send().await.status(), StatusCode::OK);
    let rejected = send().await;
    assert_eq!(
        items(&rejected, "ratelimit"),
        [item("second", &[("r", 0), ("t", 1)]), item("hour", &[("r", 2), ("t", 3600)])]
    );
    assert_eq!(header(&rejected, "retry-after"), ["3600"]);
    tokio::time::advance(Duration::from_secs(3600)).await;
    assert_eq!(send().await.status(), StatusCode::OK);
}

#[tokio::test]
async fn routes_count_apart_unless_they_share_a_limiter() {
    let server = RedisServer::start();
    let redis = support::redis_store(&server).await;
    let memory = MemoryStore::new();
    let quota = Quota::per_hour(1);
    for algorithm in ALGORITHMS {
        let separate = [
            Limiter::new("a", memory.clone(), algorithm, quota),
            Limiter::new("b", memory.clone(), algorithm, quota),
            Limiter::new("a", redis.clone(), algorithm, quota),
            Limiter::new("b", redis.clone(), algorithm, quota),
        ];
        for pair in separate.chunks(2) {
            let route = |limiter: &Limiter| {
                routing::get(async || ()).layer(RateLimitLayer::new(limiter.clone(), key::Global))
            };
            let app = Router::new()
                .route("/a", route(&pair[0]))
                .route("/b", route(&pair[1]))
                .route("/also_b", route(&pair[1]));
            for (path, status) in [("/a", 200), ("/b", 200), ("/also_b", 429), ("/a", 429)] {
                let request = Request::get(path).body(Body::empty()).unwrap();
                let got = app.clone().oneshot(request).await.unwrap().status();
                // A leaky bucket with room delays the second request; one with a burst of 1 has
                // none.
                assert_eq!(got.as_u16(), status, "{algorithm} {path}");
            }
        }
        for limiter in &separate {
            limiter.reset("global").await.unwrap();
        }
    }
}

#[test]
fn two_limiters_of_one_name_are_an_error() {
    let store = MemoryStore::new();
    let quota = Quota::per_second(1);
    let first = Limiter::new("default", store.clone(), Algorithm::FixedWindow, quota);
    let second = Limiter::try_new("default", store.clone(), Algorithm::SlidingLog, quota);
    let message = second.unwrap_err().to_string();
    assert!(message.contains("\"default\"") && message.contains("clone"), "{message}");
    drop(first);
    let _ = Limiter::new("default", store, Algorithm::FixedWindow, quota);
}

#[tokio::test]
async fn without_a_store_the_response_is_503() {
    let mut server = RedisServer::start();
    let store = support::redis_store(&server).await;
    server.kill();
    let limiter = Limiter::new("default", store, Algorithm::token_bucket(), Quota::per_second(1));
    let layer = RateLimitLayer::new(limiter, key::Global).extensions(true);
    let response = send(&layer, get(&[])).await;
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(matches!(response.extensions().get(), Some(Rejection::Store(_))));
    let problem = json(response).await;
    let kind = "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity";
    assert_eq!(problem["type"], kind);
}

/// All ways in which axum applies the layer: once per route, per connection, or per request.
mod axum_applies_the_layer {
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::{TcpListener, TcpStream},
    };

    use super::*;

    fn app() -> Router {
        Router::new()
            .route("/", routing::get(async || "hello"))
            .layer(RateLimitLayer::new(in_memory(Quota::per_hour(3)), key::Global))
    }

    /// Sends a request over a new connection.
    async fn status(address: SocketAddr) -> u16 {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = "GET / HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n";
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).await.unwrap();
        response.split(' ').nth(1).unwrap().parse().unwrap()
    }

    async fn statuses(address: SocketAddr) -> Vec<u16> {
        let mut statuses = vec![];
        for _ in 0..5 {
            statuses.push(status(address).await);
        }
        statuses
    }

    const EXPECTED: [u16; 5] = [200, 200, 200, 429, 429];

    #[tokio::test]
    async fn per_request() {
        let app = app();
        for status in EXPECTED {
            assert_eq!(app.clone().oneshot(get(&[])).await.unwrap().status().as_u16(), status);
        }
    }

    #[tokio::test]
    async fn per_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = tokio::spawn(async { axum::serve(listener, app()).await });
        assert_eq!(statuses(address).await, EXPECTED);
        server.abort();
    }

    #[tokio::test]
    async fn per_route() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let service = app().into_make_service_with_connect_info::<SocketAddr>();
        let server = tokio::spawn(async { axum::serve(listener, service).await });
        assert_eq!(statuses(address).await, EXPECTED);
        server.abort();
    }

    #[tokio::test]
    async fn at_a_route_a_method_or_a_handler() {
        use axum::handler::Handler;
        let layer = || RateLimitLayer::new(in_memory(Quota::per_hour(1)), key::Global);
        let app: Router = Router::new()
            .route("/route", routing::get(async || ()))
            .route_layer(layer())
            .route("/method", routing::get(async || ()).layer(layer()))
            .route("/method_route", routing::get(async || ()).route_layer(layer()))
            .route("/handler", routing::get((async || ()).layer(layer())))
            .route("/twice", routing::get((async || ()).layer(layer()).layer(layer())));
        let mut app = app.into_service::<Body>();
        for path in ["/route", "/method", "/method_route", "/handler", "/twice"] {
            for status in [200, 429] {
                let request = Request::get(path).body(Body::empty()).unwrap();
                assert_eq!(app.call(request).await.unwrap().status().as_u16(), status, "{path}");
            }
        }
    }
}

/// As nginx does: the program of docs/keys.md.
#[cfg(unix)]
#[tokio::test]
async fn clients_of_a_proxy_are_known_over_a_unix_socket() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("app.sock");
    let client_ip = ClientIp::new(ProxyHeader::XForwardedFor, ["192.0.2.1"])
        .peer_addr(|_| Some(SocketAddr::from(([192, 0, 2, 1], 0))));
    let limiter = in_memory(Quota::per_hour(1));
    let app = Router::new()
        .route("/", routing::get(async || ()))
        .layer(RateLimitLayer::new(limiter.clone(), client_ip.clone()));
    let listener = tokio::net::UnixListener::bind(&path).unwrap();
    let server = tokio::spawn(async { axum::serve(listener, app).await });
    for (header, status) in [
        ("203.0.113.9", "200"),
        ("203.0.113.9", "429"),
        ("1.1.1.1, 203.0.113.9", "429"), // the client has written the first entry
        ("203.0.113.10", "200"),
    ] {
        let mut stream = tokio::net::UnixStream::connect(&path).await.unwrap();
        let request = format!(
            "GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-forwarded-for: {header}\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).await.unwrap();
        assert_eq!(response.split(' ').nth(1), Some(status), "{header}: {response}");
    }
    server.abort();
    let client: IpAddr = [203, 0, 113, 9].into();
    assert_eq!(limiter.peek(client_ip.key(client)).await.unwrap().remaining(), 0);
}

/// As docs/layers.md says: only waiting needs a runtime.
#[test]
fn a_limit_in_memory_needs_no_runtime() {
    let limiter = in_memory(Quota::per_hour(2));
    let layer = RateLimitLayer::new(limiter.clone(), key::Global).charge_when(|_| true);
    for status in [200, 200, 429] {
        let mut response = std::pin::pin!(layer.layer(counting(&Arc::default())).oneshot(get(&[])));
        let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
        let std::task::Poll::Ready(response) = response.as_mut().poll(&mut cx) else {
            panic!("it waits");
        };
        assert_eq!(response.unwrap().status(), status);
    }
}

#[test]
#[should_panic(expected = "the quota `Quota::concurrent(10)` does not fit `Algorithm::token_buck")]
fn a_limit_per_address_has_no_quota_of_concurrent_units() {
    let _ = RateLimitLayer::per_ip(Quota::concurrent(10));
}
