//! The difference between the sliding window's estimate and the log: the figures in its
//! documentation.

use super::{
    super::{Algorithm, Params, State},
    backends::{Backend, START, check},
};
use crate::quota::Quota;

const LIMIT: u32 = 1_000;

/// The maximum admitted in any window, as a multiple of the limit, of requests at the given times.
fn overshoot(buckets: u32, times: impl Iterator<Item = i64>) -> f64 {
    let params =
        Params::new(Algorithm::SlidingWindow { buckets }, Quota::per_second(LIMIT.into())).unwrap();
    let mut state = State::default();
    let mut inside = std::collections::VecDeque::new();
    let mut max = 0;
    for now in times {
        if state.decide(&params, check(1, now)).admitted {
            inside.push_back(now);
            while inside.front().is_some_and(|instant| *instant <= now - 1_000_000) {
                inside.pop_front();
            }
            max = max.max(inside.len());
        }
    }
    max as f64 / f64::from(LIMIT)
}

/// Requests at random instants, `at_once` at a time, as many as the quota allows on average.
fn random(at_once: u32, windows: u32) -> impl Iterator<Item = i64> {
    let mut seed = 0x2545_f491_4f6c_dd1d_u64;
    let mut now = START;
    let arrivals = LIMIT * windows / at_once;
    let instant = move |_| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        let uniform = ((seed >> 11) as f64 + 1.0) / (1_u64 << 53) as f64;
        now += (-uniform.ln() * 1e6 * f64::from(at_once) / f64::from(LIMIT)).round() as i64;
        now
    };
    (0..arrivals).map(instant).flat_map(move |now| std::iter::repeat_n(now, at_once as usize))
}

/// The limit at the end of a sub-window, and further requests while the first ones leave the
/// window.
fn adversary(buckets: u32) -> impl Iterator<Item = i64> {
    let sub_window = 1_000_000 / i64::from(buckets);
    let start = START;
    let first = std::iter::once(start);
    let end_of_first = std::iter::repeat_n(start + sub_window - 1, LIMIT as usize);
    let while_it_leaves = (0..=100).flat_map(move |i| {
        let instant = start + 1_000_000 + (sub_window - 2) * i / 100;
        std::iter::repeat_n(instant, LIMIT as usize / 50)
    });
    first.chain(end_of_first).chain(while_it_leaves)
}

#[test]
fn overshoot_is_as_documented() {
    let documented = [(1, 1.04, 1.31), (4, 1.03, 1.20), (10, 1.02, 1.11), (60, 1.01, 1.09)];
    for (buckets, singly, in_tens) in documented {
        let near =
            |measured: f64, documented: f64| (documented - 0.02..=documented).contains(&measured);
        let measured = overshoot(buckets, random(1, 50));
        assert!(near(measured, singly), "{buckets} buckets, one at a time: {measured}");
        let measured = overshoot(buckets, random(LIMIT / 10, 200));
        assert!(near(measured, in_tens), "{buckets} buckets, bursts: {measured}");
        let measured = overshoot(buckets, adversary(buckets));
        assert!((1.9..2.0).contains(&measured), "{buckets} buckets, an adversary: {measured}");
    }
}
