//! Rules, which choose the charge of each request: by plan, for several limits, or none.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use axum::{Extension, Router, body::Body, routing};
use http::{Request, Response, StatusCode, Version, request::Parts};
use http_body_util::BodyExt;
use tokio::{
    task::JoinSet,
    time::{Instant, advance, sleep},
};
use tower::{Layer, ServiceExt, limit::ConcurrencyLimit, service_fn};
use tower_ratelimit::{
    Algorithm, Charge, Decision, Error, Limiter, MemoryStore, Quota, RateLimitLayer,
    layer::{Custom, Headers, MissingKey, Rejection, RequestError, ResponseBody, Rule, Settle},
    store::Store,
};

use crate::support::{
    self, ALGORITHMS, counting, get, header, item, items, json, load::until, server::RedisServer,
};

const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3_600);
const BUCKET: Algorithm = Algorithm::token_bucket();
const WINDOW: Algorithm = Algorithm::FixedWindow;

fn limiters<const N: usize>(
    store: &(impl Store + Clone),
    limits: [(&str, Algorithm, Quota); N],
) -> [Limiter; N] {
    limits.map(|(name, algorithm, quota)| Limiter::new(name, store.clone(), algorithm, quota))
}

fn in_memory<const N: usize>(limits: [(&str, Algorithm, Quota); N]) -> [Limiter; N] {
    limiters(&MemoryStore::new(), limits)
}

fn name<'a>(head: &'a Parts, header: &str) -> Option<&'a str> {
    head.headers.get(header)?.to_str().ok()
}

fn user(head: &Parts) -> Result<&str, RequestError> {
    name(head, "user").ok_or_else(|| RequestError::missing_key("who are you?"))
}

/// A limit for each user, and one for all users together.
fn for_user_and_all([own, all]: &[Limiter; 2]) -> RateLimitLayer {
    let [own, all] = [own.clone(), all.clone()];
    RateLimitLayer::by_rule(move |head: &Parts| {
        Ok(Charge::new(&own, user(head)?).and(Charge::new(&all, "all")))
    })
    .extensions(true)
}

/// Two limits for each user.
fn for_user_twice([one, other]: &[Limiter; 2]) -> RateLimitLayer {
    let [one, other] = [one.clone(), other.clone()];
    RateLimitLayer::by_rule(move |head: &Parts| {
        user(head).map(|user| Charge::new(&one, user).also(&other))
    })
}

async fn send(layer: &RateLimitLayer, request: Request<Body>) -> Response<ResponseBody<Body>> {
    layer.layer(counting(&Arc::default())).oneshot(request).await.unwrap()
}

async fn send_as(layer: &RateLimitLayer, user: &str) -> Response<ResponseBody<Body>> {
    send(layer, get(&[("user", user)])).await
}

async fn left(limiter: &Limiter, key: &str) -> u64 {
    limiter.peek(key).await.unwrap().remaining()
}

/// Waits until these units are left: in Redis, units are returned while the response is on its way.
async fn until_left(limiter: &Limiter, key: &str, expected: u64) {
    for _ in 0..1_000 {
        if left(limiter, key).await == expected {
            return;
        }
        sleep(Duration::from_millis(1)).await;
    }
    panic!("{}: not {expected} are left", limiter.name());
}

fn poll_once<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

/// The status, and the remaining units of the binding policy.
fn summary<B>(response: &Response<B>) -> (u16, String, i64) {
    let [(policy, params)] = items(response, "ratelimit").try_into().expect("one item");
    assert_eq!(params[0].0, "r");
    (response.status().as_u16(), policy, params[0].1)
}

fn policies<B>(response: &Response<B>) -> Vec<String> {
    items(response, "ratelimit-policy").into_iter().map(|(policy, _)| policy).collect()
}

async fn detail(response: Response<ResponseBody<Body>>) -> String {
    json(response).await["detail"].as_str().unwrap().to_owned()
}

async fn each_plan(store: impl Store + Clone) {
    let [free, pro] = limiters(
        &store,
        [("free", BUCKET, Quota::per_hour(1)), ("pro", WINDOW, Quota::per_minute(3))],
    );
    let layer = RateLimitLayer::by_rule(move |head: &Parts| {
        let plan = if name(head, "plan") == Some("pro") { &pro } else { &free };
        Ok(Charge::new(plan, user(head).unwrap()))
    });
    let free = item("free", &[("q", 1), ("w", 3600)]);
    let pro = item("pro", &[("q", 3), ("w", 60)]);
    for (user, plan, status, policy, remaining) in [
        ("ada", "free", 200, &free, 0),
        ("ada", "free", 429, &free, 0),
        ("ada", "pro", 200, &pro, 2), // upgraded
        ("ben", "pro", 200, &pro, 2),
        ("ada", "pro", 200, &pro, 1),
        ("ben", "free", 200, &free, 0),
        ("ada", "free", 429, &free, 0),
    ] {
        let response = send(&layer, get(&[("user", user), ("plan", plan)])).await;
        assert_eq!(summary(&response), (status, policy.0.clone(), remaining), "{user} {plan}");
        assert_eq!(items(&response, "ratelimit-policy"), std::slice::from_ref(policy));
    }
}

#[tokio::test]
async fn each_plan_has_its_own_limit_count_and_name() {
    each_plan(MemoryStore::new()).await;
    let server = RedisServer::start();
    each_plan(support::redis_store(&server).await).await;
}

