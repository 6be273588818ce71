//! Ten minutes of mixed load over four replicas while Redis fails at random: no quota is exceeded,
//! and the memory of this process and of Redis stays flat.
//!
//! ```text
//! make soak               # ten minutes
//! make soak SECONDS=60    # a minute
//! ```

#![allow(missing_docs, unreachable_pub)]

#[allow(dead_code)]
#[path = "../support/proxy.rs"]
mod proxy;
#[allow(dead_code)]
#[path = "../support/server.rs"]
mod server;

use std::{
    env, fs,
    process::{self, ExitCode},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use proxy::Proxy;
use server::RedisServer;
use tokio::{
    runtime::Runtime,
    task::JoinSet,
    time::{sleep, timeout},
};
use tower_ratelimit::{Admission, Algorithm, Charge, Limiter, Quota, RedisStore};

const REPLICAS: usize = 4;
const TASKS_PER_REPLICA: usize = 50;
const KEYS: usize = 4;
const LIMIT: u32 = 50;
const ALGORITHMS: [Algorithm; 5] = [
    Algorithm::FixedWindow,
    Algorithm::SlidingLog,
    Algorithm::sliding_window().buckets(4),
    Algorithm::token_bucket(),
    Algorithm::LeakyBucket,
];
const QUOTA: Quota = Quota::per_second(LIMIT as u64);
const SAMPLES: usize = 60;
/// The allowed growth of memory from the middle third to the last one.
const FLAT: f64 = 1.1;

/// The limiters of one replica, and the counts of all replicas.
struct Replica {
    store: RedisStore,
    limiters: [Limiter; ALGORITHMS.len()],
    /// The second limit of a charge: one key for all requests.
    all: Limiter,
    seen: Arc<Seen>,
}

#[derive(Default)]
struct Seen {
    is_over: AtomicBool,
    admitted: [[AtomicU64; KEYS]; ALGORITHMS.len()],
    denied: AtomicU64,
    dropped: AtomicU64,
    failed: AtomicU64,
}

impl Replica {
    fn new(url: &str, seen: &Arc<Seen>) -> Self {
        let store = RedisStore::lazy(url).expect("a URL");
        let limiters = ALGORITHMS
            .map(|algorithm| Limiter::new(algorithm.name(), store.clone(), algorithm, QUOTA));
        let plenty = Quota::per_second(1_000_000);
        let all = Limiter::new("all", store.clone(), Algorithm::token_bucket(), plenty);
        Self { store, limiters, all, seen: seen.clone() }
    }

    async fn send_until_over(self: Arc<Self>) {
        while !self.seen.is_over.load(Relaxed) {
            self.send().await;
        }
    }

    async fn send(&self) {
        let (index, key) = (fastrand::usize(..ALGORITHMS.len()), fastrand::usize(..KEYS));
        let (limiter, name) = (&self.limiters[index], format!("key-{key}"));
        let cost = fastrand::u64(1..4);
        let wait = Duration::from_millis(fastrand::u64(1..300));
        let decision = match fastrand::u8(..10) {
            0 => {
                // A key that has one request and expires.
                let _ = limiter.check(format!("once-{}", fastrand::u64(..))).await;
                return;
            }
            1 => {
                let _ = limiter.peek(name.as_str()).await;
                return;
            }
            2 => {
                let charge = Charge::new(limiter, name.as_str()).cost(cost);
                charge.and(Charge::new(&self.all, "all")).check().await
            }
            3 | 4 => limiter.try_acquire(name.as_str(), cost, wait).await,
            5 => {
                // The request is dropped after a while, which releases its reservation.
                let time = Duration::from_millis(fastrand::u64(..50));
                let attempt = limiter.try_acquire(name.as_str(), cost, wait);
                match timeout(time, attempt).await {
                    Ok(decision) => decision,
                    Err(_) => {
                        self.seen.dropped.fetch_add(1, Relaxed);
                        return;
                    }
                }
            }
            _ => {
                let reserved = limiter.reserve(name.as_str(), cost, Duration::ZERO).await;
                reserved.map(Admission::keep)
            }
        };
        let (count, pause) = match decision {
            Ok(decision) if decision.is_allowed() => {
                self.seen.admitted[index][key].fetch_add(cost, Relaxed);
                return;
            }
            Ok(_) => (&self.seen.denied, 10),
            Err(_) => (&self.seen.failed, 50),
        };
        count.fetch_add(1, Relaxed);
        sleep(Duration::from_millis(fastrand::u64(..2 * pause))).await;
    }
}

/// The maximum of units that may be admitted in this time.
fn allowed(time: Duration) -> u64 {
    // Two windows more: the burst of a bucket, and the windows that have begun.
    (f64::from(LIMIT) * (time.as_secs_f64() + 2.0)) as u64
}

fn command(server: &RedisServer, words: &[&str]) {
    let _ = redis::cmd(words[0]).arg(&words[1..]).exec(&mut server.connection());
}

async fn for_a_while() {
    sleep(Duration::from_millis(fastrand::u64(200..3_000))).await;
}

async fn fail(server: &mut RedisServer, proxy: &Proxy) -> &'static str {
    match fastrand::u8(..11) {
        fault @ 7.. => fail_network(proxy, fault).await,
        fault => fail_server(server, fault).await,
    }
}

