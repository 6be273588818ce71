//! The example `api_client`: a vendor that bans its callers, is closed for a while or goes away,
//! and the client of `docs/outgoing.md`, which respects all of that.

#[path = "../../client.rs"]
mod client;
#[path = "../../vendor.rs"]
mod vendor;

use std::{
    fs,
    future::ready,
    process::Command,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{
    Router,
    http::StatusCode as Status,
    response::{IntoResponse, Redirect},
};
use client::ApiClient;
use reqwest::{Method, Request, Response, StatusCode, Url};
use tokio::{net::TcpListener, sync::oneshot, task::JoinSet};
use tower_ratelimit::{
    Algorithm, Decision, Limiter, Quota,
    layer::Rejection,
    store::{self, AnyStore},
};
use vendor::{Counts, RetryAfter, Vendor};

use crate::support::{self, server::RedisServer};

const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3_600);
const FAST: Quota = Quota::per_second(1_000).burst(1);
const PLACES: u64 = 5;
/// So many requests that nothing is banned.
const NEVER: u32 = u32::MAX;

async fn in_memory(rate: Quota, max_wait: Duration) -> ApiClient {
    ApiClient::new(store::connect("memory:").await.unwrap(), rate, PLACES, max_wait)
}

async fn in_redis(server: &RedisServer) -> AnyStore {
    store::connect(&support::patient(server)).await.unwrap()
}

/// Returns the places that another process would find free.
async fn free_places(server: &RedisServer, url: &str) -> u64 {
    let (store, quota) = (in_redis(server).await, Quota::concurrent(PLACES));
    let places = Limiter::new("places", store, Algorithm::concurrency(), quota);
    let host = client::host(&Url::parse(url).unwrap());
    places.peek(host).await.unwrap().remaining()
}

fn request(url: &str) -> Request {
    Request::new(Method::GET, Url::parse(url).unwrap())
}

async fn get(client: &ApiClient, url: &str) -> Response {
    client.send(request(url)).await.unwrap()
}

/// Sends requests at the same time.
async fn get_all(client: &ApiClient, url: &str, requests: usize) -> Vec<Response> {
    let mut tasks = JoinSet::new();
    for _ in 0..requests {
        let (client, url) = (client.clone(), url.to_owned());
        tasks.spawn(async move { get(&client, &url).await });
    }
    tasks.join_all().await
}

/// Returns the denial of a request that was not sent.
fn denial(response: &Response) -> Option<&Decision> {
    match response.extensions().get()? {
        Rejection::Denied(decision) => Some(decision),
        other => panic!("{other}"),
    }
}

fn is_ok(response: &Response) -> bool {
    response.status() == StatusCode::OK && response.extensions().get::<Rejection>().is_none()
}

/// Starts a server that gives the same answer to all requests. Returns its URL.
async fn serve<R, F>(answer: impl FnMut() -> F + Clone + Send + Sync + 'static) -> String
where
    R: IntoResponse + 'static,
    F: Future<Output = R> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    tokio::spawn(axum::serve(listener, Router::new().fallback(answer)).into_future());
    url
}

#[test]
fn the_page_contains_the_client() {
    let code = fs::read_to_string("client.rs").unwrap();
    let (_, code) = code.split_once("\n\n").unwrap();
    let page = fs::read_to_string("../../docs/outgoing.md").unwrap();
    let block = format!("```rust,no_run\n{code}\n#[tokio::main]\n");
    assert!(page.contains(&block), "copy client.rs into the page");
}

#[tokio::test]
async fn a_request_is_sent_again_when_the_ban_is_over() {
    let (vendor, url) = Vendor::start(3, SECOND).await.unwrap();
    let client = in_memory(FAST, HOUR).await;
    for _ in 0..7 {
        let response = get(&client, &url).await;
        assert!(is_ok(&response));
        assert_eq!(response.text().await.unwrap(), "hello\n");
    }
    let counts = vendor.lock().unwrap().counts;
    assert_eq!(counts, Counts { accepted: 7, bans: 2, banned: 0, grown: 0 });
}

/// A ban, a maintenance, a secondary limit.
const REJECTIONS: [(Status, RetryAfter); 5] = [
    (Status::TOO_MANY_REQUESTS, RetryAfter::Seconds),
    (Status::SERVICE_UNAVAILABLE, RetryAfter::Seconds),
    (Status::SERVICE_UNAVAILABLE, RetryAfter::Date),
    (Status::FORBIDDEN, RetryAfter::Seconds),
    (Status::IM_A_TEAPOT, RetryAfter::Seconds),
];

