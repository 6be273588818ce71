//! The script and the twin give the same replies and leave the same state, to the bit. Each reply
//! is checked against the laws on the way.

use std::{cell::RefCell, env};

use proptest::{prelude::*, test_runner::TestRunner};

use super::{
    super::{
        Action, Algorithm, EngineReply, EngineRequest, LONGEST_BLOCK, Params, Refill, Release,
        State, arithmetic::ceil_div,
    },
    backends::{Backend, RedisServer, START, Scripted, check, settled},
    contract::all_with,
};
use crate::quota::{MAX_UNITS, Quota};

/// As many histories as the environment variable `HISTORIES` says, if it is set.
pub(super) fn config(cases: u32) -> ProptestConfig {
    let cases = env::var("HISTORIES").map_or(cases, |number| number.parse().unwrap());
    ProptestConfig {
        cases,
        max_global_rejects: cases.max(1_024),
        max_shrink_iters: 300,
        failure_persistence: None,
        ..Default::default()
    }
}

#[derive(Clone, Debug)]
pub(super) struct Step {
    pub(super) action: Action,
    /// Replaces the action: the admitted requests to release, and the part of each, in 1/4.
    releases: Vec<(prop::sample::Index, u32)>,
    /// In units, or in 1/1000 of the largest cost that can be granted.
    pub(super) cost: Result<u32, u32>,
    /// In 1/1000 of a window.
    pub(super) max_wait: Option<u64>,
    /// In 1/1000 of a window, and microseconds.
    pub(super) ahead: (i32, i32),
    /// True if the other quota applies from here on.
    pub(super) switch: bool,
}

impl Step {
    /// The time that passes before the step, in microseconds; `goes_back`: if it may be negative.
    pub(super) fn ahead(&self, params: &Params, goes_back: bool) -> i64 {
        let (window, _) = window_and_max_cost(params);
        let ahead = (window * i64::from(self.ahead.0)).div_euclid(1_000) + i64::from(self.ahead.1);
        if goes_back { ahead } else { ahead.max(0) }
    }

    /// Takes the units to release out of the `admitted` instants and costs.
    pub(super) fn releases(&self, admitted: &mut Vec<(i64, i64)>) -> Vec<Release> {
        let mut releases = vec![];
        for (which, quarters) in &self.releases {
            if admitted.is_empty() {
                break;
            }
            let (instant, cost) = admitted.swap_remove(which.index(admitted.len()));
            let units = ceil_div(cost * i64::from(*quarters), 4);
            releases.push(Release { instant: Some(instant), units });
            if units < cost {
                admitted.push((instant, cost - units));
            }
        }
        releases
    }

    pub(super) fn decide(&self, params: &Params, now: i64) -> EngineRequest {
        let (window, max_cost) = window_and_max_cost(params);
        let cost = match self.cost {
            Ok(cost) => i64::from(cost).min(max_cost),
            Err(part) => ceil_div(max_cost * i64::from(part), 1_000),
        };
        let max_wait = self
            .max_wait
            .map_or(params.default_wait(), |wait| window.saturating_mul(wait as i64) / 1_000)
            .min(if self.action.blocks() { LONGEST_BLOCK } else { params.max_reservable() });
        let action = lasting(self.action, max_wait);
        EngineRequest { action, cost, max_wait, now, admission: None, blocked: 0 }
    }
}

/// The action; a block of this duration.
pub(super) fn lasting(action: Action, duration: i64) -> Action {
    match action {
        Action::Block { .. } => Action::Block { duration },
        action => action,
    }
}

pub(super) fn steps() -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec(step(), 1..60)
}

