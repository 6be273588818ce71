//! The failure policies: the responses of a layer while the store cannot decide.

use std::{
    future::ready,
    sync::{Arc, atomic::AtomicUsize},
    time::{Duration, Instant},
};

use axum::{Extension, Router, body::Body, routing::get};
use http::{Response, StatusCode};
use proptest::prelude::*;
use tonic_types::StatusExt;
use tower::{Layer, ServiceExt, limit::ConcurrencyLimit, service_fn};
use tower_ratelimit::layer::Settle;
use tower_ratelimit::{
    Algorithm, Charge, Decision, FailurePolicy, Limiter, MemoryStore, Quota, RateLimitLayer,
    RedisStore, VendorState,
    config::Refill,
    key,
    layer::{Rejection, ResponseBody},
    redisson,
    store::Source,
};

use crate::support::{self, counting, header, item, items, json, log::Log, server::RedisServer};

/// A store for a server that does not run.
fn unreachable() -> RedisStore {
    RedisStore::lazy("unix:///no/such/socket").unwrap()
}

fn hundred_per_hour(store: RedisStore) -> Limiter {
    Limiter::new("default", store, Algorithm::token_bucket(), Quota::per_hour(100).burst(8))
}

async fn send(layer: &RateLimitLayer, headers: &[(&str, &str)]) -> Response<ResponseBody<Body>> {
    let layer = layer.clone().extensions(true);
    let service = layer.layer(counting(&Arc::new(AtomicUsize::new(0))));
    service.oneshot(support::get(headers)).await.unwrap()
}

fn decision<B>(response: &Response<B>) -> Decision {
    response.extensions().get().cloned().unwrap()
}

#[tokio::test]
async fn closed_is_the_default_and_rejects() {
    let layer = RateLimitLayer::new(hundred_per_hour(unreachable()), key::Global);
    for layer in [layer.clone(), layer.on_failure(FailurePolicy::Closed)] {
        let response = send(&layer, &[]).await;
        assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(header(&response, "retry-after"), ["1"]);
        assert!(header(&response, "ratelimit").is_empty());
        assert_eq!(json(response).await["status"], 503);

        let response = send(&layer.clone().headers([]), &[]).await;
        assert!(header(&response, "retry-after").is_empty());
    }
}

#[tokio::test]
async fn closed_sends_a_retry_pushback_to_grpc() {
    let layer = RateLimitLayer::new(hundred_per_hour(unreachable()), key::Global);
    let mut call = support::get(&[("content-type", "application/grpc")]);
    *call.method_mut() = http::Method::POST;
    let response = layer.layer(counting(&Arc::default())).oneshot(call).await.unwrap();
    assert_eq!(header(&response, "grpc-retry-pushback-ms"), ["1000"]);
    let status = tonic::Status::from_header_map(response.headers()).unwrap();
    assert_eq!(status.code(), tonic::Code::Unavailable);
    let retry = status.get_details_retry_info().unwrap();
    assert_eq!(retry.retry_delay, Some(Duration::from_secs(1)));
}

#[tokio::test]
async fn open_admits_all_requests_and_reports_it() {
    let layer = RateLimitLayer::new(hundred_per_hour(unreachable()), key::Global)
        .on_failure(FailurePolicy::Open)
        .charge_when(|_| false)
        .extensions(true)
        .settle_handle(true);
    let handler = async |Extension(decision): Extension<Decision>,
                         Extension(settle): Extension<Settle>| {
        settle.settle("default", 9).unwrap();
        format!("{:?}", decision.source())
    };
    let app: Router = Router::new().route("/", get(handler)).layer(layer);
    for _ in 0..200 {
        let response = app.clone().oneshot(support::get(&[])).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        assert!(header(&response, "ratelimit").is_empty(), "the remaining units are unknown");
        assert!(header(&response, "ratelimit-policy").is_empty());
        let decided = decision(&response);
        assert_eq!(
            (decided.source(), decided.is_allowed(), decided.remaining()),
            (Source::Open, true, 0)
        );
        assert_eq!((decided.limiter(), decided.quota().limit()), ("default", 100));
        let body = axum::body::to_bytes(response.into_body(), 100).await.unwrap();
        assert_eq!(body, "Open");
    }
}

