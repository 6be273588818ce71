//! Several checks in one call are decided as if each came alone: the script and the twin agree, to
//! the bit.

use std::cell::RefCell;

use proptest::{prelude::*, test_runner::TestRunner};

use super::{
    super::{Action, Algorithm, EngineRequest, Lifetime, Params, State},
    agreement::{both, same_states},
    backends::{Backend, RedisServer, START, Scripted, check, error_of_each, eval_each},
    generators::{Step, all_with, goes_back, params, steps},
};
use crate::{quota::Quota, script::Limit};

const KEYS: usize = 4;

/// The key of a check, and how many equal ones follow it.
fn places() -> impl Strategy<Value = Vec<(usize, u32)>> {
    prop::collection::vec((0..KEYS, prop_oneof![3 => Just(0_u32), 1 => 1_u32..6]), 1..12)
}

/// The keys and the requests of a call.
fn checks(
    places: &[(usize, u32)],
    steps: &[Step],
    params: &Params,
    now: i64,
) -> Vec<(usize, EngineRequest)> {
    let check = |(&(key, more), step): (&(usize, u32), &Step)| {
        let request = EngineRequest { action: Action::Check, ..step.decide(params, now) };
        vec![(key, request); more as usize + 1]
    };
    places.iter().zip(steps.iter().cycle()).flat_map(check).collect()
}

#[test]
fn the_script_and_the_twin_agree_about_checks_of_one_call() {
    let server = RedisServer::start();
    let scripted: Vec<_> =
        (0..KEYS).map(|i| RefCell::new(Scripted::new(&server, &format!("{{key}}{i}")))).collect();
    let config = ProptestConfig { cases: 600, failure_persistence: None, ..Default::default() };
    let histories = (params(), prop::collection::vec((places(), steps()), 1..12));
    TestRunner::new(config)
        .run(&histories, |(params, calls)| {
            let mut twins = vec![State::default(); KEYS];
            let mut now = START;
            let mut current = 0;
            let goes_back = goes_back(calls.iter().map(|(_, steps)| &steps[0]));
            for scripted in &scripted {
                scripted.borrow_mut().forget();
            }
            for (places, steps) in calls {
                current ^= usize::from(steps[0].switch);
                let params = params[current];
                now += steps[0].ahead(&params, goes_back);
                for (scripted, twin) in scripted.iter().zip(&mut twins) {
                    let mut scripted = scripted.borrow_mut();
                    if scripted.expiry().is_some_and(|expiry| expiry * 1_000 <= now) {
                        scripted.forget();
                        *twin = State::default();
                    }
                }
                let first = steps[0].decide(&params, now);
                if first.action.blocks() {
                    let key = places[0].0;
                    let twin = twins[key].decide(&params, first);
                    assert_eq!(scripted[key].borrow_mut().decide(&params, first), twin);
                }
                let checks = checks(&places, &steps, &params, now);
                let limits = checks.iter().map(|(key, request)| Limit {
                    key: scripted[*key].borrow().key().to_owned(),
                    params,
                    cost: request.cost as u64,
                    max_wait: request.max_wait as u64,
                    lifetime: None,
                });
                let limits: Vec<_> = limits.collect();
                let replies = eval_each(&mut scripted[0].borrow_mut().connection, &limits, now);
                for ((key, request), reply) in checks.iter().zip(replies) {
                    let before = twins[*key].clone();
                    let expected = twins[*key].decide(&params, *request);
                    assert_eq!(reply, expected, "{params:?} {request:?} {before:?}");
                }
                for (key, _) in checks {
                    stays(&mut scripted[key].borrow_mut(), &twins[key], &params, now);
                }
            }
            for (scripted, twin) in scripted.iter().zip(&twins) {
                same_states(&mut scripted.borrow_mut(), &params[current], twin, now, "at the end");
            }
            Ok(())
        })
        .unwrap_or_else(|failure| panic!("{failure}"));
}

#[test]
fn what_is_held_of_a_key_leaves_the_quota_of_the_next_key_of_the_call_whole() {
    let server = RedisServer::start();
    let now = START;
    let holding = Action::Hold { lifetime: Lifetime::new(60_000_000), epoch: None };
    for (algorithm, quota) in all_with(Quota::per_second(10)) {
        let params = Params::new(algorithm, quota).unwrap();
        if !params.can_hold() || !params.spends() {
            continue;
        }
        let mut keys = ["{key}0", "{key}1"].map(|key| Scripted::new(&server, key));
        let mut twins = [State::default(), State::default()];
        let requests = [EngineRequest { action: holding, ..check(5, now) }, check(7, now)];
        for ((key, twin), request) in keys.iter_mut().zip(&mut twins).zip(requests) {
            key.forget();
            assert!(both(key, twin, &params, request).admitted, "{algorithm}");
        }
        let limits = keys.each_ref().map(|key| {
            let key = key.key().to_owned();
            Limit { key, params, cost: 1, max_wait: 0, lifetime: None }
        });
        let replies = eval_each(&mut keys[0].connection, &limits, now);
        for ((key, twin), reply) in keys.iter_mut().zip(&mut twins).zip(replies) {
            assert_eq!(reply, twin.decide(&params, check(1, now)), "{algorithm}");
            same_states(key, &params, twin, now, "after the call");
        }
    }
}