#[tokio::test]
async fn a_vendor_that_is_closed_gets_no_further_request_and_callers_hear_why_and_for_how_long() {
    let server = RedisServer::start();
    let cases = REJECTIONS.into_iter().flat_map(|case| [(case, true), (case, false)]);
    for ((status, retry_after), is_shared) in cases {
        let (vendor, url) = Vendor::start(NEVER, HOUR).await.unwrap();
        let client = if is_shared {
            ApiClient::new(in_redis(&server).await, FAST, PLACES, SECOND)
        } else {
            in_memory(FAST, SECOND).await
        };
        vendor.lock().unwrap().close(status, HOUR, retry_after);
        let mut not_sent = 0;
        for _ in 0..2 {
            for response in get_all(&client, &url, 20).await {
                let Some(denied) = denial(&response) else {
                    assert_eq!(response.status(), status);
                    continue;
                };
                not_sent += 1;
                assert!(denied.blocked_for().unwrap() > HOUR / 2, "{status}: {denied:?}");
                let text = Rejection::Denied(denied.clone()).to_string();
                let beginning = "this client is blocked; try again in 3";
                assert!(text.starts_with(beginning) && text.contains("(limiter \""), "{text}");
            }
        }
        let Counts { banned, .. } = vendor.lock().unwrap().counts;
        assert!(u64::from(banned) <= PLACES, "{status} {retry_after:?}: {banned} arrived");
        assert_eq!(not_sent, 40 - banned, "{status}");
    }
}

#[tokio::test]
async fn all_requests_wait_for_the_end_of_a_maintenance_that_is_short() {
    for (status, retry_after) in REJECTIONS {
        let (vendor, url) = Vendor::start(NEVER, HOUR).await.unwrap();
        let client = in_memory(FAST, HOUR).await;
        vendor.lock().unwrap().close(status, SECOND, retry_after);
        assert!(get_all(&client, &url, 40).await.iter().all(is_ok), "{status}");
        let Counts { accepted, banned, .. } = vendor.lock().unwrap().counts;
        assert_eq!(accepted, 40);
        assert!(u64::from(banned) <= PLACES, "{status} {retry_after:?}: {banned} arrived");
    }
}

#[tokio::test]
async fn a_ban_does_not_grow_and_holds_back_no_other_host() {
    let (vendor, url) = Vendor::start(10, 2 * SECOND).await.unwrap();
    let (_, elsewhere) = Vendor::start(NEVER, HOUR).await.unwrap();
    let client = in_memory(FAST, HOUR).await;
    let during = async {
        while vendor.lock().unwrap().counts.bans == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        get(&client, &elsewhere).await
    };
    let (responses, other) = tokio::join!(get_all(&client, &url, 15), during);
    assert!(responses.iter().all(is_ok) && is_ok(&other));
    let counts = vendor.lock().unwrap().counts;
    assert_eq!((counts.accepted, counts.bans, counts.grown), (15, 1, 0));
}

#[tokio::test]
async fn the_rejections_of_the_client_are_neither_retried_nor_taken_for_those_of_the_vendor() {
    let (vendor, url) = Vendor::start(NEVER, HOUR).await.unwrap();
    let client = in_memory(Quota::per_hour(1), SECOND).await;
    assert!(is_ok(&get(&client, &url).await));
    let response = get(&client, &url).await;
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    let denied = denial(&response).unwrap();
    assert_eq!((denied.limiter(), denied.is_blocked()), ("rate", false));
    assert_eq!(vendor.lock().unwrap().counts.accepted, 1);
}

