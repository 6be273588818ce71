//! What was admitted, counted by brute force in every window.

use std::time::Duration;

use proptest::{prelude::*, test_runner::TestRunner};

use super::{
    super::{Action, Algorithm, EngineRequest, Params, Refill, Release, State},
    backends::{Backend, RedisServer, Scripted, check, default_wait},
};
use crate::quota::Quota;

/// A request that was admitted: when it asked, when it goes on, and its cost.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Admitted {
    asked: u128,
    instant: u128,
    cost: u128,
}

/// The requests of a history: how long after the one before, the cost, and the longest wait, in
/// 1/1000 of the window; and which of those that wait gives up right before it.
type Request = (u32, u32, Option<u32>, Option<prop::sample::Index>);

fn requests() -> impl Strategy<Value = Vec<Request>> {
    let ahead = prop_oneof![4 => 0_u32..100, 3 => Just(0), 1 => 100_u32..1_500];
    let max_wait = prop_oneof![1 => Just(None), 1 => (0_u32..3_000).prop_map(Some)];
    let gives_up = prop::option::weighted(0.3, any::<prop::sample::Index>());
    prop::collection::vec((ahead, 1_u32..5, max_wait, gives_up), 1..120)
}

fn quotas() -> impl Strategy<Value = Quota> {
    let window = prop_oneof![Just(1_000_000), 1_000_u64..10_000_000, Just(86_400_000_000)];
    (1_u32..30, window).prop_map(|(limit, us)| Quota::new(limit, Duration::from_micros(us)))
}

/// Who went on, and everything that happened on the way: who was admitted (`Ok`), and who gave up.
type Outcome = (Vec<Admitted>, Vec<Result<Admitted, Admitted>>);

fn admitted(
    backend: &mut impl Backend,
    algorithm: Algorithm,
    quota: Quota,
    requests: &[Request],
) -> Outcome {
    let params = Params::new(algorithm, quota).unwrap();
    let part = |thousandths: u32| (quota.window_us() as f64 * f64::from(thousandths) / 1e3).floor();
    let mut now = 1.7e15;
    let (mut admitted, mut history): Outcome = Default::default();
    // Also when the turn has come; but windows stay where they are, even if their first request is
    // given back.
    let at_any_time =
        !matches!(algorithm, Algorithm::FixedWindow | Algorithm::SlidingWindow { .. });
    for &(ahead, cost, max_wait, gives_up) in requests {
        now += part(ahead);
        let is_past = |it: &Admitted| !at_any_time && it.instant <= now as u128;
        let passed = admitted.partition_point(is_past);
        if let Some(which) = gives_up.filter(|_| passed < admitted.len()) {
            let it = admitted.remove(passed + which.index(admitted.len() - passed));
            backend.release(&params, now, &[release(it.cost as f64, it.instant as f64)]);
            history.push(Err(it));
        }
        let cost = cost.min(quota.limit());
        let max_wait = max_wait.map_or(default_wait(&params), part);
        let ask = EngineRequest { max_wait, ..check(cost, now) };
        let verdict = backend.decide(&params, ask);
        if verdict.admitted {
            let instant = (now + verdict.wait) as u128;
            admitted.push(Admitted { asked: now as u128, instant, cost: cost.into() });
            history.push(Ok(admitted[admitted.len() - 1]));
        }
    }
    (admitted, history)
}

/// Runs a history on the twin, and every tenth on the script too.
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
            let twin = admitted(&mut State::Initial, algorithm, quota, &requests);
            let (went, history) = &twin;
            prop_assert!(holds(quota, went, history), "{algorithm} {quota}: {history:?}");
            prop_assert!(went.is_sorted_by_key(|it| it.instant), "not in order: {went:?}");
            if scripted == 0 {
                let mut backend = Scripted::new(&server, "{key}");
                backend.forget();
                prop_assert_eq!(admitted(&mut backend, algorithm, quota, &requests), twin);
            }
            Ok(())
        })
        .unwrap_or_else(|failure| panic!("{failure}"));
}

fn release(units: f64, instant: f64) -> Release {
    Release { instant: Some(instant), units, kept: 0.0 }
}

