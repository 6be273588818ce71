//! Random histories with holds never exceed the promise of the algorithm. The oracle uses the units
//! of each hold at instants between its begin and its end, and does not know any state. The laws of
//! single decisions are in `hold_laws.rs`.

use std::{cell::RefCell, collections::VecDeque, env, time::Duration};

use proptest::{
    prelude::*,
    sample::Index,
    test_runner::{RngAlgorithm, TestRng, TestRunner},
};

use super::{
    super::{
        Action, Algorithm, EngineReply, EngineRequest, HoldAction, HoldChange, HoldReceipt,
        HoldReply, Lifetime, Params, Refill, State, arithmetic::ceil_div, table::Spent,
    },
    backends::{Backend, Holds, RedisServer, START, Scripted, check},
    hold_laws,
};
use crate::quota::Quota;

/// A key whose state can be lost.
pub(super) trait Key: Holds {
    fn lose(&mut self);

    /// The state, if a copy of it costs little.
    fn copy(&self) -> Option<State>;

    fn state(&mut self, params: &Params) -> State;
}

impl Key for State {
    fn lose(&mut self) {
        *self = Self::default();
    }

    fn copy(&self) -> Option<State> {
        Some(self.clone())
    }

    fn state(&mut self, _: &Params) -> State {
        self.clone()
    }
}

impl Key for Scripted {
    fn lose(&mut self) {
        self.forget();
    }

    fn copy(&self) -> Option<State> {
        None
    }

    fn state(&mut self, params: &Params) -> State {
        Self::state(self, params)
    }
}

#[derive(Clone, Debug)]
pub(super) enum Step {
    /// A cost, and the longest wait in 1/1000 of a window.
    Check(u32, u32),
    Spend(u32),
    Grant(u32),
    /// The units, which of four lifetimes, the parts of the time of the hold after which its units
    /// are used, and whether its reply is lost.
    Hold(u32, usize, [u16; 3], bool),
    /// A hold, and how much of it was used, in quarters: more than four exceed it.
    End(Index, u32),
    /// A hold that ends, and whose end comes again: a grant of its units.
    EndTwice(Index),
    /// A hold, its new lifetime, and whether the reply is lost.
    Renew(Index, usize, bool),
    /// The state is lost.
    Lose,
    /// Time passes: in 1/1000 of a window, and microseconds.
    Pass(u32, u32),
    /// Time passes, in 1/1000 of a lifetime.
    PassLifetime(usize, u32),
    /// The clock steps back, in 1/1000 of a window.
    Back(u32),
    /// From now on, the other quota applies.
    Change,
    /// The duration, in 1/1000 of a window.
    Block(u32),
    Unblock,
}

/// What a history may contain: what is left out makes the oracle stricter.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scope {
    pub(super) waits: bool,
    pub(super) grants: bool,
    pub(super) losses: bool,
    pub(super) steps_back: bool,
    pub(super) changes: bool,
    pub(super) blocks: bool,
    /// The holds of another epoch find the units of the current one.
    pub(super) ignores_epochs: bool,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Setup {
    pub(super) algorithm: Algorithm,
    pub(super) quotas: [Quota; 2],
    pub(super) lifetimes: [u64; 4],
    pub(super) scope: Scope,
}

impl Setup {
    pub(super) fn params(&self, which: usize) -> Params {
        Params::new(self.algorithm, self.quotas[which]).unwrap()
    }

    pub(super) fn overdraft(&self) -> i64 {
        match self.algorithm {
            Algorithm::TokenBucket { overdraft, .. } => overdraft as i64,
            _ => 0,
        }
    }
}

