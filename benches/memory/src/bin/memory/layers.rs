//! What a layer adds to a service that is ready at once.

use std::convert::Infallible;

use axum::body::Body;
use http::{HeaderValue, Request, Response};
use memory::{
    Bare, ONE, SLOW, header_values, layer,
    peers::{governor_layer, governor_layer_with_headers, least_layer, tower_rate_limit},
    send_all, shuffled_keys,
};
use tower_layer::Layer;
use tower_ratelimit::Quota;
use tower_service::Service;

use crate::{
    interleaved::{Series, interleaved},
    nanos,
};

const ROUNDS: usize = 21;
const PASSES: usize = 3;

/// Sends a request with each key.
type Pass<'a> = Box<dyn FnMut() -> usize + 'a>;

fn pass<'a, S, B>(mut service: S, keys: &'a [HeaderValue]) -> Pass<'a>
where
    S: Service<Request<Body>, Response = Response<B>, Error = Infallible> + 'a,
{
    Box::new(move || send_all(&mut service, keys))
}

/// The names of the subjects, in the order of [`subject`].
const SUBJECTS: [&str; 8] = [
    "the bare service",
    "headers: the default",
    "no headers",
    "headers, extensions",
    "tower_governor: its default",
    "tower_governor, headers",
    "the least possible",
    "tower's RateLimit, without keys",
];

fn subject(which: usize, quota: Quota, keys: &[HeaderValue]) -> Pass<'_> {
    match which {
        0 => pass(Bare, keys),
        1 => pass(layer(quota).layer(Bare), keys),
        2 => pass(layer(quota).headers([]).layer(Bare), keys),
        3 => pass(layer(quota).extensions(true).layer(Bare), keys),
        4 => pass(governor_layer(quota).layer(Bare), keys),
        5 => pass(governor_layer_with_headers(quota).layer(Bare), keys),
        6 => pass(least_layer(quota).layer(Bare), keys),
        _ => pass(tower_rate_limit(Bare), keys),
    }
}

pub(super) fn print_layers() {
    println!();
    println!("A request through a layer, without the bare service: ns of its processor,");
    println!("median of {ROUNDS}. tower_governor makes a clock for each denial, which takes 27 us");
    println!("on machines where the instruction `cpuid` traps, as on virtual ones.");
    // tower's `RateLimit` makes a timer.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
    let runtime = runtime.expect("a runtime");
    let _guard = runtime.enter();
    let keys = header_values(&shuffled_keys(10_000));
    for (label, quota) in [("allowed", SLOW), ("denied", ONE)] {
        println!("  {label}");
        let all: [Series; SUBJECTS.len()] = interleaved(ROUNDS, |which| {
            let mut pass = subject(which, quota, &keys);
            pass();
            nanos(PASSES * keys.len(), || (0..PASSES).for_each(|_| _ = pass()))
        });
        let [bare, added @ ..] = &all;
        for (name, series) in SUBJECTS[1..].iter().zip(added) {
            println!("    {name:<36} {:6.0}", series.minus(bare).median());
        }
    }
}
