//! Tests of layers and charges with a limiter shared with Java services. Its methods are in
//! `redisson`.

use std::{sync::Arc, time::Duration};

use axum::body::Body;
use http::{Request, Response, StatusCode};
use tower::{Layer, ServiceExt};
use tower_ratelimit::{
    Algorithm, Charge, Decision, Error, Key, Limiter, Quota, RateLimitLayer, RedisStore, key,
    layer::{Headers, ResponseBody},
    redisson::{RateLimiter, RateLimiterConfig, RateLimiterError},
};

use crate::support::{self, counting, get, header, items, json, server::RedisServer};

const HOUR: Duration = Duration::from_secs(3_600);
const YEAR: Duration = Duration::from_secs(365 * 86_400);

async fn store(server: &RedisServer) -> RedisStore {
    support::redis_store(server).await
}

/// Creates a template whose keys have `rate` permits per hour each.
async fn template(server: &RedisServer, rate: u64) -> RateLimiter {
    let limiter = RateLimiter::new(store(server).await, "api:{key}").label("api");
    assert!(limiter.try_set_rate(RateLimiterConfig::overall(rate, HOUR)).await.unwrap());
    limiter
}

async fn send(layer: &RateLimitLayer, request: Request<Body>) -> Response<ResponseBody<Body>> {
    layer.layer(counting(&Arc::default())).oneshot(request).await.unwrap()
}

fn by_name(limiter: &RateLimiter) -> RateLimitLayer {
    RateLimitLayer::new(limiter, key::header("name"))
}

fn redis<T: redis::FromRedisValue>(server: &RedisServer, words: &[&str]) -> T {
    redis::cmd(words[0]).arg(&words[1..]).query(&mut server.connection()).unwrap()
}

#[tokio::test]
async fn each_key_has_a_limiter_named_by_the_template() {
    let server = RedisServer::start();
    let layer = by_name(&template(&server, 2).await);
    for user in ["ada", "bob"] {
        for remaining in ["1", "0"] {
            let response = send(&layer, get(&[("name", user)])).await;
            assert_eq!(response.status(), StatusCode::OK);
            assert_eq!(header(&response, "ratelimit-policy"), ["\"api\";q=2;w=3600"]);
            let expected = format!("\"api\";r={remaining}");
            assert!(header(&response, "ratelimit")[0].starts_with(&expected), "{response:?}");
        }
        let response = send(&layer, get(&[("name", user)])).await;
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        let retry_after: u32 = header(&response, "retry-after")[0].parse().unwrap();
        assert!((3_590..=3_601).contains(&retry_after), "{retry_after}");
    }
    let rate: Vec<String> = redis(&server, &["HMGET", "api:header:name=ada", "rate", "interval"]);
    assert_eq!(rate, ["2", "3600000"], "Java finds a rate");
    let value: String = redis(&server, &["GET", "{api:header:name=ada}:value"]);
    assert_eq!(value, "0");
    assert_eq!(redis::<i64>(&server, &["PTTL", "api:{key}"]), -1, "the template does not expire");
    let ttl: i64 = redis(&server, &["PTTL", "api:header:name=ada"]);
    assert!(ttl > 3_590_000 && ttl <= 3_600_000, "an unused limiter expires: {ttl}");
}

#[tokio::test]
async fn a_header_reports_no_number_of_more_than_15_digits() {
    const LARGEST: u64 = 999_999_999_999_999;
    let server = RedisServer::start();
    for (name, rate, remaining) in [
        ("fits", LARGEST, LARGEST - 1),
        ("exceeds", LARGEST + 2, LARGEST),
        ("max", 1 << 53, LARGEST),
    ] {
        let limiter = RateLimiter::new(store(&server).await, name).label("api");
        assert!(limiter.try_set_rate(RateLimiterConfig::overall(rate, 100 * YEAR)).await.unwrap());
        let layer = RateLimitLayer::new(&limiter, key::Global).extensions(true).headers([
            Headers::Draft11,
            Headers::Draft06,
            Headers::XRateLimit,
        ]);
        let response = send(&layer, get(&[])).await;
        let decision = response.extensions().get::<Decision>().unwrap();
        assert_eq!(decision.remaining(), rate - 1, "the decision contains the exact number");
        let [(_, params)] = &items(&response, "ratelimit")[..] else { panic!("{response:?}") };
        assert_eq!(params[0], ("r".to_owned(), remaining as i64), "{name}");
        assert_eq!(header(&response, "ratelimit-remaining"), [remaining.to_string()]);
        assert_eq!(header(&response, "x-ratelimit-remaining"), [remaining.to_string()]);
        let [(_, params)] = &items(&response, "ratelimit-policy")[..] else {
            panic!("{response:?}")
        };
        assert_eq!(params[..], [("q".to_owned(), 1 << 46), ("w".to_owned(), 366 * 86_400)]);
    }
}

