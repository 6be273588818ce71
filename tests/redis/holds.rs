//! Permits over Redis: renewals, processes that die, servers that lose their memory or hang, and
//! the calls that ends take.

use std::{
    array,
    cell::RefCell,
    future,
    pin::pin,
    process::Stdio,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use redis::{
    Cmd, Pipeline, RedisFuture, Value,
    aio::{ConnectionLike, MultiplexedConnection},
};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::Command,
    runtime,
    sync::watch,
    task::JoinSet,
};
use tower::{Layer, ServiceExt};
use tower_ratelimit::{
    Admission, Algorithm, Charge, Limiter, MemoryStore, Permit, Quota, RateLimitLayer, RedisStore,
    config::Limits,
    store::{KeyState, Store},
};
use tower_test::mock;

use crate::support::{
    self, clock,
    load::{eventually, until, until_server},
    proxy::Proxy,
    recorder::{Recorder, observed},
    server::RedisServer,
};

/// As short as a lifetime can be, times four: the first renewal is due after 50 ms. Only for tests
/// in which holds expire: a busy machine may take that long for the next step.
const LIFETIME: Duration = Duration::from_millis(400);
/// Long enough for a busy machine to renew a hold before it expires: the first renewal is due after
/// half a second, and the hold expires after a second without it.
const RENEWED: Duration = Duration::from_secs(4);

const ALGORITHMS: [Algorithm; 4] = [
    Algorithm::FixedWindow,
    Algorithm::SlidingLog,
    Algorithm::sliding_window(),
    Algorithm::token_bucket(),
];

fn limiter(store: &RedisStore, algorithm: Algorithm) -> Limiter {
    let name = format!("tokens-{algorithm}");
    Limiter::new(&name, store.clone(), algorithm, Quota::per_day(10))
}

async fn hold(limiter: &Limiter, units: u64) -> Permit {
    limiter.hold("alice", units).await.unwrap().admitted().unwrap()
}

async fn state(limiter: &Limiter) -> KeyState {
    limiter.peek("alice").await.unwrap()
}

async fn until_held(limiter: &Limiter, held: u64, remaining: u64) {
    until(&format!("{held} held, {remaining} left"), async || {
        let state = limiter.peek("alice").await;
        state.is_ok_and(|state| (state.held(), state.remaining()) == (held, remaining))
    })
    .await;
}

/// The time to live of the key, in milliseconds.
fn time_to_live(server: &RedisServer, limiter: &Limiter) -> i64 {
    let algorithm = limiter.algorithm();
    let key = format!("ratelimit:{}:{algorithm}:{{alice}}", limiter.name());
    redis::cmd("PTTL").arg(key).query(&mut server.connection()).unwrap()
}

