//! Callers in several processes that share the places of one key: how much of the time the places
//! are in use, and how long the callers wait. The processes are real: the bench starts itself.

#![allow(missing_docs, unreachable_pub)]

#[allow(dead_code)]
#[path = "../tests/support/server.rs"]
mod server;

use std::{
    env,
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use server::RedisServer;
use tokio::{runtime::Builder, task::JoinSet, time::sleep};
use tower_ratelimit::{Algorithm, Limiter, Quota, RedisStore};

/// How long a caller keeps its place.
const USE: Duration = Duration::from_millis(50);
const LONG: Duration = Duration::from_secs(60);
const MEASURED: Duration = Duration::from_secs(20);
/// The processes start one after the other, and end one after the other.
const MARGIN: Duration = Duration::from_secs(2);
/// The first argument of a process that the bench starts.
const CALLERS: &str = "callers";

fn main() {
    let args: Vec<String> = env::args().collect();
    if let [_, role, url, callers, places] = &args[..]
        && role == CALLERS
    {
        let number = |text: &str| text.parse().expect("a number");
        return call(url, number(callers), number(places));
    }
    println!("Callers that keep a place for {} ms each, for {MEASURED:?}", USE.as_millis());
    println!("fair: the time in which each caller is served once, without a pause");
    println!(
        "  {:<34} {:>8} {:>9} {:>12} {:>10} {:>10} {:>12}",
        "", "in use", "at most", "longest wait", "x fair", "p50, ms", "calls per s"
    );
    for (processes, callers, places) in [(2, 4, 1), (2, 1, 1), (4, 4, 1), (1, 8, 1), (2, 8, 4)] {
        measure(processes, callers, places);
    }
}

/// One use of a place, in microseconds since 1970.
#[derive(Clone, Copy)]
struct Used {
    asked: u64,
    from: u64,
    to: u64,
}

/// Takes places and returns them. Prints each use.
fn call(url: &str, callers: u64, places: u64) {
    let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
    let uses: Vec<Used> = runtime.block_on(async {
        let store = RedisStore::connect(url).await.expect("the server runs");
        let (algorithm, quota) = (Algorithm::concurrency(), Quota::concurrent(places));
        let limiter = Limiter::new("places", store, algorithm, quota);
        let end = Instant::now() + MEASURED + 2 * MARGIN;
        let mut tasks = JoinSet::new();
        for _ in 0..callers {
            let limiter = limiter.clone();
            tasks.spawn(async move {
                let mut uses = vec![];
                while Instant::now() < end {
                    let asked = now();
                    let permit = limiter.hold("key", 1).max_wait(LONG).await;
                    let permit =
                        permit.expect("the server answers").admitted().expect("a place is free");
                    let from = now();
                    sleep(USE).await;
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

fn measure(processes: u64, callers: u64, places: u64) {
    let server = RedisServer::start();
    let url = format!("{}?deadline=30s", server.url());
    let own = env::current_exe().expect("a program");
    let start = || {
        let mut command = Command::new(&own);
        command.args([CALLERS, &url, &callers.to_string(), &places.to_string()]);
        command.stdout(Stdio::piped()).spawn().expect("a process")
    };
    let calls = server.calls("evalsha");
    let children: Vec<Child> = (0..processes).map(|_| start()).collect();
    let start = now() + MARGIN.as_micros() as u64;
    let uses: Vec<Used> = children.into_iter().flat_map(read_uses).collect();
    let calls = server.calls("evalsha") - calls;
    let end = start + MEASURED.as_micros() as u64;
    let (in_use, at_most) = in_use(&uses, start, end);
    let inside = uses.iter().filter(|used| used.to > start && used.from < end);
    let mut waits: Vec<u64> = inside.map(|used| used.from - used.asked).collect();
    waits.sort_unstable();
    let longest = waits.last().copied().unwrap_or_default();
    let fair = USE.as_micros() as u64 * processes * callers / places;
    println!(
        "  {:<34} {:>6.1} % {:>9} {:>9} ms {:>10.2} {:>10} {:>12.0}",
        format!("{processes} x {callers} callers, {places} places"),
        100.0 * in_use as f64 / (end - start) as f64 / places as f64,
        at_most,
        longest / 1_000,
        longest as f64 / fair as f64,
        waits.get(waits.len() / 2).copied().unwrap_or_default() / 1_000,
        calls as f64 / (MEASURED + 2 * MARGIN).as_secs_f64(),
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
