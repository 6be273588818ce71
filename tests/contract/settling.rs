//! Random histories through the public API: requests wait, are dropped, settle, cancel or are not
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
use tower_ratelimit::{
    Algorithm, Charge, Decision, Error, Limiter, MemoryStore, Quota, RateLimitLayer, Refill, Store,
    WhenFull,
};

use crate::support::{self, server::RedisServer};

const ALGORITHMS: [Algorithm; 7] = [
    Algorithm::FixedWindow,
    Algorithm::SlidingLog,
    Algorithm::SlidingWindow { buckets: 2 },
    Algorithm::SlidingWindow { buckets: 10 },
    Algorithm::token_bucket(),
    Algorithm::TokenBucket { refill: Refill::Interval, overdraft: 0 },
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
    charge_handle: bool,
    charge_when: bool,
    /// In thousandths of the first window.
    max_wait: Option<u32>,
    /// A store that has room for one key, and takes another for it.
    full: Option<WhenFull>,
}

/// What the handler of a request does.
#[derive(Clone, Copy, Debug)]
struct Plan {
    id: usize,
    costs: [u32; 2],
    settles: Option<(usize, u32)>,
    /// Whether its response is charged; none if that comes later.
    responds: Option<bool>,
}

#[derive(Clone, Debug)]
enum Step {
    Request {
        costs: [u32; 2],
        settles: Option<(usize, u32)>,
        responds: Option<bool>,
    },
    /// A check without the layer, and the longest wait in thousandths of a window. What follows it
    /// can be done once, by the limiter, or any number of times, by its charge.
    Check {
        costs: [u32; 2],
        max_wait: u32,
        by_limiter: bool,
    },
    /// Of what was admitted: of which limit, and how much of its cost was used, in quarters.
    Settle(Index, usize, u32),
    Cancel(Index),
    /// Of a request whose handler waits: whether it is charged.
    Respond(Index, bool),
    /// Clients that go away.
    Drop(Vec<Index>),
    Grant(usize, u32),
    Reset(usize),
    /// All state is lost: in memory, to another key.
    Lose,
    Pass(u32),
}

fn setups() -> impl Strategy<Value = Setup> {
    let window = prop_oneof![Just(1_000_000), 100_000_u64..10_000_000, Just(86_400_000_000)];
    let quota =
        (1_u32..30, window).prop_map(|(limit, us)| Quota::new(limit, Duration::from_micros(us)));
    let limit = (prop::sample::select(&ALGORITHMS[..]), quota);
    let shape = prop_oneof![3 => Just(Shape::One), 1 => Just(Shape::Also), 1 => Just(Shape::And)];
    let full = prop_oneof![
        2 => Just(None),
        1 => Just(Some(WhenFull::RejectNewKeys)),
        1 => Just(Some(WhenFull::EvictSoonest)),
    ];
    let max_wait = prop::option::weighted(0.8, 0_u32..5_000);
    let flags = (any::<bool>(), any::<bool>());
    (shape, [limit.clone(), limit], flags, max_wait, full).prop_map(
        |(shape, limits, (charge_handle, charge_when), max_wait, full)| {
            let full = full.filter(|_| shape == Shape::One);
            Setup { shape, limits, charge_handle, charge_when, max_wait, full }
        },
    )
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let costs = [1_u32..6, 1_u32..6];
    let settles = prop::option::weighted(0.4, (0_usize..2, 0_u32..8));
    let responds = prop_oneof![3 => Just(Some(true)), 2 => Just(Some(false)), 3 => Just(None)];
    let wait = prop_oneof![1 => Just(0), 2 => 0_u32..3_000];
    let pass = prop_oneof![4 => 0_u32..100, 1 => 100_u32..1_500];
    let index = any::<Index>;
    let step = prop_oneof![
        12 => (costs.clone(), settles, responds)
            .prop_map(|(costs, settles, responds)| Step::Request { costs, settles, responds }),
        4 => (costs, wait, any::<bool>())
            .prop_map(|(costs, max_wait, by_limiter)| Step::Check { costs, max_wait, by_limiter }),
        6 => (index(), 0_usize..2, 0_u32..8).prop_map(|(which, limit, used)| Step::Settle(which, limit, used)),
        2 => index().prop_map(Step::Cancel),
        4 => (index(), any::<bool>()).prop_map(|(which, charged)| Step::Respond(which, charged)),
        3 => prop::collection::vec(index(), 1..6).prop_map(Step::Drop),
        1 => (0_usize..2, 1_u32..5).prop_map(|(limit, units)| Step::Grant(limit, units)),
        1 => (0_usize..2).prop_map(Step::Reset),
        1 => Just(Step::Lose),
        8 => pass.prop_map(Step::Pass),
    ];
    prop::collection::vec(step, 1..80)
}

