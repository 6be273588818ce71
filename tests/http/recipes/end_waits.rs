//! `waiting.md`: requests that still wait when the service stops.

use std::{
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use axum::{
    Extension, Router,
    extract::{Request, State},
    http::{StatusCode, header::RETRY_AFTER},
    middleware::{Next, from_fn, from_fn_with_state},
    response::{IntoResponse, Response},
};
use tokio::sync::watch;
use tower_ratelimit::RateLimitLayer;

#[derive(Clone, Default)]
struct Admitted(Arc<AtomicBool>);

/// Inside of the limit.
async fn admit(Extension(admitted): Extension<Admitted>, request: Request, next: Next) -> Response {
    admitted.0.store(true, Relaxed);
    next.run(request).await
}

/// Outside of the limit: rejects a request that still waits when the service stops.
async fn end_wait(
    State(mut stopping): State<watch::Receiver<bool>>,
    mut request: Request,
    next: Next,
) -> Response {
    let admitted = Admitted::default();
    request.extensions_mut().insert(admitted.clone());
    let mut response = pin!(next.run(request));
    tokio::select! {
        biased;
        response = &mut response => return response,
        _ = stopping.wait_for(|is_stopping| *is_stopping) => {}
    }
    if admitted.0.load(Relaxed) {
        return response.await;
    }
    (StatusCode::SERVICE_UNAVAILABLE, [(RETRY_AFTER, "1")]).into_response()
}

fn limited(app: Router, limit: RateLimitLayer, stopping: watch::Receiver<bool>) -> Router {
    app.layer(from_fn(admit)).layer(limit).layer(from_fn_with_state(stopping, end_wait))
}

mod tests {
    use std::time::Duration;

    use axum::{body::Body, routing::get};
    use tokio::time::{Instant, sleep};
    use tower::ServiceExt;
    use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, key};

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// The clock is paused, so that the times are exact.
    #[tokio::test(start_paused = true)]
    async fn the_stop_ends_the_waits_and_not_the_requests_that_are_served() {
        for (algorithm, quota) in [
            (Algorithm::token_bucket(), Quota::new(1, 10 * SECOND)),
            (Algorithm::concurrency(), Quota::concurrent(1)),
        ] {
            let limiter = Limiter::new("api", MemoryStore::new(), algorithm, quota);
            let limit = RateLimitLayer::new(&limiter, key::Global).max_wait(20 * SECOND);
            let work = async || sleep(5 * SECOND).await;
            let (stop, stopping) = watch::channel(false);
            let app = limited(Router::new().route("/", get(work)), limit, stopping);
            let start = Instant::now();
            let send = || {
                let response = app.clone().oneshot(Request::new(Body::empty()));
                tokio::spawn(async move {
                    let response = response.await.unwrap();
                    (response.status().as_u16(), start.elapsed().as_secs())
                })
            };
            let served = send();
            sleep(SECOND).await;
            let waits = send();
            sleep(SECOND).await;
            stop.send_replace(true);
            assert_eq!(waits.await.unwrap(), (503, 2));
            assert_eq!(served.await.unwrap(), (200, 5));
            // What the wait had reserved is available again.
            sleep(5 * SECOND).await;
            assert_eq!(send().await.unwrap(), (200, 15));
            assert_eq!(limiter.peek(key::Global.key()).await.unwrap().held(), 0);
        }
    }
}
