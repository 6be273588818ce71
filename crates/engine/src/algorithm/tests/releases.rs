//! Releases of reservations and grants, in any order and after losses of state, admit no more than
//! the algorithm guarantees. The oracle counts the used units; it does not know any state.

use std::{env, time::Duration};

use proptest::{prelude::*, sample::Index, test_runner::TestRunner};

use super::{
    super::{
        Action, Algorithm, EngineRequest, Params, Refill, Release, State, arithmetic::ceil_div,
        table::Spent,
    },
    backends::{Backend, RedisServer, START, Scripted, check},
};
use crate::quota::Quota;

#[derive(Clone, Debug)]
enum Step {
    /// A cost, and the longest wait in 1/1000 of a window.
    Check(u32, u32),
    /// Units that are spent without asking.
    Spend(i64),
    /// Requests that are dropped together.
    Drop(Vec<Index>),
    /// Units of no particular decision.
    Grant(u32),
    /// The state is lost.
    Lose,
    /// Time passes: in 1/1000 of a window, and microseconds.
    Pass(u32, u32),
    /// From now on, the other quota applies.
    Change,
}

/// Steps in which few units are spent, more than a quota, or about as many as fit in four bytes.
fn steps() -> impl Strategy<Value = Vec<Step>> {
    let each = prop_oneof![6 => Just((1, 1)), 1 => Just((10, 4)), 1 => Just((1 << 30, 4))];
    each.prop_flat_map(|(each, weight)| steps_that_spend(each, weight))
}

fn steps_that_spend(each: i64, weight: u32) -> impl Strategy<Value = Vec<Step>> {
    let wait = prop_oneof![2 => Just(0), 3 => 0_u32..3_000];
    let pass = prop_oneof![4 => 0_u32..100, 1 => 100_u32..1_500];
    let step = prop_oneof![
        12 => (1_u32..6, wait).prop_map(|(cost, wait)| Step::Check(cost, wait)),
        weight => (1_i64..5).prop_map(move |units| Step::Spend(units * each)),
        3 => prop::collection::vec(any::<Index>(), 1..5).prop_map(Step::Drop),
        1 => (1_u32..5).prop_map(Step::Grant),
        1 => Just(Step::Lose),
        8 => (pass, 0_u32..3).prop_map(|(part, us)| Step::Pass(part, us)),
        1 => Just(Step::Change),
    ];
    prop::collection::vec(step, 1..100)
}

fn quotas() -> impl Strategy<Value = Quota> {
    let window = prop_oneof![Just(1_000_000), 1_000_u64..10_000_000, Just(86_400_000_000)];
    (1_u64..30, window).prop_map(|(limit, us)| Quota::new(limit, Duration::from_micros(us)))
}

/// Units that were used, in the order in which they were admitted.
#[derive(Clone, Debug)]
struct Use {
    instant: i64,
    /// Negative if they were granted.
    used: i64,
    /// True if the request could have been denied.
    is_check: bool,
    /// The number of losses of state before.
    losses: usize,
    /// The opening of the window, if windows are fixed.
    window: i64,
}

/// The opening of the fixed window of an instant, or else of the newest one with a reservation.
fn window_of(state: &State, instant: Option<i64>, length: i64) -> i64 {
    let Spent::FixedWindow(reserved) = &state.spent else { return 0 };
    let state = &reserved.state;
    let ahead = instant.map_or(state.ahead(), |at| (at - state.start).div_euclid(length));
    state.start + ahead * length
}

trait Lossy: Backend {
    fn lose(&mut self);

    fn state(&mut self, params: &Params) -> State;
}

impl Lossy for State {
    fn lose(&mut self) {
        *self = Self::default();
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

/// A bound on the uses under two quotas.
type Oracle = fn([Quota; 2], &[Use]) -> bool;

/// A key while steps change it, and its uses.
struct History<'a, B> {
    backend: &'a mut B,
    quotas: [Quota; 2],
    limiters: [Params; 2],
    /// The index of the quota that applies.
    current: usize,
    now: i64,
    losses: usize,
    uses: Vec<Use>,
    /// The index of each use that is not released yet, and of the quota that it was charged by.
    open: Vec<(usize, usize)>,
}

impl<B: Lossy> History<'_, B> {
    fn window(&self) -> i64 {
        self.quotas[0].window_us() as i64
    }

    fn part_of_window(&self, thousandths: u32) -> i64 {
        self.window() * i64::from(thousandths) / 1_000
    }

