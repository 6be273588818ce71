//! Compares waiting for a reservation with checking in a loop: round trips to Redis, the order and
//! the spread of the departures, and the memory of waiting requests.
//!
//! A waiter arrives when the server runs its script. For `try_acquire`, the slow log of the server
//! contains the order: each waiter has a different timeout, which the log shows. In the loop,
//! waiters have no timeout, and the order is that of their first replies. A waiter departs when its
//! call returns.

#![allow(missing_docs, unreachable_pub)]

#[allow(dead_code)]
#[path = "../tests/support/server.rs"]
mod server;

use std::{
    convert::Infallible,
    future::poll_fn,
    mem,
    pin::Pin,
    task::Poll,
    time::{Duration, Instant},
};

use allocation_counter::measure;
use axum::body::Body;
use http::{Request, Response, request::Parts};
use redis::{FromRedisValue, InfoDict};
use server::RedisServer;
use tokio::{
    runtime::{Builder, Runtime},
    task::JoinSet,
    time::{sleep, timeout},
};
use tower::{Layer, Service, service_fn};
use tower_ratelimit::{
    Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, RedisStore, store::Store,
};

const WAITERS: usize = 1_000;
const REPLICAS: usize = 4;
const ROUNDS: usize = 5;
const RATE: Quota = Quota::per_second(1_000);
/// The time between two departures.
const PACE: Duration = Duration::from_millis(1);

/// The shortest timeout: longer than any wait.
const TIMEOUT: Duration = Duration::from_secs(60);
/// The index of the items among the words of an EVALSHA.
const ITEMS: usize = 6;
/// The longest time of the loop in a round.
const LOOP_TIMEOUT: Duration = Duration::from_secs(6);

/// A quota with which no reservation comes due while the memory is counted.
const SLOW: Quota = Quota::per_hour(1);
/// All waiters can reserve within this time.
const LONG_WAIT: Duration = Duration::from_secs(3_600 * 2 * WAITERS as u64);
/// All waiters have a reservation after this time.
const SETTLED: Duration = Duration::from_secs(1);

const ALGORITHMS: [Algorithm; 6] = [
    Algorithm::FixedWindow,
    Algorithm::SlidingLog,
    Algorithm::sliding_window(),
    Algorithm::sliding_window().buckets(60),
    Algorithm::token_bucket(),
    Algorithm::LeakyBucket,
];

fn main() {
    print_hand_over();
    let bench = Bench::new();
    bench.print_departures();
    bench.print_memory();
    bench.print_memory_in_redis();
}

/// Prints how long it takes to hand a place over to the next of many requests that wait in memory.
fn print_hand_over() {
    const REQUESTS: u32 = 10_000;
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    let each = runtime.block_on(async {
        let quota = Quota::concurrent(1);
        let places = Limiter::new("places", MemoryStore::new(), Algorithm::concurrency(), quota);
        let mut shortest = Duration::MAX;
        for _ in 0..ROUNDS {
            let permit = places.hold("key", 1).await.unwrap().admitted().unwrap();
            let mut waiting = JoinSet::new();
            for _ in 0..REQUESTS {
                let places = places.clone();
                waiting.spawn(async move {
                    let wait = Duration::from_secs(60);
                    drop(places.hold("key", 1).max_wait(wait).await.unwrap().admitted().unwrap());
                });
            }
            sleep(Duration::from_millis(200)).await; // all of them wait
            let start = Instant::now();
            drop(permit);
            waiting.join_all().await;
            shortest = shortest.min(start.elapsed());
        }
        shortest / REQUESTS
    });
    println!("one place, handed over to {REQUESTS} requests in memory: {each:?} each");
}

struct Bench {
    server: RedisServer,
    runtime: Runtime,
    stores: Vec<RedisStore>,
}

impl Bench {
    fn new() -> Self {
        let server = RedisServer::start();
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
        let url = format!("{}?deadline=30s", server.url());
        let connect = || runtime.block_on(RedisStore::connect(&url)).expect("the server runs");
        let stores = (0..REPLICAS).map(|_| connect()).collect();
        Self { server, runtime, stores }
    }

