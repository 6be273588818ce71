//! Holds: what is admitted beside them, their ends, expiries and renewals; and that the script and
//! the twin agree about them. What they promise is in `hold_histories.rs`.

use std::{cell::RefCell, time::Duration};

use proptest::{prelude::*, sample::Index, test_runner::TestRunner};

use super::{
    super::{
        Action, Algorithm, Combined, EngineReply, EngineRequest, HoldAction, HoldChange,
        HoldReceipt, HoldReply, Lifetime, Params, Release, State, arithmetic::ceil_div, combine,
    },
    agreement::{both, same_states},
    backends::{Backend, Holds, RedisServer, START, Scripted, check, eval_limits},
    concurrency,
    generators::{Step, config, goes_back, params as any_params, steps, window_and_max_cost},
};
use crate::{quota::Quota, script::Limit};

const SECOND: i64 = 1_000_000;

fn params(algorithm: Algorithm) -> Params {
    Params::new(algorithm, Quota::new(10, Duration::from_secs(10))).unwrap()
}

fn hold(backend: &mut impl Backend, params: &Params, now: i64, units: i64) -> EngineReply {
    let lifetime = Lifetime::new(8_000_000);
    let action = Action::Hold { lifetime, epoch: None };
    backend.decide(params, EngineRequest { action, ..check(units, now) })
}

fn end(
    backend: &mut impl Holds,
    params: &Params,
    now: i64,
    receipt: HoldReceipt,
    [units, used]: [i64; 2],
) -> HoldReply {
    let action = HoldAction::End { used };
    backend.change_holds(params, now, &[HoldChange { receipt, units, action }])[0]
}

const ALGORITHMS: [Algorithm; 4] = [
    Algorithm::FixedWindow,
    Algorithm::SlidingLog,
    Algorithm::sliding_window(),
    Algorithm::token_bucket(),
];

#[test]
fn what_is_settled_below_the_estimate_returns_whatever_the_time() {
    for algorithm in ALGORITHMS {
        let (params, mut state) = (params(algorithm), State::default());
        let held = hold(&mut state, &params, START, 8);
        assert!(held.admitted && held.remaining == 2, "{algorithm}: {held:?}");
        assert!(!state.decide(&params, check(3, START)).admitted);
        let ended = end(&mut state, &params, START + 7 * SECOND, held.hold.unwrap(), [8, 3]);
        assert_eq!(ended, HoldReply::Ended);
        let reply = state.decide(&params, check(7, START + 7 * SECOND));
        assert!(reply.admitted && reply.remaining == 0, "{algorithm}: {reply:?}");
    }
}

#[test]
fn a_check_that_needs_a_hold_to_end_is_denied_for_an_unknown_time() {
    for algorithm in ALGORITHMS {
        let (params, mut state) = (params(algorithm), State::default());
        assert!(hold(&mut state, &params, START, 8).admitted);
        let before = state.clone();
        let request = EngineRequest { max_wait: 1_000_000_000_000, ..check(3, START) };
        let denied = state.decide(&params, request);
        assert!(!denied.admitted && denied.wait.is_none(), "{algorithm}: {denied:?}");
        assert_eq!(denied.remaining, 2);
        assert_eq!(state, before);
    }
}

#[test]
fn an_expired_hold_is_spent_at_the_end_of_its_slot() {
    for algorithm in ALGORITHMS {
        let (params, mut state) = (params(algorithm), State::default());
        let held = hold(&mut state, &params, START, 8);
        let ends = held.hold.unwrap().ends;
        assert!((START + 8 * SECOND..=START + 10 * SECOND).contains(&ends));
        let reply = state.decide(&params, check(3, ends));
        assert!(!reply.admitted && reply.wait.is_some(), "{algorithm}: {reply:?}");
        let late = end(&mut state, &params, ends, held.hold.unwrap(), [8, 8]);
        assert_eq!(late, HoldReply::Expired);
        let reply = state.decide(&params, check(2, ends));
        assert!(reply.admitted, "{algorithm}: {reply:?}");
        let reply = state.decide(&params, check(10, ends + reply.reset));
        assert!(reply.admitted, "{algorithm}: {reply:?}");
    }
}