/// Asserts that the key does not expire before its state is that of an unseen key. A check that a
/// block denies does not look at the state, which another quota may have counted.
fn stays(scripted: &mut Scripted, twin: &State, params: &Params, now: i64) {
    let peek = EngineRequest { action: Action::Peek, ..check(1, now) };
    let reset = twin.clone().decide(params, peek).reset;
    // By another quota, a shaper reports no earlier time than its own.
    if reset > 0 && !params.shapes() {
        let expiry = scripted.expiry().expect("each key expires");
        assert!(expiry * 1_000 >= now + reset, "{params:?} {twin:?}: {expiry}, {}", now + reset);
    }
}

#[test]
fn a_log_that_lost_its_entries_is_an_error_of_its_key_alone() {
    let server = RedisServer::start();
    let params = Params::new(Algorithm::SlidingLog, Quota::per_second(60)).unwrap();
    let mut keys = ["{key}0", "{key}1"].map(|key| Scripted::new(&server, key));
    keys.iter_mut().for_each(Scripted::forget);
    for i in 0..60 {
        assert!(keys[0].decide(&params, check(1, START + 1_000 * i)).admitted);
    }
    let later = START + 1_020_500; // 21 entries do not count, and stay
    assert!(keys[0].decide(&params, check(1, later)).admitted);
    let bytes = keys[0].bytes().unwrap();
    let end = &bytes[bytes.len() - 272..]; // what a check reads first
    redis::cmd("SET").arg("{key}0").arg(end).exec(&mut keys[0].connection).unwrap();
    let limits = keys.each_ref().map(|key| {
        let key = key.key().to_owned();
        Limit { key, params, cost: 1, max_wait: 0, lifetime: None }
    });
    let error = error_of_each(&mut keys[0].connection, &limits, later + 5_000).to_string();
    assert!(error.contains("{key}0"), "{error}");
    assert!(keys[1].bytes().is_some(), "it was decided");
}

#[test]
fn a_bucket_stores_a_reservation_behind_the_others_in_few_commands() {
    let server = RedisServer::start();
    let quota = Quota::per_second(10).burst(100);
    // The leaky bucket reads the state by itself, and only the beginning of it.
    for (algorithm, first, reads) in
        [(Algorithm::token_bucket(), 100, 2), (Algorithm::LeakyBucket, 60, 3)]
    {
        let params = Params::new(algorithm, quota).unwrap();
        let (mut scripted, mut twin) = (Scripted::new(&server, "{key}"), State::default());
        scripted.forget();
        assert!(both(&mut scripted, &mut twin, &params, check(first, START)).admitted);
        for number in 1..=30 {
            let now = START + number;
            let request = EngineRequest { max_wait: 60_000_000, ..check(1, now) };
            let length = scripted.bytes().unwrap().len();
            let page = if algorithm == Algorithm::LeakyBucket { length.min(256) } else { length };
            let before = (server.calls("getrange"), scripted.bytes_read());
            let reply = scripted.decide(&params, request);
            let has_read = server.calls("getrange") - before.0;
            assert_eq!(reply, twin.decide(&params, request), "{algorithm} {number}");
            assert!(reply.admitted && reply.wait > Some(0), "{algorithm} {number}");
            // Of many, the newest one is read once more, and the instant of one in the middle.
            assert!(has_read <= reads, "{algorithm} {number}: {has_read}");
            let bytes = scripted.bytes_read() - before.1;
            assert!(bytes <= page + 16 + 8, "{algorithm} {number}: {bytes} of {length}");
        }
        let denied = check(1, START + 31);
        let before = server.calls("getrange");
        assert_eq!(scripted.decide(&params, denied), twin.decide(&params, denied), "{algorithm}");
        assert!(server.calls("getrange") - before < reads, "{algorithm}");
    }
}

#[test]
fn a_key_stays_for_the_last_fraction_of_a_microsecond() {
    let server = RedisServer::start();
    let quota = Quota::per_second(8_000_000).burst(10);
    let params = Params::new(Algorithm::token_bucket(), quota).unwrap();
    let (mut scripted, mut twin) = (Scripted::new(&server, "{key}"), State::default());
    scripted.forget();
    let now = START - 1; // the first check counts until the end of a millisecond
    for cost in [7, 2] {
        assert!(both(&mut scripted, &mut twin, &params, check(cost, now)).admitted);
        stays(&mut scripted, &twin, &params, now);
    }
}
