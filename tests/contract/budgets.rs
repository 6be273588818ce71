//! Budgets of units whose use is known later, such as tokens of a language model, in ten situations
//! in which limiters have leaked units, counted them twice or let too many through. What a permit
//! does otherwise is in `permit.rs`.

use std::{future::pending, thread, time::Duration};

use tokio::{
    runtime,
    sync::{mpsc, oneshot},
    time::timeout,
};
use tower_ratelimit::{
    Admission, Algorithm, Charge, Error, Limiter, MemoryStore, Permit, Quota,
    config::Limit,
    store::{AnyStore, Store},
};

use crate::support::{self, clock, load::until, proxy::Proxy, server::RedisServer};

/// The shortest lifetime of a hold.
const LIFETIME: Duration = Duration::from_millis(100);
/// A lifetime whose first renewal is due after half a second.
const RENEWED: Duration = Duration::from_secs(4);
const HOUR: Duration = Duration::from_secs(3_600);

/// The algorithms that can hold, in the forms that differ in what they store.
const ALGORITHMS: [Algorithm; 4] = [
    Algorithm::FixedWindow,
    Algorithm::SlidingLog,
    Algorithm::sliding_window(),
    Algorithm::token_bucket(),
];

/// A store in memory, and one in Redis that asks the server for each decision.
async fn stores(server: &RedisServer) -> [AnyStore; 2] {
    [MemoryStore::new().into_any(), support::forgetful_store(server).await.into_any()]
}

/// Limiters of 1,000 units per day, one for each store and algorithm.
async fn limiters(server: &RedisServer) -> Vec<Limiter> {
    let stores = stores(server).await;
    let of_store = |store: &AnyStore| ALGORITHMS.map(|algorithm| limiter(store, algorithm));
    stores.iter().flat_map(of_store).collect()
}

fn limiter(store: &AnyStore, algorithm: Algorithm) -> Limiter {
    Limiter::new(algorithm.name(), store.clone(), algorithm, Quota::per_day(1_000))
}

async fn hold(limiter: &Limiter, n: u64) -> Permit {
    limiter.hold("alice", n).await.unwrap().admitted().expect("the units are left")
}

/// Returns the units that are left, and those that are held.
async fn state(limiter: &Limiter) -> (u64, u64) {
    let state = limiter.peek("alice").await.unwrap();
    (state.remaining(), state.held())
}

/// Waits until so many units are left and held: over Redis, permits end in the background.
async fn until_state(limiter: &Limiter, left: u64, held: u64) {
    let what = format!("{}: {left} are left and {held} held", limiter.name());
    until(&what, async || state(limiter).await == (left, held)).await;
}

/// A stream of an answer, which settles what it has sent, however it ends.
struct Stream {
    permit: Option<Permit>,
    sent: u64,
}

impl Stream {
    fn new(permit: Permit) -> Self {
        Self { permit: Some(permit), sent: 0 }
    }

    fn send(&mut self, tokens: u64) {
        self.sent += tokens;
    }