    /// Returns true if the quota stays. Waiting requests keep their instants when the quota is
    /// changed, for which the oracle has no bound.
    fn can_wait(&self) -> bool {
        self.quotas[0] == self.quotas[1]
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Check(cost, max_wait) => self.check(*cost, *max_wait),
            Step::Spend(units) => {
                // A change of the quota counts a debt as at most what 100 years refill.
                let most = if self.can_wait() { i64::MAX } else { 36_500 };
                let action = Action::Spend;
                self.admit(EngineRequest { action, ..check(*units.min(&most), self.now) });
            }
            Step::Drop(which) => self.release(which),
            Step::Grant(units) => self.grant(*units),
            Step::Lose => {
                self.backend.lose();
                self.losses += 1;
                self.now += 1; // separates the uses that are lost from the next ones
            }
            Step::Pass(thousandths, us) => {
                self.now += self.part_of_window(*thousandths) + i64::from(*us);
            }
            Step::Change => self.current = 1,
        }
    }

    fn check(&mut self, cost: u32, max_wait: u32) {
        let params = self.limiters[self.current];
        let max_cost = self.quotas.map(|quota| quota.limit()).into_iter().min().unwrap();
        let max_wait = match self.can_wait() {
            true => self.part_of_window(max_wait).max(params.default_wait()),
            false => 0,
        };
        let request = EngineRequest { max_wait, ..check(max_cost.min(cost.into()), self.now) };
        if self.admit(request) {
            self.open.push((self.uses.len() - 1, self.current));
        }
    }

    fn admit(&mut self, request: EngineRequest) -> bool {
        let params = self.limiters[self.current];
        let reply = self.backend.decide(&params, request);
        if reply.admitted {
            let is_check = request.action == Action::Check;
            // Units that are spent whatever is left are used now.
            let instant = if is_check { reply.instant } else { self.now };
            let at = (!is_check).then_some(self.now);
            let window = window_of(&self.backend.state(&params), at, self.window());
            let (used, losses) = (request.cost, self.losses);
            self.uses.push(Use { instant, used, is_check, losses, window });
        }
        reply.admitted
    }

    fn release(&mut self, which: &[Index]) {
        let mut releases = [vec![], vec![]];
        for which in which {
            if self.open.is_empty() {
                break;
            }
            let (index, charged_by) = self.open.swap_remove(which.index(self.open.len()));
            let Use { instant, used: units, .. } = self.uses[index];
            releases[charged_by].push(Release { instant: Some(instant), units });
            self.uses[index].used = 0;
            let grant = self.granted(units);
            self.returned(index, grant);
        }
        for (params, releases) in self.limiters.iter().zip(releases) {
            if !releases.is_empty() {
                self.backend.release(params, self.now, &releases);
            }
        }
    }

    fn grant(&mut self, units: u32) {
        let params = self.limiters[self.current];
        if matches!(params, Params::SlidingWindow(_)) {
            return;
        }
        let grant = self.granted(units.into());
        let request = EngineRequest { action: Action::Refund, ..check(units, self.now) };
        self.backend.decide(&params, request);
        self.uses.push(grant);
    }

    /// A grant of units in the window that is open now.
    fn granted(&mut self, units: i64) -> Use {
        let state = self.backend.state(&self.limiters[self.current]);
        let window = window_of(&state, Some(self.now), self.window());
        let (instant, losses) = (self.now, self.losses);
        Use { instant, used: -units, is_check: false, losses, window }
    }

    /// Units that were spent before a loss are not in the state, so that their return is a grant.
    /// Reserved units are not returned, unless by chance others are reserved for the same instant.
    fn returned(&mut self, index: usize, grant: Use) {
        let Use { instant, losses, .. } = self.uses[index];
        let is_same = |used: &Use| used.losses == grant.losses && used.instant == instant;
        let same = self.uses.iter().any(is_same);
        if losses < grant.losses && (instant <= grant.instant || same) {
            self.uses.push(grant);
        }
    }
}

fn history(
    backend: &mut impl Lossy,
    algorithm: Algorithm,
    quotas: [Quota; 2],
    steps: &[Step],
    oracle: Oracle,
) -> Result<(), TestCaseError> {
    backend.lose();
    let limiters = quotas.map(|quota| Params::new(algorithm, quota).unwrap());
    let (uses, open) = (vec![], vec![]);
    let (current, now, losses) = (0, START, 0);
    let mut history = History { backend, quotas, limiters, current, now, losses, uses, open };
    for step in steps {
        history.step(step);
    }
    let uses = history.uses;
    prop_assert!(oracle(quotas, &uses), "{algorithm} {quotas:?}: {uses:?}");
    Ok(())
}

