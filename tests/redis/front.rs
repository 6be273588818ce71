//! Checks that go to Redis together: order, costs, deadlines, and failures of one check or of all.

use std::{
    future::poll_fn,
    sync::{
        Arc, Barrier,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    task::Poll,
    thread,
    time::{Duration, Instant},
};

use tokio::{runtime, task::JoinSet};
use tower_ratelimit::{Algorithm, Decision, Error, Limiter, Quota, RedisStore, Source};

use crate::support::{
    ALGORITHMS, cluster::Cluster, load::until, proxy::Proxy, redis_store, server::RedisServer,
    with_long_deadline,
};

async fn store(server: &RedisServer) -> RedisStore {
    with_long_deadline(redis_store(server).await)
}

/// Checks at one time, each with its key and cost. Returns the decisions in the same order.
async fn check_all(limiter: &Limiter, checks: &[(String, u32)]) -> Vec<Result<Decision, Error>> {
    let mut tasks = JoinSet::new();
    for (index, (key, cost)) in checks.iter().cloned().enumerate() {
        let limiter = limiter.clone();
        tasks.spawn(async move { (index, limiter.check_n(key, cost).await) });
    }
    let mut decisions = tasks.join_all().await;
    decisions.sort_by_key(|(index, _)| *index);
    decisions.into_iter().map(|(_, decision)| decision).collect()
}

fn of_many_keys(count: usize) -> Vec<(String, u32)> {
    (0..count).map(|i| (format!("key-{i}"), 1)).collect()
}

#[tokio::test]
async fn many_checks_are_few_calls_and_decided_as_if_each_came_alone() {
    let server = RedisServer::start();
    let store = store(&server).await;
    for algorithm in ALGORITHMS {
        let limiter =
            Limiter::named(algorithm.name(), store.clone(), algorithm, Quota::per_day(10));
        let _ = limiter.peek("key").await.unwrap(); // loads the script
        let before = server.calls("evalsha");
        // Of each key in this order: 4 and 5 are granted, 2 are not, 1 is.
        let costs = [4, 5, 2, 1, 1];
        let checks: Vec<_> =
            (0..500).map(|i| (format!("key-{}", i % 100), costs[i / 100])).collect();
        let decisions = check_all(&limiter, &checks).await;
        let calls = server.calls("evalsha") - before;
        assert!(calls <= 500 / 64 + 4, "{algorithm}: {calls} calls");
        for (i, decision) in decisions.iter().enumerate() {
            let (is_allowed, remaining) =
                [(true, 6), (true, 1), (false, 1), (true, 0), (false, 0)][i / 100];
            let decision = decision.as_ref().unwrap();
            assert_eq!(decision.is_allowed(), is_allowed, "{algorithm} {i}: {decision:?}");
            // The content of a leaky bucket leaves it one by one.
            if algorithm != Algorithm::LeakyBucket {
                assert_eq!(decision.remaining(), remaining, "{algorithm} {i}: {decision:?}");
            }
        }
    }
}

#[tokio::test]
async fn many_requests_at_once_are_decided_within_the_default_deadline() {
    const REQUESTS: usize = 2_000;
    let server = RedisServer::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let quota = Quota::per_day(REQUESTS as u32);
    let limiter = Limiter::new(store, Algorithm::token_bucket(), quota);
    let _ = limiter.peek("key").await.unwrap(); // loads the script
    let rounds = AtomicUsize::new(0);
    // The deadline is a time limit, which a busy machine can miss.
    until("each request is decided", async || {
        let round = rounds.fetch_add(1, Relaxed);
        let of_one_key = vec![(format!("hot-{round}"), 1); REQUESTS / 2];
        let of_many_keys = (0..REQUESTS / 2).map(|i| (format!("{round}-{i}"), 1));
        let checks: Vec<_> = of_one_key.into_iter().chain(of_many_keys).collect();
        let mut decisions = check_all(&limiter, &checks).await;
        decisions.retain(Result::is_ok);
        if decisions.len() < REQUESTS {
            return false;
        }
        for (i, decision) in decisions.into_iter().map(Result::unwrap).enumerate() {
            let spent = if i < REQUESTS / 2 { i + 1 } else { 1 };
            assert_eq!((decision.is_allowed(), decision.source()), (true, Source::Store));
            assert_eq!(decision.remaining() as usize, REQUESTS - spent);
        }
        true
    })
    .await;
}

#[tokio::test]
async fn a_check_that_is_dropped_before_its_call_spends_nothing() {
    let server = RedisServer::start();
    let limiter = Limiter::new(store(&server).await, Algorithm::FixedWindow, Quota::per_hour(9));
    let mut first = Box::pin(limiter.check("first"));
    let mut second = Box::pin(limiter.check("second"));
    poll_fn(|cx| {
        assert!(first.as_mut().poll(cx).is_pending() && second.as_mut().poll(cx).is_pending());
        Poll::Ready(())
    })
    .await;
    drop(second);
    assert!(first.await.unwrap().is_allowed());
    assert_eq!(limiter.peek("second").await.unwrap().remaining(), 9);
}

#[tokio::test]
async fn a_key_with_another_value_fails_no_other_check() {
    let server = RedisServer::start();
    let store = store(&server).await;
    for algorithm in ALGORITHMS {
        let limiter =
            Limiter::named(algorithm.name(), store.clone(), algorithm, Quota::per_hour(9));
        let _ = limiter.peek("key").await.unwrap();
        for (key, command, value) in [("key-3", "SET", "x"), ("key-5", "SADD", "x")] {
            let key = format!("ratelimit:{0}:{0}:{{{key}}}", algorithm.name());
            redis::cmd(command).arg(key).arg(value).exec(&mut server.connection()).unwrap();
        }
        let decisions = check_all(&limiter, &of_many_keys(50)).await;
        for (i, decision) in decisions.iter().enumerate() {
            assert_eq!(decision.is_err(), i == 3 || i == 5, "{algorithm} {i}: {decision:?}");
        }
        assert_eq!(limiter.peek("key-2").await.unwrap().remaining(), 8, "{algorithm}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_that_is_used_as_one_server_gets_calls_of_one_key() {
    let cluster = Cluster::start(1, false, &[]);
    let node = cluster.nodes().next().unwrap();
    let store = with_long_deadline(RedisStore::lazy(&node.url()).unwrap());
    let limiter = Limiter::new(store.clone(), Algorithm::token_bucket(), Quota::per_hour(9));
    for remaining in [8, 7] {
        for decision in check_all(&limiter, &of_many_keys(100)).await {
            assert_eq!(decision.unwrap().remaining(), remaining);
        }
    }
    let errors = store.health().errors;
    assert!((1..=4).contains(&errors), "{errors} calls were rejected");
}

#[tokio::test(flavor = "multi_thread")]
async fn each_check_fails_at_its_own_deadline_and_all_open_the_circuit() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server);
    let store = RedisStore::connect(&proxy.url()).await.unwrap();
    let limiter = |name, store: &RedisStore| {
        Limiter::named(name, store.clone(), Algorithm::FixedWindow, Quota::per_hour(9))
    };
    let observed = store.clone().deadline(Duration::from_millis(200));
    let quick = limiter("quick", &observed);
    let slow = limiter("slow", &store.deadline(Duration::from_secs(600)));
    assert!(slow.check("key").await.unwrap().is_allowed());
    assert!(quick.check("key").await.unwrap().is_allowed());
    proxy.hold_replies(true);
    let waits = tokio::spawn(async move { slow.check("key").await });
    for decision in check_all(&quick, &of_many_keys(300)).await {
        assert!(matches!(decision, Err(Error::Store(_))), "{decision:?}");
    }
    let health = observed.health();
    assert!(!health.is_available && health.timeouts + health.skipped == 300, "{health:?}");
    assert!(!waits.is_finished());
    proxy.hold_replies(false);
    assert!(waits.await.unwrap().unwrap().is_allowed());
    until("Redis is used again", async || quick.check("key").await.is_ok()).await;
}

#[test]
fn a_blocked_runtime_delays_no_check_in_another_one() {
    let server = RedisServer::start();
    let one = runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let two = runtime::Builder::new_current_thread().enable_all().build().unwrap();
    // The connection is in the second runtime.
    let store = two.block_on(store(&server));
    let limiter = Limiter::new(store, Algorithm::FixedWindow, Quota::per_hour(1_000));
    assert!(two.block_on(limiter.check("key")).unwrap().is_allowed());
    let (blocked, over) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
    let thread = {
        let (limiter, blocked, over) = (limiter.clone(), blocked.clone(), over.clone());
        thread::spawn(move || {
            one.block_on(async {
                let mut checks: Vec<_> = (0..10).map(|_| Box::pin(limiter.check("key"))).collect();
                poll_fn(|cx| {
                    let polled = checks.iter_mut().map(|check| check.as_mut().poll(cx));
                    assert!(polled.filter(Poll::is_pending).count() == 10);
                    Poll::Ready(())
                })
                .await;
                blocked.wait();
                over.wait(); // blocks the thread
                for check in checks {
                    assert!(check.await.unwrap().is_allowed());
                }
            });
        })
    };
    blocked.wait();
    let start = Instant::now();
    let decisions = two.block_on(check_all(&limiter, &of_many_keys(100)));
    assert!(decisions.iter().all(Result::is_ok), "after {:?}", start.elapsed());
    over.wait();
    // The first runtime needs the connection of the second one.
    while !thread.is_finished() {
        two.block_on(async { tokio::time::sleep(Duration::from_millis(1)).await });
    }
    thread.join().unwrap();
}
