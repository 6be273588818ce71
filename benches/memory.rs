//! Compares a check over the memory store with governor, and the overhead of the layer with
//! tower_governor: times and allocations.
//!
//! ```text
//! cargo bench --bench memory                     # all measurements
//! cargo bench --bench memory -- layers           # only those of the layer
//! cargo bench --bench memory -- send default 5   # only sends requests, 5 times with each key, to
//!                                                # count their instructions with callgrind
//! ```

#![allow(missing_docs, unreachable_pub)]

#[path = "support/interleaved.rs"]
mod interleaved;

use std::{
    convert::Infallible,
    env,
    future::{self, Ready},
    hint::black_box,
    num::NonZeroU32,
    pin::pin,
    sync::{Arc, Barrier},
    task::{Context, Poll, Waker},
    thread,
    time::{Duration, Instant},
};

use allocation_counter::{measure, opt_out};
use axum::body::Body;
use bytes::Bytes;
use governor::{
    RateLimiter,
    clock::{Clock, DefaultClock, MonotonicClock},
    middleware::NoOpMiddleware,
    state::keyed::DefaultKeyedStateStore,
};
use http::{HeaderName, HeaderValue, Request, Response, StatusCode};
use interleaved::interleaved;
use metrics_exporter_prometheus::PrometheusBuilder;
use tower::{Layer, Service, ServiceBuilder};
use tower_governor::{
    GovernorError, GovernorLayer, governor::GovernorConfigBuilder, key_extractor::KeyExtractor,
};
use tower_ratelimit::{
    Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer,
    http::Headers,
    key,
    observe::{Event, Metrics, Observer, TopDenied},
};

const KEYS: usize = 10_000;
const ROUNDS: usize = 11;
const CHECK_PASSES: usize = 20;
const REQUEST_PASSES: usize = 4;
const CHECK_GOAL: f64 = 1.0;
const LAYER_GOAL: f64 = 0.6;

/// Refills a bucket between two requests with its key.
const QUICK: Quota = Quota::per_second(1_000_000);
/// Admits all requests, and never refills a bucket meanwhile.
const SLOW: Quota = Quota::per_day(1_000_000);
/// Admits the first request of a key.
const ONE: Quota = Quota::per_hour(1);

const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

fn main() {
    // `cargo bench` adds `--bench`.
    let words: Vec<_> = env::args().skip(1).filter(|word| !word.starts_with("--")).collect();
    match &words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => {
            print_checks();
            print_observers();
            print_layers();
        }
        ["layers"] => print_layers(),
        ["send", subject, passes] => send(subject, passes.parse().expect("a number of passes")),
        _ => panic!("unknown arguments: {words:?}"),
    }
}

/// Sends requests to one subject: the instructions of `passes + 1` less those of `passes` are those
/// of 10,000 requests.
fn send(subject: &str, passes: usize) {
    fn run<S, B>(mut service: S, passes: usize)
    where
        S: Service<Request<Body>, Response = Response<B>, Error = Infallible>,
    {
        let keys: Vec<_> = shuffled_keys().into_iter().map(header_value).collect();
        let admitted: usize = (0..passes).map(|_| send_all(&mut service, &keys)).sum();
        assert_eq!(admitted, passes * keys.len());
    }

    let mut theirs = theirs(SLOW);
    match subject {
        "bare" => run(Bare, passes),
        "default" => run(ours(SLOW).layer(Bare), passes),
        "extensions" => run(ours(SLOW).extensions(true).layer(Bare), passes),
        "silent" => run(ours(SLOW).headers([]).layer(Bare), passes),
        "governor" => run(GovernorLayer::new(theirs.finish().unwrap()).layer(Bare), passes),
        "governor-headers" => {
            run(GovernorLayer::new(theirs.use_headers().finish().unwrap()).layer(Bare), passes)
        }
        _ => panic!("unknown subject: {subject}"),
    }
}

