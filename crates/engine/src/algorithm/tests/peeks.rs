//! The times of a peek hold for the next one: also if another quota has counted the key, which no
//! peek changes, and if the key is blocked.

use proptest::prelude::*;

use super::{
    super::{
        Action, EngineRequest, State,
        testing::changes::{FORMS, Form, quotas},
    },
    backends::{Backend, START, check},
};

#[derive(Clone, Debug)]
struct Key {
    /// The time before each check, in 1/1000 of the window, and its cost.
    checks: Vec<(i64, u64, i64)>,
    blocks: bool,
    ahead: i64,
    cost: u64,
    /// The time until the second peek, in 1/1000 of the time that the first one has found.
    later: i64,
}

fn keys() -> impl Strategy<Value = Key> {
    let checks = prop::collection::vec((0_i64..1_500, 1_u64..5, 0_i64..2_000), 1..20);
    let fields = (checks, any::<bool>(), 0_i64..1_500, 1_u64..5, 1_i64..1_000);
    fields.prop_map(|(checks, blocks, ahead, cost, later)| Key {
        checks,
        blocks,
        ahead,
        cost,
        later,
    })
}

fn peek(cost: u64, now: i64) -> EngineRequest {
    EngineRequest { action: Action::Peek, ..check(cost, now) }
}

/// Asserts that a time is shorter by what has passed.
fn assert_passed(name: &str, first: i64, second: i64, passed: i64) -> Result<(), TestCaseError> {
    prop_assert_eq!(second, (first - passed).max(0), "{}: {} before, {}", name, first, passed);
    Ok(())
}

proptest! {
    #[test]
    fn the_times_of_a_peek_hold_for_the_next_one(
        (form, quotas, key) in (prop::sample::select(FORMS.to_vec()), quotas(), keys())
    ) {
        let [counted, seen] = [0, quotas.len() - 1].map(|index| quotas[index].params(form));
        let unit = quotas[0].window_us as i64 / 1_000;
        let (mut state, mut now) = (State::default(), START);
        for (ahead, cost, wait) in key.checks {
            now += ahead * unit;
            let cost = cost.min(counted.max_cost() as u64);
            let request = EngineRequest { max_wait: wait * unit, ..check(cost, now) };
            state.decide(&counted, request);
        }
        if key.blocks {
            let action = Action::Block { duration: 3 * unit };
            state.decide(&counted, EngineRequest { action, ..check(1_u64, now) });
        }
        now += key.ahead * unit;
        let cost = key.cost.min(seen.max_cost() as u64);
        let first = state.clone().decide(&seen, peek(cost, now));
        let times = [first.reset, first.replenish, first.wait.unwrap_or(0)];
        for time in times {
            let passed = time * key.later / 1_000;
            let second = state.clone().decide(&seen, peek(cost, now + passed));
            assert_passed("reset", first.reset, second.reset, passed)?;
            if (first.blocked == 0) != (second.blocked == 0) {
                continue; // it was denied by the block alone
            }
            if passed < first.replenish {
                assert_passed("replenish", first.replenish, second.replenish, passed)?;
            }
            if !first.admitted && !matches!(form, Form::LeakyBucket) {
                let wait = second.wait.filter(|_| !second.admitted).unwrap_or(0);
                assert_passed("wait", first.wait.unwrap_or(0), wait, passed)?;
            }
        }
        let over = state.clone().decide(&seen, peek(cost, now + first.reset));
        prop_assert_eq!(over.reset, 0);
    }
}