/// Something that was used, in the order in which it was admitted. Times are in microseconds.
#[derive(Clone, Copy, Debug)]
struct Use {
    at: f64,
    /// Negative if it was granted.
    used: f64,
    /// Whether it could have been denied.
    is_check: bool,
    /// How often the state had been lost.
    losses: usize,
    /// The end of its window, for those that are fixed.
    window: f64,
}

/// What was used of one limit.
#[derive(Debug, Default)]
struct Account {
    uses: Vec<Use>,
    losses: usize,
    /// What may be returned only after a loss to come.
    late: f64,
}

/// A request, or a check.
#[derive(Debug, Default)]
struct Entry {
    costs: [u32; 2],
    /// For each limit its uses.
    places: [Vec<usize>; 2],
    asked: f64,
    is_admitted: bool,
    is_cancelled: bool,
    decision: Option<Decision>,
    /// To settle with.
    charge: Option<Charge>,
    by_limiter: bool,
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

    /// What was spent before a loss is not in the state, so that its return is a grant: but for
    /// what was reserved for an instant to come, unless by chance others are reserved for the same.
    fn lower(&mut self, place: usize, units: f64, now: f64, window: f64) {
        self.uses[place].used -= units;
        let Use { at, losses, .. } = self.uses[place];
        let is_same = |it: &Use| it.at == at || it.at.is_infinite();
        let same = self.uses.iter().any(|it| it.losses == self.losses && is_same(it));
        if losses < self.losses && (at <= now || same) && units > 0.0 {
            self.add(now, -units, false, window);
        }
    }

    fn lose(&mut self, now: f64) {
        self.losses += 1;
        if self.late > 0.0 {
            self.add(now, -self.late, false, 0.0);
        }
    }
}

struct World {
    setup: Setup,
    limiters: Vec<Limiter>,
    /// Over Redis, time does not matter: its windows are days long.
    is_real: bool,
    start: Instant,
    ledger: Mutex<Ledger>,
}

const KEYS: [&str; 2] = ["alice", "everybody"];