pub(super) fn step() -> impl Strategy<Value = Step> {
    let action = prop_oneof![
        8 => Just(Action::Check),
        1 => Just(Action::Peek),
        2 => Just(Action::Refund),
        1 => Just(Action::Spend),
        1 => prop_oneof![2 => Just(Action::Block { duration: 0 }), 1 => Just(Action::Unblock)],
    ];
    let release = (any::<prop::sample::Index>(), 1_u32..5);
    let releases = prop_oneof![
        4 => Just(vec![]),
        1 => prop::collection::vec(release, 1..4),
    ];
    let ahead = prop_oneof![
        6 => 0..300,
        2 => Just(0),
        1 => 300..3_000,
        1 => -1_500..0,
    ];
    let max_wait = prop_oneof![3 => Just(None), 1 => (0_u64..2_500).prop_map(Some)];
    let cost = prop_oneof![(1_u32..8).prop_map(Ok), (1_u32..1_001).prop_map(Err)];
    (action, releases, cost, max_wait, (ahead, -2..3), prop::bool::weighted(0.1)).prop_map(
        |(action, releases, cost, max_wait, ahead, switch)| Step {
            action,
            releases,
            cost,
            max_wait,
            ahead,
            switch,
        },
    )
}

/// Limits that do not fit in four bytes, up to the largest one.
pub(super) fn large() -> impl Strategy<Value = u64> {
    prop_oneof![
        Just(15_000_000_000),
        Just(50_000_000_000),
        Just(1_000_000_000_000),
        (32_u32..46).prop_flat_map(|bits| 1_u64 << bits..2 << bits),
        Just(MAX_UNITS),
    ]
}

/// In microseconds.
fn window() -> impl Strategy<Value = u64> {
    prop_oneof![
        2 => Just(1_000_000),
        2 => 1_000_u64..100_000,
        2 => 1_000_u64..100_000_000_000,
        1 => Just(366 * 86_400_000_000_u64),
    ]
}

fn quota(bucket: bool) -> impl Strategy<Value = Quota> {
    let limit = prop_oneof![
        5 => 1_u64..20,
        1 => 1_u64..1_000_000,
        1 => Just(u32::MAX.into()),
        2 => large(),
    ];
    (limit, window(), prop_oneof![1 => Just(None), 1 => (1_u64..30).prop_map(Some)]).prop_map(
        move |(limit, window, burst)| {
            let quota = Quota::nearest(limit, std::time::Duration::from_micros(window));
            burst.filter(|_| bucket).map_or(quota, |burst| quota.try_burst(burst).unwrap_or(quota))
        },
    )
}

/// An algorithm and two quotas.
pub(super) fn params() -> impl Strategy<Value = [Params; 2]> {
    params_with(quota)
}

/// An algorithm, a quota of a few units, and a large one.
fn small_and_large() -> impl Strategy<Value = [Params; 2]> {
    params_with(|bucket| {
        (1_u64..20, large(), window(), any::<bool>(), any::<bool>()).prop_map(
            move |(small, large, window, is_large, has_burst)| {
                let limit = if is_large { large } else { small };
                let quota = Quota::nearest(limit, std::time::Duration::from_micros(window));
                let burst = if has_burst && bucket { large } else { quota.limit() };
                quota.try_burst(burst).unwrap_or(quota)
            },
        )
    })
}

fn params_with<Q: Strategy<Value = Quota>>(
    quota: impl Fn(bool) -> Q,
) -> impl Strategy<Value = [Params; 2]> {
    let every = all_with(Quota::per_second(1)).into_iter().map(|(algorithm, _)| algorithm);
    let overdraft = prop_oneof![4 => 0_u64..4, 1 => Just(1 << 30), 1 => Just(1 << 40)];
    let algorithm = prop_oneof![
        3 => prop::sample::select(every.collect::<Vec<_>>()),
        1 => (1_u32..8).prop_map(|buckets| Algorithm::SlidingWindow { buckets }),
        1 => Just(Algorithm::SlidingWindow { buckets: 100 }),
        1 => (any::<bool>(), overdraft).prop_map(
            |(lumps, overdraft)| Algorithm::TokenBucket {
                refill: if lumps { Refill::Interval } else { Refill::Continuous },
                overdraft,
            }
        ),
    ];
    algorithm.prop_flat_map(move |algorithm| {
        let bucket = matches!(algorithm, Algorithm::TokenBucket { .. } | Algorithm::LeakyBucket);
        (quota(bucket), quota(bucket)).prop_map(move |quotas| {
            <[Quota; 2]>::from(quotas).map(|quota| {
                // An overdraft can be too large for a quota.
                Params::new(algorithm, quota)
                    .or_else(|_| Params::new(Algorithm::token_bucket(), quota))
                    .unwrap()
            })
        })
    })
}

