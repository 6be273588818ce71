//! Random histories through the public API: requests wait, are dropped, hold and settle, or are not
//! charged, and the store loses its state in between. The oracle counts the actual usage; it does
//! not know any state. `HISTORIES` in the environment sets the number of histories in memory; over
//! Redis it is a tenth.

use std::{
    cell::Cell,
    convert::Infallible,
    env,
    future::poll_fn,
    iter::zip,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard},
    task::Poll,
    time::Duration,
};

use axum::body::Body;
use http::{Request, Response, StatusCode, request::Parts};
use proptest::{prelude::*, sample::Index, test_runner::TestRunner};
use tokio::{
    runtime,
    sync::oneshot,
    task::yield_now,
    time::{Instant, sleep},
};
use tower::{Layer, ServiceExt, service_fn, util::BoxCloneService};
use tower_ratelimit::store::ErrorKind;
use tower_ratelimit::{
    Admission, Algorithm, Charge, Decision, Error, Limiter, MemoryStore, Permit, Quota,
    RateLimitLayer,
    config::Refill,
    layer::Settle,
    store::{Store, WhenFull},
};

use crate::support::{self, memory_store, server::RedisServer};

const ALGORITHMS: [Algorithm; 7] = [
    Algorithm::FixedWindow,
    Algorithm::SlidingLog,
    Algorithm::sliding_window().buckets(2),
    Algorithm::sliding_window().buckets(10),
    Algorithm::token_bucket(),
    Algorithm::token_bucket().refill(Refill::Interval),
    Algorithm::LeakyBucket,
];

/// The limits of each request: one, two on one key, or two on a key each.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Shape {
    One,
    Also,
    And,
}

#[derive(Clone, Copy, Debug)]
struct Setup {
    shape: Shape,
    limits: [(Algorithm, Quota); 2],
    /// The limits whose costs are held.
    held: [bool; 2],
    /// True if a response can be uncharged: then all costs are held.
    charge_when: bool,
    /// In thousandths of the first window.
    max_wait: Option<u32>,
    /// The setting of a store that has room for one key, into which other keys are inserted.
    full: Option<WhenFull>,
}

/// The actions of the handler of a request.
#[derive(Clone, Copy, Debug)]
struct Plan {
    id: usize,
    costs: [u64; 2],
    settles: Option<(usize, u64)>,
    /// True if the response is charged; `None` if a later step responds.
    responds: Option<bool>,
}

#[derive(Clone, Debug)]
enum Step {
    Request {
        costs: [u64; 2],
        settles: Option<(usize, u64)>,
        responds: Option<bool>,
    },
    /// A check without the layer, or a hold, with a permit. The longest wait of a check is in
    /// thousandths of a window.
    Check {
        costs: [u64; 2],
        max_wait: u32,
    },
    /// An admitted request, the limit, and the part of its cost that was used, in quarters.
    Settle(Index, usize, u64),
    Cancel(Index),
    /// A request whose handler waits, and whether the request is charged.
    Respond(Index, bool),
    /// Requests that are dropped.
    Drop(Vec<Index>),
    Grant(usize, u64),
    Reset(usize),
    /// All state is lost: in memory, by the insertion of another key.
    Lose,
    Pass(u32),
}