#[tokio::test]
async fn a_vendor_that_goes_away_and_comes_back_is_called_again() {
    let (vendor, _) = Vendor::start(NEVER, HOUR).await.unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let url = format!("http://{address}/");
    let client = in_memory(FAST, SECOND).await;
    for _ in 0..2 {
        // More than there are places.
        for _ in 0..3 * PLACES {
            let error = client.send(request(&url)).await.unwrap_err();
            assert!(error.downcast_ref::<reqwest::Error>().unwrap().is_connect(), "{error:?}");
        }
        let (stop, stopped) = oneshot::channel::<()>();
        let serve = Vendor::serve_at(vendor.clone(), address, async { drop(stopped.await) });
        let serving = tokio::spawn(serve);
        while !client.send(request(&url)).await.is_ok_and(|response| is_ok(&response)) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert!(get_all(&client, &url, 20).await.iter().all(is_ok));
        stop.send(()).unwrap();
        serving.await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn requests_outlast_a_redis_that_is_down() {
    let mut server = RedisServer::start();
    let (vendor, url) = Vendor::start(NEVER, HOUR).await.unwrap();
    let client = ApiClient::new(in_redis(&server).await, FAST, PLACES, HOUR);
    assert!(get_all(&client, &url, 20).await.iter().all(is_ok));
    server.kill();
    let waiting = tokio::spawn({
        let (client, url) = (client.clone(), url.clone());
        async move { get_all(&client, &url, 200).await }
    });
    tokio::time::sleep(SECOND).await;
    // At most those that had a place, and their instant.
    assert!(u64::from(vendor.lock().unwrap().counts.accepted) <= 20 + PLACES);
    server.restart();
    assert!(waiting.await.unwrap().iter().all(is_ok));
    assert_eq!(vendor.lock().unwrap().counts.accepted, 220);
    client.flush().await;
    assert_eq!(free_places(&server, &url).await, PLACES);
}

#[tokio::test]
async fn a_redis_that_stays_away_is_named_as_the_reason() {
    let mut server = RedisServer::start();
    let (vendor, url) = Vendor::start(NEVER, HOUR).await.unwrap();
    let client = ApiClient::new(in_redis(&server).await, FAST, PLACES, SECOND);
    server.kill();
    for response in get_all(&client, &url, 40).await {
        assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
        let rejection = response.extensions().get::<Rejection>().unwrap();
        let text =
            "the rate limit cannot be checked right now; try again later (limiter \"places\")";
        assert_eq!(rejection.to_string(), text);
    }
    assert_eq!(vendor.lock().unwrap().counts, Counts::default());
}

/// Without the flush, the places of the last requests of a job would be taken for 15 s.
#[test]
fn short_jobs_one_after_the_other_find_all_places_free() {
    let server = RedisServer::start();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (vendor, url) = runtime.block_on(Vendor::start(NEVER, HOUR)).unwrap();
    let program = support::example("api_client");
    for job in 1..=6 {
        let redis = support::patient(&server);
        let mut program = Command::new(&program);
        program.args(["--redis", &redis, "--vendor", &url]);
        program.args(["--quota", "1000/s burst 1", "--requests", "4"]);
        let output = program.output().unwrap();
        let stdout = String::from_utf8(output.stdout).unwrap();
        assert_eq!(stdout.matches(": 200 OK\n").count(), 12, "{stdout}");
        let free = runtime.block_on(free_places(&server, &url));
        assert_eq!(free, PLACES, "after job {job}");
    }
    assert_eq!(vendor.lock().unwrap().counts.accepted, 72);
}

#[tokio::test]
async fn a_redirect_is_returned_as_it_would_pass_the_limit_of_the_other_host() {
    let (vendor, url) = Vendor::start(0, HOUR).await.unwrap();
    let elsewhere = serve(move || ready(Redirect::to(&url))).await;
    let response = get(&in_memory(FAST, SECOND).await, &elsewhere).await;
    assert_eq!(response.status(), StatusCode::SEE_OTHER);
    assert_eq!(vendor.lock().unwrap().counts, Counts::default());
}

#[tokio::test]
async fn a_request_that_was_answered_or_may_have_been_executed_is_not_sent_again() {
    let used_up = [("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "1")];
    let later = [("retry-after", "1"), ("x-ratelimit-remaining", "1")];
    let cases = [Status::SEE_OTHER, Status::NOT_FOUND, Status::CONFLICT].map(|it| (it, used_up));
    for (status, headers) in cases.into_iter().chain([(Status::BAD_GATEWAY, later)]) {
        let arrived = Arc::new(Mutex::new(0));
        let count = arrived.clone();
        let answer = move || {
            *count.lock().unwrap() += 1;
            ready((status, headers))
        };
        let url = serve(answer).await;
        let client = in_memory(FAST, HOUR).await;
        let post = Request::new(Method::POST, Url::parse(&url).unwrap());
        assert_eq!(client.send(post).await.unwrap().status(), status);
        assert_eq!(*arrived.lock().unwrap(), 1, "{status}");
    }
}

#[tokio::test]
async fn a_vendor_blocks_its_host_for_an_hour_at_most() {
    let (_, url) = Vendor::start(0, 24 * HOUR).await.unwrap();
    let client = in_memory(FAST, SECOND).await;
    assert_eq!(get(&client, &url).await.status(), StatusCode::TOO_MANY_REQUESTS);
    let response = get(&client, &url).await;
    let blocked = denial(&response).unwrap().blocked_for().unwrap();
    assert!(blocked <= HOUR, "{blocked:?}");
}

#[tokio::test]
async fn the_429_of_the_vendor_is_returned_if_the_store_cannot_block_its_host() {
    let server = RedisServer::start();
    let store = in_redis(&server).await;
    let server = Arc::new(Mutex::new(server));
    let answer = move || {
        server.lock().unwrap().kill();
        ready(Status::TOO_MANY_REQUESTS)
    };
    let client = ApiClient::new(store, FAST, PLACES, HOUR);
    let response = get(&client, &serve(answer).await).await;
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    assert!(response.extensions().get::<Rejection>().is_none());
}

#[test]
fn the_callers_wait_while_they_are_banned_and_the_vendor_says_when() {
    let mut program = Command::new(support::example("api_client"));
    let output = program.args(["--quota", "100/s", "--requests", "8"]).output().unwrap();
    let stdout = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{stdout}{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(stdout.matches(": 200 OK\n").count(), 24, "{stdout}");
    // Only requests that are in flight when the ban begins can arrive or end during it.
    let (_, ban) = stdout.split_once("vendor: answers 429 and bans the callers for 2 s\n").unwrap();
    let (ban, _) = ban.split_once(" s, vendor: the ban is over\n").unwrap();
    assert!(ban.matches(": 200 OK\n").count() <= 2, "{stdout}");
    let last = stdout.lines().last().unwrap();
    let banned = last.strip_prefix("vendor: 24 accepted, bans: 1, requests during a ban: ");
    assert!(banned.is_some_and(|banned| banned.parse::<u32>().unwrap() <= 2), "{stdout}");
}