#[tokio::test]
async fn the_local_fallback_allows_a_fraction_of_the_quota() {
    let layer = RateLimitLayer::new(hundred_per_hour(unreachable()), key::header("x-user"))
        .on_failure(FailurePolicy::local(0.25));
    for user in ["alice", "bob"] {
        for remaining in [1, 0] {
            let response = send(&layer, &[("x-user", user)]).await;
            assert_eq!(response.status(), StatusCode::OK);
            assert_eq!(decision(&response).source(), Source::Local);
            assert_eq!(decision(&response).remaining(), remaining);
            assert_eq!(
                items(&response, "ratelimit-policy"),
                [item("default", &[("q", 25), ("w", 3600)])]
            );
        }
        let response = send(&layer, &[("x-user", user)]).await;
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(header(&response, "retry-after"), ["144"]);
        assert_eq!(decision(&response).source(), Source::Local);
    }
    // All services of the layer share one count.
    let response = send(&layer.clone(), &[("x-user", "alice")]).await;
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
}

#[tokio::test]
async fn the_local_fallback_holds_for_every_algorithm() {
    for algorithm in support::ALGORITHMS {
        let limiter = Limiter::new("default", unreachable(), algorithm, Quota::per_hour(30));
        let layer = RateLimitLayer::new(limiter, key::Global)
            .max_wait(Duration::ZERO)
            .on_failure(FailurePolicy::local(1.0 / 3.0));
        let mut admitted = 0;
        for _ in 0..40 {
            admitted += usize::from(send(&layer, &[]).await.status() == StatusCode::OK);
        }
        let expected = if algorithm == Algorithm::LeakyBucket { 1 } else { 10 };
        assert_eq!(admitted, expected, "{algorithm}");
    }
}