/// Runs 1,000 histories on the twin, or the number in the environment variable `HISTORIES`, and a
/// tenth of them on the script.
fn never_exceeds(algorithm: Algorithm, oracle: Oracle) {
    histories(algorithm, quotas().prop_map(|quota| [quota; 2]), oracle);
}

fn histories(algorithm: Algorithm, quotas: impl Strategy<Value = [Quota; 2]>, oracle: Oracle) {
    let histories = env::var("HISTORIES").map_or(1_000, |number| number.parse().unwrap());
    let config = |cases| ProptestConfig { cases, failure_persistence: None, ..Default::default() };
    let strategy = (quotas, steps());
    let result = TestRunner::new(config(histories)).run(&strategy, |(quotas, steps)| {
        history(&mut State::default(), algorithm, quotas, &steps, oracle)
    });
    result.unwrap_or_else(|failure| panic!("{failure}"));
    let server = RedisServer::start();
    let scripted = std::cell::RefCell::new(Scripted::new(&server, "{key}"));
    let result = TestRunner::new(config(histories / 10)).run(&strategy, |(quotas, steps)| {
        history(&mut *scripted.borrow_mut(), algorithm, quotas, &steps, oracle)
    });
    result.unwrap_or_else(|failure| panic!("{failure}"));
}

/// Compares the sum of each stretch with `max` of the burst and its length. A stretch ends with a
/// check and begins after the last loss. Granted units may have been used at any time before.
fn stretches(quota: Quota, uses: &[Use], max: impl Fn(f64, f64) -> f64, last_counts: bool) -> bool {
    let burst = quota.burst_size() as f64;
    let checks = (0..uses.len()).filter(|last| uses[*last].is_check && uses[*last].used > 0);
    checks.into_iter().all(|last| {
        let Use { instant: end, losses, used, .. } = uses[last];
        let before = uses[..last].iter().filter(|u| u.losses == losses && u.instant <= end);
        let (granted, mut before): (Vec<_>, Vec<_>) = before.partition(|u| u.used < 0);
        let granted: i64 = granted.iter().map(|u| u.used).sum();
        before.sort_by_key(|u| std::cmp::Reverse(u.instant));
        let mut sum = granted + if last_counts { used } else { 0 };
        let mut holds = sum as f64 <= max(burst, 0.0);
        for earlier in before {
            sum += earlier.used;
            holds &= sum as f64 <= max(burst, (end - earlier.instant) as f64);
        }
        holds
    })
}

#[test]
fn a_token_bucket_is_never_over() {
    never_exceeds(Algorithm::token_bucket(), |[quota, _], uses| {
        let rate = rate(quota);
        stretches(quota, uses, |burst, time| burst + rate * time + 1e-6, true)
    });
}

#[test]
fn a_token_bucket_that_refills_at_once_is_never_over() {
    let algorithm = Algorithm::TokenBucket { refill: Refill::Interval, overdraft: 0 };
    never_exceeds(algorithm, |[quota, _], uses| {
        let (limit, window) = (quota.limit() as f64, quota.window_us() as f64);
        stretches(quota, uses, |burst, time| burst + limit * (time / window).ceil(), true)
    });
}

#[test]
fn a_leaky_bucket_is_never_over() {
    never_exceeds(Algorithm::LeakyBucket, |[quota, _], uses| {
        let rate = rate(quota);
        stretches(quota, uses, |_, time| (time + 1.0) * rate + 1e-6, false)
    });
}

fn rate(quota: Quota) -> f64 {
    quota.limit() as f64 / quota.window_us() as f64
}

fn larger([one, other]: [Quota; 2]) -> Quota {
    if one.limit() > other.limit() { one } else { other }
}

fn both_quotas() -> impl Strategy<Value = [Quota; 2]> {
    (quotas(), quotas()).prop_map(|(one, other)| [one, other])
}

/// The units that are left under `params`, on the twin and on the script, after `history` on each
/// of them.
fn left_after(params: &Params, now: i64, history: impl Fn(&mut dyn Lossy)) -> [i64; 2] {
    let server = RedisServer::start();
    let mut scripted = Scripted::new(&server, "{key}");
    [&mut State::default() as &mut dyn Lossy, &mut scripted].map(|backend| {
        history(backend);
        backend.decide(params, EngineRequest { action: Action::Peek, ..check(1, now) }).remaining
    })
}

