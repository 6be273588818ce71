//! Callers in several processes that share the units of one key: how much of the time places are in
//! use, how long the callers wait, and for how long a process gets none. The processes are real:
//! the bench starts itself. `cargo bench --bench concurrency -- WORD` measures the rows that
//! contain the word.

#![allow(missing_docs, unreachable_pub)]

#[allow(dead_code)]
#[path = "../tests/support/server.rs"]
mod server;

use std::{
    env,
    fmt::Display,
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use server::RedisServer;
use tokio::{
    runtime::{Builder, Runtime},
    task::JoinSet,
    time::{self, sleep, timeout},
};
use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, RedisStore};

const LONG: Duration = Duration::from_secs(60);
const MEASURED: Duration = Duration::from_secs(20);
/// The processes start one after the other, and end one after the other.
const MARGIN: Duration = Duration::from_secs(2);
/// The first argument of a process that the bench starts.
const CALLERS: &str = "callers";

/// The work of a row.
#[derive(Clone, Copy)]
struct Work {
    processes: u64,
    /// In each process.
    callers: u64,
    /// The places of a limit on concurrency, or the units per second of a bucket.
    limit: u64,
    /// The burst of the bucket; 0 if places are held.
    burst: u64,
    cost: u64,
    /// How long a caller keeps what it has taken, in milliseconds.
    time: u64,
}

impl Work {
    fn arguments(self) -> [u64; 6] {
        [self.processes, self.callers, self.limit, self.burst, self.cost, self.time]
    }

    fn from_arguments([processes, callers, limit, burst, cost, time]: [u64; 6]) -> Self {
        Self { processes, callers, limit, burst, cost, time }
    }

    fn limiter(self, store: RedisStore) -> Limiter {
        match self.burst {
            0 => {
                let quota = Quota::concurrent(self.limit);
                Limiter::new("places", store, Algorithm::concurrency(), quota)
            }
            burst => {
                let quota = Quota::per_second(self.limit).burst(burst);
                Limiter::new("tokens", store, Algorithm::token_bucket(), quota)
            }
        }
    }

    fn time(self) -> Duration {
        Duration::from_millis(self.time)
    }
}

fn main() {
    let args: Vec<String> = env::args().skip(1).filter(|arg| arg != "--bench").collect();
    if let [role, url, rest @ ..] = &args[..]
        && role == CALLERS
    {
        let numbers: Vec<u64> = rest.iter().map(|arg| arg.parse().expect("a number")).collect();
        return call(url, Work::from_arguments(numbers.try_into().expect("six numbers")));
    }
    let is_wanted = |row: &str| args.is_empty() || args.iter().any(|word| row.contains(word));
    println!("Callers that keep a place and ask again at once, for {MEASURED:?}");
    println!("fair: the time in which each caller is served once, without a pause");
    println!(
        "  {:<44} {:>8} {:>9} {:>12} {:>10} {:>10} {:>12}",
        "", "in use", "at most", "longest wait", "x fair", "p50, ms", "calls per s"
    );
    for time in [1, 10, 50] {
        for (processes, callers, limit) in
            [(1, 1, 1), (1, 2, 1), (2, 1, 1), (2, 4, 1), (4, 4, 1), (1, 8, 1), (2, 8, 4)]
        {
            let row = format!("{processes} x {callers} callers, {limit} places for {time} ms");
            if is_wanted(&row) {
                let work = Work { processes, callers, limit, burst: 0, cost: 1, time };
                measure_places(&row, work);
            }
        }
    }
    println!("Processes with a caller each that hold units of a rate, and use all of them");
    println!("fair: the time in which each process is served once");
    for (limit, burst, cost, time) in
        [(10, 10, 5, 100), (10, 10, 5, 500), (20, 20, 10, 50), (100, 100, 10, 50)]
    {
        let row = format!("4 x 1 callers, {cost} of {limit}/s for {time} ms");
        if is_wanted(&row) {
            measure_rate(&row, Work { processes: 4, callers: 1, limit, burst, cost, time });
        }
    }
    println!("Clients that arrive 30 times per second for 20, and leave after a second");
    for processes in [1, 2] {
        let row = format!("impatient clients of {processes} processes");
        if is_wanted(&row) {
            measure_impatient(&row, processes);
        }
    }
    println!("10,000 requests that wait for one place in memory, and return it at once");
    let row = "handed over";
    if is_wanted(row) {
        measure_hand_over(row);
    }
    println!("A place that another process returns, after a wait");
    for wait in [20, 100, 400, 1_500] {
        let row = format!("a return seen after {wait} ms");
        if is_wanted(&row) {
            measure_seen(&row, Duration::from_millis(wait));
        }
    }
}

/// One use of units, in microseconds since 1970.
#[derive(Clone, Copy)]
struct Used {
    asked: u64,
    from: u64,
    to: u64,
}

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().expect("a runtime")
}