    fn print_departures(&self) {
        println!("{WAITERS} waiters on one key at {RATE}, all at once over {REPLICAS} connections");
        println!("sums over {ROUNDS} rounds, the total is the median");
        println!(
            "off: the k-th departure, against k ms after the first; tokio's timer ticks in ms"
        );
        println!(
            "overtaken: waiters that departed after a later one, and the longest time after it"
        );
        println!(
            "  {:<26} {:>12} {:>8} {:>9} {:>20} {:>10} {:>8} {:>9}",
            "", "round trips", "admitted", "total, s", "off, ms", "overtaken", "by > 1", "longest,",
        );
        println!(
            "  {:<26} {:>12} {:>8} {:>9} {:>6} {:>6} {:>6} {:>10} {:>8} {:>9}",
            "", "per admitted", "", "(ideal 1)", "median", "p99", "max", "", "ms", "ms",
        );
        let mut runs = [const { Vec::new() }; 3];
        for _ in 0..ROUNDS {
            let (token_bucket, full) = (Algorithm::token_bucket(), WAITERS as u32);
            runs[0].push(self.run_ours(token_bucket, RATE.burst(1)));
            runs[1].push(self.run_ours(Algorithm::LeakyBucket, RATE.burst(full.into())));
            runs[2].push(self.run_loop(token_bucket, RATE.burst(1)));
        }
        print_runs("try_acquire, token bucket", &runs[0]);
        print_runs("try_acquire, leaky bucket", &runs[1]);
        print_runs("check, sleep, check again", &runs[2]);
    }

    /// Each waiter makes a reservation, and waits for it.
    fn run_ours(&self, algorithm: Algorithm, quota: Quota) -> Run {
        let wait = async |limiter: Limiter, waiter, _| {
            let timeout = TIMEOUT + Duration::from_micros(waiter);
            let decision = limiter.try_acquire("key", 1, timeout).await;
            let departed = Instant::now();
            assert!(decision.expect("the server answers").is_allowed());
            Waiter { arrived: waiter, departed: Some(departed) }
        };
        self.query::<()>("CONFIG SET slowlog-max-len 1000000");
        self.query::<()>("CONFIG SET slowlog-log-slower-than 0");
        let mut run = self.run(algorithm, quota, wait);
        self.query::<()>("CONFIG SET slowlog-log-slower-than -1");
        let order = self.order_of_arrival();
        for waiter in &mut run.waiters {
            waiter.arrived = order[waiter.arrived as usize];
        }
        run.in_order()
    }

    /// Each waiter checks, sleeps until the `retry_after`, and checks again.
    fn run_loop(&self, algorithm: Algorithm, quota: Quota) -> Run {
        let wait = async |limiter: Limiter, _, start: Instant| {
            let mut first = None;
            loop {
                let decision = limiter.check("key").await.expect("the server answers");
                let now = Instant::now();
                let arrived = (*first.get_or_insert(now) - start).as_nanos() as u64;
                match decision.retry_after() {
                    None => return Waiter { arrived, departed: Some(now) },
                    Some(_) if now - start > LOOP_TIMEOUT => {
                        return Waiter { arrived, departed: None };
                    }
                    Some(retry_after) => sleep(retry_after).await,
                }
            }
        };
        self.run(algorithm, quota, wait).in_order()
    }

    fn run<F>(
        &self,
        algorithm: Algorithm,
        quota: Quota,
        wait: impl Fn(Limiter, u64, Instant) -> F,
    ) -> Run
    where
        F: Future<Output = Waiter> + Send + 'static,
    {
        let limiters: Vec<Limiter> = (self.stores.iter())
            .map(|store| Limiter::new("default", store.clone(), algorithm, quota))
            .collect();
        self.query::<()>("FLUSHALL");
        // Loads the script into the server.
        let _ = self.runtime.block_on(limiters[0].peek("key")).expect("the server answers");
        self.query::<()>("CONFIG RESETSTAT");
        self.query::<()>("SLOWLOG RESET");
        let start = Instant::now();
        let waiters = self.runtime.block_on(async {
            let tasks: JoinSet<Waiter> = (0..WAITERS)
                .map(|waiter| wait(limiters[waiter % REPLICAS].clone(), waiter as u64, start))
                .collect();
            tasks.join_all().await
        });
        Run { start, waiters, trips: self.trips() }
    }

