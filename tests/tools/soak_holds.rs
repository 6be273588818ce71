//! Rates and concurrency together, over two real processes: 1,000 callers, whose requests are
//! cancelled at random instants, while one process is killed and another one is stopped. Never are
//! more requests in flight than there are places, and none is held after a lifetime.
//!
//! Each process prints when the place of a request is taken and returned: after it has the permit,
//! and before it drops it. So overlaps of these times are overlaps of permits. Those of a process
//! that is killed end with it, and those of one that stands still when its lifetime begins to pass.
//!
//! ```text
//! make soak               # a minute
//! make soak SECONDS=20
//! ```

#![allow(missing_docs, unreachable_pub)]

#[allow(dead_code)]
#[path = "../support/server.rs"]
mod server;

use std::{
    env,
    io::{self, BufRead, BufReader, Read, Write},
    process::{Child, Command, ExitCode, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use server::RedisServer;
use tokio::{
    runtime::Runtime,
    task::JoinSet,
    time::{sleep, timeout},
};
use tower_ratelimit::{
    Algorithm, Charge, Limiter, Permit, Quota, RedisStore,
    observe::{Event, Observer},
};

const CALLERS_PER_PROCESS: usize = 500;
const KEYS: usize = 4;
const PLACES: u64 = 10;
/// Of each key. The callers ask for more, and the places are in use most of the time.
const RATE: Quota = Quota::per_second(60);
const LIFETIME: Duration = Duration::from_secs(4);
/// No longer does a hold live that is never renewed.
const LONGEST_LIFE: Duration = Duration::from_secs(5);
/// The key of the places that a process keeps.
const KEPT: u64 = 3;
const TICK: Duration = Duration::from_millis(10);
/// The ways to ask for a place: from this one on, one of the rate is spent, too.
const SPENDS_RATE: u8 = 2;
const WAYS: u8 = 4;
/// The first argument of a process that the soak starts.
const PROCESS: &str = "process";

/// The limits, as each process has them.
struct Limits {
    rate: Limiter,
    places: Limiter,
}

impl Limits {
    fn new(store: &RedisStore) -> Self {
        let (bucket, concurrency) = (Algorithm::token_bucket(), Algorithm::concurrency());
        let places = Limiter::new("places", store.clone(), concurrency, Quota::concurrent(PLACES));
        let rate = Limiter::new("rate", store.clone(), bucket, RATE);
        Self { rate, places: places.hold_lifetime(LIFETIME) }
    }

    /// Asks for a place in one of several ways.
    async fn ask(&self, key: &str, way: u8) -> Option<Permit> {
        let wait = Duration::from_millis(fastrand::u64(1..2_000));
        let permit = match way {
            0 => self.places.hold(key, 1).await,
            1 => self.places.hold(key, 1).max_wait(wait).await,
            SPENDS_RATE => Charge::new(&self.rate, key).also(&self.places).hold().await,
            _ => Charge::new(&self.rate, key).also(&self.places).hold().max_wait(wait).await,
        };
        permit.ok()?.admitted()
    }
}

/// Microseconds since 1970: processes of one machine share this clock.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock after 1970").as_micros() as u64
}

/// A request in flight. The fields are dropped in this order: the place is still held when the end
/// of its use is printed.
struct InFlight {
    _printed: Printed,
    _permit: Permit,
}

struct Printed {
    key: usize,
    way: u8,
    asked: u64,
    from: u64,
}

impl Printed {
    fn new(key: usize, way: u8, asked: u64) -> Self {
        let from = now();
        println!("+ {key} {way} {asked} {from}");
        Self { key, way, asked, from }
    }
}

impl Drop for Printed {
    fn drop(&mut self) {
        let Self { key, way, asked, from } = self;
        println!("- {key} {way} {asked} {from} {}", now());
    }
}

#[derive(Default)]
struct Counts {
    expired: AtomicU64,
    lost: AtomicU64,
    failed: AtomicU64,
    /// The longest time, in milliseconds, in which no task ran. Holds can expire meanwhile.
    pause: AtomicU64,
}

impl Observer for Counts {
    fn on_event(&self, event: &Event<'_>) {
        let count = match event {
            Event::HoldExpired { .. } => &self.expired,
            Event::HoldLost { .. } => &self.lost,
            Event::StoreFailed { .. } => &self.failed,
            _ => return,
        };
        count.fetch_add(1, Relaxed);
    }
}

/// A process with callers, until its input ends.
async fn process(url: &str, kept: &str) {
    let store = RedisStore::connect(url).await.expect("the server runs");
    let counts = Arc::<Counts>::default();
    store.add_observer(counts.clone());
    let limits = Arc::new(Limits::new(&store));
    let kept = limits.places.hold(kept, KEPT).await.expect("the server answers");
    let is_over = Arc::new(AtomicBool::new(false));
    let mut callers = JoinSet::new();
    for _ in 0..CALLERS_PER_PROCESS {
        let (limits, is_over) = (limits.clone(), is_over.clone());
        callers.spawn(async move {
            while !is_over.load(Relaxed) {
                request(&limits).await;
            }
        });
    }
    let watch = tokio::spawn({
        let counts = counts.clone();
        async move {
            loop {
                let before = now();
                sleep(TICK).await;
                let pause = (now() - before) / 1_000;
                counts.pause.fetch_max(pause, Relaxed);
            }
        }
    });
    let input = tokio::task::spawn_blocking(|| io::stdin().read_to_end(&mut vec![]));
    let _ = input.await;
    is_over.store(true, Relaxed);
    callers.join_all().await;
    drop(kept);
    sleep(Duration::from_millis(500)).await; // the last ends reach Redis
    watch.abort();
    let Counts { expired, lost, failed, pause } = &*counts;
    let numbers = [expired, lost, failed, pause].map(|number| number.load(Relaxed));
    println!("= {numbers:?}");
    let _ = io::stdout().flush();
}

/// A request, which is cancelled at a random instant: before it is sent, while it is under way,
/// while it waits or while it is in flight.
async fn request(limits: &Limits) {
    let (key, way) = (fastrand::usize(..KEYS), fastrand::u8(..WAYS));
    let patience = match fastrand::u8(..4) {
        0 => Duration::from_micros(fastrand::u64(..3_000)),
        _ => Duration::from_millis(fastrand::u64(..3_000)),
    };
    let whole = async {
        let asked = now();
        let Some(permit) = limits.ask(&format!("key-{key}"), way).await else { return false };
        let _in_flight = InFlight { _printed: Printed::new(key, way, asked), _permit: permit };
        sleep(Duration::from_millis(fastrand::u64(..100))).await;
        true
    };
    if !timeout(patience, whole).await.unwrap_or(true) {
        sleep(Duration::from_millis(fastrand::u64(..500))).await;
    }
}

/// One use of a place. Without an end, the process has ended first.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Used {
    process: usize,
    key: usize,
    way: u8,
    asked: u64,
    from: u64,
    to: Option<u64>,
}

