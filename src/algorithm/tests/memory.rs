//! The memory store and the twin decide the same, although only the store packs most states into
//! two numbers, by tokio's clock and by the counter of the processor.

use std::{sync::Arc, time::Duration};

use proptest::{prelude::*, test_runner::TestRunner};
use tokio::{runtime, time::advance};

use super::{
    super::{Action, Algorithm, EngineReply, EngineRequest, Params, State},
    agreement::{Step, large, lasting, params, steps},
    backends::{Backend, check, reply_of},
    contract::{all_with, now_or_never},
};
use crate::{
    decision::{Outcome, Source},
    keys::Key,
    quota::Quota,
    store::{LimitRequest, MemoryStore, Settings, StoreRequest},
};

#[test]
fn the_memory_store_and_the_twin_agree() {
    let runtime = runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    let runtime = runtime.unwrap();
    let _context = runtime.enter();
    let config = ProptestConfig { cases: 2000, failure_persistence: None, ..Default::default() };
    TestRunner::new(config)
        .run(&(prop_oneof![params(), plain()], steps()), |(params, steps)| {
            TestClock::both().iter().for_each(|clock| history(clock, params, &steps));
            Ok(())
        })
        .unwrap_or_else(|failure| panic!("{failure}"));
}

/// A request of a history with many keys.
#[derive(Clone, Debug)]
struct Visit {
    key: usize,
    /// The keys that are used before it, each for the first time.
    new_keys: usize,
    /// The time since the last visit, in 1/1000 of a window.
    ahead: u32,
    action: Action,
    cost: u32,
    /// The longest wait, or the duration of a block, in 1/1000 of a window.
    max_wait: u32,
}

/// Histories with short blocks, which end before the units are restored.
fn visits() -> impl Strategy<Value = Vec<Visit>> {
    let action = prop_oneof![
        10 => Just(Action::Check),
        4 => Just(Action::Block { duration: 0 }),
        1 => Just(Action::Unblock),
        1 => Just(Action::Spend),
        1 => Just(Action::Refund),
    ];
    let max_wait = prop_oneof![1 => Just(0), 2 => 0_u32..300];
    let ahead = prop_oneof![1 => Just(0), 4 => 0_u32..300];
    let visit = (0_usize..6, 0_usize..8, ahead, action, 1_u32..4, max_wait);
    let visit = visit.prop_map(|(key, new_keys, ahead, action, cost, max_wait)| Visit {
        key,
        new_keys,
        ahead,
        action,
        cost,
        max_wait,
    });
    prop::collection::vec(visit, 1..80)
}

#[test]
fn a_store_with_many_keys_decides_as_one_with_one_key_does() {
    let runtime = runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    let runtime = runtime.unwrap();
    let _context = runtime.enter();
    let config = ProptestConfig { cases: 500, failure_persistence: None, ..Default::default() };
    TestRunner::new(config)
        .run(
            &(0..all_with(Quota::per_second(1)).len(), 3_u64..6, 1_u64..100, visits()),
            |(which, limit, seconds, visits)| {
                let window = Duration::from_secs(seconds);
                let (algorithm, quota) = all_with(Quota::new(limit, window)).swap_remove(which);
                let settings = settings(Params::new(algorithm, quota).unwrap());
                let clock = &TestClock::both()[visits.len() % 2];
                let shared = clock.store();
                let singles: Vec<_> = (0..6).map(|_| clock.store()).collect();
                let mut used = 0;
                for visit in visits {
                    clock.advance(window * visit.ahead / 1_000);
                    for _ in 0..visit.new_keys {
                        used += 1;
                        let _ = decide(&shared, &settings, &format!("new {used}"), check(1, 0.0));
                    }
                    let max_wait = (window * visit.max_wait / 1_000).as_micros() as f64;
                    let (action, cost) = (lasting(visit.action, max_wait), visit.cost);
                    let request = EngineRequest { action, max_wait, ..check(cost, 0.0) };
                    let single = decide(&singles[visit.key], &settings, "key", request);
                    let reply = decide(&shared, &settings, &format!("key {}", visit.key), request);
                    prop_assert_eq!(reply, single, "{} {} {:?}", algorithm, quota, visit);
                }
                Ok(())
            },
        )
        .unwrap_or_else(|failure| panic!("{failure}"));
}

/// Buckets that take the fast path.
fn plain() -> impl Strategy<Value = [Params; 2]> {
    let params = |(limit, millis, burst): (u64, u64, u64)| {
        let quota = Quota::nearest(limit, Duration::from_millis(millis));
        let quota = quota.try_burst(burst).unwrap_or(quota);
        Params::new(Algorithm::token_bucket(), quota).unwrap()
    };
    let limit = prop_oneof![1_u64..20, 1_u64..1_000_000, large()];
    let millis = prop_oneof![1_u64..5_000, 1_u64..=366 * 86_400_000];
    // Up to the largest possible bursts.
    let burst = prop_oneof![2 => 1_u64..20, 1 => 1_u64..300_000, 1 => large()];
    let params = (limit, millis, burst).prop_map(params);
    [params.clone(), params]
}