fn setups() -> impl Strategy<Value = Setup> {
    let window = prop_oneof![Just(1_000_000), 100_000_u64..10_000_000, Just(86_400_000_000)];
    let quota =
        (1_u64..30, window).prop_map(|(limit, us)| Quota::new(limit, Duration::from_micros(us)));
    let limit = (prop::sample::select(&ALGORITHMS[..]), quota);
    let shape = prop_oneof![3 => Just(Shape::One), 1 => Just(Shape::Also), 1 => Just(Shape::And)];
    let full = prop_oneof![
        2 => Just(None),
        1 => Just(Some(WhenFull::RejectNewKeys)),
        1 => Just(Some(WhenFull::EvictSoonest)),
    ];
    let max_wait = prop::option::weighted(0.8, 0_u32..5_000);
    let flags = ([any::<bool>(), any::<bool>()], any::<bool>());
    (shape, [limit.clone(), limit], flags, max_wait, full).prop_map(
        |(shape, limits, (held, charge_when), max_wait, full)| {
            let full = full.filter(|_| shape == Shape::One);
            let can_hold = |limit: usize| {
                let is_there = limit == 0 || shape != Shape::One;
                is_there && limits[limit].0 != Algorithm::LeakyBucket
            };
            let mut held = [0, 1].map(|limit| held[limit] && can_hold(limit));
            let charge_when = charge_when && can_hold(0) && (shape == Shape::One || can_hold(1));
            if charge_when {
                held = [true, shape != Shape::One];
            }
            Setup { shape, limits, held, charge_when, max_wait, full }
        },
    )
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let costs = [1_u64..6, 1_u64..6];
    let settles = prop::option::weighted(0.4, (0_usize..2, 0_u64..8));
    let responds = prop_oneof![3 => Just(Some(true)), 2 => Just(Some(false)), 3 => Just(None)];
    let wait = prop_oneof![1 => Just(0), 2 => 0_u32..3_000];
    let pass = prop_oneof![4 => 0_u32..100, 1 => 100_u32..1_500];
    let index = any::<Index>;
    let step = prop_oneof![
        12 => (costs.clone(), settles, responds)
            .prop_map(|(costs, settles, responds)| Step::Request { costs, settles, responds }),
        4 => (costs, wait).prop_map(|(costs, max_wait)| Step::Check { costs, max_wait }),
        6 => (index(), 0_usize..2, 0_u64..8)
            .prop_map(|(which, limit, used)| Step::Settle(which, limit, used)),
        2 => index().prop_map(Step::Cancel),
        4 => (index(), any::<bool>()).prop_map(|(which, charged)| Step::Respond(which, charged)),
        3 => prop::collection::vec(index(), 1..6).prop_map(Step::Drop),
        1 => (0_usize..2, 1_u64..5).prop_map(|(limit, units)| Step::Grant(limit, units)),
        1 => (0_usize..2).prop_map(Step::Reset),
        1 => Just(Step::Lose),
        8 => pass.prop_map(Step::Pass),
    ];
    prop::collection::vec(step, 1..80)
}

/// Units that were used, in the order in which they were admitted. Times are in microseconds.
#[derive(Clone, Copy, Debug)]
struct Use {
    at: f64,
    /// Negative if they were granted.
    used: f64,
    /// True if the request could have been denied.
    is_check: bool,
    /// The number of losses of state before.
    losses: usize,
    /// The end of the window, if windows are fixed.
    window: f64,
}

/// The uses of one limit.
#[derive(Debug, Default)]
struct Account {
    uses: Vec<Use>,
    losses: usize,
    /// The units that may be returned only after the next loss.
    late: f64,
}

/// A request, or a check.
#[derive(Debug, Default)]
struct Entry {
    costs: [u64; 2],
    /// For each limit, the indices of its uses.
    indices: [Vec<usize>; 2],
    arrival: f64,
    is_admitted: bool,
    /// True if it was dropped or denied while it waited.
    has_left: bool,
    /// The limits whose holds have ended.
    has_ended: [bool; 2],
    /// The limits whose state was lost while a call of the request could be under way: its answer
    /// does not say whether Redis decided before that.
    is_unclear: [bool; 2],
    permit: Option<Permit>,
    /// The handle of a request.
    settle: Option<Settle>,
    respond: Option<oneshot::Sender<bool>>,
}

#[derive(Debug, Default)]
struct Ledger {
    accounts: [Account; 2],
    entries: Vec<Entry>,
    /// The handlers that use the store at the moment.
    busy: usize,
}

impl Account {
    fn add(&mut self, at: f64, used: f64, is_check: bool, window: f64) -> usize {
        let losses = self.losses;
        self.uses.push(Use { at, used, is_check, losses, window });
        self.uses.len() - 1
    }

    /// Units that were spent before a loss are not in the state, so that their return is a grant.
    /// Reserved units are not returned, unless by chance others are reserved for the same instant.
    fn lower(&mut self, index: usize, units: f64, now: f64, window: f64, is_held: bool) {
        self.uses[index].used -= units;
        if is_held {
            return; // an end that finds no hold returns nothing
        }
        let Use { at, losses, .. } = self.uses[index];
        let is_same = |u: &Use| u.at == at;
        let same = self.uses.iter().any(|u| u.losses == self.losses && is_same(u));
        if losses < self.losses && (at <= now || same) && units > 0.0 {
            self.add(now, -units, false, window);
        }
    }

    /// Lets units that were held have been used at the end of the hold: at any instant of it is
    /// within the promise.
    fn use_at_end(&mut self, indices: &[usize], now: f64, window: f64) {
        for index in indices {
            let it = &mut self.uses[*index];
            if it.losses == self.losses {
                (it.at, it.window, it.is_check) = (now, window, false);
            }
        }
    }

    fn lose(&mut self, now: f64) {
        self.losses += 1;
        if self.late > 0.0 {
            self.add(now, -self.late, false, 0.0);
        }
    }
}

struct Harness {
    setup: Setup,
    limiters: Vec<Limiter>,
    /// Over Redis, time does not matter: its windows are days long.
    is_real: bool,
    start: Instant,
    ledger: Mutex<Ledger>,
}

