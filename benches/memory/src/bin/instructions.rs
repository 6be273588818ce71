//! Runs one subject after the other, so that callgrind can count the instructions of each.
//! `instructions.sh` starts it, and divides the counts by the number of requests.
//!
//! For each subject it prints a line: the number of the row whose instructions are to be
//! subtracted, 0 for none, and the name. With an argument, it runs only the row of that name: the
//! functions of a row are seen with `valgrind --tool=callgrind
//! --toggle-collect=instructions::counted_by_callgrind` and `callgrind_annotate`.

use std::{convert::Infallible, env, hint::black_box, net::SocketAddr, sync::Arc, time::Duration};

use axum::body::Body;
use http::{HeaderValue, Request, Response};
use memory::{
    API_KEY, Bare, ONE, SLOW, check_all, header_values, hold_all, layer, limiter, ready, send_all,
    shuffled_keys,
};
use tower_layer::Layer;
use tower_ratelimit::{
    Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key,
    observe::{Event, Observer},
};
use tower_service::Service;

const KEYS: usize = 1_000;
const PASSES: usize = 4;

/// The requests of each row, by which the script divides: it reads this line.
const REQUESTS: usize = 4_000;

/// What callgrind counts. It finds the function by its name.
#[inline(never)]
fn counted_by_callgrind(work: &mut dyn FnMut()) {
    work();
    // Not a tail call, which would have another name.
    black_box(());
}

/// The rows, as they are printed.
struct Rows {
    only: Option<String>,
    count: usize,
    /// The row of the bare service.
    bare: usize,
    keys: Vec<String>,
    values: Vec<HeaderValue>,
}

impl Rows {
    fn row(&mut self, name: &str, base: usize, mut work: impl FnMut()) {
        if self.only.as_ref().is_some_and(|only| only != name) {
            return;
        }
        self.count += 1;
        println!("{base} {name}");
        counted_by_callgrind(&mut work);
    }

    /// Counts checks, after one of each key.
    fn checks(&mut self, name: &str, limiter: &Limiter, admitted: bool) {
        let keys = self.keys.clone();
        assert_eq!(check_all(limiter, &keys), KEYS);
        self.row(name, 0, || {
            for _ in 0..PASSES {
                let count = check_all(limiter, &keys);
                assert_eq!(count, if admitted { KEYS } else { 0 }, "{name}");
            }
        });
    }

    /// Counts holds and their ends, after one of each key.
    fn holds(&mut self, name: &str, limiter: &Limiter) {
        let keys = self.keys.clone();
        assert_eq!(hold_all(limiter, &keys), KEYS);
        self.row(name, 0, || {
            for _ in 0..PASSES {
                assert_eq!(hold_all(limiter, &keys), KEYS, "{name}");
            }
        });
    }

    /// Counts requests, after one of each key.
    fn requests<S, B>(&mut self, name: &str, mut service: S, admitted: bool)
    where
        S: Service<Request<Body>, Response = Response<B>, Error = Infallible>,
    {
        let values = self.values.clone();
        send_all(&mut service, &values);
        self.row(name, self.bare, || {
            for _ in 0..PASSES {
                let count = send_all(&mut service, &values);
                assert_eq!(count, if admitted { KEYS } else { 0 }, "{name}");
            }
        });
    }
}