    /// The position of each waiter in the order in which the server ran the scripts.
    fn order_of_arrival(&self) -> Vec<u64> {
        type Entry = (u64, u64, u64, Vec<Vec<u8>>, Vec<u8>, Vec<u8>);
        let log: Vec<Entry> = self.query("SLOWLOG GET -1");
        let commands = log.iter().rev().filter(|entry| entry.3[0] == b"EVALSHA");
        let mut order = vec![0; WAITERS];
        for (position, command) in commands.enumerate() {
            // The items are the cost and the longest wait, as doubles.
            let max_wait = f64::from_le_bytes(command.3[ITEMS][8..16].try_into().expect("8 bytes"));
            order[max_wait as usize - TIMEOUT.as_micros() as usize] = position as u64;
        }
        order
    }

    /// The number of scripts that the server ran.
    fn trips(&self) -> u64 {
        let stats: InfoDict = self.query("INFO commandstats");
        let calls = |command| {
            let stat: String = stats.get(&format!("cmdstat_{command}")).unwrap_or_default();
            let calls = stat.split(',').find_map(|part| part.strip_prefix("calls="));
            calls.map_or(0, |calls| calls.parse().expect("a number"))
        };
        calls("evalsha") + calls("eval")
    }

    fn print_memory(&self) {
        println!();
        println!(
            "Bytes per waiter in the process: allocated and not freed by {WAITERS} on one key"
        );
        println!("waiting: with a reservation, which the memory store holds in the process, too");
        println!("at most: while all of them call; future: the part of both that is the future");
        println!("layer: around a service that does nothing, requests without headers and body");
        println!("  {:<26} {:>8} {:>8} {:>8}", "", "waiting", "at most", "future");
        let redis = || self.stores[0].clone();
        self.print_acquire("try_acquire, memory", MemoryStore::new());
        self.print_acquire("try_acquire, Redis", redis());
        self.print_layer("layer, memory", MemoryStore::new());
        self.print_layer("layer, Redis", redis());
        println!(
            "  {:<26} {:>8} {:>8} {:>8}",
            "the request alone",
            "",
            "",
            size_of::<Request<Body>>()
        );
    }

    fn print_acquire(&self, label: &str, store: impl Store) {
        let limiter = self.used_up(label, store);
        self.print_waiting(label, || limiter.try_acquire("key", 1, LONG_WAIT));
    }

    fn print_layer(&self, label: &str, store: impl Store) {
        let layer = RateLimitLayer::new(self.used_up(label, store), |_: &Parts| "key")
            .max_wait(LONG_WAIT)
            .max_waiting_per_key(WAITERS);
        let service = layer.layer(service_fn(async |_: Request<Body>| {
            Ok::<_, Infallible>(Response::new(Body::empty()))
        }));
        self.print_waiting(label, || service.clone().call(Request::new(Body::empty())));
    }

    /// A limiter whose quota is used up.
    fn used_up(&self, label: &str, store: impl Store) -> Limiter {
        self.query::<()>("FLUSHALL");
        let limiter =
            Limiter::new(&label.replace([' ', ','], "-"), store, Algorithm::token_bucket(), SLOW);
        let first = self.runtime.block_on(limiter.check("key")).expect("the store answers");
        assert!(first.is_allowed());
        limiter
    }

    fn print_waiting<F: Future>(&self, label: &str, wait: impl Fn() -> F) {
        let mut waiters = Vec::with_capacity(WAITERS);
        let counted = measure(|| {
            self.runtime.block_on(async {
                waiters.extend((0..WAITERS).map(|_| Box::pin(wait())));
                let all_wait = poll_fn(|cx| {
                    let waits = |future: &mut Pin<Box<F>>| future.as_mut().poll(cx).is_pending();
                    assert!(waiters.iter_mut().all(waits));
                    Poll::<()>::Pending
                });
                let _ = timeout(SETTLED, all_wait).await;
            });
        });
        let per_waiter = |bytes| bytes as f64 / WAITERS as f64;
        println!(
            "  {label:<26} {:>8.0} {:>8.0} {:>8}",
            per_waiter(counted.bytes_current as u64),
            per_waiter(counted.bytes_max),
            size_of::<F>(),
        );
        mem::forget(waiters); // dropping them would release all reservations
    }

