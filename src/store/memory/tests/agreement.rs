//! The memory store and a state decide the same, although most states of the store lie in cores, by
//! tokio's clock and by the counter of the processor. So do the store and the script, although keys
//! expire in Redis and are swept in memory.

use std::{cell::RefCell, env, sync::Arc, time::Duration};

use proptest::{prelude::*, sample::Index, test_runner::TestRunner};
use tokio::{runtime, time::advance};
use tower_ratelimit_engine::algorithm::testing::{
    backends::{Backend, Holds, RedisServer, START, Scripted, check},
    changes::{FORMS, quotas},
    generators::{Step, all_with, large, lasting, params, step, steps},
};

use super::requests::{TestClock, decide, now_or_never, settings};
use crate::{
    algorithm::{
        Action, Algorithm, EngineReply, EngineRequest, HoldAction, HoldChange, HoldReceipt,
        Lifetime, Params, Release, State,
    },
    decision::Receipt,
    keys::Key,
    quota::{self, Quota},
    store::{
        EndedHold, LimitRequest, MemoryStore, Reporting, Settings, StoreCalls, StoreRequest,
        WhenFull,
    },
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
                        let _ = decide(&shared, &settings, &format!("new {used}"), check(1, 0));
                    }
                    let max_wait = (window * visit.max_wait / 1_000).as_micros() as i64;
                    let (action, cost) = (lasting(visit.action, max_wait), visit.cost);
                    let request = EngineRequest { action, max_wait, ..check(cost, 0) };
                    let single = decide(&singles[visit.key], &settings, "key", request);
                    let reply = decide(&shared, &settings, &format!("key {}", visit.key), request);
                    prop_assert_eq!(reply, single, "{} {} {:?}", algorithm, quota, visit);
                }
                Ok(())
            },
        )
        .unwrap_or_else(|failure| panic!("{failure}"));
}

/// Buckets whose states lie in cores.
fn plain() -> impl Strategy<Value = [Params; 2]> {
    let params = |(limit, millis, burst): (u64, u64, u64)| {
        let quota = quota::nearest(limit, Duration::from_millis(millis));
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

fn history(clock: &TestClock, params: [Params; 2], steps: &[Step]) {
    let mut both = Both { store: clock.store(), twin: State::default() };
    let (mut settings, mut other) = (settings(params[0]), settings(params[1]));
    let mut now = 0; // the clock of the store
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
        let expected = EngineReply { instant: if spent { reply.instant } else { 0 }, ..reply };
        let decided = decide(&self.store, settings, "key", request);
        assert_eq!(decided, expected, "{settings:?} {request:?} {:?}", self.twin);
        reply
    }
}

#[tokio::test(start_paused = true)]
async fn the_memory_store_and_the_twin_agree_about_the_largest_debts() {
    let spend = |cost: u32| EngineRequest { action: Action::Spend, ..check(cost, 0) };
    let largest = Quota::per_day(7).burst(255_675); // refills in 100 years
    let other = Quota::per_second(17).burst(35);
    for (quota, requests) in [
        (largest, vec![check(1_u32, 0), check(255_674_u32, 0), check(1_u32, 0)]),
        (other, vec![spend(u32::MAX), spend(u32::MAX), check(3_u32, 0)]),
        (other, vec![spend(100), check(3_u32, 0)]),
    ] {
        let settings = settings(Params::new(Algorithm::token_bucket(), quota).unwrap());
        let mut both = Both { store: MemoryStore::new(), twin: State::default() };
        for request in requests {
            both.decide(&settings, request);
        }
    }
}

/// What happens to a key that two limiters count, each by a quota of its own.
#[derive(Clone, Debug)]
enum Event {
    Step(Step),
    /// Holds this part of the quota, in 1/1000.
    Hold(u32),
    /// Ends one of the holds, with quarters of its units used.
    End(Index, u32),
    /// The limiter gets another quota.
    SetQuota(Index),
    Reset,
    /// This many requests with new keys, which sweep the store.
    NewKeys(u32),
}

fn events() -> impl Strategy<Value = Vec<(usize, Event)>> {
    let event = prop_oneof![
        12 => step().prop_map(Event::Step),
        4 => (1_u32..900).prop_map(Event::Hold),
        4 => (any::<Index>(), 0_u32..7).prop_map(|(which, used)| Event::End(which, used)),
        2 => any::<Index>().prop_map(Event::SetQuota),
        1 => Just(Event::Reset),
        6 => (1_u32..16).prop_map(Event::NewKeys),
    ];
    prop::collection::vec((0_usize..2, event), 1..60)
}

/// A key in memory and in Redis, and the limiters that count it.
struct Shared<'a> {
    store: MemoryStore,
    when_full: Option<WhenFull>,
    scripted: &'a mut Scripted,
    now: i64,
    /// The settings of all quotas, and the indices of the quotas that the limiters have.
    settings: Vec<Arc<Settings>>,
    limiters: [usize; 2],
    new_keys: u32,
    admitted: Vec<(i64, i64)>,
    open: Vec<(HoldReceipt, HoldReceipt, u64)>,
}