/// A clock of the store that a test controls.
pub(super) enum TestClock {
    Tokio,
    /// The counter of the processor.
    Counter(quanta::Clock, Arc<quanta::Mock>),
}

impl TestClock {
    pub(super) fn both() -> [Self; 2] {
        let (clock, mock) = quanta::Clock::mock();
        [Self::Tokio, Self::Counter(clock, mock)]
    }

    pub(super) fn store(&self) -> MemoryStore {
        match self {
            Self::Tokio => MemoryStore::new(),
            Self::Counter(clock, _) => MemoryStore::with_counter(clock.clone()),
        }
    }

    /// Advances the clock. The time of tokio, by which requests wait, goes on with the counter.
    pub(super) fn advance(&self, duration: Duration) {
        if let Self::Counter(_, mock) = self {
            mock.increment(2 * duration.as_micros() as u64);
        }
        now_or_never(advance(duration));
    }
}

fn history(clock: &TestClock, params: [Params; 2], steps: &[Step]) {
    let mut both = Both { store: clock.store(), twin: State::Initial };
    let (mut settings, mut other) = (settings(params[0]), settings(params[1]));
    let mut now = 0.0; // the clock of the store
    let mut admitted = vec![];
    for step in steps {
        if step.switch {
            (settings, other) = (other, settings);
        }
        let params = &settings.params;
        let ahead = step.ahead(params, false);
        clock.advance(Duration::from_micros(ahead as u64));
        now += ahead;

        let releases = step.releases(&mut admitted);
        if !releases.is_empty() {
            both.twin.release(params, now, &releases);
            both.store.return_units(&settings, &Key::from("key"), &releases);
            continue;
        }
        let request = step.decide(params, now);
        let reply = both.decide(&settings, request);
        if request.action == Action::Check && reply.admitted {
            admitted.push((reply.instant, request.cost));
        }
    }
}

/// The store, and the twin that it has to agree with.
struct Both {
    store: MemoryStore,
    twin: State,
}

impl Both {
    fn decide(&mut self, settings: &Arc<Settings>, request: EngineRequest) -> EngineReply {
        let reply = self.twin.decide(&settings.params, request);
        let spent = reply.admitted && request.action.commits();
        let expected = EngineReply { instant: if spent { reply.instant } else { 0.0 }, ..reply };
        let decided = decide(&self.store, settings, "key", request);
        assert_eq!(decided, expected, "{settings:?} {request:?} {:?}", self.twin);
        reply
    }
}

pub(super) fn decide(
    store: &MemoryStore,
    settings: &Arc<Settings>,
    key: &str,
    request: EngineRequest,
) -> EngineReply {
    let (key, cost) = (&Key::from(key), request.cost as u64);
    if request.action == Action::Check
        && let Some(fast) = &settings.fast
        && let Some(step) =
            store.check_fast(settings, fast, key.as_bytes(), cost, request.max_wait > 0.0)
    {
        return reply_of(Outcome::of_fast(settings.policy(cost), &step, fast.report(&step)));
    }
    let limits = &[LimitRequest {
        settings,
        observers: &Default::default(),
        key,
        cost,
        max_wait: request.max_wait,
        hold: None,
    }];
    reply_of(store.decide_now(&StoreRequest { action: request.action, limits }).unwrap())
}

#[tokio::test(start_paused = true)]
async fn the_memory_store_and_the_twin_agree_about_the_largest_debts() {
    let spend = |cost: u32| EngineRequest { action: Action::Spend, ..check(cost, 0.0) };
    let largest = Quota::per_day(7).burst(255_675); // refills in 100 years
    let fast = Quota::per_second(17).burst(35);
    for (quota, requests) in [
        (largest, vec![check(1_u32, 0.0), check(255_674_u32, 0.0), check(1_u32, 0.0)]),
        (fast, vec![spend(u32::MAX), spend(u32::MAX), check(3_u32, 0.0)]),
        (fast, vec![spend(100), check(3_u32, 0.0)]),
    ] {
        let settings = settings(Params::new(Algorithm::token_bucket(), quota).unwrap());
        let mut both = Both { store: MemoryStore::new(), twin: State::Initial };
        for request in requests {
            both.decide(&settings, request);
        }
    }
}

pub(super) fn settings(params: Params) -> Arc<Settings> {
    let (algorithm, quota) = (Algorithm::token_bucket(), Quota::per_second(1));
    Arc::new(Settings::new("default", algorithm, quota, params, Source::Store))
}