    fn end(&mut self) {
        if let Some(permit) = self.permit.take() {
            permit.settle(self.sent);
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.end();
    }
}

#[tokio::test]
async fn a_stream_that_the_client_cancels_costs_what_was_sent_and_returns_the_rest() {
    let server = RedisServer::start();
    for limiter in limiters(&server).await {
        let (sent, mut received) = mpsc::channel(1);
        let mut stream = Stream::new(hold(&limiter, 500).await);
        let task = tokio::spawn(async move {
            loop {
                stream.send(10);
                if sent.send(10).await.is_err() {
                    return; // the client has gone, and `stream` is dropped
                }
            }
        });
        assert_eq!(received.recv().await, Some(10));
        until_state(&limiter, 500, 500).await;
        task.abort();
        assert!(task.await.unwrap_err().is_cancelled());
        until(limiter.name(), async || {
            let (left, held) = state(&limiter).await;
            // Up to three chunks: one was received, one is in the channel, one waits for it.
            held == 0 && (970..=990).contains(&left)
        })
        .await;
    }
}

#[tokio::test]
async fn a_stream_that_times_out_is_settled_once_by_the_first_who_knows() {
    let server = RedisServer::start();
    for limiter in limiters(&server).await {
        // The timeout drops the stream.
        let mut stream = Stream::new(hold(&limiter, 500).await);
        let answer = async move {
            stream.send(120);
            pending::<()>().await;
            stream.end();
        };
        assert!(timeout(Duration::from_millis(1), answer).await.is_err());
        until_state(&limiter, 880, 0).await;

        // The usage was seen before the timeout: the drop of the stream adds nothing.
        let mut stream = Stream::new(hold(&limiter, 500).await);
        let answer = async move {
            stream.send(80);
            stream.end();
            stream.send(1);
            pending::<()>().await;
        };
        assert!(timeout(Duration::from_millis(1), answer).await.is_err());
        until_state(&limiter, 800, 0).await;
    }
}

#[tokio::test]
async fn a_retried_request_costs_what_its_attempts_used_and_no_estimate_twice() {
    let server = RedisServer::start();
    for limiter in limiters(&server).await {
        // Each attempt holds for itself. The whole quota suffices for one at a time.
        for _ in 0..5 {
            hold(&limiter, 1_000).await.cancel();
            until_state(&limiter, 1_000, 0).await;
        }
        hold(&limiter, 1_000).await.settle(130);
        until_state(&limiter, 870, 0).await;

        // All attempts share a permit: a failed one has used its input.
        let permit = hold(&limiter, 600).await;
        let used: u64 = [40, 40, 120].iter().sum();
        permit.settle(used);
        until_state(&limiter, 670, 0).await;
    }
}

#[tokio::test]
async fn the_report_of_the_usage_can_be_retried_without_counting_it_twice() {
    let server = RedisServer::start();
    for limiter in limiters(&server).await {
        let mut permit = hold(&limiter, 600).await;
        permit.settle_for(limiter.name(), 100).unwrap();
        let error = permit.settle_for(limiter.name(), 100).unwrap_err();
        assert!(matches!(error, Error::HoldEnded { .. }), "{error}");
        drop(permit);
        until_state(&limiter, 900, 0).await;
    }
}

/// Holds units in a process that crashes: nothing that it sends arrives any more.
async fn hold_and_crash(
    server: &RedisServer,
    algorithm: Algorithm,
    quota: Quota,
    n: u64,
) -> (Permit, Proxy) {
    let proxy = Proxy::start(server);
    let store = support::connected(support::config(&proxy.url())).await;
    let limiter = Limiter::new("tokens", store, algorithm, quota).hold_lifetime(LIFETIME);
    let permit = hold(&limiter, n).await;
    proxy.drop_all(true);
    (permit, proxy)
}

#[tokio::test]
async fn the_units_of_a_process_that_crashes_count_as_used_after_one_lifetime_and_return() {
    let server = RedisServer::start();
    for algorithm in ALGORITHMS {
        let store = support::forgetful_store(&server).await;
        let quota = Quota::new(1_000, Duration::from_millis(500));
        let _crashed = hold_and_crash(&server, algorithm, quota, 1_000).await;
        let limiter = Limiter::new("tokens", store, algorithm, quota);
        // They expire, and age from then on as all others do. Not a unit leaks.
        until_state(&limiter, 1_000, 0).await;
        hold(&limiter, 1_000).await.cancel();
    }
}

#[tokio::test]
async fn the_units_of_a_process_that_crashes_are_not_free_before_they_count_as_used() {
    let server = RedisServer::start();
    for algorithm in ALGORITHMS {
        let store = support::forgetful_store(&server).await;
        let quota = Quota::per_day(1_000);
        let _crashed = hold_and_crash(&server, algorithm, quota, 600).await;
        let limiter = Limiter::new("tokens", store, algorithm, quota);
        until(algorithm.name(), async || {
            let denied = limiter.hold("alice", 500).await.unwrap().into_result().unwrap_err();
            assert_eq!(denied.remaining(), 400, "{algorithm}");
            state(&limiter).await == (400, 0)
        })
        .await;
        limiter.reset("alice").await.unwrap();
    }
}

fn flush(server: &RedisServer) {
    redis::cmd("FLUSHALL").exec(&mut server.connection()).expect("the server runs");
}

/// The clock of the server stands still, so that no hold expires there. The lifetime is long,
/// because a store does not send the end of a hold that has expired by its own clock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_redis_has_lost_its_data_the_next_renewal_holds_the_units_again() {
    let mut server = RedisServer::start();
    let store = support::connected(clock::settable(&server)).await.into_any();
    let limiters = ALGORITHMS.map(|algorithm| limiter(&store, algorithm).hold_lifetime(RENEWED));
    for loss in ["a flush", "a restart"] {
        let mut permits = vec![];
        for limiter in &limiters {
            assert!(limiter.check("alice").cost(300).await.unwrap().is_allowed());
            permits.push(hold(limiter, 600).await);
        }
        match loss {
            "a flush" => flush(&server),
            _ => {
                server.kill();
                server.restart();
            }
        }
        for (limiter, permit) in limiters.iter().zip(permits) {
            until(loss, async || limiter.peek("alice").await.is_ok()).await;
            // What was spent is lost with the data. What is held is not.
            until_state(limiter, 400, 600).await;
            let denied = limiter.hold("alice", 401).await.unwrap().into_result().unwrap_err();
            assert_eq!(denied.remaining(), 400, "{loss}: {}", limiter.name());
            permit.settle(200);
            until_state(limiter, 800, 0).await;
        }
        flush(&server);
    }
}