/// The time in which a used-up quota is full again, and the largest cost that can be granted.
pub(super) fn window_and_max_cost(params: &Params) -> (i64, i64) {
    let args = params.args();
    let window = match params {
        Params::TokenBucket(_) | Params::LeakyBucket(_) => {
            let [burst, _, unit, period, lump, ..] = args[..] else { unreachable!() };
            burst * unit / lump * period
        }
        Params::Concurrency(_) => 1e6,
        _ => args[1],
    };
    (window.min(3e13) as i64, params.max_cost())
}

#[test]
fn the_script_and_the_twin_agree() {
    agree(params(), Scripted::new);
}

/// The fast path decides about most plain checks. Here the model in Lua does.
#[test]
fn the_script_without_its_fast_path_and_the_twin_agree() {
    agree(params(), Scripted::without_fast_path);
}

#[test]
fn the_script_and_the_twin_agree_when_small_and_large_quotas_alternate() {
    agree(small_and_large(), Scripted::new);
}

fn agree(params: impl Strategy<Value = [Params; 2]>, scripted: fn(&RedisServer, &str) -> Scripted) {
    let server = RedisServer::start();
    let scripted = RefCell::new(scripted(&server, "{key}"));
    let config = config(1_000);
    let histories = (params, steps(), any::<bool>());
    TestRunner::new(config)
        .run(&histories, |(params, steps, steady)| {
            let mut scripted = scripted.borrow_mut();
            scripted.forget();
            history(&mut scripted, params, &steps, steady);
            Ok(())
        })
        .unwrap_or_else(|failure| panic!("{failure}"));
}

/// Steps with waits of up to 10^12 windows, and blocks of years.
fn far_steps() -> impl Strategy<Value = Vec<Step>> {
    let powers = prop::collection::vec(0_u32..13, 60);
    (steps(), powers).prop_map(|(mut steps, powers)| {
        for (step, power) in steps.iter_mut().zip(powers) {
            step.max_wait = step.max_wait.map(|wait| wait * 10_u64.pow(power));
        }
        steps
    })
}

#[test]
fn the_script_and_the_twin_agree_about_long_waits_and_blocks() {
    let server = RedisServer::start();
    let scripted = RefCell::new(Scripted::new(&server, "{key}"));
    let config = config(1_000);
    TestRunner::new(config)
        .run(&(params(), far_steps()), |(params, steps)| {
            let mut scripted = scripted.borrow_mut();
            scripted.forget();
            history(&mut scripted, params, &steps, false);
            Ok(())
        })
        .unwrap_or_else(|failure| panic!("{failure}"));
}

/// Returns whether the clock may step back. Then the script would find a block again that was over,
/// and is for the twin.
pub(super) fn goes_back<'a>(steps: impl IntoIterator<Item = &'a Step>) -> bool {
    steps.into_iter().all(|step| !step.action.blocks())
}

