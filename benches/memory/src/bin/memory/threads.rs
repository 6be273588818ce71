//! Checks from several threads at once: their time, the slowest of them, and the shares of the
//! threads. With more threads than processors, a thread can lose its processor while it holds a
//! lock.

use std::{
    sync::{
        Barrier,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use governor::clock::DefaultClock;
use memory::{
    ONE, SLOW, limiter,
    peers::{Approximate, Check, ThrottleKit, governor, quota_pool},
    shuffled_keys,
};
use tower_ratelimit::{Algorithm, Quota};

use crate::interleaved::Series;

const ROUNDS: usize = 5;
/// For each thread, so that the scheduler gives all of them their shares.
const ROUND: Duration = Duration::from_millis(100);
/// A thread times one check of so many, with one reading of the clock.
const TIMED: usize = 64;

/// The names of the subjects, in the order of [`subject`].
const SUBJECTS: [&str; 5] = ["ours", "governor", "quota", "throttle-kit", "pingora-limits"];

fn subject(which: usize, quota: Quota) -> Box<dyn Check> {
    match which {
        0 => Box::new(limiter(Algorithm::token_bucket(), quota)),
        1 => Box::new(governor(quota, DefaultClock::default())),
        2 => Box::new(quota_pool(quota)),
        3 => Box::new(ThrottleKit::new(quota)),
        _ => Box::new(Approximate::new(quota)),
    }
}

/// What the threads of one round have done.
struct Round {
    /// Nanoseconds of the wall in which one of all threads made a check.
    nanos: f64,
    /// The checks of the thread with the fewest, as a part of the one with the most.
    share: f64,
    /// Nanoseconds of single checks.
    timed: Vec<u64>,
}

pub(super) fn print_threads() {
    println!();
    println!("A check in several threads, the default of each limiter, {ROUNDS} rounds in turns:");
    println!(
        "ns of the wall by check of all threads, beside governor (the middle half of rounds);"
    );
    println!("ns of the slowest in 1,000; checks of the least served thread / of the most served");
    for (label, count, quota) in
        [("10,000 keys", 10_000, SLOW), ("10,000 keys, denied", 10_000, ONE), ("one key", 1, SLOW)]
    {
        let keys = shuffled_keys(count);
        for threads in [2, 4, 8] {
            println!("  {label}, {threads} threads");
            print(threads, quota, &keys);
        }
    }
}

fn print(threads: usize, quota: Quota, keys: &[String]) {
    let mut rounds: [Vec<Round>; SUBJECTS.len()] = Default::default();
    for round in 0..ROUNDS {
        for position in 0..SUBJECTS.len() {
            let which = if round % 2 == 0 { position } else { SUBJECTS.len() - 1 - position };
            let subject = subject(which, quota);
            subject.check_all(keys);
            rounds[which].push(run(&*subject, keys, threads));
        }
    }
    let series = |which: usize, of: fn(&Round) -> f64| {
        rounds[which].iter().map(of).collect::<Vec<_>>().into()
    };
    let governor: Series = series(1, |round| round.nanos);
    for (which, name) in SUBJECTS.iter().enumerate() {
        let nanos: Series = series(which, |round| round.nanos);
        let share: Series = series(which, |round| round.share);
        let mut timed: Vec<_> = rounds[which].iter().flat_map(|round| &round.timed).collect();
        timed.sort_unstable();
        println!(
            "    {name:<16} {:6.1}  {} x governor  p99.9 {:7}  shares {:.2}",
            nanos.median(),
            nanos.ratio_to(&governor).summary(),
            timed[timed.len() * 999 / 1_000],
            share.median(),
        );
    }
}

/// Checks keys in each thread for a time, each thread beginning with another key.
fn run(subject: &dyn Check, keys: &[String], threads: usize) -> Round {
    let (barrier, is_over) = (&Barrier::new(threads + 1), &AtomicBool::new(false));
    let work = |thread: usize| {
        let mut keys = keys.iter().cycle().skip(thread * keys.len() / threads);
        let mut timed = vec![];
        barrier.wait();
        while !is_over.load(Ordering::Relaxed) {
            let start = Instant::now();
            keys.by_ref().take(1).for_each(|key| _ = subject.check(key));
            timed.push(start.elapsed().as_nanos() as u64);
            keys.by_ref().take(TIMED - 1).for_each(|key| _ = subject.check(key));
        }
        timed
    };
    thread::scope(|scope| {
        let handles: Vec<_> =
            (0..threads).map(|thread| scope.spawn(move || work(thread))).collect();
        barrier.wait();
        let start = Instant::now();
        thread::sleep(ROUND * threads as u32);
        is_over.store(true, Ordering::Relaxed);
        let timed = handles.into_iter().map(|handle| handle.join().expect("no panic"));
        let timed: Vec<Vec<u64>> = timed.collect();
        let counts: Vec<_> = timed.iter().map(|timed| (timed.len() * TIMED) as f64).collect();
        let [least, most] = [f64::min, f64::max].map(|of| counts.iter().copied().reduce(of));
        Round {
            nanos: start.elapsed().as_nanos() as f64 / counts.iter().sum::<f64>(),
            share: least.unwrap_or(0.0) / most.unwrap_or(1.0),
            timed: timed.concat(),
        }
    })
}
