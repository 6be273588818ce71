//! Holds by the twin: what is admitted beside them, their ends, expiries and renewals.

use std::time::Duration;

use super::{
    super::{
        Action, Algorithm, EngineReply, EngineRequest, HoldAction, HoldChange, HoldReceipt,
        HoldReply, Lifetime, Params, State,
    },
    backends::{Backend, Holds, check},
};
use crate::quota::Quota;

const SECOND: f64 = 1e6;
const START: f64 = 1.7e15;

fn params(algorithm: Algorithm) -> Params {
    Params::new(algorithm, Quota::new(10, Duration::from_secs(10))).unwrap()
}

fn hold(backend: &mut impl Backend, params: &Params, now: f64, units: f64) -> EngineReply {
    let lifetime = Lifetime::new(8_000_000);
    let action = Action::Hold { lifetime, epoch: None };
    backend.decide(params, EngineRequest { action, ..check(units, now) })
}

fn end(
    backend: &mut impl Holds,
    params: &Params,
    now: f64,
    receipt: HoldReceipt,
    [units, used]: [f64; 2],
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
        let (params, mut state) = (params(algorithm), State::Initial);
        let held = hold(&mut state, &params, START, 8.0);
        assert!(held.admitted && held.remaining == 2.0, "{algorithm}: {held:?}");
        assert!(!state.decide(&params, check(3, START)).admitted);
        let ended = end(&mut state, &params, START + 7.0 * SECOND, held.hold.unwrap(), [8.0, 3.0]);
        assert_eq!(ended, HoldReply::Ended);
        let reply = state.decide(&params, check(7, START + 7.0 * SECOND));
        assert!(reply.admitted && reply.remaining == 0.0, "{algorithm}: {reply:?}");
    }
}

#[test]
fn a_check_that_needs_a_hold_to_end_is_denied_for_an_unknown_time() {
    for algorithm in ALGORITHMS {
        let (params, mut state) = (params(algorithm), State::Initial);
        assert!(hold(&mut state, &params, START, 8.0).admitted);
        let before = state.clone();
        let request = EngineRequest { max_wait: 1e12, ..check(3, START) };
        let denied = state.decide(&params, request);
        assert!(!denied.admitted && denied.wait == f64::INFINITY, "{algorithm}: {denied:?}");
        assert_eq!(denied.remaining, 2.0);
        assert_eq!(state, before);
    }
}

#[test]
fn an_expired_hold_is_spent_at_the_end_of_its_slot() {
    for algorithm in ALGORITHMS {
        let (params, mut state) = (params(algorithm), State::Initial);
        let held = hold(&mut state, &params, START, 8.0);
        let ends = held.hold.unwrap().ends;
        assert!((START + 8.0 * SECOND..=START + 10.0 * SECOND).contains(&ends));
        let reply = state.decide(&params, check(3, ends));
        assert!(!reply.admitted && reply.wait.is_finite(), "{algorithm}: {reply:?}");
        let late = end(&mut state, &params, ends, held.hold.unwrap(), [8.0, 8.0]);
        assert_eq!(late, HoldReply::Expired);
        let reply = state.decide(&params, check(2, ends));
        assert!(reply.admitted, "{algorithm}: {reply:?}");
        let reply = state.decide(&params, check(10, ends + reply.reset));
        assert!(reply.admitted, "{algorithm}: {reply:?}");
    }
}

#[test]
fn a_renewal_after_a_loss_of_the_state_holds_the_units_again() {
    let (params, mut state) = (params(Algorithm::token_bucket()), State::Initial);
    let receipt = hold(&mut state, &params, START, 8.0).hold.unwrap();
    state = State::Initial;
    hold(&mut state, &params, START + SECOND, 10.0);
    let action = HoldAction::Renew(Lifetime::new(8_000_000));
    let change = HoldChange { receipt, units: 8.0, action };
    let renewed = state.change_holds(&params, START + SECOND, &[change])[0];
    let HoldReply::Renewed(renewed) = renewed else { panic!("{renewed:?}") };
    assert_ne!(renewed.epoch, receipt.epoch);
    let ended = end(&mut state, &params, START + SECOND, receipt, [8.0, 1.0]);
    assert_eq!(ended, HoldReply::Lost);
    let ended = end(&mut state, &params, START + SECOND, renewed, [8.0, 0.0]);
    assert_eq!(ended, HoldReply::Ended);
}
