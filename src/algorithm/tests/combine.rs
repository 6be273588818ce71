//! Several limits at once: script and twin agree, all are charged or none, and each keeps its
//! promise.

use std::{cell::RefCell, time::Duration};

use proptest::{prelude::*, test_runner::TestRunner};

use super::{
    super::{Action, Algorithm, EngineReply, EngineRequest, Params, State, combine},
    agreement::{Step, params, steps, window_and_most},
    backends::{Backend, RedisServer, Scripted, check, eval, settled},
};
use crate::quota::Quota;

fn decide(limits: &[Params], states: &mut [State], ask: EngineRequest) -> (EngineReply, usize) {
    let asks = vec![ask; limits.len()];
    combine(&asks, |place, ask| states[place].decide(&limits[place], *ask))
}

/// What every limit could grant.
fn most(limits: &[Params]) -> f64 {
    limits.iter().map(|params| window_and_most(params).1).fold(f64::INFINITY, f64::min)
}

fn max_reservable(limits: &[Params]) -> f64 {
    limits.iter().map(Params::max_reservable).fold(f64::INFINITY, f64::min)
}

/// The questions of a history. Turns are given back one limit at a time in the test of the
/// algorithms.
fn requests(limits: &[Params], steps: &[Step]) -> Vec<EngineRequest> {
    let (window, _) = window_and_most(&limits[0]);
    let part = |thousandths: f64| (window * thousandths / 1e3).floor();
    let most = most(limits);
    let mut now = 1.7e15;
    let ask = |step: &Step| {
        now += (part(f64::from(step.ahead.0)) + f64::from(step.ahead.1)).max(0.0);
        let cost = match step.cost {
            Ok(cost) => f64::from(cost).min(most),
            Err(part) => (most * f64::from(part) / 1e3).ceil(),
        };
        let max_wait = step.max_wait.map_or(0.0, |wait| part(f64::from(wait)));
        let max_wait = max_wait.min(max_reservable(limits));
        EngineRequest { action: step.action, max_wait, ..check(cost, now) }
    };
    steps.iter().map(ask).collect()
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
            scripted.iter_mut().for_each(|it| it.forget());
            let keys: Vec<String> = scripted.iter().map(|it| it.key().to_owned()).collect();
            let mut states = vec![State::Initial; limits.len()];
            for asked in requests(&limits, &steps) {
                for (state, scripted) in states.iter_mut().zip(&mut scripted) {
                    if scripted.expiry().is_some_and(|expiry| expiry * 1e3 <= asked.now) {
                        *state = State::Initial;
                    }
                }
                let mut asked = asked;
                let mut twin = decide(&limits, &mut states, asked);
                let mut script = eval(&mut scripted[0].connection, &keys, &limits, asked);
                if asked.action == Action::Refund {
                    // The script replies nothing: a peek shows what it has done.
                    asked.action = Action::Peek;
                    twin = decide(&limits, &mut states, asked);
                    script = eval(&mut scripted[0].connection, &keys, &limits, asked);
                }
                prop_assert_eq!(script, twin, "{:?} {:?}", limits, asked);
                for ((state, scripted), params) in states.iter().zip(&mut scripted).zip(&limits) {
                    let clean = |state: State| settled(state, asked.now, params);
                    let (script, twin) = (clean(scripted.state(params)), clean(state.clone()));
                    prop_assert!(
                        script == twin
                            || is_gone(params, &script, asked.now)
                                && is_gone(params, &twin, asked.now),
                        "{:?} {:?}\n{:?}\n{:?}",
                        params,
                        asked,
                        script,
                        twin
                    );
                }
            }
            Ok(())
        })
        .unwrap_or_else(|failure| panic!("{failure}"));
}

/// Whether the key is as if never seen.
fn is_gone(params: &Params, state: &State, now: f64) -> bool {
    let peek = EngineRequest { action: Action::Peek, ..check(1, now) };
    state.clone().decide(params, peek).reset == 0.0
}