/// Moves the clock of the server beyond the lifetime of holds, after each of their renewals.
/// Returns the time then.
async fn renew(server: &RedisServer, limiters: &[Limiter], mut micros: i64) -> i64 {
    let values = || -> Vec<Vec<u8>> {
        let name = |it: &Limiter| format!("ratelimit:{}:{}:{{alice}}", it.name(), it.algorithm());
        let names: Vec<_> = limiters.iter().map(name).collect();
        redis::cmd("MGET").arg(names).query(&mut server.connection()).expect("the server runs")
    };
    // At first, a hold lives for a second, and after a renewal for four, with up to a fourth more.
    for ahead in [1, 2_000] {
        let before = values();
        micros += ahead * 1_000;
        clock::set(server, micros);
        until_server("the holds are renewed", || {
            before.iter().zip(values()).all(|(before, value)| *before != value)
        })
        .await;
    }
    micros += 3_000_000;
    clock::set(server, micros);
    micros
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn units_stay_held_as_long_as_their_permit() {
    let server = RedisServer::start();
    let recorder = Recorder::new();
    let store = support::connected(clock::settable(&server)).await;
    let store = observed(store, recorder.clone());
    let limiters = ALGORITHMS.map(|algorithm| limiter(&store, algorithm).hold_lifetime(RENEWED));
    let mut permits = vec![];
    for limiter in &limiters {
        permits.push(hold(limiter, 8).await);
    }
    renew(&server, &limiters, 0).await;
    for (limiter, permit) in limiters.iter().zip(permits) {
        until("the permit has not expired", async || !permit.is_expired()).await;
        assert_eq!((state(limiter).await.held(), state(limiter).await.remaining()), (8, 2));
        permit.settle(3);
        until_held(limiter, 0, 7).await;
    }
    assert_eq!(recorder.take_of("hold lost"), [""; 0]);
}

#[tokio::test]
async fn a_process_that_dies_frees_its_units_after_one_lifetime() {
    let server = RedisServer::start();
    let store = support::forgetful_store(&server).await;
    for algorithm in ALGORITHMS {
        let limiter = limiter(&store, algorithm);
        // Of a process that cannot reach the server any more: it renews nothing.
        let proxy = Proxy::start(&server);
        let other = support::connected(support::config(&proxy.url())).await;
        let other = Limiter::new(limiter.name(), other, algorithm, Quota::per_day(10));
        let _permit = hold(&other.hold_lifetime(4 * LIFETIME), 8).await;
        proxy.drop_all(true);
        assert_eq!(state(&limiter).await.held(), 8, "{algorithm}");
        // They count as used then.
        until_held(&limiter, 0, 2).await;
        assert!(time_to_live(&server, &limiter) > 0);
    }
}

/// The runtime of the process that has returned them ends, and nothing else sends them.
#[tokio::test]
async fn after_a_flush_all_that_was_returned_is_back() {
    let server = RedisServer::start();
    let store = support::forgetful_store(&server).await;
    let url = server.url();
    let exiting = thread::spawn(move || {
        let runtime = runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let store = support::connected(support::config(&url)).await;
            store.flush().await; // there is nothing yet
            for algorithm in ALGORITHMS {
                let limiter = limiter(&store, algorithm);
                hold(&limiter, 8).await.settle(3);
                let wait = Duration::from_secs(86_400);
                let first = limiter.reserve("bob", 10, wait).await.unwrap();
                drop([first, limiter.reserve("bob", 10, wait).await.unwrap()]);
            }
            store.flush().await;
        });
    });
    tokio::task::spawn_blocking(|| exiting.join().unwrap()).await.unwrap();
    for algorithm in ALGORITHMS {
        let limiter = limiter(&store, algorithm);
        let state = state(&limiter).await;
        assert_eq!((state.held(), state.remaining()), (0, 7), "{algorithm}");
        assert_eq!(limiter.peek("bob").await.unwrap().remaining(), 10, "{algorithm}");
    }
}

#[test]
fn a_permit_can_be_dropped_while_its_runtime_shuts_down() {
    let server = RedisServer::start();
    let runtime = || runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let first = runtime();
    let limiter = first.block_on(async {
        let store = support::forgetful_store(&server).await;
        let limiter = limiter(&store, Algorithm::token_bucket());
        // Some of them are dropped after the task that sends the ends, whatever the order.
        for _ in 0..8 {
            let permit = hold(&limiter, 1).await;
            tokio::spawn(async {
                let _permit = permit;
                future::pending::<()>().await;
            });
        }
        limiter
    });
    drop(first);
    runtime().block_on(async {
        hold(&limiter, 1).await.cancel(); // sends the ends, too
        until_held(&limiter, 0, 2).await;
    });
}