/// The keys of the limits.
fn keys(shape: Shape) -> [&'static str; 2] {
    ["alice", if shape == Shape::And { "all" } else { "alice" }]
}

impl Setup {
    fn charge(&self, limiters: &[Limiter], keys: [&str; 2], costs: [u64; 2]) -> Charge {
        let part = |limit: usize| {
            let charge = Charge::new(&limiters[limit], keys[limit]).cost(costs[limit]);
            if self.held[limit] { charge.estimate(costs[limit]) } else { charge }
        };
        match (self.shape, self.held[1]) {
            (Shape::One, _) => part(0),
            (Shape::Also, false) => part(0).also(&limiters[1]).cost(costs[1]),
            (Shape::Also, true) => part(0).also(&limiters[1]).estimate(costs[1]),
            (Shape::And, _) => part(0).and(part(1)),
        }
    }
}

impl Harness {
    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap()
    }

    fn now(&self) -> f64 {
        if self.is_real { 0.0 } else { self.start.elapsed().as_micros() as f64 }
    }

    /// The instant at which a request with this wait proceeds.
    fn at(&self, arrival: f64, wait: Duration) -> f64 {
        let is_short = self.is_real && wait < Duration::from_secs(60);
        arrival + if is_short { 0.0 } else { wait.as_micros() as f64 }
    }

    fn key(&self, limit: usize) -> &'static str {
        keys(self.setup.shape)[limit]
    }

    fn charge(&self, costs: [u64; 2]) -> Charge {
        self.setup.charge(&self.limiters, keys(self.setup.shape), costs)
    }

    /// The ends of the newest window of a limit, and of the window that is open now.
    async fn windows(&self, limit: usize) -> [f64; 2] {
        let limiter = &self.limiters[limit];
        if limiter.algorithm() != Algorithm::FixedWindow {
            return [0.0; 2];
        }
        let length = limiter.quota().window().as_micros() as f64;
        let state = limiter.peek(self.key(limit)).await.unwrap();
        // What is held counts in the window of its end: as if that were now.
        let mut reset = state.reset_after().as_micros() as f64;
        if self.is_real || reset == 0.0 {
            reset = (reset / length).ceil().max(1.0) * length;
        }
        let ahead = ((reset - 1.0) / length).floor();
        [reset, reset - ahead * length].map(|time| self.now() + time)
    }

    /// Records a request that proceeds at an instant, or has a reservation for it.
    async fn add(&self, id: usize, at: f64) {
        for limit in 0..self.limiters.len() {
            let [newest, _] = self.windows(limit).await;
            let Ledger { accounts, entries, .. } = &mut *self.ledger();
            let Entry { costs, indices, is_unclear, .. } = &mut entries[id];
            // Over Redis, no reservation comes due: windows are days long.
            let is_check = !self.is_real || at == 0.0;
            if is_unclear[limit] {
                // Perhaps the state has none of its units.
                accounts[limit].add(at, -(costs[limit] as f64), false, newest);
            }
            indices[limit].push(accounts[limit].add(at, costs[limit] as f64, is_check, newest));
        }
    }

    async fn admitted(&self, id: usize, decision: Decision, settle: Option<Settle>) {
        let is_reserved = !self.ledger().entries[id].indices[0].is_empty();
        if !is_reserved {
            assert!(self.is_real || decision.delay().is_zero());
            self.add(id, self.now()).await;
        }
        let Ledger { accounts, entries, .. } = &mut *self.ledger();
        let entry = &mut entries[id];
        let at = self.at(entry.arrival, decision.delay());
        for (account, indices) in zip(accounts, &entry.indices).filter(|_| is_reserved) {
            for index in indices {
                let known = &mut account.uses[*index].at;
                let is_same = known.is_infinite() || *known == at;
                assert!(self.is_real || is_same, "{known} was reported before, and then {at}");
                *known = at;
            }
        }
        (entry.is_admitted, entry.settle) = (true, settle);
    }

    /// Forgets the uses of a request that seemed to wait, and was denied.
    fn rejected(&self, id: usize) {
        let Ledger { accounts, entries, .. } = &mut *self.ledger();
        let Entry { is_admitted, has_left, indices, .. } = &mut entries[id];
        *has_left = !*is_admitted;
        for (account, indices) in zip(accounts, indices).filter(|_| !*is_admitted) {
            for index in indices {
                account.uses[*index].used = 0.0;
            }
        }
    }

    /// Adjusts the recorded uses of a limit, the latest first.
    async fn used(&self, id: usize, limit: usize, used: u64, in_background: bool) {
        let is_held = self.setup.held[limit];
        let [newest, open] = self.windows(limit).await;
        let now = self.now();
        let Ledger { accounts, entries, .. } = &mut *self.ledger();
        let (account, indices) = (&mut accounts[limit], &mut entries[id].indices[limit]);
        let total: f64 = indices.iter().map(|index| account.uses[*index].used).sum();
        let mut above = total - used as f64;
        for index in indices.iter().rev() {
            let units = above.clamp(0.0, account.uses[*index].used);
            if self.is_real && in_background && account.uses[*index].at <= now {
                account.late += units;
            }
            account.lower(*index, units, now, open, is_held);
            above -= units;
        }
        if is_held && used % 2 == 1 {
            account.use_at_end(indices, now, newest);
        }
        if above < 0.0 {
            indices.push(account.add(now, -above, false, newest));
        }
    }

    async fn settle(&self, id: usize, limit: usize, quarters: u64) {
        let limit = limit % self.limiters.len();
        let name = self.limiters[limit].name();
        let (settle, mut permit, cost, has_ended) = {
            let Entry { settle, permit, costs, has_ended, .. } = &mut self.ledger().entries[id];
            (settle.clone(), permit.take(), costs[limit], has_ended[limit])
        };
        // Over Redis, ends are sent in the background: what exceeds a hold is spent later than it
        // is recorded here.
        let most = if self.is_real { 4 } else { u64::MAX };
        let used = (cost * quarters.min(most)).div_ceil(4);
        let result = match (settle, &mut permit) {
            (Some(settle), _) => settle.settle(name, used),
            (None, Some(permit)) => permit.settle_for(name, used),
            _ => return,
        };
        self.ledger().entries[id].permit = permit;
        match result {
            Ok(()) => {
                assert!(self.setup.held[limit] && !has_ended);
                self.ended(id, limit, Some(used)).await;
            }
            Err(Error::HoldEnded { .. }) => assert!(self.setup.held[limit] && has_ended),
            Err(Error::NotHeld { .. }) => assert!(!self.setup.held[limit]),
            Err(error) => panic!("{error}"),
        }
    }

    async fn cancel(&self, id: usize) {
        let permit = self.ledger().entries[id].permit.take();
        if let Some(permit) = permit {
            permit.cancel();
            self.all_ended(id, Some(0)).await;
        }
    }

    /// Records that the holds of a request have ended, which had not ended before.
    async fn all_ended(&self, id: usize, used: Option<u64>) {
        for limit in 0..self.limiters.len() {
            if self.setup.held[limit] && !self.ledger().entries[id].has_ended[limit] {
                self.ended(id, limit, used).await;
            }
        }
    }

    /// Records the end of a hold: without a number, all of its units were used.
    async fn ended(&self, id: usize, limit: usize, used: Option<u64>) {
        self.ledger().entries[id].has_ended[limit] = true;
        if let Some(used) = used {
            self.used(id, limit, used, false).await;
        }
    }

    /// Gives the waiting requests of one cost their instants in the order of their arrival, and the
    /// last instant to a request that leaves.
    fn take_over(&self, id: usize, leaves: bool) {
        if self.setup.shape != Shape::One || self.is_real {
            return;
        }
        let Ledger { accounts, entries, .. } = &mut *self.ledger();
        let (uses, costs) = (&mut accounts[0].uses, entries[id].costs);
        let waits = |it: &&Entry| !it.is_admitted && !it.has_left && it.costs[0] == costs[0];
        let waiting = entries.iter().filter(waits).flat_map(|it| it.indices[0].first());
        let mut waiting: Vec<usize> = waiting.copied().collect();
        let of_instant =
            |index: &usize| (uses[*index].at, uses[*index].losses, uses[*index].window);
        let mut instants: Vec<_> = waiting.iter().map(of_instant).collect();
        instants.sort_by(|a, b| a.0.total_cmp(&b.0));
        if leaves {
            let own = entries[id].indices[0].first();
            waiting.sort_by_key(|index| Some(index) == own);
            entries[id].has_left = true;
        }
        for (index, instant) in zip(waiting, instants) {
            (uses[index].at, uses[index].losses, uses[index].window) = instant;
        }
    }

    /// Records that a request was dropped before it proceeded.
    async fn dropped(&self, id: usize) {
        self.take_over(id, true);
        for limit in 0..self.limiters.len() {
            self.used(id, limit, 0, true).await;
            let Ledger { accounts, entries, .. } = &mut *self.ledger();
            if self.is_real && entries[id].indices[limit].is_empty() && !self.setup.held[limit] {
                // Redis may have allowed it, and its units are returned in the background.
                accounts[limit].late += entries[id].costs[limit] as f64;
            }
        }
    }

    async fn grant(&self, limit: usize, units: u64) {
        let limit = limit % self.limiters.len();
        let limiter = &self.limiters[limit];
        if !matches!(limiter.algorithm(), Algorithm::SlidingWindow { .. }) {
            let [_, open] = self.windows(limit).await;
            limiter.refund(self.key(limit), units).await.unwrap();
            let now = self.now();
            self.ledger().accounts[limit].add(now, -(units as f64), false, open);
        }
    }

    fn lose(&self, limit: usize) {
        let now = self.now();
        let Ledger { accounts, entries, .. } = &mut *self.ledger();
        accounts[limit].lose(now);
        for entry in entries.iter_mut().filter(|entry| !entry.is_admitted && !entry.has_left) {
            entry.is_unclear[limit] = self.is_real;
        }
    }

    /// Records that the calls that were under way at a loss have their answers.
    fn settled(&self) {
        self.ledger().entries.iter_mut().for_each(|entry| entry.is_unclear = [false; 2]);
    }
}

