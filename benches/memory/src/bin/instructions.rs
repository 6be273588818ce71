//! Runs one row after the other, so that callgrind can count the instructions of each.
//! `instructions.sh` starts it, and divides the counts by the number of requests.
//!
//! For each row it prints a line: the number of the row whose instructions are to be subtracted, 0
//! for none, the number of requests, and the name. With arguments, it runs only the rows whose
//! names contain one of them.

use std::{convert::Infallible, env, hint::black_box, net::SocketAddr, sync::Arc, time::Duration};

use axum::body::Body;
use governor::clock::{DefaultClock, MonotonicClock};
use http::{HeaderValue, Request, Response};
use memory::{
    API_KEY, Bare, NEVER, ONE, QUICK, SLOW, check_all, check_all_now, check_all_twice,
    header_values, hold_all, layer, limiter,
    peers::{Check, Least, governor, governor_layer, governor_layer_with_headers, least_layer},
    ready, send_all, shuffled_keys,
};
use metrics_exporter_prometheus::PrometheusBuilder;
use tower_layer::Layer;
use tower_ratelimit::{
    Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key,
    observe::{self, Event, Observer},
};
use tower_service::Service;

/// The keys of a row of checks or holds.
const KEYS: usize = 10_000;
/// The keys of a row of a layer.
const LAYER_KEYS: usize = 1_000;
/// The requests of each key, after a first one.
const PASSES: usize = 4;

/// What callgrind counts. It finds the function by its name.
#[inline(never)]
fn counted_by_callgrind(work: &mut dyn FnMut()) {
    work();
    // Not a tail call, which would have another name.
    black_box(());
}

/// The rows, as they are printed.
struct Rows {
    /// Parts of the names of the rows that are wanted; none for all.
    wanted: Vec<String>,
    count: usize,
    /// The row of the bare service, once it was counted.
    bare: usize,
    keys: Vec<String>,
    values: Vec<HeaderValue>,
}

impl Rows {
    fn wants(&self, name: &str) -> bool {
        self.wanted.is_empty() || self.wanted.iter().any(|part| name.contains(&**part))
    }

    fn row(&mut self, name: &str, base: usize, requests: usize, mut work: impl FnMut()) {
        self.count += 1;
        println!("{base} {requests} {name}");
        counted_by_callgrind(&mut work);
    }

    /// Counts calls, after one for each key. `call` is given the keys, and returns the number of
    /// admitted ones.
    fn calls(&mut self, name: &str, admitted: bool, call: impl Fn(&[String]) -> usize) {
        if !self.wants(name) {
            return;
        }
        let keys = self.keys.clone();
        assert_eq!(call(&keys), KEYS, "{name}");
        self.row(name, 0, PASSES * KEYS, || {
            for _ in 0..PASSES {
                assert_eq!(call(&keys), if admitted { KEYS } else { 0 }, "{name}");
            }
        });
    }

    fn checks(&mut self, name: &str, limiter: &Limiter, admitted: bool) {
        self.calls(name, admitted, |keys| check_all(limiter, keys));
    }

    /// Counts checks of another limiter.
    fn peer_checks(&mut self, name: &str, peer: &impl Check, admitted: bool) {
        let check = |keys: &[String]| keys.iter().filter(|key| peer.check(black_box(key))).count();
        self.calls(name, admitted, check);
    }

    /// Counts requests, after one of each key.
    fn requests<S, B>(&mut self, name: &str, mut service: S, admitted: bool)
    where
        S: Service<Request<Body>, Response = Response<B>, Error = Infallible>,
    {
        if !self.wants(name) {
            return;
        }
        if self.bare == 0 {
            self.send("the bare service", &mut Bare, true);
            self.bare = self.count;
        }
        self.send(name, &mut service, admitted);
    }

    fn send<S, B>(&mut self, name: &str, service: &mut S, admitted: bool)
    where
        S: Service<Request<Body>, Response = Response<B>, Error = Infallible>,
    {
        let values = self.values.clone();
        send_all(service, &values);
        self.row(name, self.bare, PASSES * LAYER_KEYS, || {
            for _ in 0..PASSES {
                let count = send_all(service, &values);
                assert_eq!(count, if admitted { LAYER_KEYS } else { 0 }, "{name}");
            }
        });
    }
}

