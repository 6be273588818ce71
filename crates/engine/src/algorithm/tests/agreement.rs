//! The script and the twin give the same replies and leave the same state, to the bit. Each reply
//! is checked against the laws on the way.

use std::cell::RefCell;

use proptest::{prelude::*, test_runner::TestRunner};

use super::{
    super::{
        Action, Algorithm, EngineReply, EngineRequest, Params, Refill, Release, State,
        arithmetic::ceil_div,
    },
    backends::{Backend, RedisServer, START, Scripted, check, settled},
    generators::{Step, all_with, config, goes_back, large, params, params_with, steps, window},
};
use crate::quota::{Quota, nearest};

/// An algorithm, a quota of a few units, and a large one.
fn small_and_large() -> impl Strategy<Value = [Params; 2]> {
    params_with(|bucket| {
        (1_u64..20, large(), window(), any::<bool>(), any::<bool>()).prop_map(
            move |(small, large, window, is_large, has_burst)| {
                let limit = if is_large { large } else { small };
                let quota = nearest(limit, std::time::Duration::from_micros(window));
                let burst = if has_burst && bucket { large } else { quota.limit() };
                quota.try_burst(burst).unwrap_or(quota)
            },
        )
    })
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
    for (algorithm, quota) in all_with(Quota::per_second(10)) {
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

/// A bucket that refills by intervals does not notice a small step of the clock.
#[test]
fn a_clock_that_steps_back_finds_the_same_reservations() {
    let server = RedisServer::start();
    let mut scripted = Scripted::new(&server, "{key}");
    let algorithm = Algorithm::TokenBucket { refill: Refill::Interval, overdraft: 0 };
    let params = Params::new(algorithm, Quota::per_second(4)).unwrap();
    let mut twin = State::default();
    let block = Action::Block { duration: 100_000 };
    let steps = [(block, 1, 0), (Action::Check, 1, 0), (Action::Check, 4, 0)];
    let mut first = None;
    for (action, cost, at) in steps.into_iter().chain([(Action::Check, 1, 200_000)]) {
        let request = EngineRequest { action, max_wait: 2_000_000, ..check(cost, START + at) };
        let reply = both(&mut scripted, &mut twin, &params, request);
        assert!(action.blocks() || reply.known_wait() > 0, "{reply:?}");
        first = first.or((!action.blocks()).then_some(reply.instant));
    }
    let now = START + 50_000;
    same_states(&mut scripted, &params, &twin, now, "after a step");
    let releases = [Release { instant: first, units: 1 }];
    twin.release(&params, now, &releases);
    scripted.release(&params, now, &releases);
    same_states(&mut scripted, &params, &twin, now, "after a release");
}

#[test]
fn a_state_that_is_over_when_it_is_refunded_stays_over_if_the_clock_steps_back() {
    let server = RedisServer::start();
    let quota = Quota::new(1, std::time::Duration::from_micros(1_727));
    for (algorithm, quota) in all_with(quota) {
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
    for (algorithm, quota) in all_with(Quota::per_second(10)) {
        let params = Params::new(algorithm, quota).unwrap();
        let mut state = State::default();
        let reset = state.decide(&params, check(1, START)).reset;
        let before = state.clone();
        let peek = EngineRequest { action: Action::Peek, ..check(1, START + reset) };
        assert_eq!(state.decide(&params, peek).reset, 0, "{algorithm}");
        assert_eq!(state, before, "{algorithm}");
    }
}