#[test]
fn all_are_charged_or_none_and_the_decision_is_exact() {
    let config = ProptestConfig { cases: 1_000, failure_persistence: None, ..Default::default() };
    TestRunner::new(config)
        .run(&(limits(), steps()), |(limits, steps)| {
            let mut states = vec![State::Initial; limits.len()];
            for asked in requests(&limits, &steps) {
                let before = states.clone();
                let (verdict, binding) = decide(&limits, &mut states, asked);
                if asked.action != Action::Check {
                    continue;
                }
                let later = |time: f64| {
                    let asked = EngineRequest { now: asked.now + time, ..asked };
                    decide(&limits, &mut states.clone(), asked).0.admitted
                };
                if verdict.admitted {
                    let remaining = remaining(&limits, &states, asked.now);
                    // A leaky bucket's are those that it has room for, not those that need no wait.
                    let shapes = limits.iter().any(|it| matches!(it, Params::LeakyBucket(_)));
                    if !shapes && verdict.wait == 0.0 && verdict.remaining < 40.0 {
                        prop_assert_eq!(verdict.remaining, remaining);
                    }
                    continue;
                }
                for (before, (after, params)) in before.iter().zip(states.iter().zip(&limits)) {
                    let gone =
                        is_gone(params, before, asked.now) && is_gone(params, after, asked.now);
                    prop_assert!(before == after || gone, "a denied request was charged");
                }
                prop_assert!(later(verdict.wait), "retry_after is too short");
                prop_assert!(!later(verdict.wait - 1.0), "retry_after is too long");
                let alone = EngineRequest { now: asked.now + verdict.wait - 1.0, ..asked };
                let denies = !states[binding].clone().decide(&limits[binding], alone).admitted;
                prop_assert!(denies, "another limit binds");
            }
            Ok(())
        })
        .unwrap_or_else(|failure| panic!("{failure}"));
}

/// How many requests of cost 1 all limits admit right now, up to 40.
fn remaining(limits: &[Params], states: &[State], now: f64) -> f64 {
    let mut states = states.to_vec();
    let admitted = (0..40).take_while(|_| decide(limits, &mut states, check(1, now)).0.admitted);
    admitted.count() as f64
}

#[test]
fn limits_that_book_together_keep_their_promises() {
    let quota = |limit, micros| Quota::new(limit, Duration::from_micros(micros));
    let quotas = (1_u32..10, 1_u32..30, 1_u32..30);
    let requests = prop::collection::vec((0_u32..300, 1_u32..4, 0_u32..4_000), 1..100);
    TestRunner::default()
        .run(&(quotas, requests), |((rate, log, window), requests)| {
            let limits = [
                Params::new(Algorithm::token_bucket(), quota(rate, 1_000_000)).unwrap(),
                Params::new(Algorithm::SlidingLog, quota(log, 5_000_000)).unwrap(),
                Params::new(Algorithm::SlidingWindow { buckets: 4 }, quota(window, 9_000_000))
                    .unwrap(),
            ];
            let mut states = vec![State::Initial; 3];
            let mut now = 1.7e15;
            let mut went: Vec<(f64, f64)> = vec![];
            for (ahead, cost, max_wait) in requests {
                now += f64::from(ahead) * 1e3;
                let cost = cost.min(rate).min(log).min(window);
                let max_wait = f64::from(max_wait) * 1e3;
                let (verdict, _) =
                    decide(&limits, &mut states, EngineRequest { max_wait, ..check(cost, now) });
                if verdict.admitted {
                    went.push((now + verdict.wait, cost.into()));
                }
            }
            prop_assert!(went.is_sorted_by_key(|it| it.0), "not in order: {:?}", went);
            let within = |from: usize, length: f64| -> f64 {
                let since = went[from].0;
                went[from..].iter().take_while(|it| it.0 < since + length).map(|it| it.1).sum()
            };
            for i in 0..went.len() {
                prop_assert!(within(i, 5e6) <= f64::from(log), "{:?}", went);
                for j in i..went.len() {
                    let time = went[j].0 - went[i].0;
                    let sum: f64 = went[i..=j].iter().map(|it| it.1).sum();
                    let most = f64::from(rate) + f64::from(rate) * time / 1e6;
                    prop_assert!(sum <= most, "{:?}", went);
                }
            }
            Ok(())
        })
        .unwrap_or_else(|failure| panic!("{failure}"));
}
