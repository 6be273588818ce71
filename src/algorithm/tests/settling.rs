//! Settling, cancelling and releasing let nothing more through than the promise, in any order and
//! whatever is lost. The oracle counts what was really used, and knows nothing of states.

use std::{env, time::Duration};

use proptest::{prelude::*, sample::Index, test_runner::TestRunner};

use super::{
    super::{Action, Algorithm, EngineRequest, Params, Refill, Release, State},
    backends::{Backend, RedisServer, Scripted, check},
};
use crate::quota::Quota;

#[derive(Clone, Debug)]
enum Step {
    /// A cost, and the longest wait in 1/1000 of a window.
    Check(u32, u32),
    /// Of a request that was admitted, how much of its cost was used, in quarters: more than four
    /// is spent.
    Settle(Index, u32),
    /// Requests that are gone, at once.
    Cancel(Vec<Index>),
    /// Units that no decision is named for.
    Grant(u32),
    Lose,
    /// In 1/1000 of a window, and microseconds.
    Pass(u32, u32),
    /// From now on the other quota counts.
    Change,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let wait = prop_oneof![2 => Just(0), 3 => 0_u32..3_000];
    let pass = prop_oneof![4 => 0_u32..100, 1 => 100_u32..1_500];
    let step = prop_oneof![
        12 => (1_u32..6, wait).prop_map(|(cost, wait)| Step::Check(cost, wait)),
        4 => (any::<Index>(), 0_u32..8).prop_map(|(which, used)| Step::Settle(which, used)),
        3 => prop::collection::vec(any::<Index>(), 1..5).prop_map(Step::Cancel),
        1 => (1_u32..5).prop_map(Step::Grant),
        1 => Just(Step::Lose),
        8 => (pass, 0_u32..3).prop_map(|(part, us)| Step::Pass(part, us)),
        1 => Just(Step::Change),
    ];
    prop::collection::vec(step, 1..100)
}

fn quotas() -> impl Strategy<Value = Quota> {
    let window = prop_oneof![Just(1_000_000), 1_000_u64..10_000_000, Just(86_400_000_000)];
    (1_u32..30, window).prop_map(|(limit, us)| Quota::new(limit, Duration::from_micros(us)))
}

/// Something that was used, in the order in which it was admitted.
#[derive(Clone, Debug)]
struct Use {
    instant: f64,
    /// Negative if it was granted.
    used: f64,
    /// Whether it could have been denied.
    is_check: bool,
    /// How often the state had been lost.
    losses: usize,
    /// The opening of its window.
    window: f64,
}

/// The opening of the window of an instant, or else of the newest one that something is reserved
/// in, for those that are fixed.
fn window_of(state: &State, instant: Option<f64>, length: f64) -> f64 {
    let State::FixedWindow(Some(it)) = state else { return 0.0 };
    let ahead = instant.map_or(it.state.ahead, |at| ((at - it.state.start) / length).floor());
    it.state.start + ahead * length
}

trait Lossy: Backend {
    fn lose(&mut self);

    fn state(&mut self, params: &Params) -> State;
}

impl Lossy for State {
    fn lose(&mut self) {
        *self = Self::Initial;
    }

    fn state(&mut self, _: &Params) -> State {
        self.clone()
    }
}

impl Lossy for Scripted {
    fn lose(&mut self) {
        self.forget();
    }

    fn state(&mut self, params: &Params) -> State {
        self.state(params)
    }
}

/// What is checked after each step.
type Oracle = fn([Quota; 2], &[Use]) -> bool;