#[test]
fn a_renewal_of_the_only_hold_keeps_its_epoch() {
    for algorithm in ALGORITHMS {
        let (params, mut state) = (params(algorithm), State::default());
        let receipt = hold(&mut state, &params, START, 8).hold.unwrap();
        // The clock steps back, and the holder does not get the reply.
        let now = START - SECOND;
        let action = HoldAction::Renew(Lifetime::new(8_000_000));
        let change = HoldChange { receipt, units: 8, action };
        let renewed = state.change_holds(&params, now, &[change])[0];
        let HoldReply::Renewed(renewed) = renewed else { panic!("{renewed:?}") };
        assert_eq!(renewed.epoch, receipt.epoch, "{algorithm}");
        let ended = end(&mut state, &params, now, receipt, [8, 0]);
        assert_eq!(ended, HoldReply::Ended);
        assert!(state.decide(&params, check(10, now)).admitted, "{algorithm}");
    }
}

#[test]
fn a_renewal_after_a_loss_of_the_state_holds_the_units_again() {
    let (params, mut state) = (params(Algorithm::token_bucket()), State::default());
    let receipt = hold(&mut state, &params, START, 8).hold.unwrap();
    state = State::default();
    hold(&mut state, &params, START + SECOND, 10);
    let action = HoldAction::Renew(Lifetime::new(8_000_000));
    let change = HoldChange { receipt, units: 8, action };
    let renewed = state.change_holds(&params, START + SECOND, &[change])[0];
    let HoldReply::Renewed(renewed) = renewed else { panic!("{renewed:?}") };
    assert_ne!(renewed.epoch, receipt.epoch);
    let ended = end(&mut state, &params, START + SECOND, receipt, [8, 1]);
    assert_eq!(ended, HoldReply::Lost);
    let ended = end(&mut state, &params, START + SECOND, renewed, [8, 0]);
    assert_eq!(ended, HoldReply::Ended);
}

/// Units are held at a master. A replica without its last writes is promoted, and holds others.
fn lost_holds_change_no_others(
    [master, replica]: [&mut impl Holds; 2],
    params: &Params,
    algorithm: Algorithm,
) {
    let first = hold(master, params, START, 1).hold;
    assert_eq!(hold(replica, params, START, 1).hold, first);
    let lost = [2, 3].map(|at| hold(master, params, START + at * SECOND, 1).hold.unwrap());
    let now = START + 5 * SECOND;
    let other = hold(replica, params, now, 1);
    assert_eq!(other.hold.unwrap().epoch, lost[0].epoch, "{algorithm}: the epoch tells nothing");
    let mut held = |change| {
        replica.change_holds(params, now, &[change]);
        replica.decide(params, EngineRequest::observe(now)).held
    };
    let change = |receipt, action| HoldChange { receipt, units: 1, action };
    let end = HoldAction::End { used: 0 };
    assert_eq!(held(change(lost[0], end)), 2, "{algorithm}: an end");
    let renewal = HoldAction::Renew(Lifetime::new(8_000_000));
    assert_eq!(held(change(lost[1], renewal)), 3, "{algorithm}: a renewal holds them again");
    assert_eq!(held(change(other.hold.unwrap(), end)), 2, "{algorithm}");
    assert_eq!(held(change(first.unwrap(), end)), 1, "{algorithm}");
}

#[test]
fn holds_that_a_failover_lost_change_no_others() {
    let server = RedisServer::start();
    let concurrent = (Algorithm::concurrency(), concurrency::params(10));
    let all = ALGORITHMS.map(|algorithm| (algorithm, params(algorithm))).into_iter();
    for (algorithm, params) in all.chain([concurrent]) {
        let twins = [&mut State::default(), &mut State::default()];
        lost_holds_change_no_others(twins, &params, algorithm);
        for scripted in [Scripted::new, Scripted::without_fast_path] {
            let mut keys = ["{key}0", "{key}1"].map(|key| scripted(&server, key));
            keys.iter_mut().for_each(Scripted::forget);
            lost_holds_change_no_others(keys.each_mut(), &params, algorithm);
        }
    }
}

#[test]
fn the_end_of_a_hold_by_another_quota_leaves_the_expiry_of_the_count() {
    let server = RedisServer::start();
    for algorithm in ALGORITHMS {
        let new = |quota| Params::new(algorithm, quota).unwrap();
        let (plan, all) = (new(Quota::per_day(3)), new(Quota::per_second(1_000)));
        let mut key = Scripted::new(&server, "{key}");
        key.forget();
        let held = hold(&mut key, &all, START, 1).hold.unwrap();
        assert!(key.decide(&plan, check(2, START)).admitted, "{algorithm}");
        assert_eq!(end(&mut key, &all, START, held, [1, 0]), HoldReply::Ended);
        let reply = key.decide(&plan, check(3, START + 3 * SECOND));
        assert!(!reply.admitted && reply.remaining == 1, "{algorithm}: {reply:?}");
    }
}