/// What the processes have printed.
#[derive(Default)]
struct Seen {
    used: Vec<Used>,
    /// Of each process that has ended by itself: its `Counts`.
    counts: Vec<(usize, String)>,
}

struct Running {
    child: Child,
    reader: thread::JoinHandle<()>,
}

impl Running {
    fn start(number: usize, url: &str, seen: &Arc<Mutex<Seen>>) -> Self {
        let own = env::current_exe().expect("a program");
        let mut command = Command::new(own);
        command.args([PROCESS, url, &kept_key(number)]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("a process");
        let (output, seen) = (child.stdout.take().expect("a pipe"), seen.clone());
        let reader = thread::spawn(move || read(number, BufReader::new(output), &seen));
        Self { child, reader }
    }

    fn signal(&self, signal: &str) {
        let id = self.child.id().to_string();
        let status = Command::new("kill").args([signal, &id]).status();
        assert!(status.expect("kill runs").success());
    }

    /// Lets the process end, and waits for it.
    fn end(mut self) {
        drop(self.child.stdin.take());
        self.wait();
    }

    fn wait(mut self) {
        self.child.wait().expect("a process");
        self.reader.join().expect("the reader ends");
    }
}

fn kept_key(number: usize) -> String {
    format!("kept-{number}")
}

fn read(process: usize, output: impl BufRead, seen: &Mutex<Seen>) {
    for line in output.lines().map_while(Result::ok) {
        let seen = &mut *seen.lock().expect("no panic");
        if let Some(counts) = line.strip_prefix("= ") {
            seen.counts.push((process, counts.to_owned()));
            continue;
        }
        let numbers: Vec<u64> = line.split(' ').filter_map(|word| word.parse().ok()).collect();
        match numbers[..] {
            [key, way, asked, from] => {
                let (key, way) = (key as usize, way as u8);
                seen.used.push(Used { process, key, way, asked, from, to: None });
            }
            [key, way, asked, from, to] => {
                let (key, way) = (key as usize, way as u8);
                let begun = Used { process, key, way, asked, from, to: None };
                if let Some(used) = seen.used.iter_mut().rev().find(|used| **used == begun) {
                    used.to = Some(to);
                }
            }
            _ => {} // the last line of a process that was killed
        }
    }
}

/// The instants at which processes were disturbed.
struct Faults {
    killed: (usize, u64),
    /// The process, and when it stood still.
    stopped: (usize, u64, u64),
}

impl Faults {
    /// Returns the instants between which a place was certainly held.
    fn held(&self, used: &Used) -> Option<(u64, u64)> {
        let (mut from, mut to) = (used.from, used.to.unwrap_or(u64::MAX));
        if used.process == self.killed.0 {
            (from, to) = (from.min(self.killed.1), to.min(self.killed.1));
        }
        let (process, stop, goes_on) = self.stopped;
        if used.process == process && used.asked < goes_on && to > stop {
            to = stop; // asked for before, and perhaps expired
        }
        (from < to).then_some((from, to))
    }
}

/// Returns the most requests of a key that were in flight at once, and for how long on average.
fn most_in_flight(held: &[(u64, u64)]) -> (i64, f64) {
    // Of two changes at one instant, the end comes first.
    let mut changes: Vec<(u64, i64)> =
        held.iter().flat_map(|(from, to)| [(*from, 1), (*to, -1)]).collect();
    changes.sort_unstable();
    let (mut most, mut sum) = (0, 0);
    for (_, change) in &changes {
        sum += change;
        most = most.max(sum);
    }
    let time: u64 = held.iter().map(|(from, to)| to - from).sum();
    let whole = changes.last().map_or(1, |last| last.0 - changes[0].0);
    (most, time as f64 / whole as f64)
}

async fn soak(time: Duration) -> bool {
    let server = RedisServer::start();
    let url = format!("{}?deadline=10s", server.url());
    let store = RedisStore::connect(&url).await.expect("the server runs");
    let limits = Limits::new(&store);
    let held = async |key: String| limits.places.peek(key).await.expect("it answers").held();
    let seen = Arc::<Mutex<Seen>>::default();
    let began = now();

    let (first, second) = (Running::start(0, &url, &seen), Running::start(1, &url, &seen));
    sleep(time / 4).await;
    let kept = held(kept_key(0)).await;
    let killed = (0, now());
    first.signal("-KILL");
    first.wait();
    let replacement = Running::start(2, &url, &seen);
    sleep(LONGEST_LIFE).await;
    let kept_by_killed = held(kept_key(0)).await;
    println!("kept by the killed process: {kept}, and a lifetime later {kept_by_killed}");

    sleep(time / 4).await;
    let stop = now();
    second.signal("-STOP");
    sleep(2 * LIFETIME).await;
    let kept_by_stopped = held(kept_key(1)).await;
    let goes_on = now();
    second.signal("-CONT");
    println!("kept by the stopped process: {kept}, and after two lifetimes {kept_by_stopped}");
    sleep(time.saturating_sub(time / 2 + LONGEST_LIFE + 2 * LIFETIME)).await;

    second.end();
    replacement.end();
    let whole = Duration::from_micros(now() - began);
    let mut left = 0;
    for key in 0..KEYS {
        left += held(format!("key-{key}")).await;
    }
    sleep(LONGEST_LIFE).await;
    let mut leaked = kept_by_killed + kept_by_stopped;
    for key in (0..KEYS).map(|key| format!("key-{key}")).chain((0..3).map(kept_key)) {
        leaked += held(key).await;
    }
    println!("held half a second after the end: {left}; leaked after a lifetime: {leaked}");
    let faults = Faults { killed, stopped: (1, stop, goes_on) };
    let seen = seen.lock().expect("no panic");
    let is_within = report(&seen, &faults, whole);
    leaked == 0 && left == 0 && kept == KEPT && is_within
}

fn report(seen: &Seen, faults: &Faults, whole: Duration) -> bool {
    for (process, counts) in &seen.counts {
        println!("process {process}: [expired, lost, failed, longest pause in ms]: {counts}");
    }
    let mut is_within = true;
    for key in 0..KEYS {
        let of_key: Vec<&Used> = seen.used.iter().filter(|used| used.key == key).collect();
        let held: Vec<(u64, u64)> = of_key.iter().filter_map(|used| faults.held(used)).collect();
        let (most, mean) = most_in_flight(&held);
        let spent = of_key.iter().filter(|used| used.way >= SPENDS_RATE).count() as f64;
        let allowed = RATE.limit() as f64 * (whole.as_secs_f64() + 1.0);
        println!(
            "key {key}: {} requests in {whole:.0?}; at most {most} of {PLACES} in flight, \
             {mean:.1} on average; {spent} of the {allowed:.0} that the rate allows",
            of_key.len(),
        );
        is_within &= most <= PLACES as i64 && spent > 0.0 && spent <= allowed;
    }
    is_within
}

fn main() -> ExitCode {
    let args: Vec<String> = env::args().skip(1).collect();
    let runtime = Runtime::new().expect("a runtime");
    if let [role, url, kept] = &args[..]
        && role == PROCESS
    {
        runtime.block_on(process(url, kept));
        return ExitCode::SUCCESS;
    }
    let seconds = args.iter().find_map(|arg| arg.parse().ok()).unwrap_or(60);
    match runtime.block_on(soak(Duration::from_secs(seconds))) {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}
