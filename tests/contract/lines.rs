//! Requests that wait without a reservation: random histories over either store, with scripted
//! time, whose oracle knows the promise alone, and single cases.

use std::{
    env,
    future::poll_fn,
    mem,
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::SeqCst},
        mpsc,
    },
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};

use tokio::{
    runtime::{Builder, Runtime},
    task::{JoinHandle, JoinSet, spawn_blocking},
    time::{Instant, advance, sleep, timeout},
};
use tower_ratelimit::{
    Algorithm, Charge, Error, Limiter, MemoryStore, Permit, Quota, RedisStore, store::Store,
};

use crate::support::{self, clock, server::RedisServer};

const SECOND: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);
/// The time after which a request that was called and is not polled holds up no others.
const STALL: Duration = Duration::from_millis(100);
/// The time after which a request sees what another process has returned.
const ELSEWHERE: Duration = Duration::from_millis(50);
/// The longest pause in which a process leaves units to others.
const PAUSE: Duration = Duration::from_millis(20);

type Answer = Result<Option<Option<Permit>>, Error>;

#[derive(Default)]
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, SeqCst);
    }
}

struct Waiting {
    number: u64,
    charge: Charge,
    /// The limits by name and key, each with the cost.
    limits: Vec<(&'static str, &'static str, u64)>,
    deadline: Instant,
    call: Pin<Box<dyn Future<Output = Answer>>>,
    woken: Arc<Woken>,
    /// True if the call is kept, and not polled.
    is_kept: bool,
    /// Since when it could be served, if no earlier request waits that is polled, or that nothing
    /// has called since it is kept. If it is kept, since when it can have been called.
    since: Option<Instant>,
}

impl Waiting {
    fn shares_key(&self, other: &Self) -> bool {
        let is_of = |&(name, key, _): &(_, _, u64)| {
            other.limits.iter().any(|(other, of, _)| (name, key) == (*other, *of))
        };
        self.limits.iter().any(is_of)
    }

    fn is_alike(&self, other: &Self) -> bool {
        self.limits.len() == 1 && other.limits.len() == 1 && self.shares_key(other)
    }

    fn poll(&mut self) -> Option<Answer> {
        self.woken.0.store(false, SeqCst);
        let waker = Waker::from(self.woken.clone());
        match self.call.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(answer) => Some(answer),
            Poll::Pending => None,
        }
    }

    async fn can_be_served(&self) -> bool {
        self.charge.peek().await.is_ok_and(|state| state.allows())
    }
}

/// A server whose clock is that of a history, and another process.
struct Shared<'a> {
    server: &'a RedisServer,
    store: RedisStore,
    elsewhere: Limiter,
    /// In milliseconds.
    clock: i64,
}

impl<'a> Shared<'a> {
    async fn new(server: &'a RedisServer) -> Self {
        redis::cmd("FLUSHALL").exec(&mut server.connection()).unwrap();
        // The time of the history falls behind that of the connections.
        let config = || clock::settable(server).deadline(3_600 * SECOND);
        let store = support::connected(config()).await;
        let other = support::connected(config()).await;
        let (algorithm, quota) = (Algorithm::concurrency(), Quota::concurrent(3));
        let elsewhere = Limiter::new("places", other, algorithm, quota);
        Self { server, store, elsewhere, clock: 0 }
    }

    /// Waits until the server has answered the calls that are under way.
    async fn answers(&self) {
        self.store.flush().await;
        // The replies to these calls come after those to earlier ones.
        for _ in 0..2 {
            self.elsewhere.peek("other").await.unwrap();
            self.store.ping().await.unwrap();
        }
    }
}