#[test]
fn the_end_of_a_hold_by_another_burst_leaves_the_expiry_that_the_fast_path_counts_on() {
    let server = RedisServer::start();
    let burst =
        |burst| Params::new(Algorithm::token_bucket(), Quota::per_second(10).burst(burst)).unwrap();
    let mut key = Scripted::new(&server, "{key}");
    key.forget();
    assert!(key.decide(&burst(1_000), check(5, START)).admitted);
    let held = hold(&mut key, &burst(10), START, 1).hold.unwrap();
    assert_eq!(end(&mut key, &burst(10), START, held, [1, 0]), HoldReply::Ended);
    assert!(key.decide(&burst(1_000), check(900, START + 2 * SECOND / 5)).admitted);
    let reply = key.decide(&burst(1_000), check(900, START + 3 * SECOND));
    assert!(!reply.admitted, "{reply:?}");
}

#[test]
fn a_hold_counts_from_the_newest_sub_window_that_is_not_empty() {
    let server = RedisServer::start();
    for buckets in [1, 4] {
        let params = params(Algorithm::SlidingWindow { buckets });
        let mut key = Scripted::beside_engine(&server, "{key}");
        key.forget();
        assert!(key.decide(&params, check(1, START)).admitted);
        let now = START + 11 * SECOND;
        assert!(key.decide(&params, check(1, now)).admitted);
        // The newest count is 0 then.
        key.release(&params, now, &[Release { instant: Some(now), units: 1 }]);
        assert!(hold(&mut key, &params, now, 1).admitted, "{buckets}");
    }
}

#[test]
fn a_leaky_bucket_that_another_burst_unblocks_lives_until_it_is_empty() {
    let server = RedisServer::start();
    let burst =
        |burst| Params::new(Algorithm::leaky_bucket(), Quota::per_second(10).burst(burst)).unwrap();
    let mut key = Scripted::new(&server, "{key}");
    for cost in [1, 10, 50, 200, 500, 900] {
        key.forget();
        assert!(key.decide(&burst(1_000), check(5, START)).admitted);
        key.decide(&burst(10), EngineRequest { action: Action::Unblock, ..check(1, START) });
        let now = START + 2 * SECOND / 5;
        let request = EngineRequest { max_wait: SECOND, ..check(cost, now) };
        let reply = key.decide(&burst(1_000), request);
        assert!(reply.admitted);
        let lives = key.expiry().unwrap() * 1_000 - now;
        assert!(lives >= reply.reset, "{cost}: {lives} of {}", reply.reset);
    }
}

#[test]
fn each_end_returns_its_units_whatever_slots_have_joined() {
    let lifetimes = [300_000, 1_000_000, 2_000_000, 8_000_000, 30_000_000].map(Lifetime::new);
    let steps = prop::collection::vec((0_u8..4, any::<Index>(), 0_u32..400_000), 200);
    TestRunner::new(ProptestConfig { failure_persistence: None, ..Default::default() })
        .run(&steps, |steps| {
            let params = concurrency::params(1_000);
            let (mut state, mut now, mut open) = (State::default(), START, Vec::new());
            for (what, which, ahead) in steps {
                now += i64::from(ahead);
                open.retain(|receipt: &HoldReceipt| receipt.ends > now);
                let lifetime = *which.get(&lifetimes);
                if what < 2 || open.is_empty() {
                    let action = Action::Hold { lifetime, epoch: None };
                    let reply = state.decide(&params, EngineRequest { action, ..check(1, now) });
                    open.extend(reply.hold);
                } else {
                    let receipt = open.swap_remove(which.index(open.len()));
                    let action = match what {
                        2 => HoldAction::End { used: 0 },
                        _ => HoldAction::Renew(lifetime),
                    };
                    let change = HoldChange { receipt, units: 1, action };
                    if let [HoldReply::Renewed(receipt)] =
                        state.change_holds(&params, now, &[change])[..]
                    {
                        open.push(receipt);
                    }
                }
                let held = state.decide(&params, EngineRequest::observe(now)).held;
                // Those that joined a later slot and have expired stay for a while.
                prop_assert!(held >= open.len() as i64, "{held} of {open:?}");
            }
            let changes: Vec<_> = open
                .iter()
                .map(|receipt| HoldChange {
                    receipt: *receipt,
                    units: 1,
                    action: HoldAction::End { used: 0 },
                })
                .collect();
            let before = state.decide(&params, EngineRequest::observe(now)).held;
            state.change_holds(&params, now, &changes);
            let left = state.decide(&params, EngineRequest::observe(now)).held;
            prop_assert_eq!(before - left, open.len() as i64);
            Ok(())
        })
        .unwrap_or_else(|failure| panic!("{failure}"));
}

