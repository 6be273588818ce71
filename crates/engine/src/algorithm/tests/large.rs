//! Quotas above 2^32 units: named ones, random ones and the largest ones. They are exact, or within
//! the documented bound and on the safe side.

use std::time::Duration;

use proptest::{prelude::*, strategy::ValueTree, test_runner::TestRunner};

use super::{
    super::{
        Action, Algorithm, EngineReply, EngineRequest, Lifetime, Params, Refill, Release, State,
        arithmetic::{ceil_div, closest_above},
    },
    agreement::{both, same_states},
    backends::{Backend, RedisServer, START, Scripted, check},
    generators::large,
};
use crate::quota::{LONGEST_REFILL, MAX_PER_MICRO, MAX_UNITS, Quota, nearest};

/// Tokens per day, bytes per hour, and billionths of a dollar per month.
fn named() -> [Quota; 3] {
    let month = Duration::from_secs(30 * 86_400);
    [
        Quota::per_day(15_000_000_000),
        Quota::per_hour(50_000_000_000),
        Quota::new(1_000_000_000_000, month),
    ]
}

fn random() -> impl Strategy<Value = Quota> {
    let window = prop_oneof![
        Just(1_000),
        Just(1_000_000),
        Just(3_600_000_000),
        Just(86_400_000_000),
        1_000_u64..=366 * 86_400_000_000,
    ];
    (large(), window).prop_map(|(limit, us)| nearest(limit, Duration::from_micros(us)))
}

fn algorithms() -> Vec<Algorithm> {
    let interval = Algorithm::TokenBucket { refill: Refill::Interval, overdraft: 0 };
    vec![
        Algorithm::FixedWindow,
        Algorithm::SlidingLog,
        Algorithm::sliding_window(),
        Algorithm::SlidingWindow { buckets: 7 },
        Algorithm::SlidingWindow { buckets: 100 },
        Algorithm::token_bucket(),
        interval,
        Algorithm::LeakyBucket,
    ]
}

fn with_overdraft(overdraft: u64) -> [Algorithm; 2] {
    [Refill::Continuous, Refill::Interval]
        .map(|refill| Algorithm::TokenBucket { refill, overdraft })
}

/// A key of one limit, with requests at an offset in time, as long as each may wait in the bucket.
struct Key<'a> {
    backend: &'a mut dyn Backend,
    params: Params,
}

impl Key<'_> {
    fn act(&mut self, action: Action, cost: i64, ahead: i64) -> EngineReply {
        let max_wait = self.params.default_wait();
        let request = EngineRequest { action, max_wait, ..check(cost, START + ahead) };
        self.backend.decide(&self.params, request)
    }

    fn admits(&mut self, cost: i64, ahead: i64) -> bool {
        self.act(Action::Check, cost, ahead).admitted
    }

    fn remaining(&mut self, ahead: i64) -> i64 {
        self.act(Action::Peek, 1, ahead).remaining
    }
}