/// The handler of a request.
async fn serve(
    harness: Arc<Harness>,
    request: Request<Body>,
) -> Result<Response<Body>, Infallible> {
    let extensions = request.extensions();
    let plan: Plan = *extensions.get().unwrap();
    let decision: Decision = extensions.get().cloned().unwrap();
    harness.ledger().busy += 1;
    harness.admitted(plan.id, decision, extensions.get().cloned()).await;
    if let Some((limit, quarters)) = plan.settles {
        harness.settle(plan.id, limit, quarters).await;
    }
    harness.ledger().busy -= 1;
    let is_charged = match plan.responds {
        Some(is_charged) => is_charged,
        None => {
            let (respond, response) = oneshot::channel();
            harness.ledger().entries[plan.id].respond = Some(respond);
            response.await.unwrap_or(true)
        }
    };
    harness.ledger().busy += 1;
    let used = (!is_charged && harness.setup.charge_when).then_some(0);
    harness.all_ended(plan.id, used).await;
    harness.ledger().busy -= 1; // before it responds
    let status = if is_charged { StatusCode::OK } else { StatusCode::BAD_GATEWAY };
    Ok(Response::builder().status(status).body(Body::empty()).unwrap())
}

type Pending = Pin<Box<dyn Future<Output = StatusCode>>>;

