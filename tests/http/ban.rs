//! The recipes that ban clients after too many denials, as docs/support-tasks.md shows them.

use std::{net::SocketAddr, time::Duration};

use axum::{
    Router,
    body::Body,
    extract::{ConnectInfo, Request, State},
    middleware::{Next, from_fn_with_state},
    response::Response,
    routing::get,
};
use http::StatusCode;
use tokio::time::advance;
use tower::ServiceExt;
use tower_ratelimit::{
    Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key, layer::Rejection,
};

#[derive(Clone)]
struct Ban {
    api: Limiter,
    denials: Limiter,
}

impl Ban {
    fn new(store: MemoryStore, api: Limiter) -> Self {
        let quota = Quota::per_minute(20);
        Self { api, denials: Limiter::new("denials", store, Algorithm::fixed_window(), quota) }
    }

    async fn apply(
        State(Self { api, denials }): State<Self>,
        ConnectInfo(peer): ConnectInfo<SocketAddr>,
        request: Request,
        next: Next,
    ) -> Response {
        let response = next.run(request).await;
        if let Some(Rejection::Denied(decision)) = response.extensions().get()
            && !decision.is_blocked()
        {
            let client = key::PeerIp.key(peer.ip());
            if let Ok(denial) = denials.check(&client).await
                && !denial.is_allowed()
            {
                let _ = api.block(client, Duration::from_secs(600)).await;
            }
        }
        response
    }
}

async fn send(app: &Router, client: &str) -> (StatusCode, u64) {
    let mut request = Request::new(Body::empty());
    let client = SocketAddr::new(client.parse().unwrap(), 4711);
    request.extensions_mut().insert(ConnectInfo(client));
    let response = app.clone().oneshot(request).await.unwrap();
    let retry_after = response.headers().get("retry-after");
    let seconds = retry_after.map_or(0, |it| it.to_str().unwrap().parse().unwrap());
    (response.status(), seconds)
}

#[tokio::test(start_paused = true)]
async fn a_client_that_ignores_denials_is_banned_and_no_other() {
    let store = MemoryStore::new();
    let api =
        Limiter::new("default", store.clone(), Algorithm::token_bucket(), Quota::per_second(10));
    let ban = Ban::new(store, api.clone());
    let app = Router::new()
        .route("/", get(|| async { "hello" }))
        .layer(RateLimitLayer::new(api, key::PeerIp).extensions(true))
        .layer(from_fn_with_state(ban, Ban::apply));
    for _ in 0..10 {
        assert_eq!(send(&app, "192.0.2.1").await, (StatusCode::OK, 0));
    }
    for _ in 0..21 {
        assert_eq!(send(&app, "192.0.2.1").await, (StatusCode::TOO_MANY_REQUESTS, 1));
    }
    for _ in 0..50 {
        assert_eq!(send(&app, "192.0.2.1").await, (StatusCode::TOO_MANY_REQUESTS, 600));
    }
    assert_eq!(send(&app, "192.0.2.2").await, (StatusCode::OK, 0));
    // Denials by a ban do not count, so it ends.
    advance(Duration::from_secs(600)).await;
    assert_eq!(send(&app, "192.0.2.1").await, (StatusCode::OK, 0));
}

#[tokio::test(start_paused = true)]
async fn two_layers_ban_a_client_until_the_window_of_the_outer_one_ends() {
    let store = MemoryStore::new();
    let api =
        Limiter::new("default", store.clone(), Algorithm::token_bucket(), Quota::per_second(10));
    let denials = Quota::new(20, Duration::from_secs(600));
    let denials = Limiter::new("denials", store, Algorithm::fixed_window(), denials);
    let app = Router::new()
        .route("/", get(|| async { "hello" }))
        .layer(RateLimitLayer::new(api, key::PeerIp).extensions(true))
        .layer(
            RateLimitLayer::new(denials, key::PeerIp)
                .charge_when(|response| response.extensions.get::<Rejection>().is_some()),
        );
    for _ in 0..10 {
        assert_eq!(send(&app, "192.0.2.1").await, (StatusCode::OK, 0));
    }
    for _ in 0..19 {
        assert_eq!(send(&app, "192.0.2.1").await, (StatusCode::TOO_MANY_REQUESTS, 1));
    }
    // The last denial that the outer layer lets through announces the ban.
    assert_eq!(send(&app, "192.0.2.1").await, (StatusCode::TOO_MANY_REQUESTS, 600));
    advance(Duration::from_secs(300)).await;
    for _ in 0..50 {
        assert_eq!(send(&app, "192.0.2.1").await, (StatusCode::TOO_MANY_REQUESTS, 300));
    }
    assert_eq!(send(&app, "192.0.2.2").await, (StatusCode::OK, 0));
    advance(Duration::from_secs(300)).await;
    assert_eq!(send(&app, "192.0.2.1").await, (StatusCode::OK, 0));
}