/// A runtime in a thread, which ends when it is dropped.
fn other_runtime() -> runtime::Runtime {
    runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

/// The runtime of the first permit, in which they all are renewed, ends.
#[tokio::test]
async fn permits_are_renewed_after_the_end_of_the_runtime_that_renewed_them() {
    let server = RedisServer::start();
    let url = server.url();
    let first = other_runtime();
    let connecting = async move {
        let store = support::connected(support::config(&url).denial_ttl(Duration::ZERO)).await;
        // A hold expires after a quarter of this, if it is not renewed.
        let limiter = limiter(&store, Algorithm::token_bucket()).hold_lifetime(RENEWED);
        (hold(&limiter, 1).await, limiter)
    };
    let (of_first, limiter) = first.spawn(connecting).await.unwrap();
    let holding = limiter.clone();
    // It does not run meanwhile.
    let idle = thread::spawn(move || {
        let runtime = runtime::Builder::new_current_thread().enable_all().build().unwrap();
        (runtime.block_on(hold(&holding, 1)), runtime)
    });
    let (of_idle, idle) = idle.join().unwrap();
    let permit = hold(&limiter, 2).await;
    first.shutdown_background();
    tokio::time::sleep(RENEWED / 2).await; // of a real server
    assert!(!permit.is_expired());
    assert_eq!(state(&limiter).await.held(), 4);
    drop([of_first, of_idle]);
    idle.shutdown_background();
    permit.cancel();
    until_held(&limiter, 0, 8).await;
}

#[tokio::test]
async fn an_end_is_sent_after_the_runtime_and_the_store_are_gone() {
    let server = RedisServer::start();
    let recorder = Recorder::new();
    let store = observed(support::forgetful_store(&server).await, recorder.clone());
    let dropped = limiter(&store, Algorithm::token_bucket());
    drop(store);
    let runtime = other_runtime();
    let holding = dropped.clone();
    let permit = runtime.spawn(async move { hold(&holding, 8).await }).await.unwrap();
    runtime.shutdown_background();
    drop(dropped);
    permit.settle(3);
    let store = support::forgetful_store(&server).await;
    until_held(&limiter(&store, Algorithm::token_bucket()), 0, 7).await;
    assert_eq!(recorder.take_of("hold unsettled"), [""; 0]);
}

#[tokio::test]
async fn a_server_that_has_lost_its_memory_holds_the_units_again_within_a_renewal() {
    let server = RedisServer::start();
    let recorder = Recorder::new();
    let store = observed(support::forgetful_store(&server).await, recorder.clone());
    for algorithm in ALGORITHMS {
        let limiter = limiter(&store, algorithm).hold_lifetime(RENEWED);
        let permit = hold(&limiter, 8).await;
        recorder.take();
        redis::cmd("FLUSHALL").exec(&mut server.connection()).unwrap();
        until_held(&limiter, 8, 2).await;
        assert!(!permit.is_expired());
        permit.settle(3);
        until_held(&limiter, 0, 7).await;
        let events = recorder.take_of("hold lost");
        assert_eq!(events.len(), 1, "{algorithm}: {events:?}");
    }
}

#[tokio::test]
async fn a_permit_says_that_it_has_expired() {
    let server = RedisServer::start();
    let recorder = Recorder::new();
    let store = observed(support::forgetful_store(&server).await, recorder.clone());
    let limiter = limiter(&store, Algorithm::token_bucket()).hold_lifetime(LIFETIME);
    let permit = hold(&limiter, 8).await;
    server.freeze();
    until("the permit has expired", async || permit.is_expired()).await;
    tokio::time::sleep(2 * LIFETIME).await; // the server has no time meanwhile
    server.thaw();
    until("the store says so", async || !recorder.take_of("hold expired").is_empty()).await;
    until_held(&limiter, 0, 2).await;
    permit.settle(9); // one more than was spent
    until_held(&limiter, 0, 1).await;
}

#[tokio::test]
async fn an_end_that_has_no_effect_is_reported() {
    let recorder = Recorder::new();
    let (mut hung, mut stopped) = (RedisServer::start(), RedisServer::start());
    for (server, stops) in [(&mut hung, false), (&mut stopped, true)] {
        let store = observed(support::forgetful_store(server).await, recorder.clone());
        let limiter = limiter(&store, Algorithm::token_bucket()).hold_lifetime(LIFETIME);
        let [used, settled] = [hold(&limiter, 2).await, hold(&limiter, 5).await];
        if stops {
            server.kill()
        } else {
            server.freeze()
        }
        drop(used);
        settled.settle(3);
        tokio::time::sleep(2 * LIFETIME).await; // of a real server
        if !stops {
            server.thaw(); // it executes the end after the hold has expired
        }
        let events = RefCell::new(vec![]);
        until("the end is reported", async || {
            events.borrow_mut().extend(recorder.take_of("hold unsettled"));
            !events.borrow().is_empty()
        })
        .await;
        assert_eq!(
            events.take(),
            [format!("hold unsettled {} alice 5 3", limiter.name())],
            "{stops}"
        );
    }
}

#[tokio::test]
async fn the_ends_of_many_keys_share_calls() {
    let server = RedisServer::start();
    let store = support::forgetful_store(&server).await;
    let limiter = limiter(&store, Algorithm::token_bucket());
    let mut permits = JoinSet::new();
    for user in 0..500 {
        let limiter = limiter.clone();
        permits.spawn(async move { limiter.hold(format!("user-{user}"), 8).await });
    }
    let permits = permits.join_all().await;
    let before = server.calls("evalsha") + server.calls("eval");
    drop(permits);
    until("all permits have ended", async || {
        limiter.peek("user-499").await.unwrap().held() == 0
            && limiter.peek("user-0").await.unwrap().held() == 0
    })
    .await;
    let peeks = server.calls("evalsha") + server.calls("eval") - before;
    assert!(peeks < 250, "{peeks} calls for 500 ends");
}

#[tokio::test]
async fn a_hold_whose_caller_has_gone_returns_its_units() {
    let server = RedisServer::start();
    let config = support::config(&server.url()).deadline(Duration::from_millis(100));
    let store = support::connected(config.denial_ttl(Duration::ZERO)).await;
    for algorithm in ALGORITHMS {
        let limiter = limiter(&store, algorithm);
        eventually(async || limiter.peek("alice").await).await;
        server.freeze();
        let holding = tokio::spawn({
            let limiter = limiter.clone();
            async move { limiter.hold("alice", 8).await.map(|_| ()) }
        });
        assert!(holding.await.unwrap().is_err(), "the server does not answer");
        server.thaw();
        until_held(&limiter, 0, 10).await;
        assert!(time_to_live(&server, &limiter) < 0, "{algorithm}: nothing is left");
    }
}

#[tokio::test]
async fn a_log_is_not_rewritten_for_a_hold_and_takes_the_fast_path_again() {
    let server = RedisServer::start();
    let store = support::forgetful_store(&server).await;
    let quota = Quota::per_day(1_000);
    let limiter = Limiter::new("log", store, Algorithm::SlidingLog, quota);
    for _ in 0..200 {
        let _ = limiter.check("alice").await.unwrap();
    }
    for used in [0, 3] {
        let permit = hold(&limiter, 500).await;
        permit.settle(used);
        until_held(&limiter, 0, 800 - used).await;
    }
    for left in (700..797).rev() {
        assert_eq!(limiter.check("alice").await.unwrap().remaining(), left);
    }
    let denied = limiter.check("alice").cost(701).await.unwrap();
    assert!(!denied.is_allowed() && denied.retry_after().is_some());
}

#[tokio::test]
async fn the_end_of_a_permit_keeps_what_a_changed_quota_has_counted() {
    let server = RedisServer::start();
    let [store, direct] =
        [support::forgetful_store(&server).await, support::forgetful_store(&server).await];
    for algorithm in ALGORITHMS {
        let name = format!("changed-{algorithm}");
        let limiter = Limiter::new(&name, store.clone(), algorithm, Quota::per_second(10));
        let others = Limiter::new(&name, direct.clone(), algorithm, Quota::per_day(100));
        let [cancelled, settled] = [hold(&limiter, 2).await, hold(&limiter, 3).await];
        limiter.set_quota(Quota::per_day(100)).unwrap();
        limiter.spend("alice", 60).await.unwrap();
        cancelled.cancel();
        drop(limiter);
        settled.settle(1);
        until("both have ended", async || state(&others).await.held() == 0).await;
        // A bucket of ten had debts of its own, so that less may be left of it.
        let left = state(&others).await.remaining();
        assert!(left <= 39, "{algorithm}: {left} are left");
        assert!(time_to_live(&server, &others) > 60_000, "{algorithm}");
    }
}

#[tokio::test]
async fn units_of_a_late_answer_are_released_by_the_changed_quota() {
    let server = RedisServer::start();
    let direct = support::forgetful_store(&server).await;
    for algorithm in ALGORITHMS {
        let (proxy, recorder) = (Proxy::start(&server), Recorder::new());
        let config = support::config(&proxy.url()).deadline(Duration::from_millis(200));
        let store = support::connected(config.denial_ttl(Duration::ZERO)).await;
        let store = observed(store, recorder.clone());
        let name = format!("late-{algorithm}");
        let late = Limiter::new(&name, store.clone(), algorithm, Quota::per_minute(10));
        let others = Limiter::new(&name, direct.clone(), algorithm, Quota::per_day(100));
        eventually(async || late.peek("alice").await).await;
        proxy.hold_replies(true);
        late.try_acquire("alice", 2, Duration::from_secs(60)).await.unwrap_err();
        until("it is spent", async || state(&others).await.remaining() < 100).await;
        others.spend("alice", 60).await.unwrap();
        late.set_quota(Quota::per_day(100)).unwrap();
        proxy.hold_replies(false);
        until("it is released", async || !recorder.take_of("released").is_empty()).await;
        store.flush().await;
        assert_eq!(state(&others).await.remaining(), 40, "{algorithm}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_keeps_its_units_while_its_service_is_not_ready() {
    let server = RedisServer::start();
    let store = support::connected(clock::settable(&server)).await;
    let limiters = ALGORITHMS.map(|algorithm| limiter(&store, algorithm).hold_lifetime(RENEWED));
    let mut micros = 0;
    for (then, left) in [("ready", 2), ("failed", 10), ("dropped", 10)] {
        let mut requests = vec![];
        for limiter in &limiters {
            limiter.reset("alice").await.unwrap();
            let held = limiter.clone();
            let rule = move |_: &()| Ok(Charge::new(&held, "alice").estimate(8));
            let layer = RateLimitLayer::custom_by_rule(rule, |_, ()| false);
            let (service, mut handle) = mock::pair::<(), bool>();
            handle.allow(0);
            requests.push((tokio::spawn(layer.layer(service).oneshot(())), handle));
            until_held(limiter, 8, 2).await;
        }
        micros = renew(&server, &limiters, micros).await;
        for (limiter, (request, mut handle)) in limiters.iter().zip(requests) {
            assert_eq!(state(limiter).await.held(), 8, "{}, {then}", limiter.name());
            match then {
                "ready" => {
                    handle.allow(1);
                    handle.next_request().await.unwrap().1.send_response(true);
                }
                "failed" => handle.send_error("as intended"),
                _ => request.abort(),
            }
            drop(request.await);
            until_held(limiter, 0, left).await;
        }
    }
}

/// A connection that can keep back the commands for some keys.
#[derive(Clone)]
struct Gate {
    connection: MultiplexedConnection,
    is_open: watch::Sender<bool>,
    /// The commands that are kept back now.
    kept: Arc<AtomicU64>,
}

impl Gate {
    async fn new(server: &RedisServer) -> Self {
        let client = redis::Client::open(server.url()).unwrap();
        let connection = client.get_multiplexed_async_connection().await.unwrap();
        Self { connection, is_open: watch::Sender::new(true), kept: Arc::default() }
    }

    async fn pass(&self) {
        struct Kept<'a>(&'a AtomicU64);
        impl Drop for Kept<'_> {
            fn drop(&mut self) {
                self.0.fetch_sub(1, Ordering::SeqCst);
            }
        }
        self.kept.fetch_add(1, Ordering::SeqCst);
        let _kept = Kept(&self.kept);
        self.is_open.subscribe().wait_for(|is_open| *is_open).await.unwrap();
    }

    fn kept(&self) -> u64 {
        self.kept.load(Ordering::SeqCst)
    }
}

impl ConnectionLike for Gate {
    fn req_packed_command<'a>(&'a mut self, command: &'a Cmd) -> RedisFuture<'a, Value> {
        let command_text = command.get_packed_command();
        let is_kept = command_text.windows(SLOW.len()).any(|part| part == SLOW.as_bytes());
        Box::pin(async move {
            if is_kept {
                self.pass().await;
            }
            self.connection.req_packed_command(command).await
        })
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        commands: &'a Pipeline,
        offset: usize,
        count: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        self.connection.req_packed_commands(commands, offset, count)
    }

    fn get_db(&self) -> i64 {
        self.connection.get_db()
    }
}

/// The key whose commands a [`Gate`] keeps back.
const SLOW: &str = "slow-key";

/// Holds and returns a unit of another key than the slow one, until the server knows of it.
async fn use_other_key(limiter: &Limiter) {
    drop(limiter.hold("fast", 1).await.unwrap().admitted().unwrap());
    until("the other key is free", async || limiter.peek("fast").await.unwrap().held() == 0).await;
}

#[tokio::test]
async fn a_slow_call_does_not_delay_the_ends_of_other_keys() {
    let server = RedisServer::start();
    let gate = Gate::new(&server).await;
    let store = RedisStore::from_connection(gate.clone());
    // No hold expires meanwhile.
    let places = shared_streams(&store).hold_lifetime(600 * LIFETIME);
    for _ in 0..10 {
        let permit = places.hold(SLOW, 1).await.unwrap().admitted().unwrap();
        gate.is_open.send_replace(false);
        drop(permit);
        until("its end is sent", async || gate.kept() == 1).await;
        use_other_key(&places).await;
        let is_still_kept = gate.kept() == 1;
        gate.is_open.send_replace(true);
        until("it is over", async || gate.kept() == 0).await;
        // Otherwise the machine was busy: a call waits for a second.
        if is_still_kept {
            return;
        }
    }
    panic!("the end of the other key waits for that of the slow one");
}

/// Nothing else wakes the task that renews: there is one permit, and no request.
#[tokio::test]
async fn a_permit_whose_renewals_are_answered_late_does_not_expire() {
    let server = RedisServer::start();
    let gate = Gate::new(&server).await;
    let store = RedisStore::from_connection(gate.clone());
    // Shorter than the second after which a renewal without an answer is repeated.
    let places = shared_streams(&store).hold_lifetime(2 * LIFETIME);
    for _ in 0..20 {
        let permit = places.hold(SLOW, 1).await.unwrap().admitted().unwrap();
        let is_renewed = async || gate.kept() == 1 || permit.is_expired();
        let until_renewed = async || until("it is renewed", &is_renewed).await;
        for _ in 0..3 {
            gate.is_open.send_replace(false);
            until_renewed().await;
            tokio::time::sleep(LIFETIME / 8).await; // of a real server
            gate.is_open.send_replace(true);
            until("the renewal is sent", async || gate.kept() == 0).await;
        }
        gate.is_open.send_replace(false);
        until_renewed().await;
        let is_expired = permit.is_expired();
        gate.is_open.send_replace(true);
        // Otherwise the machine was busy.
        if !is_expired {
            return;
        }
    }
    panic!("the next renewal comes too late");
}

#[tokio::test]
async fn a_flush_waits_for_the_answers_to_requests_that_have_gone() {
    let server = RedisServer::start();
    let gate = Gate::new(&server).await;
    let store = RedisStore::from_connection(gate.clone());
    let [tokens, others] =
        [Algorithm::FixedWindow, Algorithm::SlidingLog].map(|algorithm| limiter(&store, algorithm));
    let both = Charge::new(&tokens, SLOW).cost(1).also(&others).cost(1);
    let wait = Duration::from_secs(86_400);
    gate.is_open.send_replace(false);
    // One is dropped, and two fail at their deadlines.
    let dropped = tokens.reserve(SLOW, 8, wait);
    tokio::select! {
        biased;
        _ = dropped => panic!("it has no answer"),
        () = until("it is sent", async || gate.kept() == 1) => {}
    }
    tokens.hold(SLOW, 1).await.unwrap_err();
    both.check().max_wait(wait).await.unwrap_err();
    let mut flush = pin!(store.flush());
    tokio::select! {
        biased;
        () = &mut flush => panic!("it does not wait"),
        () = tokio::task::yield_now() => {}
    }
    gate.is_open.send_replace(true);
    flush.await;
    for limiter in [tokens, others] {
        let state = limiter.peek(SLOW).await.unwrap();
        assert_eq!((state.held(), state.remaining()), (0, 10), "{}", limiter.name());
    }
}

/// The most calls under way at a server.
const MAX_CALLS: usize = 16;

#[tokio::test]
async fn the_end_of_a_runtime_loses_no_end() {
    let server = RedisServer::start();
    let gate = Gate::new(&server).await;
    let recorder = Recorder::new();
    let store = observed(RedisStore::from_connection(gate.clone()), recorder.clone());
    let quota = Quota::concurrent(MAX_CALLS as u64 + 2);
    let places = Limiter::new("places", store, Algorithm::concurrency(), quota);
    let sending = other_runtime();
    let of_sending = places.clone();
    let permits = sending.spawn(async move {
        let mut permits = vec![];
        for key in [SLOW; MAX_CALLS].into_iter().chain(["fast"]) {
            permits.push(of_sending.hold(key, 1).await.unwrap().admitted().unwrap());
        }
        permits
    });
    let mut permits = permits.await.unwrap();
    let fast = permits.pop();
    let _other = places.hold("other", 1).await.unwrap().admitted().unwrap();
    gate.is_open.send_replace(false);
    for (sent, permit) in (1..).zip(permits) {
        drop(permit);
        until("its end is sent", async || gate.kept() == sent).await;
    }
    drop(fast); // there is no room for a call
    assert_eq!(places.peek("fast").await.unwrap().held(), 1);
    sending.shutdown_background();
    gate.is_open.send_replace(true);
    for key in ["fast", SLOW] {
        let is_free = async || places.peek(key).await.unwrap().held() == 0;
        until("the end is sent", is_free).await;
    }
    assert_eq!(recorder.take_of("hold unsettled"), [""; 0]);
}

/// Takes all places, reloads another algorithm before the answer arrives, and the first one again.
#[tokio::test]
async fn places_that_are_taken_during_a_reload_are_returned() {
    let limits = |text: &str| toml::from_str::<Limits>(text).unwrap();
    let places = limits("places = { algorithm = 'concurrency', quota = '5 concurrent' }");
    let log = limits("places = { algorithm = 'sliding-log', quota = '5/h' }");
    let server = RedisServer::start();
    let gate = Gate::new(&server).await;
    let redis = RedisStore::from_connection(gate.clone());
    for store in [redis.into_any(), MemoryStore::new().into_any()] {
        let limiters = places.limiters(&store).unwrap();
        let limiter = limiters.get("places").unwrap();
        gate.is_open.send_replace(false);
        let holds: Vec<_> = (0..5)
            .map(|_| {
                let limiter = limiter.clone();
                tokio::spawn(
                    async move { limiter.hold(SLOW, 1).await.unwrap().admitted().unwrap() },
                )
            })
            .collect();
        let is_sent = async || gate.kept() > 0 || holds.iter().all(|hold| hold.is_finished());
        until("they are sent", is_sent).await;
        limiters.reload(&log).unwrap();
        gate.is_open.send_replace(true);
        let mut permits = vec![];
        for hold in holds {
            permits.push(hold.await.unwrap());
        }
        limiters.reload(&places).unwrap();
        assert_eq!(limiter.peek(SLOW).await.unwrap().held(), 5);
        drop(permits);
        store.flush().await;
        assert_eq!(limiter.peek(SLOW).await.unwrap().held(), 0, "{store:?}");
    }
}

/// The algorithm of the decision is not that of the limiter when the units are returned.
#[tokio::test]
async fn a_permit_that_ends_between_two_reloads_returns_its_units() {
    let limits = |text: &str| toml::from_str::<Limits>(text).unwrap();
    let window = limits("calls = { algorithm = 'fixed-window', quota = '5/h' }");
    let bucket = limits("calls = { algorithm = 'token-bucket', quota = '5/h' }");
    let server = RedisServer::start();
    let redis = support::forgetful_store(&server).await;
    for store in [redis.into_any(), MemoryStore::new().into_any()] {
        let limiters = window.limiters(&store).unwrap();
        let limiter = limiters.get("calls").unwrap();
        let held = hold(&limiter, 2).await;
        limiters.reload(&bucket).unwrap();
        held.cancel();
        store.flush().await;
        limiters.reload(&window).unwrap();
        let state = state(&limiter).await;
        assert_eq!((state.held(), state.remaining()), (0, 5), "{store:?}");
    }
}

#[tokio::test]
async fn a_permit_that_ends_during_its_renewal_returns_its_units() {
    let server = RedisServer::start();
    let gate = Gate::new(&server).await;
    let places = shared_streams(&RedisStore::from_connection(gate.clone()));
    let permit = places.hold(SLOW, 1).await.unwrap().admitted().unwrap();
    gate.is_open.send_replace(false);
    until("it is renewed", async || gate.kept() == 1).await;
    drop(permit);
    for _ in 0..3 {
        use_other_key(&places).await;
        assert!(gate.kept() <= 1, "the end is sent before the answer to the renewal");
    }
    gate.is_open.send_replace(true);
    until("it is free", async || places.peek(SLOW).await.unwrap().held() == 0).await;
}

/// Set for the process that is killed: the URL of the server.
const KILLED: &str = "TOWER_RATELIMIT_KILLED";

const SHARED_LIMIT: u64 = 800;

/// Holds and settles until nothing is left, and nothing is held. `report` is called with the units
/// before any are used, and with those that were used before they are settled.
async fn spend_all(limiter: Limiter, report: impl Fn(u64, Option<u64>)) {
    let mut units = 1;
    loop {
        if let Admission::Admitted(permit) = limiter.hold("alice", units).await.unwrap() {
            report(units, None);
            // Some live for several lifetimes.
            let millis = if fastrand::u8(..20) == 0 { 1_000 } else { fastrand::u64(..20) };
            tokio::time::sleep(Duration::from_millis(millis)).await;
            let used = fastrand::u64(..=units);
            report(units, Some(used));
            permit.settle(used);
            units = fastrand::u64(1..10);
        } else if (state(&limiter).await.held(), state(&limiter).await.remaining()) == (0, 0) {
            return;
        } else {
            units = 1;
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

fn shared_limiters(store: &RedisStore) -> [Limiter; 4] {
    let limiter = |algorithm| {
        let name = format!("shared-{algorithm}");
        let limiter = Limiter::new(&name, store.clone(), algorithm, Quota::per_day(SHARED_LIMIT));
        limiter.hold_lifetime(LIFETIME)
    };
    ALGORITHMS.map(limiter)
}

fn shared_streams(store: &RedisStore) -> Limiter {
    let (algorithm, quota) = (Algorithm::concurrency(), Quota::concurrent(10));
    Limiter::new("shared-streams", store.clone(), algorithm, quota).hold_lifetime(RENEWED)
}

/// The process that is killed prints a line for each hold, and for each end.
async fn spend_until_killed(url: &str) {
    let store = support::connected(support::config(url).denial_ttl(Duration::ZERO)).await;
    let _streams = hold(&shared_streams(&store), 9).await;
    let mut tasks = JoinSet::new();
    for (index, limiter) in shared_limiters(&store).into_iter().enumerate() {
        for _ in 0..5 {
            tasks.spawn(spend_all(limiter.clone(), move |units, used| match used {
                None => println!("\nheld {index} {units} 0"),
                Some(used) => println!("\nended {index} {units} {used}"),
            }));
        }
    }
    tasks.join_all().await;
    future::pending().await
}

/// The units that a process may have used: those that were settled, and those that it held.
fn most_used(lines: &[String], index: usize) -> u64 {
    let mut used = 0;
    for line in lines {
        let words: Vec<_> = line.split(' ').collect();
        let [what, of, numbers @ ..] = &*words else { continue };
        let [units, settled] = numbers else { continue };
        let number = |text: &&str| text.parse::<u64>().unwrap();
        match *what {
            _ if *of != index.to_string() => {}
            "held" => used += number(units),
            "ended" => used = used + number(settled) - number(units),
            _ => {}
        }
    }
    used
}

#[tokio::test]
async fn a_process_that_is_killed_exceeds_no_quota_and_frees_its_units() {
    if let Ok(url) = std::env::var(KILLED) {
        return spend_until_killed(&url).await; // the other process
    }
    let server = RedisServer::start();
    let this_test = "holds::a_process_that_is_killed_exceeds_no_quota_and_frees_its_units";
    let mut process = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", this_test, "--nocapture"])
        .env(KILLED, server.url())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut output = BufReader::new(process.stdout.take().unwrap()).lines();
    let mut lines = vec![];
    while lines.len() < 500 {
        lines.push(output.next_line().await.unwrap().expect("the other process runs"));
    }
    let store = support::forgetful_store(&server).await;
    let limiters = shared_limiters(&store);
    let used: [_; 4] = array::from_fn(|_| Arc::new(AtomicU64::new(0)));
    let mut tasks = JoinSet::new();
    for (limiter, used) in limiters.iter().zip(&used) {
        for _ in 0..5 {
            let used = used.clone();
            let report = move |_, ended: Option<u64>| {
                used.fetch_add(ended.unwrap_or(0), Ordering::Relaxed);
            };
            tasks.spawn(spend_all(limiter.clone(), report));
        }
    }
    while lines.len() < 1_000 {
        lines.push(output.next_line().await.unwrap().expect("the other process runs"));
    }
    let streams = shared_streams(&store);
    assert!(!streams.hold("alice", 2).await.unwrap().is_admitted(), "nine of ten are in flight");
    process.kill().await.unwrap();
    while let Some(line) = output.next_line().await.unwrap() {
        lines.push(line);
    }
    // They end when nothing is held any more: no unit of the other process is.
    tasks.join_all().await;
    let permit = streams.hold("alice", 10).max_wait(Duration::from_secs(60)).await;
    permit.unwrap().admitted().unwrap().cancel();
    for (index, used) in used.iter().enumerate() {
        let used = [used.load(Ordering::Relaxed), most_used(&lines, index)];
        assert!(used.iter().sum::<u64>() <= SHARED_LIMIT, "{}: {used:?}", ALGORITHMS[index]);
    }
}
