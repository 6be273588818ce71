//! The number of allocations that the layer adds to an allowed request over the memory store, and
//! of a check that a remembered denial answers.

#[path = "support/server.rs"]
#[allow(dead_code)]
mod server;

use std::{
    convert::Infallible,
    future::{self, Ready},
    net::IpAddr,
    pin::pin,
    task::{Context, Poll, Waker},
    time::Duration,
};

use allocation_counter::measure;
use axum::body::Body;
use http::{HeaderValue, Request, Response, request::Parts};
use tower::{Layer, Service};
use tower_ratelimit::{
    Algorithm, Charge, Limiter, MemoryStore, Quota, RateLimitLayer, RedisStore, key,
    store::{RedisConfig, Source},
};

const REQUESTS: u64 = 100;

#[derive(Clone)]
struct Bare;

impl Service<Request<Body>> for Bare {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Body>) -> Self::Future {
        future::ready(Ok(Response::new(Body::empty())))
    }
}

fn send<S, B>(service: &mut S)
where
    S: Service<Request<Body>, Response = Response<B>, Error = Infallible>,
{
    let mut request = Request::new(Body::empty());
    request.headers_mut().insert("user", HeaderValue::from_static("ada"));
    let answer = pin!(service.call(request)).poll(&mut Context::from_waker(Waker::noop()));
    let Poll::Ready(Ok(response)) = answer else { panic!("the response is not ready") };
    assert_eq!(response.status(), 200);
}

/// Counts the allocations per request; an allocation that grows counts again.
fn allocations<S, B>(mut service: S) -> u64
where
    S: Service<Request<Body>, Response = Response<B>, Error = Infallible>,
{
    send(&mut service);
    let counted = measure(|| (0..REQUESTS).for_each(|_| send(&mut service)));
    assert_eq!(counted.count_total % REQUESTS, 0, "the number differs between requests");
    counted.count_total / REQUESTS
}

/// The allocations without headers, by default, and with extensions.
fn added(layer: RateLimitLayer) -> [u64; 3] {
    let bare = allocations(Bare);
    [layer.clone().headers([]), layer.clone(), layer.extensions(true)]
        .map(|layer| allocations(layer.layer(Bare)) - bare)
}

fn limiters<const N: usize>(names: [&str; N]) -> [Limiter; N] {
    let (store, quota) = (MemoryStore::new(), Quota::per_day(1_000_000));
    names.map(|name| Limiter::new(name, store.clone(), Algorithm::token_bucket(), quota))
}

fn user(head: &Parts) -> &[u8] {
    head.headers["user"].as_bytes()
}

#[test]
fn only_headers_and_extensions_allocate() {
    let [limiter] = limiters(["user"]);
    let layer = RateLimitLayer::new(limiter, key::header("user"));
    assert_eq!(added(layer), [0, 3, 9]);
}

#[test]
fn what_a_request_holds_is_one_allocation() {
    let layer = RateLimitLayer::concurrency(10, key::header("user"));
    assert_eq!(added(layer.clone()), [1, 4, 10]);
    let waiting = layer.max_wait(Duration::from_secs(1));
    assert_eq!(added(waiting), [1, 4, 10]);
}

#[test]
fn an_address_key_allocates_nothing() {
    let [v4, v6] = limiters(["v4", "v6"]);
    let v4 = RateLimitLayer::new(v4, |_: &Parts| IpAddr::from([255; 4]));
    let v6 = RateLimitLayer::new(v6, |_: &Parts| IpAddr::from([0x2001, 0xdb8, 1, 2, 0, 0, 0, 0]));
    assert_eq!(added(v4), [0, 3, 9]);
    assert_eq!(added(v6), [0, 3, 9]);
}

#[test]
fn a_long_key_allocates_once() {
    let [limiter] = limiters(["user"]);
    let layer = RateLimitLayer::new(limiter, |_: &Parts| "a".repeat(31));
    assert_eq!(added(layer), [1, 4, 10]);
}

/// The policies are written for each request, because a rule can choose other limits.
#[test]
fn a_rule_with_one_limit_allocates_more_only_for_its_policy() {
    let [limiter] = limiters(["user"]);
    let layer = RateLimitLayer::by_rule(move |head: &Parts| Ok(Charge::new(&limiter, user(head))));
    let [charge, headers, extensions] = added(layer);
    assert_eq!(charge, 0);
    assert!(headers <= 10 && extensions <= 16, "{headers} {extensions}");
}

#[test]
fn a_rule_with_two_limits_allocates_some_more() {
    let [user_limiter, all] = limiters(["user", "all"]);
    let layer = RateLimitLayer::by_rule(move |head: &Parts| {
        Ok(Charge::new(&user_limiter, user(head)).and(Charge::new(&all, "all")))
    });
    let [charge, headers, extensions] = added(layer);
    assert!(charge <= 12 && headers <= 28 && extensions <= 34, "{charge} {headers} {extensions}");
}

#[test]
fn a_check_of_up_to_four_limits_allocates_nothing() {
    let (store, quota) = (MemoryStore::new(), Quota::per_day(20));
    let limiter = |name, algorithm| Limiter::new(name, store.clone(), algorithm, quota);
    let [one, two] = ["one", "two"].map(|name| limiter(name, Algorithm::token_bucket()));
    let [three, four] = ["three", "four"].map(|name| limiter(name, Algorithm::FixedWindow));
    let own_keys = Charge::new(&one, "ada").and(Charge::new(&two, "all"));
    let one_key = Charge::new(&one, "bea").also(&two);
    let of_two_algorithms = Charge::new(&one, "cid").also(&three);
    let of_four = Charge::new(&one, "dan").also(&two).and(Charge::new(&three, "any").also(&four));
    for charge in [own_keys, one_key, of_two_algorithms, of_four] {
        let mut allowed = 0;
        assert!(charge.check().now().unwrap().is_allowed(), "the keys are inserted");
        let counted = measure(|| {
            for _ in 0..REQUESTS {
                allowed += u64::from(charge.check().now().unwrap().is_allowed());
            }
        });
        assert!(0 < allowed && allowed < REQUESTS, "some are allowed, some denied: {allowed}");
        assert_eq!(counted.count_total, 0, "{charge:?}");
    }
}

#[test]
fn a_charge_of_two_limits_is_made_without_an_allocation() {
    let [one, two] = limiters(["one", "two"]);
    let check = || {
        let charges = [
            Charge::new(&one, "ada").also(&two),
            Charge::new(&one, "bea").and(Charge::new(&two, "all")),
        ];
        for charge in charges {
            assert!(charge.check().now().unwrap().is_allowed());
        }
    };
    check();
    assert_eq!(measure(check).count_total, 0);
}

#[tokio::test]
async fn a_check_that_a_remembered_denial_answers_allocates_nothing() {
    let server = server::RedisServer::start();
    let hour = Duration::from_secs(3_600);
    let config = RedisConfig::from_url(&server.url()).unwrap().deadline(hour).denial_ttl(hour);
    let store = RedisStore::new(config).unwrap();
    let limiter = Limiter::new("default", store, Algorithm::token_bucket(), Quota::per_day(1));
    while limiter.check("ada").await.unwrap().is_allowed() {}
    let counted = measure(|| {
        let check = pin!(limiter.check("ada"));
        let answer = check.poll(&mut Context::from_waker(Waker::noop()));
        let Poll::Ready(Ok(denied)) = answer else { panic!("Redis was called") };
        assert_eq!(denied.source(), Source::Cached);
    });
    assert_eq!(counted.count_total, 0);
}