/// Plays a history.
struct Player {
    harness: Arc<Harness>,
    service: BoxCloneService<Request<Body>, StatusCode, Infallible>,
    pending: Vec<(usize, Pending)>,
    lose: Box<dyn Fn() -> bool>,
}

impl Player {
    fn new(harness: Arc<Harness>, lose: Box<dyn Fn() -> bool>) -> Self {
        let Setup { shape, limits, charge_when, max_wait, .. } = harness.setup;
        let costs = |head: &Parts| head.extensions.get::<Plan>().unwrap().costs;
        let (setup, limiters) = (harness.setup, harness.limiters.clone());
        let mut layer = RateLimitLayer::by_rule(move |head: &Parts| {
            Ok(setup.charge(&limiters, keys(shape), costs(head)))
        });
        layer = layer.extensions(true).settle_handle(true);
        if charge_when {
            layer = layer.charge_when(|response| response.status == StatusCode::OK);
        }
        if let Some(thousandths) = max_wait {
            let mut max_wait = limits[0].1.window() * thousandths / 1_000;
            if harness.setup.held != [false; 2] {
                // A request that waits for a hold to end checks ten times per second.
                max_wait = max_wait.min(Duration::from_secs(60));
            }
            layer = layer.max_wait(max_wait);
        }
        let handler = {
            let harness = harness.clone();
            service_fn(move |request| serve(harness.clone(), request))
        };
        let service = layer.layer(handler).map_response(|response| response.status());
        Self { harness, service: BoxCloneService::new(service), pending: vec![], lose }
    }

    /// Polls all requests.
    async fn poll(&mut self) {
        poll_fn(|cx| {
            self.pending.retain_mut(|(_, request)| request.as_mut().poll(cx).is_pending());
            Poll::Ready(())
        })
        .await;
    }

    /// Runs all requests as far as possible without time passing.
    async fn drive(&mut self) {
        self.poll().await;
        if self.harness.is_real {
            // The reply to this peek arrives after those to the requests, on the same connection.
            let _ = self.harness.limiters[0].peek("other").await.unwrap();
            self.poll().await;
            while self.harness.ledger().busy > 0 {
                yield_now().await;
                self.poll().await;
            }
        }
    }

    async fn pass(&mut self, time: Duration) {
        let mut time = Box::pin(sleep(time));
        poll_fn(|cx| {
            self.pending.retain_mut(|(_, request)| request.as_mut().poll(cx).is_pending());
            time.as_mut().poll(cx)
        })
        .await;
        self.drive().await;
    }

