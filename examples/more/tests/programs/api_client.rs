//! The example `api_client`: a vendor that bans its callers, and a reqwest client that respects it.

#[path = "../../client.rs"]
mod client;
#[path = "../../vendor.rs"]
mod vendor;

use std::{
    future::ready,
    process::Command,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{
    Router,
    response::{IntoResponse, Redirect},
};
use reqwest::{Method, Request, Response, StatusCode, Url};
use tokio::net::TcpListener;
use tower::{BoxError, ServiceExt};
use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, RedisStore, http::Rejection};
use vendor::{Counts, Vendor};

use crate::support::{self, server::RedisServer};

const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3_600);

fn limiter(quota: Quota) -> Limiter {
    Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota)
}

async fn get(limiter: &Limiter, deadline: Duration, url: &str) -> Result<Response, BoxError> {
    let request = Request::new(Method::GET, Url::parse(url).unwrap());
    client::client(limiter.clone(), deadline).oneshot(request).await
}

fn rejection(response: &Response) -> &Rejection {
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    response.extensions().get().expect("a response of the layer")
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

fn key(url: &str) -> String {
    client::key(&Url::parse(url).unwrap())
}

#[tokio::test]
async fn a_request_is_sent_again_when_the_ban_is_over() {
    let (vendor, url) = Vendor::start(3, SECOND).await.unwrap();
    let limiter = limiter(Quota::per_hour(100));
    for _ in 0..7 {
        let response = get(&limiter, HOUR, &url).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.text().await.unwrap(), "hello\n");
    }
    let counts = vendor.lock().unwrap().counts;
    assert_eq!(counts, Counts { accepted: 7, bans: 2, banned: 0 });
    // A retry is a request: it counts.
    assert_eq!(limiter.peek(key(&url)).await.unwrap().remaining(), 100 - 9);
}

#[tokio::test]
async fn a_ban_holds_back_all_callers_of_the_host_and_no_other_host() {
    let (vendor, url) = Vendor::start(1, HOUR).await.unwrap();
    let (_, elsewhere) = Vendor::start(1, HOUR).await.unwrap();
    let limiter = limiter(Quota::per_hour(100));
    assert_eq!(get(&limiter, SECOND, &url).await.unwrap().status(), StatusCode::OK);
    for _ in 0..3 {
        // The end of the block is after the deadline: the answer is immediate.
        let response = get(&limiter, SECOND, &url).await.unwrap();
        let Rejection::Denied(denied) = rejection(&response) else { panic!("{response:?}") };
        assert!(denied.is_blocked());
        assert!(denied.retry_after().unwrap() > HOUR / 2);
    }
    let counts = vendor.lock().unwrap().counts;
    assert_eq!(counts, Counts { accepted: 1, bans: 1, banned: 0 }, "the others were not sent");
    assert_eq!(get(&limiter, SECOND, &elsewhere).await.unwrap().status(), StatusCode::OK);
}

#[tokio::test]
async fn the_rejections_of_the_layer_are_neither_retried_nor_taken_for_those_of_the_vendor() {
    let (vendor, url) = Vendor::start(100, HOUR).await.unwrap();
    let limiter = limiter(Quota::per_hour(1));
    assert_eq!(get(&limiter, SECOND, &url).await.unwrap().status(), StatusCode::OK);
    let response = get(&limiter, SECOND, &url).await.unwrap();
    let Rejection::Denied(denied) = rejection(&response) else { panic!("{response:?}") };
    assert!(!denied.is_blocked());
    assert!(limiter.peek(key(&url)).await.unwrap().blocked_for().is_none());
    assert_eq!(vendor.lock().unwrap().counts.accepted, 1);
}

#[tokio::test]
async fn a_redirect_is_returned_as_it_would_pass_the_limit_of_the_other_host() {
    let (vendor, url) = Vendor::start(0, HOUR).await.unwrap();
    let elsewhere = serve(move || ready(Redirect::to(&url))).await;
    let limiter = limiter(Quota::per_hour(100));
    let response = get(&limiter, SECOND, &elsewhere).await.unwrap();
    assert_eq!(response.status(), StatusCode::SEE_OTHER);
    assert_eq!(vendor.lock().unwrap().counts, Counts::default());
}

#[tokio::test]
async fn a_vendor_blocks_its_host_for_an_hour_at_most() {
    let (_, url) = Vendor::start(0, 24 * HOUR).await.unwrap();
    let limiter = limiter(Quota::per_hour(100));
    rejection(&get(&limiter, SECOND, &url).await.unwrap());
    let denied = limiter.peek(key(&url)).await.unwrap();
    assert!(denied.blocked_for().is_some());
    assert!(denied.retry_after().unwrap() <= HOUR);
}

#[tokio::test]
async fn the_429_of_the_vendor_is_returned_if_the_store_cannot_block_its_host() {
    let server = RedisServer::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let server = Arc::new(Mutex::new(server));
    let limiter = Limiter::new("api", store, Algorithm::sliding_log(), Quota::per_hour(100));
    let answer = move || {
        server.lock().unwrap().kill();
        ready(axum::http::StatusCode::TOO_MANY_REQUESTS)
    };
    let response = get(&limiter, HOUR, &serve(answer).await).await.unwrap();
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    assert!(response.extensions().get::<Rejection>().is_none());
}

#[tokio::test]
async fn the_deadline_ends_a_request_to_a_vendor_that_does_not_answer() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let limiter = limiter(Quota::per_hour(1));
    let error = get(&limiter, SECOND / 4, &url).await.unwrap_err();
    assert!(error.is::<tower::timeout::error::Elapsed>(), "{error}");
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