impl Shared<'_> {
    fn run(&mut self, limiter: usize, event: &Event) -> Result<(), TestCaseError> {
        let settings = self.settings[self.limiters[limiter]].clone();
        match event {
            Event::Step(step) => self.step(&settings, step)?,
            Event::Hold(part) => self.hold(&settings, *part)?,
            Event::End(which, quarters) => self.end(&settings, which, *quarters),
            Event::SetQuota(which) => self.limiters[limiter] = which.index(self.settings.len()),
            Event::Reset => {
                // A hold of the same instant would have the same epoch in Redis.
                self.pass(1);
                self.forget();
            }
            Event::NewKeys(keys) => self.insert(*keys)?,
        }
        for [stored, scripted] in self.peeks() {
            prop_assert_eq!(stored, scripted, "a peek after {:?}", event);
        }
        Ok(())
    }

    fn pass(&mut self, time: i64) {
        now_or_never(advance(Duration::from_micros(time as u64)));
        self.now += time;
    }

    fn forget(&mut self) {
        self.scripted.forget();
        drop(self.store.reset(&self.settings[0], &Key::from("key")));
        self.admitted.clear();
    }

    /// Decides in memory and in Redis. Returns both replies, as far as they have to be the same.
    fn decide(&mut self, settings: &Arc<Settings>, request: EngineRequest) -> [EngineReply; 2] {
        let scripted = self.scripted.decide(&settings.params, request);
        let mut stored = decide(&self.store, settings, "key", request);
        let is_spent = scripted.admitted && request.action.commits();
        let mut expected = EngineReply {
            wait: Some(scripted.wait.unwrap_or(0)),
            instant: if is_spent { scripted.instant - START } else { 0 },
            held: 0,
            ..scripted
        };
        // In Redis, it includes the lifetime of the holds.
        if scripted.held > 0 {
            (stored.reset, expected.reset) = (0, 0);
        }
        [stored, expected]
    }

    /// What the limiters see in memory and in Redis.
    fn peeks(&mut self) -> [[EngineReply; 2]; 2] {
        let peek = EngineRequest { action: Action::Peek, ..check(1, self.now) };
        self.limiters.map(|index| self.decide(&self.settings[index].clone(), peek))
    }

    fn step(&mut self, settings: &Arc<Settings>, step: &Step) -> Result<(), TestCaseError> {
        self.pass(step.ahead(&settings.params, false));
        let releases = step.releases(&mut self.admitted);
        if !releases.is_empty() {
            self.scripted.release(&settings.params, self.now, &releases);
            let in_memory =
                |of: &Release| Release { instant: of.instant.map(|at| at - START), ..*of };
            let releases: Vec<_> = releases.iter().map(in_memory).collect();
            self.store.return_units(settings, &Key::from("key"), &releases);
            return Ok(());
        }
        let request = step.decide(&settings.params, self.now);
        let [stored, scripted] = self.decide(settings, request);
        prop_assert_eq!(stored, scripted, "{:?}", request);
        if request.action == Action::Check && scripted.admitted {
            self.admitted.push((scripted.instant + START, request.cost));
        }
        Ok(())
    }

    fn hold(&mut self, settings: &Arc<Settings>, part: u32) -> Result<(), TestCaseError> {
        let params = &settings.params;
        if !params.can_hold() {
            return Ok(());
        }
        let cost = (params.max_cost() * i64::from(part) + 999) / 1_000;
        let action = Action::Hold { lifetime: Lifetime::new(LIFETIME), epoch: None };
        let request = EngineRequest { action, ..check(cost, self.now) };
        let scripted = self.scripted.decide(params, request);
        let limits = &[LimitRequest {
            settings,
            observers: &Default::default(),
            key: &Key::from("key"),
            cost: cost as u64,
            max_wait: 0,
            hold: Some(Duration::from_micros(LIFETIME)),
        }];
        let request = StoreRequest::new(Action::Check, limits, Reporting::Nothing);
        let outcome = self.store.decide_now(&request).unwrap();
        let stored = match outcome.receipts.get(0) {
            Receipt::Hold(receipt, _) => Some(receipt),
            _ => None,
        };
        prop_assert_eq!(outcome.decision.is_allowed(), scripted.admitted, "hold {}", cost);
        prop_assert_eq!(outcome.decision.remaining() as i64, scripted.remaining, "hold {}", cost);
        if let (Some(stored), Some(scripted)) = (stored, scripted.hold) {
            self.open.push((stored, scripted, cost as u64));
        }
        Ok(())
    }

    fn end(&mut self, settings: &Arc<Settings>, which: &Index, quarters: u32) {
        if self.open.is_empty() {
            return;
        }
        let (stored, scripted, units) = self.open.swap_remove(which.index(self.open.len()));
        let used = units * u64::from(quarters) / 4;
        self.store.end_hold(&EndedHold {
            settings,
            algorithm: settings.params.kind(),
            observers: &Default::default(),
            key: &Key::from("key"),
            receipt: stored,
            units,
            used,
        });
        let action = HoldAction::End { used: used as i64 };
        let change = HoldChange { receipt: scripted, units: units as i64, action };
        self.scripted.change_holds(&settings.params, self.now, &[change]);
    }

    /// Inserts other keys. A full store may evict the key, unless that would let more through.
    fn insert(&mut self, keys: u32) -> Result<(), TestCaseError> {
        // One is left, so that no key is in use, and a full store has room.
        let others = settings(Params::new(Algorithm::FixedWindow, Quota::per_second(2)).unwrap());
        for _ in 0..keys {
            self.new_keys += 1;
            let key = format!("key {}", self.new_keys);
            let limits = &[LimitRequest {
                settings: &others,
                observers: &Default::default(),
                key: &Key::from(&*key),
                cost: 1,
                max_wait: 0,
                hold: None,
            }];
            let request = StoreRequest::new(Action::Check, limits, Reporting::Nothing);
            let _ = self.store.decide_now(&request);
        }
        // By all quotas: the one that has counted the key may be none that a limiter has now.
        let peek = EngineRequest { action: Action::Peek, ..check(1, self.now) };
        let mut peeks = vec![];
        for settings in self.settings.clone() {
            peeks.push(self.decide(&settings, peek));
        }
        if self.when_full.is_some() && peeks.iter().any(|[stored, scripted]| stored != scripted) {
            let is_used_up = peeks.iter().all(|[_, scripted]| scripted.remaining == 0);
            let is_kept = is_used_up && self.when_full == Some(WhenFull::RejectNewKeys);
            let observe = EngineRequest::observe(self.now);
            let held = self.scripted.decide(&self.settings[0].params, observe).held;
            prop_assert!(!is_kept && held == 0, "evicted: {:?}", peeks);
            self.forget();
        }
        Ok(())
    }
}