/// Runs on the twin and, if there is one, on the script.
fn on_each(
    scripted: Option<&mut Scripted>,
    algorithm: Algorithm,
    quota: Quota,
    test: impl Fn(Key<'_>),
) {
    let params = Params::new(algorithm, quota).unwrap();
    test(Key { backend: &mut State::default(), params });
    if let Some(scripted) = scripted {
        scripted.forget();
        test(Key { backend: scripted, params });
    }
}

/// Spends the whole quota in a few costs, then looks when it is back. `error`: the largest part of
/// the quota that may be late.
fn uses_up_and_refills(mut key: Key<'_>, algorithm: Algorithm, quota: Quota, error: f64) {
    let (limit, window) = (quota.limit() as i64, quota.window_us() as i64);
    let context = format!("{algorithm} {quota}");
    let third = limit / 3;
    for cost in [1, third, third, limit - 2 * third - 1] {
        assert!(key.admits(cost, 0), "{context}: {cost}");
    }
    assert!(!key.admits(1, 0), "{context}: over");
    assert_eq!(key.remaining(0), 0, "{context}");
    let back = match algorithm {
        // The sub-window of the requests weighs less and less until it has left the window.
        Algorithm::SlidingWindow { buckets } => window + ceil_div(window, buckets.into()),
        _ => window,
    };
    assert!(key.remaining(back - 1) < limit, "{context}: early");
    let remaining = key.remaining(back);
    assert!(remaining <= limit, "{context}: {remaining}");
    assert!(remaining as f64 >= limit as f64 * (1.0 - error), "{context}: {remaining}");
    let late = (window as f64 * error).ceil() as i64;
    assert_eq!(key.remaining(back + late), limit, "{context}");
}

#[test]
fn tokens_per_day_bytes_per_hour_and_dollars_per_month_are_exact() {
    let server = RedisServer::start();
    let mut scripted = Scripted::new(&server, "{key}");
    for quota in named() {
        for algorithm in algorithms() {
            on_each(Some(&mut scripted), algorithm, quota, |key| {
                uses_up_and_refills(key, algorithm, quota, 0.0);
            });
        }
    }
}

/// The largest error of a rate: a bucket counts in at most 2^52 parts, and stores a rate in four
/// bytes.
fn error(algorithm: Algorithm, quota: Quota) -> f64 {
    match algorithm {
        Algorithm::TokenBucket { refill: Refill::Continuous, .. } | Algorithm::LeakyBucket => {
            (quota.limit() as f64 / 2_f64.powi(52)).max(1e-9)
        }
        _ => 0.0,
    }
}

#[test]
fn large_quotas_are_exact_or_slower_by_less_than_documented() {
    let server = RedisServer::start();
    let mut scripted = Scripted::new(&server, "{key}");
    let mut runner = TestRunner::deterministic();
    for i in 0..400 {
        let quota = random().new_tree(&mut runner).unwrap().current();
        for algorithm in algorithms() {
            let scripted = Some(&mut scripted).filter(|_| i % 10 == 0);
            on_each(scripted, algorithm, quota, |key| {
                uses_up_and_refills(key, algorithm, quota, error(algorithm, quota));
            });
        }
    }
}

#[test]
fn a_large_burst_at_one_instant_admits_exactly_the_burst() {
    let server = RedisServer::start();
    let mut scripted = Scripted::new(&server, "{key}");
    let quotas = [
        Quota::per_day(1_000_000_000).burst(15_000_000_001),
        Quota::per_second(3_000_000_000).burst(MAX_UNITS),
        Quota::per_day(MAX_UNITS).burst(7),
        Quota::new(MAX_PER_MICRO * 1_000, Duration::from_millis(1)).burst(MAX_UNITS),
        Quota::per_hour(MAX_UNITS - 1).burst(MAX_UNITS - 2),
    ];
    let buckets = [Algorithm::token_bucket(), Algorithm::LeakyBucket];
    for (quota, algorithm) in quotas.into_iter().flat_map(|quota| {
        buckets.into_iter().chain(with_overdraft(0)).map(move |algorithm| (quota, algorithm))
    }) {
        on_each(Some(&mut scripted), algorithm, quota, |mut key| {
            let burst = quota.burst_size() as i64;
            let half = burst / 2;
            for cost in [half, 1, burst - half - 2, 1] {
                assert!(key.admits(cost, 0), "{algorithm} {quota}: {cost}");
            }
            assert!(!key.admits(1, 0), "{algorithm} {quota}");
        });
    }
}

#[test]
fn a_large_overdraft_is_spent_once_and_repaid() {
    let server = RedisServer::start();
    let mut scripted = Scripted::new(&server, "{key}");
    let overdraft = 20_000_000_000;
    for algorithm in with_overdraft(overdraft) {
        let quota = Quota::per_hour(50_000_000_000);
        on_each(Some(&mut scripted), algorithm, quota, |mut key| {
            let (limit, hour) = (quota.limit() as i64, quota.window_us() as i64);
            assert!(key.admits(limit + overdraft as i64, 0), "{algorithm}");
            assert!(!key.admits(1, 0), "{algorithm}");
            let denied = key.act(Action::Check, limit, hour - 1);
            assert_eq!((denied.admitted, denied.known_wait()), (false, 1), "{algorithm}");
            assert!(key.admits(limit, hour), "{algorithm}");
        });
    }
}

#[test]
fn the_weight_of_a_large_sliding_window_is_exact() {
    let server = RedisServer::start();
    let scripted = std::cell::RefCell::new(Scripted::new(&server, "{key}"));
    let parts = (random(), 1_u32..101, 0.0..1.0, 0.0..1.0);
    TestRunner::new(ProptestConfig { failure_persistence: None, ..Default::default() })
        .run(&parts, |(quota, buckets, used, passed)| {
            let algorithm = Algorithm::SlidingWindow { buckets };
            let (limit, window) = (u128::from(quota.limit()), u128::from(quota.window_us()));
            let buckets = u128::from(buckets);
            let used = ((limit as f64 * used) as u128).max(1);
            // Inside of the sub-window that is one window after the first one.
            let ahead = window + (window as f64 / buckets as f64 * passed) as u128;
            let slot = ahead * buckets / window;
            let overlap = (slot + 1) * window - ahead * buckets;
            let weight = if slot == buckets { (used * overlap).div_ceil(window) } else { 0 };
            on_each(Some(&mut scripted.borrow_mut()), algorithm, quota, |mut key| {
                assert!(key.admits(used as i64, 0));
                assert_eq!(key.remaining(ahead as i64) as u128, limit - weight);
            });
            Ok(())
        })
        .unwrap_or_else(|failure| panic!("{failure}"));
}

#[test]
fn a_changed_quota_counts_what_was_used_under_a_large_one() {
    let server = RedisServer::start();
    let mut scripted = Scripted::new(&server, "{key}");
    // At the small rate, what was used would take 57,000 years.
    let (large, small) = (Quota::per_hour(50_000_000_000), Quota::per_minute(1));
    for algorithm in algorithms() {
        let [large, small] = [large, small].map(|quota| Params::new(algorithm, quota).unwrap());
        scripted.forget();
        for backend in [&mut State::default() as &mut dyn Backend, &mut scripted] {
            let mut decide = |params: &Params, cost: i64, ahead: i64| {
                let max_wait = params.default_wait();
                let request = EngineRequest { max_wait, ..check(cost, START + ahead) };
                backend.decide(params, request)
            };
            assert!(decide(&large, 30_000_000_000, 0).admitted, "{algorithm}");
            let denied = decide(&small, 1, 1);
            assert!(!denied.admitted && denied.known_wait() > 0, "{algorithm}: {denied:?}");
            let back = decide(&large, 1, 2);
            assert!(back.admitted, "{algorithm}: {back:?}");
            // All but what flowed out within two microseconds.
            let used = 50_000_000_000 - back.remaining;
            let is_window = matches!(
                algorithm,
                Algorithm::FixedWindow | Algorithm::SlidingLog | Algorithm::SlidingWindow { .. }
            );
            let least = if is_window { 1 } else { 30_000_000_000 - 28 };
            assert!((least..=30_000_000_000 + 1).contains(&used), "{algorithm}: {used}");
        }
    }
}

#[test]
fn a_debt_is_counted_up_to_what_100_years_refill() {
    let server = RedisServer::start();
    let mut scripted = Scripted::new(&server, "{key}");
    let quotas = [
        Quota::per_second(1),
        Quota::per_second(997),
        Quota::per_hour(7_000_000_007),
        Quota::per_day(MAX_UNITS - 5),
    ];
    let [overdrawn, interval] = with_overdraft(5);
    for algorithm in [Algorithm::token_bucket(), overdrawn, interval, Algorithm::LeakyBucket] {
        for quota in quotas {
            on_each(Some(&mut scripted), algorithm, quota, |mut key| {
                let (limit, window) = (quota.limit() as f64, quota.window_us() as f64);
                let most = LONGEST_REFILL as f64;
                let windows = (most / window * 0.4).floor();
                let mut reset_after_spending = |mut units: f64| {
                    while units > 0.0 {
                        let part = units.min(2_f64.powi(52));
                        key.act(Action::Spend, part as i64, 0);
                        units -= part;
                    }
                    key.act(Action::Peek, 1, 0).reset as f64
                };
                for spent in [windows, 2.0 * windows] {
                    let reset = reset_after_spending(windows * limit);
                    let late = reset - spent * window;
                    let bound = spent * window * error(algorithm, quota) + window;
                    assert!((0.0..=bound).contains(&late), "{algorithm} {quota}: {late}");
                }
                let reset = reset_after_spending(windows * limit);
                let capped = most..=most + window;
                assert!(capped.contains(&reset), "{algorithm} {quota}: {reset}");
            });
        }
    }
}

#[test]
fn units_spent_without_a_limit_are_counted_up_to_the_largest_quota_at_least() {
    let server = RedisServer::start();
    let mut scripted = Scripted::new(&server, "{key}");
    let month = Duration::from_secs(30 * 86_400);
    for algorithm in algorithms() {
        for quota in [Quota::per_hour(10), Quota::new(MAX_UNITS, month)] {
            on_each(Some(&mut scripted), algorithm, quota, |mut key| {
                for _ in 0..3 {
                    assert!(key.act(Action::Spend, 1_i64 << 53, 0).admitted);
                }
                assert!(!key.admits(1, 1_000_000_000), "{algorithm} {quota}");
                assert_eq!(key.remaining(1_000_000_000), 0, "{algorithm} {quota}");
            });
        }
    }
}

/// Units that are spent meanwhile count before the reservation, and in the newest state behind it.
#[test]
fn the_states_around_reservations_grow_together() {
    let server = RedisServer::start();
    let quota = Quota::per_hour(4_000_000_000);
    let (second, hour) = (1_000_000, 3_600_000_000);
    let holding = Action::Hold { lifetime: Lifetime::new(8_000_000), epoch: None };
    for (buckets, holds) in [(1, false), (1, true), (9, false), (9, true)] {
        let params = Params::new(Algorithm::SlidingWindow { buckets }, quota).unwrap();
        let (mut scripted, mut twin) = (Scripted::new(&server, "{key}"), State::default());
        scripted.forget();
        let mut act = |action, cost: i64, max_wait, ahead| {
            let request = EngineRequest { action, max_wait, ..check(cost, START + ahead) };
            let reply = both(&mut scripted, &mut twin, &params, request);
            same_states(&mut scripted, &params, &twin, START + ahead, "the states");
            assert!(reply.admitted, "{buckets} {holds} {request:?}: {reply:?}");
            reply
        };
        let used = if holds { 3_700_000_000 } else { 4_000_000_000 };
        if holds {
            act(holding, 300_000_000, 0, 0);
            act(Action::Spend, 500_000_000, 0, 0);
        }
        act(Action::Check, used - if holds { 500_000_000 } else { 0 }, 0, 1);
        let first = act(Action::Check, 5, 3 * hour, 2);
        assert!(first.known_wait() > hour / 9);
        if !holds {
            act(Action::Spend, 300_000_000, 0, 3);
        }
        let now = 20 * second; // the hold is over
        let last = act(Action::Check, 1, 3 * hour, now);
        act(Action::Spend, 1, 0, now + 1);
        for reply in [last, first] {
            let release = Release { instant: Some(reply.instant), units: 1 };
            twin.release(&params, START + now + 2, &[release]);
            scripted.release(&params, START + now + 2, &[release]);
            same_states(&mut scripted, &params, &twin, START + now + 2, "after a release");
        }
    }
}

#[test]
fn small_quotas_have_small_states() {
    let server = RedisServer::start();
    let mut scripted = Scripted::new(&server, "{key}");
    let mut size = |algorithm, quota, costs: &[i64]| {
        scripted.forget();
        let params = Params::new(algorithm, quota).unwrap();
        for (i, cost) in costs.iter().enumerate() {
            assert!(scripted.decide(&params, check(*cost, START + i as i64)).admitted);
        }
        scripted.bytes().unwrap().len()
    };
    let (small, large) = (Quota::per_hour(u32::MAX.into()), Quota::per_hour(50_000_000_000));
    let (few, many) = ([1, 2], [5_000_000_000, 1]);
    let interval = with_overdraft(0)[1];
    for (algorithm, bytes) in [
        (Algorithm::FixedWindow, [28, 28, 28]),
        (Algorithm::SlidingLog, [2 * 11 + 52, 2 * 11 + 52, 2 * 14 + 62]),
        (Algorithm::sliding_window(), [35 + 8, 37 + 14, 37 + 14]),
        (Algorithm::token_bucket(), [26, 26, 26]),
        (interval, [44, 44, 44]),
        (Algorithm::LeakyBucket, [44, 44, 44]),
    ] {
        let quota = if algorithm == Algorithm::LeakyBucket { large.burst(1) } else { large };
        if algorithm == Algorithm::LeakyBucket {
            assert_eq!(size(algorithm, quota, &[1]), bytes[1]);
            continue;
        }
        assert_eq!(size(algorithm, small, &few), bytes[0], "{algorithm}, a small quota");
        assert_eq!(size(algorithm, quota, &few), bytes[1], "{algorithm}, small costs");
        assert_eq!(size(algorithm, quota, &many), bytes[2], "{algorithm}, large costs");
    }
}

#[test]
fn the_closest_fraction_above_another_is_found() {
    let numbers = (1_u128..200, 1_u128..200, 1_u128..40, 1_u128..40);
    TestRunner::default()
        .run(&numbers, |(numerator, denominator, max_above, max_below)| {
            let fits = |[above, below]: [u128; 2]| above * denominator >= numerator * below;
            let all = (1..=max_above).flat_map(|above| (1..=max_below).map(move |it| [above, it]));
            let closest = all
                .filter(|fraction| fits(*fraction))
                .min_by(|one, other| (one[0] * other[1]).cmp(&(other[0] * one[1])));
            let Some([above, below]) = closest else { return Ok(()) };
            let found = closest_above([numerator, denominator], [max_above, max_below]);
            prop_assert_eq!(found[0] * below, above * found[1]);
            Ok(())
        })
        .unwrap();
}