#[tokio::test]
async fn a_rule_can_reject() {
    for (error, status) in [
        (RequestError::missing_key("log in first"), 400),
        (RequestError::invalid("no \"such\" plan"), 400),
        (RequestError::misconfigured("no plans"), 500),
    ] {
        let message = error.to_string();
        let layer = RateLimitLayer::by_rule(move |_: &Parts| Err(error.clone())).extensions(true);
        let response = send(&layer, get(&[])).await;
        assert_eq!(response.status(), status);
        assert!(header(&response, "ratelimit").is_empty());
        let Some(Rejection::Request(error)) = response.extensions().get() else {
            panic!("{status}")
        };
        assert_eq!(error.to_string(), message);
        let is_for_clients = status == 400;
        assert_eq!(detail(response).await == message, is_for_clients);
        assert_eq!(detail(send(&layer.error_details(true), get(&[])).await).await, message);
    }
}

#[tokio::test]
async fn a_rule_can_exempt() {
    let [limiter] = in_memory([("user", BUCKET, Quota::per_hour(1))]);
    let layer = RateLimitLayer::by_rule(move |head: &Parts| match name(head, "user") {
        None => Ok(Charge::exempt()),
        Some(user) => Ok(Charge::new(&limiter, user)),
    });
    for _ in 0..3 {
        let response = send(&layer, get(&[])).await;
        assert_eq!(response.status(), 200);
        assert!(response.headers().is_empty() && response.extensions().is_empty());
    }
    assert_eq!(send_as(&layer, "ada").await.status(), 200);
    assert_eq!(send_as(&layer, "ada").await.status(), 429);
}

#[tokio::test]
async fn a_rule_without_a_key_rejects_or_exempts_but_does_not_share_a_key() {
    let limits =
        in_memory([("user", BUCKET, Quota::per_hour(1)), ("all", BUCKET, Quota::per_hour(1))]);
    let layer = for_user_and_all(&limits);
    let response = send(&layer, get(&[])).await;
    assert_eq!(response.status(), 400);
    assert_eq!(detail(response).await, "who are you?");

    let exempting = layer.clone().missing_key(MissingKey::Exempt);
    for _ in 0..2 {
        assert_eq!(send(&exempting, get(&[])).await.status(), 200);
    }
    assert_eq!(left(&limits[1], "all").await, 1);

    let sharing = layer.missing_key(MissingKey::Share).error_details(true);
    let response = send(&sharing, get(&[])).await;
    assert_eq!(response.status(), 500);
    let detail = detail(response).await;
    assert!(detail.contains("return a charge for requests without a key from the rule"));
    assert_eq!(send_as(&sharing, "ada").await.status(), 200);
}

#[tokio::test]
async fn the_cost_of_the_layer_applies_if_the_rule_sets_none() {
    let [requests, tokens] = in_memory([
        ("requests", BUCKET, Quota::per_hour(10)),
        ("tokens", BUCKET, Quota::per_hour(100)),
    ]);
    let rule = {
        let (requests, tokens) = (requests.clone(), tokens.clone());
        move |head: &Parts| {
            let user = user(head)?;
            Ok(Charge::new(&requests, user).also(&tokens).cost(5))
        }
    };
    let layer = RateLimitLayer::by_rule(rule)
        .cost(|head: &Parts| head.uri.path().len() as u64 + 1)
        .exempt(|head: &Parts| head.method == http::Method::OPTIONS);
    assert_eq!(send_as(&layer, "ada").await.status(), 200);
    assert_eq!((left(&requests, "ada").await, left(&tokens, "ada").await), (8, 95));

    let options = Request::options("/").header("user", "ada").body(Body::empty()).unwrap();
    assert_eq!(send(&layer, options).await.status(), 200);
    assert_eq!((left(&requests, "ada").await, left(&tokens, "ada").await), (8, 95));
}

/// Looks up plans; each lookup takes a second.
struct Accounts {
    free: Limiter,
    pro: Limiter,
    lookups: Arc<AtomicUsize>,
}

impl Accounts {
    fn new() -> Self {
        let [free, pro] = in_memory([
            ("free", BUCKET, Quota::per_hour(1)),
            ("pro", BUCKET, Quota::per_second(1).burst(2)),
        ]);
        Self { free, pro, lookups: Arc::default() }
    }
}

impl Rule<Parts> for Accounts {
    async fn charge(&self, head: &Parts) -> Result<Charge, RequestError> {
        self.lookups.fetch_add(1, Ordering::SeqCst);
        let user = user(head)?;
        sleep(SECOND).await;
        Ok(match user {
            "root" => Charge::exempt(),
            "ada" => Charge::new(&self.pro, user),
            _ => Charge::new(&self.free, user),
        })
    }
}

#[tokio::test(start_paused = true)]
async fn a_rule_can_await_a_lookup() {
    let accounts = Accounts::new();
    let lookups = accounts.lookups.clone();
    let layer = RateLimitLayer::by_rule(accounts)
        .exempt(|head: &Parts| head.method == http::Method::OPTIONS)
        .missing_key(MissingKey::Exempt);
    for (user, status, policy) in [
        ("ada", 200, &["pro"][..]),
        ("ben", 200, &["free"]),
        ("ben", 429, &["free"]),
        ("root", 200, &[]),
    ] {
        let start = Instant::now();
        let response = send_as(&layer, user).await;
        assert_eq!(response.status(), status, "{user}");
        assert_eq!(policies(&response), policy, "{user}");
        assert!(start.elapsed() >= SECOND);
    }
    assert_eq!(send(&layer, get(&[])).await.status(), 200);
    assert_eq!(lookups.load(Ordering::SeqCst), 5);
    let options = Request::options("/").body(Body::empty()).unwrap();
    assert_eq!(send(&layer, options).await.status(), 200);
    assert_eq!(lookups.load(Ordering::SeqCst), 5, "an exempt request is looked up");

    let costly = layer.cost(|_: &Parts| 2).extensions(true);
    let response = send_as(&costly, "carl").await;
    assert!(matches!(
        response.extensions().get(),
        Some(Rejection::CostAboveQuota { limiter, cost: 2, .. }) if limiter == "free"
    ));
}

