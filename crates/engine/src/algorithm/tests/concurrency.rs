//! Limits on concurrency: random histories of holds, ends, renewals and holders that die, on the
//! twin and on the script. The tests of other limits are in `holds.rs` and `hold_histories.rs`.

use std::cell::RefCell;

use proptest::{prelude::*, sample::Index, test_runner::TestRunner};

use super::{
    super::{
        Action, Algorithm, EngineRequest, HoldAction, HoldChange, HoldReceipt, HoldReply, Lifetime,
        Params, State,
    },
    backends::{Holds, RedisServer, START, Scripted, check},
};
use crate::quota::Quota;

const LIFETIME: u64 = 8_000_000;

pub(super) fn params(limit: u64) -> Params {
    Params::new(Algorithm::Concurrency, Quota::concurrent(limit)).unwrap()
}

fn hold(backend: &mut impl Holds, params: &Params, now: i64, units: i64) -> Option<HoldReceipt> {
    let action = Action::Hold { lifetime: Lifetime::new(LIFETIME), epoch: None };
    let reply = backend.decide(params, EngineRequest { action, ..check(units, now) });
    assert_eq!(reply.admitted, reply.hold.is_some());
    assert!(reply.admitted || reply.wait.is_none(), "{reply:?}");
    reply.hold
}

fn change(
    backend: &mut impl Holds,
    params: &Params,
    now: i64,
    permit: &Permit,
    action: HoldAction,
) -> HoldReply {
    let &Permit { receipt, units, .. } = permit;
    backend.change_holds(params, now, &[HoldChange { receipt, units, action }])[0]
}

/// A permit whose holder is alive, or died without a word.
#[derive(Clone, Debug)]
struct Permit {
    receipt: HoldReceipt,
    units: i64,
    /// By the time that has passed, not by the clock of the store.
    held_until: i64,
    is_counted: bool,
}

#[derive(Clone, Debug)]
enum Event {
    Hold(u64),
    End(Index, u64),
    /// A late or repeated end: its permit stays, as one whose holder has died.
    EndTwice(Index),
    Renew(Index),
    /// Thousandths of a lifetime.
    Pass(u32),
    StepBack(u32),
    LoseState,
    /// Between two limits.
    ChangeLimit,
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        8 => (1_u64..4).prop_map(Event::Hold),
        5 => (any::<Index>(), 0_u64..9).prop_map(|(which, used)| Event::End(which, used)),
        1 => any::<Index>().prop_map(Event::EndTwice),
        4 => any::<Index>().prop_map(Event::Renew),
        6 => (0_u32..500).prop_map(Event::Pass),
        1 => (0_u32..2_000).prop_map(Event::Pass),
        1 => (0_u32..3_000).prop_map(Event::StepBack),
        1 => Just(Event::LoseState),
        1 => Just(Event::ChangeLimit),
    ];
    prop::collection::vec(event, 1..80)
}