#[tokio::test]
async fn a_rate_changed_in_redis_applies_from_the_next_decision_on() {
    let server = RedisServer::start();
    let limiter = RateLimiter::new(store(&server).await, "shared");
    assert!(limiter.try_set_rate(RateLimiterConfig::overall(1, HOUR)).await.unwrap());
    let layer = RateLimitLayer::new(&limiter, key::Global);
    let status = async || send(&layer, get(&[])).await.status();
    assert_eq!(status().await, StatusCode::OK);
    assert_eq!(status().await, StatusCode::TOO_MANY_REQUESTS);
    redis::<()>(&server, &["HSET", "shared", "rate", "3"]);
    let response = send(&layer, get(&[])).await;
    assert_eq!(header(&response, "ratelimit-policy"), ["\"redisson\";q=3;w=3600"]);
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(status().await, StatusCode::OK);
    assert_eq!(status().await, StatusCode::TOO_MANY_REQUESTS);
}

#[tokio::test]
async fn the_first_request_of_a_key_is_one_round_trip() {
    let server = RedisServer::start();
    let layer = by_name(&template(&server, 2).await);
    send(&layer, get(&[("name", "ada")])).await;
    let before = server.calls("evalsha");
    let users: Vec<String> = (0..20).map(|user| user.to_string()).collect();
    for user in &users {
        assert_eq!(send(&layer, get(&[("name", user)])).await.status(), StatusCode::OK);
    }
    // The template is read again when its cached rate is a second old.
    assert!((20..40).contains(&(server.calls("evalsha") - before)));
}

