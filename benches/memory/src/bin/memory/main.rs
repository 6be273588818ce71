//! Measures a check over the memory store and the overhead of the layer, beside those of other rate
//! limiters: times. `bin/allocations.rs` counts allocations, `bin/instructions.rs` instructions.
//!
//! ```text
//! make bench-memory                  # all measurements
//! make bench-memory MEMORY=layers    # one of: checks, threads, keys, observers, layers
//! ```

#[path = "../../../../support/interleaved.rs"]
#[allow(dead_code)]
mod interleaved;

mod checks;
mod layers;
mod observers;
mod threads;

use std::{env, time::Duration};

use nix::time::{ClockId, clock_gettime};

fn main() {
    let parts: [(&str, fn()); 5] = [
        ("checks", checks::print_checks),
        ("threads", threads::print_threads),
        ("keys", checks::print_keys),
        ("observers", observers::print_observers),
        ("layers", layers::print_layers),
    ];
    if cfg!(feature = "counter") {
        println!("With the feature `cpu-counter`, as by default:");
    } else {
        println!("Without the feature `cpu-counter`:");
    }
    let words: Vec<_> = env::args().skip(1).collect();
    for (name, print) in &parts {
        if words.is_empty() || words.iter().any(|word| word == name) {
            print();
        }
    }
    let is_known = |word: &String| parts.iter().any(|(name, _)| word == name);
    assert!(words.iter().all(is_known), "the parts are {:?}", parts.map(|(name, _)| name));
}

/// The time that the processor has spent on this thread: other threads do not lengthen it.
fn thread_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).expect("Linux has this clock").into()
}

/// Measures the nanoseconds of one of `count` pieces of work.
fn nanos(count: usize, work: impl FnOnce()) -> f64 {
    let start = thread_time();
    work();
    (thread_time() - start).as_nanos() as f64 / count as f64
}