#[tokio::test(start_paused = true)]
async fn a_rule_passes_the_request_on_unchanged() {
    #[derive(Clone, Debug, PartialEq)]
    struct Session(u32);

    let seen: Arc<Mutex<Option<Request<Body>>>> = Arc::default();
    let service = {
        let seen = seen.clone();
        service_fn(move |request: Request<Body>| {
            *seen.lock().unwrap() = Some(request);
            async { Ok::<_, Infallible>(Response::new(Body::empty())) }
        })
    };
    let request = Request::put("https://example.org/a?b=c")
        .version(Version::HTTP_2)
        .header("user", "ada")
        .header("accept", "text/plain")
        .header("accept", "text/html")
        .extension(Session(7))
        .body(Body::from("hello"));
    let layer = RateLimitLayer::by_rule(Accounts::new()).extensions(true);
    let _ = layer.layer(service).oneshot(request.unwrap()).await.unwrap();

    let seen = seen.lock().unwrap().take().unwrap();
    assert_eq!((seen.method(), seen.version()), (&http::Method::PUT, Version::HTTP_2));
    assert_eq!(seen.uri(), "https://example.org/a?b=c");
    let accept: Vec<_> = seen.headers().get_all("accept").iter().collect();
    assert_eq!(accept, ["text/plain", "text/html"]);
    assert_eq!(seen.headers().len(), 3);
    assert_eq!(seen.extensions().get(), Some(&Session(7)));
    assert_eq!(seen.extensions().get::<Decision>().unwrap().limiter(), "pro");
    assert_eq!(seen.into_body().collect().await.unwrap().to_bytes(), "hello");
}