impl World {
    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap()
    }

    fn now(&self) -> f64 {
        if self.is_real { 0.0 } else { self.start.elapsed().as_micros() as f64 }
    }

    /// When a request that has to wait so long goes on.
    fn at(&self, asked: f64, wait: Duration) -> f64 {
        let is_short = self.is_real && wait < Duration::from_secs(60);
        asked + if is_short { 0.0 } else { wait.as_micros() as f64 }
    }

    fn key(&self, limit: usize) -> &'static str {
        KEYS[if self.setup.shape == Shape::And { limit } else { 0 }]
    }

    fn charge(&self, costs: [u32; 2]) -> Charge {
        let part =
            |limit: usize| Charge::new(&self.limiters[limit], self.key(limit)).cost(costs[limit]);
        match self.setup.shape {
            Shape::One => part(0),
            Shape::Also => part(0).also(&self.limiters[1]).cost(costs[1]),
            Shape::And => part(0).and(part(1)),
        }
    }

    /// The end of a limit's newest window, and of the one that is open now.
    async fn windows(&self, limit: usize) -> [f64; 2] {
        let limiter = &self.limiters[limit];
        if limiter.algorithm() != Algorithm::FixedWindow {
            return [0.0; 2];
        }
        let length = limiter.quota().window().as_micros() as f64;
        let mut reset =
            limiter.peek(self.key(limit)).await.unwrap().reset_after().as_micros() as f64;
        if self.is_real || reset == 0.0 {
            reset = (reset / length).ceil().max(1.0) * length;
        }
        let ahead = ((reset - 1.0) / length).floor();
        [reset, reset - ahead * length].map(|it| self.now() + it)
    }

    /// Notes that a request will go on, or has a reservation.
    async fn add(&self, id: usize, at: f64) {
        for limit in 0..self.limiters.len() {
            let [newest, _] = self.windows(limit).await;
            let Ledger { accounts, entries, .. } = &mut *self.ledger();
            let Entry { costs, places, .. } = &mut entries[id];
            // Over Redis, what is to come later never comes.
            let is_check = !self.is_real || at == 0.0;
            places[limit].push(accounts[limit].add(at, costs[limit].into(), is_check, newest));
        }
    }

    async fn admitted(&self, id: usize, decision: Decision, charge: Option<Charge>) {
        let is_reserved = !self.ledger().entries[id].places[0].is_empty();
        if !is_reserved {
            assert!(self.is_real || decision.delay().is_zero());
            self.add(id, self.now()).await;
        }
        let Ledger { accounts, entries, .. } = &mut *self.ledger();
        let entry = &mut entries[id];
        let at = self.at(entry.asked, decision.delay());
        for (account, places) in zip(accounts, &entry.places).filter(|_| is_reserved) {
            for place in places {
                let told = &mut account.uses[*place].at;
                let is_same = told.is_infinite() || *told == at;
                assert!(self.is_real || is_same, "{told} was told before, and then {at}");
                *told = at;
            }
        }
        (entry.is_admitted, entry.charge, entry.decision) = (true, charge, Some(decision));
    }

    /// Adjusts what is noted for a limit, the latest first.
    async fn used(&self, id: usize, limit: usize, used: u32, in_background: bool) {
        let [newest, open] = self.windows(limit).await;
        let now = self.now();
        let Ledger { accounts, entries, .. } = &mut *self.ledger();
        let (account, places) = (&mut accounts[limit], &mut entries[id].places[limit]);
        let total: f64 = places.iter().map(|place| account.uses[*place].used).sum();
        let mut above = total - f64::from(used);
        for place in places.iter().rev() {
            let units = above.clamp(0.0, account.uses[*place].used);
            if self.is_real && in_background && account.uses[*place].at <= now {
                account.late += units;
            }
            account.lower(*place, units, now, open);
            above -= units;
        }
        if above < 0.0 {
            places.push(account.add(now, -above, false, newest));
        }
    }

    async fn settle(&self, id: usize, limit: usize, quarters: u32) {
        let limit = limit % self.limiters.len();
        let (charge, decision, cost, name) = {
            let Entry { charge, decision, costs, .. } = &self.ledger().entries[id];
            let name = self.limiters[limit].name().to_owned();
            (charge.clone(), decision.clone(), costs[limit], name)
        };
        let used = (cost * quarters).div_ceil(4);
        let result = match (charge, decision) {
            (Some(charge), _) => charge.settle(&name, used).await,
            (None, Some(decision)) if self.ledger().entries[id].by_limiter => {
                self.ledger().entries[id].decision = None; // once
                self.limiters[limit].settle(self.key(limit), &decision, used).await
            }
            _ => return,
        };
        match result {
            Ok(()) if self.ledger().entries[id].is_cancelled => {}
            Ok(()) => self.used(id, limit, used, false).await,
            Err(Error::Store(error)) if error.is_full() => {} // and nothing was spent
            Err(error) => panic!("{error}"),
        }
    }

    async fn cancel(&self, id: usize) {
        let (charge, decision) = {
            let entry = &mut self.ledger().entries[id];
            (entry.charge.clone(), entry.decision.clone())
        };
        match (charge, decision) {
            (Some(charge), Some(decision)) => charge.cancel(decision).await.unwrap(),
            (None, Some(decision)) if self.ledger().entries[id].by_limiter => {
                self.ledger().entries[id].decision = None;
                self.limiters[0].cancel(self.key(0), decision).await.unwrap();
            }
            _ => return,
        }
        self.cancelled(id, false).await;
    }

    async fn cancelled(&self, id: usize, in_background: bool) {
        if !std::mem::replace(&mut self.ledger().entries[id].is_cancelled, true) {
            for limit in 0..self.limiters.len() {
                self.used(id, limit, 0, in_background).await;
            }
        }
    }

    fn lose(&self, limit: usize) {
        let now = self.now();
        self.ledger().accounts[limit].lose(now);
    }
}

/// The handler of a request.
async fn serve(world: Arc<World>, request: Request<Body>) -> Result<Response<Body>, Infallible> {
    let extensions = request.extensions();
    let plan: Plan = *extensions.get().unwrap();
    let decision: Decision = extensions.get().cloned().unwrap();
    world.ledger().busy += 1;
    world.admitted(plan.id, decision, extensions.get().cloned()).await;
    if let Some((limit, quarters)) = plan.settles {
        world.settle(plan.id, limit, quarters).await;
    }
    world.ledger().busy -= 1;
    let is_charged = match plan.responds {
        Some(is_charged) => is_charged,
        None => {
            let (respond, response) = oneshot::channel();
            world.ledger().entries[plan.id].respond = Some(respond);
            response.await.unwrap_or(true)
        }
    };
    if !is_charged && world.setup.charge_when {
        world.ledger().busy += 1;
        world.cancelled(plan.id, true).await;
        world.ledger().busy -= 1; // and it responds at once
    }
    let status = if is_charged { StatusCode::OK } else { StatusCode::BAD_GATEWAY };
    Ok(Response::builder().status(status).body(Body::empty()).unwrap())
}