/// A step of a history with holds.
#[derive(Clone, Debug)]
enum Hold {
    /// Of this part of the quota, and for one of two lifetimes.
    Begin(u32, bool),
    /// Of one of the open holds, with quarters of it used; twice, if it stays open.
    End(Index, u32, bool),
    Renew(Index, bool),
    None,
}

fn holds() -> impl Strategy<Value = Vec<Hold>> {
    let hold = prop_oneof![
        4 => (1_u32..600, any::<bool>()).prop_map(|(part, long)| Hold::Begin(part, long)),
        3 => (any::<Index>(), 0_u32..6, prop::bool::weighted(0.1))
            .prop_map(|(which, quarters, stays)| Hold::End(which, quarters, stays)),
        2 => (any::<Index>(), any::<bool>()).prop_map(|(which, long)| Hold::Renew(which, long)),
        3 => Just(Hold::None),
    ];
    prop::collection::vec(hold, 60)
}

/// An algorithm with two quotas, or two limits on concurrency.
pub(super) fn any_limits() -> impl Strategy<Value = [Params; 2]> {
    let concurrency = [1_u64..8, 1_u64..8].prop_map(|limits| limits.map(concurrency::params));
    prop_oneof![6 => any_params(), 1 => concurrency]
}

struct Histories<'a> {
    scripted: &'a mut Scripted,
    twin: State,
    open: Vec<(HoldReceipt, i64)>,
    lifetimes: [Lifetime; 2],
}

impl Histories<'_> {
    /// Does a step with a hold. Returns false if there is none to do.
    fn step(&mut self, params: &Params, now: i64, hold: &Hold) -> bool {
        let index = |which: &Index| which.index(self.open.len());
        let change = match hold {
            Hold::None => return false,
            Hold::Begin(part, long) => {
                let cost = ceil_div(params.max_cost() * i64::from(*part), 1_000);
                let action =
                    Action::Hold { lifetime: self.lifetimes[usize::from(*long)], epoch: None };
                let request = EngineRequest { action, ..check(cost, now) };
                let reply = both(self.scripted, &mut self.twin, params, request);
                self.open.extend(reply.hold.map(|receipt| (receipt, cost)));
                return true;
            }
            Hold::End(..) | Hold::Renew(..) if self.open.is_empty() => return false,
            Hold::End(which, quarters, stays) => {
                let i = index(which);
                let (receipt, units) = self.open[i];
                if !stays {
                    self.open.swap_remove(i);
                }
                let used = units * i64::from(*quarters) / 4;
                HoldChange { receipt, units, action: HoldAction::End { used } }
            }
            Hold::Renew(which, long) => {
                let (receipt, units) = self.open[index(which)];
                let lifetime = self.lifetimes[usize::from(*long)];
                HoldChange { receipt, units, action: HoldAction::Renew(lifetime) }
            }
        };
        let before = self.twin.clone();
        let replies = self.twin.change_holds(params, now, &[change]);
        let scripted = self.scripted.change_holds(params, now, &[change]);
        assert_eq!(scripted, replies, "{params:?} {change:?} at {now} {before:?}");
        if let HoldReply::Renewed(receipt) = replies[0] {
            let same = self.open.iter_mut().find(|(other, _)| *other == change.receipt);
            same.unwrap().0 = receipt;
        }
        true
    }
}

#[test]
fn the_script_and_the_twin_agree_about_holds() {
    let server = RedisServer::start();
    let scripted = RefCell::new(Scripted::beside_engine(&server, "{key}"));
    TestRunner::new(config(1_000))
        .run(&(any_limits(), steps(), holds(), 1_u32..3_000, any::<bool>()), |history| {
            let (limits, steps, holds, life, steady) = history;
            prop_assume!(limits[0].can_hold());
            let mut scripted = scripted.borrow_mut();
            scripted.forget();
            agree(&mut scripted, limits, (&steps, &holds), life, steady);
            Ok(())
        })
        .unwrap_or_else(|failure| panic!("{failure}"));
}