pub(super) fn steps() -> impl Strategy<Value = Vec<Step>> {
    let wait = prop_oneof![2 => Just(0), 3 => 0_u32..3_000];
    let pass = prop_oneof![4 => 0_u32..100, 1 => 100_u32..1_500];
    let part = || prop_oneof![2 => Just(0_u16), 2 => Just(u16::MAX), 3 => any::<u16>()];
    let parts = (part(), part(), part()).prop_map(|(one, two, three)| [one, two, three]);
    let lost = || prop::bool::weighted(0.1);
    let step = prop_oneof![
        6 => (1_u32..8, wait).prop_map(|(cost, wait)| Step::Check(cost, wait)),
        12 => (1_u32..12, 0_usize..4, parts, lost())
            .prop_map(|(units, life, parts, lost)| Step::Hold(units, life, parts, lost)),
        6 => (any::<Index>(), 0_u32..7).prop_map(|(which, used)| Step::End(which, used)),
        4 => (any::<Index>(), 0_usize..4, lost())
            .prop_map(|(which, life, lost)| Step::Renew(which, life, lost)),
        1 => (1_u32..5).prop_map(Step::Spend),
        1 => (1_u32..5).prop_map(Step::Grant),
        1 => any::<Index>().prop_map(Step::EndTwice),
        1 => Just(Step::Lose),
        6 => (pass, 0_u32..3).prop_map(|(part, us)| Step::Pass(part, us)),
        3 => (0_usize..4, 0_u32..1_400).prop_map(|(life, part)| Step::PassLifetime(life, part)),
        1 => (0_u32..3_000).prop_map(Step::Back),
        1 => Just(Step::Change),
        1 => (0_u32..1_500).prop_map(Step::Block),
        1 => Just(Step::Unblock),
    ];
    prop::collection::vec(step, 1..80)
}

pub(super) fn setups(algorithms: impl Strategy<Value = Algorithm>) -> impl Strategy<Value = Setup> {
    let window = || prop_oneof![Just(1_000_000), 1_000_u64..10_000_000];
    let quota = || (1_u64..20, window(), 1_u64..20);
    let life = || 10_u64..8_000;
    let some = || prop::bool::weighted(0.3);
    let scope = (any::<bool>(), some(), some(), some(), some(), some());
    (algorithms, quota(), quota(), 0_u32..6, (life(), life()), scope).prop_map(
        |(algorithm, one, other, alike, (first, second), scope)| {
            let (waits, grants, losses, steps_back, changes, blocks) = scope;
            let scope = Scope {
                waits: waits && !changes,
                grants,
                losses,
                steps_back,
                changes,
                blocks,
                ignores_epochs: false,
            };
            let other = match alike {
                0 => (other.0, one.1, one.2),
                1 => (one.0, other.1, one.2),
                2 => (one.0, one.1, other.2),
                _ => other,
            };
            let quota = |(limit, us, burst): (u64, u64, u64)| {
                let quota = Quota::new(limit, Duration::from_micros(us));
                let is_bucket = matches!(algorithm, Algorithm::TokenBucket { .. });
                if is_bucket { quota.burst(burst) } else { quota }
            };
            let lifetime = |part: u64| (one.1 * part / 1_000).max(1);
            let lifetimes = [first, second, first / 4, second / 4].map(lifetime);
            Setup { algorithm, quotas: [quota(one), quota(other)], lifetimes, scope }
        },
    )
}

/// Units that were used, or spent beyond what a hold contains.
#[derive(Clone, Copy, Debug)]
struct Use {
    at: i64,
    units: i64,
    /// The decision or the change that counts them.
    index: usize,
    /// The number of losses of the state before they were admitted.
    generation: usize,
    /// True if the caller did not ask.
    is_excess: bool,
}

#[derive(Clone, Copy, Debug)]
struct Admitted {
    at: i64,
    index: usize,
    generation: usize,
    /// The opening of its window, if windows are fixed.
    window: Option<i64>,
}

#[derive(Clone, Copy, Debug)]
struct Open {
    units: i64,
    begin: i64,
    /// The instant until which its holder may use the units.
    expires: i64,
    receipt: HoldReceipt,
    parts: [u16; 3],
    index: usize,
    generation: usize,
    /// True if its holder does not know of it.
    is_lost: bool,
}

/// A key while steps change it. All instants are by a clock that never steps back.
struct History<'a, B> {
    backend: &'a mut B,
    setup: Setup,
    current: usize,
    now: i64,
    /// How far the clock of the store has stepped back.
    back: i64,
    generation: usize,
    index: usize,
    uses: Vec<Use>,
    admitted: Vec<Admitted>,
    granted: i64,
    open: Vec<Open>,
    epoch: i64,
}