#[test]
fn a_late_release_by_a_limiter_with_a_faster_quota_grants_nothing() {
    let algorithms = [
        Algorithm::token_bucket(),
        Algorithm::LeakyBucket,
        Algorithm::SlidingWindow { buckets: 10 },
    ];
    for algorithm in algorithms {
        let params = |quota| Params::new(algorithm, quota).unwrap();
        let (fast, slow) = (params(Quota::per_second(10)), params(Quota::per_day(10)));
        let (then, now) = (START, START + 1_100_000);
        let left = left_after(&slow, now, |backend| {
            assert!(backend.decide(&fast, check(10, then)).admitted);
            assert!(backend.decide(&slow, check(10, now)).admitted);
            let release = Release { instant: Some(then), units: 10 };
            backend.release(&fast, now, &[release]);
        });
        assert_eq!(left, [0; 2], "{algorithm}");
    }
}

#[test]
fn the_refill_of_a_much_faster_quota_may_exceed_all_integers() {
    let refill = Refill::Interval;
    let algorithm = Algorithm::TokenBucket { refill, overdraft: 1 << 30 };
    let fast = Params::new(algorithm, Quota::per_second(18)).unwrap();
    let slow = Quota::new(1, Duration::from_secs(61 * 86_400));
    let slow = Params::new(Algorithm::token_bucket(), slow).unwrap();
    let (then, now) = (1_807_820_001_979_996, 1_914_140_005_282_999);
    let left = left_after(&slow, now, |backend| {
        let spend = EngineRequest { action: Action::Spend, ..check(770_946_643, then) };
        assert!(backend.decide(&slow, spend).admitted);
        let release = Release { instant: Some(then), units: 192_736_661 };
        backend.release(&fast, now, &[release]);
    });
    assert_eq!(left, [0; 2]);
}

#[test]
fn a_sliding_window_returns_no_units_that_a_change_of_its_quota_moved() {
    let params = |seconds| {
        let quota = Quota::new(10, Duration::from_secs(seconds));
        Params::new(Algorithm::SlidingWindow { buckets: 1 }, quota).unwrap()
    };
    let (before, after) = (params(60), params(40));
    let at = |us: i64| START + us;
    let left = left_after(&after, at(60_000_000), |backend| {
        assert!(backend.decide(&before, check(1, at(0))).admitted);
        assert!(backend.decide(&before, check(5, at(59_000_000))).admitted);
        assert!(backend.decide(&after, check(4, at(59_500_000))).admitted);
        let release = Release { instant: Some(at(59_000_000)), units: 5 };
        backend.release(&before, at(60_000_000), &[release]);
    });
    assert_eq!(left, [3; 2]);
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
    never_exceeds(Algorithm::SlidingLog, |[quota, _], uses| {
        let (limit, window) = (quota.limit() as i64, quota.window_us() as i64);
        (0..uses.len()).filter(|last| uses[*last].is_check && uses[*last].used > 0).all(|last| {
            let Use { instant: end, losses, .. } = uses[last];
            let counts =
                |u: &&Use| u.losses == losses && u.instant > end - window && u.instant <= end;
            uses[..=last].iter().filter(counts).map(|u| u.used).sum::<i64>() <= limit
        })
    });
}

#[test]
fn a_fixed_window_is_never_over() {
    never_exceeds(Algorithm::FixedWindow, |[quota, _], uses| {
        (0..uses.len()).filter(|last| uses[*last].is_check && uses[*last].used > 0).all(|last| {
            let Use { window, losses, .. } = uses[last];
            let length = quota.window_us() as i64;
            // A grant can empty a window; then the next one opens.
            let is_same =
                |u: &Use| u.window == window || u.used < 0 && (u.window - window).abs() < length;
            let counts = |u: &&Use| u.losses == losses && is_same(u);
            let sum: i64 = uses[..=last].iter().filter(counts).map(|u| u.used).sum();
            sum <= quota.limit() as i64
        })
    });
}

#[test]
fn a_sliding_window_is_never_over() {
    fn oracle<const BUCKETS: u32>([quota, _]: [Quota; 2], uses: &[Use]) -> bool {
        let (limit, window) = (quota.limit() as i64, quota.window_us() as i64);
        let buckets = i64::from(BUCKETS);
        // With any grid, the sub-windows that lie entirely inside the window count at most the
        // limit.
        (0..uses.len()).filter(|last| uses[*last].is_check && uses[*last].used > 0).all(|last| {
            let Use { instant: end, losses, .. } = uses[last];
            let inside = window - ceil_div(window, buckets);
            let counts =
                |u: &&Use| u.losses == losses && u.instant > end - inside && u.instant <= end;
            uses[..=last].iter().filter(counts).map(|u| u.used).sum::<i64>() <= limit
        })
    }
    never_exceeds(Algorithm::SlidingWindow { buckets: 2 }, oracle::<2>);
    never_exceeds(Algorithm::SlidingWindow { buckets: 10 }, oracle::<10>);
}

