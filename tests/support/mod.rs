//! What several tests need.

#![allow(dead_code)]

pub mod server;

use std::{
    convert::Infallible,
    path::PathBuf,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use axum::body::Body;
use http::{Request, Response};
use tower::{Service, service_fn};
use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};

pub const ALGORITHMS: [Algorithm; 5] = [
    Algorithm::FixedWindow,
    Algorithm::SlidingLog,
    Algorithm::SlidingWindow { buckets: 4 },
    Algorithm::token_bucket(),
    Algorithm::LeakyBucket,
];

pub fn in_memory(quota: Quota) -> Limiter {
    Limiter::new(MemoryStore::new(), Algorithm::token_bucket(), quota)
}

/// A service that counts its calls.
pub fn counting(
    calls: &Arc<AtomicUsize>,
) -> impl Service<Request<Body>, Response = Response<Body>, Error = Infallible, Future: Send>
+ Clone
+ use<> {
    let calls = calls.clone();
    service_fn(move |_| {
        calls.fetch_add(1, Ordering::SeqCst);
        async { Ok(Response::new(Body::empty())) }
    })
}

pub fn get(headers: &[(&str, &str)]) -> Request<Body> {
    let mut request = Request::builder().uri("/");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(Body::empty()).unwrap()
}

pub fn field<'a, B>(response: &'a Response<B>, name: &str) -> Vec<&'a str> {
    response.headers().get_all(name).iter().map(|value| value.to_str().unwrap()).collect()
}

/// The program of an example, built anew if need be: `cargo test` builds the examples only when it
/// runs all tests.
pub fn example(name: &str) -> PathBuf {
    let mut build = vec!["build", "--quiet", "--all-features", "--example", name];
    if !cfg!(debug_assertions) {
        build.push("--release");
    }
    assert!(Command::new(env!("CARGO")).args(build).status().unwrap().success());
    let tests = std::env::current_exe().unwrap();
    tests.ancestors().nth(2).unwrap().join("examples").join(name)
}