    fn open(&self, costs: [u64; 2]) -> (usize, [u64; 2]) {
        let fit = |limit: usize| costs[limit].min(self.harness.setup.limits[limit].1.limit());
        let (costs, arrival) = ([fit(0), fit(1)], self.harness.now());
        let entries = &mut self.harness.ledger().entries;
        entries.push(Entry { costs, arrival, ..Entry::default() });
        (entries.len() - 1, costs)
    }

    /// Chooses one of the entries that fit.
    fn one(&self, which: &Index, fits: impl Fn(&Entry) -> bool) -> Option<usize> {
        let ledger = self.harness.ledger();
        let ids = ledger.entries.iter().enumerate().filter(|(_, entry)| fits(entry));
        let ids: Vec<usize> = ids.map(|(id, _)| id).collect();
        (!ids.is_empty()).then(|| *which.get(&ids))
    }

    async fn step(&mut self, step: &Step) {
        match step {
            Step::Request { costs, settles, responds } => {
                self.request(*costs, *settles, *responds).await;
            }
            Step::Check { costs, max_wait } => self.check(*costs, *max_wait).await,
            Step::Settle(which, limit, quarters) => self.settle(which, *limit, *quarters).await,
            Step::Cancel(which) => self.cancel(which).await,
            Step::Respond(which, is_charged) => self.respond(which, *is_charged).await,
            Step::Drop(which) => self.drop_some(which).await,
            Step::Grant(limit, units) => self.harness.grant(*limit, *units).await,
            Step::Reset(limit) => self.reset(*limit).await,
            Step::Lose => self.lose().await,
            Step::Pass(_) if self.harness.is_real => self.drive().await,
            Step::Pass(thousandths) => {
                self.pass(self.harness.setup.limits[0].1.window() * *thousandths / 1_000).await;
            }
        }
    }

    async fn request(
        &mut self,
        costs: [u64; 2],
        settles: Option<(usize, u64)>,
        responds: Option<bool>,
    ) {
        let harness = self.harness.clone();
        let (id, costs) = self.open(costs);
        let peek = harness.charge(costs).peek().await.unwrap();
        let wait = peek.retry_after().unwrap_or(peek.delay());
        let at = match harness.setup.shape {
            Shape::One => harness.at(harness.now(), wait),
            // Not known: its return may be a grant. Over Redis, too, it can pass within
            // milliseconds, if a bucket is almost full.
            _ => f64::NEG_INFINITY,
        };
        let mut request = Request::new(Body::empty());
        request.extensions_mut().insert(Plan { id, costs, settles, responds });
        let response = self.service.clone().oneshot(request);
        let ends = harness.clone();
        self.pending.push((
            id,
            Box::pin(async move {
                let status = response.await.unwrap();
                ends.rejected(id);
                status
            }),
        ));
        let now = harness.now();
        self.calm().await;
        let waits = self.pending.iter().any(|(other, _)| *other == id);
        let is_admitted = harness.ledger().entries[id].is_admitted;
        let reserves = harness.setup.shape != Shape::And && harness.setup.held == [false; 2];
        if waits && !is_admitted && reserves {
            assert!(harness.setup.shape != Shape::One || harness.is_real || at > now);
            harness.add(id, at).await;
            harness.take_over(id, false);
        }
    }

    async fn check(&mut self, costs: [u64; 2], max_wait: u32) {
        let harness = &self.harness;
        let (id, costs) = self.open(costs);
        let max_wait = harness.setup.limits[0].1.window() * max_wait / 1_000;
        let charge = harness.charge(costs);
        let (decision, permit) = if harness.setup.held != [false; 2] {
            match charge.hold().await {
                Ok(Admission::Admitted(permit)) => (Ok(permit.decision().clone()), Some(permit)),
                Ok(Admission::Denied(denied)) => (Ok(denied), None),
                Err(error) => (Err(error), None),
            }
        } else if harness.setup.shape == Shape::One {
            let limiter = &harness.limiters[0];
            let reserved = limiter.reserve(harness.key(0), costs[0], max_wait).await;
            (reserved.map(Admission::keep), None)
        } else {
            (charge.check().await, None)
        };
        match decision {
            Ok(decision) if decision.is_allowed() => {
                let at = harness.at(harness.now(), decision.delay());
                harness.add(id, at).await;
                let entry = &mut harness.ledger().entries[id];
                (entry.is_admitted, entry.permit) = (true, permit);
            }
            Err(Error::Store(error)) if error.kind() == ErrorKind::Full => {}
            Err(error) => panic!("{error}"),
            Ok(_) => {}
        }
    }

