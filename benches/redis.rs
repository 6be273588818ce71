//! Compares decisions over Redis with bare commands over the same kind of connection: time, CPU of
//! the server, and memory of the server. `cargo bench --bench redis -- cpu holds` runs two of the
//! parts; `servers` compares the servers whose programs the variable `SERVERS` names.

#![allow(missing_docs, unreachable_pub)]

#[allow(dead_code)]
#[path = "support/interleaved.rs"]
mod interleaved;
#[allow(dead_code)]
#[path = "../tests/support/proxy.rs"]
mod proxy;
#[allow(dead_code)]
#[path = "../tests/support/server.rs"]
mod server;

use std::{
    env, fs,
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};

use interleaved::{Series, interleaved};
use proxy::Proxy;
use redis::{
    Client, Cmd, FromRedisValue, InfoDict,
    aio::{ConnectionManager, ConnectionManagerConfig},
};
use server::RedisServer;
use tokio::{
    runtime::{Builder, Runtime},
    task::JoinSet,
};
use tower_ratelimit::{
    Algorithm, Charge, Limiter, Quota, RedisStore,
    redisson::{RateLimiter, RateLimiterConfig},
};

const ROUNDS: usize = 15;
const CALLS: usize = 1_000;

const TASKS: usize = 256;
const CALLS_PER_TASK: usize = 100;
const FLOOD_CALLS_PER_TASK: usize = 5_000;

/// The requests in flight, and the calls of each, to a server that is far away.
const FAR_TASKS: usize = 16;
const FAR_CALLS: usize = 100;
/// The timers of the proxy count milliseconds.
const FAR: Duration = Duration::from_millis(1);

const MANY_KEYS: usize = 10_000;

const CPU_ROUNDS: usize = 9;
const CPU_CALLS_PER_TASK: usize = 20;

const LOGGED: u32 = 10_000;

/// The callers that wait for permits of a limiter that Redisson shares, and acquire again at once.
const CALLERS: usize = 8;
const WAITING: Duration = Duration::from_secs(20);

/// The ways to decide: one limit, two in one round trip, and two one after the other.
const WAYS: usize = 3;

const PLENTY: Quota = Quota::per_second(1_000_000);

/// Each algorithm admitting and denying, a leaky bucket that delays, a full log, INCREX, and INCR.
const SUBJECTS: usize = 2 * ALGORITHMS.len() + 4;
const INCREX: usize = SUBJECTS - 2;
const INCR: usize = SUBJECTS - 1;

const ALGORITHMS: [Algorithm; 7] = [
    Algorithm::FixedWindow,
    Algorithm::SlidingLog,
    Algorithm::sliding_window(),
    Algorithm::sliding_window().buckets(10),
    Algorithm::sliding_window().buckets(60),
    Algorithm::token_bucket(),
    Algorithm::LeakyBucket,
];

