//! A gRPC request waits no longer than its `grpc-timeout`, and other texts change nothing:
//! `cargo +nightly fuzz run grpc_timeout`.

#![no_main]

use std::{convert::Infallible, time::Duration};

use http::{HeaderValue, Request, Response};
use libfuzzer_sys::fuzz_target;
use tokio::runtime;
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key};

const MAX_WAIT: Duration = Duration::from_secs(3_600);

/// Reads up to 8 digits and a unit.
fn timeout(text: &[u8]) -> Option<u128> {
    let (unit, digits) = text.split_last()?;
    let nanos = match unit {
        b'H' => 3_600_000_000_000,
        b'M' => 60_000_000_000,
        b'S' => 1_000_000_000,
        b'm' => 1_000_000,
        b'u' => 1_000,
        b'n' => 1,
        _ => return None,
    };
    let is_number = (1..=8).contains(&digits.len()) && digits.iter().all(u8::is_ascii_digit);
    let number = || digits.iter().fold(0, |number, digit| number * 10 + u128::from(digit - b'0'));
    is_number.then(|| nanos * number())
}

fuzz_target!(|data: &[u8]| {
    let Ok(value) = HeaderValue::from_bytes(data) else { return };
    let runtime = runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    runtime.expect("a runtime").block_on(async {
        // A request can be sent every 6 minutes.
        let quota = Quota::per_hour(10).burst(1);
        let limiter = Limiter::new("calls", MemoryStore::new(), Algorithm::token_bucket(), quota);
        let layer = RateLimitLayer::new(limiter, key::Global).max_wait(MAX_WAIT);
        let inner = service_fn(async |_: Request<()>| Ok::<_, Infallible>(Response::new(())));
        let service = layer.layer(inner);
        let request = |timeout: Option<&HeaderValue>| {
            let mut request = Request::post("/").body(()).expect("a request");
            let headers = request.headers_mut();
            headers.insert("content-type", HeaderValue::from_static("application/grpc"));
            timeout.map(|value| headers.insert("grpc-timeout", value.clone()));
            request
        };
        let is_admitted = async |timeout| {
            let response = service.clone().oneshot(request(timeout)).await.expect("a response");
            !response.headers().contains_key("grpc-status")
        };
        assert!(is_admitted(None).await);
        let longest = timeout(value.as_bytes()).unwrap_or(u128::MAX);
        let waits = longest >= Duration::from_secs(360).as_nanos();
        assert_eq!(is_admitted(Some(&value)).await, waits, "{value:?}");
    });
});
