//! Several limits at once: script and twin agree, all are charged or none, and each keeps its
//! guarantee.

use std::{cell::RefCell, time::Duration};

use proptest::{prelude::*, test_runner::TestRunner};

use super::{
    super::{
        Action, Algorithm, Combined, EngineReply, EngineRequest, Params, State,
        arithmetic::ceil_div, combine,
    },
    backends::{Backend, RedisServer, START, Scripted, check, eval, open, settled},
    generators::{Step, params, steps, window_and_max_cost},
};
use crate::quota::Quota;

fn decide(limits: &[Params], states: &mut [State], request: EngineRequest) -> (EngineReply, usize) {
    let requests = vec![request; limits.len()];
    let step = |limit: usize, request: &_| states[limit].decide(&limits[limit], *request);
    let Combined { replies, binding } = combine(&requests, step);
    (replies[binding], binding)
}

/// The largest cost that all limits can grant.
fn max_cost(limits: &[Params]) -> i64 {
    limits.iter().map(|params| window_and_max_cost(params).1).fold(i64::MAX, i64::min)
}

fn max_reservable(limits: &[Params]) -> i64 {
    limits.iter().map(|params| params.max_reservable()).fold(i64::MAX, i64::min)
}

/// The requests of a history. It has no releases: these concern one limit each, and `agreement`
/// tests them.
fn requests(limits: &[Params], steps: &[Step]) -> Vec<EngineRequest> {
    let (window, _) = window_and_max_cost(&limits[0]);
    let part = |thousandths: i64| (window * thousandths).div_euclid(1_000);
    let max_cost = max_cost(limits);
    let mut now = START;
    let request = |step: &Step| {
        now += (part(i64::from(step.ahead.0)) + i64::from(step.ahead.1)).max(0);
        let cost = match step.cost {
            Ok(cost) => i64::from(cost).min(max_cost),
            Err(part) => ceil_div(max_cost * i64::from(part), 1_000),
        };
        let max_wait = step.max_wait.map_or(0, |wait| part(wait as i64));
        let max_wait = max_wait.min(max_reservable(limits));
        EngineRequest { action: step.action, max_wait, ..check(cost, now) }
    };
    steps.iter().map(request).collect()
}

fn limits() -> impl Strategy<Value = Vec<Params>> {
    prop::collection::vec(params().prop_map(|[params, _]| params), 2..5)
}

#[test]
fn the_script_and_the_twin_agree() {
    let server = RedisServer::start();
    let scripted: Vec<_> =
        (0..4).map(|i| RefCell::new(Scripted::new(&server, &format!("{{key}}{i}")))).collect();
    let config = ProptestConfig { cases: 400, failure_persistence: None, ..Default::default() };
    TestRunner::new(config)
        .run(&(limits(), steps()), |(limits, steps)| {
            let mut scripted: Vec<_> =
                scripted[..limits.len()].iter().map(RefCell::borrow_mut).collect();
            scripted.iter_mut().for_each(|scripted| scripted.forget());
            let keys: Vec<_> = scripted.iter().map(|scripted| scripted.key().to_owned()).collect();
            let mut states = vec![State::default(); limits.len()];
            for mut request in requests(&limits, &steps) {
                for (state, scripted) in states.iter_mut().zip(&mut scripted) {
                    if scripted.expiry().is_some_and(|expiry| expiry * 1_000 <= request.now) {
                        *state = State::default();
                    }
                }
                if request.action.blocks() {
                    let twin = states[0].decide(&limits[0], request);
                    prop_assert_eq!(scripted[0].decide(&limits[0], request), twin);
                    request.action = Action::Peek;
                }
                let mut twin = decide(&limits, &mut states, request);
                let mut script = eval(&mut scripted[0].connection, &keys, &limits, request);
                if request.action == Action::Refund {
                    prop_assert_eq!(script, twin, "{:?} {:?}", limits, request);
                    // A peek shows the effect.
                    request.action = Action::Peek;
                    twin = decide(&limits, &mut states, request);
                    script = eval(&mut scripted[0].connection, &keys, &limits, request);
                }
                prop_assert_eq!(script, twin, "{:?} {:?}", limits, request);
                for ((state, scripted), params) in states.iter().zip(&mut scripted).zip(&limits) {
                    let clean = |state: State| settled(state, request.now, params);
                    let (script, twin) = (clean(scripted.state(params)), clean(state.clone()));
                    prop_assert!(
                        script == twin
                            || is_gone(params, &script, request.now)
                                && is_gone(params, &twin, request.now),
                        "{:?} {:?}\n{:?}\n{:?}",
                        params,
                        request,
                        script,
                        twin
                    );
                }
            }
            Ok(())
        })
        .unwrap_or_else(|failure| panic!("{failure}"));
}

/// Returns true if the state equals the initial one.
fn is_gone(params: &Params, state: &State, now: i64) -> bool {
    let peek = EngineRequest { action: Action::Peek, ..check(1, now) };
    state.clone().decide(params, peek).reset == 0
}