fn main() {
    let (keys, values) = (shuffled_keys(KEYS), header_values(&shuffled_keys(LAYER_KEYS)));
    let mut rows = Rows { wanted: env::args().skip(1).collect(), count: 0, bare: 0, keys, values };
    checks(&mut rows);
    holds(&mut rows);
    layers(&mut rows);
    peers(&mut rows);
}

fn checks(rows: &mut Rows) {
    let algorithms = [
        ("token bucket", Algorithm::token_bucket()),
        ("fixed window", Algorithm::fixed_window()),
        ("sliding window", Algorithm::sliding_window()),
        ("sliding window of 10 buckets", Algorithm::sliding_window().buckets(10)),
        ("sliding log", Algorithm::sliding_log()),
    ];
    for (name, algorithm) in algorithms {
        rows.checks(&format!("check, {name}, admitted"), &limiter(algorithm, NEVER), true);
        rows.checks(&format!("check, {name}, denied"), &limiter(algorithm, ONE), false);
    }
    // Each request has left the bucket before the next one with its key.
    let leaky = Algorithm::leaky_bucket();
    rows.checks("check, leaky bucket, admitted at once", &limiter(leaky, QUICK), true);
    rows.checks("check, leaky bucket, admitted with a delay", &limiter(leaky, NEVER), true);
    rows.checks("check, leaky bucket, denied", &limiter(leaky, ONE), false);

    let bucket = |quota| limiter(Algorithm::token_bucket(), quota);
    let (admits, denies) = (bucket(NEVER), bucket(ONE));
    rows.calls("now(), token bucket, admitted", true, |keys| check_all_now(&admits, keys));
    rows.calls("now(), token bucket, denied", false, |keys| check_all_now(&denies, keys));

    two_limits(rows, "check, two limits in one charge, admitted", NEVER, true);
    two_limits(rows, "check, two limits in one charge, denied", ONE, false);
    new_keys(rows);

    let changed = bucket(ONE);
    changed.set_quota(NEVER).expect("the quota is valid");
    rows.checks("check, after set_quota, admitted", &changed, true);
    let idle = observed(Arc::new(|_: &Event<'_>| ()));
    rows.checks("check, with an observer that does nothing, admitted", &idle, true);
    // The metrics are registered in this thread, which has the recorder.
    let recorder = PrometheusBuilder::new().build_recorder();
    let _guard = metrics::set_default_local_recorder(&recorder);
    let counted = observed(Arc::new(observe::metrics()));
    rows.checks("check, with `metrics`, admitted", &counted, true);
}

/// Counts checks of two token buckets, of which the second one has a given quota.
fn two_limits(rows: &mut Rows, name: &str, quota: Quota, admitted: bool) {
    let store = MemoryStore::new();
    let [first, second] = [("first", NEVER), ("second", quota)]
        .map(|(name, quota)| Limiter::new(name, store.clone(), Algorithm::token_bucket(), quota));
    rows.calls(name, admitted, |keys| check_all_twice([&first, &second], keys));
}

fn holds(rows: &mut Rows) {
    for (name, algorithm, quota) in [
        ("token bucket", Algorithm::token_bucket(), NEVER),
        ("fixed window", Algorithm::fixed_window(), NEVER),
        ("sliding window", Algorithm::sliding_window(), NEVER),
        ("sliding log", Algorithm::sliding_log(), NEVER),
        ("concurrency", Algorithm::concurrency(), Quota::concurrent(100)),
    ] {
        let limiter = limiter(algorithm, quota);
        rows.calls(&format!("hold and end, {name}"), true, |keys| hold_all(&limiter, keys));
    }
}

fn layers(rows: &mut Rows) {
    rows.requests("layer, allowed, headers (the default)", layer(SLOW).layer(Bare), true);
    rows.requests("layer, allowed, no headers", layer(SLOW).headers([]).layer(Bare), true);
    let proxy = key::PeerIp.peer_addr(|_| Some(SocketAddr::from(([10, 0, 0, 1], 80))));
    let by_address = RateLimitLayer::new(limiter(Algorithm::token_bucket(), SLOW), proxy);
    rows.requests("layer, by address, allowed", by_address.layer(Bare), true);
    // Each request takes a place, and returns it with its response.
    let concurrency = RateLimitLayer::concurrency(10, key::header(API_KEY));
    rows.requests("layer, concurrency, allowed", concurrency.clone().layer(Bare), true);
    let no_headers = concurrency.clone().headers([]).layer(Bare);
    rows.requests("layer, concurrency, allowed, no headers", no_headers, true);
    let waiting = concurrency.max_wait(Duration::from_secs(1));
    rows.requests("layer, concurrency, allowed, max_wait", waiting.layer(Bare), true);
    let extensions = layer(SLOW).extensions(true);
    rows.requests("layer, allowed, headers, extensions", extensions.clone().layer(Bare), true);
    rows.requests("layer, allowed, extensions", extensions.headers([]).layer(Bare), true);
    let waiting = layer(SLOW).max_wait(Duration::from_secs(1));
    rows.requests("layer, allowed, headers, max_wait", waiting.layer(Bare), true);
    let full = limiter(Algorithm::concurrency(), Quota::concurrent(1));
    let keys = shuffled_keys(LAYER_KEYS);
    let places = keys.iter().map(|key| full.hold(key::header(API_KEY).key(key), 1));
    let places: Vec<_> = places.map(|held| ready(held).expect("a decision")).collect();
    let denied = RateLimitLayer::new(&full, key::header(API_KEY)).layer(Bare);
    rows.requests("layer, concurrency, denied", denied, false);
    drop(places);
    rows.requests("layer, denied, headers (the default)", layer(ONE).layer(Bare), false);
    rows.requests("layer, denied, no headers", layer(ONE).headers([]).layer(Bare), false);
}

/// A limiter over a store with an observer.
fn observed(observer: Arc<dyn Observer>) -> Limiter {
    let store = MemoryStore::new();
    store.add_observer(observer);
    Limiter::new("default", store, Algorithm::token_bucket(), NEVER)
}

/// Counts checks of new keys in a full store, each of which takes the place of another key.
fn new_keys(rows: &mut Rows) {
    let name = "check, new key, full store";
    if !rows.wants(name) {
        return;
    }
    let (store, quota) = (MemoryStore::with_max_keys(KEYS), Quota::per_hour(10));
    let limiter = Limiter::new("default", store, Algorithm::token_bucket(), quota);
    let keys: Vec<_> = (0..(1 + PASSES) * KEYS).map(|i| format!("new-{i:06}")).collect();
    let (first, later) = keys.split_at(KEYS);
    assert_eq!(check_all(&limiter, first), KEYS);
    rows.row(name, 0, later.len(), || {
        assert_eq!(check_all(&limiter, later), later.len());
    });
}

/// Other rate limiters, and the least that is possible.
fn peers(rows: &mut Rows) {
    rows.peer_checks("governor, admitted", &governor(NEVER, DefaultClock::default()), true);
    rows.peer_checks("governor, system clock, admitted", &governor(NEVER, MonotonicClock), true);
    rows.peer_checks("governor, denied", &governor(ONE, DefaultClock::default()), false);
    rows.peer_checks("governor, system clock, denied", &governor(ONE, MonotonicClock), false);
    rows.peer_checks("the least possible, admitted", &Least::new(NEVER), true);
    rows.peer_checks("the least possible, denied", &Least::new(ONE), false);
    rows.requests("the least layer, allowed", least_layer(SLOW).layer(Bare), true);
    rows.requests("the least layer, denied", least_layer(ONE).layer(Bare), false);
    rows.requests("tower_governor, allowed", governor_layer(SLOW).layer(Bare), true);
    let headers = governor_layer_with_headers(SLOW).layer(Bare);
    rows.requests("tower_governor, allowed, headers", headers, true);
    rows.requests("tower_governor, denied", governor_layer(ONE).layer(Bare), false);
    let headers = governor_layer_with_headers(ONE).layer(Bare);
    rows.requests("tower_governor, denied, headers", headers, false);
}