impl<B: Key> History<'_, B> {
    fn params(&self) -> Params {
        self.setup.params(self.current)
    }

    fn part_of_window(&self, thousandths: u32) -> i64 {
        self.setup.quotas[0].window_us() as i64 * i64::from(thousandths) / 1_000
    }

    fn clock(&self) -> i64 {
        self.now - self.back
    }

    fn cost(&self, units: u32) -> i64 {
        i64::from(units).min(self.setup.params(0).max_cost()).min(self.setup.params(1).max_cost())
    }

    fn step(&mut self, step: &Step) -> Result<(), TestCaseError> {
        let scope = self.setup.scope;
        self.index += 1;
        match *step {
            Step::Check(cost, wait) => self.check(cost, wait)?,
            Step::Hold(units, life, parts, is_lost) => self.hold(units, life, parts, is_lost)?,
            Step::Spend(units) => {
                let request = EngineRequest { action: Action::Spend, ..check(units, self.clock()) };
                let params = self.params();
                self.backend.decide(&params, request);
                self.excess(units.into());
            }
            Step::Grant(units) if scope.grants => {
                self.granted += i64::from(units);
                let request =
                    EngineRequest { action: Action::Refund, ..check(units, self.clock()) };
                let params = self.params();
                self.backend.decide(&params, request);
            }
            Step::End(which, quarters) if !self.open.is_empty() => {
                let hold = self.open.swap_remove(which.index(self.open.len()));
                let used = (hold.units * i64::from(quarters) + 2) / 4;
                self.end(hold, if hold.is_lost { 0 } else { used });
            }
            Step::EndTwice(which) if !self.open.is_empty() && scope.grants => {
                let hold = self.open.swap_remove(which.index(self.open.len()));
                self.end(hold, 0);
                self.granted += hold.units;
                self.end(hold, 0);
            }
            Step::Renew(which, life, is_lost) if !self.open.is_empty() => {
                let which = which.index(self.open.len());
                self.renew(which, life, is_lost);
            }
            Step::Lose if scope.losses => {
                self.backend.lose();
                self.generation += 1;
                self.now += 1; // separates the uses that are lost from the next ones
            }
            Step::Pass(thousandths, us) => {
                self.now += self.part_of_window(thousandths) + i64::from(us);
            }
            Step::PassLifetime(life, part) => {
                self.now += self.setup.lifetimes[life] as i64 * i64::from(part) / 1_000;
            }
            Step::Back(part) if scope.steps_back => {
                self.back += self.part_of_window(part);
            }
            Step::Change if scope.changes => {
                self.current ^= 1;
            }
            Step::Block(part) if scope.blocks => {
                self.block(Action::Block { duration: self.part_of_window(part) });
            }
            Step::Unblock if scope.blocks => self.block(Action::Unblock),
            _ => {}
        }
        Ok(())
    }

    fn block(&mut self, action: Action) {
        let (params, now) = (self.params(), self.clock());
        self.backend.decide(&params, EngineRequest { action, ..check(1, now) });
    }

    fn ask(&mut self, request: EngineRequest) -> Result<EngineReply, TestCaseError> {
        let params = self.params();
        let before = self.backend.copy();
        let reply = self.backend.decide(&params, request);
        if let (Some(before), Some(after)) = (before, self.backend.copy()) {
            if request.action == Action::Check {
                let peek = EngineRequest { action: Action::Peek, ..request };
                let peek = before.clone().decide(&params, peek);
                prop_assert_eq!((peek.admitted, peek.wait), (reply.admitted, reply.wait));
            }
            let quota = self.setup.quotas[self.current];
            hold_laws::keeps(&self.setup, quota, &request, &reply, [&before, &after])?;
        }
        Ok(reply)
    }

    fn check(&mut self, cost: u32, wait: u32) -> Result<(), TestCaseError> {
        let max_wait = if self.setup.scope.waits { self.part_of_window(wait) } else { 0 };
        let max_wait = max_wait.min(self.params().max_reservable());
        let request = EngineRequest { max_wait, ..check(self.cost(cost), self.clock()) };
        let reply = self.ask(request)?;
        if reply.admitted {
            let at = self.now + reply.known_wait();
            let Self { index, generation, .. } = *self;
            let units = request.cost;
            self.uses.push(Use { at, units, index, generation, is_excess: false });
            let window = self.window_of(at);
            self.admitted.push(Admitted { at, index, generation, window });
        }
        Ok(())
    }

    /// The opening of the fixed window of this instant, if it is known, and one is open.
    fn window_of(&mut self, at: i64) -> Option<i64> {
        if self.setup.algorithm != Algorithm::FixedWindow {
            return None;
        }
        let State { spent, .. } = self.backend.state(&self.params());
        let Spent::FixedWindow(reserved) = spent else { return None };
        let state = reserved.state;
        let opening = state.start + state.ahead() * state.length;
        (opening <= at && at < opening + state.length).then_some(opening)
    }

    fn lifetime(&self, life: usize) -> Lifetime {
        Lifetime::new(self.setup.lifetimes[life])
    }

    /// The instant until which a hold with this receipt may be used.
    fn expiry(&self, receipt: HoldReceipt, life: usize) -> i64 {
        match self.setup.scope.steps_back {
            true => self.now + self.setup.lifetimes[life] as i64,
            false => receipt.ends,
        }
    }

    fn hold(
        &mut self,
        units: u32,
        life: usize,
        parts: [u16; 3],
        is_lost: bool,
    ) -> Result<(), TestCaseError> {
        let action = Action::Hold { lifetime: self.lifetime(life), epoch: None };
        // A hold does not wait, whatever it says.
        let max_wait = if self.setup.scope.waits { self.part_of_window(1_000) } else { 0 };
        let request = EngineRequest { action, max_wait, ..check(self.cost(units), self.clock()) };
        let reply = self.ask(request)?;
        if let Some(receipt) = reply.hold {
            let Self { now: begin, index, generation, .. } = *self;
            let expires = self.expiry(receipt, life);
            self.epoch = receipt.epoch;
            let units = request.cost;
            let hold = Open { units, begin, expires, receipt, parts, index, generation, is_lost };
            self.open.push(hold);
            let window = self.window_of(begin);
            self.admitted.push(Admitted { at: begin, index, generation, window });
        }
        Ok(())
    }

    fn change(&mut self, hold: &Open, action: HoldAction) -> HoldReply {
        let mut receipt = hold.receipt;
        if self.setup.scope.ignores_epochs {
            receipt.epoch = self.epoch;
        }
        let change = HoldChange { receipt, units: hold.units, action };
        let (params, now) = (self.params(), self.clock());
        self.backend.change_holds(&params, now, &[change])[0]
    }

    fn end(&mut self, hold: Open, used: i64) {
        self.change(&hold, HoldAction::End { used });
        self.excess((used - hold.units).max(0));
        self.uses_of(&hold, used.min(hold.units), self.now);
    }

    fn renew(&mut self, which: usize, life: usize, is_lost: bool) {
        let hold = self.open[which];
        let reply = self.change(&hold, HoldAction::Renew(self.lifetime(life)));
        match reply {
            // Renewed late by the clock of its holder, which takes it for expired and ends no more.
            HoldReply::Renewed(_) if self.now > hold.expires => {
                self.uses_of(&hold, hold.units, hold.expires);
                self.open.swap_remove(which);
            }
            HoldReply::Renewed(receipt) => {
                self.epoch = receipt.epoch;
                if !is_lost {
                    // A renewal never shortens a hold.
                    let expires = self.expiry(receipt, life).max(hold.expires);
                    let hold = &mut self.open[which];
                    (hold.receipt, hold.expires) = (receipt, expires);
                }
            }
            _ => {
                let hold = self.open.swap_remove(which);
                self.uses_of(&hold, hold.units, hold.expires);
            }
        }
    }

    /// The holder used these units before the end, in pieces.
    fn uses_of(&mut self, hold: &Open, units: i64, end: i64) {
        let Open { begin, expires, parts, index, generation, is_lost, .. } = *hold;
        if is_lost {
            return;
        }
        let end = end.min(expires);
        let mut left = units;
        for (i, part) in parts.into_iter().enumerate() {
            let at = begin + (end - begin) * i64::from(part) / 65_535;
            let units = ceil_div(left, 3 - i as i64);
            left -= units;
            self.uses.push(Use { at, units, index, generation, is_excess: false });
        }
    }

    fn excess(&mut self, units: i64) {
        if units > 0 {
            let Self { now: at, index, generation, .. } = *self;
            self.uses.push(Use { at, units, index, generation, is_excess: true });
        }
    }

    /// The holders that are left have died: they used all units.
    fn finish(&mut self) {
        for hold in std::mem::take(&mut self.open) {
            self.uses_of(&hold, hold.units, hold.expires);
        }
        self.uses.retain(|used| used.units > 0);
        self.uses.sort_by_key(|used| used.at);
    }
}

