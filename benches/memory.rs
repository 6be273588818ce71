//! What a check over the memory store costs, against governor, and what the layer adds to a request,
//! against tower_governor: times and allocations.

#![allow(missing_docs, unreachable_pub)]

#[path = "support/rounds.rs"]
mod rounds;

use std::{
    convert::Infallible,
    future::{self, Ready},
    hint::black_box,
    num::NonZeroU32,
    pin::pin,
    sync::Barrier,
    task::{Context, Poll, Waker},
    thread,
    time::{Duration, Instant},
};

use allocation_counter::{measure, opt_out};
use axum::body::Body;
use bytes::Bytes;
use governor::{DefaultKeyedRateLimiter, RateLimiter, middleware::NoOpMiddleware};
use http::{HeaderName, HeaderValue, Request, Response, StatusCode};
use rounds::take_turns;
use tower::{Layer, Service, ServiceBuilder};
use tower_governor::{
    GovernorError, GovernorLayer,
    governor::{GovernorConfig, GovernorConfigBuilder},
    key_extractor::KeyExtractor,
};
use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key};

const KEYS: usize = 10_000;
const ROUNDS: usize = 15;
const CHECK_PASSES: usize = 20;
const REQUEST_PASSES: usize = 5;
const CHECK_GOAL: f64 = 1.0;
const LAYER_GOAL: f64 = 0.6;

const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

fn main() {
    // What the counting of allocations costs would be part of the times.
    opt_out(print_checks);
    print_layers();
}

fn print_checks() {
    println!("Limiter::check against governor's check_key: {KEYS} String keys, token bucket");
    println!("ns per check, median of {ROUNDS} rounds; ratio ours/theirs, median and middle half");
    for threads in [1, 2] {
        for rate in [1_000_000, 2] {
            print_check(threads, rate);
        }
    }
}

fn print_check(threads: usize, per_second: u32) {
    let keys = shuffled_keys();
    let mut admitted = [0; 2];
    let [ours, theirs] = take_turns(ROUNDS, |which| {
        let run = match which {
            0 => run_checks(&Ours::new(per_second), &keys, threads),
            _ => run_checks(&Theirs::new(per_second), &keys, threads),
        };
        admitted[which] += run.admitted;
        run.nanos
    });
    println!(
        "  {threads} thread(s), {per_second:>7}/s   ours {:5.1}  governor {:5.1}  ratio {}  \
         admitted of {}: {} / {}",
        ours.median(),
        theirs.median(),
        ours.ratio_to(&theirs).against(CHECK_GOAL),
        ROUNDS * CHECK_PASSES * KEYS * threads,
        admitted[0],
        admitted[1],
    );
}

trait Check: Sync {
    fn check(&self, key: &String) -> bool;
}

struct Ours(Limiter);

impl Ours {
    fn new(per_second: u32) -> Self {
        Self(limiter(Quota::per_second(per_second)))
    }
}

impl Check for Ours {
    fn check(&self, key: &String) -> bool {
        ready(self.0.check(key)).is_ok_and(|decision| decision.is_allowed())
    }
}

struct Theirs(DefaultKeyedRateLimiter<String>);

impl Theirs {
    fn new(per_second: u32) -> Self {
        let per_second = NonZeroU32::new(per_second).expect("a quota is not zero");
        Self(RateLimiter::keyed(governor::Quota::per_second(per_second)))
    }
}

impl Check for Theirs {
    fn check(&self, key: &String) -> bool {
        self.0.check_key(key).is_ok()
    }
}

struct Run {
    nanos: f64,
    admitted: usize,
}

/// Checks all keys several times in each thread, after a first time that is not counted.
fn run_checks(subject: &impl Check, keys: &[String], threads: usize) -> Run {
    for key in keys {
        black_box(subject.check(key));
    }
    let barrier = &Barrier::new(threads);
    let parts: Vec<_> = thread::scope(|scope| {
        let run = |thread| {
            let (tail, head) = keys.split_at(thread * keys.len() / threads);
            let checks = || head.iter().chain(tail).filter(|key| subject.check(black_box(key)));
            barrier.wait();
            let start = Instant::now();
            let admitted = (0..CHECK_PASSES).map(|_| checks().count()).sum();
            (start.elapsed(), admitted)
        };
        let handles: Vec<_> =
            (0..threads).map(|thread| scope.spawn(move || opt_out_of(|| run(thread)))).collect();
        handles.into_iter().map(|handle| handle.join().expect("a thread panicked")).collect()
    });
    let slowest = parts.iter().map(|&(elapsed, _)| elapsed).max().unwrap_or_default();
    let admitted = parts.iter().map(|&(_, admitted): &(Duration, usize)| admitted).sum();
    Run { nanos: nanos_per(slowest, CHECK_PASSES * keys.len()), admitted }
}

fn print_layers() {
    println!();
    println!("What the layer adds to a service that answers at once, against tower_governor");
    println!("ns and allocations per request without those of the bare service");
    let plenty = Quota::per_second(1_000_000);
    let none = Quota::per_hour(1);

    let ours = |quota, fields, extensions| {
        move || ours(quota).header_fields(fields).extensions(extensions)
    };
    let plain = |quota| move || GovernorLayer::new(builder(quota).finish().expect("a config"));
    let fields = |quota| {
        move || GovernorLayer::new(builder(quota).use_headers().finish().expect("a config"))
    };
    let in_axum = move || {
        ServiceBuilder::new()
            .map_response(|response: Response<_>| response.map(Body::new))
            .layer(ours(plenty, true, true)())
    };

    print_layer("allow", Some(LAYER_GOAL), ours(plenty, false, false), plain(plenty));
    print_layer("allow, extensions", None, ours(plenty, false, true), plain(plenty));
    print_layer("allow, fields", Some(LAYER_GOAL), ours(plenty, true, false), fields(plenty));
    print_layer("allow, fields, extensions", None, ours(plenty, true, true), fields(plenty));
    print_layer("the same, axum's Body", None, in_axum, fields(plenty));
    print_layer("deny", Some(LAYER_GOAL), ours(none, false, false), plain(none));
    print_layer("deny, fields", Some(LAYER_GOAL), ours(none, true, false), fields(none));
    print_layer("deny, fields, extensions", None, ours(none, true, true), fields(none));
}