    /// Chooses one of the entries that can be settled.
    fn settleable(&self, which: &Index) -> Option<usize> {
        self.one(which, |entry| entry.permit.is_some() || entry.settle.is_some())
    }

    async fn settle(&self, which: &Index, limit: usize, quarters: u64) {
        if let Some(id) = self.settleable(which) {
            self.harness.settle(id, limit, quarters).await;
        }
    }

    async fn cancel(&self, which: &Index) {
        if let Some(id) = self.settleable(which) {
            self.harness.cancel(id).await;
        }
    }

    async fn respond(&mut self, which: &Index, is_charged: bool) {
        if let Some(id) = self.one(which, |entry| entry.respond.is_some()) {
            let respond = self.harness.ledger().entries[id].respond.take().unwrap();
            let _ = respond.send(is_charged); // the client may be gone
            self.drive().await;
        }
    }

    async fn drop_some(&mut self, which: &[Index]) {
        for which in which {
            if self.pending.is_empty() {
                break;
            }
            let gone = self.pending.swap_remove(which.index(self.pending.len()));
            self.drop(gone).await;
        }
    }

    async fn reset(&mut self, limit: usize) {
        let harness = self.harness.clone();
        self.calm().await;
        let waits = |it: &Entry| !it.is_admitted && !it.has_left;
        if harness.setup.shape == Shape::Also && harness.ledger().entries.iter().any(waits) {
            return; // they would exchange instants of before and after, which are not known here
        }
        // Limits that reserve together are lost together: otherwise the lost one would get
        // reservations for the same instants.
        let is_lost = |other: usize| harness.setup.shape == Shape::Also || other == limit % 2;
        for limit in (0..harness.limiters.len()).filter(|limit| is_lost(*limit)) {
            harness.limiters[limit].reset(harness.key(limit)).await.unwrap();
            harness.lose(limit);
        }
        // Otherwise the lost charges have the same instant as later ones.
        self.pass(Duration::from_millis(1)).await;
        self.settle_calls().await;
    }

    /// Waits for the answers to the calls that were sent before a loss.
    async fn settle_calls(&mut self) {
        self.calm().await;
        self.harness.settled();
    }

    /// Waits for the decisions about requests, also if they check again, or if their calls are sent
    /// after the peek: one that Redis decides before a loss must not be recorded after it.
    async fn calm(&mut self) {
        for _ in 0..3 {
            self.drive().await;
        }
    }

    async fn lose(&mut self) {
        self.calm().await;
        if (self.lose)() {
            for limit in 0..self.harness.limiters.len() {
                self.harness.lose(limit);
            }
            self.pass(Duration::from_millis(1)).await;
            self.settle_calls().await;
        }
    }

    async fn drop(&mut self, (id, request): (usize, Pending)) {
        drop(request);
        let waited = !self.harness.ledger().entries[id].is_admitted;
        match waited {
            true => self.harness.dropped(id).await,
            false => self.harness.all_ended(id, None).await,
        }
    }

    async fn play(mut self, steps: &[Step]) -> Result<(), TestCaseError> {
        for step in steps {
            self.step(step).await;
        }
        for gone in std::mem::take(&mut self.pending) {
            self.drop(gone).await;
        }
        let ledger = self.harness.ledger();
        for ((algorithm, quota), Account { uses, .. }) in
            zip(self.harness.setup.limits, &ledger.accounts)
        {
            prop_assert!(is_within(algorithm, quota, uses), "{algorithm:?} {quota}: {uses:#?}");
        }
        Ok(())
    }
}

/// Returns true if the uses are within the guarantee of the algorithm.
fn is_within(algorithm: Algorithm, quota: Quota, uses: &[Use]) -> bool {
    let (limit, window) = (quota.limit() as f64, quota.window().as_micros() as f64);
    let rate = limit / window;
    // With any grid, the sub-windows that lie entirely inside the window count at most the limit.
    let inside = |buckets: u32| window - (window / f64::from(buckets)).ceil();
    let holds = |last: usize| {
        let Use { at: end, losses, window: last_window, .. } = uses[last];
        let sum = |counts: &dyn Fn(&Use) -> bool| -> f64 {
            let before = uses[..=last].iter().filter(|u| u.losses == losses && u.at <= end);
            before.filter(|u| counts(u)).map(|u| u.used).sum()
        };
        match algorithm {
            // A grant can empty a window; then the next one opens.
            Algorithm::FixedWindow => {
                let is_near = |u: &Use| u.used < 0.0 && (u.window - last_window).abs() < window;
                sum(&|u| u.window == last_window || is_near(u)) <= limit
            }
            Algorithm::SlidingLog => sum(&|u| u.used < 0.0 || u.at > end - window) <= limit,
            Algorithm::SlidingWindow { buckets, .. } => {
                sum(&|u| u.used < 0.0 || u.at > end - inside(buckets)) <= limit
            }
            Algorithm::TokenBucket { refill: Refill::Continuous, .. } => {
                stretches(uses, last, true, |time| limit + rate * time + 1e-6)
            }
            Algorithm::TokenBucket { .. } => {
                stretches(uses, last, true, |time| limit + limit * (time / window).ceil())
            }
            _ => stretches(uses, last, false, |time| (time + 1.0) * rate + 1e-6),
        }
    };
    (0..uses.len()).filter(|last| uses[*last].is_check && uses[*last].used > 0.0).all(holds)
}