/// Takes units and returns them. Prints each use.
fn call(url: &str, work: Work) {
    let uses: Vec<Used> = runtime().block_on(async {
        let store = RedisStore::connect(url).await.expect("the server runs");
        let limiter = work.limiter(store);
        let end = Instant::now() + MEASURED + 2 * MARGIN;
        let mut tasks = JoinSet::new();
        for _ in 0..work.callers {
            let limiter = limiter.clone();
            tasks.spawn(async move {
                let mut uses = vec![];
                while Instant::now() < end {
                    let asked = now();
                    let permit = limiter.hold("key", work.cost).max_wait(LONG).await;
                    let permit =
                        permit.expect("the server answers").admitted().expect("units are free");
                    let from = now();
                    sleep(work.time()).await;
                    uses.push(Used { asked, from, to: now() });
                    drop(permit);
                }
                uses
            });
        }
        let uses = tasks.join_all().await.concat();
        sleep(MARGIN).await; // the last ends reach Redis
        uses
    });
    for Used { asked, from, to } in uses {
        println!("{asked} {from} {to}");
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock after 1970").as_micros() as u64
}

/// What the processes of a row have done.
struct Done {
    /// The uses of each process.
    uses: Vec<Vec<Used>>,
    start: u64,
    end: u64,
    calls_per_second: f64,
}

fn run(work: Work) -> Done {
    let server = RedisServer::start();
    let url = format!("{}?deadline=30s", server.url());
    let own = env::current_exe().expect("a program");
    let start = || {
        let mut command = Command::new(&own);
        command.args([CALLERS, &url]).args(work.arguments().map(|number| number.to_string()));
        command.stdout(Stdio::piped()).spawn().expect("a process")
    };
    let calls = server.calls("evalsha");
    let children: Vec<Child> = (0..work.processes).map(|_| start()).collect();
    let start = now() + MARGIN.as_micros() as u64;
    let uses = children.into_iter().map(read_uses).collect();
    let calls = server.calls("evalsha") - calls;
    let calls_per_second = calls as f64 / (MEASURED + 2 * MARGIN).as_secs_f64();
    Done { uses, start, end: start + MEASURED.as_micros() as u64, calls_per_second }
}

fn measure_places(row: &str, work: Work) {
    let Done { uses, start, end, calls_per_second } = run(work);
    let uses = uses.concat();
    let (in_use, at_most) = in_use(&uses, start, end);
    let inside = uses.iter().filter(|used| used.to > start && used.from < end);
    let mut waits: Vec<u64> = inside.map(|used| used.from - used.asked).collect();
    waits.sort_unstable();
    let longest = waits.last().copied().unwrap_or_default();
    let fair = work.time * 1_000 * work.processes * work.callers / work.limit;
    println!(
        "  {row:<44} {:>6.1} % {at_most:>9} {:>9.1} ms {:>10.2} {:>10.1} {calls_per_second:>12.0}",
        100.0 * in_use as f64 / (end - start) as f64 / work.limit as f64,
        longest as f64 / 1_000.0,
        longest as f64 / fair as f64,
        waits.get(waits.len() / 2).copied().unwrap_or_default() as f64 / 1_000.0,
    );
}

fn measure_rate(row: &str, work: Work) {
    let Done { uses, start, end, calls_per_second } = run(work);
    // The burst has been used.
    let start = start + (end - start) / 4;
    let inside = |used: &&Used| used.from > start && used.from < end;
    let used: usize = uses.iter().map(|uses| uses.iter().filter(inside).count()).sum();
    let gaps = uses.iter().map(|uses| {
        let inside = uses.iter().filter(inside).map(|used| used.from);
        let instants: Vec<u64> = [start].into_iter().chain(inside).chain([end]).collect();
        instants.windows(2).map(|both| both[1] - both[0]).max().unwrap_or_default()
    });
    let longest = gaps.max().unwrap_or_default() as f64 / 1e6;
    let fair = (work.processes * work.cost) as f64 / work.limit as f64;
    let per_second = (used as u64 * work.cost) as f64 / ((end - start) as f64 / 1e6);
    println!(
        "  {row:<44} {per_second:.1} units per s, longest gap {longest:.2} s, {:.2} x fair, \
         {calls_per_second:.0} calls per s",
        longest / fair,
    );
}

fn read_uses(mut child: Child) -> Vec<Used> {
    let output = BufReader::new(child.stdout.take().expect("a pipe"));
    let uses = output.lines().map(|line| {
        let line = line.expect("text");
        let mut words = line.split(' ').map(|word| word.parse().expect("a number"));
        let mut word = || words.next().expect("three numbers");
        Used { asked: word(), from: word(), to: word() }
    });
    let uses = uses.collect();
    assert!(child.wait().expect("a process").success());
    uses
}

/// Returns the time for which places are in use, each counted, and the most in use at once.
fn in_use(uses: &[Used], start: u64, end: u64) -> (u64, i64) {
    let within = |time: u64| time.clamp(start, end);
    let time = uses.iter().map(|used| within(used.to) - within(used.from)).sum();
    // Of two changes at one instant, the end comes first.
    let mut changes: Vec<(u64, i64)> =
        uses.iter().flat_map(|used| [(used.from, 1), (used.to, -1)]).collect();
    changes.sort_unstable();
    let sums = changes.iter().scan(0, |sum, (_, change)| {
        *sum += change;
        Some(*sum)
    });
    (time, sums.max().unwrap_or_default())
}

/// Connects a store for each process, with its own lines and reservations.
async fn stores(server: &RedisServer, processes: usize) -> Vec<RedisStore> {
    let url = format!("{}?deadline=30s", server.url());
    let mut stores = vec![];
    for _ in 0..processes {
        stores.push(RedisStore::connect(&url).await.expect("the server runs"));
    }
    stores
}

/// Lets many requests wait for one place in memory, each of which returns it at once.
fn measure_hand_over(row: &str) {
    const WAITING: u32 = 10_000;
    const ROUNDS: usize = 9;
    let mut times: Vec<Duration> = vec![];
    for _ in 0..ROUNDS {
        times.push(runtime().block_on(async {
            let quota = Quota::concurrent(1);
            let store = MemoryStore::new();
            let limiter = Limiter::new("places", store, Algorithm::concurrency(), quota);
            let first = limiter.hold("key", 1).await.expect("memory answers");
            let mut waiting = JoinSet::new();
            for _ in 0..WAITING {
                let limiter = limiter.clone();
                waiting.spawn(async move {
                    let permit = limiter.hold("key", 1).max_wait(LONG).await;
                    drop(permit.expect("memory answers").admitted().expect("its turn comes"));
                });
            }
            sleep(Duration::from_millis(500)).await; // all of them stand in the line
            let begin = Instant::now();
            drop(first);
            waiting.join_all().await;
            begin.elapsed() / WAITING
        }));
    }
    times.sort_unstable();
    let micros = |time: Duration| time.as_secs_f64() * 1e6;
    let (median, shortest) = (micros(times[ROUNDS / 2]), micros(times[0]));
    println!("  {row:<44} p50 {median:.2} us, shortest {shortest:.2} us each");
}

fn measure_impatient(row: &str, processes: usize) {
    const SETTLED: Duration = Duration::from_secs(5);
    let server = RedisServer::start();
    let served = runtime().block_on(async {
        let quota = Quota::per_second(20).burst(1);
        let stores = stores(&server, processes).await;
        let new = |store| Limiter::new("vendor", store, Algorithm::token_bucket(), quota);
        let limiters: Vec<Limiter> = stores.into_iter().map(new).collect();
        let served = Arc::<AtomicU64>::default();
        let (begin, mut clients) = (Instant::now(), JoinSet::new());
        let mut arrivals = time::interval(Duration::from_secs(1) / 30);
        for limiter in limiters.iter().cycle() {
            arrivals.tick().await;
            if begin.elapsed() > SETTLED + MEASURED {
                break;
            }
            let (limiter, served) = (limiter.clone(), served.clone());
            clients.spawn(timeout(Duration::from_secs(1), async move {
                let wait = Duration::from_secs(10);
                let decision = limiter.try_acquire("key", 1, wait).await;
                if decision.expect("the server answers").is_allowed() && begin.elapsed() > SETTLED {
                    served.fetch_add(1, Relaxed);
                }
            }));
        }
        clients.join_all().await;
        served.load(Relaxed)
    });
    println!("  {row:<44} {:.1} per s are served", served as f64 / MEASURED.as_secs_f64());
}

fn measure_seen(row: &str, wait: Duration) {
    const TIMES: usize = 20;
    let server = RedisServer::start();
    let mut seen: Vec<Duration> = runtime().block_on(async {
        let quota = Quota::concurrent(1);
        let new = |store| Limiter::new("places", store, Algorithm::concurrency(), quota);
        let limiters: Vec<Limiter> = stores(&server, 2).await.into_iter().map(new).collect();
        let mut seen = vec![];
        for number in 0..TIMES {
            let key = number.to_string();
            let permit = limiters[0].hold(&*key, 1).await.expect("the server answers");
            let permit = permit.admitted().expect("it is free");
            let other = limiters[1].clone();
            let waiting = tokio::spawn(async move {
                let permit = other.hold(&*key, 1).max_wait(LONG).await.expect("the server answers");
                (permit.admitted().expect("it is free"), Instant::now())
            });
            sleep(wait).await;
            let returned = Instant::now();
            drop(permit);
            let (permit, taken) = waiting.await.expect("it takes the place");
            seen.push(taken - returned);
            drop(permit);
        }
        seen
    });
    seen.sort_unstable();
    print(row, &[("p50", seen[TIMES / 2]), ("longest", seen[TIMES - 1])]);
}

fn print(row: &str, values: &[(impl Display, Duration)]) {
    let ms = |time: &Duration| time.as_secs_f64() * 1_000.0;
    let values = values.iter().map(|(name, time)| format!("{name} {:.1} ms", ms(time)));
    println!("  {row:<44} {}", values.collect::<Vec<_>>().join(", "));
}