#[tokio::test(start_paused = true)]
async fn a_request_dropped_during_a_lookup_spends_nothing() {
    let accounts = Accounts::new();
    let (lookups, pro) = (accounts.lookups.clone(), accounts.pro.clone());
    let calls = Arc::new(AtomicUsize::new(0));
    let service = RateLimitLayer::by_rule(accounts).layer(counting(&calls));
    let mut request = Box::pin(service.clone().oneshot(get(&[("user", "ada")])));
    assert!(poll_once(request.as_mut()).is_pending());
    advance(SECOND * 2).await;
    drop(request);
    drop(service.oneshot(get(&[("user", "ada")])));
    assert_eq!(left(&pro, "ada").await, 2);
    assert_eq!((lookups.load(Ordering::SeqCst), calls.load(Ordering::SeqCst)), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn a_request_holds_no_readiness_during_a_lookup_or_a_wait() {
    let permits = Arc::new(tokio::sync::Semaphore::new(1));
    let busy = ConcurrencyLimit::with_semaphore(counting(&Arc::default()), permits.clone());
    let service = RateLimitLayer::by_rule(Accounts::new()).max_wait(HOUR).layer(busy);
    let send_as = || Box::pin(service.clone().oneshot(get(&[("user", "ben")])));
    let mut looked_up = send_as();
    assert!(poll_once(looked_up.as_mut()).is_pending());
    assert_eq!(permits.available_permits(), 1);
    assert_eq!(looked_up.await.unwrap().status(), 200);

    let mut waits = send_as();
    assert!(poll_once(waits.as_mut()).is_pending());
    sleep(SECOND * 2).await;
    assert!(poll_once(waits.as_mut()).is_pending());
    assert_eq!(permits.available_permits(), 1);
    assert_eq!(waits.await.unwrap().status(), 200);
}

/// Asserts which limits deny, and that only admitted requests are charged, to all limits.
async fn several_limits(store: impl Store + Clone) {
    for algorithm in ALGORITHMS {
        let named = |name| format!("{name}-of-{algorithm}");
        let (own, all) = (named("user"), named("all"));
        let limits = limiters(
            &store,
            [
                (own.as_str(), algorithm, Quota::per_hour(2)),
                (all.as_str(), WINDOW, Quota::per_hour(3)),
            ],
        );
        let layer = for_user_and_all(&limits);
        let [per_user, overall] = &limits;
        if algorithm == Algorithm::LeakyBucket {
            // The second request would wait.
            assert_eq!(summary(&send_as(&layer, "ada").await), (200, own.clone(), 1));
            continue;
        }
        for (user, status, policy, remaining, left_of_user, left_of_all) in [
            ("ada", 200, &own, 1, 1, 2),
            ("ada", 200, &own, 0, 0, 1),
            ("ada", 429, &own, 0, 0, 1),
            ("ben", 200, &all, 0, 1, 0),
            ("ben", 429, &all, 0, 1, 0),
            ("carl", 429, &all, 0, 2, 0),
        ] {
            let response = send_as(&layer, user).await;
            assert_eq!(
                summary(&response),
                (status, policy.clone(), remaining),
                "{user} {algorithm}"
            );
            assert_eq!(policies(&response), [&*own, &*all]);
            assert_eq!(left(per_user, user).await, left_of_user, "{user} {algorithm}");
            assert_eq!(left(overall, "all").await, left_of_all, "{user} {algorithm}");
            let decision = response.extensions().get::<Decision>().unwrap().clone();
            assert_eq!(decision.limiter(), policy);
            if status == 429 {
                assert_eq!(header(&response, "content-type"), ["application/problem+json"]);
                let problem = json(response).await;
                assert_eq!(problem["violated-policies"], serde_json::json!([policy]));
            }
        }
    }
}

#[tokio::test]
async fn a_request_is_charged_to_all_of_its_limits_or_to_none() {
    several_limits(MemoryStore::new()).await;
    let server = RedisServer::start();
    several_limits(support::redis_store(&server).await).await;
}

#[tokio::test]
async fn several_limits_take_one_round_trip() {
    let server = RedisServer::start();
    let store = support::redis_store(&server).await;
    let limits = limiters(
        &store,
        [("user", BUCKET, Quota::per_hour(2)), ("all", WINDOW, Quota::per_day(9))],
    );
    let layer = for_user_and_all(&limits);
    assert_eq!(send_as(&layer, "ada").await.status(), 200); // loads the script
    let calls = || (server.calls("evalsha"), server.calls("eval"));
    let before = calls();
    for status in [200, 429] {
        assert_eq!(send_as(&layer, "ada").await.status(), status);
    }
    assert_eq!(calls(), (before.0 + 2, before.1));
}

#[tokio::test(start_paused = true)]
async fn the_headers_report_all_policies_and_when_the_binding_one_has_more() {
    let limits =
        in_memory([("minute", WINDOW, Quota::per_minute(2)), ("hour", WINDOW, Quota::per_hour(3))]);
    let layer = for_user_twice(&limits);
    let both = [item("minute", &[("q", 2), ("w", 60)]), item("hour", &[("q", 3), ("w", 3600)])];
    for (seconds, status, policy, remaining, t) in [
        (0, 200, "minute", 1, 60),
        (20, 200, "minute", 0, 40),
        (0, 429, "minute", 0, 40),
        (40, 200, "hour", 0, 3540),
        (0, 429, "hour", 0, 3540),
    ] {
        advance(SECOND * seconds).await;
        let response = send_as(&layer, "ada").await;
        assert_eq!(response.status(), status);
        assert_eq!(items(&response, "ratelimit"), [item(policy, &[("r", remaining), ("t", t)])]);
        assert_eq!(items(&response, "ratelimit-policy"), both);
        let retry_after = if status == 429 { vec![t.to_string()] } else { vec![] };
        assert_eq!(header(&response, "retry-after"), retry_after);
    }
    assert_eq!(left(&limits[0], "ada").await, 1, "a denial by the hour was charged to the minute");
}

#[tokio::test(start_paused = true)]
async fn the_older_headers_report_the_binding_limit() {
    let limits =
        in_memory([("hour", WINDOW, Quota::per_hour(3)), ("minute", WINDOW, Quota::per_minute(2))]);
    let kinds = [Headers::Draft06, Headers::XRateLimit];
    let layer = for_user_twice(&limits).headers(kinds);
    for (seconds, status, limit, remaining, reset) in [
        (0, 200, "2", "1", "60"),
        (0, 200, "2", "0", "60"),
        (0, 429, "2", "0", "60"),
        (60, 200, "3", "0", "3540"),
        (0, 429, "3", "0", "3540"),
    ] {
        advance(SECOND * seconds).await;
        let response = send_as(&layer, "ada").await;
        assert_eq!(response.status(), status);
        for prefix in ["", "x-"] {
            let value = |name: &str| header(&response, &format!("{prefix}ratelimit-{name}"));
            assert_eq!(value("limit"), [limit]);
            assert_eq!(value("remaining"), [remaining]);
            assert_eq!(value("reset"), [reset]);
        }
        assert!(header(&response, "ratelimit-policy").is_empty());
    }
}

#[tokio::test(start_paused = true)]
async fn stacked_layers_with_several_limits_add_up() {
    let outer = in_memory([("a", WINDOW, Quota::per_minute(9)), ("b", WINDOW, Quota::per_hour(2))]);
    let inner =
        in_memory([("c", WINDOW, Quota::per_second(1)), ("d", WINDOW, Quota::per_minute(5))]);
    let headers = [Headers::Draft11, Headers::Draft06];
    let service = for_user_twice(&outer)
        .headers(headers)
        .layer(for_user_and_all(&inner).headers(headers).layer(counting(&Arc::default())));
    let send_as = || service.clone().oneshot(get(&[("user", "ada")]));
    let allowed = send_as().await.unwrap();
    assert_eq!(policies(&allowed), ["c", "d", "a", "b"]);
    let binding = [item("c", &[("r", 0), ("t", 1)]), item("b", &[("r", 1), ("t", 3600)])];
    assert_eq!(items(&allowed, "ratelimit"), binding);
    assert_eq!(header(&allowed, "ratelimit-limit"), ["1"]);

    // The inner layer denies for a second; the outer one, now used up, for the rest of the hour.
    let rejected = send_as().await.unwrap();
    assert_eq!(rejected.status(), 429);
    assert_eq!(header(&rejected, "retry-after"), ["3600"]);
    assert_eq!(policies(&rejected), ["c", "d", "a", "b"]);
}

#[tokio::test]
async fn a_dry_run_reports_the_limit_that_would_deny() {
    let limits =
        in_memory([("user", BUCKET, Quota::per_hour(1)), ("all", BUCKET, Quota::per_hour(2))]);
    let layer = for_user_and_all(&limits).dry_run(true).max_wait(HOUR);
    for (user, allowed, limiter, left_of_all) in [
        ("ada", true, "user", 1),
        ("ada", false, "user", 1),
        ("ben", true, "user", 0),
        ("carl", false, "all", 0),
    ] {
        let response = send_as(&layer, user).await;
        assert_eq!(response.status(), 200);
        assert_eq!(summary(&response).1, limiter);
        assert_eq!(policies(&response), ["user", "all"]);
        let decision = response.extensions().get::<Decision>().unwrap();
        assert_eq!((decision.is_allowed(), decision.limiter()), (allowed, limiter), "{user}");
        assert_eq!(left(&limits[1], "all").await, left_of_all);
    }
    assert_eq!(send(&layer, get(&[])).await.status(), 200, "without a key");
}

async fn only_failed_logins(store: impl Store + Clone) {
    let limits = limiters(
        &store,
        [("user", Algorithm::SlidingLog, Quota::per_hour(2)), ("all", BUCKET, Quota::per_hour(3))],
    );
    let layer = for_user_and_all(&limits)
        .charge_when(|response| response.status == StatusCode::UNAUTHORIZED);
    let login = layer.layer(service_fn(async |request: Request<Body>| {
        let status = if request.uri().path() == "/wrong" { 401 } else { 200 };
        Ok::<_, Infallible>(Response::builder().status(status).body(Body::empty()).unwrap())
    }));
    let send_as = async |path: &str| {
        let request = Request::get(path).header("user", "ada").body(Body::empty()).unwrap();
        login.clone().oneshot(request).await.unwrap().status().as_u16()
    };
    let [own, all] = &limits;
    for (path, status, of_own, of_all) in [
        ("/", 200, 2, 3),
        ("/", 200, 2, 3),
        ("/wrong", 401, 1, 2),
        ("/", 200, 1, 2),
        ("/wrong", 401, 0, 1),
        ("/", 429, 0, 1),
    ] {
        assert_eq!(send_as(path).await, status);
        until_left(own, "ada", of_own).await;
        until_left(all, "all", of_all).await;
    }
}

#[tokio::test]
async fn units_that_are_not_charged_are_returned_to_all_limits() {
    only_failed_logins(MemoryStore::new()).await;
    let server = RedisServer::start();
    only_failed_logins(support::redis_store(&server).await).await;
}

#[tokio::test]
async fn a_limiter_that_cannot_hold_is_a_misconfiguration_if_the_response_decides() {
    let [leaky, tokens] = in_memory([
        ("leaky", Algorithm::LeakyBucket, Quota::per_hour(9)),
        ("tokens", BUCKET, Quota::per_hour(9)),
    ]);
    let by_key = RateLimitLayer::new(&leaky, |_: &Parts| "ada").charge_when(|_| true);
    let (one, two) = (tokens.clone(), leaky.clone());
    let by_rule = RateLimitLayer::by_rule(move |_: &Parts| Ok(Charge::new(&one, "ada").also(&two)));
    for layer in [by_key, by_rule.clone().charge_when(|_| true)] {
        let response = send(&layer, get(&[])).await;
        assert_eq!(response.status(), 500);
        let response = send(&layer.error_details(true), get(&[])).await;
        let problem = json(response).await.to_string();
        assert!(problem.contains("cannot hold units"), "{problem}");
    }
    assert_eq!(send(&by_rule, get(&[])).await.status(), 200);
    assert_eq!((left(&tokens, "ada").await, left(&leaky, "ada").await), (8, 8));
}

#[tokio::test]
async fn what_a_request_holds_counts_as_used_if_there_is_no_response() {
    let [tokens] = in_memory([("tokens", BUCKET, Quota::per_day(10))]);
    let layer = |limiter: &Limiter| {
        let limiter = limiter.clone();
        RateLimitLayer::by_rule(move |_: &Parts| Ok(Charge::new(&limiter, "ada").estimate(3)))
    };
    let slow = layer(&tokens)
        .layer(service_fn(async |_| std::future::pending::<Result<Response<Body>, Error>>().await));
    let mut request = Box::pin(slow.oneshot(get(&[])));
    assert!(request.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    assert_eq!(tokens.peek("ada").await.unwrap().held(), 3);
    drop(request);
    let failing =
        layer(&tokens).layer(service_fn(async |_| Err::<Response<Body>, Error>(Error::NoLimits)));
    assert!(failing.oneshot(get(&[])).await.is_err());
    let state = tokens.peek("ada").await.unwrap();
    assert_eq!((state.held(), state.remaining()), (0, 4));
    assert_eq!(send(&layer(&tokens), get(&[])).await.status(), 200);
    let response = send(&layer(&tokens), get(&[])).await;
    assert_eq!((response.status().as_u16(), left(&tokens, "ada").await), (429, 1));
}

#[tokio::test]
async fn a_denial_until_a_hold_ends_has_no_time() {
    let [tokens] = in_memory([("tokens", BUCKET, Quota::per_day(10))]);
    let permit = tokens.hold("ada", 10).await.unwrap().admitted().unwrap();
    let layer = RateLimitLayer::new(&tokens, |_: &Parts| "ada");
    let response = send(&layer, get(&[])).await;
    assert_eq!(response.status(), 429);
    assert!(header(&response, "retry-after").is_empty());
    let problem = json(response).await.to_string();
    assert!(!problem.contains(" s."), "{problem}");
    let mut call = get(&[("content-type", "application/grpc")]);
    *call.method_mut() = http::Method::POST;
    let response = send(&layer, call).await;
    assert_eq!(header(&response, "grpc-status"), ["8"]);
    assert!(header(&response, "grpc-retry-pushback-ms").is_empty());
    permit.cancel();
    assert_eq!(send(&layer, get(&[])).await.status(), 200);
}

/// Settles the tokens that the path contains; 500 are held beforehand.
async fn answer(
    axum::extract::Path(used): axum::extract::Path<u64>,
    Extension(settle): Extension<Settle>,
) {
    settle.settle("tokens", used).unwrap();
    assert!(matches!(settle.settle("tokens", used), Err(Error::HoldEnded { .. })));
    assert!(matches!(settle.settle("requests", 1), Err(Error::NotHeld { .. })));
}

async fn settled_afterwards(store: impl Store + Clone) {
    let [requests, tokens] = limiters(
        &store,
        [("requests", WINDOW, Quota::per_day(60)), ("tokens", BUCKET, Quota::per_day(2_000))],
    );
    let rule = {
        let (requests, tokens) = (requests.clone(), tokens.clone());
        move |head: &Parts| {
            let user = user(head)?;
            Ok(Charge::new(&requests, user).and(Charge::new(&tokens, user).estimate(500)))
        }
    };
    let layer = RateLimitLayer::by_rule(rule).settle_handle(true);
    let app = Router::new().route("/{used}", routing::get(answer)).layer(layer);
    for (used, status, of_requests, of_tokens) in [
        (0, 200, 59, 2_000),
        (100, 200, 58, 1_900),
        (500, 200, 57, 1_400),
        (1_000, 200, 56, 400),
        (1, 429, 56, 400),
    ] {
        let request = Request::get(format!("/{used}")).header("user", "ada");
        let response = app.clone().oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
        assert_eq!(response.status(), status, "{used}");
        assert_eq!(left(&requests, "ada").await, of_requests, "{used}");
        // Of the bucket's 2,000 a day, one may be refilled meanwhile.
        let settled = async || (of_tokens..of_tokens + 2).contains(&left(&tokens, "ada").await);
        until(&format!("{used} tokens are settled"), settled).await;
    }
}

#[tokio::test]
async fn a_cost_is_settled_when_it_is_known() {
    settled_afterwards(MemoryStore::new()).await;
    let server = RedisServer::start();
    settled_afterwards(support::redis_store(&server).await).await;
}

#[tokio::test]
async fn a_layer_with_one_limit_holds_its_cost_only_if_the_service_can_settle_it() {
    let [limiter] = in_memory([("tokens", BUCKET, Quota::per_day(10))]);
    let app = |layer| {
        let handler = async |settle: Option<Extension<Settle>>| match settle {
            None => "none",
            Some(Extension(settle)) if settle.settle("others", 1).is_ok() => "exempt",
            Some(Extension(settle)) => {
                settle.settle("tokens", 8).unwrap();
                "settled"
            }
        };
        Router::new().route("/", routing::get(handler)).layer(layer)
    };
    let layer = RateLimitLayer::new(limiter.clone(), |head: &Parts| user(head).map(str::to_owned))
        .cost(|_: &Parts| 4)
        .missing_key(MissingKey::Exempt);
    for (layer, user, expected, remaining) in [
        (layer.clone(), "ada", "none", 6),
        (layer.clone().settle_handle(true).settle_handle(false), "ada", "none", 2),
        (layer.clone().settle_handle(true), "ben", "settled", 2),
        (layer.settle_handle(true), "", "exempt", 10),
    ] {
        let request = if user.is_empty() { get(&[]) } else { get(&[("user", user)]) };
        let response = app(layer).oneshot(request).await.unwrap();
        assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), expected);
        assert_eq!(left(&limiter, user).await, remaining, "{user} {expected}");
    }
}

#[tokio::test]
async fn an_invalid_charge_is_an_error_of_the_service() {
    let [limiter] = in_memory([("one", BUCKET, Quota::per_hour(5))]);
    let [elsewhere] = in_memory([("two", BUCKET, Quota::per_hour(5))]);
    let renamed = limiter.with_quota(Quota::per_day(5)).unwrap();
    let charge = |limiter| Charge::new(limiter, "ada");
    for (charge, complaint) in [
        (charge(&limiter).and(charge(&limiter)), "\"one\" is charged for the same key twice"),
        (charge(&limiter).and(charge(&renamed)), "\"one\" is charged for the same key twice"),
        (charge(&limiter).and(charge(&elsewhere)), "must be in one store"),
    ] {
        let layer =
            RateLimitLayer::by_rule(move |_: &Parts| Ok(charge.clone())).error_details(true);
        let response = send(&layer, get(&[])).await;
        assert_eq!(response.status(), 500, "{complaint}");
        assert!(header(&response, "ratelimit").is_empty());
        let detail = detail(response).await;
        assert!(detail.contains(complaint), "{detail}");
        assert_eq!(left(&limiter, "ada").await, 5, "{complaint}");
    }
    assert!(matches!(Charge::exempt().check().await, Err(Error::NoLimits)));
}

#[tokio::test]
async fn one_limiter_can_be_charged_for_two_keys() {
    let [limiter] = in_memory([("mail", BUCKET, Quota::per_hour(2))]);
    let layer = {
        let limiter = limiter.clone();
        RateLimitLayer::by_rule(move |head: &Parts| {
            Ok(Charge::new(&limiter, user(head)?).and(Charge::new(&limiter, "to ben")))
        })
    };
    for (user, status) in [("ada", 200), ("carl", 200), ("dora", 429)] {
        let response = send_as(&layer, user).await;
        assert_eq!(response.status(), status, "{user}");
        assert_eq!(policies(&response), ["mail"]);
    }
    assert_eq!(left(&limiter, "dora").await, 2);
}

#[tokio::test]
async fn a_cost_above_one_of_several_quotas_names_that_quota() {
    let [requests, tokens] = in_memory([
        ("requests", BUCKET, Quota::per_hour(10)),
        ("tokens", BUCKET, Quota::per_hour(100)),
    ]);
    let layer = {
        let requests = requests.clone();
        RateLimitLayer::by_rule(move |_: &Parts| {
            Ok(Charge::new(&requests, "ada").and(Charge::new(&tokens, "ada").cost(101)))
        })
    };
    let response = send(&layer, get(&[])).await;
    assert_eq!(response.status(), 429);
    assert!(
        header(&response, "retry-after").is_empty() && header(&response, "ratelimit").is_empty()
    );
    assert_eq!(policies(&response), ["requests", "tokens"]);
    assert_eq!(json(response).await["violated-policies"], serde_json::json!(["tokens"]));
    assert_eq!(left(&requests, "ada").await, 10);
}

fn strings(rule: impl Rule<String>) -> RateLimitLayer<Custom<String, String>> {
    RateLimitLayer::custom_by_rule(rule, |rejection, name: &String| match rejection {
        Rejection::Denied(decision) => format!("{name} is over {}", decision.limiter()),
        other => format!("{name}: {other}"),
    })
}

async fn shout(layer: &RateLimitLayer<Custom<String, String>>, name: &str) -> String {
    let shout = service_fn(async |name: String| Ok::<_, Infallible>(name.to_uppercase()));
    layer.layer(shout).oneshot(name.to_owned()).await.unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_service_of_strings_can_have_a_rule() {
    let [own, all] =
        in_memory([("own", BUCKET, Quota::per_hour(2)), ("all", BUCKET, Quota::per_hour(3))]);
    let layer = strings(move |name: &String| match name.as_str() {
        "" => Err(RequestError::missing_key("no name")),
        "root" => Ok(Charge::exempt()),
        name => Ok(Charge::new(&own, name).and(Charge::new(&all, "all"))),
    });
    for (name, expected) in [
        ("ada", "ADA"),
        ("ada", "ADA"),
        ("ada", "ada is over own"),
        ("ben", "BEN"),
        ("ben", "ben is over all"),
        ("root", "ROOT"),
        ("", ": no name"),
    ] {
        assert_eq!(shout(&layer, name).await, expected);
    }

    struct Slow(Limiter);

    impl Rule<String> for Slow {
        async fn charge(&self, name: &String) -> Result<Charge, RequestError> {
            sleep(SECOND).await;
            Ok(Charge::new(&self.0, name.as_str()))
        }
    }

    let [slow] = in_memory([("slow", BUCKET, Quota::per_hour(1))]);
    let layer = strings(Slow(slow));
    assert_eq!(shout(&layer, "ada").await, "ADA");
    assert_eq!(shout(&layer, "ada").await, "ada is over slow");
}

mod waiting {
    use super::*;

    const MAX_WAIT: Duration = Duration::from_secs(10);

    /// Sends requests of one user at once. Returns the statuses and times in the order of arrival.
    async fn burst(
        layer: &RateLimitLayer,
        user: &'static str,
        count: usize,
    ) -> Vec<(u16, Duration)> {
        let service = layer.layer(counting(&Arc::default()));
        let start = Instant::now();
        let mut tasks = JoinSet::new();
        for number in 0..count {
            let service = service.clone();
            tasks.spawn(async move {
                let response = service.oneshot(get(&[("user", user)])).await.unwrap();
                (number, (response.status().as_u16(), start.elapsed()))
            });
            tokio::task::yield_now().await;
        }
        let mut answers = tasks.join_all().await;
        answers.sort_unstable_by_key(|(number, _)| *number);
        answers.into_iter().map(|(_, answer)| answer).collect()
    }

    fn in_whole_seconds(answers: &[(u16, Duration)]) -> Vec<(u16, u64)> {
        answers.iter().map(|(status, took)| (*status, took.as_secs())).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn limits_on_one_key_make_one_reservation_together() {
        let limits = in_memory([
            ("second", BUCKET, Quota::per_second(1).burst(1)),
            ("minute", WINDOW, Quota::per_minute(4)),
        ]);
        let layer = for_user_twice(&limits).max_wait(MAX_WAIT);
        let answers = burst(&layer, "ada", 6).await;
        let expected = [(200, 0), (200, 1), (200, 2), (200, 3), (429, 0), (429, 0)];
        assert_eq!(in_whole_seconds(&answers), expected);
        let rejected = send_as(&layer, "ada").await;
        assert_eq!(summary(&rejected).1, "minute");
        assert_eq!(header(&rejected, "retry-after"), ["47"], "after that, it may wait for 10 s");
    }

    #[tokio::test(start_paused = true)]
    async fn a_dropped_request_releases_its_reservation_to_all_limits() {
        let limits = in_memory([
            ("second", BUCKET, Quota::per_second(1).burst(1)),
            ("hour", WINDOW, Quota::per_hour(4)),
        ]);
        let service = for_user_twice(&limits).max_wait(MAX_WAIT).layer(counting(&Arc::default()));
        let send_as = || Box::pin(service.clone().oneshot(get(&[("user", "ada")])));
        assert_eq!(send_as().await.unwrap().status(), 200);
        let (mut dropped, mut behind) = (send_as(), send_as());
        assert!(
            poll_once(dropped.as_mut()).is_pending() && poll_once(behind.as_mut()).is_pending()
        );
        assert_eq!(left(&limits[1], "ada").await, 1);
        drop(dropped);
        assert_eq!(left(&limits[1], "ada").await, 2);
        let start = Instant::now();
        assert_eq!(behind.await.unwrap().status(), 200);
        assert_eq!(start.elapsed().as_secs(), 1, "it takes over the instant that is given back");
    }

    #[tokio::test(start_paused = true)]
    async fn limits_on_different_keys_reserve_nothing_and_check_again() {
        let limits = in_memory([
            ("user", BUCKET, Quota::per_second(1).burst(1)),
            ("all", WINDOW, Quota::per_hour(10)),
        ]);
        let calls = Arc::new(AtomicUsize::new(0));
        let service = for_user_and_all(&limits)
            .max_wait(MAX_WAIT)
            .layer(ConcurrencyLimit::new(counting(&calls), 1));
        let start = Instant::now();
        let send_as = async |user| {
            let response = service.clone().oneshot(get(&[("user", user)])).await.unwrap();
            assert_eq!(response.status(), 200);
            start.elapsed()
        };
        assert_eq!(send_as("ada").await, Duration::ZERO);
        let mut waits = Box::pin(send_as("ada"));
        let mut dropped = Box::pin(send_as("ada"));
        assert!(poll_once(waits.as_mut()).is_pending() && poll_once(dropped.as_mut()).is_pending());
        assert_eq!(left(&limits[1], "all").await, 9, "units are reserved");
        assert_eq!(send_as("ben").await, Duration::ZERO, "waiting requests delay others");
        drop(dropped);
        assert_eq!(left(&limits[1], "all").await, 8, "units are returned");
        assert_eq!((left(&limits[0], "ada").await, left(&limits[0], "ben").await), (0, 0));

        let took = waits.await;
        assert!(took >= SECOND && took <= SECOND * 3 / 2 + Duration::from_millis(1), "{took:?}");
        assert_eq!(left(&limits[1], "all").await, 7);
        assert_eq!(calls.load(Ordering::SeqCst), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_checks_again_proceeds_in_time_or_is_rejected() {
        let limits = || {
            in_memory([
                ("user", BUCKET, Quota::per_second(1).burst(1)),
                ("all", WINDOW, Quota::per_hour(100)),
            ])
        };
        let few = limits();
        let answers = burst(&for_user_and_all(&few).max_wait(HOUR), "ada", 8).await;
        let mut departures: Vec<_> = answers.iter().map(|(_, took)| *took).collect();
        departures.sort_unstable();
        assert!(answers.iter().all(|(status, _)| *status == 200));
        assert!(departures.windows(2).all(|pair| pair[1] - pair[0] >= SECOND), "{departures:?}");
        assert_eq!(left(&few[1], "all").await, 92);

        let many = limits();
        let max_wait = SECOND * 3 + SECOND / 5;
        let answers = burst(&for_user_and_all(&many).max_wait(max_wait), "ada", 20).await;
        let admitted = answers.iter().filter(|(status, _)| *status == 200).count();
        assert!((2..=4).contains(&admitted), "{answers:?}");
        let millisecond = Duration::from_millis(1);
        assert!(answers.iter().all(|(_, took)| *took <= max_wait + millisecond), "{answers:?}");
        assert_eq!(left(&many[1], "all").await, 100 - admitted as u64);
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_would_wait_too_long_for_a_shared_limit_is_rejected_immediately() {
        let limits = in_memory([
            ("user", BUCKET, Quota::per_second(1).burst(5)),
            ("all", WINDOW, Quota::per_hour(2)),
        ]);
        let layer = for_user_and_all(&limits).max_wait(MAX_WAIT);
        let answers = burst(&layer, "ada", 3).await;
        assert_eq!(in_whole_seconds(&answers), [(200, 0), (200, 0), (429, 0)]);
        assert_eq!(summary(&send_as(&layer, "ben").await).1, "all");
        assert_eq!(left(&limits[0], "ben").await, 5);
    }

    #[tokio::test(start_paused = true)]
    async fn a_leaky_bucket_delays_requests_also_beside_a_limit_on_another_key() {
        let limits = in_memory([
            ("user", Algorithm::LeakyBucket, Quota::per_second(1).burst(3)),
            ("all", WINDOW, Quota::per_hour(10)),
        ]);
        let answers = burst(&for_user_and_all(&limits), "ada", 2).await;
        assert_eq!(answers[0], (200, Duration::ZERO));
        let (status, took) = answers[1];
        assert_eq!(status, 200);
        assert!(took >= SECOND && took <= SECOND * 2, "{took:?}");
    }

    #[tokio::test]
    async fn limits_on_different_keys_reserve_nothing_in_redis_either() {
        let server = RedisServer::start();
        let store = support::redis_store(&server).await;
        let limits = limiters(
            &store,
            [("user", BUCKET, Quota::new(1, SECOND / 4)), ("all", WINDOW, Quota::per_hour(10))],
        );
        let layer = for_user_and_all(&limits).max_wait(MAX_WAIT);
        let answers = burst(&layer, "ada", 3).await;
        assert!(answers.iter().all(|(status, _)| *status == 200), "{answers:?}");
        assert_eq!(left(&limits[1], "all").await, 7);
    }
}
