//! Where states lie: one that lies in a core decides as one that never does, and a denied request
//! leaves both as they were (law 1). What they decide is in the other files.

use std::cell::Cell;

use proptest::{prelude::*, sample::Index, test_runner::TestRunner};

use super::{
    super::{
        Action, Algorithm, Combined, Core, EngineReply, EngineRequest, HoldAction, HoldChange,
        HoldReceipt, HoldReply, Lifetime, Params, Refill, State, bucket::Bucket, combine,
        fixed_window::FixedWindowState, reservations::Reserved, table::Spent,
    },
    backends::{START, settled},
    generators::{Step, steps},
    holds::any_limits,
};
use crate::quota::Quota;

/// What a step does with holds.
#[derive(Clone, Debug)]
enum Hold {
    None,
    Begin,
    End(Index),
}

fn holds() -> impl Strategy<Value = Vec<Hold>> {
    let hold = prop_oneof![
        6 => Just(Hold::None),
        1 => Just(Hold::Begin),
        1 => any::<Index>().prop_map(Hold::End),
    ];
    prop::collection::vec(hold, 60)
}

fn run<S: Strategy>(
    cases: u32,
    histories: S,
    test: impl Fn(S::Value) -> Result<(), TestCaseError>,
) {
    let config = ProptestConfig { cases, failure_persistence: None, ..Default::default() };
    TestRunner::new(config).run(&histories, test).unwrap_or_else(|failure| panic!("{failure}"));
}

/// The request of a step, or the hold in its place.
fn request(step: &Step, params: &Params, now: i64, lifetime: Option<Lifetime>) -> EngineRequest {
    let request = step.decide(params, now);
    match lifetime.filter(|_| params.can_hold()) {
        Some(lifetime) => {
            EngineRequest { action: Action::Hold { lifetime, epoch: Some(now) }, ..request }
        }
        // The only action that limiters allow.
        None if !params.spends() && request.action.spends() => {
            EngineRequest { action: Action::Peek, ..request }
        }
        None => request,
    }
}

/// A key in a core, if one represents it, and the same key in a state.
struct Both {
    limits: [Params; 2],
    /// The limit that has counted the core.
    counted: usize,
    lies: Result<Core, State>,
    state: State,
}

impl Both {
    fn step(&mut self, which: usize, request: &EngineRequest) -> (EngineReply, bool) {
        let params = self.limits[which];
        let expected = params.step(&mut self.state, request);
        let mut in_core = None;
        if let Ok(core) = &mut self.lies
            && which == self.counted
        {
            let before = *core;
            let is_plain = request.action.is_plain();
            in_core = is_plain.then(|| params.step_core(core, request)).flatten();
            // A denied request may follow a clock that has stepped back (law 1).
            let follows = request.action.inserts() && request.now < before.at;
            let is_same = follows || *core == before;
            let is_same = is_same || in_core.is_some_and(|reply| reply.admitted);
            assert!(is_same, "{params:?} {request:?}: {before:?} became {core:?}");
        }
        let reply = in_core.unwrap_or_else(|| {
            self.change(which, request.now, |state| {
                let reply = params.step(state, request);
                (reply, reply.admitted && request.action.inserts())
            })
        });
        assert_eq!(reply, expected, "{params:?} {request:?} {:?}", self.state);
        (reply, in_core.is_some())
    }

    fn change<R>(
        &mut self,
        which: usize,
        now: i64,
        change: impl FnOnce(&mut State) -> (R, bool),
    ) -> R {
        let mut state = match &self.lies {
            Ok(core) => self.limits[self.counted].open(*core),
            Err(state) => state.clone(),
        };
        let (result, counts) = change(&mut state);
        if counts {
            self.counted = which;
        }
        self.lies = self.limits[self.counted].close(&state, now).ok_or(state);
        result
    }

    /// Asserts that both are the same once time has passed until `now`.
    fn are_same(&self, now: i64) {
        let params = &self.limits[self.counted];
        let at_now = |mut state: State| {
            let nothing = EngineRequest { action: Action::Spend, ..EngineRequest::observe(now) };
            let reply = params.step(&mut state, &nothing);
            let mut state = settled(state, now, params);
            forget_requests(&mut state.spent);
            (reply, state)
        };
        let lies = match &self.lies {
            Ok(core) => params.open(*core),
            Err(state) => state.clone(),
        };
        let context = format!("{params:?} at {now}: {:?} {:?}", self.lies, self.state);
        assert_eq!(at_now(lies), at_now(self.state.clone()), "{context}");
    }
}

