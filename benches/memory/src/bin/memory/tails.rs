//! The slowest checks, with more threads than processors: a thread can lose its processor while it
//! holds a lock.

use std::{sync::Barrier, thread, time::Instant};

use governor::clock::DefaultClock;
use memory::{
    SLOW, limiter,
    peers::{Check, governor},
    shuffled_keys,
};
use tower_ratelimit::Algorithm;

const THREADS: usize = 8;
const CHECKS: usize = 200_000;

pub(super) fn print_tails() {
    println!();
    println!(
        "A check in {THREADS} threads, each timed by itself: ns, with one reading of the clock"
    );
    for (label, count) in [("10,000 keys", 10_000), ("one key", 1)] {
        let keys = shuffled_keys(count);
        print(label, "ours", &limiter(Algorithm::token_bucket(), SLOW), &keys);
        print(label, "governor", &governor(SLOW, DefaultClock::default()), &keys);
    }
}

fn print(label: &str, name: &str, subject: &dyn Check, keys: &[String]) {
    let barrier = &Barrier::new(THREADS);
    let run = |thread: usize| {
        let mut times = Vec::with_capacity(CHECKS);
        let keys = keys.iter().cycle().skip(thread * keys.len() / THREADS);
        barrier.wait();
        for key in keys.take(CHECKS) {
            let start = Instant::now();
            subject.check(key);
            times.push(start.elapsed().as_nanos() as u64);
        }
        times
    };
    let mut times: Vec<u64> = thread::scope(|scope| {
        let handles: Vec<_> = (0..THREADS).map(|thread| scope.spawn(move || run(thread))).collect();
        handles.into_iter().flat_map(|handle| handle.join().expect("no panic")).collect()
    });
    times.sort_unstable();
    let [p50, p99, p999] = [0.5, 0.99, 0.999].map(|q| times[(times.len() as f64 * q) as usize]);
    let max = times.last().expect("there are checks");
    println!("  {label:<12} {name:<9} p50 {p50:6}  p99 {p99:6}  p99.9 {p999:7}  longest {max}");
}