#[tokio::test(start_paused = true)]
async fn less_than_one_request_per_window_is_one_in_a_longer_window() {
    let limiter =
        Limiter::new("default", unreachable(), Algorithm::SlidingLog, Quota::per_second(2));
    let layer = RateLimitLayer::new(limiter, key::Global).on_failure(FailurePolicy::local(0.05));
    assert_eq!(send(&layer, &[]).await.status(), StatusCode::OK);
    let response = send(&layer, &[]).await;
    assert_eq!(header(&response, "retry-after"), ["10"]);
    tokio::time::advance(Duration::from_secs(10)).await;
    assert_eq!(send(&layer, &[]).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn a_cost_above_the_local_fallback_alone_is_a_failure_of_the_store() {
    let layer = RateLimitLayer::new(hundred_per_hour(unreachable()), key::Global)
        .on_failure(FailurePolicy::local(0.25));
    let response = send(&layer.clone().cost(|_| 8), &[]).await;
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    let response = send(&layer.cost(|_| 9), &[]).await;
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS, "Redis could not grant it either");
}

#[tokio::test(start_paused = true)]
async fn requests_wait_under_the_local_fallback() {
    let quota = Quota::per_second(20).burst(1);
    let limiter = Limiter::new("default", unreachable(), Algorithm::token_bucket(), quota);
    let layer = RateLimitLayer::new(limiter, key::Global)
        .max_wait(Duration::from_secs(1))
        .on_failure(FailurePolicy::local(0.5));
    let start = tokio::time::Instant::now();
    for number in 0..5 {
        assert_eq!(send(&layer, &[]).await.status(), StatusCode::OK);
        assert_eq!(start.elapsed().as_millis() / 100, number);
    }
}

#[tokio::test]
async fn several_limits_are_combined_under_the_local_fallback() {
    let store = unreachable();
    let limiter = |name, quota| {
        Limiter::new(name, store.clone(), Algorithm::token_bucket(), Quota::per_hour(quota))
    };
    let (user, all) = (limiter("user", 20), limiter("all", 6));
    let rule = move |head: &http::request::Parts| {
        let name = head.headers["x-user"].to_str().unwrap();
        Ok(Charge::new(&user, name).and(Charge::new(&all, "all")))
    };
    let layer = RateLimitLayer::by_rule(rule).on_failure(FailurePolicy::local(0.5));
    for user in ["alice", "bob", "carol"] {
        assert_eq!(send(&layer, &[("x-user", user)]).await.status(), StatusCode::OK);
    }
    let denied = send(&layer, &[("x-user", "dave")]).await;
    assert_eq!(denied.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(decision(&denied).limiter(), "all");
}

#[tokio::test]
async fn limiters_of_one_name_over_two_stores_stay_apart() {
    let limiters = [unreachable(), unreachable()].map(hundred_per_hour);
    let rule = move |head: &http::request::Parts| {
        let index = usize::from(head.headers.contains_key("x-second"));
        Ok(Charge::new(&limiters[index], "alice").cost(2))
    };
    let layer = RateLimitLayer::by_rule(rule).on_failure(FailurePolicy::local(0.25));
    for headers in [&[][..], &[("x-second", "")]] {
        assert_eq!(send(&layer, headers).await.status(), StatusCode::OK);
        assert_eq!(send(&layer, headers).await.status(), StatusCode::TOO_MANY_REQUESTS);
    }
}

#[tokio::test]
async fn units_charged_to_the_local_fallback_are_returned_to_it() {
    let layer = RateLimitLayer::new(hundred_per_hour(unreachable()), key::Global)
        .on_failure(FailurePolicy::local(0.25))
        .charge_when(|_| false);
    for _ in 0..20 {
        assert_eq!(send(&layer, &[]).await.status(), StatusCode::OK);
    }
}

#[tokio::test]
async fn a_limiter_shared_with_redisson_has_no_local_fallback() {
    let limiter = redisson::RateLimiter::new(unreachable(), "LIMITER_NAME");
    let layer = RateLimitLayer::new(limiter, key::Global);
    let local = layer.clone().on_failure(FailurePolicy::local(1.0));
    assert_eq!(send(&local, &[]).await.status(), StatusCode::SERVICE_UNAVAILABLE);
    let open = layer.on_failure(FailurePolicy::Open);
    assert_eq!(send(&open, &[]).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn a_policy_applies_only_to_failures_of_the_store() {
    let limiter =
        Limiter::new("default", MemoryStore::new(), Algorithm::token_bucket(), Quota::per_hour(1));
    let layer = RateLimitLayer::new(limiter, key::Global).on_failure(FailurePolicy::Open);
    let response = send(&layer, &[]).await;
    assert_eq!(decision(&response).source(), Source::Store);
    assert_eq!(send(&layer, &[]).await.status(), StatusCode::TOO_MANY_REQUESTS);
    let above_quota = layer.clone().cost(|_| 2);
    assert_eq!(send(&above_quota, &[]).await.status(), StatusCode::TOO_MANY_REQUESTS);

    let limiter =
        Limiter::new("default", MemoryStore::new(), Algorithm::token_bucket(), Quota::per_hour(1));
    let without_key = RateLimitLayer::new(limiter, key::header("x-api-key"));
    let response = send(&without_key.on_failure(FailurePolicy::Open), &[]).await;
    assert_eq!(response.status(), StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn a_full_memory_store_is_a_failure_of_the_store() {
    let limiter =
        |store| Limiter::new("default", store, Algorithm::token_bucket(), Quota::per_hour(1));
    let layer = RateLimitLayer::new(limiter(MemoryStore::with_max_keys(1)), key::header("x"));
    assert_eq!(send(&layer, &[("x", "1")]).await.status(), StatusCode::OK);
    for (policy, status) in [
        (FailurePolicy::Closed, StatusCode::SERVICE_UNAVAILABLE),
        (FailurePolicy::Open, StatusCode::OK),
        (FailurePolicy::local(1.0), StatusCode::SERVICE_UNAVAILABLE),
        (FailurePolicy::Wait, StatusCode::SERVICE_UNAVAILABLE),
    ] {
        let layer = layer.clone().max_wait(Duration::from_secs(60)).on_failure(policy);
        assert_eq!(send(&layer, &[("x", "2")]).await.status(), status, "{policy:?}");
    }
}

#[tokio::test]
async fn a_dry_run_admits_requests_that_the_policy_rejects() {
    let layer = RateLimitLayer::new(hundred_per_hour(unreachable()), key::Global).dry_run(true);
    assert_eq!(send(&layer, &[]).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn the_local_fallback_ends_when_redis_is_back() {
    let mut server = RedisServer::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let layer = RateLimitLayer::new(hundred_per_hour(store.clone()), key::Global)
        .on_failure(FailurePolicy::local(0.5));
    let source = async || decision(&send(&layer, &[]).await).source();
    while source().await != Source::Store {}
    server.kill();
    for _ in 0..20 {
        assert_eq!(source().await, Source::Local);
    }
    server.restart();
    let start = Instant::now();
    while source().await == Source::Local {
        assert!(start.elapsed() < Duration::from_secs(60), "the store does not use Redis again");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn services_of_any_request_type_have_a_policy() {
    let rejection = |_: &Rejection, _: &String| String::from("rejected");
    let limiter = hundred_per_hour(unreachable());
    let layer = RateLimitLayer::custom(limiter, |name: &String| name.clone(), rejection);
    let shout = service_fn(async |name: String| Ok::<_, std::io::Error>(name.to_uppercase()));
    let send = async |layer: &RateLimitLayer<_>| {
        layer.layer(shout).oneshot(String::from("ada")).await.unwrap()
    };
    assert_eq!(send(&layer).await, "rejected");
    assert_eq!(send(&layer.on_failure(FailurePolicy::Open)).await, "ADA");
}

#[test]
#[should_panic = "a share must be above 0 and at most 1"]
fn a_local_fallback_of_zero_is_rejected() {
    let layer = RateLimitLayer::new(hundred_per_hour(unreachable()), key::Global);
    let _ = layer.on_failure(FailurePolicy::local(0.0));
}

#[tokio::test]
async fn layers_over_one_limiter_share_its_local_fallback() {
    let limiter = hundred_per_hour(unreachable());
    let layers = [key::Global, key::Global]
        .map(|key| RateLimitLayer::new(&limiter, key).on_failure(FailurePolicy::local(0.25)));
    for layer in &layers {
        assert_eq!(send(layer, &[]).await.status(), StatusCode::OK);
    }
    for layer in &layers {
        assert_eq!(send(layer, &[]).await.status(), StatusCode::TOO_MANY_REQUESTS);
    }
}

/// Starts a request that waits, stops Redis, and returns the source of the decision.
async fn waits_when_redis_fails(policy: FailurePolicy) -> Source {
    let mut server = RedisServer::start();
    let store = support::redis_store(&server).await;
    let limiter =
        |name| Limiter::new(name, store.clone(), Algorithm::FixedWindow, Quota::per_second(1));
    let (one, all) = (limiter("one"), limiter("all"));
    let rule = move |_: &http::request::Parts| {
        Ok(Charge::new(&one, "alice").and(Charge::new(&all, "all")))
    };
    let layer = RateLimitLayer::by_rule(rule)
        .extensions(true)
        .max_wait(Duration::from_secs(60))
        .on_failure(policy);
    // The service panics if it is called without being ready.
    let service = layer.layer(ConcurrencyLimit::new(counting(&Arc::default()), 1));
    let first = service.clone().oneshot(support::get(&[])).await.unwrap();
    assert_eq!(first.status(), StatusCode::OK);
    let before = server.calls("evalsha");
    let second = tokio::spawn(service.oneshot(support::get(&[])));
    while server.calls("evalsha") == before {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    server.kill();
    let second = second.await.unwrap().unwrap();
    assert_eq!(second.status(), StatusCode::OK);
    let source = decision(&second).source();
    let policies = second.headers().get_all("ratelimit-policy").iter().count();
    assert_eq!(policies, if source == Source::Local { 2 } else { 0 });
    source
}

#[tokio::test]
async fn a_request_that_waits_when_redis_fails_proceeds_by_the_policy() {
    assert_eq!(waits_when_redis_fails(FailurePolicy::Open).await, Source::Open);
    let local = FailurePolicy::local(1.0);
    assert_eq!(waits_when_redis_fails(local).await, Source::Local);
}

#[tokio::test]
async fn a_wait_that_goes_on_in_the_fallback_ends_at_its_deadline() {
    let (long, short) = (Duration::from_secs(60), Duration::from_secs(5));
    let mut server = RedisServer::start();
    let store = RedisStore::connect(&format!("{}?deadline=2s", server.url())).await.unwrap();
    let limiter = |name, algorithm, quota| {
        Limiter::new(name, store.clone(), algorithm, quota).on_failure(FailurePolicy::local(1.0))
    };
    let places = limiter("places", Algorithm::concurrency(), Quota::concurrent(1));
    let tokens = limiter("tokens", Algorithm::token_bucket(), Quota::per_day(10));
    server.kill();
    let _local = places.hold("key", 1).await.unwrap().admitted().unwrap();
    assert_eq!(tokens.check("key").cost(10).await.unwrap().source(), Source::Local);
    server.restart();
    let mut held = vec![];
    for (limiter, units) in [(&places, 1), (&tokens, 10)] {
        let from_redis = async || {
            let permit = limiter.hold("key", units).await.unwrap().admitted()?;
            (permit.decision().source() == Source::Store).then_some(permit)
        };
        held.push(loop {
            match from_redis().await {
                Some(permit) => break permit,
                None => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        });
    }
    let hold = |time| {
        let places = places.clone();
        tokio::spawn(async move { places.hold("key", 1).max_wait(time).await.unwrap() })
    };
    let before = server.calls("evalsha");
    let first = hold(long);
    while server.calls("evalsha") == before {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let behind = hold(short);
    let acquire = tokio::spawn(async move { tokens.try_acquire("key", 1, short).await.unwrap() });
    tokio::time::sleep(Duration::from_millis(100)).await; // Redis denies it because of a hold
    server.freeze();
    let ends = tokio::time::timeout(long / 4, async { (behind.await, acquire.await) }).await;
    server.thaw();
    let (behind, acquire) = ends.expect("both end");
    let denied = [behind.unwrap().into_result().unwrap_err(), acquire.unwrap()];
    for denied in denied {
        assert_eq!((denied.is_allowed(), denied.source()), (false, Source::Local));
    }
    first.abort();
}

proptest! {
    #[test]
    fn every_quota_has_a_fraction(
        limit in prop_oneof![1_u64..=4_000_000_000, 1_u64..1 << 41],
        window in prop_oneof![1_u64..100_000, 1_u64..=366 * 86_400_000],
        burst in prop_oneof![1_u64..=4_000_000_000, 1_u64..1 << 46],
        overdraft in prop_oneof![Just(0), 0_u64..1 << 46],
        share in prop_oneof![1e-12..1.0, 0.1..1.0, Just(1.0)],
    ) {
        let quota = Quota::new(limit, Duration::from_millis(window));
        let quota = quota.try_burst(burst).unwrap_or(quota);
        let refill = Refill::Continuous;
        let overdrafts = [overdraft, overdraft / 1_000, overdraft / 1_000_000, 0];
        let limiter = overdrafts.into_iter().find_map(|overdraft| {
            let algorithm = Algorithm::token_bucket().refill(refill).overdraft(overdraft);
            Limiter::try_new("default", unreachable(), algorithm, quota).ok()
        });
        let limiter = limiter.expect("a limiter without an overdraft is valid");
        let layer = RateLimitLayer::new(limiter, key::Global)
            .on_failure(FailurePolicy::local(share));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let response = runtime.block_on(send(&layer, &[]));
        prop_assert_eq!(response.status(), StatusCode::OK);
        let local = decision(&response);
        prop_assert_eq!(local.source(), Source::Local);
        let local = local.quota();
        prop_assert!(local.limit() <= limit && local.burst_size() <= quota.burst_size());
    }
}

#[tokio::test]
async fn an_outage_and_its_end_are_reported_once() {
    let (log, _guard) = Log::start(tracing::Level::INFO);
    let mut server = RedisServer::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let limiter = hundred_per_hour(store.clone());
    server.kill();
    while store.health().is_available {
        assert!(limiter.check("key").await.is_err());
    }
    for _ in 0..100 {
        assert!(limiter.check("key").await.is_err());
    }
    server.restart();
    let start = Instant::now();
    while !store.health().is_available {
        assert!(start.elapsed() < Duration::from_secs(60), "the store does not use Redis again");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let text = log.text();
    let ours: Vec<_> = text.lines().filter(|line| line.contains("tower_ratelimit")).collect();
    let [failed, outage, recovery] = ours[..] else { panic!("{text}") };
    assert!(failed.contains("WARN") && failed.contains("decisions failed"), "{failed}");
    assert!(outage.contains("WARN") && outage.contains("refuses connections"), "{outage}");
    assert!(outage.contains("error"), "{outage}");
    assert!(recovery.contains("INFO") && recovery.contains("answers again"), "{recovery}");
}

/// If the store fails, the caller gets the response of the vendor.
#[tokio::test]
async fn a_failure_to_learn_leaves_the_response_as_it_is() {
    let server = RedisServer::start();
    let limiter = hundred_per_hour(support::redis_store(&server).await);
    let server = Arc::new(std::sync::Mutex::new(Some(server)));
    let stops_it = service_fn(move |_: http::Request<Body>| {
        drop(server.lock().unwrap().take());
        let response = Response::builder().status(429).header("retry-after", "60");
        ready(Ok::<_, std::convert::Infallible>(response.body(Body::empty()).unwrap()))
    });
    let layer = RateLimitLayer::new(limiter, key::Global).learn(VendorState::from_response);
    let response = layer.extensions(true).layer(stops_it).oneshot(support::get(&[])).await.unwrap();
    assert_eq!(header(&response, "retry-after"), ["60"]);
    assert!(response.extensions().get::<Rejection>().is_none());
}
