//! Releases of requests that wait and are dropped, while other requests are decided.

use std::{
    collections::HashSet,
    mem,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

use axum::{Router, routing::get};
use http::{Request, StatusCode, request::Parts};
use tokio::{
    net::{TcpListener, TcpStream},
    runtime::Runtime,
    task::{JoinHandle, JoinSet, block_in_place},
    time::{sleep, timeout},
};
use tower::{Layer, ServiceExt};
use tower_ratelimit::{
    Algorithm, Charge, FailurePolicy, Limiter, Quota, RateLimitLayer, RedisStore, key,
    redisson::{RateLimiter, RateLimiterConfig},
    store::{KeyState, RedisConfig},
};

use crate::support::{
    self,
    cluster::Cluster,
    counting,
    load::{eventually, many_servers, until},
    proxy::Proxy,
    recorder::Recorder,
    server::RedisServer,
};

const ALGORITHMS: [Algorithm; 5] = [
    Algorithm::FixedWindow,
    Algorithm::SlidingLog,
    Algorithm::sliding_window().buckets(60),
    Algorithm::token_bucket(),
    Algorithm::LeakyBucket,
];
const MAX_WAIT: Duration = Duration::from_secs(10 * 3_600);
/// A deadline that a busy machine can keep.
const LONG: Duration = Duration::from_secs(60);

async fn connect(url: &str, deadline: Duration) -> RedisStore {
    support::connected(support::config(url).deadline(deadline)).await
}

/// Ten per hour: no waiting request proceeds while a test runs.
fn limiter(store: &RedisStore, algorithm: Algorithm) -> Limiter {
    let quota = Quota::per_hour(10);
    let quota = if algorithm == Algorithm::LeakyBucket { quota.burst(100) } else { quota };
    Limiter::new("waiting", store.clone(), algorithm, quota)
}

/// Waiting requests of several keys.
struct Waiting {
    limiter: Limiter,
    /// The keys with their decisions before.
    before: Vec<(String, KeyState)>,
    tasks: JoinSet<()>,
}

impl Waiting {
    /// Starts `of_each` requests for each key, whose quotas are used up.
    async fn start(limiter: Limiter, keys: &[String], of_each: usize) -> Self {
        let mut before = vec![];
        for key in keys {
            while limiter.try_acquire(key, 1, Duration::ZERO).await.unwrap().is_allowed() {}
            before.push((key.clone(), limiter.peek(key).await.unwrap()));
        }
        let mut waiting = Self { limiter, before, tasks: JoinSet::new() };
        let layer = waiting.layer();
        for key in keys {
            for _ in 0..of_each {
                let service = layer.layer(counting(&Arc::default()));
                let request = Request::get(format!("/{key}")).body(Default::default()).unwrap();
                waiting.tasks.spawn(async move {
                    let response = service.oneshot(request).await.unwrap();
                    panic!("{}", response.status());
                });
            }
        }
        waiting.until_reserved(of_each).await;
        waiting
    }

    async fn until_reserved(&self, of_each: usize) {
        // Allows for the time of the test.
        let longer = Duration::from_secs(360) * of_each as u32;
        for (key, before) in &self.before {
            let wanted = (before.reset_after() + longer).saturating_sub(Duration::from_secs(60));
            let is_so = async || self.peek(key).await.reset_after() >= wanted;
            until("all requests have a reservation", is_so).await;
        }
    }

    /// A layer in which requests wait, by path.
    fn layer(&self) -> RateLimitLayer {
        let key = |request: &Parts| request.uri.path().trim_start_matches('/').to_owned();
        RateLimitLayer::new(self.limiter.clone(), key).max_wait(MAX_WAIT)
    }

    async fn peek(&self, key: &str) -> KeyState {
        eventually(async || self.limiter.peek(key).await).await
    }

    async fn is_released(&self, (key, before): &(String, KeyState)) -> bool {
        let now = self.peek(key).await;
        assert!(now.remaining() <= before.remaining(), "{key}: more was released than reserved");
        now.remaining() == before.remaining() && now.reset_after() <= before.reset_after()
    }

    /// Waits until the keys are as before.
    async fn until_released(&self) {
        for key in &self.before {
            until("all reservations are released", async || self.is_released(key).await).await;
        }
    }
}

/// Requests of other keys, one after the other, which must be allowed.
struct Others {
    is_over: Arc<AtomicBool>,
    task: JoinHandle<()>,
}

impl Others {
    fn start(store: &RedisStore) -> Self {
        let limiter =
            Limiter::new("others", store.clone(), Algorithm::token_bucket(), Quota::per_hour(1));
        let is_over = Arc::new(AtomicBool::new(false));
        let task_is_over = is_over.clone();
        let task = tokio::spawn(async move {
            let mut count = 0_u64;
            while !task_is_over.load(SeqCst) {
                let layer = RateLimitLayer::new(limiter.clone(), key::header("x-user"))
                    .on_failure(FailurePolicy::Closed);
                count += 1;
                let request = support::get(&[("x-user", &count.to_string())]);
                let response = layer.layer(counting(&Arc::default())).oneshot(request).await;
                assert_eq!(response.unwrap().status(), StatusCode::OK, "request {count}");
                sleep(Duration::from_millis(1)).await;
            }
        });
        Self { is_over, task }
    }

    async fn finish(self) {
        self.is_over.store(true, SeqCst);
        self.task.await.expect("each request is allowed");
    }
}

/// The commands that the server executes from now on, in order.
struct Log<'a>(&'a RedisServer);