fn main() {
    assert_eq!(REQUESTS, KEYS * PASSES);
    let keys = shuffled_keys(KEYS);
    let mut rows =
        Rows { only: env::args().nth(1), count: 0, bare: 0, values: header_values(&keys), keys };
    let algorithms = [
        ("token bucket", Algorithm::token_bucket()),
        ("fixed window", Algorithm::fixed_window()),
        ("sliding window", Algorithm::sliding_window()),
        ("sliding window, 10 buckets", Algorithm::sliding_window().buckets(10)),
        ("sliding log", Algorithm::sliding_log()),
        ("leaky bucket", Algorithm::leaky_bucket()),
    ];
    for (name, algorithm) in algorithms {
        rows.checks(&format!("check, {name}, admitted"), &limiter(algorithm, SLOW), true);
        rows.checks(&format!("check, {name}, denied"), &limiter(algorithm, ONE), false);
    }

    let changed = limiter(Algorithm::token_bucket(), ONE);
    changed.set_quota(SLOW).expect("the quota is valid");
    rows.checks("check, after set_quota, admitted", &changed, true);

    let idle = observed(Arc::new(|_: &Event<'_>| ()));
    rows.checks("check, with an observer that does nothing, admitted", &idle, true);
    #[cfg(feature = "peers")]
    peers::metrics(&mut rows);

    new_keys(&mut rows);

    let places = limiter(Algorithm::concurrency(), Quota::concurrent(10));
    rows.holds("hold and end, concurrency", &places);
    rows.holds("hold and end, token bucket", &limiter(Algorithm::token_bucket(), SLOW));

    rows.requests("the bare service", Bare, true);
    rows.bare = rows.count;
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
    let places = rows.keys.iter().map(|key| full.hold(key::header(API_KEY).key(key), 1));
    let places: Vec<_> = places.map(|held| ready(held).expect("a decision")).collect();
    let denied = RateLimitLayer::new(&full, key::header(API_KEY)).layer(Bare);
    rows.requests("layer, concurrency, denied", denied, false);
    drop(places);
    rows.requests("layer, denied, headers (the default)", layer(ONE).layer(Bare), false);
    rows.requests("layer, denied, no headers", layer(ONE).headers([]).layer(Bare), false);
    #[cfg(feature = "peers")]
    peers::rows(&mut rows);
}

/// A limiter over a store with an observer.
fn observed(observer: Arc<dyn Observer>) -> Limiter {
    let store = MemoryStore::new();
    store.add_observer(observer);
    Limiter::new("default", store, Algorithm::token_bucket(), SLOW)
}

/// Counts checks of new keys in a full store, each of which takes the place of another key.
fn new_keys(rows: &mut Rows) {
    let (max_keys, quota) = (KEYS, Quota::per_hour(10));
    let store = MemoryStore::with_max_keys(max_keys);
    let limiter = Limiter::new("default", store, Algorithm::token_bucket(), quota);
    let keys: Vec<_> = (0..REQUESTS + KEYS).map(|i| format!("new-{i:06}")).collect();
    let (first, later) = keys.split_at(KEYS);
    assert_eq!(check_all(&limiter, first), KEYS);
    rows.row("check, new key, full store", 0, || {
        assert_eq!(check_all(&limiter, later), REQUESTS);
    });
}

#[cfg(feature = "peers")]
mod peers {
    use std::sync::Arc;

    use super::{Bare, KEYS, ONE, PASSES, Rows, SLOW, black_box, observed};
    use governor::clock::{DefaultClock, MonotonicClock};
    use memory::peers::{
        Check, Least, governor, governor_layer, governor_layer_with_headers, least_layer,
    };
    use metrics_exporter_prometheus::PrometheusBuilder;
    use tower_layer::Layer;
    use tower_ratelimit::observe;

    /// The metrics are registered in this thread, which has the recorder.
    pub(super) fn metrics(rows: &mut Rows) {
        let recorder = PrometheusBuilder::new().build_recorder();
        let _guard = metrics::set_default_local_recorder(&recorder);
        let counted = observed(Arc::new(observe::metrics()));
        rows.checks("check, with `metrics`, admitted", &counted, true);
    }

    pub(super) fn rows(rows: &mut Rows) {
        checks(rows, "governor, admitted", &governor(SLOW, DefaultClock::default()));
        checks(rows, "governor, system clock, admitted", &governor(SLOW, MonotonicClock));
        checks(rows, "governor, denied", &governor(ONE, DefaultClock::default()));
        checks(rows, "governor, system clock, denied", &governor(ONE, MonotonicClock));
        checks(rows, "the least possible, admitted", &Least::new(SLOW));
        checks(rows, "the least possible, denied", &Least::new(ONE));
        rows.requests("the least layer, allowed", least_layer(SLOW).layer(Bare), true);
        rows.requests("the least layer, denied", least_layer(ONE).layer(Bare), false);
        rows.requests("tower_governor, allowed", governor_layer(SLOW).layer(Bare), true);
        let headers = governor_layer_with_headers(SLOW).layer(Bare);
        rows.requests("tower_governor, allowed, headers", headers, true);
        rows.requests("tower_governor, denied", governor_layer(ONE).layer(Bare), false);
        let headers = governor_layer_with_headers(ONE).layer(Bare);
        rows.requests("tower_governor, denied, headers", headers, false);
    }

    fn checks(rows: &mut Rows, name: &str, subject: &impl Check) {
        let keys = rows.keys.clone();
        keys.iter().for_each(|key| assert!(subject.check(key)));
        rows.row(name, 0, || {
            for _ in 0..PASSES {
                let count = keys.iter().filter(|key| subject.check(black_box(key))).count();
                assert!(count == 0 || count == KEYS, "{name}");
            }
        });
    }
}
