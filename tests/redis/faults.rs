//! Faults of Redis under load: the policy answers every request, no quota is exceeded while the
//! counts survive, and limiting resumes afterwards.

use std::{
    collections::HashMap,
    convert::Infallible,
    future::pending,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use axum::body::Body;
use http::{Request, Response, StatusCode};
use tokio::{runtime::Handle, task::JoinSet, time::sleep};
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::{
    Algorithm, FailurePolicy, Limiter, Quota, RateLimitLayer, RedisStore, key,
    store::{Health, RedisConfig, Source},
};

use crate::support::{self, load::until, proxy::Proxy, server::RedisServer};

const IN_FLIGHT: usize = 300;
const KEYS: usize = 10;
const LIMIT: u32 = 300;
const DEADLINE: Duration = Duration::from_millis(100);
/// The tolerance beyond the deadline and the pauses of a busy machine.
const SLACK: Duration = Duration::from_secs(1);
const HEARTBEAT: Duration = Duration::from_millis(10);
const MAX_TIME: Duration = Duration::from_secs(60);

fn lazy(url: &str, deadline: Duration) -> RedisStore {
    RedisStore::new(RedisConfig::from_url(url).unwrap().deadline(deadline)).unwrap()
}

async fn connect(url: &str, deadline: Duration) -> RedisStore {
    let store = lazy(url, deadline);
    store.ping().await.unwrap();
    store
}

/// Concurrent requests over the stores of two processes, until the load is stopped.
struct Load {
    stores: Vec<RedisStore>,
    seen: Arc<Seen>,
    tasks: JoinSet<()>,
    tasks_before: usize,
    deadline: Duration,
}

#[derive(Default)]
struct Seen {
    is_over: AtomicBool,
    decided: AtomicU64,
    failed: AtomicU64,
    longest: Mutex<Duration>,
    longest_stall: Mutex<Duration>,
    admitted: Mutex<HashMap<usize, u32>>,
}

impl Load {
    fn start(url: &str) -> Self {
        Self::start_with(url, DEADLINE)
    }

    fn start_with(url: &str, deadline: Duration) -> Self {
        let tasks_before = Handle::current().metrics().num_alive_tasks();
        let seen = Arc::<Seen>::default();
        let stores = [url, url].map(|url| lazy(url, deadline));
        let layers = stores.clone().map(|store| {
            let limiter = Limiter::new(
                "default",
                store,
                Algorithm::FixedWindow,
                Quota::per_hour(LIMIT.into()),
            );
            RateLimitLayer::new(limiter, key::header("x-user"))
        });
        let mut tasks = JoinSet::new();
        tasks.spawn({
            let seen = seen.clone();
            async move { seen.beat().await }
        });
        for task in 0..IN_FLIGHT {
            let (layer, seen) = (layers[task % 2].clone(), seen.clone());
            tasks.spawn(async move {
                for request in task.. {
                    if seen.is_over.load(SeqCst) {
                        break;
                    }
                    seen.send(&layer, request % KEYS).await;
                }
            });
        }
        Self { stores: stores.into(), seen, tasks, tasks_before, deadline }
    }

    /// Waits until `more` requests are decided, or failed.
    async fn until(&self, what: &str, more: u64, count: impl Fn(&Seen) -> &AtomicU64) {
        let (start, wanted) = (Instant::now(), count(&self.seen).load(SeqCst) + more);
        while count(&self.seen).load(SeqCst) < wanted {
            assert!(start.elapsed() < MAX_TIME, "{what}");
            sleep(Duration::from_millis(2)).await;
        }
    }

    async fn until_decided(&self, more: u64) {
        self.until("no decisions", more, |seen| &seen.decided).await;
    }

    async fn until_failed(&self, more: u64) {
        self.until("no failures", more, |seen| &seen.failed).await;
    }

    async fn until_available(&self, wanted: bool) {
        let start = Instant::now();
        while self.stores.iter().any(|store| store.health().is_available != wanted) {
            assert!(start.elapsed() < MAX_TIME, "available: {}", !wanted);
            sleep(Duration::from_millis(2)).await;
        }
    }

    fn failed(&self) -> u64 {
        self.seen.failed.load(SeqCst)
    }

    /// Waits until limiting resumes, prints the time that it took, and asserts that no quota was
    /// exceeded. `counts` is the maximum number of times that the counts were lost, plus 1.
    async fn assert_recovers(mut self, fault: &str, counts: u32) {
        let healed = Instant::now();
        self.until_decided(1).await;
        let resumed = healed.elapsed();
        self.until_available(true).await;
        self.until_decided(1_000).await;
        self.seen.is_over.store(true, SeqCst);
        while let Some(task) = self.tasks.join_next().await {
            task.expect("no task panics");
        }
        let longest = *self.seen.longest.lock().unwrap();
        let (decided, failed) = (self.seen.decided.load(SeqCst), self.seen.failed.load(SeqCst));
        println!(
            "{fault}: {decided} decided, {failed} failed, the longest in {longest:.0?}; limiting \
             resumes {resumed:.0?} after the end of the fault"
        );
        let stall = *self.seen.longest_stall.lock().unwrap();
        let bound = self.deadline + stall + SLACK;
        assert!(longest < bound, "{fault}: a request took {longest:?}, with a stall of {stall:?}");
        for (key, admitted) in &*self.seen.admitted.lock().unwrap() {
            assert!(*admitted <= LIMIT * counts, "{fault}: {admitted} admitted for key {key}");
        }
        drop(self.stores);
        let dropped = Instant::now();
        while Handle::current().metrics().num_alive_tasks() > self.tasks_before {
            assert!(dropped.elapsed() < MAX_TIME, "{fault}: tasks are left");
            sleep(Duration::from_millis(10)).await;
        }
    }
}

impl Seen {
    fn took(&self, time: Duration) {
        let mut longest = self.longest.lock().unwrap();
        *longest = time.max(*longest);
    }

    async fn beat(&self) {
        while !self.is_over.load(SeqCst) {
            let asleep = Instant::now();
            sleep(HEARTBEAT).await;
            let mut longest = self.longest_stall.lock().unwrap();
            *longest = asleep.elapsed().max(*longest);
        }
    }

    async fn send(&self, layer: &RateLimitLayer, key: usize) {
        let inner = async |_: Request<Body>| Ok::<_, Infallible>(Response::new(Body::empty()));
        let request = support::get(&[("x-user", &key.to_string())]);
        let sent = Instant::now();
        let response = layer.layer(service_fn(inner)).oneshot(request).await.unwrap();
        let took = sent.elapsed();
        self.took(took);
        match response.status() {
            StatusCode::OK => {
                *self.admitted.lock().unwrap().entry(key).or_default() += 1;
                self.decided.fetch_add(1, SeqCst);
            }
            StatusCode::TOO_MANY_REQUESTS => {
                self.decided.fetch_add(1, SeqCst);
            }
            StatusCode::SERVICE_UNAVAILABLE => {
                self.failed.fetch_add(1, SeqCst);
                sleep(Duration::from_millis(50)).await;
            }
            status => panic!("{status}"),
        }
    }
}

fn run(server: &RedisServer, words: &[&str]) {
    redis::cmd(words[0]).arg(&words[1..]).exec(&mut server.connection()).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_and_restarted_without_data() {
    let mut server = RedisServer::start();
    let load = Load::start(&server.url());
    load.until_decided(2_000).await;
    server.kill();
    load.until_failed(1_000).await;
    load.until_available(false).await;
    server.restart();
    load.assert_recovers("killed, restarted without data", 2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_and_restarted_with_data() {
    let mut server = RedisServer::start_with(&["--appendonly", "yes", "--appendfsync", "always"]);
    let load = Load::start(&server.url());
    for _ in 0..3 {
        load.until_decided(500).await;
        server.kill();
        load.until_failed(500).await;
        server.restart();
    }
    load.assert_recovers("killed, restarted with data", 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scripts_flushed() {
    let server = RedisServer::start();
    let load = Load::start_with(&server.url(), MAX_TIME);
    for _ in 0..20 {
        load.until_decided(200).await;
        run(&server, &["SCRIPT", "FLUSH"]);
    }
    assert_eq!(load.failed(), 0);
    load.assert_recovers("scripts flushed", 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn paused_for_longer_than_the_deadline() {
    let server = RedisServer::start();
    let load = Load::start(&server.url());
    load.until_decided(1_000).await;
    run(&server, &["CLIENT", "PAUSE", "1500"]);
    load.until_failed(1_000).await;
    load.assert_recovers("paused for 1.5 s (the pause is included)", 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frozen() {
    let server = RedisServer::start();
    let load = Load::start(&server.url());
    load.until_decided(1_000).await;
    server.freeze();
    load.until_failed(2_000).await;
    server.thaw();
    load.assert_recovers("frozen", 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn packets_dropped() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server);
    let load = Load::start(&proxy.url());
    load.until_decided(1_000).await;
    proxy.drop_all(true);
    load.until_failed(2_000).await;
    proxy.drop_all(false);
    load.assert_recovers("packets dropped", 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_lost_silently() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server);
    let load = Load::start(&proxy.url());
    load.until_decided(1_000).await;
    proxy.lose_connections();
    load.until_failed(100).await;
    load.assert_recovers("connections lost silently (the loss is included)", 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replies_cut_in_the_middle() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server);
    let load = Load::start(&proxy.url());
    for _ in 0..10 {
        load.until_decided(200).await;
        proxy.cut_a_reply();
    }
    load.assert_recovers("replies cut in the middle", 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_killed() {
    let server = RedisServer::start();
    let load = Load::start(&server.url());
    for _ in 0..10 {
        load.until_decided(200).await;
        run(&server, &["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
    }
    load.assert_recovers("connections killed", 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replies_garbled() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server);
    let load = Load::start(&proxy.url());
    load.until_decided(1_000).await;
    proxy.garble(true);
    load.until_failed(1_000).await;
    proxy.garble(false);
    load.assert_recovers("replies garbled", 1).await;
}

#[tokio::test]
async fn a_reply_without_end_is_given_up() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server);
    let store = connect(&proxy.url(), MAX_TIME).await;
    let limiter =
        Limiter::new("default", store, Algorithm::FixedWindow, Quota::per_hour(LIMIT.into()));
    proxy.flood();
    assert!(limiter.check("key").await.is_err());
    until("the connection is closed", async || proxy.open() == 0).await;
    assert!(proxy.flooded() < 64 << 20, "{} bytes were read", proxy.flooded());
    assert!(limiter.check("key").await.is_ok());
}

#[tokio::test]
async fn a_connection_without_replies_is_given_up_without_a_further_call() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server);
    let store = connect(&proxy.url(), DEADLINE).await;
    let limiter =
        Limiter::new("default", store, Algorithm::FixedWindow, Quota::per_hour(LIMIT.into()));
    proxy.hold_replies(true);
    assert!(limiter.check("key").await.is_err());
    until("the connection is closed", async || proxy.open() == 0).await;
    proxy.hold_replies(false);
    assert!(limiter.check("key").await.is_ok());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_used_up_without_eviction() {
    let server = RedisServer::start();
    let load = Load::start(&server.url());
    load.until_decided(1_000).await;
    run(&server, &["CONFIG", "SET", "maxmemory", "1"]);
    load.until_failed(1_000).await;
    load.until_available(true).await; // Redis replies with errors
    run(&server, &["CONFIG", "SET", "maxmemory", "0"]);
    load.assert_recovers("memory used up, noeviction", 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_used_up_with_eviction() {
    let server = RedisServer::start_with(&["--maxmemory-policy", "allkeys-lru"]);
    let load = Load::start(&server.url());
    load.until_decided(1_000).await;
    let mut admin = server.connection();
    let used: redis::InfoDict = redis::cmd("INFO").arg("memory").query(&mut admin).unwrap();
    let used: u64 = used.get("used_memory").unwrap();
    run(&server, &["CONFIG", "SET", "maxmemory", &(used + 200_000).to_string()]);
    // The keys of another program evict those of the store.
    for i in 0..2_000 {
        redis::cmd("SET").arg(i).arg(&[0_u8; 1_000][..]).exec(&mut admin).unwrap();
    }
    let stats: redis::InfoDict = redis::cmd("INFO").arg("stats").query(&mut admin).unwrap();
    assert!(stats.get::<u64>("evicted_keys").unwrap() > 0);
    load.until_decided(1_000).await;
    // Evicted counts are lost.
    load.assert_recovers("memory used up, allkeys-lru", u32::MAX / LIMIT).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_of_the_wrong_type() {
    let server = RedisServer::start();
    let load = Load::start(&server.url());
    load.until_decided(1_000).await;
    let key = "ratelimit:default:fixed-window:{header:x-user=0}";
    // In one step, as the key is in use.
    let script = "redis.call('DEL', KEYS[1]) redis.call('SADD', KEYS[1], 'not ours')";
    run(&server, &["EVAL", script, "1", key]);
    load.until_failed(200).await;
    load.until_decided(1_000).await;
    load.until_available(true).await; // other keys are decided
    run(&server, &["DEL", key]);
    load.assert_recovers("a key of the wrong type", 3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_read_only_replica() {
    let server = RedisServer::start();
    let load = Load::start(&server.url());
    load.until_decided(1_000).await;
    run(&server, &["REPLICAOF", "127.0.0.1", "1"]);
    load.until_failed(1_000).await;
    let mut admin = server.connection();
    let stats: redis::InfoDict = redis::cmd("INFO").arg("stats").query(&mut admin).unwrap();
    let connections: u64 = stats.get("total_connections_received").unwrap();
    assert!(connections < 1_000, "{connections} connections were made");
    run(&server, &["REPLICAOF", "NO", "ONE"]);
    load.assert_recovers("a read-only replica", 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_password_and_then_the_right_one() {
    let server = RedisServer::start();
    let load = Load::start(&server.url());
    load.until_decided(1_000).await;
    let mut admin = server.connection();
    redis::cmd("CONFIG").arg(&["SET", "requirepass", "secret"]).exec(&mut admin).unwrap();
    let kill = ["KILL", "TYPE", "normal", "SKIPME", "yes"];
    redis::cmd("CLIENT").arg(&kill).exec(&mut admin).unwrap();
    load.until_failed(1_000).await;
    redis::cmd("CONFIG").arg(&["SET", "requirepass", ""]).exec(&mut admin).unwrap();
    load.assert_recovers("a wrong password", 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_redis_is_down_no_request_waits_for_it() {
    let server = RedisServer::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let limiter = Limiter::new(
        "default",
        store.clone(),
        Algorithm::FixedWindow,
        Quota::per_hour(LIMIT.into()),
    );
    let layer = RateLimitLayer::new(limiter.clone(), key::Global)
        .extensions(true)
        .on_failure(FailurePolicy::local(0.1));
    server.freeze();
    while store.health().is_available {
        assert!(limiter.check("key").await.is_err());
    }
    let before = store.health();
    assert!(before.timeouts >= 5, "{before:?}");
    for _ in 0..1_000 {
        let response = layer
            .layer(service_fn(async |_| Ok::<_, Infallible>(Response::new(Body::empty()))))
            .oneshot(support::get(&[]))
            .await
            .unwrap();
        let decision: tower_ratelimit::Decision = response.extensions().get().cloned().unwrap();
        assert_eq!(decision.source(), Source::Local);
    }
    let after = store.health();
    assert_eq!((after.skipped - before.skipped, after.outages), (1_000, 1));
    server.thaw();
    let start = Instant::now();
    while !store.health().is_available {
        assert!(start.elapsed() < MAX_TIME, "no probe finds that Redis is back");
        sleep(Duration::from_millis(2)).await;
    }
    assert!(limiter.check("key").await.is_ok());
}

/// Each call ends before a task that it spawns runs.
#[test]
fn a_runtime_that_runs_no_tasks_still_detects_that_redis_is_back() {
    let server = RedisServer::start();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let client = redis::Client::open(server.url()).unwrap();
    let given = runtime.block_on(client.get_multiplexed_async_connection()).unwrap();
    let stores = [RedisStore::lazy(&server.url()).unwrap(), RedisStore::from_connection(given)];
    for store in stores {
        let quota = Quota::per_hour(LIMIT.into());
        let limiter = Limiter::new("default", store.clone(), Algorithm::FixedWindow, quota);
        while runtime.block_on(limiter.check("key")).is_err() {}
        server.freeze();
        while store.health().is_available {
            assert!(runtime.block_on(limiter.check("key")).is_err());
        }
        server.thaw();
        let start = Instant::now();
        while runtime.block_on(limiter.check("key")).is_err() {
            assert!(start.elapsed() < MAX_TIME, "no probe finds that Redis is back");
        }
    }
}

/// Decides until the store stops sending commands.
async fn until_unavailable(store: &RedisStore, limiter: &Limiter) {
    let start = Instant::now();
    while store.health().is_available {
        assert!(start.elapsed() < MAX_TIME, "the store is available");
        assert!(limiter.check("key").await.is_err());
    }
}

async fn until_available(store: &RedisStore) {
    let start = Instant::now();
    while !store.health().is_available {
        assert!(start.elapsed() < MAX_TIME, "the store is not available");
        sleep(Duration::from_millis(2)).await;
    }
}

#[tokio::test]
async fn while_redis_answers_later_than_the_deadline_it_stays_unavailable() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server);
    let store = connect(&proxy.url(), DEADLINE).await;
    let limiter = Limiter::new(
        "default",
        store.clone(),
        Algorithm::FixedWindow,
        Quota::per_hour(LIMIT.into()),
    );
    proxy.delay_replies(2 * DEADLINE);
    until_unavailable(&store, &limiter).await;
    let (before, read) = (store.health(), server.calls("mget"));
    let start = Instant::now();
    while store.health().answers < before.answers + 5 {
        assert!(start.elapsed() < MAX_TIME, "no probe is sent");
        assert!(limiter.check("key").await.is_err());
        sleep(Duration::from_millis(5)).await;
    }
    let after = store.health();
    assert!(!after.is_available && after.outages == 1, "{after:?}");
    assert_eq!(server.calls("mget"), read, "a request was counted");

    proxy.delay_replies(Duration::ZERO);
    until_available(&store).await;
    assert_eq!(store.health().outages, 1);
    assert_eq!(store.health().consecutive_failures, 0);
}

#[tokio::test]
async fn while_redis_accepts_no_writes_it_stays_unavailable() {
    let server = RedisServer::start();
    let store = connect(&server.url(), DEADLINE).await;
    let limiter = Limiter::new(
        "default",
        store.clone(),
        Algorithm::FixedWindow,
        Quota::per_hour(LIMIT.into()),
    );
    run(&server, &["CLIENT", "PAUSE", "60000", "WRITE"]);
    until_unavailable(&store, &limiter).await;
    let Health { consecutive_failures: failed, timeouts, .. } = store.health();
    let start = Instant::now();
    while store.health().timeouts < timeouts + 2 {
        assert!(start.elapsed() < MAX_TIME, "no probe is sent");
        assert!(limiter.check("key").await.is_err());
        sleep(Duration::from_millis(5)).await;
    }
    run(&server, &["CLIENT", "UNPAUSE"]);
    while !store.health().is_available {
        let _ = limiter.check("key").await;
        sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(store.health().outages, 1);
    assert!(limiter.check("key").await.unwrap().is_allowed());
    assert!(failed < 10, "{failed} requests waited for Redis");
    let decided = server.calls("mget");
    assert!(decided <= u64::from(failed) + 2, "{decided} requests were sent");
}

#[tokio::test]
async fn a_ping_has_a_second_and_does_not_end_an_outage_for_shorter_deadlines() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server);
    let store = connect(&proxy.url(), DEADLINE).await;
    let limiter =
        Limiter::new("default", store.clone(), Algorithm::FixedWindow, Quota::per_hour(9));
    proxy.delay_replies(2 * DEADLINE);
    until_unavailable(&store, &limiter).await;
    assert_eq!(store.health().outages, 1);
    assert!(store.ping().await.is_ok());
    assert!(!store.health().is_available);
    proxy.delay_replies(Duration::ZERO);
    until_available(&store).await;
}

/// For example, if the process is stopped, or another task blocks the thread.
#[tokio::test]
async fn a_reply_that_arrived_while_the_process_was_stopped_is_a_decision() {
    let server = RedisServer::start();
    let deadline = 50 * DEADLINE;
    let store = connect(&server.url(), deadline).await;
    let limiter =
        Limiter::new("default", store.clone(), Algorithm::FixedWindow, Quota::per_hour(9));
    let _ = limiter.check("key").await.unwrap(); // loads the script
    let sent = server.calls("evalsha");
    let is_over = Arc::new(AtomicBool::new(false));
    let stop_is_over = is_over.clone();
    server.freeze();
    let start = Instant::now();
    tokio::spawn(async move {
        for _ in 0..100 {
            tokio::task::yield_now().await; // the command is written
        }
        // From now on, only the server runs.
        server.thaw();
        while server.calls("evalsha") == sent {
            assert!(start.elapsed() < MAX_TIME, "the command was not written");
        }
        server.calls("evalsha"); // its reply arrives after that of the command
        std::thread::sleep((deadline + 2 * DEADLINE).saturating_sub(start.elapsed()));
        stop_is_over.store(true, SeqCst);
        pending::<()>().await; // keeps the server running
    });
    assert_eq!(limiter.check("key").await.unwrap().remaining(), 7);
    assert!(is_over.load(SeqCst), "the reply was read before the stop ended");
    assert_eq!((store.health().timeouts, store.health().errors), (0, 0));
}

#[tokio::test]
async fn health_contains_the_last_error() {
    let mut server = RedisServer::start();
    let store = connect(&server.url(), MAX_TIME).await;
    let limiter = Limiter::new(
        "default",
        store.clone(),
        Algorithm::FixedWindow,
        Quota::per_hour(LIMIT.into()),
    );
    let health = store.health();
    assert_eq!((health.consecutive_failures, health.last_error), (0, None));

    run(&server, &["REPLICAOF", "127.0.0.1", "1"]);
    assert!(limiter.check("key").await.is_err());
    let health = store.health();
    assert_eq!((health.is_available, health.consecutive_failures), (true, 0), "Redis replies");
    assert!(health.last_error.is_some_and(|text| text.to_lowercase().contains("replica")));
    run(&server, &["REPLICAOF", "NO", "ONE"]);

    server.kill();
    for failures in 1..=4 {
        assert!(limiter.check("key").await.is_err());
        let health = store.health();
        assert_eq!((health.is_available, health.consecutive_failures), (true, failures));
        assert!(health.last_error.is_some_and(|text| text.contains("not available: ")));
    }
    server.restart();
    let start = Instant::now();
    while limiter.check("key").await.is_err() {
        assert!(start.elapsed() < MAX_TIME, "the store does not use Redis again");
    }
    let health = store.health();
    assert_eq!(health.consecutive_failures, 0);
    assert!(health.last_error.is_some(), "the last error is lost");
}

#[tokio::test]
async fn no_command_is_sent_after_a_short_deadline() {
    let server = RedisServer::start();
    let store = lazy(&server.url(), Duration::from_nanos(1));
    store.ping().await.unwrap(); // connects
    let limiter = Limiter::new("default", store, Algorithm::FixedWindow, Quota::per_hour(9));
    let pinged = server.calls("mget");
    for _ in 0..20 {
        let _ = limiter.check("key").await;
    }
    assert_eq!(server.calls("mget"), pinged);
}