fn history(
    backend: &mut impl Lossy,
    algorithm: Algorithm,
    quotas: [Quota; 2],
    steps: &[Step],
    oracle: Oracle,
) -> Result<(), TestCaseError> {
    let limiters = quotas.map(|quota| Params::new(algorithm, quota).unwrap());
    let mut current_quota = 0;
    let window = quotas[0].window_us() as f64;
    // Requests that wait keep their instants when the quota is changed, for which the oracle has no
    // bound.
    let waits = quotas[0] == quotas[1];
    let max_cost = quotas.map(|quota| quota.limit()).into_iter().min().unwrap();
    let part = |thousandths: u32| (window * f64::from(thousandths) / 1e3).floor();
    let (mut now, mut losses) = (1.7e15, 0);
    let mut uses: Vec<Use> = vec![];
    // Of what is not settled yet: the place of its use, and by which quota it was charged.
    let mut open: Vec<(usize, usize)> = vec![];
    backend.lose();
    for step in steps {
        let params = limiters[current_quota];
        let admit = |backend: &mut dyn Lossy, uses: &mut Vec<Use>, ask: EngineRequest| {
            let verdict = backend.decide(&params, ask);
            let is_check = ask.action == Action::Check;
            let window = window_of(&backend.state(&params), None, window);
            if verdict.admitted {
                let (instant, used) = (verdict.instant, ask.cost);
                uses.push(Use { instant, used, is_check, losses, window });
            }
            verdict.admitted
        };
        let window = window_of(&backend.state(&params), Some(now), window);
        let current = Use { instant: now, used: 0.0, is_check: false, losses, window };
        match step {
            Step::Check(cost, max_wait) => {
                let cost = f64::from(*cost.min(&max_cost));
                let max_wait = if waits { part(*max_wait).max(params.default_wait()) } else { 0.0 };
                if admit(backend, &mut uses, EngineRequest { max_wait, ..check(cost, now) }) {
                    open.push((uses.len() - 1, current_quota));
                }
            }
            Step::Settle(which, quarters) if !open.is_empty() => {
                let (place, charged_by) = open.swap_remove(which.index(open.len()));
                let Use { used: charged, instant, .. } = uses[place];
                let max_quarters = if waits { u32::MAX } else { 4 };
                let quarters = f64::from(*quarters.min(&max_quarters));
                let used = (charged * quarters / 4.0).round();
                if used > charged {
                    let action = Action::Spend;
                    admit(
                        backend,
                        &mut uses,
                        EngineRequest { action, ..check(used - charged, now) },
                    );
                } else if used < charged {
                    let units = charged - used;
                    let release = Release { instant: Some(instant), units, kept: used };
                    backend.release(&limiters[charged_by], now, &[release]);
                    uses[place].used = used;
                    returned(&mut uses, place, Use { instant: now, used: -units, ..current });
                }
            }
            Step::Cancel(all) => {
                let mut releases = [vec![], vec![]];
                for which in all {
                    if !open.is_empty() {
                        let (place, charged_by) = open.swap_remove(which.index(open.len()));
                        let it = &mut uses[place];
                        let (instant, units) = (Some(it.instant), it.used);
                        releases[charged_by].push(Release { instant, units, kept: 0.0 });
                        it.used = 0.0;
                        returned(&mut uses, place, Use { instant: now, used: -units, ..current });
                    }
                }
                for (params, releases) in limiters.iter().zip(releases) {
                    if !releases.is_empty() {
                        backend.release(params, now, &releases);
                    }
                }
            }
            Step::Grant(units) if !matches!(algorithm, Algorithm::SlidingWindow { .. }) => {
                backend.decide(
                    &params,
                    EngineRequest { action: Action::Refund, ..check(*units, now) },
                );
                uses.push(Use { used: -f64::from(*units), ..current });
            }
            Step::Lose => {
                backend.lose();
                losses += 1;
                now += 1.0; // or what is lost cannot be told from what comes next
            }
            Step::Pass(thousandths, us) => now += part(*thousandths) + f64::from(*us),
            Step::Change => current_quota = 1,
            Step::Settle(..) | Step::Grant(_) => {}
        }
    }
    prop_assert!(oracle(quotas, &uses), "{algorithm} {quotas:?}: {uses:?}");
    Ok(())
}

/// What was spent before a loss is not in the state, so that its return is a grant: but for what
/// was reserved for an instant to come, unless by chance others are reserved for the same.
fn returned(uses: &mut Vec<Use>, place: usize, grant: Use) {
    let Use { instant, losses, .. } = uses[place];
    let same = uses.iter().any(|it| it.losses == grant.losses && it.instant == instant);
    if losses < grant.losses && (instant <= grant.instant || same) {
        uses.push(grant);
    }
}