#[test]
fn turns_that_are_given_back_leave_no_trace() {
    let costs = prop::collection::vec(1_u32..5, 1..20);
    let order = any::<prop::sample::Index>();
    TestRunner::default()
        .run(&(quotas(), costs, order, 0_u32..50), |(quota, costs, order, ahead)| {
            for (algorithm, quota) in super::contract::all_with(quota) {
                let params = Params::new(algorithm, quota).unwrap();
                let mut now = 1.7e15;
                let mut state = State::Initial;
                while state.decide(&params, check(1, now)).admitted {}
                now += (quota.window_us() as f64 / f64::from(quota.limit()) / 2.0).floor();
                let before = state.clone();

                let mut booked = vec![];
                for cost in &costs {
                    let cost = f64::from(*cost.min(&quota.limit()));
                    let max_wait = params.max_reservable();
                    let verdict =
                        state.decide(&params, EngineRequest { max_wait, ..check(cost, now) });
                    if verdict.admitted {
                        booked.push((cost, verdict.instant));
                    }
                    now += f64::from(ahead);
                }
                while !booked.is_empty() {
                    let (cost, instant) = booked.swap_remove(order.index(booked.len()));
                    state.release(&params, now, &[release(cost, instant)]);
                }
                for later in [0.0, 1e3, 1e6, 1e9] {
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
    admitted.iter().map(|it| it.cost).sum()
}

fn limit_and_window(quota: Quota) -> (u128, u128) {
    (quota.limit().into(), quota.window_us().into())
}

/// All stretches of what was admitted, with the time from their first to their last request.
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
            let inside = rest.partition_point(|it| it.instant < opening + window);
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
                let Admitted { asked, instant, cost } = match *event {
                    Ok(it) => it,
                    Err(it) => {
                        let slot = slot_of(start, it.instant);
                        let left = counts.remove(&slot).unwrap() - it.cost;
                        counts.extend((left > 0).then_some((slot, left)));
                        return true;
                    }
                };
                let seen = counts.last_key_value().map(|(slot, _)| *slot);
                if seen.is_none_or(|seen| slot_of(start, asked) > seen + buckets) {
                    counts.clear();
                    start = asked;
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
fn a_leaky_bucket_lets_go_at_its_rate() {
    always(Algorithm::LeakyBucket, |quota, admitted| {
        let (limit, window) = limit_and_window(quota);
        admitted.windows(2).all(|pair| {
            let apart = pair[1].instant - pair[0].instant;
            apart >= pair[0].cost * window / limit
        })
    });
}

/// A client that always comes back exactly when it was told to: what it got, and how much the quota
/// allows in the time that it took.
fn long_run(algorithm: Algorithm, quota: Quota, cost: u32, denials: u32) -> (f64, f64) {
    let params = Params::new(algorithm, quota).unwrap();
    let mut state = State::Initial;
    let start = 1.7e15;
    let (mut now, mut spent) = (start, 0.0);
    for _ in 0..denials {
        loop {
            let verdict = state.decide(&params, check(cost, now));
            if !verdict.admitted {
                now += verdict.wait;
                break;
            }
            spent += f64::from(cost);
        }
    }
    (spent, f64::from(quota.limit()) * (now - start) / quota.window_us() as f64)
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
        for (algorithm, quota) in super::contract::all_with(quota) {
            if algorithm == Algorithm::LeakyBucket {
                continue;
            }
            let (spent, allowed) = long_run(algorithm, quota, cost, 20_000);
            let limit = f64::from(quota.limit());
            assert!(spent <= allowed + limit, "{algorithm} {quota}: {spent} of {allowed}");
            // What does not fill a whole request is lost to the windows; to the estimate of a
            // sliding window, up to two requests more.
            let requests = f64::from(quota.limit() / cost);
            let sliding = matches!(algorithm, Algorithm::SlidingWindow { .. });
            let estimated = if sliding { requests / (requests + 2.0) } else { 1.0 };
            let usable = f64::from(cost) * requests / limit * estimated;
            let least = allowed * usable * (1.0 - 1e-6) - limit;
            assert!(spent >= least, "{algorithm} {quota}: {spent} of {allowed}");
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
        let share = (spent - f64::from(quota.burst_size())) / allowed;
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
        let mut state = State::Initial;
        let mut now = 1.7e15;
        let start = now;
        let departures = 1_000_000;
        for _ in 0..departures {
            let max_wait = params.max_reservable();
            let verdict = state.decide(&params, EngineRequest { max_wait, ..check(1.0, now) });
            now += if verdict.admitted { verdict.wait } else { panic!("{quota}: {verdict:?}") };
        }
        let allowed = f64::from(quota.limit()) * (now - start) / quota.window_us() as f64;
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
        Quota::new(u32::MAX, Duration::from_millis(1)).burst(1_000),
        Quota::per_second(3).burst(1_000_000),
    ] {
        for algorithm in [Algorithm::token_bucket(), Algorithm::LeakyBucket] {
            let params = Params::new(algorithm, quota).unwrap();
            let max_wait = default_wait(&params);
            let ask = EngineRequest { max_wait, ..check(1.0, 1.7e15) };
            let mut state = State::Initial;
            let count = (0..).take_while(|_| state.decide(&params, ask).admitted).count();
            assert_eq!(count, quota.burst_size() as usize, "{algorithm} {quota}");
        }
    }
}

#[test]
fn a_quota_that_is_changed_keeps_what_was_used() {
    let all = |quota| super::contract::all_with(quota).into_iter();
    let check = |params: &Params, state: &mut State, cost: u32, now: f64| {
        let max_wait = default_wait(params);
        state.decide(params, EngineRequest { max_wait, ..check(cost, now) })
    };
    let (slow, fast) = (Quota::per_hour(10), Quota::per_second(10));
    for ((algorithm, slow), (_, fast)) in all(slow).zip(all(fast)) {
        let slow = Params::new(algorithm, slow).unwrap();
        let fast = Params::new(algorithm, fast).unwrap();
        let now = 1.7e15;

        let mut state = State::Initial;
        assert!(check(&slow, &mut state, 10, now).admitted);
        let raised = check(&fast, &mut state, 10, now + 60e6);
        assert!(raised.admitted || raised.wait <= 2e6, "{algorithm}: {raised:?}");

        let mut state = State::Initial;
        assert!(check(&fast, &mut state, 10, now).admitted);
        let lowered = check(&slow, &mut state, 1, now + 1e3);
        assert!(!lowered.admitted && lowered.wait > 300e6, "{algorithm}: {lowered:?}");
        let retry = check(&slow, &mut state.clone(), 1, now + 1e3 + lowered.wait - 1.0);
        assert!(!retry.admitted, "{algorithm} forgets what was used");
        assert!(check(&slow, &mut state, 1, now + 1e3 + lowered.wait).admitted, "{algorithm}");
    }
}

#[test]
fn replicas_with_different_quotas_lock_nobody_out() {
    let one = super::contract::all_with(Quota::per_second(10)).into_iter();
    for other in [Quota::per_second(20), Quota::new(10, Duration::from_secs(2))] {
        for ((algorithm, quota), (_, other)) in one.clone().zip(super::contract::all_with(other)) {
            let params = [quota, other].map(|quota| Params::new(algorithm, quota).unwrap());
            let mut state = State::Initial;
            let checks = 600;
            let admitted = (0..checks).filter(|i| {
                let now = 1.7e15 + f64::from(*i) * 1e5;
                state.decide(&params[*i as usize % 2], check(1, now)).admitted
            });
            // At the least half of what the stricter quota allows in a minute.
            let admitted = admitted.count();
            assert!((150..=checks as usize).contains(&admitted), "{algorithm} {other}: {admitted}");
        }
    }
}

#[test]
fn a_quota_that_is_lowered_as_far_as_can_be_keeps_what_was_used_in_bounds() {
    let century = 36_525.0 * 86_400e6;
    let lowest = Quota::new(1, Duration::from_secs(366 * 86_400));
    for highest in [Quota::per_second(1_000_000), Quota::new(u32::MAX, Duration::from_millis(1))] {
        let pairs = super::contract::all_with(highest).into_iter();
        for ((algorithm, high), (_, low)) in pairs.zip(super::contract::all_with(lowest)) {
            let high = Params::new(algorithm, high).unwrap();
            let low = Params::new(algorithm, low).unwrap();
            let mut state = State::Initial;
            let spent = state.decide(&high, check(highest.limit(), 1.7e15));
            assert!(spent.admitted);
            let denied = state.decide(&low, check(1, 1.7e15 + 1.0));
            assert!(!denied.admitted && denied.wait <= century, "{algorithm}: {denied:?}");
            assert!(denied.reset <= century, "{algorithm}: {denied:?}");
        }
    }
}

#[test]
fn a_refund_gives_back_the_oldest_so_that_the_log_keeps_its_promise() {
    let params = Params::new(Algorithm::SlidingLog, Quota::per_second(10)).unwrap();
    let mut state = State::Initial;
    let mut ask = |action, cost, ms: f64| {
        let ask = EngineRequest { action, ..check(cost, 1.7e15 + ms * 1e3) };
        state.decide(&params, ask)
    };
    assert!(ask(Action::Check, 5.0, 0.0).admitted);
    assert!(ask(Action::Check, 5.0, 900.0).admitted);
    assert_eq!(ask(Action::Refund, 5.0, 900.0).remaining, 5.0);
    assert!(ask(Action::Check, 5.0, 900.0).admitted);
    assert!(!ask(Action::Check, 1.0, 1000.0).admitted);
    assert_eq!(ask(Action::Refund, 3.0, 1000.0).remaining, 3.0);
    assert_eq!(ask(Action::Refund, 100.0, 1000.0).reset, 0.0);
}

#[test]
fn turns_that_are_booked_stay_ahead_when_the_quota_is_changed() {
    let other = Quota::new(10, Duration::from_secs(2));
    let pairs = super::contract::all_with(Quota::per_second(10)).into_iter();
    for ((algorithm, quota), (_, other)) in pairs.zip(super::contract::all_with(other)) {
        if algorithm == Algorithm::LeakyBucket {
            continue;
        }
        let params = Params::new(algorithm, quota).unwrap();
        let now = 1.7e15;
        let mut state = State::Initial;
        let mut last = 0.0;
        for _ in 0..6 {
            let ask = EngineRequest { max_wait: 60e6, ..check(10, now) };
            last = state.decide(&params, ask).wait;
        }
        let other = Params::new(algorithm, other).unwrap();
        let denied = state.decide(&other, check(1, now));
        assert!(denied.wait > last, "{algorithm}: {} after {last}", denied.wait);
    }
}

#[test]
fn turns_are_counted_no_longer_than_what_they_spent() {
    let (slow, fast) = (Quota::per_second(1), Quota::per_second(1000));
    let [slow, fast] =
        [slow, fast].map(|quota| Params::new(Algorithm::token_bucket(), quota).unwrap());
    let now = 1.7e15;
    let mut state = State::Initial;
    for _ in 0..6 {
        let ask = EngineRequest { max_wait: 60e6, ..check(1, now) };
        assert!(state.decide(&slow, ask).admitted);
    }
    assert!(state.clone().decide(&slow, check(1, now)).wait > 5e6);

    let raised = state.clone().decide(&fast, check(1, now + 1e6));
    assert_eq!((raised.admitted, raised.wait), (false, 5e3), "{raised:?}");

    // The turns are forgotten, and what was spent is given back.
    state.decide(&slow, check(1, now - 1.0));
    let refund = EngineRequest { action: Action::Refund, ..check(6, now) };
    assert_eq!(state.decide(&slow, refund).reset, 0.0);
    assert!(state.decide(&slow, check(1, now)).admitted);
}

#[test]
fn a_refund_gives_back_what_still_counts() {
    for algorithm in [Algorithm::SlidingLog, Algorithm::SlidingWindow { buckets: 2 }] {
        let params = Params::new(algorithm, Quota::per_second(10)).unwrap();
        let mut state = State::Initial;
        let mut ask = |action, cost, ms: f64| {
            let ask = EngineRequest { action, ..check(cost, 1.7e15 + ms * 1e3) };
            state.decide(&params, ask)
        };
        assert!(ask(Action::Check, 4.0, 0.0).admitted);
        assert!(ask(Action::Check, 3.0, 1000.0).admitted);
        // What was admitted first has left by now.
        assert_eq!(ask(Action::Peek, 1.0, 1500.0).remaining, 7.0, "{algorithm}");
        assert_eq!(ask(Action::Refund, 3.0, 1500.0).remaining, 10.0, "{algorithm}");
    }
}
