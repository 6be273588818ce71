//! The guarantees of the algorithms: admitted units, counted by brute force in every window.

use std::time::Duration;

use proptest::{prelude::*, test_runner::TestRunner};

use super::{
    super::{Action, Algorithm, EngineRequest, Params, Refill, Release, State},
    agreement::both,
    backends::{Backend, RedisServer, START, Scripted, check},
    generators::{all_with, large},
};
use crate::quota::{MAX_UNITS, Quota, nearest};

/// An admitted request: the instants at which it arrived and proceeds, and its cost.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Admitted {
    arrival: u128,
    instant: u128,
    cost: u128,
}

/// A request of a history: the time since the last one, the cost, and the longest wait, in 1/1000
/// of the window; and the waiting request that is dropped right before it.
type Request = (u32, u32, Option<u32>, Option<prop::sample::Index>);

fn requests() -> impl Strategy<Value = Vec<Request>> {
    let ahead = prop_oneof![4 => 0_u32..100, 3 => Just(0), 1 => 100_u32..1_500];
    let max_wait = prop_oneof![1 => Just(None), 1 => (0_u32..3_000).prop_map(Some)];
    let dropped = prop::option::weighted(0.3, any::<prop::sample::Index>());
    prop::collection::vec((ahead, 1_u32..5, max_wait, dropped), 1..120)
}

fn quotas() -> impl Strategy<Value = Quota> {
    let window = prop_oneof![Just(1_000_000), 1_000_u64..10_000_000, Just(86_400_000_000)];
    let limit = prop_oneof![2 => 1_u64..30, 1 => large()];
    // Some tests add an overdraft.
    let limit = limit.prop_map(|limit| limit.min(MAX_UNITS - 3));
    (limit, window).prop_map(|(limit, us)| nearest(limit, Duration::from_micros(us)))
}

/// A cost of 1 to 4, or of large quotas as many sixteenths.
fn cost_of(cost: u32, quota: Quota) -> u64 {
    let part = quota.limit() / 16;
    let cost = u64::from(cost);
    if part > 1_000 { cost * part + cost } else { cost.min(quota.limit()) }
}

/// The requests that proceeded, and all events: requests that were admitted (`Ok`) or dropped.
type Outcome = (Vec<Admitted>, Vec<Result<Admitted, Admitted>>);

fn admitted(
    backend: &mut impl Backend,
    algorithm: Algorithm,
    quota: Quota,
    requests: &[Request],
) -> Outcome {
    let params = Params::new(algorithm, quota).unwrap();
    let part = |thousandths: u32| quota.window_us() as i64 * i64::from(thousandths) / 1_000;
    let mut now = START;
    let (mut admitted, mut history): Outcome = Default::default();
    // Requests that have proceeded are released, too. A window stays at its instant, even if its
    // first request is released.
    let at_any_time =
        !matches!(algorithm, Algorithm::FixedWindow | Algorithm::SlidingWindow { .. });
    for &(ahead, cost, max_wait, dropped) in requests {
        now += part(ahead);
        let is_past = |request: &Admitted| !at_any_time && request.instant <= now as u128;
        let passed = admitted.partition_point(is_past);
        if let Some(which) = dropped.filter(|_| passed < admitted.len()) {
            let request = admitted.remove(passed + which.index(admitted.len() - passed));
            let release = release(request.cost as i64, request.instant as i64);
            backend.release(&params, now, &[release]);
            history.push(Err(request));
        }
        let cost = cost_of(cost, quota);
        // As a limiter bounds it.
        let max_wait = max_wait.map_or(params.default_wait(), part);
        let max_wait = max_wait.min(params.max_reservable());
        let request = EngineRequest { max_wait, ..check(cost, now) };
        let reply = backend.decide(&params, request);
        if reply.admitted {
            let instant = (now + reply.known_wait()) as u128;
            admitted.push(Admitted { arrival: now as u128, instant, cost: cost.into() });
            history.push(Ok(admitted[admitted.len() - 1]));
        }
    }
    (admitted, history)
}

/// Runs histories on the twin, and every tenth on the script too.
fn always(algorithm: Algorithm, holds: impl Fn(Quota, &[Admitted]) -> bool) {
    always_in_history(algorithm, |quota, admitted, _| holds(quota, admitted));
}

