//! Checks in one thread, and with many keys.

use std::{hint::black_box, time::Instant};

use governor::clock::{DefaultClock, MonotonicClock};
use memory::{
    NEVER, ONE, QUICK, SLOW, limiter,
    peers::{Approximate, Check, Least, ThrottleKit, governor, quota_pool},
    shuffled_keys,
};
use tower_ratelimit::{Algorithm, Quota};

use crate::{
    interleaved::{Series, interleaved},
    nanos,
};

const ROUNDS: usize = 21;
const PASSES: usize = 5;

/// The names of the subjects, in the order of [`in_turns`].
const SUBJECTS: [&str; 9] = [
    "token bucket",
    "fixed window",
    "governor",
    "governor, system clock",
    "quota",
    "throttle-kit",
    "pingora-limits",
    "the least possible",
    "the least possible, counter",
];

pub(super) fn print_checks() {
    println!("A check of 10,000 String keys, 1 thread: ns of its processor, median of {ROUNDS}");
    println!("governor's own clock is the counter of the processor; pingora-limits is approximate");
    let clocks = interleaved(ROUNDS, |which| match which {
        0 => nanos(100_000, || (0..100_000).for_each(|_| _ = black_box(Instant::now()))),
        _ => {
            let clock = quanta::Clock::new();
            nanos(100_000, || (0..100_000).for_each(|_| _ = black_box(clock.now())))
        }
    });
    let [system, counter] = clocks.map(|series: Series| series.median());
    println!("  one reading of the system clock {system:.1}, of the counter {counter:.1}");
    let keys = shuffled_keys(10_000);
    for (label, quota) in [("full", QUICK), ("draining", SLOW), ("empty", ONE)] {
        let all = in_turns(quota, |subject| {
            pass(subject, &keys);
            nanos(PASSES * keys.len(), || (0..PASSES).for_each(|_| pass(subject, &keys)))
        });
        print(label, &all);
        let [ours, _, by_counter, by_system, ..] = &all;
        let (theirs, reading) = match cfg!(feature = "counter") {
            true => (by_counter, counter),
            false => (by_system, system),
        };
        let less = (ours.median() - reading) / (theirs.median() - reading);
        println!("    token bucket, beside the same clock, less one reading each: {less:.2}");
    }
    println!("  the other algorithms, draining");
    for (label, algorithm) in [
        ("sliding window", Algorithm::sliding_window()),
        ("sliding window, 10 buckets", Algorithm::sliding_window().buckets(10)),
        ("sliding log", Algorithm::sliding_log()),
        ("leaky bucket", Algorithm::leaky_bucket()),
    ] {
        let [series] = interleaved(5, |_| {
            let subject = limiter(algorithm, SLOW);
            pass(&subject, &keys);
            nanos(PASSES * keys.len(), || (0..PASSES).for_each(|_| pass(&subject, &keys)))
        });
        println!("    {label:<28} {:6.1}", series.median());
    }
}

pub(super) fn print_keys() {
    println!();
    println!("A check by the number of keys, 1 thread, in turns: ns of its processor");
    for count in [10_000, 100_000, 1_000_000] {
        let keys = shuffled_keys(count);
        // The order of arrival is not that of the first requests, in which a limiter allocates.
        let checked = reshuffled(&keys);
        let passes = (200_000 / count).max(1);
        let rounds = if count < 1_000_000 { 7 } else { 3 };
        let all: [Series; 4] = interleaved(rounds, |which| {
            let subject: Box<dyn Check> = match which {
                0 => Box::new(large(count, NEVER)),
                1 => Box::new(governor(NEVER, DefaultClock::default())),
                2 => Box::new(governor(NEVER, MonotonicClock)),
                _ => Box::new(Least::new(NEVER)),
            };
            pass(&*subject, &keys);
            pass(&*subject, &checked);
            nanos(passes * count, || (0..passes).for_each(|_| pass(&*subject, &checked)))
        });
        let [ours, by_counter, by_system, least] = &all;
        println!(
            "  {count:>9} keys  ours {:6.1}  {} x governor {:6.1}, {} x with the system clock \
             {:6.1}; the least possible {:6.1}",
            ours.median(),
            ours.ratio_to(by_counter).summary(),
            by_counter.median(),
            ours.ratio_to(by_system).summary(),
            by_system.median(),
            least.median(),
        );
    }
    println!("A new key in a full store: ns of its processor");
    for max_keys in [10_000, 100_000] {
        let keys = shuffled_keys(3 * max_keys);
        let (first, later) = keys.split_at(max_keys);
        let [series] = interleaved(7, |_| {
            let subject = large(max_keys, Quota::per_hour(10));
            pass(&subject, first);
            nanos(later.len(), || pass(&subject, later))
        });
        println!("  {max_keys:>9} keys  ours {}", series.summary());
    }
}

/// The same keys in another order.
fn reshuffled(keys: &[String]) -> Vec<String> {
    let order = shuffled_keys(keys.len());
    let index = |key: &String| key["user-".len()..].parse::<usize>().expect("a number");
    order.iter().map(|key| keys[index(key)].clone()).collect()
}

fn large(max_keys: usize, quota: Quota) -> tower_ratelimit::Limiter {
    let store = tower_ratelimit::MemoryStore::with_max_keys(max_keys);
    tower_ratelimit::Limiter::new("default", store, Algorithm::token_bucket(), quota)
}

/// Measures a new limiter of each kind in each round.
fn in_turns(quota: Quota, measure: impl Fn(&dyn Check) -> f64) -> [Series; SUBJECTS.len()] {
    interleaved(ROUNDS, |which| match which {
        0 => measure(&limiter(Algorithm::token_bucket(), quota)),
        1 => measure(&limiter(Algorithm::fixed_window(), quota)),
        2 => measure(&governor(quota, DefaultClock::default())),
        3 => measure(&governor(quota, MonotonicClock)),
        4 => measure(&quota_pool(quota)),
        5 => measure(&ThrottleKit::new(quota)),
        6 => measure(&Approximate::new(quota)),
        7 => measure(&Least::new(quota)),
        _ => measure(&Least::with_counter(quota)),
    })
}

fn print(label: &str, all: &[Series; SUBJECTS.len()]) {
    println!("  {label}");
    let governor = &all[2];
    for (name, series) in SUBJECTS.iter().zip(all) {
        let ratio = series.ratio_to(governor).summary();
        println!("    {name:<28} {:6.1}  {ratio} x governor", series.median());
    }
}

fn pass(subject: &dyn Check, keys: &[String]) {
    subject.check_all(keys);
}