async fn fail_server(server: &mut RedisServer, fault: u8) -> &'static str {
    match fault {
        0 => {
            server.kill();
            for_a_while().await;
            server.restart();
            "kill -9, and restart"
        }
        1 => {
            server.freeze();
            for_a_while().await;
            server.thaw();
            "freeze"
        }
        2 => {
            command(server, &["CLIENT", "PAUSE", "1000"]);
            "CLIENT PAUSE"
        }
        3 => {
            command(server, &["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
            "CLIENT KILL"
        }
        4 => {
            command(server, &["SCRIPT", "FLUSH"]);
            "SCRIPT FLUSH"
        }
        5 => {
            command(server, &["CONFIG", "SET", "maxmemory", "1"]);
            for_a_while().await;
            command(server, &["CONFIG", "SET", "maxmemory", "0"]);
            "memory used up"
        }
        _ => {
            command(server, &["EVAL", "for i = 1, 5e7 do end", "0"]);
            "a slow script of another program"
        }
    }
}

async fn fail_network(proxy: &Proxy, fault: u8) -> &'static str {
    match fault {
        7 => {
            proxy.drop_all(true);
            for_a_while().await;
            proxy.drop_all(false);
            "packets dropped"
        }
        8 => {
            proxy.lose_connections();
            "connections lost silently"
        }
        9 => {
            proxy.cut_a_reply();
            "a reply cut"
        }
        _ => {
            proxy.garble(true);
            for_a_while().await;
            proxy.garble(false);
            "replies garbled"
        }
    }
}

/// The megabytes of this process, and of the data in Redis.
fn memory(server: &RedisServer) -> [f64; 2] {
    let ours = fs::read_to_string(format!("/proc/{}/statm", process::id())).unwrap_or_default();
    let pages: f64 =
        ours.split(' ').nth(1).and_then(|pages| pages.parse().ok()).unwrap_or_default();
    let info = redis::cmd("INFO").arg("memory").query::<redis::InfoDict>(&mut server.connection());
    let held: f64 = info.ok().and_then(|info| info.get("used_memory_dataset")).unwrap_or_default();
    [pages * 4_096.0 / 1e6, held / 1e6]
}

async fn soak(time: Duration) -> bool {
    let settings = ["--appendonly", "yes", "--appendfsync", "always"];
    let mut server = RedisServer::start_with(&settings);
    let proxy = Proxy::start(&server);
    let seen = Arc::<Seen>::default();
    let mut replicas = vec![];
    let mut tasks = JoinSet::new();
    let start = Instant::now();
    for number in 0..REPLICAS {
        let url = if number % 2 == 0 { server.url() } else { proxy.url() };
        let replica = Arc::new(Replica::new(&url, &seen));
        for _ in 0..TASKS_PER_REPLICA {
            tasks.spawn(replica.clone().send_until_over());
        }
        replicas.push(replica);
    }

    let mut samples: Vec<[f64; 2]> = vec![];
    while start.elapsed() < time {
        sleep(Duration::from_millis(fastrand::u64(500..3_000))).await;
        let fault = fail(&mut server, &proxy).await;
        let at = start.elapsed().as_secs();
        if samples.len()
            < (start.elapsed().as_secs_f64() / time.as_secs_f64() * SAMPLES as f64) as usize
        {
            let now = memory(&server);
            let [ours, held] = now;
            println!("{at:4} s  {ours:6.1} MB here, {held:6.1} MB in Redis  last: {fault}");
            samples.push(now);
        }
    }
    seen.is_over.store(true, Relaxed);
    while let Some(task) = tasks.join_next().await {
        task.expect("no task panics");
    }
    let allowed = allowed(start.elapsed());
    for (number, replica) in replicas.iter().enumerate() {
        println!("replica {number}: {:?}", replica.store.health());
    }
    let is_within = report(&seen, allowed);
    is_flat("here", &samples, 0) & is_flat("in Redis", &samples, 1) & is_within
}

fn report(seen: &Seen, allowed: u64) -> bool {
    let mut is_within = true;
    println!(
        "{} denied, {} dropped, {} failed",
        seen.denied.load(Relaxed),
        seen.dropped.load(Relaxed),
        seen.failed.load(Relaxed)
    );
    println!("admitted, of {allowed} that were allowed for each key:");
    for (algorithm, keys) in ALGORITHMS.iter().zip(&seen.admitted) {
        let admitted = keys.each_ref().map(|count| count.load(Relaxed));
        let over: u64 = admitted.iter().map(|count| count.saturating_sub(allowed)).sum();
        println!("{:<15} {admitted:?}, {over} over", algorithm.name());
        is_within &= over == 0 && admitted.iter().all(|count| *count > 0);
    }
    is_within
}

/// Returns true if the last third of the samples is about as large as the middle one.
fn is_flat(what: &str, samples: &[[f64; 2]], column: usize) -> bool {
    let third = samples.len() / 3;
    let mean = |part: &[[f64; 2]]| {
        part.iter().map(|sample| sample[column]).sum::<f64>() / part.len().max(1) as f64
    };
    let (before, last) =
        (mean(&samples[third..2 * third]), mean(&samples[samples.len() - third..]));
    let is_flat = last <= before * FLAT + 1.0;
    println!(
        "{what}: {before:.1} MB in the middle third, {last:.1} MB in the last: {}",
        if is_flat { "flat" } else { "GROWS" }
    );
    is_flat
}

fn main() -> ExitCode {
    let seconds = env::args().skip(1).find_map(|arg| arg.parse().ok()).unwrap_or(600);
    let runtime = Runtime::new().expect("a runtime");
    match runtime.block_on(soak(Duration::from_secs(seconds))) {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}