fn always_in_history(
    algorithm: Algorithm,
    holds: impl Fn(Quota, &[Admitted], &[Result<Admitted, Admitted>]) -> bool,
) {
    let server = RedisServer::start();
    let config = ProptestConfig { cases: 300, failure_persistence: None, ..Default::default() };
    TestRunner::new(config)
        .run(&(quotas(), requests(), 0..10), |(quota, requests, scripted)| {
            let twin = admitted(&mut State::default(), algorithm, quota, &requests);
            let (proceeded, history) = &twin;
            prop_assert!(holds(quota, proceeded, history), "{algorithm} {quota}: {history:?}");
            let in_order = proceeded.is_sorted_by_key(|request| request.instant);
            prop_assert!(in_order, "not in order: {proceeded:?}");
            if scripted == 0 {
                let mut backend = Scripted::new(&server, "{key}");
                backend.forget();
                prop_assert_eq!(admitted(&mut backend, algorithm, quota, &requests), twin);
            }
            Ok(())
        })
        .unwrap_or_else(|failure| panic!("{failure}"));
}

fn release(units: i64, instant: i64) -> Release {
    Release { instant: Some(instant), units }
}

#[test]
fn reservations_that_are_released_leave_no_trace() {
    let costs = prop::collection::vec(1_u32..5, 1..20);
    let order = any::<prop::sample::Index>();
    TestRunner::default()
        .run(&(quotas(), costs, order, 0_u32..50), |(quota, costs, order, ahead)| {
            for (algorithm, quota) in all_with(quota) {
                let params = Params::new(algorithm, quota).unwrap();
                let mut now = START;
                let mut state = State::default();
                while state.decide(&params, check(cost_of(1, quota), now)).admitted {}
                now += quota.window_us() as i64 / quota.limit() as i64 / 2;
                let before = state.clone();

                let mut reserved = vec![];
                for cost in &costs {
                    let cost = cost_of(*cost, quota) as i64;
                    let max_wait = params.max_reservable();
                    let reply =
                        state.decide(&params, EngineRequest { max_wait, ..check(cost, now) });
                    if reply.admitted {
                        reserved.push((cost, reply.instant));
                    }
                    // All of them still wait.
                    let first = reserved.first().map_or(i64::MAX, |&(_, instant)| instant);
                    now = (now + i64::from(ahead)).min(first - 1).max(now);
                }
                while !reserved.is_empty() {
                    let (cost, instant) = reserved.swap_remove(order.index(reserved.len()));
                    state.release(&params, now, &[release(cost, instant)]);
                }
                for later in [0, 1_000, 1_000_000, 1_000_000_000] {
                    let peek = EngineRequest { action: Action::Peek, ..check(1, now + later) };
                    let expected = before.clone().decide(&params, peek);
                    prop_assert_eq!(
                        state.decide(&params, peek),
                        expected,
                        "{} {}",
                        algorithm,
                        quota
                    );
                }
            }
            Ok(())
        })
        .unwrap_or_else(|failure| panic!("{failure}"));
}

fn sum(admitted: &[Admitted]) -> u128 {
    admitted.iter().map(|request| request.cost).sum()
}

fn limit_and_window(quota: Quota) -> (u128, u128) {
    (quota.limit().into(), quota.window_us().into())
}

/// All stretches of admitted requests, with the time from their first to their last one.
fn stretches(admitted: &[Admitted]) -> impl Iterator<Item = (&[Admitted], u128)> {
    (0..admitted.len()).flat_map(move |first| {
        (first..admitted.len()).map(move |last| {
            (&admitted[first..=last], admitted[last].instant - admitted[first].instant)
        })
    })
}

#[test]
fn a_fixed_window_admits_at_most_its_limit() {
    always(Algorithm::FixedWindow, |quota, admitted| {
        let (limit, window) = limit_and_window(quota);
        let mut rest = admitted;
        while let Some(&Admitted { instant: opening, .. }) = rest.first() {
            let inside = rest.partition_point(|request| request.instant < opening + window);
            if sum(&rest[..inside]) > limit {
                return false;
            }
            rest = &rest[inside..];
        }
        true
    });
}

