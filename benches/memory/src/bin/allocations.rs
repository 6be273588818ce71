//! Counts the allocations that a layer adds to a request.

use std::convert::Infallible;

use allocation_counter::measure;
use axum::body::Body;
use http::{Request, Response};
use memory::{
    Bare, ONE, SLOW, header_values, layer,
    peers::{governor_layer, governor_layer_with_headers},
    send_all, shuffled_keys,
};
use tower_layer::Layer;
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
