//! Redis behind Sentinels: the master is followed when it changes.

mod support;

use std::{
    error::Error,
    time::{Duration, Instant},
};

use support::{
    load::{Load, Tasks, eventually, key, limiter, turn, until, until_decided, until_server},
    sentinel::Watched,
};
use tower_ratelimit::{Limiter, RedisStore};

fn store(watched: &Watched) -> RedisStore {
    RedisStore::sentinel(watched.sentinel_urls(), &watched.master_url()).unwrap()
}

/// With a deadline that a busy machine keeps, too.
fn patient(watched: &Watched) -> Limiter {
    limiter(&store(watched).deadline(Duration::from_secs(30)))
}

fn users(prefix: &str) -> Vec<String> {
    (0..30).map(|number| format!("{prefix}-{number}")).collect()
}

/// Uses up a quota, and waits until the replicas know.
async fn spend_all(watched: &Watched, limiter: &Limiter, user: &str) {
    while eventually(async || limiter.check(key(user)).await).await.is_allowed() {}
    until_server("the replicas have all", || watched.is_replicated()).await;
}

async fn followed(watched: &Watched, limiters: &[Limiter], users: &[String], fault: &str) {
    let start = Instant::now();
    let old = watched.servers[0].1;
    until_server("the Sentinels name another master", || {
        watched.master().is_some_and(|port| port != old)
    })
    .await;
    let promoted = start.elapsed();
    let _ = until_decided(limiters, users).await;
    println!("{fault}: another master after {promoted:?}, decided after {:?}", start.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_connects_once_the_sentinels_run_and_follows_when_the_master_is_killed() {
    let _turn = turn().await;
    let tasks = Tasks::count();
    let mut watched = Watched::start(None);
    let stores = [store(&watched), store(&watched)];
    let error = stores[0].ping().await.unwrap_err();
    assert!(error.source().is_some(), "{error:?}");
    watched.watch();
    for store in &stores {
        until("the store answers", async || store.ping().await.is_ok()).await;
    }
    let limiters = stores.each_ref().map(limiter);
    let patient = patient(&watched);
    spend_all(&watched, &patient, "spent").await;

    let users = users("user");
    let load = Load::start(&limiters, &users);
    tokio::time::sleep(Duration::from_secs(1)).await;
    watched.servers[0].0.kill();
    followed(&watched, &limiters, &users, "the master is killed").await;
    let answers = load.finish("the master is killed").await;
    assert!(users.iter().map(|user| answers.decided(user)).sum::<usize>() > 0);
    for limiter in limiters.iter().chain([&patient]) {
        assert!(!eventually(async || limiter.check(key("spent")).await).await.is_allowed());
    }
    drop((stores, limiters, patient));
    tasks.check().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_master_is_left_and_not_gone_back_to() {
    let _turn = turn().await;
    let tasks = Tasks::count();
    let mut watched = Watched::start(Some("secret"));
    watched.watch();
    let stores = [store(&watched), store(&watched)];
    let limiters = stores.each_ref().map(limiter);
    let idle = patient(&watched);
    let patient = patient(&watched);
    spend_all(&watched, &patient, "spent").await;
    let _ = eventually(async || idle.check(key("idle")).await).await;

    let early = users("early");
    let load = Load::start(&limiters, &early);
    tokio::time::sleep(Duration::from_secs(1)).await;
    watched.servers[0].0.freeze();
    followed(&watched, &limiters, &early, "the master is frozen").await;
    let _ = load.finish("the master is frozen").await;
    let fresh = limiter(&store(&watched).deadline(Duration::from_secs(30)));
    assert!(!eventually(async || fresh.check(key("spent")).await).await.is_allowed());

    let late = users("late");
    let master = watched.master();
    let load = Load::start(&limiters, &late);
    watched.servers[0].0.thaw();
    until_server("the old master is a replica", || !watched.is_master(0)).await;
    let took = until_decided(&limiters, &late).await;
    println!("the old master has become a replica: decided after {took:?}");
    let answers = load.finish("the old master comes back").await;
    if watched.master() == master {
        answers.check_counts(&fresh, &late).await;
    } // else the machine was so busy that there was another failover, in which counts can be lost

    until("one that asked nothing meanwhile counts where the others do", async || {
        let remaining = async |limiter: &Limiter| {
            let decision = eventually(async || limiter.check(key("new")).await).await;
            decision.remaining()
        };
        let before = remaining(&idle).await;
        remaining(&fresh).await + 1 == before
    })
    .await;
    drop((stores, limiters, idle, patient, fresh));
    tasks.check().await;
}

#[tokio::test]
async fn a_wrong_name_is_told() {
    let mut watched = Watched::start(None);
    watched.watch();
    let store = RedisStore::sentinel(watched.sentinel_urls(), "redis://other").unwrap();
    let error = store.ping().await.unwrap_err();
    let source = error.source().expect("a reason").to_string();
    assert!(source.contains("Sentinels") && source.contains("other"), "{source}");

    let none: [&str; 0] = [];
    assert!(RedisStore::sentinel(none, "redis://limits").is_err());
    assert!(RedisStore::sentinel(["redis://127.0.0.1"], "unix:///limits").is_err());
}