impl<'a> Log<'a> {
    fn start(server: &'a RedisServer) -> Self {
        block_in_place(|| {
            let mut connection = server.connection();
            for (setting, value) in [("slowlog-max-len", 1_000_000), ("slowlog-log-slower-than", 0)]
            {
                redis::cmd("CONFIG")
                    .arg("SET")
                    .arg(setting)
                    .arg(value)
                    .exec(&mut connection)
                    .unwrap();
            }
            redis::cmd("SLOWLOG").arg("RESET").exec(&mut connection).unwrap();
        });
        Self(server)
    }

    /// The calls of scripts, each with its arguments, of which the server keeps 128 bytes.
    fn calls(&self) -> Vec<Vec<Vec<u8>>> {
        let mut connection = block_in_place(|| self.0.connection());
        let mut command = redis::cmd("SLOWLOG");
        let newest_first = command.arg("GET").arg(-1);
        let entries: Vec<Vec<redis::Value>> =
            block_in_place(|| newest_first.query(&mut connection)).unwrap();
        let arguments = |mut entry: Vec<redis::Value>| -> Vec<Vec<u8>> {
            redis::from_redis_value(entry.swap_remove(3)).unwrap()
        };
        let calls = entries.into_iter().rev().map(arguments);
        calls.filter(|call| call[0].starts_with(b"EVAL")).collect()
    }

    fn releases(&self) -> Vec<Vec<Vec<u8>>> {
        self.calls().into_iter().filter(|call| is_release(call)).collect()
    }
}

fn is_release(call: &[Vec<u8>]) -> bool {
    call.get(4).is_some_and(|action| action == b"release")
}

fn keys(count: usize) -> Vec<String> {
    (0..count).map(|number| format!("key-{number}")).collect()
}

/// A server, and ten waiting requests for each key.
async fn ten_of_each(keys: usize) -> (RedisServer, RedisStore, Waiting) {
    let server = RedisServer::start();
    let store = connect(&server.url(), LONG).await;
    let limiter = limiter(&store, Algorithm::token_bucket());
    let waiting = Waiting::start(limiter, &self::keys(keys), 10).await;
    (server, store, waiting)
}

fn assert_no_outage(store: &RedisStore) {
    let health = store.health();
    assert!(health.is_available, "{health:?}");
    assert_eq!((health.outages, health.consecutive_failures), (0, 0), "{health:?}");
}