type Pending = Pin<Box<dyn Future<Output = StatusCode>>>;

/// Plays a history.
struct Player {
    world: Arc<World>,
    service: BoxCloneService<Request<Body>, StatusCode, Infallible>,
    pending: Vec<(usize, Pending)>,
    lose: Box<dyn Fn() -> bool>,
}

impl Player {
    fn new(world: Arc<World>, lose: Box<dyn Fn() -> bool>) -> Self {
        let Setup { shape, limits, charge_handle, charge_when, max_wait, .. } = world.setup;
        let costs = |head: &Parts| head.extensions.get::<Plan>().unwrap().costs;
        let mut layer = match shape {
            Shape::One => {
                let key = world.key(0).to_owned();
                let layer = RateLimitLayer::new(&world.limiters[0], move |_: &Parts| key.clone());
                layer.cost(move |head: &Parts| costs(head)[0])
            }
            _ => {
                let limiters = world.limiters.clone();
                let keys = [0, 1].map(|limit| world.key(limit));
                RateLimitLayer::by_rule(move |head: &Parts| {
                    let [first, second] = costs(head);
                    let charge = Charge::new(&limiters[0], keys[0]).cost(first);
                    match shape {
                        Shape::And => charge.and(Charge::new(&limiters[1], keys[1]).cost(second)),
                        _ => charge.also(&limiters[1]).cost(second),
                    }
                })
            }
        };
        layer = layer.charge_handle(charge_handle);
        if charge_when {
            layer = layer.charge_when(|response| response.status == StatusCode::OK);
        }
        if let Some(thousandths) = max_wait {
            layer = layer.max_wait(limits[0].1.window() * thousandths / 1_000);
        }
        let handler = {
            let world = world.clone();
            service_fn(move |request| serve(world.clone(), request))
        };
        let service = layer.layer(handler).map_response(|response| response.status());
        Self { world, service: BoxCloneService::new(service), pending: vec![], lose }
    }

    /// Polls all requests.
    async fn poll(&mut self) {
        poll_fn(|cx| {
            self.pending.retain_mut(|(_, request)| request.as_mut().poll(cx).is_pending());
            Poll::Ready(())
        })
        .await;
    }