#[test]
fn requests_of_one_instant_that_need_several_entries_of_a_log_are_all_released() {
    let server = RedisServer::start();
    let quota = Quota::new(u32::MAX.into(), Duration::from_secs(1));
    let params = Params::new(Algorithm::SlidingLog, quota).unwrap();
    let (now, all) = (START, i64::from(u32::MAX));
    let mut scripted = Scripted::new(&server, "{key}");
    for backend in [&mut State::default() as &mut dyn Lossy, &mut scripted] {
        assert!(backend.decide(&params, check(7, now)).admitted);
        // More than fits into the four bytes of an entry.
        backend.decide(&params, EngineRequest { action: Action::Spend, ..check(all, now) });
        for units in [7, all - 9, 9] {
            let release = Release { instant: Some(now), units };
            backend.release(&params, now, &[release]);
        }
        let peek = EngineRequest { action: Action::Peek, ..check(1, now) };
        assert_eq!(backend.decide(&params, peek).remaining, all);
    }
}

#[test]
fn a_full_log_counts_no_more_units_and_returns_those_that_it_counts() {
    let server = RedisServer::start();
    let quota = Quota::new(1, Duration::from_secs(1));
    let params = Params::new(Algorithm::SlidingLog, quota).unwrap();
    let (now, full) = (START, 1 << 52);
    let mut scripted = Scripted::new(&server, "{key}");
    let key = scripted.key().to_owned();
    let numbers = |size, numbers: &[i64]| -> Vec<u8> {
        numbers.iter().flat_map(|number| (*number as u64).to_le_bytes()[..size].to_vec()).collect()
    };
    // As after about a million requests of the largest cost, which would be as many entries.
    let entry = [numbers(7, &[now]), numbers(4, &[u32::MAX.into()])].concat();
    let numbers_of_foot = [numbers(7, &[now, 0, 1_000_000, full]), numbers(4, &[0, 0, 1])];
    let log = [entry.clone(), numbers_of_foot.concat(), entry, b"S".to_vec()].concat();
    redis::cmd("SET").arg(key).arg(log).exec(&mut scripted.connection).unwrap();
    for ahead in [1, 2] {
        let spend = check(i64::from(u32::MAX), now + ahead);
        scripted.decide(&params, EngineRequest { action: Action::Spend, ..spend });
    }
    let release = Release { instant: Some(now), units: 1 };
    scripted.release(&params, now + 3, &[release]);
    let bytes = scripted.bytes().expect("a log");
    assert_eq!(bytes.len(), 11 + 52, "no entry without units");
    let foot = [numbers(7, &[full - 1]), numbers(4, &[0, 0, 1])].concat();
    assert_eq!(bytes[32..51], foot, "the sum, no dead entries, and one entry");
}

#[test]
fn reservations_that_leave_nothing_to_others_are_kept_and_the_last_ones_are_released() {
    let server = RedisServer::start();
    let second = 1_000_000;
    for (algorithm, burst, keeps) in [
        (Algorithm::token_bucket(), 1, true),
        (Algorithm::token_bucket(), 5, false),
        (Algorithm::LeakyBucket, 5, true),
        (Algorithm::FixedWindow, 1, true),
        (Algorithm::sliding_log(), 1, false),
        (Algorithm::sliding_window(), 1, true),
    ] {
        let quota = Quota::per_second(1).burst(burst);
        let params = Params::new(algorithm, quota).unwrap();
        let mut key = Scripted::new(&server, "{key}");
        key.forget();
        let mut reserved = vec![];
        for _ in 0..burst + 3 {
            let request = EngineRequest { max_wait: 60 * second, ..check(1, START) };
            let reply = key.decide(&params, request);
            if reply.admitted && reply.instant > START {
                reserved.push(reply.instant);
            }
        }
        let release = |index: usize| Release { instant: Some(reserved[index]), units: 1 };
        let last = reserved.len() - 1;
        let before = key.bytes();
        let kept = key.release_for_others(&params, START, &[release(last - 1)]);
        assert_eq!(kept, keeps, "{algorithm}, {burst}");
        assert_eq!(key.bytes() == before, keeps, "{algorithm}, {burst}");
        assert!(!key.release_for_others(&params, START, &[release(last)]));
        if kept {
            assert!(!key.release_for_others(&params, START, &[release(last - 1)]));
        }
        let request = EngineRequest { max_wait: 60 * second, ..check(1, START) };
        let next = key.decide(&params, request).instant;
        assert!(next <= reserved[last - 1], "{algorithm}, {burst}: {next}");
    }
}
