//! The laws of single decisions beside holds, on the twin: `hold_histories.rs` applies them to each
//! decision of its histories. Not the promises.

use proptest::prelude::*;

use super::{
    super::{
        Action, Algorithm, EngineReply, EngineRequest, HoldAction, HoldChange, HoldReply, Lifetime,
        Params, Refill, State, arithmetic::ceil_div, hold::Held,
    },
    backends::{Backend, Holds, START, check},
    hold_histories::Setup,
};
use crate::quota::Quota;

/// Asserts what each reply to a check or a hold says.
pub(super) fn keeps(
    setup: &Setup,
    quota: Quota,
    request: &EngineRequest,
    reply: &EngineReply,
    [before, after]: [&State; 2],
) -> Result<(), TestCaseError> {
    let params = Params::new(setup.algorithm, quota).unwrap();
    let &EngineRequest { cost, now, .. } = request;
    let is_hold = matches!(request.action, Action::Hold { .. });
    if let Some(held) = after.held.slots() {
        prop_assert!(held.slots.len() <= 9);
        prop_assert!(held.slots.is_sorted_by(|one, next| one.ends < next.ends));
    }
    if is_hold {
        prop_assert!(!reply.admitted || reply.wait == Some(0), "a hold reserves no instant");
    }
    // Law 1: a denial writes at most once that a clock stepped back.
    if !reply.admitted {
        let mut again = after.clone();
        prop_assert_eq!(again.decide(&params, *request), *reply);
        prop_assert_eq!(&again, after, "a denial writes nothing again");
        let scope = setup.scope;
        if !scope.steps_back && !scope.blocks {
            prop_assert_eq!(before, after, "a denial writes nothing");
        }
    }
    // Law 4.
    let mut state = after.clone();
    let count = (0..100).take_while(|_| state.decide(&params, check(1, now)).admitted).count();
    prop_assert_eq!(count as i64, reply.remaining, "remaining");
    // The end of a hold spends its units as a request does.
    let [mut by_end, mut by_request] = [after.clone(), after.clone()];
    params.spend(&mut by_end, cost, now);
    by_request.decide(&params, EngineRequest::spend(cost, now));
    prop_assert_eq!(by_end, by_request, "units that are spent");
    if reply.blocked > 0 {
        return Ok(());
    }
    // The wait is unknown if holds have to end.
    let overdraft = setup.overdraft();
    let held = if is_hold && reply.admitted { reply.held - cost } else { reply.held };
    let fits = held + (cost - overdraft).max(0) <= quota.burst_size() as i64;
    prop_assert_eq!(reply.wait.is_some(), fits, "{:?} beside {}", request, held);
    // Law 3.
    let wait = reply.wait.unwrap_or(0);
    if !reply.admitted && fits && first_end(after, now).is_none_or(|end| end > now + wait) {
        let at = |now| after.clone().decide(&params, EngineRequest { now, ..*request });
        let (retry, early) = (at(now + wait), at(now + wait - 1));
        prop_assert!(retry.admitted && !early.admitted, "{reply:?}: {early:?}, {retry:?}");
    }
    // Law 5, if all holds end now.
    let mut state = after.clone();
    params.expire_holds(&mut state, now);
    let used = state.held.total();
    state.held = Held::None;
    if used > 0 {
        state.decide(&params, EngineRequest::spend(used, now));
    }
    let later = now + reply.reset;
    let seen = state.clone().decide(&params, EngineRequest::observe(later));
    prop_assert!(seen.held == 0 && seen.reset == 0, "{reply:?}: {seen:?} after the reset");
    let most = State::default().decide(&params, EngineRequest::observe(later)).remaining;
    prop_assert_eq!(seen.remaining, most);
    prop_assert!(state.decide(&params, check(params.max_cost(), later)).admitted);
    Ok(())
}

/// The instant of the clock at which the first slot ends.
fn first_end(state: &State, now: i64) -> Option<i64> {
    let held = state.held.slots()?;
    Some(held.slots.first()?.ends - (held.time(now) - now))
}

const SECOND: i64 = 1_000_000;

fn all_with(quota: Quota) -> Vec<(Algorithm, Params)> {
    [
        Algorithm::FixedWindow,
        Algorithm::SlidingLog,
        Algorithm::sliding_window(),
        Algorithm::SlidingWindow { buckets: 10 },
        Algorithm::token_bucket(),
        Algorithm::TokenBucket { refill: Refill::Interval, overdraft: 0 },
    ]
    .map(|algorithm| (algorithm, Params::new(algorithm, quota).unwrap()))
    .to_vec()
}