/// Forgets what a core does not know: the instant of the newest request of the window or bucket.
fn forget_requests(spent: &mut Spent) {
    let of_window = |state: &mut FixedWindowState| {
        if state.ahead() == 0 {
            state.last = state.start;
        }
    };
    fn of_bucket<const SHAPES: bool>(state: &mut Bucket<SHAPES>) {
        if state.last <= state.at {
            state.last = 0;
        }
    }
    fn each<S>(Reserved { state, waiting }: &mut Reserved<S>, forget: impl Fn(&mut S)) {
        forget(state);
        waiting.iter_mut().for_each(|reservations| forget(&mut reservations.base));
    }
    match spent {
        Spent::FixedWindow(reserved) => each(reserved, of_window),
        Spent::TokenBucket(reserved) => each(reserved, of_bucket),
        Spent::LeakyBucket(reserved) => each(reserved, of_bucket),
        _ => {}
    }
}

#[test]
fn a_state_in_a_core_decides_as_one_that_never_lies_in_one() {
    let [all, in_cores] = [Cell::new(0), Cell::new(0)];
    let histories = (any_limits(), steps(), holds(), any::<bool>());
    run(500, histories, |(limits, steps, holds, goes_back)| {
        // What is held of a shaper waits, too.
        let goes_back = goes_back && !limits.iter().any(Params::shapes);
        let (lies, state) = (Ok(Core::default()), State::default());
        let mut both = Both { limits, counted: 0, lies, state };
        let (mut now, mut current) = (START, 0);
        let (mut admitted, mut open) = (vec![], vec![]);
        for (step, hold) in steps.iter().zip(&holds) {
            // After a clock has stepped back, another length of a window would count from the
            // instant of the last request, which a core does not know.
            current ^= usize::from(step.switch && !goes_back);
            let params = limits[current];
            now += step.ahead(&params, goes_back);
            let releases = step.releases(&mut admitted);
            if !releases.is_empty() {
                params.return_units(&mut both.state, now, &releases);
                both.change(current, now, |state| {
                    (params.return_units(state, now, &releases), false)
                });
            } else if let Hold::End(which) = hold
                && !open.is_empty()
            {
                let (receipt, units) = open.swap_remove(which.index(open.len()));
                end(&mut both, current, now, receipt, units);
            } else {
                let begins = matches!(hold, Hold::Begin).then_some(Lifetime::ENDLESS);
                let mut request = request(step, &params, now, begins);
                if goes_back {
                    // A core knows that a request has waited, but not before which instant, and
                    // forgets a block that has ended once. What is spent waits, whatever its
                    // longest wait.
                    request.max_wait = 0;
                    if matches!(request.action, Action::Spend | Action::Block { .. }) {
                        request.action = Action::Check;
                    }
                }
                let (reply, in_core) = both.step(current, &request);
                open.extend(reply.hold.map(|receipt| (receipt, request.cost)));
                if request.action == Action::Check && reply.admitted {
                    admitted.push((reply.instant, request.cost));
                }
                let lies_in_cores = |params| {
                    matches!(
                        params,
                        Params::FixedWindow(_) | Params::TokenBucket(_) | Params::LeakyBucket(_)
                    )
                };
                if lies_in_cores(params) {
                    all.set(all.get() + 1);
                    in_cores.set(in_cores.get() + u32::from(in_core));
                }
            }
            both.are_same(now);
            if !params.spends() {
                let is_blocked = both.state.blocked_until().is_some();
                prop_assert!(both.lies.is_ok() || is_blocked, "{:?}", both.state);
            }
        }
        Ok(())
    });
    let [all, in_cores] = [all, in_cores].map(Cell::into_inner);
    assert!(in_cores * 5 > all, "{in_cores} of {all} requests were decided in a core");
}

#[test]
fn a_bucket_that_refills_at_once_stays_in_its_core_until_requests_wait() {
    let algorithm = Algorithm::token_bucket().refill(Refill::Interval).overdraft(3);
    let params = Params::new(algorithm, Quota::per_second(5)).expect("a quota");
    let (mut core, mut state) = (Core::default(), State::default());
    for now in (START..).step_by(170_000).take(50) {
        for cost in [1, 2, 7] {
            let request =
                EngineRequest { action: Action::Check, cost, ..EngineRequest::observe(now) };
            let reply = params.step_core(&mut core, &request).expect("a state in a core");
            assert_eq!(reply, params.step(&mut state, &request), "{core:?}, {state:?}");
            let opened = params.open(core);
            assert_eq!(opened.spent == Spent::Nothing, state.spent == Spent::Nothing);
        }
    }
}