/// Drops 9,000 requests of 100 keys while others are decided. Returns the number of calls that
/// released their reservations.
async fn drop_beside_others(
    server: &RedisServer,
    store: &RedisStore,
    waiting: &Waiting,
    drop_requests: impl AsyncFnOnce(),
) -> usize {
    let log = Log::start(server);
    let others = Others::start(store);
    drop_requests().await;
    waiting.until_released().await;
    others.finish().await;
    assert_no_outage(store);
    let calls = log.calls();
    let first = calls.iter().position(|call| is_release(call)).unwrap();
    let last = calls.iter().rposition(|call| is_release(call)).unwrap();
    let is_other = |call: &&Vec<Vec<u8>>| call[3].starts_with(b"ratelimit:others:");
    let between = calls[first..last].iter().filter(is_other).count();
    assert!(between > 0, "other requests were decided only before or after the releases");
    calls.iter().filter(|call| is_release(call)).count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousands_of_dropped_requests_leave_no_reservation_and_delay_no_other_request() {
    for algorithm in ALGORITHMS {
        let server = RedisServer::start();
        let store = connect(&server.url(), LONG).await;
        let mut waiting = Waiting::start(limiter(&store, algorithm), &keys(100), 90).await;
        let mut tasks = mem::take(&mut waiting.tasks);
        let calls =
            drop_beside_others(&server, &store, &waiting, async move || tasks.abort_all()).await;
        println!("{algorithm}: 9,000 reservations are released by {calls} calls");
        assert!((100..=500).contains(&calls), "{algorithm}: {calls}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousands_of_closed_connections_leave_no_reservation() {
    let server = RedisServer::start();
    let store = connect(&server.url(), LONG).await;
    let limiter = limiter(&store, Algorithm::token_bucket());
    let keys = keys(100);
    let waiting = Waiting::start(limiter, &keys, 0).await;
    let app = Router::new().fallback(get(|| async {})).layer(waiting.layer());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });

    let (mut connections, mut responses) = (JoinSet::new(), vec![]);
    for first in (0..9_000).step_by(180) {
        let io = TcpStream::connect(address).await.unwrap();
        let (client, connection) = h2::client::handshake(io).await.unwrap();
        connections.spawn(connection);
        for number in first..first + 180 {
            let uri = format!("http://{address}/{}", keys[number % 100]);
            let request = Request::get(uri).body(()).unwrap();
            let mut ready = client.clone().ready().await.unwrap();
            responses.push(ready.send_request(request, true).unwrap());
        }
    }
    waiting.until_reserved(90).await;
    let calls =
        drop_beside_others(&server, &store, &waiting, async move || connections.abort_all()).await;
    println!("50 connections: 9,000 reservations are released by {calls} calls");
    assert!((100..=3_000).contains(&calls), "{calls}");
    drop(responses);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_only_releases_while_redis_hangs_stays_available() {
    let (server, store, mut waiting) = ten_of_each(100).await;
    server.freeze();
    waiting.tasks.abort_all();
    until("releases get no reply", async || store.health().timeouts >= 8).await;
    assert_no_outage(&store);
    server.thaw();
    waiting.until_released().await;
    assert_no_outage(&store);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn releases_are_held_back_while_redis_is_unavailable_and_sent_once_afterwards() {
    let (server, store, mut waiting) = ten_of_each(100).await;
    let other =
        Limiter::new("default", store.clone(), Algorithm::token_bucket(), Quota::per_hour(1));
    let log = Log::start(&server);
    server.freeze();
    while store.health().is_available {
        let _ = other.check("key").await;
    }
    let timeouts = store.health().timeouts;
    waiting.tasks.abort_all();
    until("probes get no reply", async || store.health().timeouts >= timeouts + 2).await;
    server.thaw();
    until("Redis is available", async || store.health().is_available).await;
    waiting.until_released().await;
    let health = store.health();
    assert_eq!((health.outages, health.consecutive_failures), (1, 0), "{health:?}");
    assert_eq!(log.releases().len(), 100, "one call for each key");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn releases_that_could_not_be_sent_are_sent_when_redis_is_back() {
    let mut server = RedisServer::start_with(&["--appendonly", "yes", "--appendfsync", "always"]);
    let store = connect(&server.url(), LONG).await;
    let mut waiting = Waiting::start(limiter(&store, Algorithm::SlidingLog), &keys(20), 10).await;
    server.kill();
    waiting.tasks.abort_all();
    until("releases were tried", async || store.health().errors >= 20).await;
    assert_no_outage(&store);
    server.restart();
    waiting.until_released().await;
    assert_no_outage(&store);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn releases_that_a_replica_rejects_are_sent_again() {
    let (server, store, mut waiting) = ten_of_each(20).await;
    let replica_of = |host, port| {
        let mut connection = server.connection();
        redis::cmd("REPLICAOF").arg(host).arg(port).exec(&mut connection).unwrap();
    };
    replica_of("127.0.0.1", "1");
    waiting.tasks.abort_all();
    until("releases were tried", async || store.health().errors >= 20).await;
    replica_of("NO", "ONE");
    waiting.until_released().await;
    assert_no_outage(&store);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn releases_that_redis_rejects_are_sent_again() {
    for (setting, rejecting, normal) in
        [("maxmemory", "1", "0"), ("min-replicas-to-write", "1", "0")]
    {
        let server = RedisServer::start();
        let store = connect(&server.url(), LONG).await;
        let mut waiting =
            Waiting::start(limiter(&store, Algorithm::token_bucket()), &keys(20), 10).await;
        let set = |value| {
            let mut connection = server.connection();
            redis::cmd("CONFIG").arg("SET").arg(setting).arg(value).exec(&mut connection).unwrap();
        };
        set(rejecting);
        waiting.tasks.abort_all();
        until("releases were tried", async || store.health().errors >= 20).await;
        set(normal);
        waiting.until_released().await;
        assert_no_outage(&store);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reservations_of_late_answers_are_released_exactly_once() {
    for algorithm in ALGORITHMS {
        for has_two_limits in [false, true] {
            let server = RedisServer::start();
            let proxy = Proxy::start(&server);
            let store = connect(&proxy.url(), LONG).await;
            let waiting = Waiting::start(limiter(&store, algorithm), &keys(1), 0).await;
            let quick = connect(&proxy.url(), Duration::from_millis(50)).await;
            let quota = waiting.limiter.quota();
            let quick_limiter = Limiter::new("waiting", quick.clone(), algorithm, quota);
            let other = Limiter::new("other", quick, algorithm, Quota::per_hour(10_000));
            let before = server.calls("evalsha");
            proxy.hold_replies(true);
            let mut tasks = JoinSet::new();
            for i in 0..50 {
                let charge = Charge::new(&quick_limiter, "key-0");
                let charge = if has_two_limits { charge.also(&other) } else { charge };
                tasks.spawn(async move {
                    let waits = charge.check().max_wait(MAX_WAIT);
                    if i % 2 == 0 {
                        // On a busy machine, its deadline can be over before it is dropped.
                        let dropped = timeout(Duration::from_millis(20), waits).await;
                        assert!(!matches!(dropped, Ok(Ok(_))));
                    } else {
                        assert!(waits.await.is_err());
                    }
                });
            }
            let _ = tasks.join_all().await;
            assert!(server.calls("evalsha") > before);
            let mut admin = server.connection();
            let length = |admin: &mut redis::Connection| -> usize {
                let name = format!("ratelimit:waiting:{}:{{key-0}}", algorithm.name());
                redis::cmd("STRLEN").arg(name).query(admin).unwrap()
            };
            println!("{algorithm}: {} bytes", length(&mut admin));
            proxy.hold_replies(false);
            waiting.until_released().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn permits_of_a_redisson_limiter_that_could_not_be_released_are_released_later() {
    let mut server = RedisServer::start_with(&["--appendonly", "yes", "--appendfsync", "always"]);
    let proxy = Proxy::start(&server);
    let store = connect(&proxy.url(), LONG).await;
    let limiter = RateLimiter::new(store.clone(), "LIMITER_NAME");
    let hour = Duration::from_secs(3_600);
    assert!(limiter.try_set_rate(RateLimiterConfig::overall(10, hour)).await.unwrap());
    let permits = |server: &RedisServer| -> u64 {
        let mut connection = server.connection();
        redis::cmd("ZCARD").arg("{LIMITER_NAME}:permits").query(&mut connection).unwrap()
    };
    let _ = limiter.acquire(1).await.unwrap(); // loads the script
    limiter.release(1).await.unwrap();
    proxy.hold_replies(true);
    let acquire = tokio::spawn({
        let limiter = limiter.clone();
        async move { limiter.acquire(3).await }
    });
    until("permits are taken", async || permits(&server) == 1).await;
    acquire.abort();
    server.kill();
    proxy.hold_replies(false);
    until("a release was tried", async || store.health().errors >= 5).await;
    server.restart();
    let released = async || eventually(async || limiter.available_permits().await).await == 10;
    until("the permits are released", released).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn releases_that_were_sent_are_not_sent_again() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server);
    let store = connect(&proxy.url(), LONG).await;
    let mut waiting =
        Waiting::start(limiter(&store, Algorithm::token_bucket()), &keys(10), 5).await;
    let log = Log::start(&server);
    proxy.hold_replies(true);
    waiting.tasks.abort_all();
    until("all releases have failed", async || store.health().timeouts >= 10).await;
    proxy.hold_replies(false);
    waiting.until_released().await;
    assert_no_outage(&store);
    // A release is 16 bytes: the instant and the units. The log shows 128 bytes.
    let releases = log.releases();
    let of_call = |call: &'_ Vec<Vec<u8>>| -> Vec<_> {
        let reservations = call.last().unwrap().chunks(16);
        reservations.map(|bytes| (call[3].clone(), bytes.to_vec())).collect()
    };
    let released: Vec<_> = releases.iter().flat_map(of_call).collect();
    assert_eq!(released.len(), 10 * 5);
    assert_eq!(HashSet::<_>::from_iter(&released).len(), 10 * 5, "a release was sent twice");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_node_that_hangs_delays_no_release_on_other_nodes() {
    let _permit = many_servers().await;
    let cluster = block_in_place(|| Cluster::start(3, false, &[]));
    let config = RedisConfig::cluster(cluster.urls()).unwrap();
    let store = RedisStore::new(config.deadline(LONG)).unwrap();
    let limiter = limiter(&store, Algorithm::token_bucket());
    let mut waiting = Waiting::start(limiter, &keys(60), 10).await;
    let master_of = |key: &str| {
        let name = format!("ratelimit:waiting:token-bucket:{{{key}}}");
        block_in_place(|| cluster.master_of(&name))
    };
    let (hung, healthy): (Vec<_>, Vec<_>) =
        mem::take(&mut waiting.before).into_iter().partition(|(key, _)| master_of(key) == 0);
    assert!(hung.len() >= 5 && healthy.len() >= 5);
    cluster.masters[0].server.freeze();
    waiting.tasks.abort_all();
    waiting.before = healthy;
    waiting.until_released().await;
    assert_no_outage(&store);
    cluster.masters[0].server.thaw();
    waiting.before = hung;
    waiting.until_released().await;
    assert_no_outage(&store);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reservations_of_a_failed_node_are_released_by_its_replica() {
    let _permit = many_servers().await;
    let settings = ["--cluster-node-timeout", "1500"];
    let mut cluster = block_in_place(|| Cluster::start(3, true, &settings));
    let config = RedisConfig::cluster(cluster.urls()).unwrap();
    let store = RedisStore::new(config.deadline(LONG)).unwrap();
    let limiter = limiter(&store, Algorithm::token_bucket());
    let mut waiting = Waiting::start(limiter.clone(), &keys(60), 10).await;
    let is_replicated = async || block_in_place(|| cluster.masters[0].is_replicated());
    until("the replica has all data", is_replicated).await;
    cluster.masters[0].server.kill();
    // Releases that were sent before the store detected the fault count as sent.
    until("the store detects the fault", async || {
        for key in keys(60) {
            let _ = limiter.check(&*key).await;
        }
        store.health().errors > 0
    })
    .await;
    waiting.tasks.abort_all();
    waiting.until_released().await;
}

#[test]
fn reservations_of_a_runtime_that_ends_are_released_by_another_runtime() {
    let server = RedisServer::start();
    let runtime = || Runtime::new().unwrap();
    for connects_elsewhere in [true, false] {
        let (first, second) = (runtime(), runtime());
        let connects = if connects_elsewhere { &second } else { &first };
        let store = connects.block_on(connect(&server.url(), LONG));
        let limiter = limiter(&store, Algorithm::token_bucket());
        let waiting = first.block_on(Waiting::start(limiter, &keys(100), 10));
        drop(first); // drops all its tasks
        second.block_on(waiting.until_released());
        redis::cmd("FLUSHALL").exec(&mut server.connection()).unwrap();
    }
}

/// The callers fail at their deadlines, and their answers come later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_release_is_one_event_for_each_limit() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server);
    // Enough for a busy machine, and less than the life of a silent connection.
    let quick = connect(&proxy.url(), Duration::from_millis(300)).await;
    let recorder = Recorder::new();
    quick.add_observer(recorder.clone());
    let named =
        |name| Limiter::new(name, quick.clone(), Algorithm::token_bucket(), Quota::per_hour(100));
    let (one, other) = (named("one"), named("other"));
    let both = Charge::new(&one, "key").also(&other);
    let warmed = async || one.check("warm").await.is_ok() && both.check().await.is_ok();
    until("Redis is used in time", warmed).await;
    proxy.hold_replies(true);
    assert!(one.reserve("alone", 2, MAX_WAIT).await.is_err());
    assert!(both.check().max_wait(MAX_WAIT).await.is_err());
    recorder.take();
    proxy.hold_replies(false);
    let released = std::cell::RefCell::new(vec![]);
    until("all are released", async || {
        released.borrow_mut().extend(recorder.take_of("released"));
        released.borrow().len() >= 3
    })
    .await;
    let mut released = released.into_inner();
    released.sort();
    assert_eq!(released, ["released one alone 2", "released one key 1", "released other key 1"]);
}
