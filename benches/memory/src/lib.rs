//! What the programs of this package measure: the keys, the bare service, limiters and layers. It
//! takes no measurements.

use std::{
    convert::Infallible,
    future::{self, Ready},
    hint::black_box,
    pin::pin,
    task::{Context, Poll, Waker},
};

use axum::body::Body;
use bytes::Bytes;
use http::{HeaderName, HeaderValue, Request, Response, StatusCode};
use tower_ratelimit::{Algorithm, Charge, Limiter, MemoryStore, Quota, RateLimitLayer, key};
use tower_service::Service;

pub mod peers;

/// Refills a bucket between two requests with its key.
pub const QUICK: Quota = Quota::per_second(1_000_000);
/// Admits all requests, and never refills a bucket meanwhile.
pub const SLOW: Quota = Quota::per_day(1_000_000);
/// Admits all requests, and refills nothing meanwhile: no key expires, and none is swept.
pub const NEVER: Quota = Quota::per_day(1_000);
/// Admits the first request of a key.
pub const ONE: Quota = Quota::per_hour(1);

pub const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

pub fn limiter(algorithm: Algorithm, quota: Quota) -> Limiter {
    Limiter::new("default", MemoryStore::new(), algorithm, quota)
}

/// The layer as it is by default.
pub fn layer(quota: Quota) -> RateLimitLayer {
    RateLimitLayer::new(limiter(Algorithm::token_bucket(), quota), key::header(API_KEY))
}

/// A service that is ready at once, and does nothing.
#[derive(Clone, Debug)]
pub struct Bare;

impl Service<Request<Body>> for Bare {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        drop(black_box(request));
        future::ready(Ok(Response::new(Body::empty())))
    }
}

/// Sends a request with each key. Returns the number of admitted requests.
pub fn send_all<S, B>(service: &mut S, keys: &[HeaderValue]) -> usize
where
    S: Service<Request<Body>, Response = Response<B>, Error = Infallible>,
{
    let mut admitted = 0;
    for key in keys {
        let mut request = Request::new(Body::empty());
        request.headers_mut().insert(API_KEY, key.clone());
        ready(future::poll_fn(|cx| service.poll_ready(cx))).expect("the service never fails");
        let response = black_box(ready(service.call(request)).expect("the service never fails"));
        admitted += usize::from(response.status() == StatusCode::OK);
    }
    admitted
}

/// Checks each key. Returns the number of admitted ones.
pub fn check_all(limiter: &Limiter, keys: &[String]) -> usize {
    // In one future, as in a program: a future by itself would be moved for each check.
    ready(async {
        let mut admitted = 0;
        for key in keys {
            let decision = limiter.check(black_box(key)).await.expect("a decision");
            admitted += usize::from(decision.is_allowed());
        }
        admitted
    })
}

/// Checks each key by [`now`](tower_ratelimit::Check::now). Returns the number of admitted ones.
pub fn check_all_now(limiter: &Limiter, keys: &[String]) -> usize {
    let is_admitted = |key| limiter.check(black_box(key)).now().expect("a decision").is_allowed();
    keys.iter().filter(|key| is_admitted(*key)).count()
}

/// Checks two limits of each key in one charge. Returns the number of admitted ones.
pub fn check_all_twice(limiters: [&Limiter; 2], keys: &[String]) -> usize {
    let [first, second] = limiters;
    ready(async {
        let mut admitted = 0;
        for key in keys {
            let charge = Charge::new(first, black_box(key)).also(second);
            admitted += usize::from(charge.check().await.expect("a decision").is_allowed());
        }
        admitted
    })
}

/// Holds 10 units of each key, of which 4 are used. Returns the number of admitted holds.
pub fn hold_all(limiter: &Limiter, keys: &[String]) -> usize {
    ready(async {
        let mut admitted = 0;
        for key in keys {
            let held = limiter.hold(black_box(key), 10).await.expect("a decision");
            if let Some(permit) = held.admitted() {
                permit.settle(4);
                admitted += 1;
            }
        }
        admitted
    })
}

/// The output of a future that is ready at once: there is no runtime to wait in.
pub fn ready<F: Future>(future: F) -> F::Output {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("the future is not ready at once"),
    }
}

/// Keys in the same random order every time.
pub fn shuffled_keys(count: usize) -> Vec<String> {
    let mut keys: Vec<_> = (0..count).map(|i| format!("user-{i:06}")).collect();
    let mut random = 1_u64;
    for i in (1..keys.len()).rev() {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        keys.swap(i, (random >> 33) as usize % (i + 1));
    }
    keys
}

pub fn header_values(keys: &[String]) -> Vec<HeaderValue> {
    let value = |key: &String| HeaderValue::from_maybe_shared(Bytes::from(key.clone()));
    keys.iter().map(|key| value(key).expect("printable ASCII")).collect()
}