#[test]
fn a_sliding_log_admits_at_most_its_limit_in_any_window() {
    always(Algorithm::SlidingLog, |quota, admitted| {
        let (limit, window) = limit_and_window(quota);
        stretches(admitted).all(|(stretch, time)| time >= window || sum(stretch) <= limit)
    });
}

#[test]
fn a_sliding_window_admits_what_its_estimate_allows() {
    for buckets in [1, 2, 3, 7, 60, 100] {
        always_in_history(Algorithm::SlidingWindow { buckets }, |quota, _, history| {
            let (limit, window) = limit_and_window(quota);
            let buckets = u128::from(buckets);
            let mut counts: std::collections::BTreeMap<u128, u128> = Default::default();
            let mut start = 0;
            history.iter().all(|event| {
                let slot_of = |start: u128, at: u128| at.saturating_sub(start) * buckets / window;
                let Admitted { arrival, instant, cost } = match *event {
                    Ok(admitted) => admitted,
                    Err(dropped) => {
                        let slot = slot_of(start, dropped.instant);
                        let left = counts.remove(&slot).unwrap() - dropped.cost;
                        counts.extend((left > 0).then_some((slot, left)));
                        return true;
                    }
                };
                let seen = counts.last_key_value().map(|(slot, _)| *slot);
                if seen.is_none_or(|seen| slot_of(start, arrival) > seen + buckets) {
                    counts.clear();
                    start = arrival;
                }
                let slot = slot_of(start, instant);
                let first_inside = (slot + 1).saturating_sub(buckets);
                let inside: u128 = counts.range(first_inside..).map(|(_, count)| count).sum();
                let oldest = slot.checked_sub(buckets).and_then(|slot| counts.get(&slot)).copied();
                let overlap = (slot + 1) * window - (instant - start) * buckets;
                *counts.entry(slot).or_default() += cost;
                (inside + cost) * window + oldest.unwrap_or(0) * overlap <= limit * window
            })
        });
    }
}

#[test]
fn a_token_bucket_admits_at_most_its_burst_and_its_rate() {
    for overdraft in [0, 3] {
        let algorithm = Algorithm::TokenBucket { refill: Refill::Continuous, overdraft };
        always(algorithm, |quota, admitted| {
            let (limit, window) = limit_and_window(quota);
            let burst = limit + u128::from(overdraft);
            stretches(admitted)
                .all(|(stretch, time)| sum(stretch) * window <= burst * window + limit * time)
        });
    }
}

#[test]
fn a_token_bucket_that_refills_at_once_admits_whole_lumps() {
    for overdraft in [0, 3] {
        let algorithm = Algorithm::TokenBucket { refill: Refill::Interval, overdraft };
        always(algorithm, |quota, admitted| {
            let (limit, window) = limit_and_window(quota);
            let burst = limit + u128::from(overdraft);
            stretches(admitted)
                .all(|(stretch, time)| sum(stretch) <= burst + limit * time.div_ceil(window))
        });
    }
}

#[test]
fn a_leaky_bucket_releases_requests_at_its_rate() {
    always(Algorithm::LeakyBucket, |quota, admitted| {
        let (limit, window) = limit_and_window(quota);
        admitted.windows(2).all(|pair| {
            let apart = pair[1].instant - pair[0].instant;
            apart >= pair[0].cost * window / limit
        })
    });
}

/// Runs a client that always retries exactly after `retry_after`. Returns the units that it got,
/// and the units that the quota allows in that time.
fn long_run(algorithm: Algorithm, quota: Quota, cost: u64, denials: u32) -> (f64, f64) {
    let params = Params::new(algorithm, quota).unwrap();
    let mut state = State::default();
    let start = START;
    let (mut now, mut spent) = (start, 0.0);
    for _ in 0..denials {
        loop {
            let reply = state.decide(&params, check(cost, now));
            if !reply.admitted {
                now += reply.known_wait();
                break;
            }
            spent += cost as f64;
        }
    }
    (spent, quota.limit() as f64 * (now - start) as f64 / quota.window_us() as f64)
}