#[tokio::test]
async fn denied_requests_do_not_extend_the_life_of_a_key_and_traffic_not_that_of_a_lost_hold() {
    let server = RedisServer::start();
    let store = support::forgetful_store(&server).await;
    for algorithm in ALGORITHMS {
        let quota = Quota::per_day(1_000);
        let _crashed = hold_and_crash(&server, algorithm, quota, 900).await;
        let limiter = Limiter::new("tokens", store.clone(), algorithm, quota);
        let key = format!("ratelimit:tokens:{}:{{alice}}", algorithm.name());
        let ttl = || -> i64 {
            redis::cmd("PTTL").arg(&key).query(&mut server.connection()).expect("the server runs")
        };
        let before = ttl();
        assert!(before > 0, "{algorithm}: {before}");
        for _ in 0..20 {
            let denied = limiter.hold("alice", 101).await.unwrap();
            assert_eq!(denied.into_result().unwrap_err().remaining(), 100);
        }
        assert!((1..=before).contains(&ttl()), "{algorithm}: {} of {before}", ttl());

        // Others hold and return all the time. Each of them changes the key.
        until(algorithm.name(), async || {
            if let Admission::Admitted(permit) = limiter.hold("alice", 1).await.unwrap() {
                permit.cancel();
            }
            state(&limiter).await.1 < 900
        })
        .await;
        until_state(&limiter, 100, 0).await;
        limiter.reset("alice").await.unwrap();
        assert_eq!(ttl(), -2, "{algorithm}: the key exists");
    }
}

