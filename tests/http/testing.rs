//! The tests of docs/testing.md, line by line: rustdoc does not run them.

use std::{net::SocketAddr, time::Duration};

use axum::{
    Router,
    body::Body,
    extract::connect_info::MockConnectInfo,
    http::{Request, StatusCode, header::RETRY_AFTER},
    routing::get,
};
use tower::ServiceExt;
use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer};

#[tokio::test(start_paused = true)]
async fn five_logins_per_minute() {
    let limiter =
        Limiter::new("login", MemoryStore::new(), Algorithm::sliding_log(), Quota::per_minute(5));
    for _ in 0..5 {
        assert!(limiter.check("ada").await.unwrap().is_allowed());
    }
    let denied = limiter.check("ada").await.unwrap();
    assert_eq!(denied.retry_after(), Some(Duration::from_secs(60)));
    tokio::time::advance(Duration::from_secs(60)).await;
    assert!(limiter.check("ada").await.unwrap().is_allowed());
}

#[tokio::test(start_paused = true)]
async fn the_third_request_is_rejected() {
    let app = Router::new()
        .route("/", get(async || "hello"))
        .layer(RateLimitLayer::per_ip(Quota::per_minute(2)))
        .layer(MockConnectInfo(SocketAddr::from(([192, 0, 2, 1], 1234))));
    let send = || app.clone().oneshot(Request::new(Body::empty()));
    assert_eq!(send().await.unwrap().status(), StatusCode::OK);
    assert_eq!(send().await.unwrap().status(), StatusCode::OK);
    let rejected = send().await.unwrap();
    assert_eq!(rejected.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(rejected.headers()[RETRY_AFTER], "30");
}

#[test]
fn the_page_has_these_tests() {
    let page = include_str!("../../docs/testing.md");
    let code = include_str!("testing.rs").split_once("#[tokio::test").unwrap().1;
    let (code, _) = code.split_once("#[test]").unwrap();
    for line in code.lines() {
        assert!(page.contains(line), "docs/testing.md has no line {line:?}");
    }
}