/// Plays a history. At each admission, the permits of holders that are alive and known to the store
/// are at most the limit; and at the end, one lifetime after the last of them, all of it is free.
fn play<B: Holds>(
    store: &mut B,
    limits: [u64; 2],
    events: &[Event],
    lose_state: impl Fn(&mut B),
) -> Result<(), TestCaseError> {
    let part = |thousandths: u32| i64::from(thousandths) * LIFETIME as i64 / 1_000;
    let (mut now, mut passed, mut back) = (START, 0, 0);
    let (mut current, mut permits) = (0, Vec::<Permit>::new());
    for event in events {
        let limit = params(limits[current]);
        match event {
            Event::Hold(units) => {
                let units = units.min(&limits[current]);
                let alive = |it: &&Permit| it.is_counted && passed < it.held_until;
                let held: i64 = permits.iter().filter(alive).map(|it| it.units).sum();
                let Some(receipt) = hold(store, &limit, now, *units as i64) else { continue };
                let total = held + *units as i64;
                prop_assert!(total <= limits[current] as i64, "{total} at {passed}: {permits:?}");
                let held_until = passed + LIFETIME as i64;
                permits.push(Permit {
                    receipt,
                    units: *units as i64,
                    held_until,
                    is_counted: true,
                });
            }
            Event::End(..) | Event::EndTwice(_) | Event::Renew(_) if permits.is_empty() => {}
            Event::End(which, used) => {
                let permit = permits.swap_remove(which.index(permits.len()));
                let action = HoldAction::End { used: *used as i64 };
                change(store, &limit, now, &permit, action);
            }
            Event::EndTwice(which) => {
                // Only one of which nothing is counted any more: an end is never repeated.
                let index = which.index(permits.len());
                if passed < permits[index].held_until + LIFETIME as i64 / 4 + back {
                    continue;
                }
                let reply =
                    change(store, &limit, now, &permits[index], HoldAction::End { used: 1 });
                prop_assert!(matches!(reply, HoldReply::Expired | HoldReply::Lost));
            }
            Event::Renew(which) => {
                let index = which.index(permits.len());
                let action = HoldAction::Renew(Lifetime::new(LIFETIME));
                if let HoldReply::Renewed(receipt) =
                    change(store, &limit, now, &permits[index], action)
                {
                    let held_until = passed + LIFETIME as i64;
                    let units = permits[index].units;
                    permits[index] = Permit { receipt, units, held_until, is_counted: true };
                } else {
                    prop_assert!(passed >= permits[index].held_until, "expired too early");
                    permits[index].is_counted = false;
                }
            }
            Event::Pass(time) => (now, passed) = (now + part(*time), passed + part(*time)),
            Event::StepBack(time) => (now, back) = (now - part(*time), back + part(*time)),
            Event::LoseState => {
                lose_state(store);
                now += 1; // epochs tell states apart by their instants
                permits.iter_mut().for_each(|permit| permit.is_counted = false);
            }
            Event::ChangeLimit => current = 1 - current,
        }
    }
    let limit = params(limits[current]);
    now += LIFETIME as i64 * 5 / 4 + back + 1;
    prop_assert!(hold(store, &limit, now, limits[current] as i64).is_some(), "leaked: {permits:?}");
    Ok(())
}

fn run<B: Holds>(cases: u32, store: B, lose_state: impl Fn(&mut B) + Copy) {
    let config = ProptestConfig {
        cases,
        max_shrink_iters: 1_000,
        failure_persistence: None,
        ..Default::default()
    };
    let store = RefCell::new(store);
    TestRunner::new(config)
        .run(&([1_u64..6, 1_u64..6], events()), |(limits, events)| {
            let mut store = store.borrow_mut();
            lose_state(&mut store);
            play(&mut *store, limits, &events, lose_state)
        })
        .unwrap_or_else(|failure| panic!("{failure}"));
}

#[test]
fn the_twin_never_holds_more_than_the_limit_and_leaks_nothing() {
    run(3_000, State::default(), |state| *state = State::default());
}

#[test]
fn the_script_never_holds_more_than_the_limit_and_leaks_nothing() {
    let server = RedisServer::start();
    run(300, Scripted::new(&server, "{key}"), Scripted::forget);
}

#[test]
fn nothing_is_spent() {
    let (limit, mut state) = (params(3), State::default());
    let receipt = hold(&mut state, &limit, START, 2).unwrap();
    assert!(hold(&mut state, &limit, START, 2).is_none());
    let permit = Permit { receipt, units: 2, held_until: 0, is_counted: true };
    let ended = change(&mut state, &limit, START, &permit, HoldAction::End { used: 9 });
    assert_eq!(ended, HoldReply::Ended);
    assert!(state == State::default());
    // A hold that expires is free again, and its late end changes nothing.
    let receipt = hold(&mut state, &limit, START, 3).unwrap();
    assert!(hold(&mut state, &limit, receipt.ends - 1, 1).is_none());
    assert!(hold(&mut state, &limit, receipt.ends, 3).is_some());
    let permit = Permit { receipt, units: 3, held_until: 0, is_counted: true };
    let ended = change(&mut state, &limit, receipt.ends, &permit, HoldAction::End { used: 3 });
    assert_eq!(ended, HoldReply::Expired);
    assert!(hold(&mut state, &limit, receipt.ends, 1).is_none());
}