#[tokio::test]
async fn a_rule_that_changes_while_units_are_held_neither_frees_nor_keeps_them() {
    let server = RedisServer::start();
    for limiter in limiters(&server).await {
        let permits = [hold(&limiter, 600).await, hold(&limiter, 300).await];
        limiter.set_quota(Quota::per_day(500)).unwrap();
        // More is held than the new rule grants at all.
        assert!(!limiter.check("alice").await.unwrap().is_allowed(), "{}", limiter.name());
        let [first, second] = permits;
        first.settle(100);
        until_state(&limiter, 100, 300).await;
        limiter.set_quota(Quota::per_day(2_000)).unwrap();
        assert_eq!(state(&limiter).await, (1_600, 300), "{}", limiter.name());
        second.cancel();
        until_state(&limiter, 1_900, 0).await;
    }
}

#[tokio::test]
async fn a_client_whose_plan_changes_keeps_what_it_holds_and_one_account() {
    let server = RedisServer::start();
    for free in limiters(&server).await {
        let pro = free.with_quota(Quota::per_day(10_000)).unwrap();
        let permit = hold(&free, 700).await;
        until_state(&pro, 9_300, 700).await;
        assert!(!free.check("alice").cost(301).await.unwrap().is_allowed());
        assert!(pro.check("alice").cost(1_000).await.unwrap().is_allowed());
        permit.settle(500);
        until_state(&pro, 8_500, 0).await;
    }
}

#[tokio::test]
async fn a_permit_that_outlives_its_algorithm_returns_nothing_to_the_next() {
    let server = RedisServer::start();
    for limiter in limiters(&server).await {
        let quota = limiter.quota();
        let other = match limiter.algorithm() {
            Algorithm::SlidingLog => Algorithm::FixedWindow,
            _ => Algorithm::SlidingLog,
        };
        let algorithm = limiter.algorithm();
        let change_to = |to| Limit::try_new(to, quota).unwrap().apply_to(&limiter);
        let permit = hold(&limiter, 600).await;
        change_to(other);
        assert!(limiter.check("alice").cost(900).await.unwrap().is_allowed());
        permit.cancel();
        change_to(algorithm);
        until_state(&limiter, 1_000, 0).await; // the permit has ended
        change_to(other);
        assert_eq!(state(&limiter).await, (100, 0), "{}", limiter.name());
    }
}

#[tokio::test]
async fn a_request_that_one_limit_denies_spends_and_holds_nothing_of_the_others() {
    let server = RedisServer::start();
    for store in stores(&server).await {
        let limiter =
            |name, algorithm| Limiter::new(name, store.clone(), algorithm, Quota::per_day(1_000));
        let of_key = [
            limiter("key-requests", Algorithm::SlidingLog),
            limiter("key-tokens", Algorithm::token_bucket()),
            limiter("key-money", Algorithm::FixedWindow),
        ];
        let of_team = [
            limiter("team-requests", Algorithm::FixedWindow),
            limiter("team-tokens", Algorithm::sliding_window()),
            limiter("team-money", Algorithm::token_bucket()),
        ];
        let part = |key, [requests, tokens, money]: &[Limiter; 3]| {
            Charge::new(requests, key).also(tokens).estimate(20).also(money).estimate(400)
        };
        let charge = part("alice", &of_key).and(part("team", &of_team));
        let all =
            of_key.iter().map(|it| (it, "alice")).chain(of_team.iter().map(|it| (it, "team")));
        let states = async || {
            let mut states = vec![];
            for (limiter, key) in all.clone() {
                let state = limiter.peek(key).await.unwrap();
                states.push((limiter.name(), state.remaining(), state.held()));
            }
            states
        };
        for (denying, key) in all.clone() {
            denying.spend(key, 999).await.unwrap();
            if denying.name().ends_with("requests") {
                denying.spend(key, 1).await.unwrap();
            }
            let before = states().await;
            for _ in 0..3 {
                let denied = charge.hold().await.unwrap().into_result().unwrap_err();
                assert_eq!(denied.limiter(), denying.name());
            }
            assert_eq!(states().await, before, "denied by {}", denying.name());
            denying.reset(key).await.unwrap();
        }
        let permit = charge.hold().await.unwrap().admitted().unwrap();
        permit.cancel();
        until("all but two requests are back", async || {
            states().await.iter().all(|(name, left, held)| {
                let spent = u64::from(name.ends_with("requests"));
                (*left, *held) == (1_000 - spent, 0)
            })
        })
        .await;
    }
}