#[test]
fn the_quota_is_met_in_the_long_run() {
    let year = Duration::from_secs(366 * 86_400);
    for (quota, cost) in [
        (Quota::per_day(1), 1),
        (Quota::per_day(7), 1),
        (Quota::per_second(3), 1),
        (Quota::per_second(999_983), 99_998),
        (Quota::per_second(1_000_000), 100_000),
        (Quota::new(65_537, Duration::from_millis(1)), 6_553),
        (Quota::new(1, year), 1),
    ] {
        for (algorithm, quota) in all_with(quota) {
            if algorithm == Algorithm::LeakyBucket {
                continue;
            }
            let (spent, allowed) = long_run(algorithm, quota, cost, 20_000);
            let limit = quota.limit() as f64;
            assert!(spent <= allowed + limit, "{algorithm} {quota}: {spent} of {allowed}");
            // A window loses fewer units than a request costs; the estimate of a sliding window
            // loses up to two requests more.
            let requests = (quota.limit() / cost) as f64;
            let sliding = matches!(algorithm, Algorithm::SlidingWindow { .. });
            let estimated = if sliding { requests / (requests + 2.0) } else { 1.0 };
            let usable = cost as f64 * requests / limit * estimated;
            let min = allowed * usable * (1.0 - 1e-6) - limit;
            assert!(spent >= min, "{algorithm} {quota}: {spent} of {allowed}");
        }
    }
}

#[test]
fn a_bucket_does_not_drift() {
    for quota in [
        Quota::per_second(3).burst(5),
        Quota::per_second(7).burst(9),
        Quota::per_second(999_983).burst(100),
        Quota::per_second(1_000_000).burst(100),
        Quota::per_day(1).burst(2),
        Quota::per_day(86_413).burst(3),
    ] {
        let (spent, allowed) = long_run(Algorithm::token_bucket(), quota, 1, 1_000_000);
        let share = (spent - quota.burst_size() as f64) / allowed;
        assert!((1.0 - 3e-6..=1.0).contains(&share), "{quota}: {share}");
    }
}

#[test]
fn a_shaper_does_not_drift() {
    for quota in [
        Quota::per_second(3),
        Quota::per_second(999_983).burst(10),
        Quota::per_second(1_000_000),
        Quota::per_day(7),
    ] {
        let params = Params::new(Algorithm::LeakyBucket, quota).unwrap();
        let mut state = State::default();
        let mut now = START;
        let start = now;
        let departures = 1_000_000;
        for _ in 0..departures {
            let max_wait = params.max_reservable();
            let reply = state.decide(&params, EngineRequest { max_wait, ..check(1, now) });
            now += if reply.admitted { reply.known_wait() } else { panic!("{quota}: {reply:?}") };
        }
        let allowed = quota.limit() as f64 * (now - start) as f64 / quota.window_us() as f64;
        let share = f64::from(departures - 1) / allowed;
        assert!((1.0 - 1.5e-6..=1.0).contains(&share), "{quota}: {share}");
    }
}

#[test]
fn a_burst_at_one_instant_admits_exactly_the_burst() {
    for quota in [
        Quota::per_second(1).burst(1),
        Quota::per_second(999_983).burst(100_000),
        Quota::per_day(86_413).burst(77),
        Quota::new(u32::MAX.into(), Duration::from_millis(1)).burst(1_000),
        Quota::per_second(3).burst(1_000_000),
    ] {
        for algorithm in [Algorithm::token_bucket(), Algorithm::LeakyBucket] {
            let params = Params::new(algorithm, quota).unwrap();
            let max_wait = params.default_wait();
            let request = EngineRequest { max_wait, ..check(1, START) };
            let mut state = State::default();
            let count = (0..).take_while(|_| state.decide(&params, request).admitted).count();
            assert_eq!(count, quota.burst_size() as usize, "{algorithm} {quota}");
        }
    }
}