/// The promise that includes those of both quotas, or of the one that applies.
struct Promise {
    setup: Setup,
    limit: f64,
    window: f64,
    rate: f64,
    size: f64,
}

impl Promise {
    fn of(setup: Setup) -> Self {
        let [one, other] = setup.quotas;
        let other = if setup.scope.changes { other } else { one };
        let rate = |quota: Quota| quota.limit() as f64 / quota.window_us() as f64;
        let size = one.burst_size().max(other.burst_size()) as f64;
        Self {
            setup,
            limit: one.limit().max(other.limit()) as f64,
            window: one.window_us().min(other.window_us()) as f64,
            rate: rate(one).max(rate(other)),
            size: size + setup.overdraft() as f64,
        }
    }

    /// The most units in this time, both ends included.
    fn most(&self, time: f64) -> f64 {
        let Self { limit, window, rate, size, .. } = *self;
        let log = |window: f64| limit * ((time / window).floor() + 1.0);
        match self.setup.algorithm {
            // Twice the limit across a boundary.
            Algorithm::FixedWindow => limit * ((time / window).floor() + 2.0),
            Algorithm::SlidingLog => log(window),
            Algorithm::SlidingWindow { buckets } => {
                let sub_window = (window / f64::from(buckets)).ceil();
                // With any grid, the sub-windows that lie inside the window count the limit.
                let inside = !self.setup.scope.changes && time < window - sub_window;
                if inside { limit } else { limit * ((time / window).floor() + 2.0) }
            }
            Algorithm::TokenBucket { refill: Refill::Continuous, .. } => size + rate * time + 1e-6,
            Algorithm::TokenBucket { .. } => size + limit * (time / window).ceil(),
            Algorithm::LeakyBucket => unreachable!("no holds"),
            Algorithm::Concurrency => unreachable!("see concurrency.rs"),
        }
    }