/// In microseconds: no hold expires, as none does in memory.
const LIFETIME: u64 = 100_000_000_000_000;

/// Left out: `reset_after` of a key with holds, and debts near the largest one that is counted.
#[test]
fn the_memory_store_and_the_script_decide_the_same_under_quotas_that_alternate() {
    let server = RedisServer::start();
    let scripted = RefCell::new(Scripted::new(&server, "{key}"));
    let runtime = runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    let runtime = runtime.unwrap();
    let _context = runtime.enter();
    let histories = env::var("HISTORIES").map_or(3_000, |number| number.parse().unwrap());
    let cases = histories / 10; // each takes a tenth of a second
    let config = ProptestConfig { cases, failure_persistence: None, ..Default::default() };
    let when_full = prop_oneof![
        2 => Just(None),
        1 => Just(Some(WhenFull::RejectNewKeys)),
        1 => Just(Some(WhenFull::EvictSoonest)),
    ];
    let form = prop::sample::select(FORMS.to_vec());
    TestRunner::new(config)
        .run(&(form, quotas(), when_full, events()), |(form, quotas, full, events)| {
            let mut scripted = scripted.borrow_mut();
            scripted.forget();
            let store = MemoryStore::with_max_keys(if full.is_some() { 8 } else { 1_000 });
            store.set_when_full(full.unwrap_or_default());
            let mut shared = Shared {
                store,
                when_full: full,
                scripted: &mut scripted,
                now: START,
                settings: quotas.iter().map(|limits| settings(limits.params(form))).collect(),
                limiters: [0, 1 % quotas.len()],
                new_keys: 0,
                admitted: vec![],
                open: vec![],
            };
            for (limiter, event) in &events {
                shared.run(*limiter, event)?;
            }
            Ok(())
        })
        .unwrap_or_else(|failure| panic!("{failure}"));
}