#[test]
fn a_change_of_the_quota_keeps_the_used_units() {
    let all = |quota| all_with(quota).into_iter();
    let check = |params: &Params, state: &mut State, cost: u32, now: i64| {
        let max_wait = params.default_wait();
        state.decide(params, EngineRequest { max_wait, ..check(cost, now) })
    };
    let (slow, fast) = (Quota::per_hour(10), Quota::per_second(10));
    for ((algorithm, slow), (_, fast)) in all(slow).zip(all(fast)) {
        let slow = Params::new(algorithm, slow).unwrap();
        let fast = Params::new(algorithm, fast).unwrap();
        let now = START;

        let mut state = State::default();
        assert!(check(&slow, &mut state, 10, now).admitted);
        let raised = check(&fast, &mut state, 10, now + 60_000_000);
        assert!(raised.admitted || raised.known_wait() <= 2_000_000, "{algorithm}: {raised:?}");

        let mut state = State::default();
        assert!(check(&fast, &mut state, 10, now).admitted);
        let before = state.clone();
        let lowered = check(&slow, &mut state, 1, now + 1_000);
        assert!(!lowered.admitted && lowered.known_wait() > 900_000, "{algorithm}: {lowered:?}");
        assert_eq!(state, before, "{algorithm}: a denied check converts the state");
        let retry = check(&slow, &mut state, 1, now + 1_000 + lowered.known_wait() - 1);
        // A shaper reports no earlier time than its own.
        assert!(!retry.admitted || slow.shapes(), "{algorithm} forgets what was used");
        // By the quota that counted it, it is over.
        assert!(
            check(&slow, &mut state, 1, now + 1_000 + lowered.known_wait()).admitted,
            "{algorithm}"
        );

        let mut state = State::default();
        assert!(check(&fast, &mut state, 5, now).admitted);
        assert!(check(&slow, &mut state, 1, now + 1_000).admitted);
        let lowered = check(&slow, &mut state, 5, now + 3_000_000);
        assert!(
            !lowered.admitted && lowered.known_wait() > 300_000_000,
            "{algorithm}: {lowered:?}"
        );
    }
}

#[test]
fn replicas_with_different_quotas_still_admit_requests() {
    let one = all_with(Quota::per_second(10)).into_iter();
    for other in [Quota::per_second(20), Quota::new(10, Duration::from_secs(2))] {
        for ((algorithm, quota), (_, other)) in one.clone().zip(all_with(other)) {
            let params = [quota, other].map(|quota| Params::new(algorithm, quota).unwrap());
            let mut state = State::default();
            let checks = 600;
            let admitted = (0..checks).filter(|i| {
                let now = START + i64::from(*i) * 100_000;
                state.decide(&params[*i as usize % 2], check(1, now)).admitted
            });
            // At least half of the units that the stricter quota allows in a minute.
            let admitted = admitted.count();
            assert!((150..=checks as usize).contains(&admitted), "{algorithm} {other}: {admitted}");
        }
    }
}

#[test]
fn the_largest_reduction_of_a_quota_keeps_the_wait_within_bounds() {
    let most = (36_525 + 366) * 86_400_000_000;
    let lowest = Quota::new(1, Duration::from_secs(366 * 86_400));
    for highest in
        [Quota::per_second(1_000_000), Quota::new(u32::MAX.into(), Duration::from_millis(1))]
    {
        let pairs = all_with(highest).into_iter();
        for ((algorithm, high), (_, low)) in pairs.zip(all_with(lowest)) {
            let high = Params::new(algorithm, high).unwrap();
            let low = Params::new(algorithm, low).unwrap();
            let mut state = State::default();
            let spent = state.decide(&high, check(highest.limit(), START));
            assert!(spent.admitted);
            let denied = state.decide(&low, check(1, START + 1));
            assert!(!denied.admitted && denied.known_wait() <= most, "{algorithm}: {denied:?}");
            assert!(denied.reset <= most, "{algorithm}: {denied:?}");
        }
    }
}

#[test]
fn a_refund_returns_the_oldest_units_so_that_the_log_keeps_its_guarantee() {
    let params = Params::new(Algorithm::SlidingLog, Quota::per_second(10)).unwrap();
    let mut state = State::default();
    let mut decide = |action, cost, ms: i64| {
        let request = EngineRequest { action, ..check(cost, START + ms * 1_000) };
        state.decide(&params, request)
    };
    assert!(decide(Action::Check, 5, 0).admitted);
    assert!(decide(Action::Check, 5, 900).admitted);
    assert_eq!(decide(Action::Refund, 5, 900).remaining, 5);
    assert!(decide(Action::Check, 5, 900).admitted);
    assert!(!decide(Action::Check, 1, 1_000).admitted);
    assert_eq!(decide(Action::Refund, 3, 1_000).remaining, 3);
    assert_eq!(decide(Action::Refund, 100, 1_000).reset, 0);
}