    /// The most units from this time before an admission on, if units that were spent without
    /// asking count.
    fn most_before(&self, last: &Admitted, time: f64) -> f64 {
        let Self { window, limit, setup, .. } = self;
        let is_free = match setup.algorithm {
            Algorithm::SlidingLog => time >= *window,
            Algorithm::SlidingWindow { buckets } => {
                let sub_window = (window / f64::from(buckets)).ceil();
                setup.scope.changes || time > 0.0 && time >= window - sub_window
            }
            Algorithm::FixedWindow => {
                let is_known = !setup.scope.changes && !setup.scope.steps_back;
                let opening = last.window.filter(|_| is_known).unwrap_or(last.at);
                if last.at as f64 - time >= opening as f64 {
                    // By another length, the window of this very instant may be over.
                    return if setup.scope.changes { 2.0 * limit } else { *limit };
                }
                true
            }
            _ => false,
        };
        if is_free { f64::INFINITY } else { self.most(time) }
    }
}

/// Returns the excess over the promise, and its place.
fn over<B>(history: &History<'_, B>) -> Option<String> {
    let promise = Promise::of(history.setup);
    let granted = history.granted as f64;
    let Setup { algorithm, scope, .. } = history.setup;
    // By another length, the window in which a caller has just spent may be over.
    let forgets_excess = scope.changes && algorithm == Algorithm::FixedWindow;
    for generation in 0..=history.generation {
        let of = |used: &&Use| used.generation == generation;
        let uses: Vec<_> = history.uses.iter().filter(of).collect();
        // In any time at all.
        for (i, first) in uses.iter().enumerate() {
            let mut sum = 0;
            for used in uses[i..].iter().filter(|used| !used.is_excess) {
                sum += used.units;
                let time = used.at - first.at;
                if sum as f64 > promise.most(time as f64) + granted {
                    return Some(format!("{sum} in {time} from {first:?}"));
                }
            }
        }
        // At an admission, the uses of all holds until then count, even those that come later, and
        // what callers spent without asking.
        for last in history.admitted.iter().filter(|last| last.generation == generation) {
            let mut sum = 0;
            let counts = |used: &&&Use| {
                let before = if used.is_excess { last.index - 1 } else { last.index };
                used.index <= before && !(used.is_excess && forgets_excess)
            };
            let mut seen = VecDeque::new();
            for used in uses.iter().rev().filter(counts) {
                sum += used.units;
                seen.push_front(**used);
                let time = (last.at - used.at).max(0);
                if sum as f64 > promise.most_before(last, time as f64) + granted {
                    return Some(format!("{sum} in {time} before {last:?}: {seen:?}"));
                }
            }
        }
    }
    None
}

/// Runs a history. Returns a description of what exceeds the promise.
fn run(
    backend: &mut impl Key,
    setup: Setup,
    steps: &[Step],
) -> Result<Option<String>, TestCaseError> {
    backend.lose();
    let mut history = History {
        backend,
        setup,
        current: 0,
        now: START,
        back: 0,
        generation: 0,
        index: 0,
        uses: vec![],
        admitted: vec![],
        granted: 0,
        open: vec![],
        epoch: 0,
    };
    for step in steps {
        history.step(step)?;
    }
    history.finish();
    Ok(over(&history))
}

