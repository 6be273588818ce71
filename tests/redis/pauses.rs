//! A process that does not run for longer than its deadlines, with a Redis that does: its requests
//! are decided late, and Redis is not blamed.

use std::{
    mem,
    sync::{Arc, Barrier},
    thread,
    time::Duration,
};

use redis::aio::ConnectionManager;
use tokio::{
    runtime::{Builder, Runtime},
    task::{JoinSet, yield_now},
};
use tower_ratelimit::{
    Admission, Algorithm, Charge, Error, Limiter, Quota, RedisStore, store::RedisConfig,
};

use crate::support::{
    self,
    cluster::Cluster,
    load::{eventually, until},
    server::RedisServer,
    with_sources,
};

const DEADLINE: Duration = Duration::from_millis(100);
const REQUESTS: usize = 64;

/// A runtime, and the number of its threads that a pause stops: all of them.
struct Process {
    runtime: Runtime,
    threads: usize,
}

impl Process {
    fn of_one_thread() -> Self {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        Self { runtime, threads: 1 }
    }

    fn of_two_threads() -> Self {
        let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        Self { runtime, threads: 2 }
    }

    /// Begins requests, and pauses after some turns of the runtime. Returns their errors.
    fn pause<T, F>(
        &self,
        requests: impl IntoIterator<Item = F>,
        turns: usize,
        pause: Duration,
    ) -> Vec<Error>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, Error>> + Send + 'static,
    {
        let (requests, threads): (Vec<_>, _) = (requests.into_iter().collect(), self.threads);
        let run = async move {
            let mut tasks = JoinSet::new();
            for request in requests {
                tasks.spawn(request);
            }
            for _ in 0..turns {
                yield_now().await;
            }
            let (barrier, mut blocked) = (Arc::new(Barrier::new(threads)), JoinSet::new());
            for _ in 0..threads {
                let barrier = barrier.clone();
                blocked.spawn(async move {
                    barrier.wait();
                    thread::sleep(pause); // blocks the runtime
                });
            }
            let results = tasks.join_all().await;
            blocked.join_all().await;
            results.into_iter().filter_map(Result::err).collect()
        };
        self.runtime.block_on(async { tokio::spawn(run).await.unwrap() })
    }
}

fn quick(config: RedisConfig) -> RedisConfig {
    config.deadline(DEADLINE).denial_ttl(Duration::ZERO)
}

fn connected(process: &Process, config: RedisConfig) -> RedisStore {
    process.runtime.block_on(async {
        let store = RedisStore::new(quick(config)).unwrap();
        until("Redis is used", async || store.ping().await.is_ok()).await;
        store
    })
}

fn limiter(store: &RedisStore, name: &'static str) -> Limiter {
    Limiter::new(name, store.clone(), Algorithm::FixedWindow, Quota::per_day(1_000_000))
}

/// Counts the failures of requests that a pause has delayed.
struct Failures {
    what: String,
    store: RedisStore,
    requests: usize,
    errors: Vec<String>,
}

impl Failures {
    fn new(what: &str, store: &RedisStore) -> Self {
        Self { what: what.to_owned(), store: store.clone(), requests: 0, errors: vec![] }
    }

    fn add(&mut self, requests: usize, errors: Vec<Error>) {
        self.requests += requests;
        self.errors.extend(errors.into_iter().map(|error| match error {
            Error::Store(error) => with_sources(&error),
            error => panic!("{}: {error}", self.what),
        }));
    }

    /// Redis has answered all that it was asked. A machine that is too busy fails some requests.
    fn assert_few_and_redis_is_not_blamed(self) {
        let Self { what, store, requests, mut errors } = self;
        let count = errors.len();
        errors.sort();
        errors.dedup();
        let health = store.health();
        assert!(2 * count <= requests, "{what}: {count} of {requests} fail: {errors:?}");
        let is_late = |text: &String| text.contains("too little of the deadline");
        assert!(errors.iter().all(is_late), "{what}: {errors:?}");
        let blamed = (health.is_available, health.outages, health.timeouts);
        assert_eq!(blamed, (true, 0, 0), "{what}: {health:?}");
    }
}