#[test]
fn reservations_stay_ahead_when_the_quota_is_changed() {
    let other = Quota::new(10, Duration::from_secs(2));
    let pairs = all_with(Quota::per_second(10)).into_iter();
    for ((algorithm, quota), (_, other)) in pairs.zip(all_with(other)) {
        if algorithm == Algorithm::LeakyBucket {
            continue;
        }
        let params = Params::new(algorithm, quota).unwrap();
        let now = START;
        let mut state = State::default();
        let mut last = 0;
        for _ in 0..6 {
            let request = EngineRequest { max_wait: 60_000_000, ..check(10, now) };
            last = state.decide(&params, request).known_wait();
        }
        let other = Params::new(algorithm, other).unwrap();
        let denied = state.decide(&other, check(1, now));
        assert!(denied.known_wait() > last, "{algorithm}: {} after {last}", denied.known_wait());
    }
}

#[test]
fn reservations_delay_later_requests_no_longer_than_their_units_count() {
    let (slow, fast) = (Quota::per_second(1), Quota::per_second(1000));
    let [slow, fast] =
        [slow, fast].map(|quota| Params::new(Algorithm::token_bucket(), quota).unwrap());
    let now = START;
    let mut state = State::default();
    for _ in 0..6 {
        let request = EngineRequest { max_wait: 60_000_000, ..check(1, now) };
        assert!(state.decide(&slow, request).admitted);
    }
    assert!(state.clone().decide(&slow, check(1, now)).known_wait() > 5_000_000);

    // With a higher quota, until the last of them proceeds.
    let raised = state.clone().decide(&fast, check(1, now + 1_000_000));
    assert_eq!((raised.admitted, raised.known_wait()), (false, 4_000_000), "{raised:?}");

    // The reservations are dropped, and the units that were spent are refunded.
    state.decide(&slow, check(1, now - 1));
    let refund = EngineRequest { action: Action::Refund, ..check(6, now) };
    assert_eq!(state.decide(&slow, refund).reset, 0);
    assert!(state.decide(&slow, check(1, now)).admitted);
}

#[test]
fn a_refund_returns_units_that_still_count() {
    for algorithm in [Algorithm::SlidingLog, Algorithm::SlidingWindow { buckets: 2 }] {
        let params = Params::new(algorithm, Quota::per_second(10)).unwrap();
        let mut state = State::default();
        let mut decide = |action, cost, ms: i64| {
            let request = EngineRequest { action, ..check(cost, START + ms * 1_000) };
            state.decide(&params, request)
        };
        assert!(decide(Action::Check, 4, 0).admitted);
        assert!(decide(Action::Check, 3, 1_000).admitted);
        // The request that was admitted first no longer counts.
        assert_eq!(decide(Action::Peek, 1, 1_500).remaining, 7, "{algorithm}");
        assert_eq!(decide(Action::Refund, 3, 1_500).remaining, 10, "{algorithm}");
    }
}

#[test]
fn a_refund_leaves_the_units_of_requests_that_wait_after_the_clock_stepped_back() {
    // A request that waits has moved the counts of the present out of a sliding window. Without it,
    // the key would be as unused.
    let server = RedisServer::start();
    let mut scripted = Scripted::new(&server, "{key}");
    for buckets in [1, 2, 10] {
        let algorithm = Algorithm::SlidingWindow { buckets };
        let params = Params::new(algorithm, Quota::per_second(1)).unwrap();
        let mut twin = State::default();
        scripted.forget();
        let mut decide = |action, cost, max_wait, now| {
            let request = EngineRequest { action, max_wait, ..check(cost, now) };
            both(&mut scripted, &mut twin, &params, request)
        };
        let now = START;
        decide(Action::Spend, 7, 0, now);
        assert!(decide(Action::Check, 1, 60_000_000, now).known_wait() > 1_000_000, "{algorithm}");
        decide(Action::Refund, 4, 0, now - 1);
        let denied = decide(Action::Check, 1, 0, now - 1);
        assert!(!denied.admitted && denied.known_wait() > 1_000_000, "{algorithm}: {denied:?}");
    }
}