/// The histories of one seed.
const BATCH: u32 = 300;

/// Returns a runner whose histories are the same for each seed.
fn runner(seed: u64, cases: u32) -> TestRunner {
    let config = ProptestConfig { cases, failure_persistence: None, ..Default::default() };
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes))
}

/// The same seed each time; or as many random ones as the environment variable `HISTORIES` needs;
/// or the one that `SEED` says, which a failure prints.
fn seeds() -> Vec<u64> {
    let number = |name| env::var(name).map(|number| number.parse::<u64>().unwrap()).ok();
    match (number("SEED"), number("HISTORIES")) {
        (Some(seed), _) => vec![seed],
        (None, Some(histories)) => {
            (0..histories.div_ceil(BATCH.into())).map(|_| fastrand::u64(..)).collect()
        }
        (None, None) => vec![0],
    }
}

fn never_exceeds(algorithms: impl Strategy<Value = Algorithm>) {
    run_all(algorithms, BATCH, &mut State::default());
}

/// The same for the scripts, with fewer histories if the environment does not ask for more.
fn never_exceeds_in_scripts(algorithms: impl Strategy<Value = Algorithm>) {
    let server = RedisServer::start();
    let is_asked = env::var("SEED").or(env::var("HISTORIES")).is_ok();
    let cases = if is_asked { BATCH } else { 40 };
    run_all(algorithms, cases, &mut Scripted::new(&server, "{key}"));
}

fn run_all(algorithms: impl Strategy<Value = Algorithm>, cases: u32, backend: &mut impl Key) {
    let (strategy, backend) = ((setups(algorithms), steps()), RefCell::new(backend));
    for seed in seeds() {
        let result = runner(seed, cases).run(&strategy, |(setup, steps)| {
            let over = run(*backend.borrow_mut(), setup, &steps)?;
            prop_assert!(over.is_none(), "{}", over.unwrap());
            Ok(())
        });
        result.unwrap_or_else(|failure| panic!("SEED={seed}: {failure}"));
    }
}

fn bucket(refill: Refill) -> impl Strategy<Value = Algorithm> {
    prop_oneof![Just(0), 1_u64..5]
        .prop_map(move |overdraft| Algorithm::TokenBucket { refill, overdraft })
}

fn windows() -> impl Strategy<Value = Algorithm> {
    (1_u32..12).prop_map(|buckets| Algorithm::SlidingWindow { buckets })
}

macro_rules! laws {
    ($($name:ident, $in_scripts:ident: $algorithms:expr;)*) => {
        $(
            #[test]
            fn $name() {
                never_exceeds($algorithms);
            }

            #[test]
            fn $in_scripts() {
                never_exceeds_in_scripts($algorithms);
            }
        )*
    };
}

laws! {
    holds_of_a_fixed_window_are_never_over, holds_of_a_fixed_window_are_never_over_in_scripts:
        Just(Algorithm::FixedWindow);
    holds_of_a_sliding_log_are_never_over, holds_of_a_sliding_log_are_never_over_in_scripts:
        Just(Algorithm::SlidingLog);
    holds_of_a_sliding_window_are_never_over, holds_of_a_sliding_window_are_never_over_in_scripts:
        windows();
    holds_of_a_token_bucket_are_never_over, holds_of_a_token_bucket_are_never_over_in_scripts:
        bucket(Refill::Continuous);
    holds_of_a_bucket_that_refills_at_once_are_never_over,
        holds_of_a_bucket_that_refills_at_once_are_never_over_in_scripts:
        bucket(Refill::Interval);
}

#[test]
fn without_epochs_holds_are_over_after_a_loss_of_the_state() {
    for algorithm in [
        Algorithm::FixedWindow,
        Algorithm::SlidingLog,
        Algorithm::SlidingWindow { buckets: 4 },
        Algorithm::token_bucket(),
    ] {
        let strategy = (setups(Just(algorithm)), steps());
        let mut caught = false;
        let result = runner(0, 10_000).run(&strategy, |(mut setup, steps)| {
            setup.scope = Scope {
                grants: false,
                losses: true,
                steps_back: false,
                changes: false,
                ignores_epochs: true,
                ..setup.scope
            };
            let over = run(&mut State::default(), setup, &steps)?;
            prop_assert!(over.is_none(), "{}", over.unwrap());
            Ok(())
        });
        caught |= result.is_err();
        assert!(caught, "{algorithm}: no history is over");
    }
}