#[test]
fn checks_that_a_pause_delays_are_decided_late_and_redis_is_not_blamed() {
    let server = RedisServer::start();
    for process in [Process::of_one_thread(), Process::of_two_threads()] {
        let store = connected(&process, support::config(&server.url()));
        let limiter = limiter(&store, "default");
        for keys in [1, REQUESTS] {
            let mut failures = Failures::new(&format!("{keys} keys"), &store);
            // The checks are in the queue, are written, or wait for replies.
            for turns in [0, 1, 2, 3, 5, 8] {
                for pause in [95, 110, 300].map(Duration::from_millis) {
                    let check = |index: usize| {
                        let (limiter, key) = (limiter.clone(), (index % keys).to_string());
                        async move { limiter.check(key).await }
                    };
                    let errors = process.pause((0..REQUESTS).map(check), turns, pause);
                    failures.add(REQUESTS, errors);
                }
            }
            failures.assert_few_and_redis_is_not_blamed();
        }
    }
}

#[test]
fn requests_of_every_kind_that_a_pause_delays_are_decided_late() {
    let server = RedisServer::start();
    let cluster = Cluster::start(3, false, &[]);
    for process in [Process::of_one_thread(), Process::of_two_threads()] {
        let manager = process.runtime.block_on(async {
            let client = redis::Client::open(server.url()).unwrap();
            ConnectionManager::new(client).await.unwrap()
        });
        for (name, config) in [
            ("a server", support::config(&server.url())),
            ("several connections", support::config(&server.url()).connections(4)),
            ("a connection of the application", RedisConfig::from_connection(manager)),
            ("a cluster", RedisConfig::cluster(cluster.urls()).unwrap()),
        ] {
            let store = connected(&process, config);
            let [one, other] = ["one", "other"].map(|name| limiter(&store, name));
            let keys: Vec<_> = (0..8).map(|number| number.to_string()).collect();
            let mut failures = Failures::new(name, &store);
            for pause in [110, 200].map(Duration::from_millis) {
                let each = || keys.iter().cloned().map(|key| (one.clone(), other.clone(), key));
                let mut add = |errors| failures.add(keys.len(), errors);
                add(process.pause(
                    each().map(|(one, _, key)| async move { one.check(key).await }),
                    1,
                    pause,
                ));
                add(process.pause(
                    each().map(|(one, _, key)| async move {
                        let reserved = one.reserve(key, 1, Duration::ZERO).await;
                        reserved.map(Admission::keep)
                    }),
                    1,
                    pause,
                ));
                add(process.pause(
                    each().map(|(one, _, key)| async move {
                        one.hold(key, 1).await.map(|held| mem::forget(held.admitted()))
                    }),
                    1,
                    pause,
                ));
                add(process.pause(
                    each().map(|(one, other, key)| async move {
                        Charge::new(one, &*key).also(other).check().await
                    }),
                    1,
                    pause,
                ));
            }
            failures.assert_few_and_redis_is_not_blamed();
        }
    }
}

#[test]
fn a_pause_while_connections_are_made_again_is_no_outage() {
    let server = RedisServer::start();
    for process in [Process::of_one_thread(), Process::of_two_threads()] {
        let store = connected(&process, support::config(&server.url()));
        let limiter = limiter(&store, "default");
        for _ in 0..10 {
            let _ = process.runtime.block_on(eventually(async || limiter.check("key").await));
            let kill = ["KILL", "TYPE", "normal", "SKIPME", "yes"];
            redis::cmd("CLIENT").arg(&kill).exec(&mut server.connection()).unwrap();
            let check = |index: usize| {
                let limiter = limiter.clone();
                async move { limiter.check(index.to_string()).await }
            };
            let _ = process.pause((0..REQUESTS).map(check), 1, Duration::from_millis(150));
        }
        assert_eq!(store.health().outages, 0, "{:?}", store.health());
    }
}