#[test]
fn all_limits_are_charged_or_none_and_the_decision_is_exact() {
    let config = ProptestConfig { cases: 1_000, failure_persistence: None, ..Default::default() };
    TestRunner::new(config)
        .run(&(limits(), steps()), |(limits, steps)| {
            let mut states = vec![State::default(); limits.len()];
            for request in requests(&limits, &steps) {
                if request.action.blocks() {
                    let _ = states[0].decide(&limits[0], request);
                    continue;
                }
                let before = states.clone();
                let (reply, binding) = decide(&limits, &mut states, request);
                if request.action != Action::Check {
                    continue;
                }
                let later = |time: i64| {
                    let request = EngineRequest { now: request.now + time, ..request };
                    decide(&limits, &mut states.clone(), request).0.admitted
                };
                if reply.admitted {
                    let remaining = remaining(&limits, &states, request.now);
                    // A leaky bucket reports its room, also for requests that have to wait.
                    let is_leaky = |params: &Params| matches!(params, Params::LeakyBucket(_));
                    let shapes = limits.iter().any(is_leaky);
                    if !shapes && reply.known_wait() == 0 && reply.remaining < 40 {
                        prop_assert_eq!(reply.remaining, remaining);
                    }
                    continue;
                }
                for (before, (after, params)) in before.iter().zip(states.iter().zip(&limits)) {
                    let gone =
                        is_gone(params, before, request.now) && is_gone(params, after, request.now);
                    let [before, after] =
                        [before, after].map(|state| open(state.clone(), params, request.now));
                    prop_assert!(before == after || gone, "a denied request was charged");
                }
                // A block is reported without a look at the count.
                let is_blocked = |state: &State| state.blocked_until() > Some(request.now);
                let is_lower_bound = before.iter().any(is_blocked);
                prop_assert!(
                    is_lower_bound || later(reply.known_wait()),
                    "retry_after is too short"
                );
                prop_assert!(!later(reply.known_wait() - 1), "retry_after is too long");
                let single = EngineRequest { now: request.now + reply.known_wait() - 1, ..request };
                let denies = !states[binding].clone().decide(&limits[binding], single).admitted;
                prop_assert!(denies, "another limit binds");
            }
            Ok(())
        })
        .unwrap_or_else(|failure| panic!("{failure}"));
}

/// The number of requests of cost 1 that all limits admit now, up to 40.
fn remaining(limits: &[Params], states: &[State], now: i64) -> i64 {
    let mut states = states.to_vec();
    let admitted = (0..40).take_while(|_| decide(limits, &mut states, check(1, now)).0.admitted);
    admitted.count() as i64
}

#[test]
fn limits_that_reserve_together_keep_their_guarantees() {
    let quota = |limit, micros| Quota::new(limit, Duration::from_micros(micros));
    let quotas = (1_u64..10, 1_u64..30, 1_u64..30);
    let requests = prop::collection::vec((0_u32..300, 1_u64..4, 0_u32..4_000), 1..100);
    TestRunner::default()
        .run(&(quotas, requests), |((rate, log, window), requests)| {
            let limits = [
                Params::new(Algorithm::token_bucket(), quota(rate, 1_000_000)).unwrap(),
                Params::new(Algorithm::SlidingLog, quota(log, 5_000_000)).unwrap(),
                Params::new(Algorithm::SlidingWindow { buckets: 4 }, quota(window, 9_000_000))
                    .unwrap(),
            ];
            let mut states = vec![State::default(); 3];
            let mut now = START;
            let mut departures: Vec<(i64, i64)> = vec![];
            for (ahead, cost, max_wait) in requests {
                now += i64::from(ahead) * 1_000;
                let cost = cost.min(rate).min(log).min(window);
                let max_wait = i64::from(max_wait) * 1_000;
                let (reply, _) =
                    decide(&limits, &mut states, EngineRequest { max_wait, ..check(cost, now) });
                if reply.admitted {
                    departures.push((now + reply.known_wait(), cost as i64));
                }
            }
            prop_assert!(
                departures.is_sorted_by_key(|departure| departure.0),
                "not in order: {:?}",
                departures
            );
            let within = |from: usize, length: i64| -> i64 {
                let since = departures[from].0;
                departures[from..]
                    .iter()
                    .take_while(|departure| departure.0 < since + length)
                    .map(|departure| departure.1)
                    .sum()
            };
            for i in 0..departures.len() {
                prop_assert!(within(i, 5_000_000) <= log as i64, "{:?}", departures);
                for j in i..departures.len() {
                    let time = departures[j].0 - departures[i].0;
                    let sum: i64 = departures[i..=j].iter().map(|departure| departure.1).sum();
                    let max = rate as i64 + rate as i64 * time / 1_000_000;
                    prop_assert!(sum <= max, "{:?}", departures);
                }
            }
            Ok(())
        })
        .unwrap_or_else(|failure| panic!("{failure}"));
}