/// With a `steady` clock and quota, all laws hold at every step.
fn history(scripted: &mut Scripted, limits: [Params; 2], steps: &[Step], steady: bool) {
    let mut twin = State::default();
    let mut now = START;
    let mut current = 0;
    let mut admitted = vec![];
    let goes_back = !steady && goes_back(steps);
    for step in steps {
        if step.switch && !steady {
            current = 1 - current;
        }
        let params = &limits[current];
        now += step.ahead(params, goes_back);

        let (bytes, expiry) = (scripted.bytes(), scripted.expiry());
        let expired = expiry.is_some_and(|expiry| expiry * 1_000 <= now);
        if expired {
            twin = State::default();
        }
        let before = twin.clone();
        let releases = step.releases(&mut admitted);
        if !releases.is_empty() {
            twin.release(params, now, &releases);
            scripted.release(params, now, &releases);
            same_states(scripted, params, &twin, now, &format!("{before:?} {releases:?}"));
            continue;
        }
        let request = step.decide(params, now);
        let reply = both(scripted, &mut twin, params, request);

        if request.action == Action::Check && reply.admitted {
            admitted.push((reply.instant, request.cost));
        }

        same_states(scripted, params, &twin, now, &format!("{request:?}"));
        let before = (!expired).then_some((bytes, expiry));
        let limits = if steady { &limits[..1] } else { &limits[..] };
        check_writes(scripted, limits, before, (&request, &reply), !goes_back);
        if steady && reply.blocked == 0 {
            laws(params, &twin, request, reply);
        }
    }
}

/// Asserts that an admission sets the expiry, and that denied requests and peeks write nothing to
/// the bytes and the expiry `before`, whatever quota has counted them: a denied request only if the
/// clock steps back.
fn check_writes(
    scripted: &mut Scripted,
    limits: &[Params],
    before: Option<(Option<Vec<u8>>, Option<i64>)>,
    (request, reply): (&EngineRequest, &EngineReply),
    is_forward: bool,
) {
    let writes = request.action.commits() && reply.admitted;
    if writes {
        let expiry = scripted.expiry().expect("each key expires");
        let late = expiry - ceil_div(request.now + reply.reset, 1_000);
        // Up to the time in which an empty bucket refills, by the quota that set the expiry.
        let max = limits.iter().map(max_lateness).fold(0.0, f64::max);
        assert!((0..=max.ceil() as i64).contains(&late), "{late} ms too late");
    }
    if request.action == Action::Peek || is_forward && request.action.commits() && !writes {
        assert!(before.is_none_or(|before| before == (scripted.bytes(), scripted.expiry())));
    }
}

/// The longest time, in milliseconds, for which a key stays after its state is the initial one.
fn max_lateness(params: &Params) -> f64 {
    let args = params.args();
    let time = match params {
        Params::TokenBucket(_) | Params::LeakyBucket(_) => args[0] * args[2] / args[4] * args[3],
        Params::SlidingLog(_) => args[1],
        Params::FixedWindow(_) | Params::SlidingWindow(_) | Params::Concurrency(_) => 0.0,
    };
    time / 1e3
}

/// Asserts that both replies are the same. A peek after a refund shows its effect, too.
pub(super) fn both(
    scripted: &mut Scripted,
    twin: &mut State,
    params: &Params,
    mut request: EngineRequest,
) -> EngineReply {
    let before = twin.clone();
    if request.action == Action::Refund {
        let reply = twin.decide(params, request);
        assert_eq!(scripted.decide(params, request), reply, "{params:?} {request:?} {before:?}");
        request.action = Action::Peek;
    }
    let reply = twin.decide(params, request);
    assert_eq!(scripted.decide(params, request), reply, "{params:?} {request:?} {before:?}");
    reply
}

pub(super) fn same_states(
    scripted: &mut Scripted,
    params: &Params,
    twin: &State,
    now: i64,
    context: &str,
) {
    let state = scripted.state(params);
    let gone = |state: &State| {
        let peek = EngineRequest { action: Action::Peek, ..check(1, now) };
        state.clone().decide(params, peek).reset == 0
    };
    if settled(state.clone(), now, params) != settled(twin.clone(), now, params) {
        assert!(gone(&state) && gone(twin), "{params:?} {context}\n{state:?}\n{twin:?}");
    }
}