/// Some histories on the twin, and some on the script: with `HISTORIES=100000` in the environment
/// so many, and a tenth.
fn never_over(algorithm: Algorithm, oracle: Oracle) {
    histories(algorithm, quotas().prop_map(|quota| [quota; 2]), oracle);
}

fn histories(algorithm: Algorithm, quotas: impl Strategy<Value = [Quota; 2]>, oracle: Oracle) {
    let histories = env::var("HISTORIES").map_or(1_000, |it| it.parse().unwrap());
    let config = |cases| ProptestConfig { cases, failure_persistence: None, ..Default::default() };
    let strategy = (quotas, steps());
    let result = TestRunner::new(config(histories)).run(&strategy, |(quotas, steps)| {
        history(&mut State::Initial, algorithm, quotas, &steps, oracle)
    });
    result.unwrap_or_else(|failure| panic!("{failure}"));
    let server = RedisServer::start();
    let scripted = std::cell::RefCell::new(Scripted::new(&server, "{key}"));
    let result = TestRunner::new(config(histories / 10)).run(&strategy, |(quotas, steps)| {
        history(&mut *scripted.borrow_mut(), algorithm, quotas, &steps, oracle)
    });
    result.unwrap_or_else(|failure| panic!("{failure}"));
}

/// Holds `most` against the sum and the time of each stretch that ends with a check and begins
/// after the last loss. Whenever units were granted, what they were granted for may have been used
/// before.
fn stretches(
    quota: Quota,
    uses: &[Use],
    most: impl Fn(f64, f64) -> f64,
    last_counts: bool,
) -> bool {
    let burst = f64::from(quota.burst_size());
    let checks = (0..uses.len()).filter(|last| uses[*last].is_check && uses[*last].used > 0.0);
    checks.into_iter().all(|last| {
        let Use { instant: end, losses, used, .. } = uses[last];
        let before = uses[..last].iter().filter(|it| it.losses == losses && it.instant <= end);
        let (granted, mut before): (Vec<_>, Vec<_>) = before.partition(|it| it.used < 0.0);
        let granted: f64 = granted.iter().map(|it| it.used).sum();
        before.sort_by(|a, b| b.instant.total_cmp(&a.instant));
        let mut sum = granted + if last_counts { used } else { 0.0 };
        let mut holds = sum <= most(burst, 0.0);
        for it in before {
            sum += it.used;
            holds &= sum <= most(burst, end - it.instant);
        }
        holds
    })
}

#[test]
fn a_token_bucket_is_never_over() {
    never_over(Algorithm::token_bucket(), |[quota, _], uses| {
        let rate = rate(quota);
        stretches(quota, uses, |burst, time| burst + rate * time + 1e-6, true)
    });
}

#[test]
fn a_token_bucket_that_refills_at_once_is_never_over() {
    let algorithm = Algorithm::TokenBucket { refill: Refill::Interval, overdraft: 0 };
    never_over(algorithm, |[quota, _], uses| {
        let (limit, window) = (f64::from(quota.limit()), quota.window_us() as f64);
        stretches(quota, uses, |burst, time| burst + limit * (time / window).ceil(), true)
    });
}

#[test]
fn a_leaky_bucket_is_never_over() {
    never_over(Algorithm::LeakyBucket, |[quota, _], uses| {
        let rate = rate(quota);
        stretches(quota, uses, |_, time| (time + 1.0) * rate + 1e-6, false)
    });
}

fn rate(quota: Quota) -> f64 {
    f64::from(quota.limit()) / quota.window_us() as f64
}

fn larger([one, other]: [Quota; 2]) -> Quota {
    if one.limit() > other.limit() { one } else { other }
}

fn both_quotas() -> impl Strategy<Value = [Quota; 2]> {
    (quotas(), quotas()).prop_map(|(one, other)| [one, other])
}

/// What is left of the quota of `params`, on the twin and on the script, after `history` with one
/// of them.
fn left_after(params: &Params, now: f64, history: impl Fn(&mut dyn Lossy)) -> [f64; 2] {
    let server = RedisServer::start();
    let mut scripted = Scripted::new(&server, "{key}");
    [&mut State::Initial as &mut dyn Lossy, &mut scripted].map(|backend| {
        history(backend);
        backend.decide(params, EngineRequest { action: Action::Peek, ..check(1, now) }).remaining
    })
}

