//! Rates are exact fractions, and remain exact when the quota is changed.

use std::time::Duration;

use super::{
    super::{Action, Algorithm, EngineReply, EngineRequest, Params, State, arithmetic::Rate},
    backends::{Backend, RedisServer, START, Scripted, check},
    generators::all_with,
};
use crate::quota::Quota;

const WINDOWS: [u64; 4] = [1, 60, 3_600, 86_400];

/// All rates of 1 to 1,000 per second, minute, hour and day.
fn quotas(step: usize) -> impl Iterator<Item = Quota> {
    let windows = WINDOWS.into_iter().map(Duration::from_secs);
    windows.flat_map(move |window| {
        (1..=1_000).step_by(step).map(move |limit| Quota::new(limit, window))
    })
}

fn peek(backend: &mut impl Backend, params: &Params, now: i64) -> EngineReply {
    backend.decide(params, EngineRequest { action: Action::Peek, ..check(1, now) })
}

/// Uses the whole quota at one instant, and asserts that it is restored exactly one window later.
fn assert_restored_after_a_window(backend: &mut impl Backend, algorithm: Algorithm, quota: Quota) {
    let params = Params::new(algorithm, quota).unwrap();
    let (limit, window) = (quota.limit() as i64, quota.window_us() as i64);
    let max_wait = params.default_wait();
    let start = START;
    let all = backend.decide(&params, EngineRequest { max_wait, ..check(limit, start) });
    assert_eq!(
        (all.admitted, all.known_wait(), all.remaining),
        (true, 0, 0),
        "{algorithm} {quota}"
    );
    assert_eq!(all.reset, window, "{algorithm} {quota}");
    let denied = backend.decide(&params, EngineRequest { max_wait: 0, ..check(limit, start) });
    assert_eq!((denied.admitted, denied.known_wait()), (false, window), "{algorithm} {quota}");
    assert!(peek(backend, &params, start + window - 1).reset > 0, "{algorithm} {quota}");
    let after = peek(backend, &params, start + window);
    assert_eq!((after.remaining, after.reset), (limit, 0), "{algorithm} {quota}");
}

#[test]
fn the_whole_limit_is_restored_after_one_window_for_every_usual_rate() {
    for quota in quotas(1) {
        for algorithm in [Algorithm::token_bucket(), Algorithm::LeakyBucket] {
            assert_restored_after_a_window(&mut State::default(), algorithm, quota);
        }
    }
}

#[test]
fn the_whole_limit_is_restored_after_one_window_in_redis_too() {
    let server = RedisServer::start();
    let mut scripted = Scripted::new(&server, "{key}");
    for quota in quotas(7) {
        for algorithm in [Algorithm::token_bucket(), Algorithm::LeakyBucket] {
            scripted.forget();
            assert_restored_after_a_window(&mut scripted, algorithm, quota);
        }
    }
}

#[test]
fn three_per_second_are_three_in_each_second() {
    for limit in [3, 7, 60, 997] {
        let params = Params::new(Algorithm::token_bucket(), Quota::per_second(limit)).unwrap();
        let mut state = State::default();
        for second in 0..100 {
            let request = check(1, START + i64::from(second) * 1_000_000);
            let admitted = (0..=limit).filter(|_| state.decide(&params, request).admitted).count();
            assert_eq!(admitted, limit as usize, "second {second}");
        }
    }
}

#[test]
fn the_departures_of_a_busy_period_are_the_exact_fractions_rounded_up() {
    for quota in quotas(13) {
        let params = Params::new(Algorithm::LeakyBucket, quota.burst(20)).unwrap();
        let mut state = State::default();
        let (limit, window) = (quota.limit(), quota.window_us());
        for n in 0..20_u64 {
            let request = EngineRequest { max_wait: params.default_wait(), ..check(1, START) };
            let reply = state.decide(&params, request);
            let departure = (n * window).div_ceil(limit);
            assert_eq!((reply.admitted, reply.known_wait()), (true, departure as i64), "{quota}");
        }
    }
}