fn laws(params: &Params, after: &State, request: EngineRequest, reply: EngineReply) {
    let later = |time: i64, request: EngineRequest| {
        after.clone().decide(params, EngineRequest { now: request.now + time, ..request })
    };
    let checking = EngineRequest { action: Action::Check, ..request };

    if request.action == Action::Check && !reply.admitted {
        assert!(later(reply.known_wait(), checking).admitted, "retry_after is too short");
        assert!(!later(reply.known_wait() - 1, checking).admitted, "retry_after is too long");
    }

    let one = EngineRequest { cost: 1, max_wait: params.default_wait(), ..checking };
    let mut state = after.clone();
    for _ in 0..reply.remaining.min(40) as u32 {
        assert!(state.decide(params, one).admitted, "remaining is too large");
    }
    if reply.remaining <= 40 {
        let next = state.decide(params, one);
        assert!(!next.admitted, "remaining is too small");
    }

    if reply.replenish > 0 {
        let peek = EngineRequest { action: Action::Peek, ..one };
        assert!(later(reply.replenish, peek).remaining > reply.remaining);
        assert!(later(reply.replenish - 1, peek).remaining <= reply.remaining);
    }

    let fresh =
        State::default().decide(params, EngineRequest { now: request.now + reply.reset, ..one });
    let mut reset = after.clone();
    assert_eq!(
        reset.decide(params, EngineRequest { now: request.now + reply.reset, ..one }),
        fresh
    );
    if reply.reset > 0 {
        assert!(later(reply.reset - 1, EngineRequest { action: Action::Peek, ..one }).reset > 0);
    }
}

#[test]
fn a_clock_that_steps_back_admits_nothing_extra_and_does_not_extend_a_denial() {
    for (algorithm, quota) in super::contract::all_with(Quota::per_second(10)) {
        let params = Params::new(algorithm, quota).unwrap();
        for back in [1, 1_000, 500_000, 1_000_000, 1_000_000_000] {
            let mut state = State::default();
            let start = START;
            while state.decide(&params, check(1, start)).admitted {}
            let denied = state.decide(&params, check(1, start));
            let after = state.decide(&params, check(1, start - back));
            assert!(!after.admitted, "{algorithm} admits extra after a step of {back} us");
            assert_eq!(
                after.known_wait(),
                denied.known_wait(),
                "{algorithm} counts time that did not pass"
            );
            assert!(after.known_wait() <= 2_000_000, "{algorithm}");
            let retry = state.decide(&params, check(1, start - back + after.known_wait()));
            assert!(retry.admitted, "{algorithm} still denies after a step of {back} us");
        }
    }
}

#[test]
fn a_state_that_is_over_when_it_is_refunded_stays_over_if_the_clock_steps_back() {
    let server = RedisServer::start();
    let quota = Quota::new(1, std::time::Duration::from_micros(1_727));
    for (algorithm, quota) in super::contract::all_with(quota) {
        let mut scripted = Scripted::new(&server, "{key}");
        scripted.forget();
        let params = Params::new(algorithm, quota).unwrap();
        let mut twin = State::default();
        let reset = twin.clone().decide(&params, check(1, START)).reset;
        let steps = [(Action::Check, 0), (Action::Refund, reset), (Action::Check, reset - 3)];
        for (action, at) in steps {
            let request = EngineRequest { action, ..check(1, START + at) };
            both(&mut scripted, &mut twin, &params, request);
        }
    }
}

#[test]
fn a_peek_changes_nothing_even_if_the_state_is_over() {
    for (algorithm, quota) in super::contract::all_with(Quota::per_second(10)) {
        let params = Params::new(algorithm, quota).unwrap();
        let mut state = State::default();
        let reset = state.decide(&params, check(1, START)).reset;
        let before = state.clone();
        let peek = EngineRequest { action: Action::Peek, ..check(1, START + reset) };
        assert_eq!(state.decide(&params, peek).reset, 0, "{algorithm}");
        assert_eq!(state, before, "{algorithm}");
    }
}