#[test]
fn a_late_release_by_a_limiter_with_a_faster_quota_takes_nothing_from_others() {
    let algorithms = [
        Algorithm::token_bucket(),
        Algorithm::LeakyBucket,
        Algorithm::SlidingWindow { buckets: 10 },
    ];
    for algorithm in algorithms {
        let params = |quota| Params::new(algorithm, quota).unwrap();
        let (fast, slow) = (params(Quota::per_second(10)), params(Quota::per_day(10)));
        let (then, now) = (1.7e15, 1.7e15 + 1.1e6);
        let left = left_after(&slow, now, |backend| {
            assert!(backend.decide(&fast, check(10, then)).admitted);
            assert!(backend.decide(&slow, check(10, now)).admitted);
            let release = Release { instant: Some(then), units: 10.0, kept: 0.0 };
            backend.release(&fast, now, &[release]);
        });
        assert_eq!(left, [0.0; 2], "{algorithm}");
    }
}

#[test]
fn what_a_much_faster_quota_would_have_refilled_may_be_beyond_all_integers() {
    let refill = Refill::Interval;
    let algorithm = Algorithm::TokenBucket { refill, overdraft: 1 << 30 };
    let fast = Params::new(algorithm, Quota::per_second(18)).unwrap();
    let slow = Quota::new(1, Duration::from_secs(61 * 86_400));
    let slow = Params::new(Algorithm::token_bucket(), slow).unwrap();
    let (then, now) = (1_807_820_001_979_996.0, 1_914_140_005_282_999.0);
    let left = left_after(&slow, now, |backend| {
        let spend = EngineRequest { action: Action::Spend, ..check(770_946_643.0, then) };
        assert!(backend.decide(&slow, spend).admitted);
        let release = Release { instant: Some(then), units: 192_736_661.0, kept: 578_209_982.0 };
        backend.release(&fast, now, &[release]);
    });
    assert_eq!(left, [0.0; 2]);
}

#[test]
fn a_sliding_window_returns_nothing_that_a_change_of_its_quota_has_moved() {
    let params = |seconds| {
        let quota = Quota::new(10, Duration::from_secs(seconds));
        Params::new(Algorithm::SlidingWindow { buckets: 1 }, quota).unwrap()
    };
    let (before, after) = (params(60), params(40));
    let at = |us: f64| 1.7e15 + us;
    let left = left_after(&after, at(60e6), |backend| {
        assert!(backend.decide(&before, check(1, at(0.0))).admitted);
        assert!(backend.decide(&before, check(5, at(59e6))).admitted);
        assert!(backend.decide(&after, check(4, at(59.5e6))).admitted);
        let release = Release { instant: Some(at(59e6)), units: 5.0, kept: 0.0 };
        backend.release(&before, at(60e6), &[release]);
    });
    assert_eq!(left, [3.0; 2]);
}

#[test]
fn what_is_kept_of_a_charge_to_a_bucket_is_refilled_before_what_is_returned() {
    for algorithm in [Algorithm::token_bucket(), Algorithm::LeakyBucket] {
        let params = Params::new(algorithm, Quota::new(1_000, Duration::from_secs(60))).unwrap();
        let (then, now) = (1.7e15, 1.7e15 + 10e6);
        let left = |charged: f64, settled: &'static [f64]| {
            left_after(&params, now, move |backend| {
                assert!(backend.decide(&params, check(charged, then)).admitted);
                let mut charged = charged;
                for kept in settled {
                    let units = charged - kept;
                    let release = Release { instant: Some(then), units, kept: *kept };
                    backend.release(&params, now, &[release]);
                    charged = *kept;
                }
            })
        };
        assert_eq!(left(500.0, &[180.0]), left(180.0, &[]), "{algorithm}");
        assert_eq!(left(500.0, &[300.0, 180.0]), left(180.0, &[]), "{algorithm}");
        assert_eq!(left(500.0, &[100.0]), [1_000.0; 2], "{algorithm}");
    }
}

