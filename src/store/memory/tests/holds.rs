//! What is held of a limit on concurrency: the memory store, where it lies in a core, and a state
//! decide the same. Other states in memory are in `agreement.rs`.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use proptest::{prelude::*, sample::Index, test_runner::TestRunner};
use tokio::{runtime, time::advance};

use super::requests::{now_or_never, reply_of, settings};
use crate::{
    algorithm::{
        Action, Algorithm, EngineReply, EngineRequest, HoldAction, HoldChange, HoldReceipt,
        HoldReply, Lifetime, Params, State, units as count,
    },
    decision::Receipt,
    keys::Key,
    observe::{Event, Observer, Observers},
    quota::Quota,
    store::{EndedHold, LimitRequest, MemoryStore, Reporting, Settings, StoreCalls, StoreRequest},
};

#[derive(Clone, Debug)]
enum Step {
    Hold {
        units: u64,
    },
    End {
        which: Index,
        used: u64,
    },
    Reset,
    Block {
        micros: u64,
    },
    Unblock,
    /// Applies the other quota from now on.
    Switch,
    Advance {
        micros: u64,
    },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        8 => (0_u64..7).prop_map(|units| Step::Hold { units }),
        6 => (any::<Index>(), 0_u64..9).prop_map(|(which, used)| Step::End { which, used }),
        1 => Just(Step::Reset),
        1 => (0_u64..5_000).prop_map(|micros| Step::Block { micros }),
        1 => Just(Step::Unblock),
        1 => Just(Step::Switch),
        3 => (1_u64..3_000).prop_map(|micros| Step::Advance { micros }),
    ];
    prop::collection::vec(step, 1..120)
}

/// Counts the holds that were lost.
#[derive(Default)]
struct Lost(AtomicU64);

impl Observer for Lost {
    fn on_event(&self, event: &Event<'_>) {
        if matches!(event, Event::HoldLost { .. }) {
            self.0.fetch_add(1, Relaxed);
        }
    }
}

/// A hold, by the receipts of the store and of the twin.
struct Open {
    store: HoldReceipt,
    twin: HoldReceipt,
    units: u64,
}

struct Both {
    store: MemoryStore,
    twin: State,
    now: i64,
    epochs: u64,
    open: Vec<Open>,
    lost: Arc<Lost>,
    observers: Observers,
}

impl Both {
    fn new() -> Self {
        let (lost, mut observers) = (Arc::<Lost>::default(), Observers::default());
        observers.add(lost.clone());
        Self {
            store: MemoryStore::new(),
            twin: State::default(),
            now: 0,
            epochs: 0,
            open: vec![],
            lost,
            observers,
        }
    }

    fn step(&mut self, settings: &Arc<Settings>, step: &Step) {
        match *step {
            Step::Hold { units } => self.hold(settings, units),
            Step::End { which, used } => self.end(settings, which, used),
            Step::Reset => {
                self.twin = State::default();
                drop(self.store.reset(settings, &Key::from("key")));
            }
            Step::Block { micros } => self.act(settings, Action::Block { duration: micros as i64 }),
            Step::Unblock => self.act(settings, Action::Unblock),
            Step::Switch => {}
            Step::Advance { micros } => {
                now_or_never(advance(Duration::from_micros(micros)));
                self.now += micros as i64;
            }
        }
        self.act(settings, Action::Peek);
    }

    fn request(&self, action: Action, cost: u64) -> EngineRequest {
        EngineRequest { action, cost: count(cost), ..EngineRequest::observe(self.now) }
    }

    fn hold(&mut self, settings: &Arc<Settings>, units: u64) {
        if units == 0 || count(units) > settings.params.max_cost() {
            return; // the limiter returns an error
        }
        self.epochs += 1;
        let action = Action::Hold { lifetime: Lifetime::ENDLESS, epoch: Some(self.epochs as i64) };
        let request = self.request(action, units);
        let twin = settings.params.step(&mut self.twin, &request);
        let held = self.decide(settings, Action::Check, units, twin);
        assert_eq!(held.is_some(), twin.admitted);
        if let (Some(store), Some(twin)) = (held, twin.hold) {
            self.open.push(Open { store, twin, units });
        }
    }

    fn end(&mut self, settings: &Arc<Settings>, which: Index, used: u64) {
        if self.open.is_empty() {
            return;
        }
        let index = which.index(self.open.len());
        let Open { store: receipt, twin, units } = self.open.swap_remove(index);
        let change = HoldChange {
            receipt: twin,
            units: count(units),
            action: HoldAction::End { used: count(used) },
        };
        let mut replies = vec![];
        settings.params.change_holds(&mut self.twin, self.now, 0, &[change], |reply| {
            replies.push(reply);
        });
        let algorithm = settings.params.kind();
        let (key, observers) = (&Key::from("key"), &self.observers);
        let before = self.lost.0.load(Relaxed);
        self.store.end_hold(&EndedHold {
            settings,
            algorithm,
            observers,
            key,
            receipt,
            units,
            used,
        });
        let is_lost = self.lost.0.load(Relaxed) > before;
        assert_eq!(is_lost, replies[0] == HoldReply::Lost);
    }

    fn act(&mut self, settings: &Arc<Settings>, action: Action) {
        let request = self.request(action, 1);
        let twin = settings.params.step(&mut self.twin, &request);
        self.decide(settings, action, 1, twin);
    }

    /// Decides in the store. Returns the receipt of a hold.
    fn decide(
        &self,
        settings: &Arc<Settings>,
        action: Action,
        cost: u64,
        twin: EngineReply,
    ) -> Option<HoldReceipt> {
        let hold = (action == Action::Check).then_some(Duration::from_secs(60));
        let (key, observers) = (&Key::from("key"), &self.observers);
        let limits = &[LimitRequest { settings, observers, key, cost, max_wait: 0, hold }];
        let request = StoreRequest::new(action, limits, Reporting::Nothing);
        let outcome = self.store.decide_now(&request).unwrap();
        let receipt = match outcome.receipts.get(0) {
            Receipt::Hold(receipt, _) => Some(receipt),
            _ => None,
        };
        if receipt.is_none() {
            assert_eq!(outcome.decision.held() as i64, twin.held);
        }
        let wait = Some(twin.wait.unwrap_or(0));
        let expected = EngineReply { wait, instant: 0, held: 0, ..without_hold(twin) };
        assert_eq!(reply_of(outcome), expected);
        receipt
    }
}

fn without_hold(reply: EngineReply) -> EngineReply {
    EngineReply { hold: None, ..reply }
}

#[test]
fn the_memory_store_and_the_twin_agree_about_concurrency() {
    let runtime = runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    let runtime = runtime.unwrap();
    let _context = runtime.enter();
    let of = |limit| Params::new(Algorithm::concurrency(), Quota::concurrent(limit)).unwrap();
    let config = ProptestConfig { cases: 2_000, failure_persistence: None, ..Default::default() };
    TestRunner::new(config)
        .run(&([1_u64..9, 1_u64..9], steps()), |(limits, steps)| {
            let [mut settings, mut other] = limits.map(|limit| settings(of(limit)));
            let mut both = Both::new();
            for step in &steps {
                if let Step::Switch = step {
                    (settings, other) = (other, settings);
                }
                both.step(&settings, step);
            }
            Ok(())
        })
        .unwrap_or_else(|failure| panic!("{failure}"));
}