fn agree(
    scripted: &mut Scripted,
    limits: [Params; 2],
    (steps, holds): (&[Step], &[Hold]),
    thousandths: u32,
    steady: bool,
) {
    let (window, _) = window_and_max_cost(&limits[0]);
    let lifetime = |part: u32| Lifetime::new((window * i64::from(part) / 1_000).max(1) as u64);
    let lifetimes = [lifetime(thousandths), lifetime(thousandths / 7 + 1)];
    let twin = State::default();
    let mut histories = Histories { scripted, twin, open: vec![], lifetimes };
    let (mut now, mut current, mut admitted) = (START, 0, vec![]);
    let goes_back = !steady && goes_back(steps);
    for (step, hold) in steps.iter().zip(holds) {
        if step.switch && !steady {
            current = 1 - current;
        }
        let params = &limits[current];
        now += step.ahead(params, goes_back);
        if histories.scripted.expiry().is_some_and(|expiry| expiry * 1_000 <= now) {
            histories.twin = State::default();
        }
        let releases = step.releases(&mut admitted);
        if histories.step(params, now, hold) {
        } else if !releases.is_empty() {
            histories.twin.release(params, now, &releases);
            histories.scripted.release(params, now, &releases);
        } else {
            let mut request = step.decide(params, now);
            if !params.spends() && request.action.spends() {
                request.action = Action::Peek; // the only one that limiters allow
            }
            let reply = both(histories.scripted, &mut histories.twin, params, request);
            if request.action == Action::Check && reply.admitted {
                admitted.push((reply.instant, request.cost));
            }
        }
        let context = format!("{step:?} {hold:?} at {now}");
        let peek = EngineRequest { action: Action::Peek, ..check(1, now) };
        let reset = histories.twin.clone().decide(params, peek).reset;
        let expiry = histories.scripted.expiry().unwrap_or(0) * 1_000;
        // A clock that steps back makes the key stay longer than its expiry says, and after a
        // change of the quota no call has set the expiry yet.
        if histories.twin.is_held() && steady {
            assert!(
                expiry >= now + reset,
                "{context}: expires at {expiry}, not {reset} later: {:?}",
                histories.twin
            );
        }
        same_states(histories.scripted, params, &histories.twin, now, &context);
    }
}

#[test]
fn the_script_and_the_twin_agree_about_limits_of_which_some_hold() {
    let server = RedisServer::start();
    let scripted: Vec<_> =
        (0..3).map(|i| RefCell::new(Scripted::new(&server, &format!("{{key}}{i}")))).collect();
    let limits = prop::collection::vec(any_limits().prop_map(|[params, _]| params), 2..4);
    let charges = prop::collection::vec((any::<u8>(), 1_u32..600, 0_i64..1_500), 1..30);
    TestRunner::new(config(300))
        .run(&(limits, charges), |(limits, charges)| {
            let mut scripted: Vec<_> =
                scripted[..limits.len()].iter().map(RefCell::borrow_mut).collect();
            scripted.iter_mut().for_each(|scripted| scripted.forget());
            let mut states = vec![State::default(); limits.len()];
            let (window, _) = window_and_max_cost(&limits[0]);
            let most = limits.iter().map(|params| params.max_cost()).fold(i64::MAX, i64::min);
            let lifetime = Lifetime::new((window * 2 / 5).max(1) as u64);
            let mut now = START;
            for (holds, part, ahead) in charges {
                now += window * ahead / 1_000;
                let cost = ceil_div(most * i64::from(part), 1_000);
                let request = |(i, params): (usize, &Params)| {
                    let holds = params.can_hold() && (holds & 1 << i != 0 || !params.spends());
                    let hold = Action::Hold { lifetime, epoch: None };
                    let action = if holds { hold } else { Action::Check };
                    EngineRequest { action, ..check(cost, now) }
                };
                let requests: Vec<_> = limits.iter().enumerate().map(request).collect();
                for (state, scripted) in states.iter_mut().zip(&mut scripted) {
                    if scripted.expiry().is_some_and(|expiry| expiry * 1_000 <= now) {
                        *state = State::default();
                    }
                }
                let step = |i: usize, request: &_| states[i].decide(&limits[i], *request);
                let Combined { replies: twin, .. } = combine(&requests, step);
                let limit = |(i, request): (usize, &EngineRequest)| Limit {
                    key: scripted[i].key().to_owned(),
                    params: limits[i],
                    cost: cost as u64,
                    max_wait: 0,
                    lifetime: match request.action {
                        Action::Hold { lifetime, .. } => Some(lifetime),
                        _ => None,
                    },
                };
                let sent: Vec<_> = requests.iter().enumerate().map(limit).collect();
                let script = eval_limits(&mut scripted[0].connection, &sent, now);
                prop_assert_eq!(script, twin.to_vec(), "{:?} {:?}", limits, requests);
                for (i, scripted) in scripted.iter_mut().enumerate() {
                    same_states(scripted, &limits[i], &states[i], now, "of several limits");
                }
            }
            Ok(())
        })
        .unwrap_or_else(|failure| panic!("{failure}"));
}