/// Compares the sum of each stretch of time with `max` of its length. A stretch ends with this
/// check and begins after the last loss. Granted units may have been used at any time before.
fn stretches(uses: &[Use], last: usize, last_counts: bool, max: impl Fn(f64) -> f64) -> bool {
    let Use { at: end, losses, used, .. } = uses[last];
    let before = uses[..last].iter().filter(|u| u.losses == losses && u.at <= end);
    let (granted, mut before): (Vec<&Use>, Vec<&Use>) = before.partition(|u| u.used < 0.0);
    before.sort_by(|a, b| b.at.total_cmp(&a.at));
    let mut sum: f64 = granted.iter().map(|u| u.used).sum();
    sum += if last_counts { used } else { 0.0 };
    let mut holds = sum <= max(0.0);
    for earlier in before {
        sum += earlier.used;
        holds &= sum <= max(end - earlier.at);
    }
    holds
}

fn histories() -> u32 {
    env::var("HISTORIES").map_or(1_500, |number| number.parse().unwrap())
}

fn run(
    cases: u32,
    steps: impl Strategy<Value = Vec<Step>>,
    play: impl Fn(Setup, &[Step]) -> Result<(), TestCaseError>,
) {
    let config = ProptestConfig { cases, failure_persistence: None, ..Default::default() };
    let result =
        TestRunner::new(config).run(&(setups(), steps), |(setup, steps)| play(setup, &steps));
    result.unwrap_or_else(|failure| panic!("{failure}"));
}

fn harness(setup: Setup, store: impl Store + Clone, name: &str, is_real: bool) -> Arc<Harness> {
    let limits = if setup.shape == Shape::One { 1 } else { 2 };
    let limiter = |limit: usize| {
        let (algorithm, quota) = setup.limits[limit];
        Limiter::new(&format!("{name}{limit}"), store.clone(), algorithm, quota)
    };
    let limiters = (0..limits).map(limiter).collect();
    Arc::new(Harness { setup, limiters, is_real, start: Instant::now(), ledger: Mutex::default() })
}

#[test]
fn no_history_in_memory_exceeds_the_guarantee() {
    run(histories(), steps(), |setup, steps| {
        let runtime =
            runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
        runtime.unwrap().block_on(async {
            let store = match setup.full {
                Some(when_full) => memory_store(1, when_full),
                None => MemoryStore::new(),
            };
            let others = Limiter::new(
                "others",
                store.clone(),
                Algorithm::SlidingLog,
                Quota::per_second(1_000_000),
            );
            let (is_full, number) = (setup.full.is_some(), Cell::new(0));
            // A key that is inserted into a store for one key has evicted the last one.
            let lose = move || {
                number.set(number.get() + 1);
                let key = number.get().to_string();
                let mut check = Box::pin(others.check(&*key));
                let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
                is_full && matches!(check.as_mut().poll(&mut cx), Poll::Ready(Ok(_)))
            };
            let harness = harness(setup, store, "limit", false);
            Player::new(harness, Box::new(lose)).play(steps).await
        })
    });
}

#[test]
fn no_history_over_redis_exceeds_the_guarantee() {
    let server = Arc::new(RedisServer::start());
    let runtime = runtime::Builder::new_current_thread().enable_all().build().unwrap();
    // A remembered denial would hide that Redis allows too much.
    let store = runtime.block_on(support::forgetful_store(&server));
    let number = Cell::new(0);
    run(histories() / 10, steps(), |mut setup, steps| {
        for (_, quota) in &mut setup.limits {
            *quota = Quota::per_day(quota.limit());
        }
        number.set(number.get() + 1);
        let server = server.clone();
        let lose = move || {
            let () = redis::cmd("FLUSHALL").query(&mut server.connection()).unwrap();
            true
        };
        runtime.block_on(async {
            let name = format!("limit-{}-", number.get());
            let harness = harness(setup, store.clone(), &name, true);
            Player::new(harness, Box::new(lose)).play(steps).await
        })
    });
}