#[test]
fn a_rate_is_exact_or_slower_by_less_than_one_part_in_a_billion() {
    let rate = |quota: Quota| Rate::new(quota, quota.burst_size());
    assert_eq!(rate(Quota::per_second(3)), Rate { unit: 1_000_000, tick: 3 });
    assert_eq!(rate(Quota::per_minute(60)), Rate { unit: 1_000_000, tick: 1 });
    assert_eq!(rate(Quota::per_second(4_000_000)), Rate { unit: 1, tick: 4 });
    let fastest = Quota::new(u32::MAX.into(), Duration::from_millis(1));
    assert_eq!(rate(fastest), Rate { unit: 200, tick: 858_993_459 });

    let mut rounded = 0;
    for limit in [1_001, 9_973, 104_729, 1_000_003, 4_000_037] {
        for seconds in [1, 60, 3_600, 86_400, 31_622_400] {
            let quota = Quota::new(limit, Duration::from_secs(seconds));
            let Rate { unit, tick } = rate(quota);
            let (exact, counted) =
                (u128::from(quota.window_us()) * tick as u128, u128::from(limit) * unit as u128);
            assert!(counted >= exact, "{quota} is counted faster than its rate");
            let error = (counted - exact) as f64 / exact as f64;
            assert!(error < 1e-9, "{quota}: {error}");
            rounded += u32::from(counted > exact);
            assert!(unit * limit as i64 <= 1 << 52, "{quota}");
        }
    }
    assert!(rounded > 5, "{rounded} of these rates are not exact");
}

/// Two quotas that alternate on one key, with denied checks at one instant.
fn alternate(backend: &mut impl Backend, algorithm: Algorithm, times: u32) -> i64 {
    let params = |quota| Params::new(algorithm, quota).unwrap();
    let mut worst = 0;
    for (one, other) in [
        (Quota::per_second(10), Quota::per_second(3)),
        (Quota::per_minute(7), Quota::per_hour(97)),
        (Quota::new(10, Duration::from_secs(19)), Quota::new(7, Duration::from_millis(19_001))),
    ] {
        let (one, other) = (params(one), params(other));
        let start = START;
        let spend = EngineRequest { action: Action::Spend, ..check(191, start) };
        backend.decide(&one, spend);
        let now = start + 12_345;
        backend.decide(&other, check(1, now));
        let first = backend.decide(&one, check(1, now)).known_wait();
        for _ in 0..times / 2 {
            assert!(!backend.decide(&other, check(1, now)).admitted);
            assert!(!backend.decide(&one, check(1, now)).admitted);
        }
        let moved = (backend.decide(&one, check(1, now)).known_wait() - first).abs();
        worst = i64::max(worst, moved);
        let reset = 1_000_000_000 * 86_400;
        assert!(backend.decide(&one, check(1, now + reset)).admitted, "{algorithm}");
    }
    worst
}

#[test]
fn denied_checks_of_quotas_that_alternate_do_not_raise_the_debt() {
    for (algorithm, _) in all_with(Quota::per_second(1)) {
        let moved = alternate(&mut State::default(), algorithm, 200_000);
        assert!(moved <= 1, "{algorithm}: {moved} us");
    }
}

#[test]
fn denied_checks_of_quotas_that_alternate_do_not_raise_the_debt_in_redis() {
    let server = RedisServer::start();
    let mut scripted = Scripted::new(&server, "{key}");
    for algorithm in [Algorithm::token_bucket(), Algorithm::LeakyBucket] {
        scripted.forget();
        let moved = alternate(&mut scripted, algorithm, 2_000);
        assert!(moved <= 1, "{algorithm}: {moved} us");
    }
}

#[test]
fn a_debt_that_is_almost_nothing_at_another_rate_stays_almost_nothing() {
    let server = RedisServer::start();
    let params = |window| Params::new(Algorithm::LeakyBucket, Quota::new(1, window)).unwrap();
    let slow = params(Duration::from_micros(10_540_799_999_999));
    let slowest = params(Duration::from_secs(366 * 86_400));
    let second = Quota::new(1_000_000, Duration::from_secs(1)).burst(1);
    let fast = Params::new(Algorithm::LeakyBucket, second).unwrap();
    let mut scripted = Scripted::new(&server, "{key}");
    for backend in [&mut State::default() as &mut dyn Backend, &mut scripted] {
        let start = START;
        let mut decide = |params, ahead| backend.decide(params, check(1, start + ahead));
        assert!(decide(&slow, 0).admitted);
        // Less than 2^-54 of a part is left of the debt.
        decide(&slowest, 10_540_799_999_998);
        decide(&fast, 10_540_800_000_001);
        let reply = decide(&slowest, 10_540_800_000_001);
        assert!(reply.known_wait() <= 31_622_400_000_000, "{reply:?}");
    }
}