#[tokio::test]
async fn a_new_rate_of_the_template_applies_to_existing_keys() {
    let server = RedisServer::start();
    let layer = by_name(&template(&server, 1).await);
    let elsewhere = RateLimiter::new(store(&server).await, "api:{key}");
    let special = elsewhere.for_key(Key::scoped("header:name", "bob")).unwrap();
    assert!(special.try_set_rate(RateLimiterConfig::overall(2, HOUR)).await.unwrap());

    let status = async |user| send(&layer, get(&[("name", user)])).await.status();
    assert_eq!(status("ada").await, StatusCode::OK);
    assert_eq!(status("ada").await, StatusCode::TOO_MANY_REQUESTS);
    assert!(elsewhere.update_rate(RateLimiterConfig::overall(3, HOUR)).await.unwrap());
    let changed = tokio::time::Instant::now();
    while status("ada").await != StatusCode::OK {
        assert!(changed.elapsed() < Duration::from_secs(10));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(status("ada").await, StatusCode::OK);
    assert_eq!(status("ada").await, StatusCode::TOO_MANY_REQUESTS);

    for _ in 0..2 {
        assert_eq!(status("bob").await, StatusCode::OK);
    }
    assert_eq!(status("bob").await, StatusCode::TOO_MANY_REQUESTS, "the rate of bob applies");

    // The limiter that sets the rate applies it at once.
    let template = RateLimiter::new(store(&server).await, "api:{key}");
    let ada = template.for_key(Key::scoped("header:name", "ada")).unwrap();
    assert_eq!(ada.name(), "api:header:name=ada");
    assert_eq!(ada.available_permits().await.unwrap(), 0);
    assert!(template.update_rate(RateLimiterConfig::overall(9, HOUR)).await.unwrap());
    assert_eq!(ada.available_permits().await.unwrap(), 6);
}

#[tokio::test]
async fn the_limiter_of_a_key_needs_no_layer() {
    let server = RedisServer::start();
    let template = template(&server, 2).await;
    let ada = template.for_key("ada").unwrap();
    assert_eq!(ada.config().await.unwrap().unwrap().rate(), 2);
    assert_eq!(ada.available_permits().await.unwrap(), 2);
    ada.release(1).await.unwrap();
    assert_eq!(
        redis::<i64>(&server, &["DBSIZE"]),
        1,
        "available_permits, config and release write nothing"
    );
    assert!(ada.try_acquire(2, Duration::ZERO).await.unwrap().is_allowed());
    assert!(!ada.try_acquire(1, Duration::ZERO).await.unwrap().is_allowed());
    assert!(template.for_key("bob").unwrap().acquire(1).await.unwrap().is_allowed());

    let no_rate = RateLimiter::new(store(&server).await, "v2:{key}").for_key("ada").unwrap();
    let error = no_rate.acquire(1).await.unwrap_err();
    let Error::Redisson(RateLimiterError::NoRate { name, .. }) = &error else { panic!("{error}") };
    assert_eq!((&**name, error.limiter()), ("v2:{key}", Some("redisson")));
}

#[tokio::test]
async fn a_request_waits_and_retries() {
    let server = RedisServer::start();
    let limiter = RateLimiter::new(store(&server).await, "shared");
    let interval = Duration::from_millis(200);
    assert!(limiter.try_set_rate(RateLimiterConfig::overall(2, interval)).await.unwrap());
    let layer = RateLimitLayer::new(&limiter, key::Global).max_wait(Duration::from_secs(20));
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..6 {
        let layer = layer.clone();
        tasks.spawn(async move { send(&layer, get(&[])).await.status() });
    }
    let statuses = tasks.join_all().await;
    assert!(statuses.iter().all(|status| *status == StatusCode::OK), "{statuses:?}");
}

#[tokio::test]
async fn a_limiter_that_redisson_shares_holds_no_units() {
    let server = RedisServer::start();
    let limiter = template(&server, 1).await;
    let layer = by_name(&limiter).charge_when(|_| false);
    assert_eq!(send(&layer, get(&[("name", "ada")])).await.status(), 500);
    let error = Charge::new(&limiter, "ada").estimate(1).hold().await.unwrap_err();
    assert!(matches!(error, Error::CannotHold { .. }), "{error}");
    assert!(
        limiter.for_key("ada").unwrap().try_acquire(1, Duration::ZERO).await.unwrap().is_allowed()
    );
}

#[tokio::test]
async fn a_template_without_a_rate_is_a_configuration_error() {
    let server = RedisServer::start();
    let limiter = RateLimiter::new(store(&server).await, "api:{key}");
    let response = send(&by_name(&limiter), get(&[("name", "ada")])).await;
    assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
    let problem = json(response).await.to_string();
    assert!(problem.contains("its log names the mistake"), "{problem}");
    let response = send(&by_name(&limiter).error_details(true), get(&[("name", "ada")])).await;
    let problem = json(response).await.to_string();
    assert!(problem.contains("set a rate with `try_set_rate`"), "{problem}");
    assert_eq!(redis::<i64>(&server, &["DBSIZE"]), 0);
}

#[tokio::test]
async fn a_limiter_cannot_be_combined_with_another_one() {
    let server = RedisServer::start();
    let shared = template(&server, 9).await;
    let other = Limiter::new(
        "default",
        store(&server).await,
        Algorithm::token_bucket(),
        Quota::per_hour(9),
    );
    for charge in [
        Charge::new(&shared, "ada").and(Charge::new(&other, "ada")),
        Charge::new(&other, "ada").and(Charge::new(&shared, "ada")),
    ] {
        assert!(matches!(charge.check().await, Err(Error::DifferentStores)));
    }
    let charge = Charge::new(&shared, "ada").cost(9);
    assert!(charge.check().await.unwrap().is_allowed());
    assert!(!charge.check().await.unwrap().is_allowed());
    charge.refund().await.unwrap();
    let unsupported = charge.spend().await.unwrap_err();
    assert!(matches!(&unsupported, Error::Redisson(RateLimiterError::Unsupported { .. })));
    assert_eq!(unsupported.limiter(), Some("api"));
    assert_eq!(charge.peek().await, Err(unsupported));
    let error = Charge::new(&shared, "ada").cost(10).check().await.unwrap_err();
    assert!(matches!(error, Error::CostAboveQuota { cost: 10, max: 9, .. }));
    assert_eq!(error.limiter(), Some("api"));
}

#[tokio::test]
async fn a_key_cannot_address_other_names() {
    let server = RedisServer::start();
    for name in ["{key}", "{app}:{key}", "x{y}{key}", "{key}:{tail}"] {
        let limiter = RateLimiter::try_new(store(&server).await, name);
        assert!(limiter.and_then(|limiter| limiter.for_key("ada")).is_err(), "{name}");
    }
    let tagged = RateLimiter::new(store(&server).await, "api:{{key}}");
    assert_eq!(tagged.for_key("ada").unwrap().name(), "api:{ada}");

    redis::<()>(&server, &["HSET", "api:header:name=ada", "email", "ada@example.org"]);
    let layer = by_name(&template(&server, 2).await);
    assert_eq!(send(&layer, get(&[("name", "ada")])).await.status(), 503);
    let fields: Vec<String> = redis(&server, &["HKEYS", "api:header:name=ada"]);
    assert_eq!(fields, ["email"], "a hash with other fields is unchanged");
    assert_eq!(redis::<i64>(&server, &["PTTL", "api:header:name=ada"]), -1);
}

#[tokio::test]
async fn a_late_release_releases_its_own_permits() {
    let server = RedisServer::start();
    let limiter = RateLimiter::new(store(&server).await, "shared");
    assert!(limiter.try_set_rate(RateLimiterConfig::overall(2, HOUR)).await.unwrap());
    let charge = Charge::new(&limiter, "all");
    let first = charge.check().await.unwrap();
    let entries = || redis::<Vec<Vec<u8>>>(&server, &["ZRANGE", "{shared}:permits", "0", "-1"]);
    let of_first = entries();
    assert!(first.is_allowed());
    let never_ready = tower::limit::ConcurrencyLimit::new(counting(&Arc::default()), 0);
    let layer = RateLimitLayer::new(&limiter, key::Global);
    let second = tokio::spawn(layer.layer(never_ready).oneshot(get(&[])));
    support::load::until("the second request is counted", async || entries().len() == 2).await;
    second.abort();
    let is_released = async || entries() == of_first; // the oldest entry is the first request's
    support::load::until("the permits of the second request are released", is_released).await;
}
