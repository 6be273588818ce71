//! Counts the allocations that a layer adds to a request, and the bytes of a key.

use std::convert::Infallible;

use allocation_counter::measure;
use axum::body::Body;
use governor::clock::DefaultClock;
use http::{Request, Response};
use memory::{
    Bare, ONE, SLOW, header_values, layer,
    peers::{Check, governor, governor_layer, governor_layer_with_headers},
    send_all, shuffled_keys,
};
use tower_layer::Layer;
use tower_ratelimit::{Algorithm, Limiter, MemoryStore};
use tower_service::Service;

fn main() {
    println!("Allocations per request, without those of the bare service; one that grows counts");
    println!("again");
    let bare = allocations(Bare);
    let print = |name: &str, count: f64| println!("  {name:<40} {:.2}", count - bare);
    for (label, quota) in [("allowed", SLOW), ("denied", ONE)] {
        println!(" {label}");
        let ours = layer(quota);
        print("headers: the default", allocations(ours.clone().layer(Bare)));
        print("no headers", allocations(ours.clone().headers([]).layer(Bare)));
        print("headers, extensions", allocations(ours.extensions(true).layer(Bare)));
        print("tower_governor: its default", allocations(governor_layer(quota).layer(Bare)));
        let headers = governor_layer_with_headers(quota);
        print("tower_governor, headers", allocations(headers.layer(Bare)));
    }
    println!("Bytes per key of 11 characters, in tables that grew to this number");
    for count in [100_000, 1_000_000] {
        let keys = shuffled_keys(count);
        let ours = || {
            let store = MemoryStore::with_max_keys(count);
            Limiter::new("default", store, Algorithm::token_bucket(), SLOW)
        };
        let [ours, theirs] =
            [bytes(ours, &keys), bytes(|| governor(SLOW, DefaultClock::default()), &keys)];
        println!("  {count:>9} keys  ours {ours:6.1}  governor {theirs:6.1}");
    }
}

/// Returns the bytes that each key has allocated.
fn bytes<C: Check>(new: impl Fn() -> C, keys: &[String]) -> f64 {
    let mut subject = None;
    let counted = measure(|| subject.insert(new()).check_all(keys));
    counted.bytes_current as f64 / keys.len() as f64
}

fn allocations<S, B>(mut service: S) -> f64
where
    S: Service<Request<Body>, Response = Response<B>, Error = Infallible>,
{
    let keys = header_values(&shuffled_keys(1_000));
    send_all(&mut service, &keys);
    let counted = measure(|| _ = send_all(&mut service, &keys));
    counted.count_total as f64 / keys.len() as f64
}