#[tokio::test]
async fn a_response_without_usage_costs_its_estimate() {
    let server = RedisServer::start();
    for limiter in limiters(&server).await {
        drop(hold(&limiter, 400).await);
        until_state(&limiter, 600, 0).await;
        // A task that panics drops its permit, too.
        let permit = hold(&limiter, 100).await;
        let failed = tokio::spawn(async move {
            let _permit = permit;
            std::panic::resume_unwind(Box::new("no usage"));
        });
        assert!(failed.await.unwrap_err().is_panic());
        until_state(&limiter, 500, 0).await;
    }
}

/// Runs a process whose clock is an hour ahead. It holds 500 units while `is_held` is open, then
/// settles 200.
fn process_ahead(url: &str, held: oneshot::Sender<()>, end: oneshot::Receiver<()>) {
    let config = support::config(url);
    let runtime = runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        tokio::time::pause();
        tokio::time::advance(HOUR).await;
        tokio::time::resume();
        let limiter = limiter(&support::connected(config).await.into_any(), ALGORITHMS[3]);
        let permit = hold(&limiter, 500).await;
        held.send(()).unwrap();
        end.await.unwrap();
        permit.settle(200);
        until_state(&limiter, 700, 0).await;
    });
}

#[tokio::test]
async fn a_process_whose_clock_is_an_hour_ahead_changes_nothing() {
    let server = RedisServer::start();
    let store = support::forgetful_store(&server).await.into_any();
    let limiter = limiter(&store, ALGORITHMS[3]);
    let (held, is_held) = oneshot::channel();
    let (end, is_ended) = oneshot::channel();
    let url = server.url();
    let ahead = thread::spawn(move || process_ahead(&url, held, is_ended));
    is_held.await.unwrap();
    let permit = hold(&limiter, 400).await;
    assert_eq!(state(&limiter).await, (100, 900));
    assert_eq!(
        limiter.hold("alice", 101).await.unwrap().into_result().unwrap_err().remaining(),
        100
    );
    permit.settle(100);
    until_state(&limiter, 400, 500).await;
    end.send(()).unwrap();
    until("the process has ended", async || ahead.is_finished()).await;
    ahead.join().unwrap();
    assert_eq!(state(&limiter).await, (700, 0));
}

#[tokio::test]
async fn a_clock_of_the_server_that_steps_back_frees_nothing_and_keeps_nothing() {
    let server = RedisServer::start();
    let store = support::connected(clock::settable(&server)).await.into_any();
    // Longer than a hold lives without a renewal; shorter than a token bucket needs for a unit.
    const STEP: i64 = 80_000_000;
    for algorithm in ALGORITHMS {
        clock::set(&server, 0);
        let limiter = limiter(&store, algorithm);
        let [first, second] = [hold(&limiter, 600).await, hold(&limiter, 300).await];
        clock::set(&server, -STEP);
        assert_eq!(state(&limiter).await, (100, 900), "{algorithm}");
        assert_eq!(
            limiter.hold("alice", 101).await.unwrap().into_result().unwrap_err().remaining(),
            100
        );
        first.settle(100);
        until_state(&limiter, 600, 300).await;
        let third = hold(&limiter, 600).await;
        second.cancel();
        third.cancel();
        until_state(&limiter, 900, 0).await;
        // As it steps forward again, holds expire early: they count as used, so nothing is over.
        let fourth = hold(&limiter, 500).await;
        clock::set(&server, 0);
        until_state(&limiter, 400, 0).await;
        fourth.cancel();
        let fifth = hold(&limiter, 400).await;
        fifth.cancel();
        until_state(&limiter, 400, 0).await;
    }
}