fn print_checks() {
    println!("Limiter::check against governor's check_key: {KEYS} String keys, token bucket");
    println!("ns per check, median of {ROUNDS} rounds; ratio, and its middle half");
    println!(
        "governor with its default clock, a processor's counter, and with the system's, as ours"
    );
    for threads in [1, 2] {
        for (label, quota) in [("full", QUICK), ("draining", SLOW), ("empty", ONE)] {
            print_check(label, quota, threads);
        }
    }
}

fn print_check(label: &str, quota: Quota, threads: usize) {
    let keys = shuffled_keys();
    let mut admitted = [0; 3];
    let [ours, theirs, same_clock] = interleaved(ROUNDS, |which| {
        let run = match which {
            0 => run_checks(&limiter(quota), &keys, threads),
            1 => run_checks(&governor(quota, DefaultClock::default()), &keys, threads),
            _ => run_checks(&governor(quota, MonotonicClock), &keys, threads),
        };
        admitted[which] += run.admitted;
        run.nanos
    });
    println!(
        "  {threads} thread(s), buckets {label:<8}  ours {:5.1}  governor {:5.1}  ratio {}  \
         system's clock {:5.1}  ratio {}  admitted of {}: {} / {} / {}",
        ours.median(),
        theirs.median(),
        ours.ratio_to(&theirs).against(CHECK_GOAL),
        same_clock.median(),
        ours.ratio_to(&same_clock).summary(),
        ROUNDS * CHECK_PASSES * KEYS * threads,
        admitted[0],
        admitted[1],
        admitted[2],
    );
}