    /// Lets all requests go on as far as they can without time passing.
    async fn drive(&mut self) {
        self.poll().await;
        if self.world.is_real {
            // Its answer comes after theirs, by the same connection.
            let _ = self.world.limiters[0].peek("nobody").await.unwrap();
            self.poll().await;
            while self.world.ledger().busy > 0 {
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

    fn open(&self, costs: [u32; 2]) -> (usize, [u32; 2]) {
        let fit = |limit: usize| costs[limit].min(self.world.setup.limits[limit].1.limit());
        let (costs, asked) = ([fit(0), fit(1)], self.world.now());
        let entries = &mut self.world.ledger().entries;
        entries.push(Entry { costs, asked, ..Entry::default() });
        (entries.len() - 1, costs)
    }

    /// One of the entries of which this holds.
    fn one(&self, which: &Index, fits: impl Fn(&Entry) -> bool) -> Option<usize> {
        let ledger = self.world.ledger();
        let all = ledger.entries.iter().enumerate().filter(|(_, entry)| fits(entry));
        let all: Vec<usize> = all.map(|(id, _)| id).collect();
        (!all.is_empty()).then(|| *which.get(&all))
    }

    async fn step(&mut self, step: &Step) {
        let world = self.world.clone();
        let settles = |entry: &Entry| entry.charge.is_some() || entry.by_limiter;
        match step {
            Step::Request { costs, settles, responds } => {
                let (id, costs) = self.open(*costs);
                let told = world.charge(costs).peek().await.unwrap();
                let wait = told.retry_after().unwrap_or(told.delay());
                let at = match world.setup.shape {
                    Shape::One => world.at(world.now(), wait),
                    _ if world.is_real => f64::INFINITY,
                    _ => f64::NEG_INFINITY, // not known: what becomes of it may be a grant
                };
                let mut request = Request::new(Body::empty());
                request.extensions_mut().insert(Plan {
                    id,
                    costs,
                    settles: *settles,
                    responds: *responds,
                });
                let asked = self.service.clone().oneshot(request);
                self.pending.push((id, Box::pin(async move { asked.await.unwrap() })));
                let now = world.now();
                self.drive().await;
                let waits = self.pending.iter().any(|(other, _)| *other == id);
                let is_admitted = world.ledger().entries[id].is_admitted;
                if waits && !is_admitted && world.setup.shape != Shape::And {
                    assert!(world.setup.shape != Shape::One || world.is_real || at > now);
                    world.add(id, at).await;
                }
            }
            Step::Check { costs, max_wait, by_limiter } => {
                let (id, costs) = self.open(*costs);
                let by_limiter = *by_limiter && world.setup.shape == Shape::One;
                let window = world.setup.limits[0].1.window();
                let max_wait = window * *max_wait / 1_000;
                let charge = world.charge(costs);
                let checked = match world.setup.shape {
                    Shape::One => {
                        world.limiters[0].check_within(world.key(0), costs[0], max_wait).await
                    }
                    _ => charge.check().await,
                };
                match checked {
                    Ok(decision) if decision.is_allowed() => {
                        let at = world.at(world.now(), decision.delay());
                        world.add(id, at).await;
                        let entry = &mut world.ledger().entries[id];
                        if !by_limiter {
                            entry.charge = Some(charge.decided(&decision));
                        }
                        (entry.is_admitted, entry.by_limiter) = (true, by_limiter);
                        entry.decision = Some(decision);
                    }
                    Err(Error::Store(error)) if error.is_full() => {}
                    Err(error) => panic!("{error}"),
                    Ok(_) => {}
                }
            }
            Step::Settle(which, limit, quarters) => {
                if let Some(id) = self.one(which, settles) {
                    world.settle(id, *limit, *quarters).await;
                }
            }
            Step::Cancel(which) => {
                if let Some(id) = self.one(which, settles) {
                    world.cancel(id).await;
                }
            }
            Step::Respond(which, is_charged) => {
                if let Some(id) = self.one(which, |entry| entry.respond.is_some()) {
                    let respond = world.ledger().entries[id].respond.take().unwrap();
                    let _ = respond.send(*is_charged); // the client may be gone
                    self.drive().await;
                }
            }
            Step::Drop(all) => {
                for which in all {
                    if self.pending.is_empty() {
                        break;
                    }
                    let gone = self.pending.swap_remove(which.index(self.pending.len()));
                    self.drop(gone).await;
                }
            }
            Step::Grant(limit, units) => {
                let limit = limit % world.limiters.len();
                let limiter = &world.limiters[limit];
                if !matches!(limiter.algorithm(), Algorithm::SlidingWindow { .. }) {
                    let [_, open] = world.windows(limit).await;
                    limiter.refund(world.key(limit), *units).await.unwrap();
                    let now = world.now();
                    world.ledger().accounts[limit].add(now, -f64::from(*units), false, open);
                }
            }
            Step::Reset(limit) => {
                // Of limits that are reserved together, one that is lost alone gets reservations
                // for the same instants.
                let is_lost = |it: usize| world.setup.shape == Shape::Also || it == limit % 2;
                for limit in (0..world.limiters.len()).filter(|it| is_lost(*it)) {
                    world.limiters[limit].reset(world.key(limit)).await.unwrap();
                    world.lose(limit);
                }
                // Otherwise the lost charges have the same instant as later ones.
                self.pass(Duration::from_millis(1)).await;
            }
            Step::Lose => {
                self.drive().await;
                if (self.lose)() {
                    for limit in 0..world.limiters.len() {
                        world.lose(limit);
                    }
                    self.pass(Duration::from_millis(1)).await;
                }
            }
            Step::Pass(_) if world.is_real => self.drive().await,
            Step::Pass(thousandths) => {
                self.pass(world.setup.limits[0].1.window() * *thousandths / 1_000).await;
            }
        }
    }

    async fn drop(&mut self, (id, request): (usize, Pending)) {
        drop(request);
        let waited = !self.world.ledger().entries[id].is_admitted;
        if waited {
            self.world.cancelled(id, true).await;
        }
    }

    async fn play(mut self, steps: &[Step]) -> Result<(), TestCaseError> {
        for step in steps {
            self.step(step).await;
        }
        for gone in std::mem::take(&mut self.pending) {
            self.drop(gone).await;
        }
        let ledger = self.world.ledger();
        for ((algorithm, quota), Account { uses, .. }) in
            zip(self.world.setup.limits, &ledger.accounts)
        {
            prop_assert!(is_kept(algorithm, quota, uses), "{algorithm:?} {quota}: {uses:#?}");
        }
        Ok(())
    }
}

/// Whether what was used keeps the promise of the algorithm.
fn is_kept(algorithm: Algorithm, quota: Quota, uses: &[Use]) -> bool {
    let (limit, window) = (f64::from(quota.limit()), quota.window().as_micros() as f64);
    let rate = limit / window;
    // Whatever the grid is: the sub-windows that lie wholly inside of the window hold no more than
    // the limit.
    let inside = |buckets: u32| window - (window / f64::from(buckets)).ceil();
    let holds = |last: usize| {
        let Use { at: end, losses, window: own, .. } = uses[last];
        let sum = |counts: &dyn Fn(&Use) -> bool| -> f64 {
            let all = uses[..=last].iter().filter(|it| it.losses == losses && it.at <= end);
            all.filter(|it| counts(it)).map(|it| it.used).sum()
        };
        match algorithm {
            // A grant can empty a window, and the next one opens then.
            Algorithm::FixedWindow => {
                let is_near = |it: &Use| it.used < 0.0 && (it.window - own).abs() < window;
                sum(&|it| it.window == own || is_near(it)) <= limit
            }
            Algorithm::SlidingLog => sum(&|it| it.used < 0.0 || it.at > end - window) <= limit,
            Algorithm::SlidingWindow { buckets } => {
                sum(&|it| it.used < 0.0 || it.at > end - inside(buckets)) <= limit
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

/// Holds the most against the sum of each stretch of time that ends with this check and begins
/// after the last loss. Whenever units were granted, what they were granted for may have been used
/// before.
fn stretches(uses: &[Use], last: usize, last_counts: bool, most: impl Fn(f64) -> f64) -> bool {
    let Use { at: end, losses, used, .. } = uses[last];
    let before = uses[..last].iter().filter(|it| it.losses == losses && it.at <= end);
    let (granted, mut before): (Vec<&Use>, Vec<&Use>) = before.partition(|it| it.used < 0.0);
    before.sort_by(|a, b| b.at.total_cmp(&a.at));
    let mut sum: f64 = granted.iter().map(|it| it.used).sum();
    sum += if last_counts { used } else { 0.0 };
    let mut holds = sum <= most(0.0);
    for it in before {
        sum += it.used;
        holds &= sum <= most(end - it.at);
    }
    holds
}

fn histories() -> u32 {
    env::var("HISTORIES").map_or(1_500, |it| it.parse().unwrap())
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

fn world(setup: Setup, store: impl Store + Clone, name: &str, is_real: bool) -> Arc<World> {
    let limits = if setup.shape == Shape::One { 1 } else { 2 };
    let limiter = |limit: usize| {
        let (algorithm, quota) = setup.limits[limit];
        Limiter::named(&format!("{name}{limit}"), store.clone(), algorithm, quota)
    };
    let limiters = (0..limits).map(limiter).collect();
    Arc::new(World { setup, limiters, is_real, start: Instant::now(), ledger: Mutex::default() })
}

#[test]
fn no_history_in_memory_lets_more_through_than_the_promise() {
    run(histories(), steps(), |setup, steps| {
        let runtime =
            runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
        runtime.unwrap().block_on(async {
            let store = match setup.full {
                Some(when_full) => MemoryStore::with_max_keys(1).when_full(when_full),
                None => MemoryStore::new(),
            };
            let others = Limiter::named(
                "others",
                store.clone(),
                Algorithm::SlidingLog,
                Quota::per_second(1_000_000),
            );
            let (is_full, number) = (setup.full.is_some(), Cell::new(0));
            // A key that is admitted to a store for one has taken the place of the one before.
            let lose = move || {
                number.set(number.get() + 1);
                let key = number.get().to_string();
                let mut check = Box::pin(others.check(&*key));
                let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
                is_full && matches!(check.as_mut().poll(&mut cx), Poll::Ready(Ok(_)))
            };
            let world = world(setup, store, "limit", false);
            Player::new(world, Box::new(lose)).play(steps).await
        })
    });
}

#[test]
fn no_history_over_redis_lets_more_through_than_the_promise() {
    let server = Arc::new(RedisServer::start());
    let runtime = runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let store = runtime.block_on(support::redis_store(&server));
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
            let world = world(setup, store.clone(), &name, true);
            Player::new(world, Box::new(lose)).play(steps).await
        })
    });
}