/// Ends a hold, half of which was used.
fn end(both: &mut Both, which: usize, now: i64, receipt: HoldReceipt, units: i64) {
    let params = both.limits[which];
    let used = if params.spends() { units / 2 } else { 0 };
    let changes = [HoldChange { receipt, units, action: HoldAction::End { used } }];
    let mut replies = vec![];
    params.change_holds(&mut both.state, now, 0, &changes, |reply| replies.push(reply));
    let is_known = match &mut both.lies {
        Ok(core) => !params.spends() && core.end_hold(receipt, units),
        Err(state) => state.end_hold(receipt, units),
    };
    if used > 0 {
        both.change(which, now, |state| (params.spend(state, used, now), true));
    }
    assert_eq!(replies, [if is_known { HoldReply::Ended } else { HoldReply::Lost }]);
}

/// Asserts that a request changes nothing if it is denied, neither of a state nor of its core.
fn changes_nothing_if_denied(state: &State, params: &Params, request: &EngineRequest) {
    let mut copy = state.clone();
    let reply = params.step(&mut copy, request);
    assert!(reply.admitted || copy == *state, "{params:?} {request:?}\n{state:?}\n{copy:?}");
}

#[test]
fn a_denied_request_leaves_the_state_as_it_was_whatever_the_quota_the_holds_and_the_block() {
    let denied = Cell::new(0);
    run(500, (any_limits(), steps(), holds(), 1_u64..8_000_000), |history| {
        let (limits, steps, holds, lifetime) = history;
        let lifetime = Lifetime::new(lifetime);
        let (mut state, mut now, mut current) = (State::default(), START, 0);
        let mut open: Vec<(HoldReceipt, i64)> = vec![];
        for (step, hold) in steps.iter().zip(&holds) {
            current ^= usize::from(step.switch);
            let params = limits[current];
            now += step.ahead(&params, false);
            if let Hold::End(which) = hold
                && !open.is_empty()
            {
                let (receipt, units) = open.swap_remove(which.index(open.len()));
                let action = HoldAction::End { used: units / 2 };
                let changes = [HoldChange { receipt, units, action }];
                params.change_holds(&mut state, now, now, &changes, |_| {});
                continue;
            }
            let begins = matches!(hold, Hold::Begin).then_some(lifetime);
            for params in &limits {
                for action in [Action::Check, Action::Hold { lifetime, epoch: None }] {
                    if !params.can_hold() && action != Action::Check {
                        continue;
                    }
                    for cost in [1, params.max_cost(), params.max_cost() + 1] {
                        let request = EngineRequest { action, cost, ..step.decide(params, now) };
                        changes_nothing_if_denied(&state, params, &request);
                    }
                }
            }
            let request = request(step, &params, now, begins);
            let before = state.clone();
            let reply = params.step(&mut state, &request);
            open.extend(reply.hold.map(|receipt| (receipt, request.cost)));
            if !reply.admitted {
                denied.set(denied.get() + 1);
                prop_assert_eq!(&state, &before, "{:?} {:?}", params, request);
            }
        }
        Ok(())
    });
    assert!(denied.get() > 1_000, "{} requests were denied", denied.get());
}

#[test]
fn a_request_that_one_of_several_limits_denies_leaves_all_states_as_they_were() {
    let limits = prop::collection::vec((any_limits(), any::<bool>()), 2..5);
    let denied = Cell::new([0; 4]);
    run(2_000, (limits, steps(), holds()), |(limits, steps, holds)| {
        let mut states = vec![State::default(); limits.len()];
        let (mut now, mut current) = (START, 0);
        for (step, hold) in steps.iter().zip(&holds) {
            current ^= usize::from(step.switch);
            now += step.ahead(&limits[0].0[current], false);
            let lifetime = Lifetime::new(5_000_000);
            let requests: Vec<_> = limits
                .iter()
                .map(|(params, holds)| {
                    let params = &params[current];
                    let holds = *holds && matches!(hold, Hold::Begin) || !params.spends();
                    let action = match holds && params.can_hold() {
                        true => Action::Hold { lifetime, epoch: None },
                        false => Action::Check,
                    };
                    EngineRequest { action, ..step.decide(params, now) }
                })
                .collect();
            if step.action.blocks() {
                let (params, _) = &limits[0];
                let request = step.decide(&params[current], now);
                params[current].step(&mut states[0], &request);
            }
            let before = states.clone();
            let Combined { replies, binding } = combine(&requests, |limit, request| {
                limits[limit].0[current].step(&mut states[limit], request)
            });
            if !replies[binding].admitted {
                let mut by = denied.get();
                by[binding] += 1;
                denied.set(by);
                prop_assert_eq!(&states, &before, "{:?} {:?}", limits, requests);
            }
        }
        Ok(())
    });
    assert!(denied.get().iter().all(|denied| *denied > 100), "{:?} denied", denied.get());
}