    fn print_memory_in_redis(&self) {
        println!();
        println!("Bytes in Redis per reservation (MEMORY USAGE of all keys), {WAITERS} of them");
        for algorithm in ALGORITHMS {
            let quota = match algorithm {
                Algorithm::LeakyBucket => SLOW.burst(WAITERS as u64 + 1),
                _ => SLOW,
            };
            self.query::<()>("FLUSHALL");
            let limiter = Limiter::new("default", self.stores[0].clone(), algorithm, quota);
            let reserve = |count| {
                self.runtime.block_on(async {
                    for _ in 0..count {
                        let decision = limiter.reserve("key", 1, LONG_WAIT).await;
                        assert!(decision.expect("the server answers").keep().is_allowed());
                    }
                })
            };
            reserve(1);
            let before = self.memory_usage();
            reserve(WAITERS);
            let bytes = (self.memory_usage() - before) as f64 / WAITERS as f64;
            println!("  {:<26} {bytes:>8.1}", name(algorithm));
        }
    }

    fn memory_usage(&self) -> u64 {
        let keys: Vec<String> = self.query("KEYS *");
        keys.iter().map(|key| self.query::<u64>(&format!("MEMORY USAGE {key} SAMPLES 0"))).sum()
    }

    fn query<T: FromRedisValue>(&self, words: &str) -> T {
        let mut words = words.split(' ');
        let mut cmd = redis::cmd(words.next().unwrap_or_default());
        words.for_each(|word| {
            cmd.arg(word);
        });
        cmd.query(&mut self.server.connection()).expect("the server answers")
    }
}

struct Waiter {
    /// Its position among the others.
    arrived: u64,
    /// `None` if it was not admitted in time.
    departed: Option<Instant>,
}

struct Run {
    start: Instant,
    waiters: Vec<Waiter>,
    trips: u64,
}

impl Run {
    fn in_order(mut self) -> Self {
        self.waiters.sort_by_key(|waiter| waiter.arrived);
        self
    }

    fn departures(&self) -> Vec<Instant> {
        let departures = self.waiters.iter().filter_map(|waiter| waiter.departed);
        let mut departures: Vec<_> = departures.collect();
        departures.sort();
        departures
    }

    fn seconds(&self) -> f64 {
        self.departures().last().map_or(0.0, |&last| (last - self.start).as_secs_f64())
    }

    /// The difference of each departure from its ideal instant, in ms.
    fn off(&self) -> Vec<f64> {
        let departures = self.departures();
        let ideal = (0..).map(|k| departures[0] + PACE * k);
        departures
            .iter()
            .zip(ideal)
            .map(|(&departure, ideal)| millis(departure.max(ideal) - departure.min(ideal)))
            .collect()
    }

    /// The times, in ms, by which waiters departed after the first one that had arrived later.
    fn overtaken(&self) -> Vec<f64> {
        let (mut first, mut overtaken) = (None, Vec::new());
        for waiter in self.waiters.iter().rev() {
            let departed = waiter.departed.unwrap_or(self.start + LOOP_TIMEOUT);
            let first = first.get_or_insert(departed);
            if departed > *first {
                overtaken.push(millis(departed - *first));
            }
            *first = departed.min(*first);
        }
        overtaken
    }
}

fn print_runs(label: &str, runs: &[Run]) {
    let sorted = |of: &dyn Fn(&Run) -> Vec<f64>| {
        let mut all: Vec<f64> = runs.iter().flat_map(of).collect();
        all.sort_by(f64::total_cmp);
        all
    };
    let off = sorted(&Run::off);
    let overtaken = sorted(&Run::overtaken);
    let total = sorted(&|run| vec![run.seconds()]);
    let trips = runs.iter().map(|run| run.trips).sum::<u64>() as f64 / off.len() as f64;
    println!(
        "  {label:<26} {trips:>12.2} {:>8} {:>9.3} {:>6.2} {:>6.2} {:>6.2} {:>10} {:>8} {:>9.2}",
        off.len(),
        total[total.len() / 2],
        off[off.len() / 2],
        off[off.len() * 99 / 100],
        off[off.len() - 1],
        overtaken.len(),
        overtaken.iter().filter(|&&time| time > 1.0).count(),
        overtaken.last().unwrap_or(&0.0),
    );
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn name(algorithm: Algorithm) -> String {
    match algorithm {
        Algorithm::SlidingWindow { buckets, .. } => format!("{algorithm}/{buckets}"),
        other => other.to_string(),
    }
}