fn hold(units: i64, now: i64, lifetime: u64) -> EngineRequest {
    let action = Action::Hold { lifetime: Lifetime::new(lifetime), epoch: None };
    EngineRequest { action, ..check(units, now) }
}

#[test]
fn an_estimate_of_500_that_is_settled_to_180_returns_320() {
    for (algorithm, params) in all_with(Quota::per_minute(100_000)) {
        let mut state = State::default();
        let before = state.decide(&params, check(99_500, START + 30 * SECOND - 1)).remaining;
        assert_eq!(before, 500, "{algorithm}");
        let mut state = State::default();
        let receipt = state.decide(&params, hold(500, START, 60_000_000)).hold.unwrap();
        let now = START + 30 * SECOND;
        assert!(state.decide(&params, check(99_500, now)).admitted, "{algorithm}");
        assert!(!state.decide(&params, check(1, now)).admitted);
        let action = HoldAction::End { used: 180 };
        let change = HoldChange { receipt, units: 500, action };
        assert_eq!(state.change_holds(&params, now, &[change]), [HoldReply::Ended]);
        let seen = state.decide(&params, EngineRequest::observe(now));
        assert_eq!((seen.remaining, seen.held), (320, 0), "{algorithm}");
        assert!(state.decide(&params, check(320, now)).admitted, "{algorithm}");
    }
}

#[test]
fn holds_reach_the_promise_exactly() {
    // In each round, units are held, half of them are used, and what is left is held again.
    for (algorithm, params) in all_with(Quota::per_minute(64)) {
        let (mut state, mut used) = (State::default(), 0);
        for _ in 0..10 {
            let units = state.decide(&params, EngineRequest::observe(START)).remaining;
            if units == 0 {
                break;
            }
            let receipt = state.decide(&params, hold(units, START, 1_000_000)).hold.unwrap();
            assert!(!state.decide(&params, check(1, START)).admitted);
            let half = ceil_div(units, 2);
            let action = HoldAction::End { used: half };
            state.change_holds(&params, START, &[HoldChange { receipt, units, action }]);
            used += half;
        }
        assert_eq!(used, 64, "{algorithm}");
    }
}

#[test]
fn after_a_change_of_the_quota_a_reset_beside_holds_is_exact() {
    let algorithm = Algorithm::token_bucket().refill(Refill::Interval);
    let quotas = [Quota::per_second(10), Quota::per_minute(10)];
    let [before, after] = quotas.map(|quota| Params::new(algorithm, quota).unwrap());
    let mut state = State::default();
    assert!(state.decide(&before, check(3, START)).admitted);
    assert!(state.decide(&before, hold(3, START, 60_000_000)).admitted);
    let peek = EngineRequest { action: Action::Peek, ..check(1, START + 1) };
    let reset = state.clone().decide(&after, peek).reset;
    state.held = Held::None;
    assert_eq!(reset, state.decide(&after, EngineRequest::spend(3, START + 1)).reset);
}

#[test]
fn a_hold_lives_for_one_to_one_and_a_quarter_of_its_lifetime() {
    let params = Params::new(Algorithm::token_bucket(), Quota::per_second(1_000_000)).unwrap();
    for lifetime in [1, 7, 8, 9, 1_000, 60_000_000, 86_400_000_000, 99_999_999_999_u64] {
        let mut state = State::default();
        for i in 0..1_000 {
            let time = lifetime as i64;
            let now = START + i64::from(i) * time / 100;
            let receipt = state.decide(&params, hold(1, now, lifetime)).hold.unwrap();
            let lives = receipt.ends - now;
            assert!((4 * time..=5 * time).contains(&(4 * lives)), "{lifetime}: {lives}");
            let held = state.held.slots().unwrap();
            assert!(held.slots.len() <= 9, "{lifetime}: {held:?}");
        }
    }
}

#[test]
fn a_clock_that_steps_back_keeps_no_hold_for_longer_than_its_life() {
    for (algorithm, params) in all_with(Quota::per_second(10)) {
        for back in [1, SECOND, 3_600 * SECOND] {
            let mut state = State::default();
            assert!(state.decide(&params, hold(10, START, 8_000_000)).admitted);
            let now = START - back;
            state.change_holds(&params, now, &[]);
            assert!(!state.decide(&params, check(1, now + 79 * SECOND / 10)).admitted);
            let now = now + 10 * SECOND + 2 * SECOND;
            assert!(state.decide(&params, check(10, now)).admitted, "{algorithm}, {back}");
        }
    }
}