struct History<'a> {
    shared: Option<Shared<'a>>,
    random: fastrand::Rng,
    places: Limiter,
    tokens: Limiter,
    waiting: Vec<Waiting>,
    /// What is in use, with its key and cost if it takes places.
    permits: Vec<(Permit, Vec<(&'static str, u64)>)>,
    limit: u64,
    /// The end of the last block, which is known to those that it denies.
    blocked_until: Instant,
    next_number: u64,
    log: Vec<String>,
    served: u64,
}

impl<'a> History<'a> {
    fn new(seed: u64, store: impl Store + Clone, shared: Option<Shared<'a>>) -> Self {
        let (random, limit) = (fastrand::Rng::with_seed(seed), 3);
        let quota = Quota::per_second(10).burst(4);
        let places =
            Limiter::new("places", store.clone(), Algorithm::concurrency(), Quota::concurrent(3));
        let tokens = Limiter::new("tokens", store, Algorithm::token_bucket(), quota);
        let (waiting, permits, log) = (vec![], vec![], vec![]);
        let (blocked_until, next_number, served) = (Instant::now(), 0, 0);
        Self {
            shared,
            random,
            places,
            tokens,
            waiting,
            permits,
            limit,
            blocked_until,
            next_number,
            log,
            served,
        }
    }

    fn note(&mut self, what: String) {
        self.log.push(what);
    }

    fn arrive(&mut self) {
        let cost = self.random.u64(1..=3);
        let user = ["u", "v"][self.random.usize(..2)];
        let (a, b) = (("places", "a", cost), ("places", "b", 1));
        let (u, t) = (("tokens", user, 1), ("tokens", "t", cost));
        let (limits, holds) = match self.random.u8(..8) {
            0..3 => (vec![a], true),
            3 => (vec![b], true),
            4 => (vec![a, b], true),
            5 => (vec![t], true),
            6 => (vec![b, t], true),
            _ => (vec![u, t], false),
        };
        let charges = limits.iter().map(|&(name, key, cost)| match name {
            "places" => Charge::new(&self.places, key).cost(cost),
            _ if holds => Charge::new(&self.tokens, key).estimate(cost),
            _ => Charge::new(&self.tokens, key).cost(cost),
        });
        let charge = charges.reduce(Charge::and).unwrap();
        let wait = Duration::from_millis([5, 40, 300, 2_000, 60_000][self.random.usize(..5)]);
        let own = charge.clone();
        let call: Pin<Box<dyn Future<Output = Answer>>> = match holds {
            true => {
                Box::pin(async move { Ok(own.hold().max_wait(wait).await?.admitted().map(Some)) })
            }
            false => Box::pin(async move {
                Ok(own.check().max_wait(wait).await?.is_allowed().then_some(None))
            }),
        };
        let (number, deadline) = (self.next_number, Instant::now() + wait);
        self.next_number += 1;
        self.note(format!("{number} arrives: {limits:?}, {wait:?}"));
        let (woken, is_kept, since) = (Arc::<Woken>::default(), false, None);
        woken.0.store(true, SeqCst);
        self.waiting.push(Waiting {
            number,
            charge,
            limits,
            deadline,
            call,
            woken,
            is_kept,
            since,
        });
    }

    /// Polls the requests that were woken, until none is.
    async fn settle(&mut self) {
        let is_due = |waiting: &Waiting| waiting.woken.0.load(SeqCst) && !waiting.is_kept;
        let (mut quiet, mut overtakes) = (0, vec![]);
        loop {
            let Some(index) = self.waiting.iter().position(is_due) else {
                quiet += 1;
                match &self.shared {
                    Some(shared) if quiet <= 3 => shared.answers().await,
                    _ => break,
                }
                continue;
            };
            quiet = 0;
            // Those that a request must not overtake.
            let earlier = |&other: &usize| {
                !self.waiting[other].is_kept && self.waiting[other].shares_key(&self.waiting[index])
            };
            let earlier: Vec<usize> = (0..index).filter(earlier).collect();
            let mut overtaken = vec![];
            for other in earlier {
                // Over Redis, it may leave units of another key to other processes for now.
                if self.waiting[other].is_alike(&self.waiting[index])
                    || self.shared.is_none()
                        && self.is_first(other, |_| false)
                        && self.waiting[other].can_be_served().await
                {
                    overtaken.push(self.waiting[other].number);
                }
            }
            let Some(answer) = self.waiting[index].poll() else { continue };
            let waiting = self.waiting.remove(index);
            let (number, now) = (waiting.number, Instant::now());
            self.note(format!("{number}: {answer:?}"));
            match answer {
                Ok(Some(permit)) => {
                    self.served += 1;
                    overtakes.push((number, overtaken));
                    assert!(now <= waiting.deadline + 5 * MS, "{number} takes after its deadline");
                    if let Some(permit) = permit {
                        let places = waiting.limits.iter().filter(|limit| limit.0 == "places");
                        let places: Vec<_> = places.map(|&(_, key, cost)| (key, cost)).collect();
                        self.permits.push((permit, places.clone()));
                        for (key, _) in places {
                            let held = self.permits.iter().flat_map(|(_, places)| places);
                            let held: u64 =
                                held.filter(|(of, _)| *of == key).map(|(_, cost)| cost).sum();
                            assert!(held <= self.limit, "{held} of {}", self.limit);
                        }
                    }
                }
                Ok(None) => {
                    let only_places = waiting.limits.iter().all(|limit| limit.0 == "places");
                    let is_early =
                        now < waiting.deadline && now >= self.blocked_until && only_places;
                    assert!(!is_early, "{number} is denied before its deadline");
                }
                Err(error) => {
                    let is_above = matches!(error, Error::CostAboveQuota { .. });
                    let costs = waiting.limits.iter().map(|limit| limit.2);
                    assert!(is_above && costs.max() > Some(self.limit), "{error:?}");
                }
            }
            if self.shared.is_none() {
                self.assert_order(&mem::take(&mut overtakes));
            }
        }
        // Over Redis, requests check side by side: an earlier one can have its answer later.
        self.assert_order(&overtakes);
    }

    fn assert_order(&self, overtakes: &[(u64, Vec<u64>)]) {
        for (number, overtaken) in overtakes {
            let waits = |other: &u64| self.waiting.iter().any(|it| it.number == *other);
            let overtaken: Vec<_> = overtaken.iter().copied().filter(waits).collect();
            assert!(overtaken.is_empty(), "{number} overtakes {overtaken:?}");
        }
    }

    /// Returns whether no earlier request waits for one of its keys, except for `absent` ones.
    fn is_first(&self, index: usize, absent: impl Fn(&Waiting) -> bool) -> bool {
        let waiting = &self.waiting[index];
        let earlier = &mut self.waiting[..index].iter();
        earlier.all(|other| absent(other) || !other.shares_key(waiting))
    }

    /// Checks that no request sleeps beside free units, or beyond its deadline.
    async fn check(&mut self, mut slack: Duration) {
        let (now, mut lateness) = (Instant::now(), 2 * MS);
        if self.shared.is_some() {
            (slack, lateness) = (slack + ELSEWHERE + PAUSE, 5 * MS);
        }
        for index in 0..self.waiting.len() {
            // A request that is kept counts until it is called, and for some time after that.
            let is_asleep = self.is_first(index, |other| other.is_kept && other.since.is_some())
                && self.waiting[index].can_be_served().await;
            let kept = self.waiting[..index].iter().filter(|other| other.is_kept).count() as u32;
            let waiting = &mut self.waiting[index];
            if waiting.is_kept {
                let is_called = is_asleep || now >= waiting.deadline;
                waiting.since = waiting.since.or(is_called.then_some(now));
                continue;
            }
            waiting.since = is_asleep.then(|| waiting.since.unwrap_or(now));
            let slack = if kept > 0 { (STALL + 50 * MS) * kept } else { slack };
            let slept = waiting.since.map_or(Duration::ZERO, |since| now - since);
            let number = waiting.number;
            assert!(!is_asleep || slept < slack, "{number} sleeps for {slept:?}");
            let is_over = now > waiting.deadline + lateness;
            assert!(!is_over, "{number} waits beyond its deadline");
        }
    }

    async fn step(&mut self) {
        let count = self.waiting.len();
        match self.random.u8(..20) {
            0..6 => self.arrive(),
            6 if self.shared.is_none() => self.arrive(),
            7..11 if !self.permits.is_empty() => {
                let index = self.random.usize(..self.permits.len());
                let (permit, _) = self.permits.swap_remove(index);
                match self.random.u8(..3) {
                    0 => permit.cancel(),
                    1 => permit.settle(1),
                    _ => drop(permit),
                }
                self.note("a permit ends".to_owned());
            }
            6 if self.shared.is_some() => self.take_elsewhere().await,
            11 if count > 0 => {
                let index = self.random.usize(..count);
                let dropped = self.waiting.remove(index);
                if dropped.is_kept {
                    // The time for which it has delayed those behind it does not count.
                    self.waiting[index..].iter_mut().for_each(|behind| behind.since = None);
                }
                self.note(format!("{} is dropped", dropped.number));
            }
            12 if count > 0 => {
                let index = self.random.usize(..count);
                (self.waiting[index].is_kept, self.waiting[index].since) = (true, None);
                self.note(format!("{} is kept", self.waiting[index].number));
            }
            13 => {
                for waiting in &mut self.waiting {
                    // It may have been woken in between.
                    (waiting.is_kept, waiting.since) = (false, None);
                    waiting.woken.0.store(true, SeqCst);
                }
                self.note("none is kept".to_owned());
            }
            14 => {
                let key = ["t", "u", "v"][self.random.usize(..3)];
                self.tokens.refund(key, self.random.u64(1..3)).await.unwrap();
                self.note(format!("a refund of {key}"));
            }
            15 => {
                self.tokens.reset("t").await.unwrap();
                self.note("a reset of t".to_owned());
            }
            16 => {
                // A lower limit forgets nothing that is in use.
                self.limit = self.limit.max(self.random.u64(3..6));
                self.places.set_quota(Quota::concurrent(self.limit)).unwrap();
                if let Some(shared) = &self.shared {
                    shared.elsewhere.set_quota(Quota::concurrent(self.limit)).unwrap();
                }
                self.note(format!("{} places", self.limit));
            }
            17 => {
                let key = ["a", "b"][self.random.usize(..2)];
                self.places.block(key, 20 * MS).await.unwrap();
                self.blocked_until = Instant::now() + 20 * MS;
                if self.random.bool() {
                    self.places.unblock(key).await.unwrap();
                }
                self.note(format!("a block of {key}"));
            }
            _ => {
                let time = self.random.u32(1..60);
                self.note(format!("{time} ms"));
                for _ in 0..time {
                    self.pass().await;
                }
                return;
            }
        }
        self.settle().await;
        self.check(Duration::from_micros(1)).await;
    }

    /// Lets a millisecond pass.
    async fn pass(&mut self) {
        if let Some(shared) = &mut self.shared {
            shared.clock += 1;
            clock::set(shared.server, shared.clock * 1_000);
        }
        advance(MS).await;
        self.settle().await;
        self.check(3 * MS).await;
    }

    /// Takes a place in another process, if one is free.
    async fn take_elsewhere(&mut self) {
        let (key, cost) = (["a", "b"][self.random.usize(..2)], self.random.u64(1..=2));
        let Some(shared) = &self.shared else { return };
        let answer = shared.elsewhere.hold(key, cost).await.unwrap();
        if let Some(permit) = answer.admitted() {
            self.permits.push((permit, vec![(key, cost)]));
            self.note(format!("{cost} of {key} are taken elsewhere"));
        }
    }
}

/// The promise, in one process: no request is admitted while an earlier one waits for the same key
/// and is polled; none sleeps beside free units; none takes units after its deadline; and the
/// counts are exact.
#[tokio::test(start_paused = true)]
async fn no_history_overtakes_a_request_or_lets_it_sleep_beside_free_units() {
    let mut served = 0;
    for seed in seeds(100) {
        served += play(seed, History::new(seed, MemoryStore::new(), None)).await;
    }
    println!("{served} served");
    assert!(served > 0);
}

#[tokio::test(start_paused = true)]
async fn no_history_over_redis_overtakes_a_request_or_lets_it_sleep_beside_free_units() {
    let (server, mut served) = (RedisServer::start(), 0);
    // While it runs, the time stands still, also while the server is waited for.
    let (end, ended) = mpsc::channel::<()>();
    let blocking = spawn_blocking(move || ended.recv());
    for seed in seeds(10) {
        let shared = Shared::new(&server).await;
        served += play(seed, History::new(seed, shared.store.clone(), Some(shared))).await;
    }
    drop(end);
    assert!(blocking.await.unwrap().is_err());
    println!("{served} served");
    assert!(served > 0);
}

/// The histories: that of `SEED` in the environment, or as many as `HISTORIES`.
fn seeds(default: u64) -> Range<u64> {
    let number = |name| env::var(name).ok().map(|number| number.parse::<u64>().unwrap());
    match number("SEED") {
        Some(seed) => seed..seed + number("HISTORIES").unwrap_or(1),
        None => 0..number("HISTORIES").map_or(default, |all| all * default / 100),
    }
}

/// Returns how many requests were served.
async fn play(seed: u64, mut history: History<'_>) -> u64 {
    for _ in 0..80 {
        let mut step = Box::pin(history.step());
        let done = poll_fn(|cx| match catch_unwind(AssertUnwindSafe(|| step.as_mut().poll(cx))) {
            Ok(Poll::Pending) => Poll::Pending,
            Ok(Poll::Ready(())) => Poll::Ready(None),
            Err(panic) => Poll::Ready(Some(panic)),
        });
        let failed = done.await;
        drop(step);
        if let Some(panic) = failed {
            println!("SEED={seed}\n{}", history.log.join("\n"));
            resume_unwind(panic);
        }
    }
    history.served
}

fn places(count: u64) -> Limiter {
    let (store, quota) = (MemoryStore::new(), Quota::concurrent(count));
    Limiter::new("places", store, Algorithm::concurrency(), quota)
}

async fn hold(limiter: &Limiter, key: &'static str, units: u64) -> Permit {
    limiter.hold(key, units).await.unwrap().admitted().unwrap()
}

/// Starts a request that waits, and lets it begin to.
async fn start(charge: Charge, wait: Duration) -> JoinHandle<Result<Option<Permit>, Error>> {
    let task = tokio::spawn(async move { Ok(charge.hold().max_wait(wait).await?.admitted()) });
    tokio::task::yield_now().await;
    task
}

#[tokio::test(start_paused = true)]
async fn a_request_for_all_places_is_served_before_later_ones_for_one() {
    let places = places(2);
    let permit = hold(&places, "key", 1).await;
    let large = start(Charge::new(&places, "key").cost(2), 60 * SECOND).await;
    for _ in 0..1_000 {
        let small = start(Charge::new(&places, "key"), 10 * MS).await;
        sleep(MS).await;
        drop(small);
    }
    let denied = places.hold("key", 1).max_wait(10 * MS).await.unwrap();
    let denied = denied.into_result().unwrap_err();
    assert_eq!((denied.remaining(), denied.retry_after()), (1, None), "it may not overtake");
    drop(permit);
    let begin = Instant::now();
    assert!(large.await.unwrap().unwrap().is_some());
    assert_eq!(begin.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn units_that_come_back_in_any_way_call_the_first_request() {
    let day = Duration::from_secs(86_400);
    for way in ["refund", "charge", "reset", "quota", "unblock", "reservation", "acquire"] {
        let (store, quota) = (MemoryStore::new(), Quota::per_day(10));
        let tokens = Limiter::new("tokens", store, Algorithm::sliding_log(), quota);
        tokens.spend("key", if way == "unblock" { 1 } else { 6 }).await.unwrap();
        let reservation = tokens.reserve("key", 4, day).await.unwrap().admitted();
        let own = tokens.clone();
        // It waits for an instant that is reserved.
        let acquire = tokio::spawn(async move { own.acquire("other", 10).await });
        tokio::task::yield_now().await;
        if way == "unblock" {
            tokens.block("key", day / 2).await.unwrap();
        }
        let waiting = start(Charge::new(&tokens, "key").estimate(2), day).await;
        sleep(10 * SECOND).await;
        assert!(!waiting.is_finished(), "{way}");
        match way {
            "refund" => drop(tokens.refund("key", 2).await.unwrap()),
            "charge" => drop(Charge::new(&tokens, "key").cost(2).refund().await.unwrap()),
            "reset" => tokens.reset("key").await.unwrap(),
            "quota" => tokens.set_quota(Quota::per_day(12)).unwrap(),
            "unblock" => drop(tokens.unblock("key").await.unwrap()),
            _ => drop(reservation),
        }
        acquire.abort();
        let begin = Instant::now();
        assert!(waiting.await.unwrap().unwrap().is_some(), "{way}");
        assert!(begin.elapsed() <= MS, "{way}: {:?}", begin.elapsed());
    }
}

#[tokio::test]
async fn units_that_come_back_call_the_first_request_over_redis() {
    let server = RedisServer::start();
    let store = support::redis_store(&server).await;
    let tokens = Limiter::new("tokens", store, Algorithm::sliding_log(), Quota::per_day(10));
    let day = Duration::from_secs(86_400);
    for way in ["refund", "reset", "quota", "unblock", "reservation"] {
        tokens.set_quota(Quota::per_day(10)).unwrap();
        tokens.spend(way, if way == "unblock" { 1 } else { 6 }).await.unwrap();
        let reservation = tokens.reserve(way, 4, day).await.unwrap().admitted();
        if way == "unblock" {
            tokens.block(way, day / 2).await.unwrap();
        }
        let calls = server.calls("evalsha");
        let waiting = start(Charge::new(&tokens, way).estimate(2), 2 * day).await;
        while server.calls("evalsha") == calls {
            sleep(MS).await; // of a real server
        }
        match way {
            "refund" => drop(tokens.refund(way, 2).await.unwrap()),
            "reset" => tokens.reset(way).await.unwrap(),
            "quota" => tokens.set_quota(Quota::per_day(12)).unwrap(),
            "unblock" => drop(tokens.unblock(way).await.unwrap()),
            _ => drop(reservation),
        }
        let served = timeout(60 * SECOND, waiting).await;
        assert!(served.expect(way).unwrap().unwrap().is_some(), "{way}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_moves_to_another_line_calls_the_next_one() {
    let places = places(1);
    let (one, _two) = (hold(&places, "one", 1).await, hold(&places, "two", 1).await);
    let both = Charge::new(&places, "one").and(Charge::new(&places, "two"));
    let _first = start(both, 60 * SECOND).await;
    let second = start(Charge::new(&places, "one"), 60 * SECOND).await;
    sleep(SECOND).await;
    assert!(!second.is_finished());
    drop(one);
    let begin = Instant::now();
    assert!(second.await.unwrap().unwrap().is_some());
    assert_eq!(begin.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn a_call_that_is_kept_and_not_polled_delays_others_for_a_tenth_of_a_second() {
    let places = places(1);
    let permit = hold(&places, "key", 1).await;
    let mut kept = vec![];
    for _ in 0..2 {
        let places = places.clone();
        let mut call = Box::pin(async move { places.hold("key", 1).max_wait(60 * SECOND).await });
        assert!(call.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        kept.push(call);
    }
    let second = start(Charge::new(&places, "key"), 60 * SECOND).await;
    drop(permit);
    let begin = Instant::now();
    let permit = second.await.unwrap().unwrap().unwrap();
    assert!(begin.elapsed() <= 2 * STALL + 5 * MS, "{:?}", begin.elapsed());
    drop(permit);
    for call in kept {
        assert!(call.await.unwrap().is_admitted());
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_can_never_be_served_any_more_is_an_error() {
    let places = places(2);
    let _permit = hold(&places, "key", 1).await;
    let waiting = start(Charge::new(&places, "key").cost(2), 60 * SECOND).await;
    places.set_quota(Quota::concurrent(1)).unwrap();
    assert!(matches!(waiting.await.unwrap(), Err(Error::CostAboveQuota { .. })));
}

/// Runs clients that arrive 30 times per second, where 20 are served, and leave after a second.
/// Returns the instants at which they are served.
async fn impatient(limiter: &Limiter, seconds: u32, random: &mut fastrand::Rng) -> Vec<Duration> {
    let (begin, served) = (Instant::now(), Arc::<Mutex<Vec<_>>>::default());
    let mut clients = JoinSet::new();
    while begin.elapsed() < seconds * SECOND {
        let (limiter, served) = (limiter.clone(), served.clone());
        let patience = SECOND / 2 + SECOND.mul_f64(random.f64());
        clients.spawn(timeout(patience, async move {
            let decision = limiter.try_acquire("key", 1, 10 * SECOND).await.unwrap();
            if decision.is_allowed() {
                served.lock().unwrap().push(begin.elapsed());
            }
        }));
        sleep(SECOND / 30).await;
    }
    clients.join_all().await;
    let served = served.lock().unwrap();
    served.clone()
}

#[tokio::test(start_paused = true)]
async fn instants_of_requests_that_give_up_are_taken_over_and_none_is_used_twice() {
    let mut random = fastrand::Rng::with_seed(7);
    let burst = 3;
    for algorithm in [Algorithm::token_bucket(), Algorithm::SlidingLog, Algorithm::LeakyBucket] {
        let is_bucket = algorithm == Algorithm::token_bucket();
        let quota = match algorithm {
            Algorithm::LeakyBucket => Quota::per_second(20).burst(200),
            Algorithm::SlidingLog => Quota::per_second(20),
            _ => Quota::per_second(20).burst(burst),
        };
        let limiter = Limiter::new("vendor", MemoryStore::new(), algorithm, quota);
        let served = impatient(&limiter, 30, &mut random).await;
        let steady = served.iter().filter(|at| **at >= 10 * SECOND && **at < 30 * SECOND).count();
        println!("{algorithm}: {} per second", steady as f64 / 20.0);
        assert!(steady >= 18 * 20, "{algorithm}: {steady} in 20 s");
        for (first, from) in served.iter().enumerate() {
            for (last, to) in served.iter().enumerate().skip(first) {
                // A timer is up to a millisecond late.
                let time = (*to - *from + 2 * MS).as_secs_f64();
                let most = match is_bucket {
                    true => burst + (time * 20.0) as u64,
                    false if algorithm == Algorithm::LeakyBucket => 1 + (time * 20.0) as u64,
                    false if time < 1.0 => 20,
                    false => u64::MAX,
                };
                assert!((last - first + 1) as u64 <= most, "{algorithm}: {from:?} to {to:?}");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_reservation_that_is_dropped_lets_those_behind_it_go_earlier() {
    let quota = Quota::per_second(1).burst(1);
    let vendor = Limiter::new("vendor", MemoryStore::new(), Algorithm::token_bucket(), quota);
    assert!(vendor.check("key").await.unwrap().is_allowed());
    let reservation = vendor.reserve("key", 1, 60 * SECOND).await.unwrap().admitted().unwrap();
    let begin = Instant::now();
    let mut waiting = vec![];
    for _ in 0..3 {
        let vendor = vendor.clone();
        waiting.push(tokio::spawn(async move {
            assert!(vendor.acquire("key", 1).await.unwrap().is_allowed());
            begin.elapsed().as_secs()
        }));
        tokio::task::yield_now().await;
    }
    drop(reservation);
    waiting.remove(1).abort();
    tokio::task::yield_now().await;
    let next = vendor.reserve("key", 1, 60 * SECOND).await.unwrap().admitted().unwrap();
    assert_eq!(next.delay(), 3 * SECOND, "two instants are given back");
    for (number, task) in waiting.into_iter().enumerate() {
        assert_eq!(task.await.unwrap(), 1 + number as u64);
    }
}

/// Returns a bucket of this size that is empty, and restores 10 units per second.
async fn empty_bucket(burst: u64) -> Limiter {
    let quota = Quota::per_second(10).burst(burst);
    let tokens = Limiter::new("tokens", MemoryStore::new(), Algorithm::token_bucket(), quota);
    assert!(tokens.try_acquire("key", burst, SECOND).await.unwrap().is_allowed());
    tokens
}

/// Starts a request for units of a key and one of another, for which no instant is reserved.
async fn start_check(tokens: &Limiter, cost: u64, wait: Duration) -> JoinHandle<Option<Duration>> {
    let charge = Charge::new(tokens, "key").cost(cost).and(Charge::new(tokens, "other"));
    let begin = Instant::now();
    let task = tokio::spawn(async move {
        let decision = charge.check().max_wait(wait).await.unwrap();
        decision.is_allowed().then(|| begin.elapsed())
    });
    tokio::task::yield_now().await;
    task
}

#[tokio::test(start_paused = true)]
async fn the_cost_of_the_first_request_counts_once_for_those_behind_it() {
    let tokens = empty_bucket(100).await;
    let large = start_check(&tokens, 100, 60 * SECOND).await;
    let small = start_check(&tokens, 1, 11 * SECOND).await;
    let too_late = start_check(&tokens, 10, 11 * SECOND).await;
    sleep(MS).await;
    assert!(too_late.is_finished(), "11.1 s");
    assert_eq!(too_late.await.unwrap(), None);
    assert!(large.await.unwrap().unwrap() >= 10 * SECOND);
    let served = small.await.unwrap().expect("it is served in time");
    assert!(served >= 10 * SECOND + 100 * MS && served <= 10 * SECOND + 105 * MS, "{served:?}");
}

#[tokio::test(start_paused = true)]
async fn estimates_of_earlier_requests_deny_no_later_one() {
    let tokens = empty_bucket(100).await;
    let estimate = || Charge::new(&tokens, "key").estimate(100);
    let mut waiting = vec![];
    for _ in 0..3 {
        waiting.push(start(estimate(), 11 * SECOND).await);
    }
    for task in waiting {
        task.await.unwrap().unwrap().expect("the one before it has cancelled").cancel();
    }
}

#[tokio::test(start_paused = true)]
async fn requests_that_a_block_has_kept_waiting_are_served_together_at_its_end() {
    let quota = Quota::per_second(10).burst(5);
    let tokens = Limiter::new("tokens", MemoryStore::new(), Algorithm::token_bucket(), quota);
    tokens.block("key", 10 * SECOND).await.unwrap();
    let mut waiting = vec![];
    for _ in 0..5 {
        waiting.push(start_check(&tokens, 1, 10 * SECOND + 50 * MS).await);
    }
    for task in waiting {
        assert!(task.await.unwrap().is_some_and(|after| after >= 10 * SECOND));
    }
}

/// Begins a call for a place that is kept, and not polled again.
fn kept(places: &Limiter) -> Pin<Box<dyn Future<Output = Result<Option<Permit>, Error>>>> {
    let places = places.clone();
    let mut call: Pin<Box<dyn Future<Output = _>>> =
        Box::pin(
            async move { Ok(places.hold("key", 1).max_wait(3_600 * SECOND).await?.admitted()) },
        );
    assert!(call.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    call
}

#[tokio::test(start_paused = true)]
async fn any_number_of_kept_calls_delays_those_behind_them_for_some_time_alone() {
    for count in [3, 4, 10, 30] {
        for (behind, last) in [(1, 0), (2, 0), (5, 0), (1, 1), (2, 5)] {
            let places = places(1);
            let permit = hold(&places, "key", 1).await;
            let _kept: Vec<_> = (0..count).map(|_| kept(&places)).collect();
            let mut waiting = vec![];
            for _ in 0..behind {
                waiting.push(start(Charge::new(&places, "key"), 3_600 * SECOND).await);
            }
            let _last: Vec<_> = (0..last).map(|_| kept(&places)).collect();
            sleep(10 * SECOND).await;
            drop(permit);
            let begin = Instant::now();
            for task in waiting {
                drop(task.await.unwrap().unwrap().expect("a place is free"));
            }
            // They are called one, three, twelve and 48 at a time.
            let rounds = [1, 4, 16, 64].iter().filter(|called| **called < count).count() as u32;
            let most = (STALL + 30 * MS) * (rounds + 1);
            assert!(begin.elapsed() <= most, "{count}, {behind}: {:?}", begin.elapsed());
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_kept_call_delays_no_others_beyond_its_deadline() {
    let places = places(2);
    let _permit = hold(&places, "key", 1).await;
    let charge = Charge::new(&places, "key").cost(2);
    let mut kept = Box::pin(async move { charge.hold().max_wait(SECOND).await });
    assert!(kept.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    let begin = Instant::now();
    let behind = start(Charge::new(&places, "key"), 60 * SECOND).await;
    assert!(behind.await.unwrap().unwrap().is_some(), "a place is free");
    assert!(begin.elapsed() <= SECOND + STALL + 30 * MS, "{:?}", begin.elapsed());
    assert!(!kept.await.unwrap().is_admitted());
}

#[tokio::test(start_paused = true)]
async fn a_kept_call_that_came_from_another_line_takes_no_call_from_the_others() {
    let places = places(1);
    let elsewhere = hold(&places, "elsewhere", 1).await;
    let both = Charge::new(&places, "key").and(Charge::new(&places, "elsewhere"));
    let mut kept = Box::pin(async move { both.hold().max_wait(60 * SECOND).await });
    let mut poll = || kept.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending();
    assert!(poll());
    let permit = hold(&places, "key", 1).await;
    let behind = start(Charge::new(&places, "key"), 60 * SECOND).await;
    sleep(SECOND).await;
    drop(elsewhere);
    assert!(poll()); // it goes to the line of the other key, before the one that stands there
    sleep(SECOND).await;
    drop(permit);
    let begin = Instant::now();
    assert!(behind.await.unwrap().unwrap().is_some(), "a place is free");
    assert!(begin.elapsed() <= STALL + 30 * MS, "{:?}", begin.elapsed());
}

/// Runs a request until it waits, in a runtime of its own, which stands still then.
fn kept_in_another_runtime(
    places: &Limiter,
) -> (Pin<Box<dyn Future<Output = Answer> + Send>>, Runtime) {
    let places = places.clone();
    let mut call: Pin<Box<dyn Future<Output = Answer> + Send>> =
        Box::pin(async move { Ok(Some(places.hold("key", 1).max_wait(SECOND).await?.admitted())) });
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let polled = call.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert!(polled.is_pending());
        tokio::task::yield_now().await;
    });
    (call, runtime)
}

#[test]
fn a_runtime_that_ends_or_stands_still_holds_up_no_request_of_another_one() {
    for ends in [true, false] {
        let places = places(1);
        let runtime =
            Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        let permit = runtime.block_on(hold(&places, "key", 1));
        let (first, still) = std::thread::scope(|scope| {
            scope.spawn(|| kept_in_another_runtime(&places)).join().unwrap()
        });
        let still = Some(still).filter(|_| !ends);
        let begin = runtime.block_on(async {
            let waiting = start(Charge::new(&places, "key"), SECOND / 2).await;
            drop(permit);
            let begin = Instant::now();
            assert!(waiting.await.unwrap().unwrap().is_some(), "a place is free");
            begin.elapsed()
        });
        assert!(begin <= STALL + 30 * MS, "{begin:?}");
        drop((first, still));
    }
}

struct Panicking;

impl Wake for Panicking {
    fn wake(self: Arc<Self>) {
        panic!("a foreign waker");
    }
}

#[tokio::test(start_paused = true)]
async fn a_waker_that_panics_stops_no_others() {
    let places = places(1);
    let keys: Vec<String> = (0..20).map(|number| number.to_string()).collect();
    let (mut permits, mut panicking, mut waiting) = (vec![], vec![], vec![]);
    for (number, key) in keys.iter().enumerate() {
        permits.push(places.hold(key, 1).await.unwrap().admitted().unwrap());
        let charge = Charge::new(&places, key.clone());
        if number % 2 == 0 {
            waiting.push(start(charge, 3_600 * SECOND).await);
            continue;
        }
        let mut call = Box::pin(async move { charge.hold().max_wait(3_600 * SECOND).await });
        let waker = Waker::from(Arc::new(Panicking));
        assert!(call.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        panicking.push(call);
    }
    places.set_quota(Quota::concurrent(2)).unwrap(); // calls all lines
    let begin = Instant::now();
    for task in waiting {
        assert!(task.await.unwrap().unwrap().is_some());
    }
    assert_eq!(begin.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn an_instant_of_another_quota_denies_and_delays_no_request() {
    let (store, quota) = (MemoryStore::new(), Quota::per_minute(1).burst(1));
    let slow = Limiter::new("tokens", store, Algorithm::token_bucket(), quota);
    let fast = slow.with_quota(Quota::per_minute(1_000).burst(1)).unwrap();
    for is_dropped in [true, false] {
        let key = if is_dropped { "dropped" } else { "late" };
        let begin = Instant::now();
        let start = |tokens: &Limiter, wait| {
            let charge = Charge::new(tokens, key).and(Charge::new(tokens, "other"));
            let call = async move { charge.check().max_wait(wait).await.unwrap().is_allowed() };
            tokio::spawn(async move { (call.await, begin.elapsed()) })
        };
        slow.spend(key, 1).await.unwrap();
        slow.reset("other").await.unwrap();
        let first = start(&slow, 61 * SECOND);
        tokio::task::yield_now().await;
        let second = start(&fast, 30 * SECOND);
        sleep(MS).await;
        assert!(!second.is_finished(), "its quota restores a unit in time");
        if is_dropped {
            first.abort();
            let (is_allowed, after) = second.await.unwrap();
            assert!(is_allowed && after <= 200 * MS, "{after:?}");
        } else {
            assert!(first.await.unwrap().0);
            assert!(!second.await.unwrap().0, "it may not overtake");
        }
    }
}

/// The request before it leaves at a deadline before the instant at which both could be served.
#[tokio::test(start_paused = true)]
async fn an_instant_beyond_the_deadline_of_one_request_is_kept_for_the_next_one() {
    let tokens = empty_bucket(4).await;
    tokens.reset("key").await.unwrap();
    let _held = hold(&tokens, "key", 2).await;
    tokens.spend("key", 1).await.unwrap();
    let first = start(Charge::new(&tokens, "key").estimate(2), 40 * MS).await;
    let second = start(Charge::new(&tokens, "key").estimate(2), 60 * SECOND).await;
    let begin = Instant::now();
    assert!(first.await.unwrap().unwrap().is_none());
    assert!(second.await.unwrap().unwrap().is_some());
    assert!(begin.elapsed() <= 101 * MS, "{:?}", begin.elapsed());
}

#[tokio::test(start_paused = true)]
async fn an_instant_before_the_first_one_is_for_the_request_that_waits_for_longest() {
    let quota = Quota::per_second(1).burst(1);
    let vendor = Limiter::new("vendor", MemoryStore::new(), Algorithm::token_bucket(), quota);
    let begin = Instant::now();
    let start = || {
        let vendor = vendor.clone();
        tokio::spawn(async move {
            assert!(vendor.acquire("key", 1).await.unwrap().is_allowed());
            begin.elapsed().as_secs()
        })
    };
    vendor.spend("key", 10).await.unwrap();
    let first = start();
    tokio::task::yield_now().await;
    vendor.reset("key").await.unwrap();
    assert!(vendor.check("key").await.unwrap().is_allowed());
    let second = start();
    let (first, second) = (first.await.unwrap(), second.await.unwrap());
    assert!(first == 1 && second > 1, "{first}, {second}");
}