#[test]
fn a_token_bucket_is_never_over_after_a_change_of_its_quota() {
    histories(Algorithm::token_bucket(), both_quotas(), |quotas, uses| {
        let rate = rate(quotas[0]).max(rate(quotas[1]));
        stretches(larger(quotas), uses, |burst, time| burst + rate * time + 1e-6, true)
    });
}

#[test]
fn a_leaky_bucket_is_never_over_after_a_change_of_its_quota() {
    histories(Algorithm::LeakyBucket, both_quotas(), |quotas, uses| {
        let rate = rate(quotas[0]).max(rate(quotas[1]));
        stretches(larger(quotas), uses, |_, time| (time + 1.0) * rate + 1e-6, false)
    });
}

#[test]
fn a_sliding_log_is_never_over() {
    never_over(Algorithm::SlidingLog, |[quota, _], uses| {
        let (limit, window) = (f64::from(quota.limit()), quota.window_us() as f64);
        (0..uses.len()).filter(|last| uses[*last].is_check && uses[*last].used > 0.0).all(|last| {
            let Use { instant: end, losses, .. } = uses[last];
            let counts =
                |it: &&Use| it.losses == losses && it.instant > end - window && it.instant <= end;
            uses[..=last].iter().filter(counts).map(|it| it.used).sum::<f64>() <= limit
        })
    });
}

#[test]
fn a_fixed_window_is_never_over() {
    never_over(Algorithm::FixedWindow, |[quota, _], uses| {
        (0..uses.len()).filter(|last| uses[*last].is_check && uses[*last].used > 0.0).all(|last| {
            let Use { window, losses, .. } = uses[last];
            let length = quota.window_us() as f64;
            // A grant can empty a window, and the next one opens then.
            let is_same = |it: &Use| {
                it.window == window || it.used < 0.0 && (it.window - window).abs() < length
            };
            let counts = |it: &&Use| it.losses == losses && is_same(it);
            let sum: f64 = uses[..=last].iter().filter(counts).map(|it| it.used).sum();
            sum <= f64::from(quota.limit())
        })
    });
}

#[test]
fn a_sliding_window_is_never_over() {
    fn oracle<const BUCKETS: u32>([quota, _]: [Quota; 2], uses: &[Use]) -> bool {
        let (limit, window) = (f64::from(quota.limit()), quota.window_us() as f64);
        let buckets = f64::from(BUCKETS);
        // Whatever the grid is: the sub-windows that lie wholly inside of the window hold no more
        // than the limit.
        (0..uses.len()).filter(|last| uses[*last].is_check && uses[*last].used > 0.0).all(|last| {
            let Use { instant: end, losses, .. } = uses[last];
            let inside = window - (window / buckets).ceil();
            let counts =
                |it: &&Use| it.losses == losses && it.instant > end - inside && it.instant <= end;
            uses[..=last].iter().filter(counts).map(|it| it.used).sum::<f64>() <= limit
        })
    }
    never_over(Algorithm::SlidingWindow { buckets: 2 }, oracle::<2>);
    never_over(Algorithm::SlidingWindow { buckets: 10 }, oracle::<10>);
}

#[test]
fn requests_of_one_instant_that_need_several_entries_of_a_log_are_all_released() {
    let server = RedisServer::start();
    let quota = Quota::new(u32::MAX, Duration::from_secs(1));
    let params = Params::new(Algorithm::SlidingLog, quota).unwrap();
    let (now, all) = (1.7e15, f64::from(u32::MAX));
    let mut scripted = Scripted::new(&server, "{key}");
    for backend in [&mut State::Initial as &mut dyn Lossy, &mut scripted] {
        assert!(backend.decide(&params, check(7, now)).admitted);
        // More than the four bytes of an entry hold.
        backend.decide(&params, EngineRequest { action: Action::Spend, ..check(all, now) });
        for units in [7.0, all - 9.0, 9.0] {
            let release = Release { instant: Some(now), units, kept: 0.0 };
            backend.release(&params, now, &[release]);
        }
        let peek = EngineRequest { action: Action::Peek, ..check(1, now) };
        assert_eq!(backend.decide(&params, peek).remaining, all);
    }
}