/// A part that compares commands over one server, and its name.
type Part = (&'static str, fn(&Bench));

const PARTS: [Part; 10] = [
    ("latency", Bench::print_latency),
    ("throughput", Bench::print_throughputs),
    ("client", Bench::print_client),
    ("far", Bench::print_far),
    ("denials", Bench::print_denials),
    ("cpu", Bench::print_cpu),
    ("holds", Bench::print_holds),
    ("limits", Bench::print_two_limits),
    ("memory", Bench::print_memory),
    ("redisson", Bench::print_redisson),
];

fn main() -> ExitCode {
    // Cargo adds an option.
    let chosen: Vec<String> = env::args().skip(1).filter(|name| !name.starts_with('-')).collect();
    let names: Vec<_> = PARTS.iter().map(|(name, _)| *name).chain(["servers"]).collect();
    if let Some(name) = chosen.iter().find(|name| !names.contains(&name.as_str())) {
        eprintln!("cannot measure `{name}`: no part has this name; choose of {}", names.join(", "));
        return ExitCode::FAILURE;
    }
    if chosen.iter().any(|name| name == "servers") {
        print_servers();
    }
    let is_chosen = |name: &str| chosen.is_empty() || chosen.iter().any(|other| other == name);
    let parts: Vec<_> = PARTS.iter().filter(|(name, _)| is_chosen(name)).collect();
    if !parts.is_empty() {
        let bench = Bench::new(RedisServer::start());
        parts.iter().for_each(|(_, print)| print(&bench));
    }
    ExitCode::SUCCESS
}

/// The CPU of several servers for the same decisions, beside the first server.
fn print_servers() {
    let programs = env::var("SERVERS").unwrap_or_default();
    let benches: Vec<_> = programs
        .split_whitespace()
        .map(|program| Bench::new(RedisServer::start_program(program.into(), &[])))
        .collect();
    if benches.is_empty() {
        eprintln!("cannot compare servers: `SERVERS` names no program; run `make bench-servers`");
    }
    let versions: Vec<_> = benches.iter().map(Bench::version).collect();
    println!("CPU of the server per decision, us, median of {CPU_ROUNDS} rounds; ratio to the");
    println!("first server, and its middle half: {}", versions.join(", "));
    let rows = [
        ("check, one in flight", 1, Work::Check),
        ("check, 256 in flight", TASKS, Work::Check),
        ("check of a key with a hold, one in flight", 1, Work::CheckBesideHold),
        ("hold and end, 256 in flight", TASKS, Work::HoldAndEnd),
        ("check that must wait, 256 in flight", TASKS, Work::Wait),
        ("INCR, 256 in flight", TASKS, Work::Incr),
    ];
    for (label, tasks, work) in rows {
        let mut series = vec![vec![]; benches.len()];
        for round in 0..CPU_ROUNDS {
            for position in 0..benches.len() {
                let server = (position + round) % benches.len();
                let before = benches[server].cpu().process;
                let decisions = benches[server].work(work, tasks);
                std::thread::sleep(Duration::from_millis(50)); // the ends of holds are sent
                let micros = benches[server].cpu().process - before;
                series[server].push(micros / decisions as f64);
            }
        }
        let series: Vec<Series> = series.into_iter().map(Series::from).collect();
        println!("  {label}");
        for (version, cpu) in versions.iter().zip(&series) {
            let ratio = cpu.ratio_to(&series[0]).summary();
            println!("    {version:<14} {:5.2}  ratio {ratio}", cpu.median());
        }
    }
    for (bench, version) in benches.iter().zip(versions) {
        if let Err(error) = bench.increx() {
            println!("  INCREX on {version} not run: {error}");
        }
    }
}

struct Bench {
    server: RedisServer,
    runtime: Runtime,
    store: RedisStore,
    bare: ConnectionManager,
}

impl Bench {
    fn new(server: RedisServer) -> Self {
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
        let (store, bare) = runtime.block_on(async {
            // Without remembered denials, each check is a call.
            let url = format!("{}?deadline=30s&denial_ttl=0s", server.url());
            let store = RedisStore::connect(&url).await.expect("the server runs");
            (store, connect(&server.url()).await)
        });
        Self { server, runtime, store, bare }
    }

    fn limiter(&self, name: &str, algorithm: Algorithm, quota: Quota) -> Limiter {
        Limiter::new(name, self.store.clone(), algorithm, quota)
    }

    fn print_latency(&self) {
        println!("One request in flight: Limiter::check against the same EVALSHA, token bucket");
        println!(
            "us, median of {CALLS} calls, median of {ROUNDS} rounds; ratio, and its middle half"
        );
        let limiter = self.limiter("latency", Algorithm::token_bucket(), PLENTY);
        let (script, key) = (self.script(&limiter), key(0));
        let mut admitted = [0; 2];
        let [ours, bare] = interleaved(ROUNDS, |which| {
            let (micros, of_them) = self.runtime.block_on(async {
                match which {
                    0 => latency(async || check(&limiter, &key).await).await,
                    _ => {
                        let (mut bare, key) = (self.bare.clone(), script.key_of(&key));
                        latency(async || script.run(&mut bare, &key).await).await
                    }
                }
            });
            admitted[which] += of_them;
            micros
        });
        println!(
            "  limiter {:.1}  EVALSHA {:.1}  ratio {}  admitted of {}: {} / {}",
            ours.median(),
            bare.median(),
            ours.ratio_to(&bare).summary(),
            ROUNDS * CALLS,
            admitted[0],
            admitted[1],
        );
    }

    fn print_throughputs(&self) {
        self.print_throughput(TASKS);
        self.print_throughput(1);
    }

    /// With `keys`, fewer than the requests in flight, several requests have the same key.
    fn print_throughput(&self, keys: usize) {
        println!();
        println!("{TASKS} requests in flight over one connection, token bucket, {keys} keys");
        println!("per second, median of {ROUNDS} rounds; ratio, and its middle half");
        let name = format!("throughput-{keys}");
        let limiter = self.limiter(&name, Algorithm::token_bucket(), PLENTY);
        let script = Arc::new(self.script(&limiter));
        let mut admitted = [0; 3];
        let [ours, eval, incr] = interleaved(ROUNDS, |which| {
            let start = Instant::now();
            admitted[which] += match which {
                0 => self.checks_in_flight(&limiter, keys, CALLS_PER_TASK),
                1 => self.scripts_in_flight(&script),
                _ => self.increments_in_flight(CALLS_PER_TASK),
            };
            (TASKS * CALLS_PER_TASK) as f64 / start.elapsed().as_secs_f64()
        });
        println!(
            "  limiter {:.0}  EVALSHA {:.0}  INCR {:.0}  admitted of {}: {} / {} / {}",
            ours.median(),
            eval.median(),
            incr.median(),
            ROUNDS * TASKS * CALLS_PER_TASK,
            admitted[0],
            admitted[1],
            admitted[2],
        );
        println!("  limiter / EVALSHA {}", ours.ratio_to(&eval).summary());
        println!("  limiter / INCR    {}", ours.ratio_to(&incr).summary());
    }

    fn print_client(&self) {
        println!();
        println!("CPU of the client per decision, with the tasks, {TASKS} in flight, token bucket");
        println!("us, median of {ROUNDS} rounds; ratio, and its middle half");
        let limiter = self.limiter("client", Algorithm::token_bucket(), PLENTY);
        let [many, one, incr] = interleaved(ROUNDS, |which| {
            let before = client_cpu();
            let admitted = match which {
                0 => self.in_flight(|task| {
                    let (limiter, mut call) = (limiter.clone(), 0);
                    often(CALLS_PER_TASK, async move || {
                        call += 1;
                        check(&limiter, &key((task * 7_919 + call * 104_729) % MANY_KEYS)).await
                    })
                }),
                1 => self.checks_in_flight(&limiter, 1, CALLS_PER_TASK),
                _ => self.increments_in_flight(CALLS_PER_TASK),
            };
            assert_eq!(admitted, TASKS * CALLS_PER_TASK);
            (client_cpu() - before) / admitted as f64
        });
        for (label, cpu) in [(format!("{MANY_KEYS} keys"), many), (String::from("one key"), one)] {
            let ratio = cpu.ratio_to(&incr).summary();
            println!("  {label:<10}  {:.2}  ratio to INCR {ratio}", cpu.median());
        }
    }

    fn print_far(&self) {
        println!();
        println!("{FAR_TASKS} requests in flight to a server whose replies take {FAR:?} longer");
        println!(
            "us, mean of the calls, median of {CPU_ROUNDS} rounds; ratio, and its middle half"
        );
        let script = self.script(&self.limiter("far", Algorithm::token_bucket(), PLENTY));
        let (script, proxy) = (Arc::new(script), Proxy::start(&self.server));
        let (store, bare) = self.runtime.block_on(async {
            let url = format!("{}?prefix=far&deadline=30s&denial_ttl=0s", proxy.url());
            let store = RedisStore::connect(&url).await.expect("the server runs");
            (store, connect(&proxy.url()).await)
        });
        let limiter = Limiter::new("default", store, Algorithm::token_bucket(), PLENTY);
        assert!(self.runtime.block_on(check(&limiter, &key(0))));
        proxy.delay_replies(FAR);
        let [ours, eval] = interleaved(CPU_ROUNDS, |which| {
            let start = Instant::now();
            let admitted = match which {
                0 => self.tasks(FAR_TASKS, |task| {
                    let (limiter, key) = (limiter.clone(), key(task));
                    often(FAR_CALLS, async move || check(&limiter, &key).await)
                }),
                _ => self.tasks(FAR_TASKS, |task| {
                    let (mut bare, script) = (bare.clone(), script.clone());
                    let key = script.key_of(&key(task));
                    often(FAR_CALLS, async move || script.run(&mut bare, &key).await)
                }),
            };
            assert_eq!(admitted, FAR_TASKS * FAR_CALLS);
            start.elapsed().as_secs_f64() * 1e6 / FAR_CALLS as f64
        });
        println!(
            "  limiter {:.0}  EVALSHA {:.0}  ratio {}",
            ours.median(),
            eval.median(),
            ours.ratio_to(&eval).summary(),
        );
    }

    fn print_denials(&self) {
        println!();
        println!("A flood of denied requests, {TASKS} in flight, token bucket, {TASKS} keys");
        println!("per second, median of {ROUNDS} rounds; ratio, and its middle half");
        let url = format!("{}?deadline=30s&denial_ttl=1s", self.server.url());
        let store = self.runtime.block_on(RedisStore::connect(&url)).expect("the server runs");
        let once = Quota::per_day(1);
        let remembering = Limiter::new("remembering", store, Algorithm::token_bucket(), once);
        let limiters =
            [remembering, self.limiter("without-memory", Algorithm::token_bucket(), once)];
        let mut commands = [0; 2];
        let [with, without] = interleaved(ROUNDS, |which| {
            // The first check is admitted. The second one is denied by Redis.
            self.checks_in_flight(&limiters[which], TASKS, 2);
            let calls = if which == 0 { FLOOD_CALLS_PER_TASK } else { CALLS_PER_TASK };
            let (start, before) = (Instant::now(), self.server.calls("evalsha"));
            assert_eq!(self.checks_in_flight(&limiters[which], TASKS, calls), 0);
            let elapsed = start.elapsed().as_secs_f64();
            commands[which] += self.server.calls("evalsha") - before;
            (TASKS * calls) as f64 / elapsed
        });
        println!(
            "  remembered {:.0}  by Redis {:.0}  ratio {}",
            with.median(),
            without.median(),
            with.ratio_to(&without).summary(),
        );
        println!(
            "  commands: {} for {} decisions, and {} for {}",
            commands[0],
            ROUNDS * TASKS * FLOOD_CALLS_PER_TASK,
            commands[1],
            ROUNDS * TASKS * CALLS_PER_TASK,
        );
    }

    fn print_cpu(&self) {
        println!();
        println!("CPU of the server per decision, {TASKS} in flight");
        println!("us, median of {CPU_ROUNDS} rounds; ratio to INCR, and its middle half");
        let subjects = self.subjects();
        let increx = self.increx();
        let (mut admitted, mut main_thread) = ([0; SUBJECTS], [0.0; SUBJECTS]);
        let series: [Series; SUBJECTS] = interleaved(CPU_ROUNDS, |which| {
            let before = self.cpu();
            admitted[which] += match subjects.get(which) {
                Some(Subject { limiter, keys, .. }) => {
                    self.checks_in_flight(limiter, *keys, CPU_CALLS_PER_TASK)
                }
                None if which == INCREX && increx.is_err() => return f64::NAN,
                None if which == INCREX => self.increx_in_flight(),
                None => self.increments_in_flight(CPU_CALLS_PER_TASK),
            };
            let after = self.cpu();
            let decisions = (TASKS * CPU_CALLS_PER_TASK) as f64;
            main_thread[which] +=
                (after.main_thread - before.main_thread) / decisions / CPU_ROUNDS as f64;
            (after.process - before.process) / decisions
        });
        if let Err(error) = &increx {
            println!("  INCREX, a fixed window: not run: {error}");
        }
        for (which, cpu) in series.iter().enumerate() {
            if which == INCREX && increx.is_err() {
                continue;
            }
            let bare = if which == INCREX { "INCREX, a fixed window" } else { "INCR" };
            println!(
                "  {:<34} {:5.2}  (main thread, mean: {:5.2})  ratio {}  admitted of {}: {}",
                subjects.get(which).map_or(bare, |subject| &subject.label),
                cpu.median(),
                main_thread[which],
                cpu.ratio_to(&series[INCR]).summary(),
                CPU_ROUNDS * TASKS * CPU_CALLS_PER_TASK,
                admitted[which],
            );
        }
    }

    fn subjects(&self) -> Vec<Subject> {
        let mut subjects = Vec::new();
        let subject = |label: String, algorithm, quota, keys| {
            let limiter = self.limiter(&label.replace([' ', ','], "-"), algorithm, quota);
            Subject { label, limiter, keys }
        };
        for algorithm in ALGORITHMS {
            let label = format!("{}, admitted", name(algorithm));
            subjects.push(subject(label, algorithm, PLENTY, TASKS));
            let denying = subject(
                format!("{}, denied", name(algorithm)),
                algorithm,
                Quota::per_hour(1),
                TASKS,
            );
            self.checks_in_flight(&denying.limiter, TASKS, 1);
            subjects.push(denying);
        }
        let slow = Quota::per_second(1).burst(1_000_000);
        let delaying = "leaky-bucket, admitted and delayed".to_owned();
        subjects.push(subject(delaying, Algorithm::LeakyBucket, slow, TASKS));
        let label = format!("sliding-log of {LOGGED}, denied");
        let full = subject(label, Algorithm::SlidingLog, Quota::per_hour(LOGGED.into()), 1);
        self.log(&full.limiter);
        subjects.push(full);
        subjects
    }

    fn print_two_limits(&self) {
        println!();
        println!("Two limits in one round trip against one limit: a token bucket for each user");
        for (label, shared) in [
            ("and a sliding window for the same user", None),
            ("and a sliding window for all users together", Some("all")),
        ] {
            println!("  {label}");
            let prefix = if shared.is_some() { "different" } else { "same" };
            let limiter =
                |name, algorithm| self.limiter(&format!("{prefix}-{name}"), algorithm, PLENTY);
            let user = limiter("user", Algorithm::token_bucket());
            let other = limiter("other", Algorithm::sliding_window());
            let pair = Pair { user, other, shared };
            self.print_pair_latency(&pair);
            self.print_pair_cpu(&pair);
        }
    }

    fn print_pair_latency(&self, pair: &Pair) {
        let (key, mut admitted) = (key(0), [0; WAYS]);
        let [one, combined, separate] = interleaved(ROUNDS, |way| {
            let calls = latency(async || pair.check(way, &key).await);
            let (micros, of_them) = self.runtime.block_on(calls);
            admitted[way] += of_them;
            micros
        });
        println!(
            "    one request in flight, us: one {:.1}  two combined {:.1}  two separate {:.1}  \
             admitted of {}: {admitted:?}",
            one.median(),
            combined.median(),
            separate.median(),
            ROUNDS * CALLS,
        );
        print_pair_ratios(&one, &combined, &separate);
    }

    fn print_pair_cpu(&self, pair: &Pair) {
        let mut admitted = [0; WAYS];
        let [one, combined, separate] = interleaved(CPU_ROUNDS, |way| {
            let before = self.cpu();
            admitted[way] += self.in_flight(|task| {
                let (pair, key) = (pair.clone(), key(task));
                often(CPU_CALLS_PER_TASK, async move || pair.check(way, &key).await)
            });
            (self.cpu().process - before.process) / (TASKS * CPU_CALLS_PER_TASK) as f64
        });
        println!(
            "    CPU of the server per request, {TASKS} in flight, us: one {:.2}  \
             two combined {:.2}  two separate {:.2}  admitted of {}: {admitted:?}",
            one.median(),
            combined.median(),
            separate.median(),
            CPU_ROUNDS * TASKS * CPU_CALLS_PER_TASK,
        );
        print_pair_ratios(&one, &combined, &separate);
    }

    /// A hold and its end, beside a check that takes the way of the engine.
    fn print_holds(&self) {
        println!();
        println!(
            "CPU of the server, us, {TASKS} in flight, {MANY_KEYS} keys: a hold and its end, \
             beside a check that may wait"
        );
        for (algorithm, quota, keys) in [
            (Algorithm::token_bucket(), PLENTY, MANY_KEYS),
            (Algorithm::FixedWindow, PLENTY, MANY_KEYS),
            (Algorithm::SlidingLog, Quota::per_hour(1_000_000), 1),
        ] {
            let label = format!("held-{}", name(algorithm).replace([' ', ','], "-"));
            let limiter = self.limiter(&label, algorithm, quota);
            if keys == 1 {
                self.log(&limiter);
            }
            let mut admitted = [0; 2];
            let [check, hold] = interleaved(CPU_ROUNDS, |way| {
                let before = self.cpu();
                admitted[way] += self.in_flight(|_| {
                    let limiter = limiter.clone();
                    often(CPU_CALLS_PER_TASK, async move || {
                        let key = key(fastrand::usize(..keys));
                        match way {
                            0 => {
                                let wait = Duration::from_secs(1);
                                let checked = limiter.reserve(&*key, 1, wait).await.unwrap();
                                checked.keep().is_allowed()
                            }
                            _ => {
                                let held = limiter.hold(&*key, 1).await.unwrap();
                                held.admitted().map(|permit| permit.settle(1)).is_some()
                            }
                        }
                    })
                });
                std::thread::sleep(Duration::from_millis(50)); // the ends are sent
                (self.cpu().process - before.process) / (TASKS * CPU_CALLS_PER_TASK) as f64
            });
            println!(
                "  {:<20} check {:.2}  hold and end {:.2}  ratio {}  admitted of {}: {admitted:?}",
                name(algorithm),
                check.median(),
                hold.median(),
                hold.ratio_to(&check).summary(),
                CPU_ROUNDS * TASKS * CPU_CALLS_PER_TASK,
            );
        }
    }

    fn print_memory(&self) {
        println!();
        println!("Bytes per key in Redis (MEMORY USAGE), after one admitted request");
        for algorithm in ALGORITHMS {
            let limiter = self.limiter("default", algorithm, Quota::per_hour(1_000_000));
            // Redis reuses the memory of a longer argument for the first value of a script.
            for _ in 0..2 {
                self.query::<()>("FLUSHALL");
                assert!(self.runtime.block_on(check(&limiter, &key(0))));
            }
            let (key, one) = self.only_key();
            print!("  {:<20} {one:4}  of which the key's name {}", name(algorithm), key.len());
            if algorithm == Algorithm::SlidingLog {
                self.log(&limiter);
                let more = self.only_key().1 - one;
                print!("; per logged request {:.1}", more as f64 / f64::from(LOGGED));
            }
            println!();
        }
    }

    fn print_redisson(&self) {
        println!();
        println!(
            "redisson::RateLimiter against a sliding log, {TASKS} requests in flight for one key"
        );
        println!("per second, median of {CPU_ROUNDS} rounds; ratio, and its middle half");
        let log = self.limiter("beside-redisson", Algorithm::SlidingLog, PLENTY);
        let shared = RateLimiter::new(self.store.clone(), "shared-with-java");
        let rate = PLENTY.limit();
        let set = shared.set_rate(RateLimiterConfig::overall(rate, PLENTY.window()));
        self.runtime.block_on(set).expect("the server answers");
        let mut admitted = [0; 2];
        let [redisson, ours] = interleaved(CPU_ROUNDS, |which| {
            let start = Instant::now();
            admitted[which] += match which {
                0 => self.in_flight(|_| {
                    let shared = shared.clone();
                    often(CPU_CALLS_PER_TASK, async move || acquire(&shared).await)
                }),
                _ => self.checks_in_flight(&log, 1, CPU_CALLS_PER_TASK),
            };
            (TASKS * CPU_CALLS_PER_TASK) as f64 / start.elapsed().as_secs_f64()
        });
        println!(
            "  redisson {:.0}  sliding-log {:.0}  ratio {}  admitted of {}: {} / {}",
            redisson.median(),
            ours.median(),
            redisson.ratio_to(&ours).summary(),
            CPU_ROUNDS * TASKS * CPU_CALLS_PER_TASK,
            admitted[0],
            admitted[1],
        );
        println!("  bytes per permit: {:.1}", self.bytes_per_permit());
        self.print_waits();
    }

    /// The longest wait of callers that compete for permits. Each store has a queue of its own, so
    /// two stores wait as two processes do.
    fn print_waits(&self) {
        println!("  longest wait of {CALLERS} callers that acquire again at once, {WAITING:?}");
        for (rate, interval) in [(20, 1_000), (1, 50)] {
            for stores in [1, 2] {
                let (longest, served) = self.longest_wait(stores, rate, interval);
                println!(
                    "    {rate} per {interval} ms, {stores} stores: {longest:.2} s, {served} served"
                );
            }
        }
    }

    fn longest_wait(&self, stores: usize, rate: u64, interval: u64) -> (f64, usize) {
        self.query::<()>("FLUSHALL");
        self.runtime.block_on(async {
            let mut limiters = Vec::new();
            for _ in 0..stores {
                let url = format!("{}?deadline=30s", self.server.url());
                let store = RedisStore::connect(&url).await.expect("a server");
                let limiter = RateLimiter::new(store, "waiting");
                let interval = Duration::from_millis(interval);
                let set = limiter.try_set_rate(RateLimiterConfig::overall(rate, interval)).await;
                set.expect("the server answers");
                limiters.push(limiter);
            }
            let (mut callers, end) = (JoinSet::new(), Instant::now() + WAITING);
            for caller in 0..CALLERS {
                let limiter = limiters[caller % stores].clone();
                callers.spawn(async move {
                    let (mut longest, mut served) = (Duration::ZERO, 0);
                    while Instant::now() < end {
                        let start = Instant::now();
                        let _ = limiter.acquire(1).await.expect("the server answers");
                        (longest, served) = (longest.max(start.elapsed()), served + 1);
                    }
                    (longest.as_secs_f64(), served)
                });
            }
            let callers = callers.join_all().await;
            let longest = callers.iter().map(|(longest, _)| *longest).fold(0.0, f64::max);
            (longest, callers.iter().map(|(_, served)| served).sum())
        })
    }

    /// The bytes per permit of a limiter that Redisson shares.
    fn bytes_per_permit(&self) -> f64 {
        self.query::<()>("FLUSHALL");
        let shared = RateLimiter::new(self.store.clone(), "shared-with-java");
        self.runtime.block_on(async {
            let (rate, hour) = (u64::from(2 * LOGGED), Duration::from_secs(3_600));
            shared
                .set_rate(RateLimiterConfig::overall(rate, hour))
                .await
                .expect("the server answers");
            assert!(acquire(&shared).await);
        });
        let bytes = || self.query::<u64>("MEMORY USAGE {shared-with-java}:permits SAMPLES 0");
        let one = bytes();
        let acquires = often(LOGGED as usize, async || acquire(&shared).await);
        assert_eq!(self.runtime.block_on(acquires), LOGGED as usize);
        (bytes() - one) as f64 / f64::from(LOGGED)
    }

    /// Admits requests of one key, which add `LOGGED` entries to a sliding log.
    fn log(&self, limiter: &Limiter) {
        let key = key(0);
        let checks = often(LOGGED as usize, async || check(limiter, &key).await);
        assert_eq!(self.runtime.block_on(checks), LOGGED as usize);
    }

    fn checks_in_flight(&self, limiter: &Limiter, keys: usize, calls: usize) -> usize {
        self.in_flight(|task| {
            let (limiter, key) = (limiter.clone(), key(task % keys));
            often(calls, async move || check(&limiter, &key).await)
        })
    }

    fn scripts_in_flight(&self, script: &Arc<Script>) -> usize {
        self.in_flight(|task| {
            let (mut bare, script, key) =
                (self.bare.clone(), script.clone(), script.key_of(&key(task)));
            often(CALLS_PER_TASK, async move || script.run(&mut bare, &key).await)
        })
    }

    fn increments_in_flight(&self, calls: usize) -> usize {
        self.in_flight(|task| {
            let (mut bare, key) = (self.bare.clone(), key(task));
            often(calls, async move || {
                let count: u64 = query(&mut bare, redis::cmd("INCR").arg(&key)).await;
                count > 0
            })
        })
    }

    /// Returns the reason if the server does not have the command.
    fn increx(&self) -> Result<(), String> {
        let reply = increx("increx").query::<(u64, u64)>(&mut self.server.connection());
        reply.map(|_| ()).map_err(|error| error.to_string())
    }

    fn increx_in_flight(&self) -> usize {
        self.in_flight(|task| {
            let (mut bare, key) = (self.bare.clone(), format!("increx-{}", key(task)));
            often(CPU_CALLS_PER_TASK, async move || {
                let (_, applied): (u64, u64) = query(&mut bare, &increx(&key)).await;
                applied == 1
            })
        })
    }

    /// Makes as many decisions, whatever the number of tasks. Returns how many were admitted.
    fn work(&self, work: Work, tasks: usize) -> usize {
        let calls = CPU_CALLS_PER_TASK * TASKS / tasks;
        let (name, quota) = match work {
            Work::Incr => return self.increments_in_flight(CPU_CALLS_PER_TASK),
            Work::Wait => ("servers-wait", Quota::per_second(100).burst(1)),
            _ => ("servers", PLENTY),
        };
        let limiter = self.limiter(name, Algorithm::token_bucket(), quota);
        let hold = async || limiter.hold(&*key(0), 1).await.expect("the server answers");
        let held = matches!(work, Work::CheckBesideHold).then(|| self.runtime.block_on(hold()));
        let admitted = self.tasks(tasks, |task| {
            let (limiter, key) = (limiter.clone(), key(task));
            often(calls, async move || work.decide(&limiter, &key).await)
        });
        self.runtime.block_on(async { drop(held) });
        admitted
    }

    fn version(&self) -> String {
        let info: InfoDict = self.query("INFO server");
        let of = |name: &str| info.get::<String>(name);
        let name = of("server_name").map_or("Redis", |_| "Valkey");
        format!("{name} {}", of("valkey_version").or(of("redis_version")).unwrap_or_default())
    }

    /// Runs a task for each of the requests in flight. Returns the number of admitted requests.
    fn in_flight<F>(&self, work: impl Fn(usize) -> F) -> usize
    where
        F: Future<Output = usize> + Send + 'static,
    {
        self.tasks(TASKS, work)
    }

    fn tasks<F>(&self, count: usize, work: impl Fn(usize) -> F) -> usize
    where
        F: Future<Output = usize> + Send + 'static,
    {
        self.runtime.block_on(async {
            let tasks: JoinSet<usize> = (0..count).map(work).collect();
            tasks.join_all().await.into_iter().sum()
        })
    }

    /// The script that the limiter sends, from the slow log of the server.
    fn script(&self, limiter: &Limiter) -> Script {
        // The first check may load the script.
        self.query::<()>("CONFIG SET slowlog-log-slower-than 0");
        self.runtime.block_on(often(2, async || check(limiter, &key(0)).await));
        self.query::<()>("CONFIG SET slowlog-log-slower-than -1");
        type Entry = (u64, u64, u64, Vec<Vec<u8>>, Vec<u8>, Vec<u8>);
        let log: Vec<Entry> = self.query("SLOWLOG GET");
        let sent = log.into_iter().map(|entry| entry.3).find(|args| args[0] == b"EVALSHA");
        Script { sent: sent.expect("a limiter runs a script") }
    }

    fn cpu(&self) -> Cpu {
        let info: InfoDict = self.query("INFO cpu");
        let micros = |name: &str| info.get::<f64>(name).unwrap_or_default() * 1e6;
        Cpu {
            process: micros("used_cpu_user") + micros("used_cpu_sys"),
            main_thread: micros("used_cpu_user_main_thread") + micros("used_cpu_sys_main_thread"),
        }
    }

    /// The only key, and the size of its value in bytes.
    fn only_key(&self) -> (String, u64) {
        let keys: Vec<String> = self.query("KEYS *");
        let [key] = keys.try_into().expect("one key");
        let bytes = self.query(&format!("MEMORY USAGE {key} SAMPLES 0"));
        (key, bytes)
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

/// What the servers do that are compared.
#[derive(Clone, Copy)]
enum Work {
    Check,
    CheckBesideHold,
    HoldAndEnd,
    Wait,
    Incr,
}

impl Work {
    async fn decide(self, limiter: &Limiter, key: &str) -> bool {
        match self {
            Self::HoldAndEnd => {
                let held = limiter.hold(key, 1).await.expect("the server answers");
                held.admitted().map(|permit| permit.settle(1)).is_some()
            }
            Self::Wait => {
                let hour = Duration::from_secs(3_600);
                let checked = limiter.reserve(key, 1, hour).await.expect("the server answers");
                checked.keep().is_allowed()
            }
            _ => check(limiter, key).await,
        }
    }
}

struct Subject {
    label: String,
    limiter: Limiter,
    keys: usize,
}

/// The limits of a request: one for its user, and one for the user or for all.
#[derive(Clone)]
struct Pair {
    user: Limiter,
    other: Limiter,
    shared: Option<&'static str>,
}

impl Pair {
    async fn check(&self, way: usize, user: &str) -> bool {
        let other = self.shared.unwrap_or(user);
        match way {
            0 => check(&self.user, user).await,
            1 => {
                let charge = Charge::new(&self.user, user);
                let charge = match self.shared {
                    Some(all) => charge.and(Charge::new(&self.other, all)),
                    None => charge.also(&self.other),
                };
                charge.check().await.expect("the server answers").is_allowed()
            }
            _ => check(&self.user, user).await && check(&self.other, other).await,
        }
    }
}

/// In microseconds.
struct Cpu {
    process: f64,
    /// 0 if the server does not report it.
    main_thread: f64,
}

/// The words of an EVALSHA.
struct Script {
    sent: Vec<Vec<u8>>,
}

impl Script {
    /// The key in Redis for `key`.
    fn key_of(&self, key: &str) -> String {
        String::from_utf8_lossy(&self.sent[3]).replace(&self::key(0), key)
    }

    async fn run(&self, connection: &mut ConnectionManager, key: &str) -> bool {
        let mut cmd = redis::cmd("EVALSHA");
        cmd.arg(&self.sent[1]).arg(&self.sent[2]).arg(key);
        for arg in &self.sent[4..] {
            cmd.arg(arg);
        }
        let (_, found): (u64, Vec<u8>) = query(connection, &cmd).await;
        // The request was admitted if the bucket had a token: its debt follows the first 12 bytes.
        let number = |bytes: &[u8]| f64::from_le_bytes(bytes.try_into().unwrap());
        let debt = found.get(12..20).map_or(0.0, number);
        debt < PLENTY.limit() as f64
    }
}

/// Connects as the store does.
async fn connect(url: &str) -> ConnectionManager {
    let client = Client::open(format!("{url}?protocol=resp3")).expect("a URL");
    let config = ConnectionManagerConfig::new().set_response_timeout(None);
    ConnectionManager::new_with_config(client, config).await.expect("the server runs")
}

async fn query<T: FromRedisValue>(connection: &mut ConnectionManager, cmd: &Cmd) -> T {
    cmd.query_async(connection).await.expect("the server answers")
}

async fn check(limiter: &Limiter, key: &str) -> bool {
    limiter.check(key).await.expect("the server answers").is_allowed()
}

async fn acquire(limiter: &RateLimiter) -> bool {
    limiter.try_acquire(1, Duration::ZERO).await.expect("the server answers").is_allowed()
}

/// The command that counts in a window of an hour that opens with its first request.
fn increx(key: &str) -> Cmd {
    let mut command = redis::cmd("INCREX");
    command.arg(key).arg(&["UBOUND", "1000000", "EX", "3600", "ENX"]);
    command
}

/// Makes calls one after the other, and counts those that were admitted.
async fn often(calls: usize, mut call: impl AsyncFnMut() -> bool) -> usize {
    let mut admitted = 0;
    for _ in 0..calls {
        admitted += usize::from(call().await);
    }
    admitted
}

/// Returns the CPU time of this thread, in microseconds; 0 if the system does not report it.
fn client_cpu() -> f64 {
    let times = fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    times.split(' ').next().and_then(|time| time.parse::<f64>().ok()).unwrap_or_default() / 1e3
}

/// The median time of a call in microseconds, and the number of admitted calls.
async fn latency(mut call: impl AsyncFnMut() -> bool) -> (f64, usize) {
    let mut times = Vec::with_capacity(CALLS);
    let admitted = often(CALLS, async || {
        let start = Instant::now();
        let admitted = call().await;
        times.push(start.elapsed());
        admitted
    })
    .await;
    times.sort();
    (times[CALLS / 2].as_secs_f64() * 1e6, admitted)
}

fn print_pair_ratios(one: &Series, combined: &Series, separate: &Series) {
    println!("      two combined / one          {}", combined.ratio_to(one).summary());
    println!("      two combined / two separate {}", combined.ratio_to(separate).summary());
}

fn name(algorithm: Algorithm) -> String {
    match algorithm {
        Algorithm::SlidingWindow { buckets, .. } => format!("{algorithm}/{buckets}"),
        other => other.to_string(),
    }
}

fn key(task: usize) -> String {
    format!("user-{task:06}")
}