/// Prints what observers add to a check.
fn print_observers() {
    println!();
    println!("Limiter::check with observers, in ns more than without: {KEYS} String keys");
    let recorder = PrometheusBuilder::new().build_recorder();
    let _guard = metrics::set_default_local_recorder(&recorder);
    let keys = shuffled_keys();
    for (label, quota) in [("full", QUICK), ("draining", SLOW), ("empty", ONE)] {
        let [none, idle, counted, denied] = interleaved(ROUNDS, |which| {
            let observer: Option<Arc<dyn Observer>> = match which {
                0 => None,
                1 => Some(Arc::new(|_: &Event<'_>| ())),
                2 => Some(Arc::new(Metrics::new())),
                _ => Some(Arc::new(TopDenied::new(1_000))),
            };
            let store = MemoryStore::new();
            observer.into_iter().for_each(|observer| store.add_observer(observer));
            let limiter = Limiter::new("default", store, Algorithm::token_bucket(), quota);
            // The metrics are registered in this thread, which has the recorder.
            let _ = ready(limiter.check("first"));
            run_checks(&limiter, &keys, 1).nanos
        });
        println!(
            "  buckets {label:<8}  none {:5.1}  idle observer {:+5.1}  Metrics {:+5.1} (goal 60)  \
             TopDenied {:+5.1}",
            none.median(),
            idle.minus(&none).median(),
            counted.minus(&none).median(),
            denied.minus(&none).median(),
        );
    }
}

fn limiter(quota: Quota) -> Limiter {
    Limiter::new("default", MemoryStore::new(), Algorithm::token_bucket(), quota)
}

type Governor<C> =
    RateLimiter<String, DefaultKeyedStateStore<String>, C, NoOpMiddleware<<C as Clock>::Instant>>;

fn governor<C: Clock>(quota: Quota, clock: C) -> Governor<C> {
    let burst = NonZeroU32::new(quota.burst_size() as u32).expect("a burst is not zero");
    let quota = governor::Quota::with_period(period(quota)).expect("a period is not zero");
    RateLimiter::dashmap_with_clock(quota.allow_burst(burst), clock)
}

/// The time in which a token is refilled.
fn period(quota: Quota) -> Duration {
    quota.window() / quota.limit() as u32
}

trait Check: Sync {
    // governor looks up a key by a reference to the type that it stores.
    #[allow(clippy::ptr_arg)]
    fn check(&self, key: &String) -> bool;
}

impl Check for Limiter {
    fn check(&self, key: &String) -> bool {
        ready(Limiter::check(self, key)).is_ok_and(|decision| decision.is_allowed())
    }
}

impl<C: Clock + Sync> Check for Governor<C> {
    fn check(&self, key: &String) -> bool {
        self.check_key(key).is_ok()
    }
}

struct Run {
    nanos: f64,
    admitted: usize,
}

/// Checks all keys several times in each thread, after a warm-up.
fn run_checks(subject: &impl Check, keys: &[String], threads: usize) -> Run {
    for key in keys {
        black_box(subject.check(key));
    }
    let barrier = &Barrier::new(threads);
    let parts: Vec<_> = thread::scope(|scope| {
        let run = move |thread| {
            let (tail, head) = keys.split_at(thread * keys.len() / threads);
            let checks = || head.iter().chain(tail).filter(|key| subject.check(black_box(key)));
            barrier.wait();
            let start = Instant::now();
            let admitted = (0..CHECK_PASSES).map(|_| checks().count()).sum();
            (start.elapsed(), admitted)
        };
        let handles: Vec<_> =
            (0..threads).map(|thread| scope.spawn(move || uncounted(|| run(thread)))).collect();
        handles.into_iter().map(|handle| handle.join().expect("a thread panicked")).collect()
    });
    let slowest = parts.iter().map(|&(elapsed, _)| elapsed).max().unwrap_or_default();
    let admitted = parts.iter().map(|&(_, admitted): &(Duration, usize)| admitted).sum();
    Run { nanos: nanos_per(slowest, CHECK_PASSES * keys.len()), admitted }
}

fn print_layers() {
    println!();
    println!(
        "Overhead of the layer around a service that is ready at once, against tower_governor"
    );
    println!("ns and allocations per request without those of the bare service");

    // As `RateLimitLayer::new` makes it: with headers.
    let default = |quota| move || ours(quota);
    let ours = |quota, headers: bool, extensions| {
        move || ours(quota).headers(headers.then_some(Headers::RateLimit)).extensions(extensions)
    };
    let plain = |quota| move || GovernorLayer::new(theirs(quota).finish().expect("a config"));
    let with_headers =
        |quota| move || GovernorLayer::new(theirs(quota).use_headers().finish().expect("a config"));
    let in_axum = move || {
        ServiceBuilder::new()
            .map_response(|response: Response<_>| response.map(Body::new))
            .layer(default(SLOW)())
    };

    print_layer("allow, both by default", None, default(SLOW), plain(SLOW));
    print_layer("allow, headers", Some(LAYER_GOAL), default(SLOW), with_headers(SLOW));
    print_layer("the same, axum's Body", None, in_axum, with_headers(SLOW));
    print_layer("allow, headers, extensions", None, ours(SLOW, true, true), with_headers(SLOW));
    print_layer("allow, extensions only", None, ours(SLOW, false, true), plain(SLOW));
    print_layer("allow, neither", Some(LAYER_GOAL), ours(SLOW, false, false), plain(SLOW));
    print_layer("allow, neither, full buckets", None, ours(QUICK, false, false), plain(QUICK));
    print_layer("deny, both by default", None, default(ONE), plain(ONE));
    print_layer("deny, headers", Some(LAYER_GOAL), default(ONE), with_headers(ONE));
    print_layer("deny, neither", Some(LAYER_GOAL), ours(ONE, false, false), plain(ONE));
}

fn print_layer<O, T, B>(
    label: &str,
    goal: Option<f64>,
    ours: impl Fn() -> O,
    theirs: impl Fn() -> T,
) where
    O: Layer<Bare, Service: Service<Request<Body>, Response = Response<B>, Error = Infallible>>,
    T: Layer<Bare, Service: Service<Request<Body>, Response = Response<Body>, Error = Infallible>>,
{
    let keys: Vec<_> = shuffled_keys().into_iter().map(header_value).collect();
    let mut admitted = [0; 3];
    let [ours_added, theirs_added] = {
        let [bare, ours, theirs] = interleaved(ROUNDS, |which| {
            let run = match which {
                0 => run_requests(Bare, &keys),
                1 => run_requests(ours().layer(Bare), &keys),
                _ => run_requests(theirs().layer(Bare), &keys),
            };
            admitted[which] += run.admitted;
            run.nanos
        });
        [ours.minus(&bare), theirs.minus(&bare)]
    };
    let bare = allocations(Bare, &keys);
    let ratio = ours_added.ratio_to(&theirs_added);
    println!(
        "  {label:<28} ours {:5.0}  tower_governor {:5.0}  ratio {:<32}  \
         allocations {:.2} / {:.2}  admitted of {}: {} / {}",
        ours_added.median(),
        theirs_added.median(),
        goal.map_or_else(|| ratio.summary(), |goal| ratio.against(goal)),
        allocations(ours().layer(Bare), &keys) - bare,
        allocations(theirs().layer(Bare), &keys) - bare,
        ROUNDS * REQUEST_PASSES * KEYS,
        admitted[1],
        admitted[2],
    );
}

#[derive(Clone)]
struct Bare;

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

#[derive(Clone)]
struct ApiKey;

impl KeyExtractor for ApiKey {
    type Key = String;

    fn extract<B>(&self, request: &Request<B>) -> Result<String, GovernorError> {
        let value = request.headers().get(API_KEY).and_then(|value| value.to_str().ok());
        value.map(str::to_owned).ok_or(GovernorError::UnableToExtractKey)
    }
}

fn ours(quota: Quota) -> RateLimitLayer {
    RateLimitLayer::new(limiter(quota), key::header(API_KEY))
}

fn theirs(quota: Quota) -> GovernorConfigBuilder<ApiKey, NoOpMiddleware> {
    GovernorConfigBuilder::default()
        .period(period(quota))
        .burst_size(quota.burst_size() as u32)
        .key_extractor(ApiKey)
}

/// Sends requests with all keys several times, after a warm-up.
fn run_requests<S, B>(mut service: S, keys: &[HeaderValue]) -> Run
where
    S: Service<Request<Body>, Response = Response<B>, Error = Infallible>,
{
    uncounted(|| {
        send_all(&mut service, keys);
        let start = Instant::now();
        let admitted = (0..REQUEST_PASSES).map(|_| send_all(&mut service, keys)).sum();
        Run { nanos: nanos_per(start.elapsed(), REQUEST_PASSES * keys.len()), admitted }
    })
}

/// Runs the work without counting allocations, which takes time.
fn uncounted<T>(work: impl FnOnce() -> T) -> T {
    let mut output = None;
    opt_out(|| output = Some(work()));
    output.expect("the work is done")
}

/// Counts the allocations per request; an allocation that grows counts again.
fn allocations<S, B>(mut service: S, keys: &[HeaderValue]) -> f64
where
    S: Service<Request<Body>, Response = Response<B>, Error = Infallible>,
{
    send_all(&mut service, keys);
    let counted = measure(|| {
        send_all(&mut service, keys);
    });
    counted.count_total as f64 / keys.len() as f64
}

/// Returns the number of admitted requests.
fn send_all<S, B>(service: &mut S, keys: &[HeaderValue]) -> usize
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

/// The output of a future that is ready at once: there is no runtime to wait in.
fn ready<F: Future>(future: F) -> F::Output {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("the future is not ready at once"),
    }
}

fn nanos_per(elapsed: Duration, count: usize) -> f64 {
    elapsed.as_nanos() as f64 / count as f64
}

fn header_value(key: String) -> HeaderValue {
    HeaderValue::from_maybe_shared(Bytes::from(key)).expect("printable ASCII")
}

/// All keys, in the same random order every time.
fn shuffled_keys() -> Vec<String> {
    let mut keys: Vec<_> = (0..KEYS).map(|i| format!("user-{i:06}")).collect();
    let mut random = 1_u64;
    for i in (1..keys.len()).rev() {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        keys.swap(i, (random >> 33) as usize % (i + 1));
    }
    keys
}
